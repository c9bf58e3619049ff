"""The accuracy rule must reject what is wrong and accept what is right: attention forward, on CPU.

The seeded bugs are the ones that the rules of other projects miss in part: a flat tolerance misses
a skipped key, a rule with one global maximum misses what happens in late, small rows.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import pytest
import torch

from tileloom.testing import AccuracyError, CaseError, WeakCaseError, assert_accurate

D = 64


def visible(rows: torch.Tensor, len_k: int, shift: int = 0) -> torch.Tensor:
    return torch.arange(len_k) <= rows.unsqueeze(-1) + shift


def plain(q, k, v, mask=None, scale=None):
    """The formula in the dtype of its inputs."""
    scores = (q @ k.mT) * (scale or 1 / math.sqrt(q.shape[-1]))
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return torch.softmax(scores, -1) @ v


def online(q, k, v, mask=None, scale=None, block=64):
    """A right kernel: softmax block by block in fp32, P rounded to the dtype before its product."""
    scale = scale or 1 / math.sqrt(q.shape[-1])
    top = torch.full((*q.shape[:-1], 1), -math.inf)
    total = torch.zeros_like(top)
    acc = torch.zeros(*q.shape[:-1], v.shape[-1])
    for start in range(0, k.shape[-2], block):
        part = slice(start, start + block)
        scores = (q.float() @ k[..., part, :].float().mT) * scale
        if mask is not None:
            scores = scores.masked_fill(~mask[..., part], -math.inf)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        safe = new_top.masked_fill(new_top == -math.inf, 0)
        p = torch.exp(scores - safe)
        shrink = torch.exp(top - safe)
        total = total * shrink + p.sum(-1, keepdim=True)
        acc = acc * shrink + p.to(q.dtype).float() @ v[..., part, :].float()
        top = new_top
    return (acc / total.masked_fill(total == 0, 1)).to(q.dtype)


@dataclass(frozen=True)
class Causal:
    """Causal attention of one head: inputs, truth, baseline and a right kernel's result."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    reference: torch.Tensor
    baseline: torch.Tensor
    right: torch.Tensor

    def rows(self, rows: slice, *, drop=None, shift=0, scale=None) -> torch.Tensor:
        """The kernel's rows `rows`, with a bug: a key dropped, a shifted mask, another scale."""
        index = torch.arange(len(self.q))[rows]
        mask = visible(index, len(self.k), shift)
        if drop == "diagonal":
            mask = mask & (torch.arange(len(self.k)) != index.unsqueeze(-1))
        elif drop is not None:
            mask[:, drop] = False
        return online(self.q[rows], self.k, self.v, mask, scale, block=512)

    def with_rows(self, rows: slice, values) -> torch.Tensor:
        out = self.right.clone()
        out[rows] = values
        return out


@functools.cache
def causal(length: int, dtype: torch.dtype) -> Causal:
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(length, D, generator=generator).to(dtype) for _ in range(3))
    mask = visible(torch.arange(length), length)
    return Causal(
        q, k, v,
        reference=plain(q.double(), k.double(), v.double(), mask),
        baseline=plain(q, k, v, mask),
        right=online(q, k, v, mask, block=512),
    )  # fmt: skip


BUGS = {
    "all zeros": (1024, lambda c: torch.zeros_like(c.right)),
    "causal mask off by one": (1024, lambda c: c.rows(slice(None), shift=1)),
    "scale wrong by 2 %": (1024, lambda c: c.rows(slice(None), scale=1.02 / math.sqrt(D))),
    "last row lost": (1024, lambda c: c.with_rows(slice(-1, None), 0)),
    "a 16-row tile stale": (
        1024,
        lambda c: c.with_rows(slice(512, 528), c.right[496:512]),
    ),
    "one key skipped": (1024, lambda c: c.rows(slice(None), drop=500)),
    "4096: one key skipped in late rows": (
        4096,
        lambda c: c.with_rows(slice(3000, None), c.rows(slice(3000, None), drop=2000)),
    ),
    "4096: diagonal dropped in the last tile": (
        4096,
        lambda c: c.with_rows(slice(-128, None), c.rows(slice(-128, None), drop="diagonal")),
    ),
    "4096: last 64 rows zero": (4096, lambda c: c.with_rows(slice(-64, None), 0)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("bug", BUGS)
def test_rejects_seeded_bug(bug, dtype):
    length, make = BUGS[bug]
    case = causal(length, dtype)
    assert_accurate(case.right, case.reference, case.baseline)
    with pytest.raises(AccuracyError):
        assert_accurate(make(case), case.reference, case.baseline)


def test_rejects_gain_of_four_thousandths_in_fp16():
    case = causal(1024, torch.float16)
    gained = (case.right.double() * 1.004).half()
    with pytest.raises(AccuracyError):
        assert_accurate(gained, case.reference, case.baseline)


SHAPES = [(1, 1), (1, 300), (64, 64), (129, 1000), (257, 511)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("input_scale", [1.0, 2.0])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_accepts_right_kernel(shape, input_scale, dtype):
    """20 of these, each with 10 seeds: 200 right results."""
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        len_q, len_k = shape
        q, k, v = (
            (torch.randn(n, D, generator=generator) * input_scale).to(dtype)
            for n in (len_q, len_k, len_k)
        )
        mask = visible(torch.arange(len_q), len_k) if seed % 2 else None
        reference = plain(q.double(), k.double(), v.double(), mask)
        assert_accurate(online(q, k, v, mask), reference, plain(q, k, v, mask))


@pytest.mark.parametrize("columns", [1, 2, 4, 8, 16, 32])
def test_short_rows_raise_no_false_alarm(columns):
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(4, 96, n, generator=generator).bfloat16() for n in (D, D, columns))
        reference = plain(q.double(), k.double(), v.double())
        assert_accurate(online(q, k, v), reference, plain(q, k, v))


def test_report_locates_the_bad_tile():
    case = causal(1024, torch.bfloat16)
    bad = case.with_rows(slice(512, 528), 0)
    with pytest.raises(AccuracyError) as caught:
        assert_accurate(bad, case.reference, case.baseline, name="dq")
    report = caught.value.report
    assert report.name == "dq"
    assert report.rule == "element"
    assert report.box[0] == (512, 527)
    assert 512 <= report.worst[0] < 528
    assert report.actual == 0
    assert report.reference == case.reference[report.worst]
    assert report.baseline == float(case.baseline[report.worst])
    assert report.bad_rows == 16 / 1024
    assert 0 < report.bad_elements <= 16 / 1024
    text = str(caught.value)
    assert text.startswith(f"dq: an element is off by {report.error:.3g} at {list(report.worst)}")
    assert "1.562% of rows" in text
    assert "[512..527, 0..63]" in text


def test_row_rule_finds_what_the_element_rule_cannot():
    case = causal(4096, torch.bfloat16)
    bad = BUGS["4096: diagonal dropped in the last tile"][1](case)
    with pytest.raises(AccuracyError, match="has an RMS error of") as caught:
        assert_accurate(bad, case.reference, case.baseline)
    report = caught.value.report
    assert report.rule == "row"
    assert report.bad_elements == 0
    assert report.box[0][0] >= 4096 - 128
    assert report.error > report.allowed


def test_nan_and_infinity_must_stand_where_the_reference_has_them():
    reference = torch.randn(4, 32, dtype=torch.float64)
    reference[1, 2], reference[3, 4] = -math.inf, math.nan
    same = reference.float()
    assert_accurate(same, reference, same)
    for place, value in (((0, 0), math.nan), ((1, 2), math.inf), ((1, 2), 0.0), ((3, 4), 1.0)):
        actual = same.clone()
        actual[place] = value
        with pytest.raises(AccuracyError, match="NaN or infinity differs") as caught:
            assert_accurate(actual, reference, same)
        assert caught.value.report.worst == place
        assert caught.value.report.box == tuple((i, i) for i in place)


def test_rows_of_zeros_must_be_zeros():
    reference = torch.randn(32, 32, dtype=torch.float64)
    reference[7] = 0
    baseline = reference.bfloat16()
    assert_accurate(baseline, reference, baseline)
    actual = baseline.clone()
    actual[7, 3] = 1e-30
    with pytest.raises(AccuracyError) as caught:
        assert_accurate(actual, reference, baseline)
    assert caught.value.report.worst == (7, 3)


def test_case_that_cannot_tell_zeros_is_an_error_of_the_test():
    reference = torch.full((64, 64), 1e-3, dtype=torch.float64)
    baseline = (reference + torch.randn(64, 64, dtype=torch.float64) * 1e-3).half()
    for actual in (torch.zeros(64, 64).half(), reference.half()):
        with pytest.raises(WeakCaseError, match="cannot tell a kernel from zeros: the reference"):
            assert_accurate(actual, reference, baseline)
    zeros = torch.zeros(8, 8)
    with pytest.raises(WeakCaseError):
        assert_accurate(zeros, zeros.double(), zeros)


def test_faulty_cases_are_refused():
    x = torch.randn(4, 4)
    with pytest.raises(CaseError, match=r"shapes \(4, 4\), \(4,\) and \(4, 4\); they must be"):
        assert_accurate(x, x[0].double(), x)
    with pytest.raises(CaseError, match=r"reference has dtype torch.float32; it must be"):
        assert_accurate(x, x, x)
    with pytest.raises(CaseError, match=r"baseline torch.float16, which would set another"):
        assert_accurate(x, x.double(), x.half())
    with pytest.raises(CaseError, match=r"actual has dtype torch.int32; the rule is made for"):
        assert_accurate(x.int(), x.double(), x.int())
    nan = x.clone()
    nan[2, 3] = math.nan
    with pytest.raises(CaseError, match=r"the baseline has a NaN or infinity at \[2, 3\]"):
        assert_accurate(x, x.double(), nan)


@pytest.mark.parametrize("shape", [(0,), (2, 0, 64), (3, 5, 0)])
def test_empty_tensors_have_their_shape_checked(shape):
    x = torch.zeros(shape)
    assert_accurate(x, x.double(), x)
    with pytest.raises(CaseError, match="shapes"):
        assert_accurate(x, torch.zeros(1, dtype=torch.float64), x)


def test_scalar_and_vector():
    for shape in ((), (1,), (40,)):
        x = torch.rand(shape) + 1
        assert_accurate(x, x.double(), x)
        with pytest.raises(AccuracyError):
            assert_accurate(x * 1.01, x.double(), x)
