"""Layer norm; what it shares with RMS norm lies in `ops/rowwise/norm`."""

from tileloom.ops.rowwise.layer_norm.api import layer_norm
from tileloom.ops.rowwise.layer_norm.reference import layer_norm_reference

__all__ = ["layer_norm", "layer_norm_reference"]
