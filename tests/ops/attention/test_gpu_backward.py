"""Attention backward on a real GPU: every backend, judged by the accuracy rule.

What a backend refuses is skipped with its own reasons. Gradients are allocated full of NaN between
canaries; a second run of the portable kernels must give the same bits.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.ops.attention import cases, emulated_backward, gradients, warm
from tests.ops.attention.cases import BF16, FP16, FP32, AttentionCase
from tests.ops.attention.dropout import check_gradients, drawn_at, recovered_backward

import tileloom
from tileloom import masks
from tileloom.ops import record_choices
from tileloom.ops.attention.config_backward import (
    AttentionBackwardConfig,
    gluon_backward_rule,
    triton_backward_rule,
)
from tileloom.ops.attention.config_backward_sm90 import GluonSm90BackwardConfig
from tileloom.target import target_of
from tileloom.testing import dropout_mask, poisoned_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("exact_products"),
    # The forward is free to choose, and says where the Hopper kernel refuses.
    pytest.mark.filterwarnings("ignore::tileloom.ops._op.PerformanceWarning"),
]

_CAUSAL = {"is_causal": True}
_BOTTOM_RIGHT = masks.causal("bottom_right")


@pytest.fixture(autouse=True, scope="module")
def compiled(request):
    """Most kernels, compiled by several processes before the first test (unless few are asked)."""
    if len(request.session.items) > 50 and "PYTEST_XDIST_WORKER" not in os.environ:
        warm.in_processes(min(14, os.cpu_count() or 1), __name__)


@pytest.fixture(params=["triton", "gluon_sm90"])
def backend(request) -> str:
    return request.param


def config_for(backend: str, inputs: cases.Inputs) -> AttentionBackwardConfig:
    """The backend's config for a call; skips with the reasons why there is none."""
    problem, target = cases.problem_of(inputs), target_of(inputs.q)
    rule: Any
    rule = (
        triton_backward_rule(problem, target)
        if backend == "triton"
        else gluon_backward_rule(problem)
    )
    reasons = rule.reasons_against(problem, target)
    if reasons:
        pytest.skip(f"{backend}: {'; '.join(reasons)}")
    return rule


def run(
    inputs: cases.Inputs, given: gradients.Upstream, config: AttentionBackwardConfig
) -> list[torch.Tensor]:
    """The gradients that a user gets; of two runs that agree to the bit, but for Hopper's dQ."""
    results: list[list[torch.Tensor]] = []
    for _ in range(2):
        with record_choices() as made, poisoned_memory():
            results.append(gradients.of_attention(inputs, given, backward_config=config))
            torch.cuda.synchronize()
        assert made[-1].config == config
    fixed = slice(0 if config.backend == "triton" else 1, None)
    for a, b in zip(results[0][fixed], results[1][fixed]):
        assert torch.equal(a, b)
    return results[0]


def judge(case: AttentionCase, backend: str) -> None:
    inputs = case.inputs("cuda")
    given = gradients.upstream(inputs)
    gradients.check(inputs, given, run(inputs, given, config_for(backend, inputs)))


def warm_one(case: AttentionCase) -> None:
    """Compile what a case needs."""
    inputs = case.inputs("cuda")
    given = gradients.upstream(inputs)
    problem, target = cases.problem_of(inputs), target_of(inputs.q)
    for config in (triton_backward_rule(problem, target), gluon_backward_rule(problem)):
        if not config.reasons_against(problem, target):
            gradients.of_attention(inputs, given, backward_config=config)


_SHARED = [case for group in cases.GROUPS.values() for case in group]
_BF16_NAMES = ("A2-blind-rows", "top-left", "lengths-window", "everything", "mask-nan")
_IN_BF16 = [replace(case, dtype=BF16) for case in _SHARED if case.name in _BF16_NAMES]


@pytest.mark.parametrize("case", [*_SHARED, *_IN_BF16], ids=lambda case: case.id)
def test_the_shared_cases_are_right(case, backend):
    judge(case, backend)


def _dims() -> list[AttentionCase]:
    each = (
        (FP16, (8, 24, 64, 72, 80, 96, 128, 200, 256, 512)),
        (BF16, (40, 64, 128, 256)),
        (FP32, (8, 64, 72, 128, 256, 512)),
    )
    return [
        *(
            AttentionCase("dims", (1, 4, 2, 200, 300, d, d), dtype, options=_CAUSAL)
            for dtype, ds in each
            for d in ds
        ),
        AttentionCase("A22-real", (1, 8, 4, 1023, 1023, 512, 512), BF16, options=_CAUSAL),
        AttentionCase("values", (1, 4, 2, 200, 300, 192, 128), BF16, options=_CAUSAL),
    ]


_DIMS = _dims()


@pytest.mark.parametrize("case", _DIMS, ids=lambda case: case.id)
def test_every_head_dim_is_right(case, backend):
    judge(case, backend)


def _dims_named(*dims: tuple[int, int]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("dims", dims, ids=lambda each: f"{each[0]}x{each[1]}")


@pytest.mark.parametrize("form", ["full", "window", "bias", "keys", "mask"])
@_dims_named((192, 128), (64, 128), (128, 64), (64, 256), (136, 40), (8, 256))
def test_values_of_another_width_are_right(dims, form):
    extras: dict[str, Any] = {
        "full": {},
        "window": {
            "mask": cases.lengths(440, 171, then=masks.window(90, 40, anchor="bottom_right"))
        },
        "bias": {"bias": cases.added((2, 4, 333, 440)), "options": _CAUSAL},
        "keys": {"bias": cases.added((4, 1, 440), dtype=FP32)},
        "mask": {"mask": cases.visible((2, 1, 333, 440)), "hide": slice(33, 61)},
    }
    layouts = ("transposed", "gapped", "transposed")
    case = AttentionCase(form, (2, 4, 2, 333, 440, *dims), BF16, layouts, **extras[form])
    judge(case, "gluon_sm90")


def _faults() -> list[AttentionCase]:
    """Where PyTorch's own kernel is wrong: M1, M2, M4, M5 and M7 of seed_attention.md."""
    window = masks.window(31, 0, anchor="bottom_right")
    return [
        *(
            AttentionCase("M1", (1, 2, 2, q, k, 64, 64), BF16, mask=cases.shown_by(_BOTTOM_RIGHT))
            for q, k in ((100, 90), (200, 137), (130, 66))
        ),
        *(
            AttentionCase("M2", (1, 2, 2, q, k, 64, 64), BF16, mask=cases.shown_by(window))
            for q, k in ((256, 128), (128, 256))
        ),
        AttentionCase("M4", (70000, 1, 1, 17, 33, 16, 16), bias=cases.added((70000, 1, 17, 33))),
        AttentionCase("M4", (70000, 1, 1, 17, 33, 16, 16), bias=cases.added((17, 33))),
        AttentionCase("many", (70000, 2, 1, 17, 33, 32, 32), FP16),
        AttentionCase("many", (1, 70000, 35000, 17, 33, 64, 64), BF16, options=_CAUSAL),
        AttentionCase("M5", (2, 70, 10, 1, 300, 64, 64), BF16, mask=cases.lengths(300, 211)),
        AttentionCase("M7", (1, 2, 2, 300, 100, 64, 192), BF16, mask=cases.shown_by(_BOTTOM_RIGHT)),
    ]


_FAULTS = _faults()


@pytest.mark.parametrize("case", _FAULTS, ids=lambda case: case.id)
def test_where_memory_efficient_attention_is_wrong(case, backend):
    judge(case, backend)


_SHAPES = [
    (1, 1),
    (1, 300),
    (200, 1),
    (4, 1, 1),
    (2, 1, 1, 300),
    (1, 4, 200, 300),
    (2, 4, 200, 300),
]


def _biased(shape: tuple[int, ...], dtype: torch.dtype, bias_dtype: torch.dtype) -> AttentionCase:
    bias = cases.added(shape, dtype=bias_dtype)
    mask = cases.lengths(300, 170, then=_BOTTOM_RIGHT)
    return AttentionCase("bias", (2, 4, 2, 200, 300, 64, 64), dtype, mask=mask, bias=bias)


@pytest.mark.parametrize("shape", _SHAPES, ids=str)
@pytest.mark.parametrize("bias_dtype", [BF16, FP32])
def test_biases_that_broadcast_are_right(shape, bias_dtype, backend):
    judge(_biased(shape, BF16, bias_dtype), backend)


def _tensors() -> list[AttentionCase]:
    """Bias and mask as tiles (rows of 16 bytes) and not, of each type, with each band."""
    window = masks.window(70, 130, anchor="bottom_right")
    found: list[AttentionCase] = []
    rows = ((333, BF16), (336, FP16), (384, BF16), (384, FP32))
    for dim, (len_k, bias_dtype) in itertools.product((64, 128, 256), rows):
        shape = (2, 4, 259, len_k)
        sizes = (2, 4, 2, 259, len_k, dim, dim)
        bias = cases.added(shape, dtype=bias_dtype)
        found += [
            AttentionCase("bias-causal", sizes, BF16, bias=bias, options=_CAUSAL),
            AttentionCase(
                "bias-window", sizes, FP16, bias=bias, mask=cases.lengths(len_k, 200, then=window)
            ),
            AttentionCase("bias-mask", sizes, BF16, bias=bias, mask=cases.visible(shape)),
        ]
    masked = ((333, (1, 4)), (384, (2, 1)))
    for dim, (len_k, shape) in itertools.product((64, 128, 256), masked):
        sizes = (2, 4, 2, 259, len_k, dim, dim)
        tensor, keys = cases.visible((*shape, 259, len_k)), cases.visible((*shape, 1, len_k))
        found += [
            AttentionCase("mask", sizes, BF16, mask=tensor, hide=slice(100, 140)),
            AttentionCase("mask-causal", sizes, FP16, mask=tensor, options=_CAUSAL),
            AttentionCase("mask-of-keys", sizes, BF16, mask=keys, hide=slice(200, None)),
        ]
    return found


_TENSORS = _tensors()


@pytest.mark.parametrize("case", _TENSORS, ids=lambda case: case.id)
def test_biases_and_masks_are_right(case):
    judge(case, "gluon_sm90")


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("size", [(2, 3, 129, 257), (1, 2, 64, 256), (3, 1, 5, 1022)], ids=str)
def test_dropout_is_the_generators_to_the_bit(size, dim):
    config = GluonSm90BackwardConfig(64, 2)
    torch.cuda.init()  # before it there are no generators
    for offset in (0, 2**33 + 4, 2**34 - 4 * 4096):  # in the last the low word turns over
        torch.manual_seed(3)
        torch.cuda.default_generators[torch.cuda.current_device()].set_offset(offset)
        right = dropout_mask(0.3, seed=3, offset=offset, size=size, device="cuda")
        shown = recovered_backward(
            size, 0.3, device="cuda", width=dim, is_wide=True, backward_config=config
        )
        assert torch.equal(shown, right)


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("len_k", [384, 333])
@_dims_named((64, 64), (128, 128), (192, 128), (256, 256))
@pytest.mark.parametrize("is_alone", [False, True])
def test_dropout_with_bias_and_mask_is_right(dims, len_k, rows, is_alone):
    if rows == 128 and max(dims) > 64:
        pytest.skip("128 rows need too much shared memory")
    sizes = (2, 4, 2, 259, len_k, *dims)
    case = AttentionCase(
        "dropout", sizes, BF16, bias=cases.added((4, 259, len_k)),
        mask=cases.visible((2, 1, 259, len_k)),
    )  # fmt: skip
    if is_alone:
        case = AttentionCase("dropout", sizes, BF16, options=_CAUSAL)
    inputs = case.inputs("cuda")
    given = gradients.upstream(inputs)
    torch.manual_seed(3)
    state = drawn_at(inputs)
    with poisoned_memory():
        results = gradients.of_attention(
            inputs, given, dropout_p=0.3, backward_config=GluonSm90BackwardConfig(rows, 2)
        )
    check_gradients(inputs, given, results, 0.3, state)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("shape", [(2, 4, 1024, 1024), (4, 1024, 1024), (4, 1, 1024)], ids=str)
def test_a17_one_hundred_gradients_of_a_bias_have_the_same_bits(shape, dim):
    case = AttentionCase(
        "A17-bias", (2, 4, 2, 1024, 1024, dim, dim), BF16, bias=cases.added(shape), options=_CAUSAL
    )
    inputs = case.inputs("cuda")
    given = gradients.upstream(inputs)
    config = config_for("gluon_sm90", inputs)
    leaves = [t.requires_grad_() for t in (inputs.q, inputs.k, inputs.v, inputs.options["bias"])]
    options = {**inputs.options, "return_lse": True, "backward_config": config}
    out, lse = tileloom.attention(*leaves[:3], **options)
    first = None
    for _ in range(100):
        results = torch.autograd.grad(
            (out, lse), leaves, (given.dout, given.dlse), retain_graph=True
        )[1:]
        first = first or results
        assert all(torch.equal(a, b) for a, b in zip(first, results))


COMPILED = [
    *_DIMS,
    *_FAULTS,
    *(_biased(shape, BF16, dtype) for shape in _SHAPES for dtype in (BF16, FP32)),
    *_TENSORS,
    *_IN_BF16,
    *_SHARED,
]


_LENGTHS = (1, 63, 64, 65, 127, 128, 129, 257, 1000)


@pytest.mark.parametrize("form", ["full", "causal", "window"])
@_dims_named((64, 64), (128, 128), (192, 128))
@pytest.mark.parametrize("len_q", _LENGTHS)
def test_lengths_around_the_tiles_edges_are_right(len_q, dims, form, backend):
    mask = {
        "full": None,
        "causal": _BOTTOM_RIGHT,
        "window": masks.window(70, 130, anchor="bottom_right"),
    }[form]
    for len_k in (_LENGTHS[(_LENGTHS.index(len_q) * 3 + 4) % len(_LENGTHS)], len_q, 192, 321):
        extra = None if mask is None else cases.shown_by(mask)
        judge(AttentionCase(form, (2, 2, 1, len_q, len_k, *dims), BF16, mask=extra), backend)


@pytest.mark.parametrize("anchor", ["top_left", "bottom_right"])
@pytest.mark.parametrize(("len_q", "len_k"), [(300, 700), (700, 300)])
@pytest.mark.parametrize(("left", "right"), [(0, 0), (100, 31), (128, None), (None, 64)])
@_dims_named((64, 64), (192, 128))
def test_windows_with_lengths_are_right(dims, left, right, len_q, len_k, anchor, backend):
    window = masks.window(left, right, anchor=anchor)
    mask = cases.lengths(0, 129, len_k, len_k + 99, dtype=torch.int32, then=window)
    judge(AttentionCase("window", (4, 2, 2, len_q, len_k, *dims), FP16, mask=mask), backend)


def test_a1_columns_of_finfo_min_at_full_size():
    bias = cases.added(
        (1, 1, 441, 441), is_zero=True, columns=(slice(0, 128), torch.finfo(FP32).min)
    )
    judge(AttentionCase("A1-real", (8, 12, 12, 441, 441, 64, 64), FP32, bias=bias), "triton")


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
    given = gradients.upstream(inputs, with_lse=False)
    results = gradients.of_attention(inputs, given, backward_config=config)
    for place in (0, batch - 1):
        part = slice(place, place + 1)
        cut = cases.Inputs(q[part], inputs.k[part], inputs.v[part], {})
        own = gradients.Upstream(given.dout[part], None)
        gradients.check(cut, own, [t[part] for t in results])


def test_a8_gradient_of_a_bias_beyond_two_to_the_32(backend):
    """A bias, its gradient and a mask of more than 2^32 elements; judged on first and last rows."""
    length, dim = 65600, 32
    inputs = AttentionCase("A8", (1, 1, 1, length, length, dim, dim), BF16).inputs("cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    bias = torch.empty((length, length), dtype=BF16, device="cuda").normal_(generator=generator)
    mask = torch.ones((length, length), dtype=torch.bool, device="cuda")
    mask[:, ::3] = False
    whole = cases.Inputs(inputs.q, inputs.k, inputs.v, {"bias": bias, "mask": mask})
    given = gradients.upstream(whole)
    dq, _, _, dbias = gradients.of_attention(
        whole, given, backward_config=config_for(backend, whole)
    )
    for rows in (slice(0, 64), slice(length - 64, length)):
        options = {"bias": bias[rows], "mask": mask[rows]}
        cut = cases.Inputs(inputs.q[:, :, rows], inputs.k, inputs.v, options)
        assert given.dlse is not None
        own = gradients.Upstream(given.dout[:, :, rows], given.dlse[:, :, rows])
        reference = gradients.of_reference(cut, own, torch.float64)
        results = [dq[:, :, rows], *(t.to(BF16) for t in reference[1:3]), dbias[rows]]
        gradients.check(cut, own, results)


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@_dims_named((64, 64), (128, 128), (192, 128), (256, 256))
@pytest.mark.parametrize("form", ["A17", "full", "bias", "lengths", "dropout"])
def test_a17_one_hundred_runs_give_the_same_bits(form, dims):
    """Under PyTorch's switch, beside matrix products on another stream."""
    fields: dict[str, Any] = {
        "A17": {"options": _CAUSAL},
        "full": {},
        "dropout": {},
        "bias": {"bias": cases.added((1, 2048))},
        "lengths": {"mask": cases.lengths(1000, dtype=torch.int32, then=masks.window(300, 20))},
    }[form]
    length = 4096 if form == "A17" else 2048
    inputs = AttentionCase(form, (1, 8, 2, length, length, *dims), BF16, **fields).inputs("cuda")
    options = {"dropout_p": 0.2} if form == "dropout" else {}
    given = gradients.upstream(inputs)
    load, beside = torch.randn((2048, 2048), device="cuda"), torch.cuda.Stream()
    first = None
    with record_choices() as made:
        for _ in range(100):
            with torch.cuda.stream(beside):
                load @ load
            torch.manual_seed(3)
            results = gradients.of_attention(inputs, given, **options)
            first = first or results
            assert all(torch.equal(a, b) for a, b in zip(first, results))
    assert {choice.backend for choice in made if choice.op == "attention_bwd"} == {"gluon_sm90"}
    if not options:
        gradients.check(inputs, given, first)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_fixed_order_adds_the_last_keys_first(dim):
    rows = 128 if dim == 64 else 64
    for _ in range(20):
        config = GluonSm90BackwardConfig(rows, 2, ordered=True)
        emulated_backward.check_order(config, (3, 5, 4000, 24, dim), "cuda")


_WALKS = [
    AttentionCase("full", (8, 16, 8, 520, 1000, 64, 64), BF16),
    AttentionCase(
        "causal", (24, 12, 12, 130, 390, 48, 64), FP16, mask=cases.shown_by(_BOTTOM_RIGHT)
    ),
    AttentionCase(
        "window-lengths", (4, 40, 20, 300, 700, 64, 64), BF16,
        mask=cases.lengths(
            0, 129, 700, 799, dtype=torch.int32, then=masks.window(70, 130, anchor="bottom_right")
        ),
    ),
]  # fmt: skip


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("case", _WALKS, ids=lambda case: case.id)
def test_persistent_programs_walk_over_several_blocks(case, ordered):
    """To the same bits as a program for each block, but for dQ that is added up in no order."""
    inputs = case.inputs("cuda")
    given = gradients.upstream(inputs)
    config = GluonSm90BackwardConfig(64, 3, ordered, persistent=True)
    found = run(inputs, given, config)
    fixed = slice(0 if ordered else 1, None)
    for a, b in zip(found[fixed], run(inputs, given, replace(config, persistent=False))[fixed]):
        assert torch.equal(a, b)
    gradients.check(inputs, given, found)
    if ordered:
        for _ in range(20):
            emulated_backward.check_order(config, (3, 5, 4000, 24, 64), "cuda")


@pytest.mark.parametrize("ordered", [False, True])
def test_a_cuda_graph_replays_forward_and_backward(backend, ordered):
    case = AttentionCase("graph", (2, 4, 2, 300, 300, 64, 64), BF16, options=_CAUSAL)
    inputs = case.inputs("cuda")
    given = gradients.upstream(inputs, with_lse=False)
    config = config_for(backend, inputs)
    if ordered and isinstance(config, GluonSm90BackwardConfig):
        config = replace(config, ordered=True)  # its counters begin at 0 in every replay
    if isinstance(config, GluonSm90BackwardConfig):
        config = replace(config, persistent=True)  # and so do those of turns
    gradients.of_attention(inputs, given, backward_config=config)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = gradients.of_attention(inputs, given, backward_config=config)
    for seed in range(2):
        inputs.q.copy_(torch.randn(inputs.q.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        torch.cuda.synchronize()
        gradients.check(inputs, given, results)
