"""Attention forward on a real GPU: every backend, judged by the accuracy rule, run twice.

What a backend refuses is skipped with its own reasons. Outputs are allocated full of NaN between
canaries; the second run must give the same bits.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.ops.attention import cases, warm
from tests.ops.attention.cases import BF16, FP16, FP32, AttentionCase

import tileloom
from tileloom import masks
from tileloom.ops import record_choices
from tileloom.ops.attention import attention_reference
from tileloom.ops.attention.config import (
    AttentionConfig,
    GluonSm90Config,
    TritonConfig,
    gluon_rule,
    triton_rule,
)
from tileloom.target import target_of
from tileloom.testing import assert_accurate, poisoned_memory

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_products")]

_CAUSAL = {"is_causal": True}


@pytest.fixture(autouse=True, scope="module")
def compiled(request):
    """Most kernels, compiled by several processes before the first test (unless few are asked)."""
    if len(request.session.items) > 50 and "PYTEST_XDIST_WORKER" not in os.environ:
        warm.in_processes(min(12, os.cpu_count() or 1), __name__)


@pytest.fixture(params=["triton", "gluon_sm90"])
def backend(request) -> str:
    return request.param


def config_for(backend: str, inputs: cases.Inputs) -> AttentionConfig:
    """The backend's config for a call; skips with the reasons why there is none."""
    problem, target = cases.problem_of(inputs), target_of(inputs.q)
    rule: TritonConfig | GluonSm90Config
    rule = triton_rule(problem, target) if backend == "triton" else gluon_rule(problem)
    reasons = rule.reasons_against(problem, target)
    if reasons:
        pytest.skip(f"{backend}: {'; '.join(reasons)}")
    return rule


def run(inputs: cases.Inputs, config: AttentionConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE of two runs that agree to the bit."""
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _ in range(2):
        with record_choices() as made, poisoned_memory():
            out, lse = tileloom.attention(
                inputs.q, inputs.k, inputs.v, **inputs.options, return_lse=True, config=config
            )
            torch.cuda.synchronize()
        assert [choice.backend for choice in made] == [config.backend]
        results.append((out, lse))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    return results[0]


def judge(case: AttentionCase, backend: str) -> None:
    inputs = case.inputs("cuda")
    config = config_for(backend, inputs)
    out, lse = run(inputs, config)
    cases.check(inputs, out, lse)


def warm_one(case: AttentionCase) -> None:
    """Compile what a case needs."""
    inputs = case.inputs("cuda")
    problem, target = cases.problem_of(inputs), target_of(inputs.q)
    for config in (triton_rule(problem, target), gluon_rule(problem)):
        if not config.reasons_against(problem, target):
            tileloom.attention(inputs.q, inputs.k, inputs.v, **inputs.options, config=config)


_SHARED = [case for group in cases.GROUPS.values() for case in group]
_BF16_NAMES = ("A2-blind-rows", "top-left", "lengths-window", "everything", "mask-nan")
_IN_BF16 = [replace(case, dtype=BF16) for case in _SHARED if case.name in _BF16_NAMES]


@pytest.mark.parametrize("case", [*_SHARED, *_IN_BF16], ids=lambda case: case.id)
def test_the_shared_cases_are_right(case, backend):
    judge(case, backend)


def _dims() -> list[AttentionCase]:
    half = [
        AttentionCase("dims", (1, 4, 2, 200, 300, d, d), dtype, options=_CAUSAL)
        for dtype, ds in (
            (FP16, (8, 24, 32, 64, 72, 80, 96, 128, 200, 256, 512)),
            (BF16, (40, 64, 128, 256)),
            (FP32, (8, 64, 72, 128, 256, 512)),
        )
        for d in ds
    ]
    return [
        *half,
        AttentionCase("A22-real", (1, 8, 4, 1023, 1023, 512, 512), BF16, options=_CAUSAL),
        AttentionCase("values", (1, 4, 2, 200, 300, 192, 128), BF16, options=_CAUSAL),
    ]


_DIMS = _dims()
# One case for each kernel that most of these tests need; see `warm`.
COMPILED = [*_DIMS, *_IN_BF16, *_SHARED]


@pytest.mark.parametrize("case", _DIMS, ids=lambda case: case.id)
def test_every_head_dim_is_right(case, backend):
    judge(case, backend)


@pytest.mark.parametrize("form", ["full", "causal", "window", "bias", "mask"])
@pytest.mark.parametrize(
    "dims", [(192, 128), (64, 128), (128, 64), (256, 128), (136, 40), (8, 256)]
)
def test_values_of_another_width_are_right(dims, form):
    extras: dict[str, Any] = {
        "full": {},
        "causal": {"options": _CAUSAL},
        "window": {
            "mask": cases.lengths(440, 171, then=masks.window(90, 40, anchor="bottom_right"))
        },
        "bias": {"bias": cases.added((4, 333, 440)), "options": _CAUSAL},
        "mask": {"mask": cases.visible((2, 1, 333, 440)), "hide": slice(33, 61)},
    }
    layouts = ("transposed", "gapped", "transposed")
    case = AttentionCase(form, (2, 4, 2, 333, 440, *dims), BF16, layouts, **extras[form])
    judge(case, "gluon_sm90")


_LENGTHS = (1, 63, 64, 65, 127, 128, 129, 257, 1000, 1023)


@pytest.mark.parametrize("form", ["full", "causal", "window"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("len_q", _LENGTHS)
def test_lengths_around_the_tiles_edges_are_right(len_q, dim, form, backend):
    mask = {
        "full": None,
        "causal": masks.causal("bottom_right"),
        "window": masks.window(70, 130, anchor="bottom_right"),
    }[form]
    for len_k in (_LENGTHS[(_LENGTHS.index(len_q) * 3 + 4) % len(_LENGTHS)], len_q, 192, 321):
        extra = None if mask is None else cases.shown_by(mask)
        judge(AttentionCase(form, (2, 2, 1, len_q, len_k, dim, dim), BF16, mask=extra), backend)


@pytest.mark.parametrize(
    ("len_q", "len_k", "dim", "form"),
    [
        *((n, n, 64, "full") for n in (1000, 1024, 4096)),  # tiles of three warpgroups, or of two
        *((n, n, 64, "causal") for n in (8192, 8256, 8300)),
        *((n, n, dim, "causal") for dim in (128, 256) for n in (1024, 1000, 2048)),
        (700, 1300, 256, "causal"),
        (2048, 1088, 256, "causal"),
        (512, 4096, 128, "causal"),
    ],
)
def test_rows_and_blocks_that_are_dealt_out_unevenly(len_q, len_k, dim, form):
    """Those of the Hopper forward; see `test_tiles_emulator.py`."""
    extra = None if form == "full" else cases.shown_by(masks.causal("bottom_right"))
    sizes = (2, 3, 1, len_q, len_k, dim, dim)
    judge(AttentionCase(form, sizes, BF16, mask=extra), "gluon_sm90")


@pytest.mark.parametrize("anchor", ["top_left", "bottom_right"])
@pytest.mark.parametrize(("len_q", "len_k"), [(300, 700), (700, 300)])
@pytest.mark.parametrize(("left", "right"), [(0, 0), (100, 31), (128, None), (None, 64), (500, 0)])
def test_windows_with_lengths_are_right(left, right, len_q, len_k, anchor, backend):
    window = masks.window(left, right, anchor=anchor)
    mask = cases.lengths(0, 129, len_k, len_k + 99, dtype=torch.int32, then=window)
    judge(AttentionCase("window", (4, 2, 2, len_q, len_k, 64, 64), FP16, mask=mask), backend)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_rows_of_finfo_min_weigh_all_keys_alike(dtype, backend):
    least = torch.finfo(dtype).min
    bias = cases.added((200, 300), rows=(slice(10, 90), least))
    judge(AttentionCase("rows-of-min", (1, 2, 2, 200, 300, 64, 64), dtype, bias=bias), backend)


_BIASES = {
    "riding": cases.added((2, 1, 333, 440), layout=cases.rows_of_16_bytes),
    "unaligned rows": cases.added((4, 333, 441)),
    "float": cases.added((1, 4, 333, 440), dtype=FP32),
    "unaligned float": cases.added((333, 441), dtype=FP32, layout="unaligned"),
    "of keys": cases.added((2, 1, 1, 440)),
    "of rows": cases.added((2, 4, 333, 1)),
    "strided": cases.added((4, 333, 440), layout="last_strided"),
    "expanded": cases.expanded_to_full(cases.added((1, 4, 1, 440))),
}


@pytest.mark.parametrize("form", ["full", "causal", "window"])
@pytest.mark.parametrize("name", _BIASES)
def test_biases_of_every_layout_are_right(name, form, backend):
    """Rows that are not there, and keys before the first, are next to memory that is not ours."""
    masks_of = {
        "causal": cases.shown_by(masks.causal("bottom_right")),
        "window": cases.lengths(440, 171, then=masks.window(90, 40, anchor="bottom_right")),
    }
    sizes = (2, 4, 2, 333, 441 if "unaligned" in name else 440, 64, 64)
    judge(AttentionCase(name, sizes, BF16, mask=masks_of.get(form), bias=_BIASES[name]), backend)


@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("with_mask", [False, True])
def test_biases_of_wide_heads_are_right(dim, with_mask, backend):
    bias = cases.added((4, 333, 440))
    mask = cases.visible((2, 1, 333, 440)) if with_mask else None
    sizes = (2, 4, 2, 333, 440, dim, dim)
    judge(AttentionCase("wide", sizes, FP16, bias=bias, mask=mask, options=_CAUSAL), backend)


@pytest.mark.parametrize("shape", [(2, 4, 333, 448), (2, 1, 1, 440), (4, 333, 441), (333, 1)])
def test_bool_masks_of_every_layout_are_right(shape, backend):
    sizes = (2, 4, 2, 333, max(440, shape[-1]), 64, 64)
    judge(AttentionCase("mask", sizes, BF16, mask=cases.visible(shape), options=_CAUSAL), backend)


def test_keys_that_a_mask_hides_from_all_may_be_nan_in_every_tile(backend):
    """Each tile of the Hopper kernel goes round twice."""
    mask = cases.visible((2, 1, 700, 900))
    sizes = (2, 4, 2, 700, 900, 128, 128)
    judge(AttentionCase("nan", sizes, BF16, mask=mask, hide=slice(64, 700)), backend)


def test_large_scores_in_float32_are_right():
    sizes = (2, 3, 3, 170, 193, 32, 32)
    case = AttentionCase("large-scores", sizes, FP32, options=_CAUSAL, input_scale=2.0)
    judge(case, "triton")


def test_a1_columns_of_finfo_min_at_full_size():
    bias = cases.added(
        (1, 1, 441, 441), is_zero=True, columns=(slice(0, 128), torch.finfo(FP32).min)
    )
    judge(AttentionCase("A1-real", (32, 12, 12, 441, 441, 64, 64), FP32, bias=bias), "triton")


@pytest.mark.parametrize("layout", ["transposed", "expanded", "gapped", "unaligned"])
@pytest.mark.parametrize("dim", [64, 128])
def test_layouts_are_right(layout, dim, backend):
    sizes = (2, 4, 4, 333, 444, dim, dim)
    judge(AttentionCase(layout, sizes, BF16, (layout,) * 3, options=_CAUSAL), backend)


@pytest.mark.parametrize("heads", [(70000, 2, 1), (1, 70000, 35000)])
def test_more_heads_than_a_grid_dimension_holds(heads, backend):
    judge(AttentionCase("many-heads", (*heads, 17, 33, 32, 32), FP16), backend)


def test_m5_one_query_of_many_heads(backend):
    mask = cases.lengths(300, 211, then=masks.window(150, 0, anchor="bottom_right"))
    judge(AttentionCase("M5", (2, 70, 10, 1, 300, 64, 64), BF16, mask=mask), backend)


def test_the_output_lies_as_q_does(backend):
    case = AttentionCase("transposed", (2, 4, 4, 65, 90, 64, 64), layouts=("transposed",) * 3)
    inputs = case.inputs("cuda")
    out, lse = run(inputs, config_for(backend, inputs))
    assert out.transpose(1, 2).is_contiguous()
    assert lse.is_contiguous()


def test_a9_offsets_beyond_two_to_the_31(backend):
    """K and V stored length first: the last key of a batch lies 3e9 elements from its first."""
    batch, len_k, dim = 1000, 24000, 128
    generator = torch.Generator("cuda").manual_seed(0)

    def stored() -> torch.Tensor:
        made = torch.empty((len_k, batch, dim), dtype=BF16, device="cuda")
        return made.normal_(generator=generator).permute(1, 0, 2)[:, None]

    q = torch.randn((batch, 1, 256, dim), dtype=BF16, device="cuda", generator=generator)
    inputs = cases.Inputs(q, stored(), stored(), {})
    config = config_for(backend, inputs)
    out, lse = run(inputs, config)
    for place in (0, batch - 1):
        part = slice(place, place + 1)
        cases.check(cases.Inputs(q[part], inputs.k[part], inputs.v[part], {}), out[part], lse[part])


def test_a8_bias_and_mask_beyond_two_to_the_32(backend):
    """A bias and a mask of more than 2^32 elements; judged on the first and the last rows."""
    length, dim = 65600, 32
    case = AttentionCase("A8", (1, 1, 1, length, length, dim, dim), BF16)
    inputs = case.inputs("cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    bias = torch.empty((length, length), dtype=BF16, device="cuda").normal_(generator=generator)
    mask = torch.ones((length, length), dtype=torch.bool, device="cuda")
    mask[:, ::3] = False
    options: dict[str, Any] = {"bias": bias, "mask": mask}
    whole = cases.Inputs(inputs.q, inputs.k, inputs.v, options)
    out, lse = run(whole, config_for(backend, whole))
    for rows in (slice(0, 64), slice(length - 64, length)):
        part = {"bias": bias[rows], "mask": mask[rows]}
        cases.check(
            cases.Inputs(inputs.q[:, :, rows], inputs.k, inputs.v, part),
            out[:, :, rows],
            lse[:, :, rows],
        )


def test_a_cuda_graph_replays_it(backend):
    case = AttentionCase("graph", (2, 4, 2, 300, 300, 64, 64), BF16, options=_CAUSAL)
    inputs = case.inputs("cuda")
    config = config_for(backend, inputs)
    call = {**inputs.options, "return_lse": True, "config": config}
    tileloom.attention(inputs.q, inputs.k, inputs.v, **call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = tileloom.attention(inputs.q, inputs.k, inputs.v, **call)
    for seed in range(2):
        inputs.q.copy_(torch.randn(inputs.q.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        torch.cuda.synchronize()
        cases.check(inputs, out, lse)


def test_the_rule_takes_the_hopper_kernel_on_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the card is not a Hopper")
    inputs = AttentionCase("rule", (1, 2, 2, 130, 130, 128, 128), BF16).inputs("cuda")
    with record_choices() as made:
        out = tileloom.attention(inputs.q, inputs.k, inputs.v)
    assert [choice.backend for choice in made] == ["gluon_sm90"]
    reference = attention_reference(inputs.q, inputs.k, inputs.v, compute_dtype=torch.float64)
    baseline = attention_reference(inputs.q, inputs.k, inputs.v, compute_dtype=BF16)
    assert_accurate(out, reference, baseline)
