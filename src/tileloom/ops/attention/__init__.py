"""Memory-efficient attention."""

from tileloom.ops.attention import masks
from tileloom.ops.attention.api import attention
from tileloom.ops.attention.reference import attention_reference
from tileloom.ops.attention.varlen import attention_varlen, attention_varlen_reference

__all__ = [
    "attention", "attention_reference", "attention_varlen", "attention_varlen_reference", "masks",
]  # fmt: skip
