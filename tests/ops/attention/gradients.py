"""Gradients of the shared cases: how they are asked for, and how they are judged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tests.ops.attention import cases

import tileloom
from tileloom import masks
from tileloom.bench.gradients import joined
from tileloom.ops.attention import attention_reference
from tileloom.ops.attention.backward import attention_bwd
from tileloom.ops.attention.masks import Mask
from tileloom.ops.attention.reference import attention_reference_backward
from tileloom.testing import WeakCaseError, assert_accurate

NAMES = ("dq", "dk", "dv", "dbias")


@dataclass(frozen=True)
class Upstream:
    """Gradients of O and LSE; the second None where only O is used."""

    dout: torch.Tensor
    dlse: torch.Tensor | None


def upstream(inputs: cases.Inputs, *, with_lse: bool = True) -> Upstream:
    """Random gradients, the same on every machine, laid out as the output is."""
    q, v = inputs.q, inputs.v
    generator = torch.Generator().manual_seed(5)
    shape = (*q.shape[:3], v.shape[3])
    dout = torch.randn(shape, generator=generator, dtype=torch.float64).to(q.dtype).to(q.device)
    if q.stride(1) < q.stride(2):
        dout = dout.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    dlse = torch.randn(shape[:3], generator=generator, dtype=torch.float64).to(wide).to(q.device)
    return Upstream(dout, dlse if with_lse else None)


def _leaves(inputs: cases.Inputs) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """q, k, v (and bias) that ask for gradients, and the other options."""
    options = dict(inputs.options)
    leaves = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    if options.get("bias") is not None:
        options["bias"] = options["bias"].detach().requires_grad_()
        leaves.append(options["bias"])
    return leaves, options


def _differentiate(
    leaves: list[torch.Tensor], out: torch.Tensor, lse: torch.Tensor, given: Upstream
) -> list[torch.Tensor]:
    outputs, upstreams = [out], [given.dout.to(out.dtype)]
    if given.dlse is not None:
        outputs.append(lse)
        upstreams.append(given.dlse.to(lse.dtype))
    gradients = torch.autograd.grad(outputs, leaves, upstreams, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, gradients)]


def of_attention(inputs: cases.Inputs, given: Upstream, **configs: Any) -> list[torch.Tensor]:
    """The gradients that a user gets, by autograd."""
    leaves, options = _leaves(inputs)
    out, lse = tileloom.attention(*leaves[:3], **options, return_lse=True, **configs)
    return _differentiate(leaves, out, lse, given)


def of_reference(inputs: cases.Inputs, given: Upstream, dtype: torch.dtype) -> list[torch.Tensor]:
    """The gradients of the reference in a precision, by autograd."""
    leaves, options = _leaves(inputs)
    out, lse = attention_reference(*leaves[:3], **options, return_lse=True, compute_dtype=dtype)
    if dtype == torch.float64:
        leaves = [leaf.to(dtype).detach().requires_grad_() for leaf in leaves]
        if options.get("bias") is not None:
            options["bias"] = leaves[3]
        out, lse = attention_reference(*leaves[:3], **options, return_lse=True, compute_dtype=dtype)
    return _differentiate(leaves, out, lse, given)


def of_baseline(inputs: cases.Inputs, given: Upstream) -> list[torch.Tensor]:
    """The gradients in plain PyTorch in the inputs' own precision.

    There are two such, autograd's and the formulas, and each element is the one that is further
    off: the largest error of few elements in one of them says little.
    """
    dtype = inputs.q.dtype
    formulas = attention_reference_backward(
        given.dout, given.dlse, inputs.q, inputs.k, inputs.v, compute_dtype=dtype, **inputs.options
    )
    chosen: list[torch.Tensor] = []
    true = of_reference(inputs, given, torch.float64)
    for a, b, r in zip(of_reference(inputs, given, dtype), formulas, true):
        assert b is not None
        further = (b.double() - r).abs() > (a.double() - r).abs()
        chosen.append(torch.where(further, b.to(a.dtype), a))
    return chosen


def of_operator(inputs: cases.Inputs, given: Upstream, config: str) -> list[torch.Tensor]:
    """The gradients by the backward's operator alone, after the reference's forward."""
    q, k, v, options = inputs.q, inputs.k, inputs.v, inputs.options
    out, lse = attention_reference(q, k, v, **options, return_lse=True)
    if q.stride(1) < q.stride(2):
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    mask, bias, scale = options.get("mask"), options.get("bias"), options.get("scale")
    shown = masks.dense(mask) if isinstance(mask, torch.Tensor) else mask or Mask(masks.Band())
    if options.get("is_causal"):
        shown = shown & masks.causal()
    band = shown.band
    if scale is None:
        scale = q.shape[3] ** -0.5 if q.shape[3] else 1.0
    results = attention_bwd(
        given.dout, given.dlse, q, k, v, out, lse, shown.visible, bias, shown.lengths,
        band.left_top, band.right_top, band.left_bottom, band.right_bottom, scale,
        options.get("dropout_p", 0.0), *options.get("philox", (None, None)),
        True, True, bias is not None, config,
    )  # fmt: skip
    return list(results[: 3 if bias is None else 4])


def check(inputs: cases.Inputs, given: Upstream, gradients: list[torch.Tensor]) -> None:
    """Judge gradients by the accuracy rule, shapes and dtypes too."""
    wanted: list[torch.Tensor] = [inputs.q, inputs.k, inputs.v]
    if inputs.options.get("bias") is not None:
        wanted.append(inputs.options["bias"])
    reference = of_reference(inputs, given, torch.float64)
    baseline = of_baseline(inputs, given)
    assert len(gradients) == len(reference)
    for name, own, gradient, r, b in zip(NAMES, wanted, gradients, reference, baseline):
        assert gradient.shape == own.shape, name
        assert gradient.dtype == own.dtype, name
        try:
            assert_accurate(joined(gradient), joined(r), joined(b.to(own.dtype)), name=name)
        except WeakCaseError:
            # Rounding is all there is, as in dQ of rows that see one key.
            size = max(float(t.abs().max()) for t in (given.dout, *reference) if t.numel())
            limit = 4 * float((b.double() - r).abs().max())
            limit += float(torch.finfo(inputs.q.dtype).eps) * size
            assert float((gradient.double() - r).abs().max()) <= limit, name
