"""Attention of packed sequences: of different lengths, one after the other, without padding."""

from tileloom.ops.attention.varlen.api import attention_varlen
from tileloom.ops.attention.varlen.reference import attention_varlen_reference

__all__ = ["attention_varlen", "attention_varlen_reference"]
