"""What a launcher says of a wrong launch, cold and warm. See test_launcher.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.launch import fake_cuda
from tests.launch.fake_cuda import DeviceTensor, tensors, warm

from tileloom import emulator, errors, launch
from tileloom.launch import tiers

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
        with pytest.raises(errors.ArgumentError, match=r"out, n, BLOCK\. Try: BLOCK=\.$"):
            launcher[(8,)](*tensors(3), 1000, BLOCK=128, BLOCKS=3)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"BLOK": 128}, "BLOK is no parameter and no compile option, and BLOCK is not given. SIG "
                        "Try: BLOCK=."),
        ({"BLOK": 128, "num_warps": 8}, "BLOK is no parameter and no compile option, and BLOCK is "
                                        "not given. SIG Try: BLOCK=."),
        ({"size": 128, "blok": 3}, "size, blok are no parameters and no compile options, and BLOCK "
                                   "is not given. SIG Try: one of these."),
        ({"num_warps": 8}, "BLOCK is not given. SIG Try: give every parameter that has no "
                           "default."),
    ],
)  # fmt: skip
def test_a_misspelt_parameter_is_named_before_the_one_that_it_stands_for(cuda, named, said):
    launcher = launch.prepare(kernels.add)
    args = (*tensors(3), 1000)
    signature = "The 5 parameters of 'add' are x, y, out, n, BLOCK."
    for _ in range(3):
        with pytest.raises(errors.ArgumentError) as caught:
            launcher[(8,)](*args, **named)
        assert str(caught.value) == f"launch: {said.replace('SIG', signature)}"
        launcher[(8,)](*args, BLOCK=128)


@pytest.mark.parametrize("warps", [0, 3, 64, -4, 4.0, True, "4"])
def test_a_number_of_warps_that_triton_does_not_take(cuda, warps):
    said = f"num_warps is {warps!r}; Triton takes 1, 2, 4, 8, 16 or 32. Try: 4."
    with pytest.raises(errors.OptionError) as caught:
        launch.prepare(kernels.add, num_warps=warps)
    assert str(caught.value) == f"launch.prepare: {said}"
    launcher, args = launch.prepare(kernels.add, num_warps=8), (*tensors(3), 1000)
    for _ in range(3):
        launcher[(8,)](*args, BLOCK=128)
        with pytest.raises(errors.OptionError) as caught:
            launcher[(8,)](*args, BLOCK=128, num_warps=warps)
        assert str(caught.value) == f"launch: {said}"


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


I32 = "it is annotated as i32, an integer from -2147483648 to 2147483647. Try: another annotation."


@pytest.mark.parametrize("warm_up", [0, 1, 5])
@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("a", 2**31, f"a of 'annotated' is 2147483648; {I32}"),
        ("a", -(2**31) - 1, f"a of 'annotated' is -2147483649; {I32}"),
        ("a", 1.5, f"a of 'annotated' is 1.5; {I32}"),
        ("a", float("nan"), f"a of 'annotated' is nan; {I32}"),
        ("a", None, f"a of 'annotated' is None; {I32}"),
        ("a", (1, 2), f"a of 'annotated' is (1, 2); {I32}"),
        ("a", "7", f"a of 'annotated' is '7'; {I32}"),
        ("b", -1, "b of 'annotated' is -1; it is annotated as u8, an integer from 0 to 255. Try: "
                  "another annotation."),
        ("b", 256, "b of 'annotated' is 256; it is annotated as u8, an integer from 0 to 255. Try: "
                   "another annotation."),
        ("c", "x", "c of 'annotated' is 'x'; it is annotated as fp16, a number. Try: another "
                   "annotation."),
        ("c", -65520, "c of 'annotated' is -65520; it is annotated as fp16, whose largest number "
                      "is 65504. Try: another annotation."),
        ("d", None, "d of 'annotated' is None; it is annotated as fp64, a number. Try: another "
                    "annotation."),
        ("wide", 2**63, "wide of 'annotated' is 9223372036854775808; it is annotated as i64, an "
                        "integer from -9223372036854775808 to 9223372036854775807. Try: another "
                        "annotation."),
        ("MODE", [1, 2], "MODE of 'annotated' is [1, 2]; it is compiled in by its value, which "
                         "must be one that can be hashed. Try: a tuple."),
    ],
)  # fmt: skip
def test_a_value_that_its_annotation_does_not_take(cuda, warm_up, name, value, text):
    launcher = launch.prepare(kernels.annotated)
    good = {"a": 3, "b": 5, "c": 1.5, "d": 2.5, "wide": 2**40, "MODE": (1, 2)}
    x = DeviceTensor()
    for _ in range(warm_up):
        launcher[(8,)](x, **good)
    before = cuda.count()
    with pytest.raises(errors.ArgumentError) as caught:
        launcher[(8,)](x, **(good | {name: value}))
    assert str(caught.value) == f"launch: {text}"
    assert cuda.count() == before
    launcher[(8,)](x, **good)
    assert cuda.count() == before + 1


def test_values_at_the_ends_of_their_annotations(cuda):
    both = fake_cuda.Both(cuda, kernels.annotated)
    x = DeviceTensor()
    for a, b, wide in ((-(2**31), 0, -(2**63)), (2**31 - 1, 255, 2**63 - 1), (True, True, True)):
        for c, d in ((65519.0, 1e300), (float("-inf"), float("nan")), (3, True)):
            for _ in range(4):
                both((2,), x, a, b, c, d, wide, "text")


def test_no_grid_at_all(cuda):
    launcher = launch.prepare(kernels.add)
    with pytest.raises(errors.OptionError, match="the grid of 'add' is None; it must be one to"):
        launcher[None](*tensors(3), 1000, BLOCK=128)


def test_numbers_of_numpy(cuda):
    launcher = launch.prepare(kernels.add)
    for value in (np.int64(1000), np.float32(0.5), np.bool_(True)):
        with pytest.raises(errors.ArgumentError, match=r"n is a \w+; 'add' takes .* Try: n\.item"):
            launcher[(8,)](*tensors(3), value, BLOCK=128)


def test_a_number_that_varies_and_does_not_fit_is_told_by_the_driver(cuda):
    """Where nobody asks before: in launches of the tuner."""
    x = DeviceTensor()
    compiled = kernels.annotated[(1,)](x, 3, 5, 1.5, 2.5, 7, "text")
    variant = tiers.Variant(compiled, kernels.annotated, 0)
    number = tiers.NUMBER
    entry = variant.entry(None, [tiers.ADDRESS, number, number, number, number, number, "text"])
    good = [1, 1, 1, 0, 4096, 3, 5, 1.5, 2.5, 7]
    entry(*good)
    for place, value, kind in (
        (5, 2**31, "i32"), (6, -1, "u8"), (5, 1.5, "i32"), (9, 2**63, "i64"), (8, "x", "fp64"),
        (4, -1, r"\*fp32"),
    ):  # fmt: skip
        wrong = [*good[:place], value, *good[place + 1 :]]
        text = f"number {place - 3} of those that 'annotated' is launched with is {value!r}, which"
        before = cuda.count()
        with pytest.raises(errors.ArgumentError, match=f"{text} is no {kind}, as it"):
            entry(*wrong)
        assert cuda.count() == before
        entry(*good)
    for place in range(3):
        for blocks in (-1, 2**32):
            wrong = [*good[:place], blocks, *good[place + 1 :]]
            with pytest.raises(errors.OptionError, match="the grid of 'annotated' is out of the"):
                entry(*wrong)
