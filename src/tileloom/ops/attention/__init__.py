"""Memory-efficient attention."""

from tileloom.ops.attention import masks
from tileloom.ops.attention.api import attention
from tileloom.ops.attention.reference import attention_reference

__all__ = ["attention", "attention_reference", "masks"]
