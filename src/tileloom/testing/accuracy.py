"""The accuracy rule: a kernel may be as wrong as plain PyTorch is, and hardly more.

A tolerance picked by hand either rejects right kernels near zero or misses a skipped key in a long
row. Here the tolerance comes from a baseline, the plain formula in the kernel's own dtype: both it
and the kernel are compared with a float64 reference, once element by element and once row by row.
The rule is the same for every operator, dtype and machine; there is nothing to loosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from tileloom.errors import known_keywords

ELEMENT_FACTOR = 2.0
ROW_FACTOR = 3.0
WEAK_FACTOR = 10.0
# An RMS over a handful of elements is a matter of luck, the baseline's as much as the kernel's:
# rows shorter than this are joined with their neighbours. Right attention outputs of 8 x 257 rows
# were rejected in 36, 23, 12 and 0 of 36 cases for rows of 1, 2, 4 and 8 elements; joined, never.
SHORTEST_ROW = 8

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Rule = Literal["nonfinite", "element", "row"]


class CaseError(ValueError):
    """The test case itself is at fault: its tensors cannot show whether a kernel is right."""


class WeakCaseError(CaseError):
    """The case cannot tell the kernel from one that writes zeros."""


@dataclass(frozen=True)
class AccuracyReport:
    """What was wrong with a tensor.

    Attributes:
        name: The tensor's name, as the caller gave it.
        rule: ``"nonfinite"`` (a NaN or infinity differs from the reference's), ``"element"`` (an
            element's error is too large) or ``"row"`` (a row's RMS error is too large).
        worst: Coordinates of the worst element (of the worst row, for the row rule).
        actual: The value there.
        reference: The float64 reference there.
        baseline: The baseline there.
        error: The element's error, or the row's RMS error.
        allowed: What the broken rule allows there.
        bad_elements: Share of elements that break the rule of elements or of NaN, 0 to 1.
        bad_rows: Share of rows that break the rule of rows, 0 to 1.
        box: First and last bad index along each axis: which tile is it?
    """

    name: str
    rule: Rule
    worst: tuple[int, ...]
    actual: float
    reference: float
    baseline: float
    error: float
    allowed: float
    bad_elements: float
    bad_rows: float
    box: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        """Say it in a few lines."""
        box = ", ".join(f"{low}..{high}" for low, high in self.box)
        where = list(self.worst)
        value = (
            f"got {self.actual:.8g}, reference {self.reference:.8g}, baseline {self.baseline:.8g}"
        )
        first = {
            "nonfinite": f"{self.name}: a NaN or infinity differs from the reference's at {where}",
            "element": f"{self.name}: an element is off by {self.error:.3g} at {where}, "
            f"{self.allowed:.3g} is allowed",
            "row": f"{self.name}: the row of {where} has an RMS error of {self.error:.3g}, "
            f"{self.allowed:.3g} is allowed",
        }[self.rule]
        return (
            f"{first}.\n  there: {value}\n"
            f"  bad: {self.bad_elements:.3%} of elements, {self.bad_rows:.3%} of rows, "
            f"all within [{box}]"
        )


class AccuracyError(AssertionError):
    """A tensor breaks the accuracy rule; `report` holds the particulars."""

    def __init__(self, report: AccuracyReport) -> None:
        super().__init__(str(report))
        self.report = report


@dataclass(frozen=True)
class _Judged:
    """Errors, and what the rules allow, of one tensor. Rows are joined as `_rows` says."""

    error: torch.Tensor
    allowed: torch.Tensor
    row_error: torch.Tensor
    row_allowed: torch.Tensor
    row_shape: tuple[int, ...]


@known_keywords
def assert_accurate(
    actual: torch.Tensor,
    reference: torch.Tensor,
    baseline: torch.Tensor,
    *,
    name: str = "out",
) -> None:
    """Check a kernel's result against a float64 reference, judged by what plain PyTorch achieves.

    Math, with ``eps`` the relative spacing of actual's dtype and rows along the last dimension::

        element: |actual - reference| <= 2 max|baseline - reference| + eps |reference|
        row:     rms(actual - reference) <= 3 rms(baseline - reference) + eps rms(reference)

    NaN and infinities must stand exactly where the reference has them, infinities with its sign;
    the other rules skip them. Rows shorter than 8 elements are joined with their neighbours, since
    an RMS over a few elements says little. An empty tensor has only its shape and dtype checked.

    Args:
        actual: The result to judge, any shape; fp16, bf16, fp32 or fp64; any device.
        reference: The right result in float64, actual's shape.
        baseline: The plain formula computed in actual's dtype (with TF32 and reduced-precision
            reductions off), actual's shape and dtype; finite wherever the reference is.
        name: What to call the tensor in the report, such as ``"dq"``.

    Raises:
        AccuracyError: If actual breaks a rule; the text has the worst element, the share of what is
            bad and its bounding box.
        WeakCaseError: If zeros would pass too: the reference's RMS is not even 10 times the RMS
            that the row rule allows.
        CaseError: If shapes or dtypes do not fit, or reference or baseline cannot serve.
    """
    _check_tensors(actual, reference, baseline, name)
    if actual.numel() == 0:
        return
    device = reference.device
    eps = float(torch.finfo(actual.dtype).eps)
    a = actual.detach().to(device, torch.float64)
    r = reference.detach()
    b = baseline.detach().to(device, torch.float64)
    unlike = _nonfinite_differs(b, r)
    if bool(unlike.any()):
        raise CaseError(
            f"{name}: the baseline has a NaN or infinity at {_first(unlike)} that the float64 "
            f"reference lacks, or lacks one that it has. Try: a baseline that is finite there "
            f"(other inputs, or the formula with the row's maximum subtracted first)."
        )
    unlike = _nonfinite_differs(a, r)
    finite = r.isfinite() & ~unlike
    judged = _judge(a, r, b, finite, eps)
    _refuse_weak(r, judged, finite, name)
    if bool(unlike.any()):
        raise AccuracyError(_report("nonfinite", name, (a, r, b), judged, unlike))
    bad = judged.error > judged.allowed
    if bool(bad.any()):
        raise AccuracyError(_report("element", name, (a, r, b), judged, bad))
    if bool((judged.row_error > judged.row_allowed).any()):
        raise AccuracyError(_report("row", name, (a, r, b), judged, bad))


def _check_tensors(
    actual: torch.Tensor, reference: torch.Tensor, baseline: torch.Tensor, name: str
) -> None:
    for what, given in (("actual", actual), ("reference", reference), ("baseline", baseline)):
        if not isinstance(given, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise CaseError(
                f"{name}: {what} is a {type(given).__name__}; it must be a torch.Tensor. Try: "
                f"torch.as_tensor({what})."
            )
    shapes = [tuple(t.shape) for t in (actual, reference, baseline)]
    if len(set(shapes)) != 1:
        raise CaseError(
            f"{name}: actual, reference and baseline have shapes {shapes[0]}, {shapes[1]} and "
            f"{shapes[2]}; they must be equal."
        )
    if reference.dtype != torch.float64:
        raise CaseError(
            f"{name}: the reference has dtype {reference.dtype}; it must be torch.float64. "
            f"Try: compute it from the inputs cast to float64."
        )
    if actual.dtype not in _DTYPES:
        raise CaseError(
            f"{name}: actual has dtype {actual.dtype}; the rule is made for float16, bfloat16, "
            f"float32 and float64."
        )
    if baseline.dtype != actual.dtype:
        raise CaseError(
            f"{name}: actual has dtype {actual.dtype} and the baseline {baseline.dtype}, which "
            f"would set another dtype's tolerance. Try: compute the baseline in {actual.dtype}."
        )


def _nonfinite_differs(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    return (
        (x.isnan() != r.isnan()) | (x.isposinf() != r.isposinf()) | (x.isneginf() != r.isneginf())
    )


def _rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the array of rows: the last dimension goes, and more if it is short."""
    outer = list(shape)
    length = outer.pop() if outer else 1
    while outer and length < SHORTEST_ROW:
        length *= outer.pop()
    return tuple(outer)


def _rms(x: torch.Tensor, finite: torch.Tensor, row_shape: tuple[int, ...]) -> torch.Tensor:
    """RMS of each row over its finite elements; 0 for a row that has none."""
    square = torch.where(finite, x, 0.0).square().reshape(*row_shape, -1).sum(-1)
    count = finite.reshape(*row_shape, -1).sum(-1).clamp(min=1)
    return (square / count).sqrt()


def _judge(
    a: torch.Tensor, r: torch.Tensor, b: torch.Tensor, finite: torch.Tensor, eps: float
) -> _Judged:
    row_shape = _rows(tuple(r.shape))
    error = torch.where(finite, (a - r).abs(), 0.0)
    base = torch.where(finite, (b - r).abs(), 0.0)
    magnitude = torch.where(finite, r.abs(), 0.0)
    return _Judged(
        error=error,
        allowed=ELEMENT_FACTOR * base.max() + eps * magnitude,
        row_error=_rms(error, finite, row_shape),
        row_allowed=ROW_FACTOR * _rms(base, finite, row_shape)
        + eps * _rms(magnitude, finite, row_shape),
        row_shape=row_shape,
    )


def _refuse_weak(r: torch.Tensor, judged: _Judged, finite: torch.Tensor, name: str) -> None:
    if not bool(finite.any()):
        return  # nothing but NaN and infinities: their places are what is tested
    rms = float(_rms(r, finite, ()))
    # Weighted as the reference is: a row of few finite elements counts as those elements.
    counts = finite.reshape(*judged.row_shape, -1).sum(-1)
    allowed = float(((judged.row_allowed.square() * counts).sum() / counts.sum()).sqrt())
    if rms >= WEAK_FACTOR * allowed and rms > 0:
        return
    raise WeakCaseError(
        f"{name}: this case cannot tell a kernel from zeros: the reference has an RMS of "
        f"{rms:.3g}, which must be {WEAK_FACTOR:g} times the RMS error of {allowed:.3g} that the "
        f"rule allows. Try: inputs whose result is larger against its rounding errors."
    )


def _first(mask: torch.Tensor) -> list[int]:
    return [int(i) for i in mask.nonzero()[0]]


def _unravel(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    place: list[int] = []
    for size in reversed(shape):
        flat, index = divmod(flat, size)
        place.append(index)
    return tuple(reversed(place))


def _worst(rule: Rule, judged: _Judged, bad: torch.Tensor) -> int:
    """Flat index of the worst element."""
    if rule == "nonfinite":
        return int(bad.flatten().to(torch.uint8).argmax())
    if rule == "element":
        return int((judged.error / judged.allowed).nan_to_num(0.0, posinf=torch.inf).argmax())
    ratio = (judged.row_error / judged.row_allowed).nan_to_num(0.0, posinf=torch.inf)
    row = int(ratio.argmax())
    length = bad.numel() // ratio.numel()
    return row * length + int(judged.error.reshape(-1, length)[row].argmax())


def _report(
    rule: Rule,
    name: str,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    judged: _Judged,
    bad: torch.Tensor,
) -> AccuracyReport:
    shape = tuple(bad.shape)
    bad_rows = judged.row_error > judged.row_allowed
    flat_bad = bad.reshape(bad_rows.numel(), -1)
    region = (flat_bad | bad_rows.reshape(-1, 1)).reshape(shape) if rule != "nonfinite" else bad
    places = region.nonzero()
    box = tuple((int(axis.min()), int(axis.max())) for axis in places.unbind(1))
    flat = _worst(rule, judged, bad)
    values = [float(t.reshape(-1)[flat]) for t in tensors]
    if rule == "row":
        row = flat // flat_bad.shape[1]
        error = float(judged.row_error.reshape(-1)[row])
        allowed = float(judged.row_allowed.reshape(-1)[row])
    else:
        error = abs(values[0] - values[1])
        allowed = float(judged.allowed.reshape(-1)[flat])
    return AccuracyReport(
        name=name,
        rule=rule,
        worst=_unravel(flat, shape),
        actual=values[0],
        reference=values[1],
        baseline=values[2],
        error=error,
        allowed=allowed,
        bad_elements=float(bad.double().mean()),
        bad_rows=float(bad_rows.double().mean()),
        box=box,
    )
