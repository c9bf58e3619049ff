"""`tileloom.attention_varlen` and its reference on the CPU: sizes, masks and biases."""

from __future__ import annotations

import pytest
import torch
from tests.ops.attention.cases import BF16, FP32
from tests.ops.attention.varlen import cases
from tests.ops.attention.varlen.cases import VarlenCase

import tileloom
from tileloom import masks
from tileloom.ops import record_choices
from tileloom.ops.attention import attention_reference, attention_varlen_reference
from tileloom.testing import poisoned_memory

CASES = [case for group in cases.GROUPS.values() for case in group]
_WIDE = [c for c in CASES if c.lens_q and not c.options.get("dropout_p")]


def _as_one_batch(case: VarlenCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Visible scores `[Hq, Tq, Tk]` and their bias, written out for all rows and keys at once."""
    inputs = case.inputs()
    shown = inputs.options.get("mask", masks.window(None, None))
    shown = masks.dense(shown) if isinstance(shown, torch.Tensor) else shown
    bias = inputs.options.get("bias", torch.zeros(1, 1, 1, 1)).double().expand(case.full)
    heads, rows, keys = case.sizes[0], sum(case.lens_q), sum(case.lens_k)
    visible = torch.zeros(heads, rows, keys, dtype=torch.bool)
    added = torch.zeros(heads, rows, keys, dtype=torch.float64)
    row, key = 0, 0
    for s, (n, m) in enumerate(zip(case.lens_q, case.lens_k)):
        i, j = torch.arange(n)[:, None], torch.arange(m)[None]
        length = m if shown.lengths is None else min(m, int(shown.lengths[s]))
        far, band = 10**6, shown.band
        tops = [far if x is None else x for x in (band.left_top, band.right_top)]
        bottoms = [far if x is None else x for x in (band.left_bottom, band.right_bottom)]
        end = i + length - n
        own = (j < length) & (j >= i - tops[0]) & (j <= i + tops[1])
        own = (own & (j >= end - bottoms[0]) & (j <= end + bottoms[1])).expand(heads, n, m)
        if shown.visible is not None:
            own = own & shown.visible.expand(case.full)[s, :, :n, :m]
        visible[:, row : row + n, key : key + m] = own
        added[:, row : row + n, key : key + m] = bias[s, :, :n, :m]
        row, key = row + n, key + m
    return visible, added


@pytest.mark.parametrize("case", _WIDE, ids=lambda case: case.id)
def test_the_reference_is_attention_under_a_mask_of_blocks(case):
    inputs = case.inputs()
    visible, added = _as_one_batch(case)
    q, k, v = (t.double().transpose(0, 1)[None] for t in inputs.tensors)
    expected, expected_lse = attention_reference(
        q, k, v, mask=visible, bias=added, scale=inputs.options.get("scale"), return_lse=True
    )
    out, lse = attention_varlen_reference(
        *inputs.arguments(), **inputs.options, return_lse=True, compute_dtype=torch.float64
    )
    torch.testing.assert_close(out, expected[0].transpose(0, 1))
    torch.testing.assert_close(lse, expected_lse[0])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_shared_cases_are_right_on_the_cpu(case):
    inputs = case.poisoned()
    with poisoned_memory():
        out, lse = cases.call(inputs)
        gradients = cases.gradients(inputs)
    cases.check(inputs, out, lse)
    cases.check_gradients(inputs, gradients)


@pytest.mark.parametrize(
    "case", [c for c in _WIDE if c.dtype == FP32 or c.bias], ids=lambda c: c.id
)
def test_the_formulas_of_the_gradients_are_those_of_autograd(case):
    inputs = case.poisoned()
    leaves = [t.double().requires_grad_() for t in inputs.tensors]
    options = dict(inputs.options)
    if "bias" in options:
        options["bias"] = options["bias"].double().requires_grad_()
        leaves.append(options["bias"])
    out, lse = attention_varlen_reference(
        *leaves[:3], *inputs.offsets, *inputs.bounds, **options, return_lse=True
    )
    dout, dlse = (t.double() for t in cases.upstream(inputs))
    expected = torch.autograd.grad([out, lse], leaves, [dout, dlse])
    found = cases.attention_varlen_reference_backward(
        dout, dlse, *inputs.arguments(), **inputs.options, compute_dtype=torch.float64
    )
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs)


def test_a_sequence_sees_nothing_of_its_neighbours():
    case = VarlenCase("neighbours", (20, 30, 10), (20, 30, 10), dtype=BF16, mask=masks.causal())
    inputs = case.inputs()
    expected = tileloom.attention_varlen(*inputs.arguments(), **inputs.options)
    for tensor in inputs.tensors:
        tensor[20:50] = float("nan")
    out = tileloom.attention_varlen(*inputs.arguments(), **inputs.options)
    assert torch.equal(out[:20], expected[:20])
    assert torch.equal(out[50:], expected[50:])
    assert bool(out[20:50].isnan().all())


def test_many_short_sequences():
    lens = (1, 0, 2) * 25
    case = VarlenCase("many", lens, lens[::-1], (1, 1, 8, 8), FP32)
    inputs = case.inputs()
    out, lse = tileloom.attention_varlen(*inputs.arguments(), return_lse=True)
    cases.check(inputs, out, lse)


def test_bounds_given_as_tensors_are_not_read():
    case = VarlenCase("bounds", (7, 3), (4, 9), dtype=FP32)
    inputs = case.inputs()
    expected = tileloom.attention_varlen(*inputs.arguments())
    bounds = (torch.empty((), dtype=torch.int32, device="meta") for _ in range(2))
    assert torch.equal(
        tileloom.attention_varlen(*inputs.tensors, *inputs.offsets, *bounds), expected
    )


def test_the_output_lies_as_q_does():
    q, k, v = torch.randn(3, 10, 2, 8).unbind(0)
    cu = torch.tensor([0, 4, 10], dtype=torch.int32)
    assert tileloom.attention_varlen(q, k, v, cu, cu, 6, 6).is_contiguous()
    q = q.transpose(0, 1).contiguous().transpose(0, 1)
    assert tileloom.attention_varlen(q, k, v, cu, cu, 6, 6).transpose(0, 1).is_contiguous()


def test_dropout_is_that_of_the_padded_batch():
    case = VarlenCase("padded", (5, 3, 0), (4, 7, 2), dtype=FP32, spare=2)
    (q, k, v), offsets, bounds = (x := case.inputs()).tensors, x.offsets, x.bounds
    out = attention_varlen_reference(q, k, v, *offsets, *bounds, dropout_p=0.5, philox=(7, 3))
    padded = [torch.zeros(3, 2, n, 32) for n in (bounds[0], bounds[1], bounds[1])]
    for tensor, whole, ends in zip((q, k, v), padded, (offsets[0], offsets[1], offsets[1])):
        for s in range(3):
            part = tensor[ends[s] : ends[s + 1]].transpose(0, 1)
            whole[s, :, : part.shape[1]] = part
    lengths = masks.key_lengths(torch.tensor(case.lens_k))
    expected = attention_reference(*padded, mask=lengths, dropout_p=0.5, philox=(7, 3))
    for s, n in enumerate(case.lens_q):
        torch.testing.assert_close(
            out[offsets[0][s] : offsets[0][s + 1]], expected[s, :, :n].transpose(0, 1)
        )


def test_autocast_casts_as_it_does_for_attention():
    inputs = VarlenCase("autocast", (5, 3), (4, 7), dtype=FP32).inputs()
    with torch.autocast("cpu", torch.bfloat16):
        out = tileloom.attention_varlen(*inputs.arguments())
    halves = [t.to(BF16) for t in inputs.tensors]
    assert torch.equal(out, tileloom.attention_varlen(*halves, *inputs.offsets, *inputs.bounds))


def test_the_choice_has_the_name_of_the_function():
    inputs = VarlenCase("choice", (5, 3), (4, 7), dtype=FP32).inputs()
    with record_choices() as made:
        cases.gradients(inputs)
    assert [choice.op for choice in made] == ["attention_varlen", "attention_varlen_bwd"]
    assert made[0].problem.packed.totals == (8, 11)
