"""Operators on the rows of a tensor `[..., n]`: one folder each, and what they share."""

from tileloom.ops.rowwise import cross_entropy, layer_norm, rms_norm, softmax, swiglu

__all__ = ["cross_entropy", "layer_norm", "rms_norm", "softmax", "swiglu"]
