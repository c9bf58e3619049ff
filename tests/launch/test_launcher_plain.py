"""What a launcher says without a GPU, without a grid, and on Triton's own path."""

from __future__ import annotations

import pytest
import torch
from tests.launch import fake_cuda
from tests.launch.fake_cuda import tensors

from tileloom import errors, knobs, launch

pytest.importorskip("triton")
kernels = pytest.importorskip("tests.launch.launch_kernels")


@pytest.mark.parametrize(
    ("grid", "text"),
    [
        ((0,), "has 0 blocks along x"),
        ((1, 1, -1), "has -1 blocks along z"),
        ((1, 65536), "has 65536 blocks along y; the driver takes 1 to 65535"),
        ((1, 2, 3, 4), "must be one to three integers"),
        ((1.5,), "must be one to three integers"),
        (3, "the grid of 'add' is 3; it must be one to three integers"),
        (lambda meta: (meta["BLOCK"], 0), "has 0 blocks along y"),
        (lambda meta: meta["BLOCK"], "the grid of 'add' is 128; it must be"),
    ],
)
def test_the_plain_tier_takes_the_same_grids(grid, text):
    args = (*tensors(3), 1000)
    with fake_cuda.installed() as cuda, knobs.scope({"launch.tier": "plain"}):
        launcher = launch.prepare(kernels.add)
        for blocks in ((8,), lambda meta: (meta["n"] // 100,)):
            launcher[blocks](*args, BLOCK=128)
        assert cuda.last().grid == (10, 1, 1)
        before = cuda.count()
        with pytest.raises(errors.OptionError) as caught:
            launcher[grid](*args, BLOCK=128)
        assert cuda.count() == before
    assert text in str(caught.value)


def test_a_call_without_a_grid():
    launcher = launch.prepare(kernels.add)
    with pytest.raises(errors.ArgumentError) as caught:
        launcher(torch.zeros(3), n=3)
    assert str(caught.value) == (
        "launch: 'add' is called without a grid, which stands in brackets. Try: "
        "launcher[grid](...), with grid = (blocks,)."
    )


@pytest.mark.parametrize("tier", ["auto", "plain"])
def test_a_machine_without_a_gpu(monkeypatch, tier):
    from triton.runtime.driver import driver

    def none(_):
        raise RuntimeError("0 active drivers ([]). There should only be one.")

    monkeypatch.setattr(type(driver), "active", property(none))
    x, y, out = torch.zeros((3, 1000)).unbind(0)
    with knobs.scope({"launch.tier": tier}):
        launcher = launch.prepare(kernels.add)
        for _ in range(3):
            with pytest.raises(errors.DeviceError) as caught:
                launcher[(8,)](x, y, out, 1000, BLOCK=128)
    assert str(caught.value) == (
        "launch: 'add' needs a GPU, and Triton finds none here; x is on cpu, y is on cpu, out is "
        "on cpu. Try: a machine with a GPU, or `with tileloom.emulator.run():` around the launch, "
        "which takes tensors on the CPU."
    )
    with pytest.raises(errors.DeviceError, match=r"Triton finds none here\. Try: a machine"):
        launch.prepare(kernels.with_global)[(1,)](None, 3)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_warp": 4}, "Triton has no compile option num_warp. Did you mean num_warps?"),
        ({"xyz": 4}, "Triton has no compile option xyz. Try: one of num_warps, "),
        (
            {"BLOCK": 128},
            "BLOCK is a parameter of 'add', no compile option. Try: launcher[grid](..., BLOCK=...)"
            ", or launcher.bind(grid, ..., BLOCK=...).",
        ),
    ],
)
def test_options_that_are_none_are_refused_before_the_launch(options, text):
    with pytest.raises(errors.UnknownOptionError) as caught:
        launch.prepare(kernels.add, **options)
    assert str(caught.value).startswith(f"launch.prepare: {text}")


def test_options_that_are_some_are_kept():
    given = {"num_warps": 2, "num_ctas": 1, "maxnreg": 64, "launch_pdl": True}
    for kernel in (kernels.add, kernels.gluon_add):
        assert launch.prepare(kernel, **given).options == given
