"""The decorators for kernels of one's own: results, candidates, plans, and sentences."""

from __future__ import annotations

import functools

import pytest
import torch
import triton
import triton.language as tl
from tests.launch.fake_cuda import DeviceTensor
from tests.tuning.front_kernels import row_max, row_sum, scale, transpose
from tests.tuning.replayed import STREAM

from tileloom import emulator, tuning
from tileloom.errors import DeviceError
from tileloom.target import Target
from tileloom.tuning import Config, Facts, ReductionHint, TileHint, configs, generated, tuned_kernel
from tileloom.tuning.cached import cached_autotune
from tileloom.tuning.hints import DeviceProperties, HeuristicType

GPU = Target("cuda", (9, 0), 132, 0, "")
H100 = DeviceProperties("cuda", 0, 132, 90, 9, 65536, 2048, 1024, 32)


@triton.jit
def plain_kernel(x, n, XBLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, XBLOCK), n)


def whole_numbers(*size):
    return torch.arange(torch.Size(size).numel()).remainder(17).sub(8).float().reshape(size)


def test_a_kernel_is_launched_by_its_arguments_alone():
    x = whole_numbers(5, 100)
    with emulator.run():
        total, most = torch.empty(5), torch.empty(5)
        row_sum(x, total, 5, 100)
        row_max(x, most, cols=100, rows=5)
        turned = torch.empty(100, 5)
        transpose(x, turned, 5, 100)
    assert torch.equal(total, x.sum(1))
    assert torch.equal(most, x.amax(1))
    assert torch.equal(turned, x.t())


def test_compile_time_arguments_are_given_by_name():
    x = whole_numbers(70)
    before = x.clone()
    with emulator.run():
        scale(x, 70, 2.0, SQUARED=True)
    assert torch.equal(x, before * before * 2)


def test_nothing_to_do_launches_nothing():
    assert row_sum(torch.empty(0, 8), torch.empty(0), 0, 8) is None


def test_candidates_are_those_of_the_heuristics():
    facts = Facts(reduction_hint=ReductionHint.INNER, num_reduction=1)
    assert row_sum.candidates(rows=4096, cols=3000) == configs(
        "reduction", {"x": 4096, "r0_": 4096}, facts
    )
    (whole,) = row_max.candidates(rows=8192, cols=300)
    assert whole.kwargs == {"XBLOCK": 2, "R0_BLOCK": 512}, "the row is a constant of the kernel"
    square = Facts(tile_hint=TileHint.SQUARE)
    assert transpose.candidates(rows=64, cols=64) == configs(
        "pointwise", {"x": 64, "y": 64}, square
    )


def test_a_kernel_without_xblock_takes_one_row_a_program():
    @tuning.reduction(sizes={"x": "rows", "r": "cols"}, hint="inner")
    @triton.jit
    def kernel(x, rows, cols, R0_BLOCK: tl.constexpr):
        pass

    (config,) = kernel.candidates(rows=4096, cols=512)
    assert config.kwargs == {"R0_BLOCK": 512}


def test_candidates_may_be_ones_own():
    own = [triton.Config({"XBLOCK": 64}, num_warps=2), {"XBLOCK": 128, "num_warps": 4}]
    kernel = tuning.pointwise(sizes={"x": "n"}, configs=own)(plain_kernel)
    assert kernel.candidates(n=1000) == [Config({"XBLOCK": 64}, 2), Config({"XBLOCK": 128})]


def planned(monkeypatch, kernel, hints, *args, deterministic=False, **named):
    """What the autotuner of a launch would be made of."""
    made = {}

    def autotune(size_hints, listed, **given):
        made.update(given, size_hints=size_hints, configs=listed)
        return lambda fn: made

    monkeypatch.setattr(tuned_kernel, "cached_autotune", autotune)
    monkeypatch.setattr(tuned_kernel, "device_properties", lambda device: H100)
    values = kernel._in_order(args, named)
    _, pairs = kernel._kinds(values)
    return kernel._plan(torch.device("meta"), hints, pairs, deterministic)


def test_a_plan_has_what_generated_code_would_state(monkeypatch):
    x, y = torch.zeros(64), torch.zeros(65)[1:]
    made = planned(monkeypatch, row_sum, {"x": 2, "r0_": 64}, x, y, 1, 48)
    assert made["size_hints"] == {"x": 2, "r0_": 64}
    assert made["heuristic_type"] is HeuristicType.REDUCTION
    meta = made["triton_meta"]
    assert meta["signature"] == {
        "x": "*fp32", "y": "*fp32", "rows": "constexpr", "cols": "i32",
        "XBLOCK": "constexpr", "R0_BLOCK": "constexpr",
    }  # fmt: skip
    assert meta["constants"] == {"rows": 1}
    aligned = [["tt.divisibility", 16]]
    assert meta["configs"] == [{(0,): aligned, (3,): aligned}], "y is not aligned"
    assert meta["device"] == H100
    assert made["inductor_meta"]["grid_type"] == "Grid1D"
    assert made["inductor_meta"]["numels"] == {"x": "rows", "r0_": "cols"}


def test_a_plan_names_what_the_kernel_changes(monkeypatch):
    made = planned(monkeypatch, scale, {"x": 64}, torch.zeros(64), 64, 2.0, SQUARED=False)
    assert made["triton_meta"]["restore_value"] == ["x"]
    assert made["triton_meta"]["constants"] == {"SQUARED": False}
    assert made["inductor_meta"]["coordinate_descent_tuning"] is True
    assert made["triton_meta"]["signature"]["factor"] == "fp32"


def test_deterministic_algorithms_leave_one_candidate(monkeypatch):
    kernel = tuning.reduction(sizes={"x": "rows", "r": "cols"})(row_sum.fn)
    arguments = (row_sum.fn, torch.zeros(64), torch.zeros(64), 64, 4096)[1:]
    for deterministic, count in ((False, 6), (True, 1)):
        made = planned(
            monkeypatch, kernel, {"x": 64, "r0_": 4096}, *arguments, deterministic=deterministic
        )
        assert (len(made["configs"]) > 1) is (count > 1)


def test_launches_differ_by_types_alignment_and_constants():
    x, odd = torch.zeros(64), torch.zeros(65)[1:]

    def kinds(*args, **named):
        return scale._kinds(scale._in_order(args, {"SQUARED": True, **named}))[0]

    assert kinds(x, 64, 2.0) == kinds(x, 32, 3.0)
    others = [
        kinds(odd, 64, 2.0),
        kinds(x, 63, 2.0),
        kinds(x, 1, 2.0),
        kinds(x.half(), 64, 2.0),
        kinds(x, 64, 2),
        kinds(x, 64, 2.0, SQUARED=False),
        kinds(x, 64, 2.0, SQUARED=1),
    ]
    assert len({kinds(x, 64, 2.0), *others}) == 8


def test_a_plan_measures_and_launches(tuned, cuda, monkeypatch):
    """Over the fake libcuda: the sizes are the grid's, whatever they are called."""
    tuned.times = staticmethod(lambda config: abs(config.kwargs["XBLOCK"] - 512) / 1000 + 0.1)
    made = functools.partial(cached_autotune, caching_autotuner_cls=tuned)
    monkeypatch.setattr(tuned_kernel, "cached_autotune", made)
    monkeypatch.setattr(tuned_kernel, "device_properties", lambda device: H100)
    x = DeviceTensor()
    values = scale._in_order((x, 5000, 2.0), {"SQUARED": False})
    _, pairs = scale._kinds(values)
    plan = scale._plan(torch.device("meta"), {"x": 8192}, pairs, False)
    cuda.define(plan.run(x, 5000, 2.0, stream=STREAM))
    plan.run(x, 5000, 2.0, stream=STREAM)
    assert plan.winner.kwargs["XBLOCK"] == 512, "by coordinate descent, which `refine` asks for"
    assert cuda.last().grid == (10, 1, 1)


class Plan:
    """Counts its launches."""

    def __init__(self):
        self.launches = []

    def run(self, *given, stream):
        self.launches.append(given)


def test_a_launch_that_is_known_asks_nothing(monkeypatch):
    """Launches of one kind share a plan, exactly known or not; others have their own."""
    kernel = tuning.pointwise(sizes={"x": "n"}, changed=["x"])(scale.fn)
    monkeypatch.setattr(tuned_kernel, "target_of", lambda tensor: GPU)
    monkeypatch.setattr(kernel, "_plan", lambda *given: Plan())
    monkeypatch.setattr(
        tuned_kernel, "_launch", lambda plan, index, given: plan.run(*given, stream=0)
    )
    x, y, odd = torch.zeros(64), torch.zeros(64), torch.zeros(65)[1:]
    for _ in range(2):
        for named in ({"SQUARED": True}, {"SQUARED": False}):
            kernel(x, 64, 2.0, **named)
            kernel(y, 64, 3.0, **named)
            kernel(x, 48, 2.0, **named)  # the same power of two
            kernel(odd, 64, 2.0, **named)
            kernel(factor=2.0, n=64, x=x, **named)
            kernel(x, 16, 2.0, **named)
    assert [len(plan.launches) for plan in kernel._plans.values()] == [8, 2, 2] * 2
    assert len(kernel._known) == 2 * 5, "but for launches by name"
    asked = []
    monkeypatch.setattr(kernel, "_in_order", lambda *given: asked.append(given))
    kernel(y, 64, 2.0, SQUARED=True)
    assert not asked
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with pytest.raises(TypeError):  # it asks again
        kernel(y, 64, 2.0, SQUARED=True)
    assert asked


def test_what_is_remembered_has_a_limit(monkeypatch):
    kernel = tuning.pointwise(sizes={"x": "n"})(plain_kernel)
    monkeypatch.setattr(tuned_kernel, "LIMIT", 4)
    monkeypatch.setattr(tuned_kernel, "target_of", lambda tensor: GPU)
    monkeypatch.setattr(kernel, "_plan", lambda *given: Plan())
    monkeypatch.setattr(tuned_kernel, "_launch", lambda plan, index, given: None)
    x = torch.zeros(64)
    for n in range(1, 40):
        kernel(x, n)
        assert len(kernel._known) <= 4


def test_without_sizes_the_decorators_are_those_of_generated_code():
    meta = {"device": H100, "signature": {}}
    listed = tuning.pointwise({"x": 1 << 20}, triton_meta=meta, return_configs=True)
    assert listed == configs("pointwise", {"x": 1 << 20})
    assert tuning.user_autotune is generated.user_autotune


def test_a_cpu_tensor_outside_of_the_emulator():
    with pytest.raises(DeviceError, match=r"'row_sum' .*is on cpu.* Try: "):
        row_sum(torch.zeros(64), torch.zeros(4), 4, 16)


@pytest.mark.gpu
def test_tuned_on_a_gpu(tmp_path):
    from tileloom import knobs

    x = whole_numbers(513, 3000).cuda()
    y = torch.empty(513, device=x.device)
    with knobs.scope({"cache.dir": tmp_path}):
        for _ in range(3):
            row_sum(x, y, 513, 3000)
            assert torch.equal(y, x.sum(1))
        before = x.clone()
        scale(x, x.numel(), 2.0, SQUARED=False)
        assert torch.equal(x, before * 2), "measuring leaves no trace"
