"""The autotuner on recorded times: real compiles for sm_90, Triton's launchers, a fake libcuda."""

from __future__ import annotations

import pickle
import threading

import pytest
import torch
from tests.launch import fake_cuda
from tests.launch.fake_cuda import DeviceTensor
from tests.tuning.replayed import Replayed, by_block
from tests.tuning.tuned_kernels import FACTS, meta

from tileloom import errors, knobs
from tileloom.tuning.cached import cached_autotune
from tileloom.tuning.config import Config
from tileloom.tuning.hints import HeuristicType
from tileloom.tuning.loaded import NoTritonConfigsError
from tileloom.tuning.precompile import Kernel
from tileloom.tuning.store import Store

pytest.importorskip("triton")
kernels = pytest.importorskip("tests.tuning.tuned_kernels")


def config(xblock, num_warps=4, **more):
    return Config({"XBLOCK": xblock, **more}, num_warps=num_warps, num_stages=1)


CONFIGS = [config(64), config(128), config(256)]
STREAM = 0x5EA


@pytest.fixture(scope="module")
def cuda():
    with fake_cuda.installed() as fake:
        yield fake


@pytest.fixture(scope="module")
def triton_cache(tmp_path_factory):
    """One cache for the module: each config is compiled once."""
    from triton import knobs as of_triton

    with of_triton.cache.scope():
        of_triton.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


@pytest.fixture(autouse=True)
def store(request, cuda, triton_cache, tmp_path, monkeypatch):
    if "workers" not in request.fixturenames:  # compiling in this process takes less time
        monkeypatch.setattr("tileloom.tuning.loaded.precompile", lambda *arguments: {})
    with knobs.scope({"cache.dir": tmp_path}):
        yield Store()


@pytest.fixture
def workers():
    """For a test whose kernels are compiled by workers first."""


@pytest.fixture
def tuned():
    """A class of autotuners of this test, with times of its own."""

    class Mine(Replayed):
        times = staticmethod(by_block(b64=0.3, b128=0.26, b256=0.28))
        asked: list[Config] = []  # noqa: RUF012

    return Mine


def make(kind, fn=None, configs=None, facts=None, heuristic=HeuristicType.POINTWISE, **changes):
    options = {name: changes.pop(name) for name in ("size_hints", "search") if name in changes}
    return cached_autotune(
        options.get("size_hints", {"x": 1024}), CONFIGS if configs is None else configs,
        meta(**changes), heuristic, inductor_meta=FACTS | (facts or {}),
        caching_autotuner_cls=kind, search=options.get("search"),
    )(fn or kernels.scale)  # fmt: skip


def arguments(n=1000):
    return DeviceTensor(), DeviceTensor(), n


def run(tuner, *args, cuda=None):
    """Launch, and return the grid and the arguments that the driver saw."""
    result = tuner.run(*(args or arguments()), stream=STREAM)
    if cuda is not None:
        cuda.define(result)
        tuner.run(*(args or arguments()), stream=STREAM)
    return result


def test_the_fastest_is_found_launched_and_kept(tuned, cuda, store, workers):
    tuner = make(tuned)
    x, y, n = arguments()
    compiled = tuner.run(x, y, n, stream=STREAM)
    assert compiled.metadata.num_warps == 4
    assert tuner.winner == CONFIGS[1]
    assert [launcher.config for launcher in tuner.launchers] == [CONFIGS[1]]
    cuda.define(compiled)
    tuner.run(x, y, n, stream=STREAM)
    seen = cuda.last()
    assert seen.grid == (8, 1, 1)
    assert seen.stream == STREAM
    assert seen.values[:20] == (
        x.data_ptr().to_bytes(8, "little") + y.data_ptr().to_bytes(8, "little")
        + n.to_bytes(4, "little")
    )  # fmt: skip
    (path,) = store.files()
    assert path.name.startswith("scale-")


def test_every_launch_has_the_grid_of_its_sizes(tuned, cuda):
    tuner = make(tuned)
    run(tuner, cuda=cuda)
    for n, blocks in ((1, 1), (128, 1), (129, 2), (2**20, 8192)):
        tuner.run(*arguments(n), stream=STREAM)
        assert cuda.last().grid == (blocks, 1, 1)
    before = cuda.count()
    assert tuner.run(*arguments(0), stream=STREAM) is None
    assert cuda.count() == before


def test_a_second_process_measures_and_compiles_nothing(tuned, monkeypatch):
    run(make(tuned))
    tuned.asked.clear()
    again = make(tuned)
    compiled = []
    own = Kernel.compile

    def compile_noted(self, config, capability):
        compiled.append(config)
        return own(self, config, capability)  # out of Triton's cache

    monkeypatch.setattr(Kernel, "compile", compile_noted)
    monkeypatch.setattr("tileloom.tuning.loaded.precompile", None)
    run(again)
    assert tuned.asked == []
    assert compiled == [CONFIGS[1]]
    assert again.winner == CONFIGS[1]


def test_once_tuned_run_is_the_launcher_itself(tuned):
    tuner = make(tuned)
    run(tuner)
    assert tuner.run is tuner.launchers[0]


def test_the_default_wins_among_equals(tuned, store):
    tuned.times = staticmethod(by_block(b64=0.1003, b128=0.1, b256=0.12))
    tuner = make(tuned)
    run(tuner)
    assert tuner.winner == CONFIGS[0]
    record = store.find(*tuner._identity(tuner._stages))
    assert [one.ratio for one in record.candidates] == pytest.approx([1.0, 0.997, 1.196], abs=1e-3)
    assert record.measured["rounds"] >= 7
    assert record.candidates[0].registers is not None


def test_a_candidate_added_later_is_measured_against_the_winner_alone(tuned, store):
    run(make(tuned))
    tuned.asked.clear()
    tuned.times = staticmethod(by_block(b64=0.01, b128=0.26, b256=0.01, b512=0.2))
    more = make(tuned, configs=[*CONFIGS, config(512)])
    run(more)
    assert set(tuned.asked) == {CONFIGS[1], config(512)}
    assert more.winner == config(512)
    record = store.find(*more._identity(more._stages))
    assert [Config.from_dict(c.config) for c in record.candidates] == [*CONFIGS, config(512)]
    assert len(store.files()) == 1
    # The first list again: its winner is the one of all that was measured of it.
    tuned.asked.clear()
    run(make(tuned, configs=CONFIGS))
    assert set(tuned.asked) == set(CONFIGS)


def test_what_a_kernel_changes_is_restored_ahead_of_each_launch(tuned, monkeypatch):
    from tileloom.tuning import tune

    made = []

    class Kept:
        def __init__(self, changed, zeroed, fits):
            made.append((changed, zeroed))
            self.times = 0

        def restore(self):
            self.times += 1
            made.append(self)

    monkeypatch.setattr(tune, "Snapshot", Kept)
    monkeypatch.setattr(tune, "tensors_named", lambda names, named: [named[n] for n in names])
    signature = {"in_out_ptr0": "*fp32", "in_ptr0": "*fp32", "xnumel": "i32", "scale": "fp32",
                 "XBLOCK": "constexpr", "EXTRA": "constexpr"}  # fmt: skip
    tuner = make(
        tuned, kernels.add_to, configs=[config(64), config(128)],
        facts={"mutated_arg_names": ["in_out_ptr0"]}, signature=signature, constants={"EXTRA": 2},
        reset_to_zero=["in_ptr0"], restore_value=("in_out_ptr0",),
    )  # fmt: skip
    x, y = DeviceTensor(), DeviceTensor()
    tuner.run(x, y, 1000, 0.5, stream=STREAM)
    assert made[0] == ([x], [y])
    assert made[1].times > sum(8 for _ in range(2))
    assert tuner.mutated_arg_names == ("in_out_ptr0",)
    assert tuner.triton_meta.keys() == meta().keys()


# Failures


def test_all_configs_failing_lists_every_reason(tuned, store, workers):
    tuner = make(tuned, kernels.wide, configs=[config(1024), config(2048)])
    with pytest.raises(NoTritonConfigsError) as caught:
        run(tuner)
    text = str(caught.value)
    assert text.startswith("tuning: no config of 'wide' runs. The reason of each:\n- XBLOCK: 1024")
    assert "\n- XBLOCK: 2048, num_warps: 4, num_stages: 1: " in text
    assert text.count("CompileTimeAssertionFailure") == 2
    assert "blocks are at most 512" in text
    assert text.endswith("Try: smaller blocks or fewer stages, or correct the kernel.")
    assert store.files() == []


def test_failing_at_run_time_lists_every_reason_too(tuned, store):
    tuned.times = staticmethod(lambda config: float("inf"))
    with pytest.raises(NoTritonConfigsError) as caught:
        run(make(tuned))
    assert str(caught.value).count("RuntimeError: an illegal instruction was encountered") == 3
    assert store.files() == []


def test_failed_configs_are_remembered_and_not_compiled_again(tuned, store, monkeypatch):
    configs = [config(1024), config(64), config(128)]
    tuner = make(tuned, kernels.wide, configs=configs)
    run(tuner)
    assert tuner.winner == config(128)
    record = store.find(*tuner._identity(tuner._stages))
    assert "blocks are at most 512" in record.candidates[0].reason
    compiled = []
    monkeypatch.setattr("tileloom.tuning.loaded.precompile", lambda kernel, configs, arch:
                        compiled.extend(configs) or {})  # fmt: skip
    more = make(tuned, kernels.wide, configs=[*configs, config(256)])
    run(more)
    assert compiled == [config(128), config(256)]
    assert more.winner == config(128)


def test_configs_that_spill_are_not_measured_unless_a_user_wrote_the_kernel(tuned, monkeypatch):
    from tileloom.tuning import loaded

    spills = {64: 0, 128: 100, 256: 16}
    own = loaded.Loaded.costs
    monkeypatch.setattr(
        loaded.Loaded, "costs",
        lambda self, c: own(self, c) | {"spills": spills[c.kwargs["XBLOCK"]]},
    )  # fmt: skip
    tuner = make(tuned)
    run(tuner)
    assert set(tuned.asked) == {CONFIGS[0], CONFIGS[2]}
    assert tuner.winner == CONFIGS[2]
    users = tuned(kernels.scale, meta(), CONFIGS, custom_kernel=True, inductor_meta=FACTS)
    with knobs.scope({"cache.dir": knobs.get("cache.dir") / "other"}):
        run(users)
    assert users.winner == CONFIGS[1]


SENTENCES = [
    (
        {"configs": []},
        "tuning: the list of configs of 'scale' is empty; it needs at least one. Try: "
        "[tileloom.tuning.Config({'XBLOCK': 128})].",
    ),
    (
        {"facts": {"mutated_arg_names": ["in_ptr7"]}},
        "tuning: mutated_arg_names names 'in_ptr7', which is no argument of 'scale'; those are "
        "in_ptr0, out_ptr0, xnumel, XBLOCK. Try: one of these.",
    ),
    (
        {"reset_to_zero": ["out"]},
        "tuning: reset_to_zero names 'out', which is no argument of 'scale'; those are in_ptr0, "
        "out_ptr0, xnumel, XBLOCK. Try: one of these.",
    ),
    (
        {"facts": {"store_cubin": True}},
        "tuning: the binary of 'scale' is to be stored for a C++ program (store_cubin), which "
        "tileloom does not do. Try: a bundle, tileloom.launch.build_bundle, for Python programs "
        "without a compiler.",
    ),
]


@pytest.mark.parametrize(("changes", "text"), SENTENCES)
def test_bad_input_gets_a_sentence(tuned, changes, text):
    with pytest.raises((errors.OptionError, errors.UnsupportedError)) as caught:
        make(tuned, **changes)
    assert str(caught.value) == text


def test_a_tensor_on_the_cpu_gets_a_sentence(tuned):
    tuner = make(tuned)
    with pytest.raises(errors.DeviceError) as caught:
        tuner.run(torch.zeros(8), DeviceTensor(), 8, stream=STREAM)
    assert str(caught.value) == (
        "tuning: in_ptr0 of 'scale' is on cpu; the kernel runs on a GPU. Try: in_ptr0.to(the GPU)."
    )
    run(tuner)
    with pytest.raises(errors.DeviceError, match="out_ptr0 of 'scale' is on cpu"):
        tuner.run(DeviceTensor(), torch.zeros(8), 8, stream=STREAM)


def test_an_address_that_16_does_not_divide_gets_a_sentence(tuned):
    tuner = make(tuned)
    run(tuner)
    with pytest.raises(errors.ArgumentError) as caught:
        tuner.run(DeviceTensor(), DeviceTensor(address=0x7F0000000004), 8, stream=STREAM)
    assert str(caught.value) == (
        "tuning: out_ptr0 of 'scale' lies at address 0x7f0000000004, which 16 does not divide; the "
        "kernel is compiled for such. Try: out_ptr0.clone()."
    )


def test_missing_arguments_get_a_sentence(tuned):
    with pytest.raises(errors.ArgumentError) as caught:
        make(tuned).run(DeviceTensor(), 8, stream=STREAM)
    assert str(caught.value) == (
        "tuning: 'scale' takes in_ptr0, out_ptr0, xnumel; given are 2 by position. Try: each of "
        "them once, and stream= by name."
    )


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


def test_through_a_compile_worker_and_back(tuned):
    """What PyTorch's pool does: compile, drop, pickle, unpickle, restore, precompile."""
    worker = make(Replayed)
    worker.precompile(warm_cache_only=True)
    worker.prepare_for_pickle()
    assert worker.launchers == []
    copy = pickle.loads(pickle.dumps(worker))
    assert copy.fn is None
    copy.set_compile_info(None, False)
    copy.restore_after_unpickle(None)
    copy.precompile(reload_kernel=lambda: make(Replayed), static_triton_bundle_key="key")
    assert [launcher.config for launcher in copy.launchers] == CONFIGS
    run(copy)
    assert copy.winner == CONFIGS[0]
    kept = copy.prepare_for_pickle()
    assert copy.fn is None
    copy.restore_after_unpickle(kept)
    run(copy)


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
