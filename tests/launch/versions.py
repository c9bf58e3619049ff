"""Where the other versions of Triton lie: `make` installs them into `.triton-versions`."""

import os
from pathlib import Path

_FOLDER = Path(__file__).parents[2] / ".triton-versions"
# `make test-triton-3.8.0` names another release.
OTHERS = tuple(os.environ.get("TILELOOM_TEST_TRITONS", "3.6.0 3.9.0").split())
# What is known of shipped kernels on a release outside `make test`: part of the only fault's text.
KNOWN_FAULTS = {
    ("3.8.0", "attention_fwd_gluon_sm90[d32-causal-fp16]"): "C7513",
    ("3.8.0", "attention_fwd_gluon_sm90[d128-causal-fp16]"): "C7513",
    ("3.8.0", "attention_fwd_gluon_sm90[d256-ragged-bf16]"): "spills 12 bytes",
    ("3.8.0", "norm_fwd[n32760-layer-residual-fp32-32768x1-w32]"): "spills 56 bytes",
}


def triton_folder(version):
    """The import folder of another Triton, or None where it is not installed."""
    path = _FOLDER / version
    return path if (path / "triton").is_dir() else None
