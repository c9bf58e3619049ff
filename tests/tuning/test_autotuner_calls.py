"""The calls that generated code makes on an autotuner, and the stages behind its list."""

from __future__ import annotations

import json
import pickle
import threading
import time
import timeit

import pytest
from tests.launch import fake_cuda
from tests.launch.fake_cuda import DeviceTensor

from tileloom import errors, launch
from tileloom.tuning.cached import cached_autotune
from tileloom.tuning.config import Config
from tileloom.tuning.hints import HeuristicType

pytest.importorskip("triton")
from tests.tuning import tuned_kernels as kernels
from tests.tuning.replayed import CONFIGS, STREAM, Replayed, arguments, config, make, run
from tests.tuning.tuned_kernels import FACTS, meta

pytestmark = pytest.mark.usefixtures("store")


# The calls of generated code


def test_precompile_then_launchers(tuned):
    tuner = make(tuned)
    tuner.set_compile_info(None, True)
    assert tuner.is_backward
    tuner.precompile()
    assert [launcher.config for launcher in tuner.launchers] == CONFIGS
    first = tuner.launchers[0]
    assert first.n_regs is not None
    assert first.shared == 0
    assert first.store_cubin is False
    assert first.cache_hash
    assert isinstance(tuner, Replayed)
    run(tuner)
    later = make(tuned)
    later.precompile()
    assert [launcher.config for launcher in later.launchers] == [CONFIGS[1]]


def test_one_config_is_launched_unmeasured(tuned, store):
    tuner = make(tuned, configs=[config(64), config(64)])
    run(tuner)
    assert tuned.asked == []
    assert store.files() == []
    assert tuner.winner == config(64)


def test_through_a_compile_worker_and_back(tuned, monkeypatch):
    """What PyTorch's pool does: compile, drop, pickle, unpickle, restore, precompile."""
    # It has filled Triton's cache, so no worker of ours is asked.
    monkeypatch.setattr("tileloom.tuning.loaded.precompile", None)
    worker = make(Replayed)
    worker.precompile(warm_cache_only=True)
    worker.prepare_for_pickle()
    assert worker.launchers == []
    copy = pickle.loads(pickle.dumps(worker))
    copy.set_compile_info(None, False)
    copy.restore_after_unpickle(None)
    reloads = []
    with monkeypatch.context() as patch:  # the worker has said what Triton's cache calls them
        patch.setattr("tileloom.tuning.precompile.Kernel.compile", None)
        copy.precompile(
            reload_kernel=lambda: reloads.append(make(Replayed)) or reloads[0],
            static_triton_bundle_key="key",
        )
    assert [launcher.config for launcher in copy.launchers] == CONFIGS
    run(copy)
    assert copy.winner == CONFIGS[0]
    kept = copy.prepare_for_pickle()
    again = pickle.loads(pickle.dumps(copy))
    assert (again.fn.full_name, again.fn.source) == (copy.fn.full_name, copy.fn.source)
    copy.restore_after_unpickle(kept)
    run(copy)
    assert not reloads  # the worker said of the function what a launch needs


def test_a_function_that_a_worker_described_is_loaded_when_more_of_it_is_asked(tuned, cuda):
    worker = make(Replayed)
    worker.precompile(warm_cache_only=True)
    worker.prepare_for_pickle()
    copy = pickle.loads(pickle.dumps(worker))
    with pytest.raises(errors.OptionError, match="came out of a pickle, without its function"):
        copy.fn.src  # noqa: B018
    copy.precompile(reload_kernel=lambda: make(Replayed))
    run(copy)
    assert copy.fn.arg_names == kernels.scale.arg_names
    assert copy.fn.cache_key == kernels.scale.cache_key
    assert copy.fn.pre_run_hooks is kernels.scale.pre_run_hooks  # which launches test


def test_the_assembler_is_the_workers(tuned, store, monkeypatch):
    """PyTorch's workers take the one that comes with it."""
    monkeypatch.setattr("tileloom.launch.compat.assembler_version", lambda capability: "13.7")
    worker = make(Replayed)
    worker.precompile(warm_cache_only=True)
    worker.prepare_for_pickle()
    copy = pickle.loads(pickle.dumps(worker))
    copy.precompile(reload_kernel=lambda: make(Replayed))
    run(copy)
    (path,) = store.files()
    assert json.loads(path.read_text())["record"]["platform"]["assembler"] == "13.7"


def test_a_worker_with_another_cache(tuned, tmp_path):
    """What is not where it says is compiled here."""
    from triton import knobs as of_triton

    worker = make(Replayed)
    with of_triton.cache.scope():
        of_triton.cache.dir = str(tmp_path / "other")
        worker.precompile(warm_cache_only=True)
    worker.prepare_for_pickle()
    copy = pickle.loads(pickle.dumps(worker))
    copy.precompile(reload_kernel=lambda: make(Replayed))
    assert [launcher.config for launcher in copy.launchers] == CONFIGS


def test_pickled_too_early_or_too_late(tuned):
    worker = make(Replayed)
    copy = pickle.loads(pickle.dumps(worker))
    with pytest.raises(errors.OptionError, match="came out of a pickle, without its function"):
        copy.precompile()
    run(worker)
    with pytest.raises(errors.OptionError, match="is pickled with launchers, which belong to this"):
        pickle.dumps(worker)


def test_extra_arguments_of_the_grid(tuned, cuda):
    from tileloom.tuning.grids import FixedGrid

    tuner = make(tuned, facts=FixedGrid.setup_grid_as_args())
    x, y, n = arguments()
    compiled = tuner.run(x, y, n, 3, 2, 1, stream=STREAM)
    cuda.define(compiled)
    tuner.run(x, y, n, 5, 2, 1, stream=STREAM)
    assert cuda.last().grid == (5, 2, 1)


def test_a_kernel_without_xblock_drops_it_from_its_configs(tuned):
    changed = {"signature": {"out_ptr0": "*fp32", "xnumel": "i32"}, "configs": []}
    made = cached_autotune(
        {"x": 8}, [config(1)], meta(**changed), HeuristicType.POINTWISE, inductor_meta=FACTS
    )(kernels.rows)
    assert made.configs == [Config({}, num_warps=4, num_stages=1)]


def test_threads_share_one_tune(tuned):
    tuner = make(tuned)
    threads = [threading.Thread(target=run, args=(tuner,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tuner.launchers) == 1
    rounds = tuned.asked.count(CONFIGS[1])
    assert rounds < 2 * 25


def test_hooks_see_tuned_launches(tuned, cuda):
    from triton import knobs as of_triton

    tuner = make(tuned)
    run(tuner)
    seen = []

    def enter(metadata):
        seen.append(metadata.get()["name"])

    of_triton.runtime.launch_enter_hook.add(enter)
    try:
        run(tuner)
    finally:
        of_triton.runtime.launch_enter_hook.remove(enter)
    run(tuner)
    assert seen == ["scale"]


def test_the_profiler_sees_tuned_launches(tuned):
    from torch.profiler import ProfilerActivity, profile

    tuner = make(tuned, facts={"kernel_name": "triton_poi_scale", "kernel_num_gb": 0.5})
    run(tuner)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run(tuner)
    assert "triton_poi_scale" in [event.name for event in seen.events()]


def test_a_recording_sees_the_winner_alone_and_bundles_hold_it(tuned):
    tuner = make(tuned)
    with launch.record_specs() as first:
        run(tuner)
    assert [spec.constexprs for spec in first] == [{"XBLOCK": 128}]
    asked = len(tuned.asked)
    with launch.record_specs() as again:  # of what was tuned and launched before
        run(tuner)
        run(tuner)
    assert again == first
    assert len(tuned.asked) == asked
    assert tuner.run is tuner.launchers[0]


def test_what_is_known_outlives_a_refresh(tuned, monkeypatch):
    tuner = make(tuned, facts={"force_disable_caches": True})
    run(tuner)
    asked = len(tuned.asked)
    launch.refresh()
    assert "run" not in vars(tuner)
    run(tuner)
    assert tuner.winner == CONFIGS[1]
    assert len(tuned.asked) == asked


def test_caches_that_generated_code_forbids_are_not_used(tuned, store):
    for facts in ({"force_disable_caches": True}, {"autotune_local_cache": False}):
        tuned.asked.clear()
        run(make(tuned, facts=facts))
        assert tuned.asked != []
    assert store.files() == []


# Stages


def test_coordinate_descent_follows_where_it_is_asked_for(tuned, store):
    times = {64: 0.3, 128: 0.26, 256: 0.28, 32: 0.4, 512: 0.1}
    tuned.times = staticmethod(
        lambda c: times[c.kwargs["XBLOCK"]] * (0.9 if c.num_warps == 8 else 1.0)
    )
    facts = {"coordinate_descent_tuning": True}
    tuner = make(tuned, configs=CONFIGS[:2], facts=facts, size_hints={"x": 512})
    run(tuner)
    # From 128 only 256 is new, and slower; two warps more are faster, and from there nothing.
    assert tuner.winner == config(128, 8)
    record = store.find(*tuner._identity(tuner._stages))
    assert record.found_by == "descent"
    assert record.problem["stages"] == "list+descent"
    tuned.asked.clear()
    later = make(tuned, configs=CONFIGS[:2], facts=facts, size_hints={"x": 512})
    run(later)
    assert later.winner == config(128, 8)
    assert tuned.asked == []
    plain = make(tuned, configs=CONFIGS[:2], size_hints={"x": 512})
    run(plain)
    assert plain.winner == CONFIGS[1]
    assert len(store.files()) == 2


@pytest.mark.parametrize("kind", ["TEMPLATE", "USER_AUTOTUNE", "FIXED", "REDUCTION"])
def test_what_is_never_refined(tuned, kind):
    facts = {"coordinate_descent_tuning": True, "deterministic": kind == "REDUCTION"}
    tuner = make(tuned, facts=facts, heuristic=HeuristicType[kind])
    assert tuner._stages.names == "list"


def test_a_search_over_more_configs(tuned):
    """The seam that combo kernels and later tuners use."""
    asked = []

    def search(measure):
        tried = [config(64), config(64, 8), config(32)]
        asked.append(measure(tried))
        return tried[asked[0].index(min(asked[0]))]

    tuned.times = staticmethod(lambda c: 0.3 if c.num_warps == 4 else 0.2)
    tuner = make(tuned, configs=[config(64)], search=search)
    run(tuner)
    assert tuner.winner == config(64, 8)
    assert asked[0] == pytest.approx([1.5, 1.0, 1.5])
    assert tuner.autotune_cache_info["found_by"] == "search"


def test_blocks_are_halved_where_registers_keep_programs_away(tuned, monkeypatch, store):
    from tileloom.tuning import loaded

    own = loaded.Loaded.costs
    monkeypatch.setattr(loaded.Loaded, "costs", lambda self, c: own(self, c) | {"registers": 255})
    times = {2048: 0.4, 1024: 0.3, 512: 0.35, 256: 0.5, 128: 0.6, 64: 0.7}
    tuned.times = staticmethod(lambda c: times[c.kwargs["R0_BLOCK"]])
    tuner = make(
        tuned, kernels.row_sum, configs=[Config({"XBLOCK": 1, "R0_BLOCK": 2048}, 8, 1)],
        heuristic=HeuristicType.REDUCTION, size_hints={"x": 2**14, "r0_": 2048},
        signature={"in_ptr0": "*fp32", "out_ptr0": "*fp32", "xnumel": "i32", "r0_numel": "i32",
                   "XBLOCK": "constexpr", "R0_BLOCK": "constexpr"},
    )  # fmt: skip
    tuner.run(DeviceTensor(), DeviceTensor(), 2**14, 2048, stream=STREAM)
    assert tuner.winner.kwargs == {"XBLOCK": 1, "R0_BLOCK": 1024}
    record = store.find(*tuner._identity(tuner._stages))
    assert record.found_by == "scaled"
    assert record.problem["stages"] == "list+scaled"
    assert len(record.candidates) == 6


# Time on the host


def test_a_look_up_takes_less_than_a_millisecond(tuned):
    run(make(tuned))
    times = []
    for _ in range(20):
        tuner = make(tuned)
        began = time.perf_counter()
        assert tuner._find().config == CONFIGS[1]
        times.append(time.perf_counter() - began)
    assert min(times) <= 0.001


def test_a_tuned_launch_costs_no_more_than_a_plain_launcher(tuned, cuda):
    tuner = make(tuned)
    x, y, n = arguments()
    cuda.define(tuner.run(x, y, n, stream=STREAM))
    options = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
    plain = launch.prepare(kernels.scale, **options)
    fake_cuda.warm(plain, (x, y, n), XBLOCK=128)
    calls = {
        "tuned": lambda: tuner.run(x, y, n, stream=STREAM),
        "plain": lambda: plain[(8,)](x, y, n, 128),
    }
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(20):
        for name, call in calls.items():
            best[name] = min(best[name], timeit.timeit(call, number=500) / 500)
    assert best["tuned"] <= best["plain"] + 0.3e-6


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [
        (0, None, "tuning: in_ptr0 of 'scale' is None; it takes a tensor. Try: "
                  "torch.as_tensor(in_ptr0, device=the GPU)."),
        (1, 4096, "tuning: out_ptr0 of 'scale' is 4096; it takes a tensor. Try: "
                  "torch.as_tensor(out_ptr0, device=the GPU)."),
        (2, 2**31, "launch: number 3 of those that 'scale' is launched with is 2147483648, which "
                   "is no i32, as it was compiled for. Try: a kernel compiled for a wider type."),
        (2, 7.5, "launch: number 3 of those that 'scale' is launched with is 7.5, which is no "
                 "i32, as it was compiled for. Try: a kernel compiled for a wider type."),
        (2, -5000, "launch: the grid of 'scale' is out of the driver's range, which is 1 to "
                   "2^31 - 1 along x and 1 to 65535 along y and z. Try: more work in each block."),
        (3, None, "launch: the stream of 'scale' is None; it must be a CUstream, an integer. Try: "
                  "torch.cuda.current_stream().cuda_stream."),
        (3, -1, "launch: the stream of 'scale' is -1; it must be a CUstream, an integer. Try: "
                "torch.cuda.current_stream().cuda_stream."),
    ],
)  # fmt: skip
def test_wrong_arguments_of_a_tuned_launch(tuned, cuda, place, value, text):
    tuner = make(tuned)
    good = [*arguments(), STREAM]
    tuner.run(*good[:3], stream=STREAM)
    before = cuda.count()
    *args, stream = [*good[:place], value, *good[place + 1 :]]
    with pytest.raises((errors.ArgumentError, errors.OptionError)) as caught:
        tuner.run(*args, stream=stream)
    assert str(caught.value) == text
    assert cuda.count() == before
    tuner.run(*good[:3], stream=STREAM)
    assert cuda.count() == before + 1
