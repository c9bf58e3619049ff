"""Softmax calls that the emulator's and the GPU's tests share, and how they are judged."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

import tileloom.ops.rowwise.softmax as package
from tileloom.ops.rowwise.config import Tile, TritonConfig
from tileloom.testing import Case, assert_accurate

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
NAN, INF = float("nan"), float("inf")
# Makes the looped kernels run on rows of a few hundred elements.
WALK = TritonConfig(Tile(64, 1, 1), Tile(64, 1, 1))
# Makes several programs share a row of a few hundred elements.
SPLIT = TritonConfig(Tile(64, 1, 1, split=True), Tile(64, 1, 1, split=True))

# Rows of 8192 columns that a cluster takes: x is kept, or its exponentials.
CLUSTER = TritonConfig(forward=Tile(1024, 1, 4, 2, ctas=8))
CLUSTER_KEPT = TritonConfig(forward=Tile(1024, 1, 4, ctas=8))


@dataclass(frozen=True)
class SoftmaxCase:
    """One call, without tensors.

    `mask` is the mask's shape, hidden for a third of its elements and for its first row; `spoil`
    puts NaN where it hides. `rows` of `(row, value)` fill whole rows of x.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = FP32
    layout: Any = "contiguous"
    mask: tuple[int, ...] | None = None
    spoil: bool = False
    rows: tuple[tuple[int, float], ...] = ()
    input_scale: float = 1.0
    config: TritonConfig | None = field(default=None, hash=False)

    @property
    def case(self) -> Case:
        sizes = {f"n{axis}": size for axis, size in enumerate(self.shape)}
        return Case(self.name, sizes, self.dtype, input_scale=self.input_scale)

    @property
    def id(self) -> str:
        return self.case.id

    def inputs(self, device: torch.device | str = "cpu") -> Inputs:
        dims = " ".join(self.case.sizes)
        x = self.case.tensor("x", dims, layout=self.layout, device=device)
        dy = self.case.tensor("dy", dims, device=device) / self.input_scale
        for row, value in self.rows:
            x[row] = value
        mask = None
        if self.mask is not None:
            generator = torch.Generator().manual_seed(0)
            mask = torch.rand(self.mask, generator=generator) > 0.3
            mask.view(-1, self.mask[-1])[0] = False
            mask = mask.to(device)
            if self.spoil:
                x.masked_fill_(~mask.expand(self.shape), NAN)
        return Inputs(x, mask, dy)


@dataclass(frozen=True)
class Inputs:
    """What one call gets, and the gradient of its output."""

    x: torch.Tensor
    mask: torch.Tensor | None
    dy: torch.Tensor


def run(inputs: Inputs, config: TritonConfig | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and gradient of one call."""
    x = inputs.x.detach().requires_grad_()
    y = package.softmax(x, mask=inputs.mask, config=config)
    (dx,) = torch.autograd.grad(y, x, inputs.dy)
    return y.detach(), dx


def check(inputs: Inputs, y: torch.Tensor, dx: torch.Tensor) -> None:
    """Judge output and gradient by the accuracy rule; hidden elements exactly."""
    x, mask, dtype = inputs.x, inputs.mask, inputs.x.dtype
    answers = []
    for compute_dtype in (torch.float64, dtype):
        leaf = x.detach().to(compute_dtype).requires_grad_()
        out = package.softmax_reference(leaf, mask=mask, compute_dtype=compute_dtype)
        (grad,) = torch.autograd.grad(out, leaf, inputs.dy.to(compute_dtype))
        answers.append((out.detach(), grad))
    assert y.dtype == dx.dtype == dtype
    if mask is not None:
        hidden = ~mask.expand(x.shape)
        assert not y[hidden].any()
        assert not dx[hidden].any()
    if answers[0][0].any():
        assert_accurate(y, answers[0][0], answers[1][0], name="y")
    else:
        assert not y.any()
    if answers[0][1].any():
        assert_accurate(dx, answers[0][1], answers[1][1], name="dx")
    else:
        assert not dx.any()


WHOLE = [
    SoftmaxCase("whole", (5, 100)),
    SoftmaxCase("many", (3, 4, 7), BF16),
    SoftmaxCase("mask", (2, 3, 4, 200), FP16, mask=(2, 1, 4, 200), spoil=True),
    SoftmaxCase("columns-mask", (5, 64), BF16, mask=(64,), rows=((2, -INF),)),
    SoftmaxCase("strided", (9, 40), FP32, "last_strided", mask=(9, 1)),
    SoftmaxCase("transposed", (2, 3, 4, 24), BF16, "transposed", mask=(3, 1, 24)),
    SoftmaxCase("gapped", (7, 33), FP16, "gapped"),
    SoftmaxCase("unaligned", (7, 32), FP16, "unaligned"),
    SoftmaxCase("huge", (4, 50), FP32, input_scale=1e4),
    SoftmaxCase("held", (3, 16384), BF16, rows=((1, -INF),)),  # the backward holds 16 bits
]
WALKED = [
    SoftmaxCase("walked", (3, 256), BF16, config=WALK),
    SoftmaxCase("walked-odd", (3, 201), FP32, rows=((1, -INF),), config=WALK),
    SoftmaxCase("walked-mask", (2, 2, 200), FP16, mask=(2, 1, 200), spoil=True, config=WALK),
    SoftmaxCase("walked-strided", (5, 130), FP32, "last_strided", mask=(1, 130), config=WALK),
]
SHARED = [replace(case, name=case.name.replace("walked", "split"), config=SPLIT) for case in WALKED]
CLUSTERS = [
    SoftmaxCase("cluster", (2, 2, 8192), FP16, "gapped", config=CLUSTER),
    SoftmaxCase("cluster", (3, 8192), BF16, rows=((1, -INF),), config=CLUSTER_KEPT),
    SoftmaxCase("cluster", (3, 8192), FP32, input_scale=3.0, config=CLUSTER_KEPT),
]
