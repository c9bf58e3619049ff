"""Cross entropy of logits and labels."""

from tileloom.ops.rowwise.cross_entropy.api import cross_entropy
from tileloom.ops.rowwise.cross_entropy.reference import cross_entropy_reference

__all__ = ["cross_entropy", "cross_entropy_reference"]
