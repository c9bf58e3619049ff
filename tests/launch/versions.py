"""Where the other versions of Triton lie: `make` installs them into `.triton-versions`."""

import os
from pathlib import Path

_FOLDER = Path(__file__).parents[2] / ".triton-versions"
# `make test-triton-3.8.0` names another release.
OTHERS = tuple(os.environ.get("TILELOOM_TEST_TRITONS", "3.6.0 3.9.0").split())
# What is known of shipped kernels on releases that no kernel was timed on: part of the only fault's
# text. These spill more than on the others.
_FWD, _BWD = "attention_fwd_gluon_sm90", "attention_bwd_gluon_sm90"
KNOWN_FAULTS = {
    ("3.9.0", f"{_BWD}[d256-packed-bf16-64x2]"): "spills 464 bytes",
    ("3.9.0", f"{_BWD}[d256-packed-causal-bf16-64x2]"): "spills 508 bytes",
    ("3.9.0", "matmul_gluon_sm90[64x48-edge-fused]"): "spills 40 bytes",
    ("3.8.0", f"{_FWD}[d32-window-lengths-mask-bias-fp16]"): "spills 3504 bytes",
    ("3.8.0", f"{_FWD}[d64-packed-bias-bf16]"): "spills 136 bytes",
    ("3.8.0", "norm_fwd[n32760-layer-residual-fp32-32768x1-w32]"): "spills 56 bytes",
}


def triton_folder(version):
    """The import folder of another Triton, or None where it is not installed."""
    path = _FOLDER / version
    return path if (path / "triton").is_dir() else None
