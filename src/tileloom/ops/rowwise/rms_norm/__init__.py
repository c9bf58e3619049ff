"""RMS norm; what it shares with layer norm lies in `ops/rowwise/norm`."""

from tileloom.ops.rowwise.rms_norm.api import rms_norm
from tileloom.ops.rowwise.rms_norm.reference import rms_norm_reference

__all__ = ["rms_norm", "rms_norm_reference"]
