"""A sentence for every wrong call of `attention_varlen`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tileloom
from tileloom import knobs, masks
from tileloom.errors import (
    ConfigError,
    DeviceError,
    DtypeError,
    GradientError,
    OptionError,
    ShapeError,
    UnknownOptionError,
)
from tileloom.ops.attention.config import TritonConfig

_PACKED = (5, 2, 8)


def _cu(*ends: int, **options: Any) -> torch.Tensor:
    return torch.tensor(ends, **{"dtype": torch.int32, **options})


def _call(
    q: Any = _PACKED, k: Any = _PACKED, v: Any = None, a: Any = None, b: Any = None,
    max_q: Any = 3, max_k: Any = 3, **options: Any,
) -> Any:  # fmt: skip
    given = [q, k, k if v is None else v]
    tensors = [torch.zeros(x) if isinstance(x, tuple) else x for x in given]
    offsets = [_cu(0, 2, 5) if x is None else x for x in (a, b)]
    return tileloom.attention_varlen(*tensors, *offsets, max_q, max_k, **options)


def _flags(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bool)


CALLS: list[tuple[Any, type[Exception], str]] = [
    (lambda: _call(v=[1.0]), DtypeError, "v is a list; it must be a torch.Tensor."),
    (lambda: _call((1, 5, 2, 8)), ShapeError, "q has 4 dimensions."),
    (lambda: _call((1, 5, 2, 8)), ShapeError, "Try: tileloom.attention for a padded batch"),
    (lambda: _call(torch.zeros(_PACKED).int()), DtypeError, "q has dtype torch.int32; supported:"),
    (lambda: _call(k=torch.zeros(_PACKED).half()), DtypeError, "k has dtype torch.float16, q has"),
    (lambda: _call(v=torch.zeros(_PACKED, device="meta")), DeviceError, "v is on meta, q on cpu;"),
    (lambda: _call(v=(5, 1, 8)), ShapeError, "k has 2 heads, v has 1."),
    (lambda: _call((5, 3, 8)), ShapeError, "k has 2 heads, q has 3."),
    (lambda: _call(v=(4, 2, 8)), ShapeError, "k has 5 rows, v has 4."),
    (lambda: _call(k=(5, 2, 16)), ShapeError, "k has head dim 16, q has 8."),
    (lambda: _call(a=[0, 5]), DtypeError, "cu_seqlens_q is a list; it must be an int32 tensor"),
    (lambda: _call(b=_cu(0, 5, dtype=torch.int64)), DtypeError,
     "cu_seqlens_k has dtype torch.int64; it must be torch.int32. Try: cu_seqlens_k.to(torch.int3"),
    (lambda: _call(a=_cu()), ShapeError, "cu_seqlens_q has shape (0,); it must be [S + 1]"),
    (lambda: _call(a=_cu(0, 5)[None]), ShapeError, "cu_seqlens_q has shape (1, 2); it must be"),
    (lambda: _call(a=_cu(0, 5, device="meta")), DeviceError, "cu_seqlens_q is on meta, q on cpu;"),
    (lambda: _call(a=_cu(0, 5)), ShapeError, "cu_seqlens_q has 2 entries, cu_seqlens_k 3; both"),
    (lambda: _call(a=_cu(1, 2, 5)), OptionError,
     "cu_seqlens_q begins with 1; it must begin with 0. Try: torch.nn.functional.pad("),
    (lambda: _call(a=_cu(0, 6, 5)), OptionError,
     "cu_seqlens_q falls from 6 to 5 at sequence 1; it must never fall."),
    (lambda: _call(b=_cu(0, 2, 4)), OptionError,
     "cu_seqlens_k ends with 4, and k has 5 rows; both must be the same. Try: k[:4] to leave"),
    (lambda: _call(b=_cu(0, 2, 7)), OptionError,
     "cu_seqlens_k ends with 7, and k has 5 rows; both must be the same. Try: lengths whose sum"),
    (lambda: _call(a=_cu(0, 2, 5).to_sparse()), DtypeError,
     "cu_seqlens_q is a torch.sparse_coo tensor; supported: dense strided tensors. Try: cu_seq"),
    (lambda: _call(max_q=2**70), OptionError, "max_q is 1180591620717411303424; it must be"),
    (lambda: _call(max_q=np.int64(3)), OptionError, "Try: int(max_q)."),
    (lambda: _call(dropout_p=0.5, max_q=2**31 - 1, max_k=2**31 - 1), OptionError,
     "attention_varlen: dropout needs"),
    (lambda: _call(bias=torch.zeros(3, 3).to_sparse()), DtypeError, "bias is a torch.sparse_coo"),
    (lambda: _call(mask=_flags(3, 3).to_sparse()), DtypeError, "mask is a torch.sparse_coo ten"),
    (lambda: _call(deterministic=True), UnknownOptionError, "Try: torch.use_deterministic_algo"),
    (lambda: _call(max_q=2), OptionError,
     "max_q is 2, and sequence 1 has 3 rows; it must be at least the length of the longest"),
    (lambda: _call(max_k=-1), OptionError, "max_k is -1; it must be an int in 0 .. 2^31 - 1,"),
    (lambda: _call(max_q=True), OptionError, "max_q is True; it must be an int in 0 .. 2^31 - 1,"),
    (lambda: _call(max_q=3.0), OptionError, "max_q is 3.0; it must be an int in 0 .. 2^31 - 1,"),
    (lambda: _call(max_q=torch.ones(2)), OptionError,
     "max_q has dtype torch.float32 and shape (2,); it must be an int, or an integer tensor"),
    (lambda: _call(mask="causal"), OptionError, "mask is a str; it must be a bool tensor"),
    (lambda: _call(mask=_flags(5, 5)), ShapeError,
     "mask has shape (5, 5), which does not broadcast to [S, Hq, max_q, max_k] = (2, 2, 3, 3);"),
    (lambda: _call(bias=torch.zeros(3, 1, 3, 3)), ShapeError, "bias has shape (3, 1, 3, 3), which"),
    (lambda: _call(bias=_flags(3, 3)), DtypeError, "bias has dtype torch.bool; supported:"),
    (lambda: _call(bias=1.0), DtypeError, "bias is a float; it must be a torch.Tensor. Try"),
    (lambda: _call(bias=torch.zeros(3, 3, device="meta")), DeviceError, "bias is on meta, q on"),
    (lambda: _call(mask=masks.key_lengths(torch.tensor([1]))), ShapeError,
     "key_lengths has 1 entries, and there are 2 sequences; it must have one entry for each."),
    (lambda: _call(is_causal=1), OptionError, "is_causal is 1; it must be True or False."),
    (lambda: _call(scale=float("nan")), OptionError, "scale is nan; it must be a finite Python"),
    (lambda: _call(dropout_p=1.5), OptionError, "dropout_p is 1.5; it must be"),
    (lambda: _call(dropout_p=0.5, max_k=torch.tensor(3)), OptionError,
     "max_q or max_k is a tensor, which is not read, and dropout's random numbers depend on both."),
    (lambda: _call(config="triton"), OptionError, "config is a str; it must be one of"),
    (lambda: _call(config=TritonConfig()), ConfigError, "cannot run this problem: it needs a GPU"),
    (lambda: _call(window_size=(3, 0)), UnknownOptionError,
     "there is no option 'window_size'; options: mask, bias, is_causal, scale, dropout_p, "
     "return_lse, config, backward_config. Try: mask=tileloom.masks.window(left, right, anchor="),
    (lambda: _call(scael=1.0), UnknownOptionError, "Try: scale=."),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "text"), CALLS, ids=[text[:40] for *_, text in CALLS])
def test_a_wrong_call_gets_its_sentence(call, kind, text):
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value).startswith("attention_varlen: ")
    assert text in str(caught.value)


def test_a_second_gradient_is_refused():
    q = torch.zeros(_PACKED, requires_grad=True)
    out = _call(q, q)
    with pytest.raises(GradientError, match="attention_varlen: a gradient of its gradient"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_forward_mode_tangent_is_refused():
    q = torch.zeros(_PACKED)
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(GradientError, match="attention_varlen: one of q, k, v and bias carries"),
    ):
        _call(torch.autograd.forward_ad.make_dual(q, q), q)


def test_values_on_a_gpu_are_looked_at_with_a_knob_only():
    assert knobs.get("debug.lengths") is False
