"""Winners in bundles: exported, then taken elsewhere without measuring or compiling."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tileloom import errors, knobs, launch
from tileloom.cli.main import main
from tileloom.launch.bundle import load_bundle
from tileloom.launch.bundle_format import write_bundle
from tileloom.tuning.bundled import bundle_winners, pairs_of

pytest.importorskip("triton")
from tests.launch.bundle_fakes import BINARIES, VARIANTS
from tests.tuning.replayed import CONFIGS, PLATFORM, STREAM, arguments, make, run
from tests.tuning.store_samples import record


@pytest.fixture
def exported(tuned, store, tmp_path, capsys):
    """A bundle of the winner of `scale`, and a class for a machine that has only that."""
    run(make(tuned))
    path = tmp_path / "tuned.bundle"
    assert main(["cache", "export", str(path), "scale"]) == 0
    assert capsys.readouterr().out.startswith(f"{path}: 1 winner, 0.0")
    tuned.asked.clear()
    yield path
    launch.use_bundle(None)


def test_a_machine_with_the_bundle_measures_and_compiles_nothing(
    exported, tuned, cuda, tmp_path, monkeypatch
):
    """Another driver and compiler; an empty store; and compiling forbidden."""
    other = replace(PLATFORM, driver="999.1", triton="3.9.0", assembler="13.1")
    monkeypatch.setattr(tuned, "platform", lambda self: other)
    monkeypatch.setattr("tileloom.tuning.precompile.Kernel.compile", None)
    monkeypatch.setattr("tileloom.launch.driver.capability", lambda device: 90)
    launch.use_bundle(exported)
    with knobs.scope({"cache.dir": tmp_path / "empty", "launch.jit": "forbid"}):
        tuner = make(tuned)
        x, y, n = arguments()
        compiled = tuner.run(x, y, n, stream=STREAM)
        assert tuner.winner == CONFIGS[1]
        assert tuned.asked == []
        assert compiled.variant.name.startswith("scale[")
        cuda.define_sizes(compiled.function, [8, 8, 4, 8, 8])
        tuner.run(x, y, n, stream=STREAM)
        seen = cuda.last()
        assert seen.grid == (8, 1, 1)
        assert seen.values[:8] == x.data_ptr().to_bytes(8, "little")
        assert not (tmp_path / "empty").exists()


def test_another_gpu_is_another_problem(exported, tuned, monkeypatch, tmp_path):
    other = replace(PLATFORM, gpu="NVIDIA H200")
    monkeypatch.setattr(tuned, "platform", lambda self: other)
    launch.use_bundle(exported)
    with knobs.scope({"cache.dir": tmp_path / "empty"}):
        run(make(tuned))
    assert set(tuned.asked) == set(CONFIGS)


def test_what_a_bundle_holds(exported, store):
    bundle = load_bundle(exported)
    (winner,) = bundle.winners()
    (variant,) = bundle.variants()
    assert winner["winner"] == CONFIGS[1].to_dict()
    assert winner["problem"]["kernel"] == variant.function == "tests.tuning.tuned_kernels:scale"
    assert variant.constants == {"XBLOCK": 128}
    assert variant.arch == "sm_90"


def test_kernels_of_two_records_that_are_the_same_are_compiled_once():
    mine = record()
    plain = mine.as_json()["problem"] | {"parameters": ["x", "n", "scale", "gone", "XBLOCK"]}
    ours = replace(mine, problem=plain)
    again = replace(ours, platform=replace(PLATFORM, driver="1"))
    pairs = pairs_of([ours, again])
    assert [arch for _, arch in pairs] == ["sm_90", "sm_90"]
    spec = pairs[0][0]
    assert spec.signature == {
        "x": "*fp32", "n": "i32", "scale": "constexpr", "gone": "constexpr", "XBLOCK": "constexpr",
    }  # fmt: skip
    assert spec.constexprs == {"scale": 1.0, "gone": None, "XBLOCK": 128}
    assert spec.options == {"launch_pdl": True}


def test_bundles_without_winners_stay_what_they_were(tmp_path):
    write_bundle(tmp_path / "b", VARIANTS, BINARIES, tileloom="0.1.0")
    assert load_bundle(tmp_path / "b").winners() == []
    assert b"winners" not in (tmp_path / "b").read_bytes()


def test_a_winner_that_cannot_be_read_is_said(tmp_path, tuned, store):
    write_bundle(tmp_path / "b", VARIANTS, BINARIES, tileloom="0.1.0", winners=[{"winner": 3}])
    launch.use_bundle(tmp_path / "b")
    try:
        with pytest.raises(errors.BundleError, match=r"winner number 0 of '.*' cannot be read"):
            run(make(tuned))
    finally:
        launch.use_bundle(None)


def test_no_winner_to_bundle(tmp_path):
    with pytest.raises(errors.OptionError, match=r"there is no winner to bundle. Try: `tileloom"):
        bundle_winners(tmp_path / "b", [])


def test_records_of_operators_are_left_out(tmp_path):
    """Which kernels a call launches is not in them."""
    kept = record()
    of_operator = replace(kept, problem={**kept.problem, "stages": "operator"})
    with pytest.raises(errors.OptionError, match="are those of operators' calls"):
        bundle_winners(tmp_path / "x.bundle", [of_operator])
