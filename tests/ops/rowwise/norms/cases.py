"""Calls of both norms that the emulator's and the GPU's tests share, and how they are judged."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tileloom.ops.rowwise.config import RowConfig, Tile, TritonConfig
from tileloom.ops.rowwise.layer_norm import layer_norm, layer_norm_reference
from tileloom.ops.rowwise.rms_norm import rms_norm, rms_norm_reference
from tileloom.testing import Case, assert_accurate

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
# Makes programs share rows of a few hundred elements: the backward asks for the next row ahead, or
# reads its part again.
LONG = TritonConfig(Tile(64, 1, 1), Tile(64, 1, 1, 1, 2))
LONG_AGAIN = TritonConfig(Tile(64, 1, 1), Tile(64, 1, 1, 1, 1))
# Several rows at a time, and a walk over them that is pipelined; without a config the backward of
# few rows is one launch, and not walked.
PIPED = TritonConfig(Tile(128, 2, 1), Tile(128, 2, 1, 1, 3))
BACK_PIPED = TritonConfig(backward=PIPED.backward)
# Rows that come into a ring of shared memory, in pieces.
RING = TritonConfig(backward=Tile(256, 1, 1, 1, 3, ring=True))
SHORT_RING = TritonConfig(backward=Tile(512, 1, 2, 2, 2, ring=True))
# Rows of 8192 columns that a cluster takes: one, and two of 32 warps each.
CLUSTER = TritonConfig(forward=Tile(1024, 1, 4, ctas=8))
CLUSTER_ROWS = TritonConfig(forward=Tile(2048, 2, 8, ctas=4))
# The same rows, over which clusters of 8 or 2 walk.
CLUSTER_WALK = TritonConfig(
    Tile(1024, 1, 4, stages=4, ring=True, ctas=8), Tile(4096, 1, 16, stages=4, ring=True, ctas=2)
)

FUNCTIONS = {"rms": (rms_norm, rms_norm_reference), "layer": (layer_norm, layer_norm_reference)}


@dataclass(frozen=True)
class NormCase:
    """One call, without tensors: `has` lists the tensors besides x, `vectors` is their dtype."""

    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype = FP32
    has: tuple[str, ...] = ("weight",)
    layouts: tuple[Any, Any] = ("contiguous", "contiguous")  # of x and of the residual
    vectors: torch.dtype | None = None
    config: RowConfig | None = field(default=None, hash=False)
    input_scale: float = 1.0
    offset: float = 0.0

    @property
    def case(self) -> Case:
        sizes = {f"n{axis}": size for axis, size in enumerate(self.shape)}
        name = "-".join((self.op, *self.has, *self.layouts[: 1 + ("residual" in self.has)]))
        return Case(name, sizes, self.dtype, input_scale=self.input_scale)

    @property
    def id(self) -> str:
        form = {
            LONG: "-long",
            LONG_AGAIN: "-again",
            PIPED: "-piped",
            BACK_PIPED: "-back",
            RING: "-ring",
            SHORT_RING: "-short-ring",
            CLUSTER: "-cluster",
            CLUSTER_ROWS: "-cluster-rows",
            CLUSTER_WALK: "-cluster-walk",
        }.get(self.config, "") + "-far" * (self.offset != 0)
        return self.case.id + form + ("" if self.vectors is None else "-mixed")

    def inputs(self, device: torch.device | str = "cpu") -> Inputs:
        def tensor(case: Case, name: str, layout: Any = "contiguous") -> torch.Tensor:
            flat = len(self.shape) == 1  # layouts need two dimensions
            dims = " ".join((*"1" * flat, *case.sizes))
            made = case.tensor(name, dims, layout=layout, device=device)
            return made[0] if flat else made

        x = tensor(self.case, "x", self.layouts[0])
        if self.offset:  # sums and means are numbers of float32
            x = (x * 64).round() / 64 + self.offset
        tensors = {"x": x}
        if "residual" in self.has:
            tensors["residual"] = tensor(self.case, "residual", self.layouts[1])
        own = Case("gradients", self.case.sizes, self.dtype)
        for name in ("weight", "bias"):
            if name in self.has:
                width = f"n{len(self.shape) - 1}"
                vector = own.tensor(name, f"1 {width}", device=device)[0]
                tensors[name] = vector.to(self.vectors or self.dtype)
        grads = [tensor(own, name) for name in ("dout", "dstream")]
        return Inputs(self, tensors, grads[: 1 + ("residual" in self.has)])


@dataclass(frozen=True)
class Inputs:
    """What one call gets, and the gradients of its outputs."""

    case: NormCase
    tensors: dict[str, torch.Tensor]
    grads: list[torch.Tensor]


def _called(function: Any, tensors: dict[str, torch.Tensor], **options: Any) -> Any:
    given = dict(tensors)
    out = function(given.pop("x"), **given, **options)
    return out if isinstance(out, tuple) else (out,)


def run(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Outputs and gradients of one call, by name."""
    function = FUNCTIONS[inputs.case.op][0]
    leaves = {name: t.detach().requires_grad_() for name, t in inputs.tensors.items()}
    outs = _called(function, leaves, config=inputs.case.config)
    return _results(outs, leaves, inputs.grads)


def _results(
    outs: tuple[torch.Tensor, ...],
    leaves: dict[str, torch.Tensor],
    grads: list[torch.Tensor],
) -> dict[str, torch.Tensor]:
    found = torch.autograd.grad(outs, list(leaves.values()), grads)
    results = dict(zip(("out", "stream"), (out.detach() for out in outs)))
    return results | {f"d{name}": grad for name, grad in zip(leaves, found)}


def answer(inputs: Inputs, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What the reference gives in a precision."""
    reference = FUNCTIONS[inputs.case.op][1]
    leaves = {name: t.detach().to(dtype).requires_grad_() for name, t in inputs.tensors.items()}
    outs = _called(reference, leaves, compute_dtype=dtype)
    return _results(outs, leaves, [g.to(dtype) for g in inputs.grads])


def check(inputs: Inputs, results: dict[str, torch.Tensor]) -> None:
    """Judge outputs and gradients by the accuracy rule."""
    reference, baseline = answer(inputs, torch.float64), answer(inputs, inputs.case.dtype)
    assert set(results) == set(reference)
    for name, actual in results.items():
        tensor = inputs.tensors.get(name[1:], inputs.tensors["x"])
        assert actual.dtype == tensor.dtype, name
        assert_accurate(actual, reference[name], baseline[name].to(actual.dtype), name=name)


_EVERYTHING = ("weight", "bias", "residual")


def everything(op: str) -> tuple[str, ...]:
    """Every tensor that the operator takes."""
    return _EVERYTHING[:: 2 if op == "rms" else 1]


RINGS = [
    NormCase("layer", (19, 600), BF16, ("weight", "bias"), config=RING),
    NormCase("layer", (9, 1024), FP16, _EVERYTHING, vectors=FP32, config=SHORT_RING),
    NormCase("rms", (17, 512), BF16, ("weight", "residual"), config=RING),
    NormCase("rms", (5, 776), FP16, (), config=RING),
    NormCase("layer", (3, 1032), BF16, ("bias",), config=SHORT_RING),
]
CLUSTERS = [
    NormCase("rms", (3, 8192), FP32, config=CLUSTER),
    NormCase("layer", (3, 8192), FP16, _EVERYTHING, vectors=FP32, config=CLUSTER_ROWS),
    NormCase("layer", (2, 8192), BF16, (), ("gapped", ""), offset=8.0, config=CLUSTER),
    NormCase("rms", (3, 8192), BF16, ("weight", "residual"), config=CLUSTER_ROWS),
]
WALKS = [
    NormCase("rms", (7, 8192), BF16, config=CLUSTER_WALK),
    NormCase("layer", (5, 8192), FP16, ("weight", "bias"), vectors=FP32, config=CLUSTER_WALK),
    NormCase("layer", (3, 8192), BF16, (), ("gapped", ""), offset=8.0, config=CLUSTER_WALK),
    NormCase("rms", (2, 8192), FP16, ("weight",), config=CLUSTER_WALK),
    NormCase("layer", (4, 8192), BF16, ("bias",), config=CLUSTER_WALK),
]
WHOLE = [
    NormCase("rms", (5, 100)),
    NormCase("layer", (5, 100), FP32, ("weight", "bias")),
    NormCase("rms", (3, 4, 24), BF16, ("weight", "residual"), vectors=FP32),
    NormCase("layer", (3, 4, 24), FP16, _EVERYTHING, ("transposed", "gapped"), vectors=FP32),
    NormCase("rms", (9, 40), FP32, ("weight",), ("last_strided", "")),
    NormCase("layer", (3, 7, 33), BF16, ("bias",), ("expanded", "")),
    NormCase("rms", (2, 3, 4, 16), FP32, ("residual",), ("contiguous", "transposed")),
    NormCase("layer", (7, 32), BF16, (), ("unaligned", "")),
    NormCase("layer", (11, 128), BF16, _EVERYTHING, config=PIPED),
    NormCase("rms", (8, 128), FP16, ("weight", "residual"), config=PIPED),
    # Numbers far from 0: the variance needs the mean taken off first.
    NormCase("layer", (4, 128), FP32, ("weight", "bias"), offset=256.0),
]
WALKED = [replace(case, config=BACK_PIPED) for case in WHOLE if case.config is None]
LONG_ROWS = [
    NormCase("rms", (3, 256), BF16, config=LONG),
    NormCase("layer", (3, 201), FP32, ("weight", "bias"), config=LONG),
    NormCase("layer", (2, 2, 200), FP16, _EVERYTHING, ("gapped", "transposed"), config=LONG),
    NormCase("rms", (5, 130), FP32, ("weight", "residual"), ("last_strided",) * 2, config=LONG),
    NormCase("layer", (4, 256), FP32, ("weight", "bias"), offset=256.0, config=LONG),
]
