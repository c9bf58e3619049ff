"""Softmax over the rows of a tensor, with or without a mask."""

from tileloom.ops.rowwise.softmax.api import softmax
from tileloom.ops.rowwise.softmax.reference import softmax_reference

__all__ = ["softmax", "softmax_reference"]
