"""The Hopper backward on the emulator: right gradients, and no race, deadlock or misuse.

Each shipped form is compiled once a level, then played under every schedule: odd lengths, two query
heads a key head, more steps than twice the pipeline's depth, NaN in keys that no query sees.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tests.ops.attention import cases, gradients
from tests.ops.attention.cases import BF16, FP16, FP32, AttentionCase
from tests.ops.attention.emulated import SCHEDULES
from tests.ops.attention.emulated_backward import SPECS, call_of, check_order, checked, modes_of

import tileloom
from tileloom import emulator, masks
from tileloom.ops import record_choices
from tileloom.ops.attention import attention_reference, launch_gluon_sm90_bwd
from tileloom.ops.attention.backward import attention_bwd
from tileloom.ops.attention.config import ReferenceConfig
from tileloom.ops.attention.config_backward import choose_backward, decode_backward
from tileloom.ops.attention.config_backward_sm90 import (
    GluonSm90BackwardConfig,
    gluon_backward_rule,
)
from tileloom.ops.attention.launch_gluon_sm90_dbias import bind_dbias
from tileloom.ops.attention.launch_gluon_sm90_scores import (
    ANYWHERE,
    KEYS,
    NONE,
    TILE,
    Scores,
)
from tileloom.ops.attention.problem import Layout, Packed
from tileloom.target import CPU, H100


def _played(inputs, config, level, schedule, seed):
    with emulator.run(level=level, schedule=schedule, seed=seed, sms=2) as run:
        checked(inputs, config)
    assert [r.text() for r in run.reports if r.severity != "info"] == []


def _is_long(spec, level):
    hides = any(spec.constexprs.get(name) for name in ("BIAS", "MASK", "DROPOUT"))
    return level == "machine" and hides


@pytest.mark.parametrize(
    ("spec", "level"),
    [
        pytest.param(spec, level, marks=[pytest.mark.full] if _is_long(spec, level) else [])
        for spec in SPECS
        for level in ("ttgir", "machine")
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_every_shipped_form(spec, level):
    call, config = call_of(spec)
    own = modes_of(call.inputs(), config).constants()
    assert {name: spec.constexprs.get(name, value) for name, value in own.items()} == own
    for schedule, seed in SCHEDULES:
        _played(call.inputs(), config, level, schedule, seed)


@pytest.mark.parametrize(
    ("dims", "options", "config", "name"),
    [
        ((192, 128), {}, GluonSm90BackwardConfig(), "192"),
        ((136, 8), {"mask": masks.window(9, 5)}, GluonSm90BackwardConfig(), "192"),
        ((192, 128), {"mask": masks.key_lengths(torch.tensor([80]))}, None, "192"),
        ((192, 128), {"bias": torch.zeros(2, 71, 136, dtype=BF16)}, None, "wide"),
        ((192, 128), {"mask": torch.ones(71, 136, dtype=torch.bool)}, None, "wide"),
        ((192, 128), {"dropout_p": 0.5, "philox": (torch.tensor(7),) * 2}, None, "wide"),
        ((192, 128), {}, GluonSm90BackwardConfig(64, 2, ordered=True), "wide"),
        ((192, 128), {}, GluonSm90BackwardConfig(64, 3), "wide"),
        ((192, 128), {}, GluonSm90BackwardConfig(wide=True), "wide"),
        ((192, 136), {}, None, "wide"),
        ((200, 128), {}, None, "wide"),
        ((128, 192), {}, None, "wide"),
        ((128, 128), {}, None, ""),
    ],
)  # fmt: skip
def test_which_kernel_runs(dims, options, config, name, monkeypatch):
    """That for 192 columns takes what it is for; what it lacks goes to the wide one as before."""
    bound = []

    def prepared(kernel, **options):
        bound.append((kernel.__name__, options["num_warps"]))
        ready = SimpleNamespace(launch=lambda *given: None)
        return SimpleNamespace(bind=lambda *given, **constants: ready)

    monkeypatch.setattr(launch_gluon_sm90_bwd, "prepared", prepared)
    inputs = AttentionCase("which", (1, 2, 1, 71, 136, *dims), BF16).inputs()
    inputs = replace(inputs, options=options)
    config = config or gluon_backward_rule(cases.problem_of(inputs))
    with emulator.run():
        gradients.of_operator(inputs, gradients.upstream(inputs), config.encode())
    before, main, after = bound
    assert (before[0], after[0]) == ("attention_bwd_before_kernel", "attention_bwd_after_kernel")
    assert main == (f"attention_bwd{name and '_'}{name}_kernel", 8 if name == "192" else 4)


@pytest.mark.parametrize(
    ("batch", "len_k", "dims", "wide"),
    [
        (1, 2112, (192, 128), True),  # 4 heads of 33 blocks of 64 keys: 132
        (1, 2113, (192, 128), False),
        (3, 1024, (192, 128), False),
        (1, 64, (192, 128), True),
        (1, 64, (200, 128), False),
        (1, 64, (64, 64), False),
    ],
)
def test_few_blocks_are_halved(batch, len_k, dims, wide):
    case = AttentionCase("few", (batch, 8, 4, 64, len_k, *dims), BF16)
    config = choose_backward(cases.problem_of(case.inputs()), H100).config
    assert isinstance(config, GluonSm90BackwardConfig)
    assert config.wide is wide


@pytest.mark.parametrize(
    ("sizes", "mask", "dtype"),
    [
        ((1, 1, 1, 1, 1, 8, 8), None, BF16),
        ((2, 3, 1, 1, 130, 40, 40), None, FP16),
        ((1, 2, 2, 65, 1, 64, 64), masks.causal("bottom_right"), BF16),
        ((1, 2, 2, 130, 70, 72, 72), masks.causal("bottom_right"), BF16),  # rows that see nothing
        ((1, 1, 1, 70, 200, 136, 136), masks.window(0, 0), FP16),
        ((1, 1, 1, 70, 200, 136, 72), masks.window(0, 0), FP16),
        ((2, 3, 1, 1, 130, 184, 8), None, BF16),
        ((1, 2, 2, 130, 70, 192, 128), masks.causal("bottom_right"), BF16),
        ((1, 1, 1, 100, 100, 64, 64), masks.window(5, None, anchor="bottom_right"), BF16),
        ((1, 1, 1, 64, 64, 64, 64), masks.window(-0, 3) & masks.causal(), BF16),
    ],
)  # fmt: skip
def test_awkward_sizes_and_bands(sizes, mask, dtype):
    extra = None if mask is None else cases.shown_by(mask)
    inputs = AttentionCase("awkward", sizes, dtype, mask=extra).inputs()
    config = gluon_backward_rule(cases.problem_of(inputs))
    _played(inputs, config, "ttgir", "random", 3)


_LAST = masks.causal("bottom_right")
_WINDOW = masks.window(70, 9, anchor="bottom_right")
_WIDE, _NARROW = (1, 2, 1, 71, 136, 136, 136), (2, 2, 1, 71, 136, 64, 64)
_PHILOX = {"dropout_p": 0.3, "philox": (torch.tensor(7), torch.tensor(6))}  # no multiple of 4


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase("summed", _NARROW, BF16, bias=cases.added((2, 71, 136))),
        AttentionCase("of-rows", _NARROW, BF16, bias=cases.added((71, 1))),
        AttentionCase("of-keys", _NARROW, FP16, bias=cases.added((2, 1, 136), dtype=FP32)),
        AttentionCase(
            "transposed", _NARROW, BF16, bias=cases.added((2, 71, 136), layout="transposed")
        ),
        AttentionCase("hidden-nan", _NARROW, BF16, bias=cases.added((71, 136)), hide=slice(0, 50)),
        AttentionCase("hidden-nan", _WIDE, BF16, bias=cases.added((71, 136)), hide=slice(0, 50)),
        AttentionCase(
            "mask-nan", _NARROW, FP16, mask=cases.visible((2, 1, 71, 136)), hide=slice(9, 30)
        ),
        AttentionCase(
            "large-rows", _NARROW, BF16, bias=cases.added((2, 2, 71, 136), rows=(slice(3, 9), -1e9))
        ),
        AttentionCase(
            "large-rows", _WIDE, BF16, bias=cases.added((1, 2, 71, 136), rows=(slice(3, 9), -1e9))
        ),
        AttentionCase(
            "dropout", _NARROW, BF16, mask=cases.lengths(136, 80, then=_WINDOW), options=_PHILOX
        ),
        AttentionCase("dropout", _WIDE, BF16, bias=cases.added((2, 1, 136)), options=_PHILOX),
    ],
    ids=lambda case: case.id,
)  # fmt: skip
@pytest.mark.parametrize("ordered", [False, pytest.param(True, marks=pytest.mark.full)])
def test_biases_masks_and_dropout(case, ordered):
    inputs = case.inputs()
    config = replace(gluon_backward_rule(cases.problem_of(inputs)), ordered=ordered)
    _played(inputs, config, "ttgir", "random", 3)


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase("batches", (3, 2, 1, 71, 200, 64, 64), BF16, bias=cases.added((2, 71, 200))),
        AttentionCase(
            "both", (2, 2, 2, 136, 136, 40, 64), BF16, mask=cases.shown_by(masks.causal()),
            bias=cases.added((136, 136)),
        ),
        AttentionCase(
            "heads", (2, 4, 2, 136, 264, 128, 128), FP16, mask=cases.shown_by(_WINDOW),
            bias=cases.added((2, 1, 136, 264), dtype=FP16),
        ),
        AttentionCase(
            "lengths", (3, 2, 1, 71, 136, 64, 64), BF16, bias=cases.added((2, 71, 136)),
            mask=cases.lengths(136, 80, 0, then=masks.window(None, None)),
        ),
        AttentionCase(
            "large-rows", (2, 2, 1, 71, 136, 64, 64), BF16,
            bias=cases.added((1, 2, 71, 136), rows=(slice(3, 9), -1e9)),
        ),
        AttentionCase(
            "hidden-nan", (2, 2, 1, 71, 136, 64, 64), BF16, bias=cases.added((71, 136)),
            hide=slice(0, 50),
        ),
    ],
    ids=lambda case: case.id,
)  # fmt: skip
@pytest.mark.parametrize(("level", "schedule"), [("ttgir", "late"), ("machine", "random")])
def test_the_gradient_of_a_bias_that_is_shared(case, level, schedule, monkeypatch):
    made = []

    def seen(*args):
        made.append(bind_dbias(*args))
        return made[-1]

    monkeypatch.setattr(launch_gluon_sm90_bwd, "bind_dbias", seen)
    inputs = case.inputs()
    _played(inputs, gluon_backward_rule(cases.problem_of(inputs)), level, schedule, 3)
    assert len(made) == 1
    assert made[0] is not None


def test_how_a_bias_is_read_and_its_gradient_written():
    def modes(dim, dtype, shape, step=None):
        inputs = AttentionCase("m", (2, 4, 4, 64, 128, dim, dim), BF16).inputs()
        bias = torch.empty(shape, dtype=dtype)
        bias = bias if step is None else bias[..., step:]
        config = gluon_backward_rule(replace(cases.problem_of(inputs), has_bias=True))
        found = Scores.of(
            cases.problem_of(inputs), config, None, bias, torch.empty(bias.shape, dtype=dtype)
        )
        return found.bias, found.dbias, found.slots, found.is_summed

    assert modes(64, BF16, (2, 4, 64, 128)) == (TILE, TILE, 2, False)
    assert modes(64, FP32, (2, 4, 64, 128)) == (TILE, ANYWHERE, 2, False)
    assert modes(64, FP16, (2, 4, 64, 128)) == (TILE, ANYWHERE, 2, False)
    assert modes(128, FP32, (2, 4, 64, 128)) == (TILE, ANYWHERE, 1, False)
    assert modes(256, BF16, (2, 4, 64, 128)) == (TILE, TILE, 1, False)
    assert modes(256, FP32, (2, 4, 64, 128)) == (ANYWHERE, ANYWHERE, 1, False)
    assert modes(64, BF16, (4, 64, 128)) == (TILE, NONE, 2, True)
    assert modes(64, BF16, (4, 1, 128)) == (KEYS, KEYS, 1, False)
    assert modes(64, BF16, (64, 1)) == (ANYWHERE, NONE, 1, True)
    assert modes(64, BF16, (2, 4, 64, 136), 8) == (TILE, TILE, 2, False)
    assert modes(64, BF16, (2, 4, 64, 129), 1) == (ANYWHERE, TILE, 1, False)


def test_a_gradient_that_tma_cannot_read_is_copied():
    inputs = AttentionCase("odd", (1, 2, 1, 70, 90, 64, 64), BF16).inputs()
    leaves = [t.requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    with emulator.run() as run, record_choices() as made:
        out = tileloom.attention(*leaves)
        wide = torch.ones(1, 2, 70, 67, dtype=BF16)[..., 1:65]
        assert not Layout.of(wide).is_aligned
        got = torch.autograd.grad(out, leaves, wide, retain_graph=True)
        plain = torch.autograd.grad(out, leaves, torch.ones_like(wide), retain_graph=True)
        summed = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
        odd = torch.autograd.grad(torch.cat((torch.ones(1), out.flatten())).sum(), leaves)
    assert [c.backend for c in made] == ["gluon_sm90"] * 5
    assert [r.text() for r in run.reports if r.severity != "info"] == []
    for a, b, c, d in zip(got, plain, summed, odd):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
        assert torch.equal(a, d)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("layout", ["unaligned", "rows of 68"])
def test_an_output_kept_elsewhere_is_copied(dim, layout):
    """Hooks on saved tensors may give O back anywhere; the kernels read it 16 bytes a time."""
    inputs = AttentionCase("kept", (1, 2, 1, 70, 90, dim, dim), BF16).inputs()
    q, k, v, dout = inputs.q, inputs.k, inputs.v, gradients.upstream(inputs).dout
    out, lse = attention_reference(q, k, v, return_lse=True)
    wide = torch.full((1, 2, 70, dim + 4), float("nan"), dtype=BF16)[..., :dim].copy_(out)
    moved = torch.empty(out.numel() + 1, dtype=BF16)[1:].view(out.shape).copy_(out)
    config = GluonSm90BackwardConfig(ordered=True).encode()
    results = []
    for o in (out, moved if layout == "unaligned" else wide):
        with emulator.run():
            results.append(attention_bwd(
                dout, None, q, k, v, o, lse, *(None,) * 7, 0.1, 0.0, None, None, True, True, False,
                config,
            ))  # fmt: skip
    for a, b in zip(*results):
        assert torch.equal(a, b)


def test_what_is_not_needed_is_left_out():
    inputs = AttentionCase("some", (1, 2, 1, 70, 90, 64, 64), BF16).inputs()
    everything = None
    for wanted in ("qkv", "q", "kv"):
        tensors = {n: getattr(inputs, n).detach().requires_grad_(n in wanted) for n in "qkv"}
        with emulator.run():
            out = tileloom.attention(*tensors.values())
            got = torch.autograd.grad(out, [tensors[n] for n in wanted], torch.ones_like(out))
        results = dict(zip(wanted, got))
        everything = everything or results
        for name, gradient in results.items():
            assert torch.equal(gradient, everything[name])


def test_reasons_and_texts():
    problem = cases.problem_of(AttentionCase("p", (1, 1, 1, 64, 64, 256, 256), BF16).inputs())
    assert gluon_backward_rule(problem).reasons_against(problem, H100) == ()
    assert choose_backward(problem, H100).backend == "gluon_sm90"
    why = "; ".join(GluonSm90BackwardConfig(128, 1).reasons_against(problem, CPU))
    assert "head dim 256 above 128 takes only 64" in why
    assert "stages is 1" in why
    assert "on the CPU" in why
    assert "bytes of shared memory" in "; ".join(
        GluonSm90BackwardConfig(64, 5).reasons_against(problem, H100)
    )
    for config in (
        GluonSm90BackwardConfig(128, 3),
        GluonSm90BackwardConfig(64, 2, True, True, True),
    ):
        assert decode_backward(config.encode()) == config
    assert isinstance(decode_backward("reference"), ReferenceConfig)


def test_the_narrow_kernel_alone_is_persistent():
    config = GluonSm90BackwardConfig(64, 2, persistent=True)
    problem = cases.problem_of(AttentionCase("p", (1, 1, 1, 64, 64, 64, 64), BF16).inputs())
    assert config.reasons_against(problem, H100) == ()
    why = (
        "persistent is True, which only the kernel for head dims up to 64 can be, with block_m 64 "
        "and without bias, mask and dropout",
    )
    assert replace(config, block_m=128).reasons_against(problem, H100)[:1] == why
    for change in ({"head_dim_v": 72}, {"has_bias": True}, {"dropout_p": 0.5}):
        other = replace(problem, **change)
        assert config.reasons_against(other, H100)[:1] == why
        assert gluon_backward_rule(other) == GluonSm90BackwardConfig(64, 2)


def test_many_blocks_of_few_steps_are_walked_over():
    """Where it is faster on an H200: 198 blocks of keys or more, which 4096 rows or fewer see."""
    p = cases.problem_of(AttentionCase("p", (1, 32, 32, 64, 64, 64, 64), BF16).inputs())

    def is_persistent(batch, length, mask=None, group=1, keys=None, **own):
        other = replace(
            p, batch=batch, len_q=length, len_k=keys or length,
            band=(mask or masks.window(None, None)).band,
            heads_kv=32 // group, **own,
        )  # fmt: skip
        return choose_backward(other, H100).config.persistent

    assert is_persistent(16, 1024)
    assert is_persistent(8, 2048)
    assert is_persistent(4, 4096)
    assert not is_persistent(2, 8192)
    assert is_persistent(4, 4096, masks.causal())
    assert is_persistent(2, 8192, masks.causal())
    assert not is_persistent(1, 16384, masks.causal())
    assert is_persistent(1, 16384, masks.window(511, 0))
    assert is_persistent(1, 16384, masks.window(511, None) & masks.causal("bottom_right"))
    assert not is_persistent(1, 16384, masks.window(511, None))
    assert is_persistent(16, 1024, group=4)
    assert not is_persistent(16, 1024, group=8)
    assert is_persistent(16, 1024, masks.causal(), group=8)
    assert is_persistent(64, 128, keys=4096)
    assert is_persistent(7, 128)  # 224 blocks
    assert not is_persistent(6, 128)
    assert is_persistent(4, 8192, packed=Packed(16384, 16384))
    assert not is_persistent(4, 8192, packed=Packed(32768, 32768))


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_in_a_fixed_order_any_number_of_rows_may_see_a_block():
    p = cases.problem_of(AttentionCase("p", (1, 8, 1, 64, 64, 64, 64), BF16).inputs())
    for blocks, is_persistent in ((197, False), (198, True)):
        choice = choose_backward(replace(p, len_q=32768, len_k=128 * blocks), H100)
        assert choice.config == GluonSm90BackwardConfig(64, 3, True, persistent=is_persistent)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_deterministic_algorithms_take_the_fixed_order(dim):
    problem = cases.problem_of(AttentionCase("p", (1, 1, 1, 64, 64, dim, dim), BF16).inputs())
    choice = choose_backward(problem, H100)
    assert choice.config == GluonSm90BackwardConfig(64, 3 if dim == 64 else 2, ordered=True)
    why = GluonSm90BackwardConfig().reasons_against(problem, H100)
    assert why == (
        "ordered is False: it adds up dQ in no fixed order, and deterministic algorithms are asked "
        "for",
    )


_FULL = AttentionCase("full", (1, 2, 1, 130, 270, 136, 136), FP16)
_ORDERED = [
    _FULL,
    AttentionCase("causal", (1, 2, 1, 140, 390, 64, 64), FP16, mask=cases.shown_by(_LAST)),
    AttentionCase(
        "window-lengths", (2, 2, 1, 70, 520, 128, 128), FP16,
        mask=cases.lengths(520, 201, then=masks.window(300, 30, anchor="bottom_right")),
    ),
    AttentionCase("bias", (2, 2, 1, 70, 264, 64, 64), FP16, bias=cases.added((1, 1, 70, 264))),
]  # fmt: skip


def _gradients_of_schedules(case, ordered, persistent=False):
    inputs = case.inputs()
    given = gradients.upstream(inputs)
    rule = gluon_backward_rule(cases.problem_of(inputs))
    config = replace(rule, ordered=ordered, persistent=persistent)
    found = []
    for seed in range(3):
        with emulator.run(level="ttgir", schedule="random", seed=seed, sms=8) as run:
            results = gradients.of_operator(inputs, given, config.encode())
        assert [r.text() for r in run.reports if r.severity != "info"] == []
        found.append([t for t in results if t is not None])
    gradients.check(inputs, given, results)
    return found


@pytest.mark.parametrize("case", _ORDERED, ids=lambda case: case.id)
def test_a_fixed_order_gives_the_same_bits_under_every_schedule(case):
    first, *others = _gradients_of_schedules(case, ordered=True)
    assert len(first) == (3 if case.bias is None else 4)
    assert all(torch.equal(t, one) for other in others for t, one in zip(other, first))
    if case.name == "causal":
        for other in _gradients_of_schedules(case, ordered=True, persistent=True):
            assert all(torch.equal(t, one) for t, one in zip(other, first))


@pytest.mark.parametrize(("dim", "persistent"), [(64, False), (64, True), (256, False)])
def test_the_last_keys_are_added_first(dim, persistent):
    config = GluonSm90BackwardConfig(64, 2, ordered=True, persistent=persistent)
    for schedule, seed in SCHEDULES:
        with emulator.run(level="ttgir", schedule=schedule, seed=seed, sms=8):
            check_order(config, (1, 2, 64, 9, dim), "cpu")  # of one step each: soon out of turn
    with emulator.run(level="ttgir", sms=1), pytest.raises(AssertionError):
        check_order(replace(config, ordered=False), (1, 2, 64, 9, dim), "cpu")


def test_no_fixed_order_gives_other_bits_of_dq_alone_under_other_schedules():
    first, *others = _gradients_of_schedules(_FULL, ordered=False)
    assert not all(torch.equal(other[0], first[0]) for other in others)
    assert all(torch.equal(t, one) for other in others for t, one in zip(other[1:], first[1:]))
