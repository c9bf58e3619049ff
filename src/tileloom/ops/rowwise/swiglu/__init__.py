"""SwiGLU: the gated unit of feed-forward layers."""

from tileloom.ops.rowwise.swiglu.api import swiglu
from tileloom.ops.rowwise.swiglu.reference import swiglu_reference

__all__ = ["swiglu", "swiglu_reference"]
