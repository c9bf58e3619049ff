"""The launcher over Triton's real launchers and a fake libcuda: what reaches the driver.

Every launch of ours must give the driver the same bytes as Triton's own: see `fake_cuda.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.launch import fake_cuda
from tests.launch.fake_cuda import Both, DeviceTensor, tensors
from tests.launch.versions import OTHERS, triton_folder

from tileloom import errors, knobs, launch
from tileloom.launch import launcher as launcher_module
from tileloom.launch import tiers
from tileloom.launch.bound import Number

pytest.importorskip("triton")
kernels = pytest.importorskip("tests.launch.launch_kernels")
PREPARED = ("packed", "direct", "seam")


@pytest.fixture(scope="module")
def cuda():
    with fake_cuda.installed() as fake:
        yield fake


@pytest.fixture(params=PREPARED)
def tier(request, cuda):
    if request.param == "direct" and not hasattr(cuda.driver.utils, "launch"):
        pytest.skip("this Triton has no generic launcher")
    with knobs.scope({"launch.tier": request.param}):
        yield request.param


def test_every_tier_gives_the_driver_what_triton_gives(tier, cuda):
    both = Both(cuda, kernels.add, num_warps=8)
    for n in (1000, 1000, 1000, 1024, 1024, 1024, 1, 1, 1, 1000):
        both((8,), *tensors(3), n, BLOCK=128)
    assert len(both.launcher._table) == 3


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    small=st.sampled_from([1, 2, 16]),
    large=st.sampled_from([16, 2**40, 17]),
    number=st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1e300])),
    truth=st.booleans(),
    nothing=st.sampled_from([None, 3]),
    wide=st.sampled_from([5, 2**33, -(2**60) + 1]),
    shifts=st.tuples(*[st.sampled_from([0, 4, 16])] * 2),
)
def test_random_arguments_reach_the_driver_unchanged(
    cuda, small, large, number, truth, nothing, wide, shifts
):
    both = cuda.__dict__.setdefault("mixed", Both(cuda, kernels.mixed))
    given_ = [DeviceTensor(address=0x7F0000000000 + shift) for shift in shifts]
    for _ in range(3):
        both((2, 3), *given_, small, large, number, truth, nothing, wide)
    assert len(both.launcher._table) <= launcher_module.LIMIT


def test_descriptors(tier, cuda):
    both = Both(cuda, kernels.copy_tile)
    device = [fake_cuda.Strided(torch.float16, (256, 64)) for _ in range(4)]
    for step in range(8):
        source, target = device[step % 2], device[2 + step // 2 % 2]
        both((8,), kernels.triton_descriptor(source, [32, 64]),
             kernels.triton_descriptor(target, [32, 64]), 3, BLOCK=32)  # fmt: skip
    assert len(both.launcher._table) == 1


def test_descriptors_of_gluon(tier, cuda):
    both = Both(cuda, kernels.gluon_copy_tile)
    for _ in range(4):
        make = kernels.gluon_descriptor
        source, target = (fake_cuda.Strided(torch.float16, (256, 64)) for _ in range(2))
        both((8,), make(source, [32, 64]), make(target, [32, 64]), 3, BLOCK=32)
    assert both.launcher._table


def test_a_repeated_descriptor_is_encoded_once(cuda):
    launcher = launch.prepare(kernels.copy_tile)
    source, target = (
        kernels.triton_descriptor(fake_cuda.Strided(torch.float16, (256, 64)), [32, 64])
        for _ in range(2)
    )
    for _ in range(4):
        launcher[(8,)](source, target, 3, BLOCK=32)
    before = cuda.count("encodes")
    for _ in range(50):
        launcher[(8,)](source, target, 3, BLOCK=32)
    assert cuda.count("encodes") == before


def test_a_descriptor_changed_in_place_is_seen(cuda):
    both = Both(cuda, kernels.copy_tile)
    source, target = (
        kernels.triton_descriptor(fake_cuda.Strided(torch.float16, (256, 64)), [32, 64])
        for _ in range(2)
    )
    for change in (
        lambda: None,
        lambda: source.shape.__setitem__(0, 128),
        lambda: source.strides.__setitem__(0, 128),
        lambda: setattr(source, "padding", "nan"),
        lambda: setattr(source, "base", fake_cuda.Strided(torch.bfloat16, (256, 64))),
    ):
        change()
        for _ in range(4):
            both((8,), source, target, 3, BLOCK=32)


def test_the_table_of_descriptors_is_bounded(cuda):
    from tileloom.launch import descriptors

    launcher = launch.prepare(kernels.copy_tile)
    for _ in range(3 * descriptors.LIMIT):
        pair = [
            kernels.triton_descriptor(fake_cuda.Strided(torch.float16, (256, 64)), [32, 64])
            for _ in range(2)
        ]
        launcher[(8,)](*pair, 3, BLOCK=32)
    assert all(len(table) <= descriptors.LIMIT for table in descriptors._tables.values())


def test_gluon_kernels(tier, cuda):
    both = Both(cuda, kernels.gluon_add, num_warps=1)
    for _ in range(4):
        both((3,), *tensors(2), 100, BLOCK=32)


def test_constants_and_keywords_in_any_order(cuda):
    both = Both(cuda, kernels.add)
    x, y, out = tensors(3)
    for _ in range(3):
        both((8,), x, y, out, 1000, BLOCK=128)
        both((8,), x, BLOCK=128, n=1000, out=out, y=y)
        both((8,), n=1000, out=out, y=y, x=x, BLOCK=128)
    assert len(both.launcher._table) == 1


def test_a_callable_taken_before_the_first_launch(cuda):
    launcher, args = launch.prepare(kernels.add), (*tensors(3), 1000)
    taken = launcher[(8,)]
    for _ in range(4):
        taken(*args, BLOCK=128)
    assert launcher._table
    assert launcher._call in launcher._guards.values(), "it does not undo what was prepared"


def test_compile_options_at_the_launch(cuda):
    launcher = launch.prepare(kernels.add, num_warps=2)
    args = (*tensors(3), 1000)
    for _ in range(3):
        launcher[(8,)](*args, BLOCK=128, num_warps=8)
        assert cuda.last().block == (256, 1, 1)
        launcher[(8,)](*args, BLOCK=128)
        assert cuda.last().block == (64, 1, 1)


@pytest.mark.parametrize("options", [
    {"num_ctas": 2}, {"launch_pdl": True}, {"launch_cooperative_grid": True},
    {"num_ctas": 4, "launch_pdl": True},
])  # fmt: skip
def test_launch_attributes(options, tier, cuda):
    both = Both(cuda, kernels.add, **options)
    for _ in range(4):
        seen = both((8, 2), *tensors(3), 1000, BLOCK=128)
    assert seen.attributes
    assert both.launcher._table


def test_grids_that_are_called(cuda):
    both = Both(cuda, kernels.add)
    calls = []

    def counted(meta):
        calls.append(meta["n"])
        return (meta["n"] // meta["BLOCK"] + 1,)

    blocks = lambda meta: (meta["n"] // meta["BLOCK"] + 1, 2)  # noqa: E731
    for _ in range(4):
        for n in (1000, 5000):
            assert both(blocks, *tensors(3), n, BLOCK=128).grid == (n // 128 + 1, 2, 1)
            assert both([n // 128 + 1], *tensors(3), n, BLOCK=128).grid == (n // 128 + 1, 1, 1)
            both(counted, *tensors(3), n, BLOCK=128)
    assert len(calls) == 2 * 8, "what closes over something is called at every launch"


def test_a_grid_that_reads_what_no_guard_tests_is_called_every_time(cuda):
    launcher = launch.prepare(kernels.add)
    x, y, out = tensors(3)
    sizes = lambda meta: (meta["x"].blocks,)  # noqa: E731
    unpacks = lambda meta: (dict(**meta)["x"].blocks,)  # noqa: E731
    for blocks in (3, 3, 3, 5):
        x.blocks = blocks
        for grid in (sizes, unpacks):
            launcher[grid](x, y, out, 1000, BLOCK=128)
            assert cuda.last().grid == (blocks, 1, 1)


def test_an_empty_grid_is_refused_cold_and_warm(cuda):
    launcher = launch.prepare(kernels.add)
    args = (*tensors(3), 1000)
    launcher[(8,)](*args, BLOCK=128)
    before = cuda.count()
    for _ in range(4):
        for grid in ((0,), (4, 0), lambda meta: (0, meta["BLOCK"])):
            with pytest.raises(errors.OptionError, match=r"has 0 blocks along .*nothing to do\.$"):
                launcher[grid](*args, BLOCK=128)
    assert cuda.count() == before


def test_launches_of_other_kinds_do_not_mix(cuda):
    both = Both(cuda, kernels.mixed)
    x, y = tensors(2)
    for _ in range(4):
        both((1,), x, y, 3, 4, 1.5, True, None, 7)
        both((1,), x, y, 3, 4, 2, True, None, 7)
        both((1,), x, y, 3, 4, 1.5, 1, None, 7)
        both((1,), x, y, 3, 4, 1.5, True, y, 7) if hasattr(y, "blocks") else None
        both((1,), x, y, 3, 4, 1.5, True, 5, 7)
        both((1,), DeviceTensor(torch.float64), y, 3, 4, 1.5, True, None, 7)
        both((1,), DeviceTensor(address=x.address + 4), y, 3, 4, 1.5, True, None, 7)


def test_a_bound_launch(tier, cuda):
    launcher = launch.prepare(kernels.add)
    x, y, out = tensors(3)
    bound = launcher.bind((8,), x, y, out, 1000, BLOCK=128)
    for _ in range(5):
        compiled = bound.launch(x, y, out)
        cuda.define(compiled)
        x, y, out = tensors(3)
        bound.launch(x, y, out)
        ours = cuda.last()
        kernels.add[(8,)](x, y, out, 1000, BLOCK=128)
        assert cuda.last() == ours
    assert bound.launch.__name__ == "launch", "it is prepared"


def test_a_bound_launch_with_a_number(tier, cuda):
    """It is given in each launch, whatever it is."""
    launcher = launch.prepare(kernels.add_number)
    out = tensors(1)[0]
    bound = launcher.bind((8,), out, Number(5), 7)
    for number in (5, 1, 16, -3, 2**62, -(2**63)):
        cuda.define(bound.launch(out, number))
        bound.launch(out, number)
        ours = cuda.last()
        kernels.add_number[(8,)](out, number, 7)
        assert cuda.last() == ours
    assert bound.launch.__name__ == "launch", "it is prepared"


def test_a_number_that_is_compiled_in_is_refused():
    x, y, out = tensors(3)
    with pytest.raises(errors.ArgumentError, match="n of 'add' is a Number, which varies"):
        launch.prepare(kernels.add).bind((8,), x, y, out, Number(1000), BLOCK=128)


def test_a_bound_launch_with_descriptors(cuda):
    launcher = launch.prepare(kernels.gluon_copy_tile)
    make = kernels.gluon_descriptor
    pair = [fake_cuda.Strided(torch.float16, (256, 64)) for _ in range(2)]
    bound = launcher.bind((8,), *[make(t, [32, 64]) for t in pair], 3, BLOCK=32)
    for _ in range(5):
        pair = [fake_cuda.Strided(torch.float16, (256, 64)) for _ in range(2)]
        cuda.define(bound.launch(*pair))
        bound.launch(*pair)
        ours = cuda.last()
        kernels.gluon_copy_tile[(8,)](*[make(t, [32, 64]) for t in pair], 3, BLOCK=32)
        assert cuda.last() == ours


def test_a_tier_that_fails_its_self_test_is_not_used(cuda, monkeypatch, caplog):
    monkeypatch.setattr(tiers, "_verdicts", {})

    def test(device, tier):
        if tier == "packed":
            raise errors.LaunchError("it wrote something else")

    monkeypatch.setattr(tiers, "self_test", test)
    assert "packed" not in tiers.usable(0)
    assert "the packed tier is not used on device 0: it wrote something else" in caplog.text
    both = Both(cuda, kernels.add)
    for _ in range(4):
        both((8,), *tensors(3), 1000, BLOCK=128)


def test_no_tier_at_all_is_still_right(cuda, monkeypatch):
    monkeypatch.setattr(tiers, "_verdicts", {(0, tier): False for tier in PREPARED})
    both = Both(cuda, kernels.add)
    for _ in range(5):
        both((8,), *tensors(3), 1000, BLOCK=128)
    assert not both.launcher._table


def test_the_plain_tier_on_request(cuda):
    with knobs.scope({"launch.tier": "plain"}):
        both = Both(cuda, kernels.add)
        for _ in range(4):
            both((8,), *tensors(3), 1000, BLOCK=128)
    assert not both.launcher._variants


def test_importing_and_preparing_load_no_triton():
    code = (
        "import sys; from tileloom import launch\n"
        "class Kernel:\n"
        "    run = None\n"
        "    def __getitem__(self, grid): return print\n"
        "launch.prepare(Kernel())\n"
        "assert 'triton' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.full
@pytest.mark.parametrize("version", OTHERS)
def test_the_same_on_other_tritons(version):
    folder = triton_folder(version)
    if folder is None:
        pytest.skip(f"Triton {version} is not installed; `make setup` does")
    here = Path(__file__)
    names = (here.name, "test_launcher_changes.py", "test_launcher_errors.py", "test_scratch.py")
    files = [str(here.with_name(name)) for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider",
               "-W", "ignore", "-m", "not full", *files]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": f"{folder}:src:."}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
