"""Cross-entropy calls that the emulator's and the GPU's tests share, and how they are judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import tileloom.ops.rowwise.cross_entropy as package
from tileloom.bench.gradients import joined
from tileloom.ops.rowwise.config import Tile, TritonConfig
from tileloom.testing import Case, assert_accurate

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
NAN, INF = float("nan"), float("inf")
# Several blocks, with a tail, on rows of a few hundred classes.
WALK = TritonConfig(Tile(64, 1, 1), Tile(64, 1, 1))


def _nothing() -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class CrossEntropyCase:
    """One call, without tensors: logits `shape`, a fifth of the labels ignored.

    `rows` of `(row, value)` fill whole rows of the logits; `given` of `(row, label)` set labels.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = FP32
    layout: Any = "contiguous"
    options: Mapping[str, Any] = field(default_factory=_nothing, hash=False)
    rows: tuple[tuple[int, float], ...] = ()
    given: tuple[tuple[int, int], ...] = ()
    label_dtype: torch.dtype = torch.int64
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
        logits = self.case.tensor(
            "logits", " ".join(self.case.sizes), layout=self.layout, device=device
        )
        *outer, size = self.shape
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(size, outer, generator=generator, dtype=self.label_dtype)
        labels.view(-1)[1::5] = self.options.get("ignore_index", -100)
        for row, value in self.rows:
            logits[row] = value
        for row, label in self.given:
            labels.view(-1)[row] = label
        return Inputs(logits, labels.to(device), dict(self.options))


@dataclass(frozen=True)
class Inputs:
    """What one call gets."""

    logits: torch.Tensor
    labels: torch.Tensor
    options: dict[str, Any]

    @property
    def loss_gradient(self) -> torch.Tensor:
        """The gradient that the loss gets: not 1, and another for each row."""
        shape = self.labels.shape if self.options.get("reduction") == "none" else ()
        generator = torch.Generator().manual_seed(1)
        return (torch.rand(shape, generator=generator) + 0.5).to(self.labels.device)


def run(
    inputs: Inputs, config: TritonConfig | None = None, *, inplace: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of one call; `inplace` takes a copy of the logits, which is no leaf."""
    logits = inputs.logits.detach().requires_grad_()
    if inplace:
        logits = logits * 1
    loss = package.cross_entropy(
        logits, inputs.labels, **inputs.options, config=config, inplace_backward=inplace
    )
    (grad,) = torch.autograd.grad(loss, logits, inputs.loss_gradient)
    assert (grad.data_ptr() == logits.data_ptr()) is inplace
    return loss.detach(), grad


def check(inputs: Inputs, loss: torch.Tensor, grad: torch.Tensor) -> None:
    """Judge loss and gradient by the accuracy rule, and ignored rows exactly."""
    dtype = inputs.logits.dtype
    ignored = inputs.labels == inputs.options.get("ignore_index", -100)
    losses, grads = {}, {}
    for compute_dtype in (torch.float64, FP32, dtype):
        leaf = inputs.logits.detach().to(compute_dtype).requires_grad_()
        out = package.cross_entropy_reference(
            leaf, inputs.labels, **inputs.options, compute_dtype=compute_dtype
        )
        (grads[compute_dtype],) = torch.autograd.grad(
            out, leaf, inputs.loss_gradient.to(compute_dtype)
        )
        losses[compute_dtype] = out.detach()
    assert loss.dtype == FP32
    assert grad.dtype == dtype
    assert not grad[ignored].any()
    assert_accurate(loss, losses[torch.float64], losses[FP32], name="loss")
    # Of a row's gradient the label's element is the largest, and its rounding is the row's error.
    expected = (joined(grads[t]) for t in (torch.float64, dtype))
    assert_accurate(joined(grad), *expected, name="grad")


NONE, SUM = {"reduction": "none"}, {"reduction": "sum"}
ALL = {"soft_cap": 2.0, "label_smoothing": 0.3, "ignore_index": 3, "reduction": "none"}
ONE_BLOCK = [
    CrossEntropyCase("mean", (23, 100)),
    CrossEntropyCase("few", (9, 7), BF16, options=SUM),
    CrossEntropyCase("ignored-nan", (9, 40), FP16, options=NONE, rows=((1, NAN), (6, INF))),
    # Rows that start anywhere: their begin is read before the label is known.
    CrossEntropyCase("ignored-begin", (7, 2057), BF16, options=NONE, rows=((1, NAN), (6, INF))),
    CrossEntropyCase("int32", (3, 5, 33), BF16, options=ALL, label_dtype=torch.int32),
    CrossEntropyCase("transposed", (2, 3, 4, 24), FP32, "transposed", options=NONE),
]
WALKED = [
    CrossEntropyCase("walked", (11, 256), BF16, config=WALK),
    CrossEntropyCase("walked-all", (11, 201), FP32, options=ALL, config=WALK),
    CrossEntropyCase("unaligned", (6, 200), BF16, "unaligned", config=WALK),
    CrossEntropyCase("unaligned-odd", (6, 201), FP16, "unaligned", options=SUM, config=WALK),
    CrossEntropyCase("walked-strided", (9, 130), FP16, "last_strided", options=ALL, config=WALK),
    CrossEntropyCase("huge", (12, 200), FP32, options=NONE, input_scale=1e4, config=WALK),
    CrossEntropyCase("huge-smooth", (12, 200), FP32, input_scale=1e4, config=WALK,
                     options={"reduction": "none", "label_smoothing": 0.1}),
    CrossEntropyCase("even", (9, 130), FP32, options={"reduction": "none", "label_smoothing": 0.1},
                     rows=((3, 3e38), (4, -3e38), (5, 1e4)), config=WALK),
    CrossEntropyCase("smooth", (8, 199), FP16, options={"label_smoothing": 1.0}, config=WALK),
    CrossEntropyCase("capped", (8, 200), FP32, options={"soft_cap": 30.0}, input_scale=20.0,
                     config=WALK),
]  # fmt: skip
