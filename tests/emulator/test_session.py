"""The public interface: options, errors, targets, host events, suppression, timelines, reports."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton
import triton.language as tl
from threadpoolctl import threadpool_info, threadpool_limits
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.emulator import corpus, kernels, support
from tests.emulator.cases.names import tma_load
from tileloom import emulator
from tileloom.emulator.session import Run
from tileloom.errors import OptionError
from tileloom.target import CPU, target_of


@triton.jit
def copy(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at))


def test_target_is_emulated_inside_and_given_back():
    x = torch.zeros(1)
    with emulator.run(sms=7):
        inside = target_of(x)
        assert (inside.kind, inside.capability, inside.sms) == ("emulated", (9, 0), 7)
        with emulator.run(arch="sm_80"):
            assert target_of(x).capability == (8, 0)
        assert target_of(x) == inside
    assert target_of(x) == CPU


def test_driver_and_hook_are_given_back_after_an_error():
    from triton import knobs
    from triton.runtime import driver

    before = (driver._active, knobs.runtime.add_stages_inspection_hook)
    with pytest.raises(ZeroDivisionError), emulator.run():
        _ = 1 // 0
    assert (driver._active, knobs.runtime.add_stages_inspection_hook) == before


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"schedule": "soon"}, "schedule='soon' is not known; accepted are late, eager, random."),
        ({"level": "llir"}, "level='llir' is not known; accepted are ttir, ttgir, machine."),
        ({"arch": "sm_100"}, "arch='sm_100' is not known; accepted are sm_80, sm_90, sm_90a."),
        ({"ignore": ["rance"]}, "ignore='rance' is not known; accepted are race, proxy, deadlock,"),
        ({"ignore": "race"}, "ignore='race' is one text; it must be a list of them. Try: ignore=["),
        ({"sms": 0}, "sms is 0; it must be a whole number of at least 1."),
        ({"sms": "4"}, "sms is '4'; it must be a whole number of at least 1."),
        ({"costs": None}, "costs is None; it must be a list. Try: costs=[]."),
        ({"max_steps": -1}, "max_steps is -1; it must be a whole number of at least 1."),
        ({"read_before_write_fence": "no"}, "read_before_write_fence='no' is not known"),
    ],
)
def test_options_outside_their_range_are_refused(options, text):
    with pytest.raises(OptionError) as caught, emulator.run(**options):
        pass
    assert text in str(caught.value)


def blas_threads():
    return {info["num_threads"] for info in threadpool_info() if info["user_api"] == "blas"}


def test_blas_has_one_thread_inside_and_its_own_number_after():
    with threadpool_limits(limits=2, user_api="blas"):
        before = blas_threads()
        with emulator.run():
            assert blas_threads() == {1}
        assert blas_threads() == before


def test_a_second_thread_is_refused_while_a_run_is_open():
    def enter():
        with emulator.run():
            return "entered"

    with ThreadPoolExecutor(1) as pool, emulator.run():
        assert enter() == "entered"
        with pytest.raises(emulator.LaunchError, match="another thread is inside"):
            pool.submit(enter).result()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(enter).result() == "entered"


def test_host_write_refuses_a_strided_tensor():
    with emulator.run() as run, pytest.raises(emulator.LaunchError, match="contiguous CPU tensor"):
        run.host_write(torch.zeros(4, 4)[:, 1], 0)


def test_reports_raise_their_own_class_and_collect_on_demand():
    x = torch.zeros(100)
    with emulator.run(collect=True) as run:
        copy[(1,)](x, x, 128)
    assert [r.kind for r in run.errors] == ["out-of-bounds", "out-of-bounds"]
    assert isinstance(run.errors[0].exception(), emulator.OutOfBoundsError)
    with emulator.run(ignore=["out-of-bounds"]) as run:
        copy[(1,)](x, x, 128)
    assert run.reports == []


@triton.jit
def allowed(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)  # tileloom: allow(out-of-bounds) the tail is padding that nobody reads
    tl.store(out_ptr + at, x)


@triton.jit
def allowed_without_reason(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)  # tileloom: allow(out-of-bounds)
    tl.store(out_ptr + at, x)


def test_a_report_is_suppressed_at_its_line_with_a_reason_only():
    with emulator.run() as run:
        allowed[(1,)](torch.zeros(100), torch.zeros(128), 128)
    assert run.reports == []
    ((report, reason),) = run.suppressed
    assert report.kind == "out-of-bounds"
    assert reason == "the tail is padding that nobody reads"
    with pytest.raises(emulator.OutOfBoundsError), emulator.run():
        allowed_without_reason[(1,)](torch.zeros(100), torch.zeros(128), 128)


@triton.jit
def wait_for_host(data_ptr, flag_ptr, out_ptr, BLOCK: tl.constexpr):
    while tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") == 0:
        pass
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(data_ptr + at) + 1)


@triton.jit
def wait_for_host_relaxed(data_ptr, flag_ptr, out_ptr, BLOCK: tl.constexpr):
    while tl.atomic_add(flag_ptr, 0, sem="relaxed", scope="sys") == 0:
        pass
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(data_ptr + at) + 1)


def host_run(kernel, schedule, seed, first="data"):
    data, flag, out = torch.zeros(64), torch.zeros(1, dtype=torch.int32), torch.zeros(64)
    with emulator.run(schedule=schedule, seed=seed, collect=True) as run:
        if first == "data":
            run.host_write(data, torch.arange(64.0))
        run.host_write(flag, 1)
        if first == "flag":
            run.host_write(data, torch.arange(64.0))
        kernel[(1,)](data, flag, out, 64)
    return run, out


@pytest.mark.parametrize(
    ("schedule", "seed"), [("late", 0), ("eager", 0), ("random", 1), ("random", 2)]
)
def test_host_writes_data_then_flag(schedule, seed):
    run, out = host_run(wait_for_host, schedule, seed)
    assert run.reports == []
    assert torch.equal(out, torch.arange(64.0) + 1)


def test_host_write_without_an_acquire_is_a_race():
    run, _ = host_run(wait_for_host_relaxed, "late", 0)
    assert [r.kind for r in run.errors] == ["race"]
    assert "host write of it is not known to be complete" in run.errors[0].message


def test_host_that_raises_the_flag_first_is_a_race():
    run, _ = host_run(wait_for_host, "late", 0, first="flag")
    assert any(r.kind == "race" for r in run.errors)


def test_host_call_happens_once_while_the_kernel_runs():
    data, flag, out = torch.zeros(64), torch.zeros(1, dtype=torch.int32), torch.zeros(64)
    calls = []
    with emulator.run() as run:
        run.host_call(lambda: calls.append(flag.fill_(1)))
        wait_for_host[(1,)](data, flag, out, 64)
    assert len(calls) == 1
    assert out.tolist() == [1.0] * 64


@triton.jit
def asserting(x_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.device_assert(x > 0, "all are positive")


def test_device_assert_reports_how_many_fail():
    x = torch.tensor([1.0, -1.0, 2.0, -2.0])
    expected = pytest.raises(emulator.AssertError, match="fails for 2 elements: all are positive")
    with expected, emulator.run():
        asserting[(1,)](x, 4, debug=True)


def test_device_print_shows_program_and_values(capsys):
    @triton.jit
    def printing(x_ptr):
        tl.device_print("value is", tl.load(x_ptr))

    with emulator.run():
        printing[(1,)](torch.tensor([42.0]))
    assert capsys.readouterr().out.strip().endswith("42.0")


def test_timeline_has_a_track_for_each_partition_and_what_is_in_flight(tmp_path):
    with emulator.run() as run:
        support.load_case("specialised_gemm").main(programs=2)
    run.timeline(tmp_path / "out.json")
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks == {"multiply_tiles", "load_tiles"} or tracks == {
        "main",
        "multiply_tiles",
        "load_tiles",
    }
    flights = [e for e in events if e["ph"] == "b"]
    assert {e["name"] for e in flights} == {
        "TMA load of load_tiles", "wgmma of multiply_tiles", "TMA store of multiply_tiles",
        "TMA store: write of main",
    }  # fmt: skip
    assert len(flights) == sum(e["ph"] == "e" for e in events)
    assert all(e["dur"] > 0 for e in events if e["ph"] == "X")
    assert any(e["name"].startswith("wait: parity") for e in events)


def test_a_run_may_keep_no_timeline(tmp_path):
    without = pytest.raises(emulator.LaunchError, match="this run kept no timeline")
    with emulator.run(timeline=False) as run, without:
        run.timeline(tmp_path / "out.json")


def test_random_schedules_are_repeatable():
    def trace(seed):
        with emulator.run(schedule="random", seed=seed, timeline=True) as run:
            support.load_case("shared_exchange").main()
        assert isinstance(run, Run)
        return [(e["ph"], e.get("ts"), e.get("tid")) for e in run._timeline._events]

    assert trace(3) == trace(3)
    assert len({str(trace(seed)) for seed in range(4)}) > 1


def text_of(name, tmp_path, **options):
    bug = next(b for b in corpus.BUGS if b.id == name)
    module = support.planted(bug, tmp_path)
    with emulator.run(collect=True, **options) as run:
        module.main()
    text = run.errors[0].text()
    return text.replace(module.__file__.rsplit("/", 1)[-1], f"{bug.case}.py")


def test_text_of_a_race(tmp_path):
    assert text_of("specialised_gemm-released-while-in-flight", tmp_path).splitlines()[:6] == [
        "[race] shared buffer a_s[0] is overwritten by a TMA load while a wgmma read of it is not "
        "known to "
        "be complete",
        "    at   specialised_gemm.py:32  | tma_load(a_desc, [tile // cols * BM, k * BK], "
        "full.index(slot), "
        "a_s.index(slot))   (TMA load write by partition 'load_tiles', program (0, 0, 0))",
        "    vs   specialised_gemm.py:50  | acc = warpgroup_mma(a_s.index(slot), b_s.index(slot), "
        "acc, "
        "is_async=True)   (wgmma read by partition 'multiply_tiles', program (0, 0, 0))",
        "    hint warpgroup_mma_wait() with fewer outstanding must come before the release or "
        "overwrite",
        "    seen kernel specialised_gemm, schedule='late', seed=0, level='ttgir'",
    ]


def test_text_of_a_deadlock(tmp_path):
    assert text_of("shared_exchange-never-freed", tmp_path).splitlines() == [
        "[deadlock] every partition is blocked and no asynchronous operation is in flight",
        "    at   shared_exchange.py:24  | mbarrier.wait(ready.index(i % 2), (i // 2) & 1)   "
        "(wait by "
        "partition 'drain', program (0, 0, 0))",
        "    partition 'drain' waits: shared_exchange.py:24  | mbarrier.wait(ready.index(i % 2), "
        "(i // 2) & "
        "1)  -- parity 1 of mbarrier ready[0]: current phase 1 (parity 1), 0 of 1 arrivals, 0 "
        "bytes "
        "outstanding",
        "    partition 'fill' waits: shared_exchange.py:14  | mbarrier.wait(free.index(i % 2), "
        "((i // 2) & "
        "1) ^ 1)  -- parity 0 of mbarrier free[0]: current phase 0 (parity 0), 0 of 1 arrivals, 0 "
        "bytes "
        "outstanding",
        "    hint mbarrier ready[0] lacks 1 of the 1 arrivals of a phase; mbarrier free[0] lacks 1 "
        "of the 1 arrivals of a phase (of a fresh mbarrier, a wait for parity 1 passes)",
        "    seen kernel shared_exchange, schedule='late', seed=0, level='ttgir'",
    ]


def test_text_of_a_missing_fence(tmp_path):
    lines = text_of("pipelined_gemm-no-store-fence", tmp_path).splitlines()
    assert lines[0] == (
        "[proxy] shared buffer c_s: a generic-proxy local store write is followed by a TMA store "
        "through "
        "the async proxy without fence_async_shared() in between"
    )
    assert "tma_store(c_desc, [row, col], c_s)" in lines[1]
    assert "c_s.store(acc.to(dtype))" in lines[2]


def test_text_of_a_global_race(tmp_path):
    lines = text_of("split_sum-relaxed-ticket", tmp_path).splitlines()
    assert lines[0] == (
        "[race] global tensor 'parts_ptr' is read by a load while a store write of it is not "
        "known to be "
        "complete"
    )
    assert "program (2, 0, 0)" in lines[1]
    assert "program (0, 0, 0)" in lines[2]
    assert lines[3].startswith("    hint order them: a release")


def test_reports_as_data_and_annotations():
    x = torch.zeros(100)
    with emulator.run(collect=True) as run:
        kernels.unary[(1,)](x, x, 120, "copy", 128)
    report = run.errors[0]
    assert json.loads(json.dumps(report.as_dict()))["kind"] == "out-of-bounds"
    assert report.github().startswith(f"::error file={kernels.__file__},line={report.line},title=")
    assert "\n" not in report.github()


def test_infos_stand_in_the_reports_and_do_not_raise(tmp_path):
    text = (support.CASES / "named_barriers.py").read_text()
    fence = "    fence_async_shared()\n    gl.warp_specialize("
    last = "    if WG == 0:\n        named_barrier_sync(8, 256)"
    assert fence in text
    assert last in text
    changed = text.replace(fence, "    gl.warp_specialize(").replace(
        last, "    if WG == 2:\n        named_barrier_sync(8, 256)"
    )
    with emulator.run() as run:
        result, expected = support.load_text("named_barriers", changed, tmp_path).main()
    assert support.close(result, expected)
    assert {(r.kind, r.severity) for r in run.reports} == {("barrier", "info")}
    messages = {r.message for r in run.reports}
    assert (
        "the program ends with 128 of 256 threads waiting to be met at named barrier 8" in messages
    )
    assert any("with no fence since its mbarrier.init" in m for m in messages)
    assert run.errors == []


def test_boxes_wholly_outside_are_infos():
    with emulator.run() as run:
        support.load_case("named_barriers").main(length=40)
    assert {(r.kind, r.severity) for r in run.reports} == {("out-of-bounds", "info")}
    assert "lies wholly outside of 'q_desc' with shape [1, 2, 40, 64]" in run.reports[0].message


@gluon.jit
def read_then_load(desc, out_ptr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    buf = gl.allocate_shared_memory(gl.float16, [64, 64], desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    fence_async_shared()
    total = gl.zeros([64, 64], gl.float32, layout)
    for i in range(2):
        mbarrier.expect(bar, desc.block_type.nbytes)
        tma_load(desc, [0, 0], bar, buf)
        mbarrier.wait(bar, i)
        total += buf.load(layout).to(gl.float32)
    rows = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, layout)), 1)
    cols = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, layout)), 0)
    gl.store(out_ptr + rows * 64 + cols, total)


@pytest.mark.parametrize("severity", ["warning", "info", "ignore", "error"])
def test_a_read_before_an_asynchronous_write_without_a_fence(severity):
    x, out = torch.randn(64, 64, dtype=torch.float16), torch.zeros(64, 64)
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    with emulator.run(collect=True, read_before_write_fence=severity) as run:
        read_then_load[(1,)](TensorDescriptor.from_tensor(x, [64, 64], layout), out)
    assert torch.equal(out, 2 * x.float())
    expected = [] if severity == "ignore" else [("proxy", severity)]
    assert [(r.kind, r.severity) for r in run.reports] == expected
