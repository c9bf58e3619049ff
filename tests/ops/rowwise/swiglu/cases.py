"""SwiGLU calls that the emulator's and the GPU's tests share, and how they are judged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from tileloom.ops.rowwise.config import RowConfig, Tile, TritonConfig
from tileloom.ops.rowwise.swiglu import swiglu, swiglu_reference
from tileloom.testing import Case, assert_accurate

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
SMALL = TritonConfig(Tile(32, 2, 1), Tile(32, 2, 1))


@dataclass(frozen=True)
class SwigluCase:
    """One call; the layout ``halves`` makes gate and up the halves of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype = FP32
    layouts: tuple[Any, Any] = ("contiguous", "contiguous")
    config: RowConfig | None = field(default=None, hash=False)
    input_scale: float = 1.0

    @property
    def case(self) -> Case:
        sizes = {f"n{axis}": size for axis, size in enumerate(self.shape)}
        return Case("-".join(self.layouts), sizes, self.dtype, input_scale=self.input_scale)

    @property
    def id(self) -> str:
        return self.case.id + "-small" * (self.config is SMALL)

    def inputs(self, device: torch.device | str = "cpu") -> list[torch.Tensor]:
        """Gate, up and the gradient of the output."""
        dims = " ".join(self.case.sizes)
        grad = Case("grad", self.case.sizes, self.dtype).tensor("dout", dims, device=device)
        if self.layouts[0] == "halves":
            both = torch.cat([self.case.tensor(name, dims) for name in ("gate", "up")], -1)
            return [*both.to(device).chunk(2, -1), grad]
        names = zip(("gate", "up"), self.layouts)
        tensors = (self.case.tensor(n, dims, layout=layout, device=device) for n, layout in names)
        return [*tensors, grad]


def run(case: SwigluCase, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Output and both gradients."""
    gate, up = (t.detach().requires_grad_() for t in inputs[:2])
    out = swiglu(gate, up, config=case.config)
    return [out.detach(), *torch.autograd.grad(out, (gate, up), inputs[2])]


def check(inputs: list[torch.Tensor], results: list[torch.Tensor]) -> None:
    """Judge output and gradients by the accuracy rule."""
    dtype = inputs[0].dtype
    answers: list[list[torch.Tensor]] = []
    for wide in (torch.float64, dtype):
        gate, up = (t.detach().to(wide).requires_grad_() for t in inputs[:2])
        out = swiglu_reference(gate, up, compute_dtype=wide)
        answers.append([out.detach(), *torch.autograd.grad(out, (gate, up), inputs[2].to(wide))])
    for name, actual, reference, baseline in zip(("out", "dgate", "dup"), results, *answers):
        assert actual.dtype == dtype
        assert_accurate(actual, reference, baseline, name=name)


CASES = [
    SwigluCase((5, 100)),
    SwigluCase((3, 7, 33), BF16),
    SwigluCase((9, 64), BF16, ("halves", "")),
    SwigluCase((9, 70), FP32, ("halves", ""), SMALL),
    SwigluCase((2, 3, 4, 40), FP16, ("transposed", "gapped")),
    SwigluCase((3, 4, 24), FP32, ("last_strided", "expanded"), SMALL),
    SwigluCase((6, 48), FP16, ("unaligned", "contiguous"), input_scale=4.0),
    SwigluCase((6, 48), FP32, input_scale=30.0),
]
