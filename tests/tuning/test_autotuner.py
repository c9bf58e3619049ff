"""The autotuner on recorded times: real compiles for sm_90, Triton's launchers, a fake libcuda."""

from __future__ import annotations

import pytest
import torch
from tests.launch.fake_cuda import DeviceTensor

from tileloom import errors, knobs
from tileloom.tuning.config import Config
from tileloom.tuning.loaded import NoTritonConfigsError
from tileloom.tuning.measure import Plan
from tileloom.tuning.precompile import Kernel

pytest.importorskip("triton")
from tests.tuning import tuned_kernels as kernels
from tests.tuning.replayed import CONFIGS, STREAM, arguments, by_block, config, make, run
from tests.tuning.tuned_kernels import FACTS, meta


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


def test_scratch_memory_is_given_without_tritons_launcher(tuned, cuda, monkeypatch):
    """On Triton 3.6 that launcher is compiled by gcc, at the first call of each signature."""
    from triton.compiler import CompiledKernel

    def run_by_triton(compiled):
        raise AssertionError("Triton's launcher is made")

    sizes = []

    def allocate(size, alignment, stream):
        sizes.append((size, alignment, stream))
        return DeviceTensor(address=0x7F00CAFE0000)

    monkeypatch.setattr(CompiledKernel, "run", property(run_by_triton))
    monkeypatch.setattr("tileloom.tuning.loaded.of_torch", lambda device: allocate)
    tuner = make(tuned, kernels.scale_by_tma)
    tuner.run(*arguments(), stream=STREAM)
    measured = {(blocks * 256, 128, 0) for blocks in (16, 8, 4)}  # on the current stream
    assert set(sizes) == {*measured, (8 * 256, 128, STREAM)}
    compiled = tuner.run(*arguments(), stream=STREAM)
    cuda.define(compiled)
    x, y, n = arguments(500)
    tuner.run(x, y, n, stream=STREAM + 1)
    assert sizes[-1] == (4 * 256, 128, STREAM + 1)
    assert (cuda.last().grid, cuda.last().stream) == ((4, 1, 1), STREAM + 1)
    numbers = [x.data_ptr(), y.data_ptr(), 0x7F00CAFE0000, 0]
    x_, y_, scratch, profile = (number.to_bytes(8, "little") for number in numbers)
    assert cuda.last().values == x_ + y_ + n.to_bytes(4, "little") + scratch + profile
    before = len(sizes), cuda.count()
    assert tuner.run(*arguments(0), stream=STREAM) is None
    assert (len(sizes), cuda.count()) == before


def test_scratch_memory_is_given_to_launches_that_hooks_see(tuned, cuda, monkeypatch):
    """Those go through Triton's launcher; what `triton.set_allocator` was given stays as it is."""
    from triton import knobs as of_triton
    from triton.runtime._allocation import _allocator

    sizes, seen = [], []
    allocate = lambda *asked: sizes.append(asked) or DeviceTensor()  # noqa: E731
    monkeypatch.setattr("tileloom.tuning.loaded.of_torch", lambda device: allocate)
    before = _allocator.get()
    tuner = make(tuned, kernels.scale_by_tma)
    tuner.run(*arguments(), stream=STREAM)
    hook = lambda metadata: seen.append(metadata.get()["name"])  # noqa: E731
    of_triton.runtime.launch_enter_hook.add(hook)
    del sizes[:]
    try:
        tuner.run(*arguments(), stream=STREAM)
    finally:
        of_triton.runtime.launch_enter_hook.remove(hook)
    assert (sizes, seen) == ([(8 * 256, 128, STREAM)], ["scale_by_tma"])
    assert _allocator.get() is before


def test_one_candidate_that_is_left_is_not_measured(tuned, store):
    """Where a stage might have added one, or all others do not compile; the record says so."""
    tuner = make(tuned, configs=[config(100), config(128)])  # arange takes powers of two
    tuner.run(*arguments(), stream=STREAM)
    assert tuned.asked == []
    assert tuner.winner == config(128)
    known = store.find(*tuner._identity(tuner._stages)).known()
    assert (known[config(128)].ms, known[config(128)].reason) == (None, "")
    assert known[config(100)].reason
    again = make(tuned, configs=[config(100), config(128)])
    again.run(*arguments(), stream=STREAM)
    assert again.winner == config(128)
    grown = make(tuned, configs=[config(128), config(256)])
    grown.run(*arguments(), stream=STREAM)
    assert set(tuned.asked) == {config(128), config(256)}, "one more is compared with it"


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
    assert record.measured["rounds"] >= Plan().rounds
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
