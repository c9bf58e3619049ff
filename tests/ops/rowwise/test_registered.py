"""Who calls a registered operator itself gets the public function's sentence too: no kernel reads
past a tensor that is too short.
"""

from __future__ import annotations

import pytest
import torch

from tileloom import emulator
from tileloom.errors import ConfigError, DtypeError, OptionError, ShapeError

X, WEIGHT, LABELS = torch.randn(6, 8), torch.randn(8), torch.zeros(6, dtype=torch.int64)
ROWS = torch.ones(6)
OPTIONS = (0.0, -100, 0.0, "mean", False, "")

CALLS = [
    (lambda o: o.rms_norm_fwd(X, WEIGHT[:4], None, 1e-5, ""), ShapeError,
     "rms_norm: weight has shape (4,), x has rows of 8 elements"),
    (lambda o: o.rms_norm_fwd(X, WEIGHT, X[:3], 1e-5, ""), ShapeError,
     "rms_norm: residual has shape (3, 8), x has (6, 8)"),
    (lambda o: o.layer_norm_fwd(X, WEIGHT, WEIGHT[:4], None, 1e-5, ""), ShapeError,
     "layer_norm: bias has shape (4,), x has rows of 8 elements"),
    (lambda o: o.rms_norm_bwd(X[:3], None, X, WEIGHT, ROWS, True, ""), ShapeError,
     "rms_norm: grad has shape (3, 8), h has (6, 8)"),
    (lambda o: o.layer_norm_bwd(X, None, X, WEIGHT[:4], None, ROWS, ROWS, True, False, ""),
     ShapeError, "layer_norm: weight has shape (4,), x has rows of 8 elements"),
    (lambda o: o.softmax_fwd(X, torch.ones(3, dtype=torch.bool), ""), ShapeError,
     "softmax: mask has shape (3,), which does not broadcast to x's (6, 8)"),
    (lambda o: o.softmax_fwd(X, torch.ones(8), ""), DtypeError,
     "softmax: mask has dtype torch.float32; it must be torch.bool"),
    (lambda o: o.softmax_bwd(X, X[:3], ""), ShapeError,
     "softmax: dy has shape (3, 8), y has (6, 8)"),
    (lambda o: o.swiglu_fwd(X, X[:3], ""), ShapeError,
     "swiglu: up has shape (3, 8), gate has (6, 8)"),
    (lambda o: o.swiglu_bwd(X[:3], X, X, ""), ShapeError,
     "swiglu: grad has shape (3, 8), gate has (6, 8)"),
    (lambda o: o.cross_entropy_fwd(X, LABELS[:3], *OPTIONS), ShapeError,
     "cross_entropy: labels has shape (3,), logits have (6, 8)"),
    (lambda o: o.cross_entropy_fwd(X, LABELS.float(), *OPTIONS), DtypeError,
     "cross_entropy: labels has dtype torch.float32; supported: torch.int32"),
    (lambda o: o.cross_entropy_fwd(X, LABELS, 0.0, -100, 0.0, "avg", False, ""), OptionError,
     "cross_entropy: reduction is 'avg'; it must be one of"),
    (lambda o: o.cross_entropy_fwd(X, LABELS, 2.0, *OPTIONS[1:]), OptionError,
     "cross_entropy: label_smoothing is 2.0; it must be a number in 0.0 .. 1.0"),
    *((lambda o, text=text: o.softmax_fwd(X, None, text), ConfigError,
       f"softmax: config is {text!r}, which no config writes")
      for text in ("x", "reference:1", "triton:a", "triton:1,2", "triton:8,1,4,1,1,0,0,1/1/1/1")),
    (lambda o: o.layer_norm_fwd(X, WEIGHT, None, None, 1e-5, "y"), ConfigError,
     "layer_norm: config is 'y', which no config writes"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "text"), CALLS, ids=[text for *_, text in CALLS])
def test_a_wrong_call_of_the_operator_itself_gets_the_sentence(call, kind, text):
    with emulator.run() as run, pytest.raises(kind) as caught:
        call(torch.ops.tileloom)
    assert str(caught.value).startswith(text)
    assert not run.launches
