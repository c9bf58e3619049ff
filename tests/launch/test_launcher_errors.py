"""What a launcher says of a wrong launch, cold and warm. See test_launcher.py."""

from __future__ import annotations

import pytest
import torch
from tests.launch import fake_cuda
from tests.launch.fake_cuda import DeviceTensor, tensors, warm

from tileloom import emulator, errors, launch

pytest.importorskip("triton")
kernels = pytest.importorskip("tests.launch.launch_kernels")


@pytest.fixture(scope="module")
def cuda():
    with fake_cuda.installed() as fake:
        yield fake


def test_a_cpu_tensor(cuda):
    launcher = launch.prepare(kernels.add)
    x, y, out = tensors(3)
    on_host = DeviceTensor(is_cuda=False)
    on_host.device = torch.device("cpu")
    for _ in range(5):
        launcher[(8,)](x, y, out, 1000, BLOCK=128)
        with pytest.raises(errors.DeviceError) as caught:
            launcher[(8,)](x, on_host, out, 1000, BLOCK=128)
        assert str(caught.value) == (
            "launch: y of 'add' is on cpu; a GPU reads tensors on the GPU, or pinned ones. "
            "Try: y.to(the GPU)."
        )


def test_too_many_arguments(cuda):
    launcher = launch.prepare(kernels.add)
    args = (*tensors(3), 1000, 128)
    for _ in range(4):
        with pytest.raises(errors.ArgumentError) as caught:
            launcher[(8,)](*args, 4)
        launcher[(8,)](*args)
    assert str(caught.value) == (
        "launch: 6 arguments are given by position. The 5 parameters of 'add' are x, y, out, n, "
        "BLOCK. Try: compile options, such as num_warps, by keyword."
    )


def test_missing_and_doubled_arguments(cuda):
    launcher = launch.prepare(kernels.add)
    x, y, out = tensors(3)
    for _ in range(4):
        with pytest.raises(errors.ArgumentError, match=r"launch: out, n are not given\. The 5"):
            launcher[(8,)](x, y, BLOCK=128)
        with pytest.raises((errors.ArgumentError, TypeError), match="y"):
            launcher[(8,)](x, y, out, 1000, y=y, BLOCK=128)
        launcher[(8,)](x, y, out, 1000, BLOCK=128)


def test_an_unknown_keyword(cuda):
    launcher = launch.prepare(kernels.add)
    for _ in range(2):
        with pytest.raises(errors.ArgumentError, match="'add' has no such parameter, and Triton"):
            launcher[(8,)](*tensors(3), 1000, BLOCK=128, blocks=3)


@pytest.mark.parametrize("value", ["text", [1, 2], object()])
def test_a_wrong_type(cuda, value):
    launcher = launch.prepare(kernels.add)
    x, y, out = tensors(3)
    name = type(value).__name__
    for _ in range(3):
        with pytest.raises(errors.ArgumentError, match=f"launch: n is a {name}; 'add' takes"):
            launcher[(8,)](x, y, out, value, BLOCK=128)
        launcher[(8,)](x, y, out, 1000, BLOCK=128)


@pytest.mark.parametrize(
    ("grid", "text"),
    [
        ((2**31,), r"has 2147483648 blocks along x; the driver takes 1 to 2147483647"),
        ((1, 65536), r"has 65536 blocks along y; the driver takes 1 to 65535"),
        ((1, 1, -1), r"has -1 blocks along z"),
        ((), r"must be one to three integers"),
        ((1, 2, 3, 4), r"must be one to three integers"),
        ((1.5,), r"must be one to three integers"),
        (5, r"the grid of 'add' is 5; it must be one to three integers"),
        (lambda _: 5, r"the grid of 'add' is 5; it must be"),
    ],
)
def test_a_grid_that_the_driver_does_not_take(cuda, grid, text):
    launcher = launch.prepare(kernels.add)
    args = (*tensors(3), 1000)
    for _ in range(3):
        with pytest.raises(errors.OptionError, match=text):
            launcher[grid](*args, BLOCK=128)
        launcher[(8,)](*args, BLOCK=128)


@pytest.mark.parametrize("grid", [(-1,), (1, 0), (1, 2, 3, 4), (), 5, "1", (1.0,), (2**31,)])
def test_the_emulator_takes_the_same_grids(grid):
    launcher = launch.prepare(kernels.add)
    on_host = torch.zeros(3, 8).unbind(0)
    with emulator.run(), pytest.raises(errors.OptionError, match=r"launch: the grid "):
        launcher[grid](*on_host, 8, BLOCK=8)


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1])
def test_a_number_of_more_than_64_bits(cuda, number):
    launcher = launch.prepare(kernels.add)
    for _ in range(3):
        with pytest.raises(errors.ArgumentError) as caught:
            launcher[(8,)](*tensors(3), number, BLOCK=128)
        launcher[(8,)](*tensors(3), 1000, BLOCK=128)
    assert str(caught.value) == (
        "launch: an argument of 'add' does not fit into 64 bits. Try: a number from -2^63 to "
        "2^64 - 1."
    )


def test_the_drivers_error_is_a_sentence(cuda):
    launcher, args = launch.prepare(kernels.add), (*tensors(3), 1000)
    warm(launcher, args, BLOCK=128)
    cuda.fail(700)
    try:
        with pytest.raises(errors.LaunchError) as caught:
            launcher[(8,)](*args, BLOCK=128)
    finally:
        cuda.fail(0)
    assert str(caught.value) == ("launch: launching 'add' failed: CUDA error 700, a made-up error.")
    launcher[(8,)](*args, BLOCK=128)


def test_only_jitted_functions():
    with pytest.raises(errors.OptionError, match=r"launch\.prepare: kernel is a function; it must"):
        launch.prepare(lambda x: x)
