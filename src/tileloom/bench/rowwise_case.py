"""Row-wise problems to measure: sizes, inputs, the plain formula, and the bytes that must move."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch

from tileloom.errors import OptionError

Tensors = tuple[torch.Tensor, ...]
Direction = Literal["forward", "backward"]
EPS = 1e-5


@dataclass(frozen=True)
class RowwiseCase:
    """One problem: `operator` on rows of `columns` elements.

    Attributes:
        name: Unique, for example ``"rms_norm-4096-backward"``.
        operator: A key of `WORKS`.
        rows: Number of rows.
        columns: Elements of a row.
        direction: Which pass is timed.
        dtype_name: Dtype of everything but labels.
    """

    name: str
    operator: str
    rows: int
    columns: int
    direction: Direction = "forward"
    dtype_name: str = "bfloat16"

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype itself."""
        return cast("torch.dtype", getattr(torch, self.dtype_name))

    @property
    def work(self) -> Work:
        """Return what the operator computes."""
        return WORKS[self.operator]

    @property
    def formula(self) -> Callable[..., torch.Tensor]:
        """Return the plain formula."""
        return self.work.formula

    @property
    def bytes_moved(self) -> int:
        """Count each input once and each output once, in bytes; what a row shares is left out."""
        work = self.work
        passes = work.forward_passes if self.direction == "forward" else work.backward_passes
        return passes * self.rows * self.columns * self.dtype.itemsize

    def inputs(self, device: torch.device, seed: int) -> Tensors:
        """Draw inputs from N(0, 1), and labels evenly; for a backward with grad."""
        generator = torch.Generator(device=device).manual_seed(seed)
        return self.work.inputs(self, device, generator)


@dataclass(frozen=True)
class Work:
    """What an operator computes and what it must move.

    Attributes:
        inputs: Draws the inputs of a case.
        formula: Plain torch, every step in the dtype of its inputs: what is right in float64, and
            the accuracy rule's baseline in the dtype of the case.
        eager: What PyTorch offers for it.
        forward_passes: Row-sized tensors that the forward must read or write.
        backward_passes: The same for the backward.
    """

    inputs: Callable[[RowwiseCase, torch.device, torch.Generator], Tensors]
    formula: Callable[..., torch.Tensor]
    eager: Callable[..., torch.Tensor]
    forward_passes: int
    backward_passes: int


def _normal(case: RowwiseCase, device: torch.device, g: torch.Generator, *shape: int) -> Any:
    t = torch.randn(shape, generator=g, device=device, dtype=case.dtype)
    return t.requires_grad_(case.direction == "backward")


def _wide(count: int, vectors: int) -> Callable[..., Tensors]:
    """Inputs that are `count` tensors of rows, then `vectors` of one row."""

    def draw(case: RowwiseCase, device: torch.device, g: torch.Generator) -> Tensors:
        wide = [_normal(case, device, g, case.rows, case.columns) for _ in range(count)]
        return (*wide, *(_normal(case, device, g, case.columns) for _ in range(vectors)))

    return draw


def _logits_and_labels(case: RowwiseCase, device: torch.device, g: torch.Generator) -> Tensors:
    labels = torch.randint(case.columns, (case.rows,), generator=g, device=device)
    return _normal(case, device, g, case.rows, case.columns), labels


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    off = x - x.mean(-1, keepdim=True)
    return off * torch.rsqrt((off * off).mean(-1, keepdim=True) + EPS) * weight + bias


def _softmax(x: torch.Tensor) -> torch.Tensor:
    # Not step by step: the gradient of e / sum(e), each step rounded, keeps one digit.
    return torch.softmax(x, -1)


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(logits, 1) - logits.gather(1, labels[:, None])[:, 0]


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate * torch.sigmoid(gate) * up


F = torch.nn.functional
WORKS: Mapping[str, Work] = {
    "rms_norm": Work(
        *(_wide(1, 1), _rms_norm, lambda x, w: F.rms_norm(x, w.shape, w, EPS)),
        forward_passes=2,
        backward_passes=3,
    ),
    "layer_norm": Work(
        *(_wide(1, 2), _layer_norm, lambda x, w, b: F.layer_norm(x, w.shape, w, b, EPS)),
        forward_passes=2,
        backward_passes=3,
    ),
    "softmax": Work(
        *(_wide(1, 0), _softmax, lambda x: torch.softmax(x, -1)),
        forward_passes=2,
        backward_passes=3,
    ),
    "cross_entropy": Work(
        *(_logits_and_labels, _cross_entropy),
        lambda logits, labels: F.cross_entropy(logits, labels, reduction="none"),
        forward_passes=1,
        backward_passes=2,
    ),
    "swiglu": Work(
        *(_wide(2, 0), _swiglu, lambda gate, up: F.silu(gate) * up),
        forward_passes=3,
        backward_passes=5,
    ),
}


def load_rowwise_cases(path: Path) -> tuple[RowwiseCase, ...]:
    """Read cases from JSON.

    Args:
        path: A file with ``{"cases": [...]}``, each with the fields of `RowwiseCase`; `name` may
            be left out.

    Raises:
        OptionError: If it cannot be read or names an operator that is not known.
    """
    try:
        cases: list[RowwiseCase] = []
        for entry in json.loads(path.read_text(encoding="utf-8"))["cases"]:
            direction = entry.get("direction", "forward")
            fields: dict[str, Any] = {
                "name": f"{entry['operator']}-{entry['columns']}-{direction}",
                **entry,
            }
            cases.append(RowwiseCase(**fields))
            if cases[-1].operator not in WORKS or direction not in ("forward", "backward"):
                raise ValueError(f"no such operator or direction: {entry}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(
            f"bench: the cases file {path} cannot be read ({type(error).__name__}: {error}). Try: "
            "benchmarks/rowwise_cases.json."
        ) from None
    return tuple(cases)
