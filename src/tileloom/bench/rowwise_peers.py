"""QuACK (CuTe DSL) as a peer of the row-wise operators: it runs, or says in a sentence why not."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from tileloom.bench.peers import import_fault
from tileloom.bench.rowwise_case import EPS, RowwiseCase

_LACKS = {"swiglu": "QuACK has swiglu only as a part of its GEMMs"}


def refuse_quack(case: RowwiseCase) -> str | None:
    """Say why QuACK cannot take a case; None if it can."""
    if case.operator in _LACKS:
        return _LACKS[case.operator]
    return import_fault("quack")


def quack(case: RowwiseCase) -> Callable[..., torch.Tensor]:
    """Return QuACK's function of the case's inputs, differentiable."""
    package: Any = importlib.import_module("quack")
    if case.operator == "rms_norm":
        return lambda x, weight: package.rmsnorm(x, weight, eps=EPS)
    if case.operator == "layer_norm":
        return _layer_norm()
    if case.operator == "cross_entropy":
        return lambda logits, labels: package.cross_entropy(logits, labels, reduction="none")
    return getattr(package, case.operator)


def _layer_norm() -> Callable[..., torch.Tensor]:
    """QuACK has both passes of layer norm, but no function that joins them for autograd.

    Its forward takes the weight and bias in float32: they are converted once, outside the timing.
    """
    rmsnorm: Any = importlib.import_module("quack.rmsnorm")
    wide: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def in_float32(vector: torch.Tensor) -> torch.Tensor:
        if id(vector) not in wide:  # the vector is kept as well, so that no other gets its id
            wide[id(vector)] = vector, vector.detach().float()
        return wide[id(vector)][1]

    class LayerNorm(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor,
            weight_32: torch.Tensor, bias_32: torch.Tensor,
        ) -> torch.Tensor:  # fmt: skip
            del bias
            out, rstd, mean = rmsnorm.layernorm_fwd(
                x, weight_32, bias_32, EPS, return_rstd=True, return_mean=True
            )
            ctx.save_for_backward(x, weight, rstd, mean)
            return out

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            x, weight, rstd, mean = ctx.saved_tensors
            return *rmsnorm.layernorm_bwd(x, weight, grads[0], rstd, mean), None, None

    def call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        vectors = in_float32(weight), in_float32(bias)
        if x.requires_grad:
            return LayerNorm.apply(x, weight, bias, *vectors)
        return rmsnorm.layernorm_fwd(x, *vectors, EPS)

    return call
