"""TMA reductions: values of every kind and type, what conflicts with them, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.emulator.cases import names
from tileloom import emulator
from tileloom.device.compat import tma_store
from tileloom.device.memory import load_acquire, store_release
from tileloom.device.tma import tma_reduce, tma_store_wait

KINDS = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip
TYPES = {
    torch.int32: (gl.int32, np.int32), torch.uint32: (gl.uint32, np.uint32),
    torch.float16: (gl.float16, np.float16), torch.float32: (gl.float32, np.float32),
    torch.bfloat16: (gl.bfloat16, None),
}  # fmt: skip
BY_HARDWARE = [
    *((kind, dtype) for kind in KINDS for dtype in (torch.int32, torch.uint32)),
    *((kind, dtype) for kind in ("add", "min", "max") for dtype in (torch.float16, torch.bfloat16)),
    ("add", torch.float32),
]  # fmt: skip


@gluon.jit
def reduce_tiles(x_ptr, out_desc, out_ptr, reduce: gl.constexpr, LAST_STORES: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    rows = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, layout)), 1)
    at = rows * 32 + gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, layout)), 0)
    tile = gl.allocate_shared_memory(out_desc.dtype, [16, 32], out_desc.layout)
    x = gl.load(x_ptr + gl.program_id(0) * 512 + at)
    tile.store(x)
    fence_async_shared()
    if LAST_STORES and gl.program_id(0) == gl.num_programs(0) - 1:
        gl.store(out_ptr + at, x)
    else:
        reduce(out_desc, [0, 0], tile)
        tma.store_wait(0)


@triton.jit
def reduce_by_descriptor(x_ptr, out_ptr, KIND: tl.constexpr):
    rows = tl.arange(0, 16)[:, None]
    x = tl.load(x_ptr + tl.program_id(0) * 512 + rows * 32 + tl.arange(0, 32)[None, :])
    out = tl.make_tensor_descriptor(out_ptr, [16, 32], [32, 1], [16, 32])
    if KIND == "add":
        out.atomic_add([0, 0], x)
    elif KIND == "min":
        out.atomic_min([0, 0], x)
    elif KIND == "max":
        out.atomic_max([0, 0], x)
    elif KIND == "and":
        out.atomic_and([0, 0], x)
    elif KIND == "or":
        out.atomic_or([0, 0], x)
    else:
        out.atomic_xor([0, 0], x)


def operands(dtype, programs=3):
    """Random tiles and a first value, with both signs, and what numpy holds of them."""
    torch.manual_seed(1)
    if dtype.is_floating_point:
        x = torch.randn(programs + 1, 16, 32).to(dtype)
    else:
        bits = torch.iinfo(dtype).bits
        x = torch.randint(-(2**31), 2**31, (programs + 1, 16, 32))
        x = x.to(torch.int32 if bits == 32 else torch.int64).view(dtype)
    return x[:programs].contiguous(), x[programs].clone()


def expected(kind, dtype, x, start):
    """The reduction one tile after another in the order of the programs."""
    if dtype == torch.bfloat16:
        how = {"add": torch.add, "min": torch.minimum, "max": torch.maximum}[kind]
        for tile in x:
            start = how(start, tile)
        return start
    value = start.numpy()
    for tile in x.numpy():
        value = KINDS[kind](value, tile)
    return torch.from_numpy(value)


def play(kind, dtype, last_stores=False, **options):
    x, start = operands(dtype)
    out = start.clone()
    layout = gl.NVMMASharedLayout.get_default_for([16, 32], TYPES[dtype][0])
    desc = TensorDescriptor.from_tensor(out, [16, 32], layout)
    with emulator.run(collect=True, **options) as run:
        reduce_tiles[(3,)](x, desc, out, getattr(names, f"reduce_{kind}"), last_stores, num_warps=4)
    return run, out, expected(kind, dtype, x, start)


@pytest.mark.parametrize(("kind", "dtype"), BY_HARDWARE, ids=str)
def test_values(kind, dtype):
    run, out, right = play(kind, dtype)
    assert run.reports == []
    assert torch.equal(out.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("level", ["ttir", "ttgir", "machine"])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("add", torch.bfloat16), ("min", torch.int32), ("max", torch.uint32), ("xor", torch.int64)],
    ids=str,
)
def test_values_by_a_portable_kernels_descriptor(kind, dtype, level):
    x, start = operands(dtype)
    out = start.clone()
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8))
    with emulator.run(level=level) as run:
        reduce_by_descriptor[(3,)](x, out, kind)
    assert run.reports == []
    assert torch.equal(out.view(torch.uint8), expected(kind, dtype, x, start).view(torch.uint8))


@pytest.mark.parametrize(("schedule", "seed"), [("late", 0), ("eager", 0), ("random", 4)])
def test_reductions_are_no_race_but_a_plain_store_beside_them_is(schedule, seed):
    run, _, _ = play("add", torch.int32, schedule=schedule, seed=seed)
    assert run.reports == []
    run, _, _ = play("add", torch.int32, last_stores=True, schedule=schedule, seed=seed)
    assert {r.kind for r in run.errors} == {"race"}
    text = run.errors[0].text()
    assert "gl.store(out_ptr + at, x)" in text
    assert "reduce(out_desc, [0, 0], tile)" in text


@pytest.mark.parametrize(
    ("kind", "dtype", "elem"),
    [("max", torch.float32, "f32"), ("and", torch.float16, "f16"), ("xor", torch.float32, "f32")],
    ids=str,
)
def test_what_the_hardware_does_not_reduce_is_refused(kind, dtype, elem):
    layout = gl.NVMMASharedLayout.get_default_for([16, 32], TYPES[dtype][0])
    x, out = torch.zeros(3, 16, 32, dtype=dtype), torch.zeros(16, 32, dtype=dtype)
    desc = TensorDescriptor.from_tensor(out, [16, 32], layout)
    with pytest.raises(emulator.UnsupportedKernelError) as caught, emulator.run():
        reduce_tiles[(3,)](x, desc, out, getattr(names, f"reduce_{kind}"), False, num_warps=4)
    assert f"a TMA reduction by '{kind}' of {elem}; the hardware adds f16, bf16 and f32" in str(
        caught.value
    )
    assert "reduce(out_desc, [0, 0], tile)" in str(caught.value)


@gluon.jit
def by_turns(out_desc, turn_ptr, values, READ: gl.constexpr):
    """Programs add one after the other: sums of floats have the same bits in each run."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    tile = gl.allocate_shared_memory(gl.float32, [512], out_desc.layout)
    me = gl.program_id(0)
    value = gl.load(values + me)
    tile.store(gl.full([512], 0.0, gl.float32, layout) + value)
    fence_async_shared()
    turn = load_acquire(turn_ptr)
    while turn != me:
        turn = load_acquire(turn_ptr)
    tma_reduce(out_desc, [0], tile)
    tma_store_wait(0, read=READ)
    store_release(turn_ptr, me + 1)


@pytest.mark.parametrize("schedule", ["late", "eager", "random"])
@pytest.mark.parametrize("read", [True, False])
def test_a_turn_that_is_handed_on_too_early_shows_in_the_bits(read, schedule):
    """Atomics do not race, but a write may land after that of the next program."""
    values = torch.tensor([1.0, 1e8, -1e8])
    results = set()
    for seed in range(40 if schedule == "random" else 1):
        out, turn = torch.zeros(512), torch.zeros(1, dtype=torch.int32)
        layout = gl.NVMMASharedLayout(0, 32, rank=1)
        desc = TensorDescriptor.from_tensor(out, [512], layout)
        with emulator.run(schedule=schedule, seed=seed) as run:
            by_turns[(3,)](desc, turn, values, read, num_warps=4)
        assert run.errors == []
        results.add(out[0].item())
        assert (out == out[0]).all()
    in_turn = 0.0  # 1 + 1e8 is 1e8
    if not read or schedule == "eager":
        assert results == {in_turn}
    else:
        assert results - {in_turn}


def test_what_a_read_wait_does_not_wait_for_is_not_there_yet():
    out, seen = torch.zeros(512), {}
    for read in (True, False):
        out.zero_()
        desc = TensorDescriptor.from_tensor(out, [512], gl.NVMMASharedLayout(0, 32, rank=1))
        found = torch.full((512,), -1.0)
        with emulator.run(collect=True) as run:
            store_and_look[(1,)](desc, out, found, read, num_warps=4)
        seen[read] = [r.kind for r in run.errors], found.unique().tolist()
    assert seen == {True: (["race"], [0.0]), False: ([], [7.0])}


@gluon.jit
def store_and_look(out_desc, out_ptr, found_ptr, READ: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    at = gl.arange(0, 512, layout)
    tile = gl.allocate_shared_memory(gl.float32, [512], out_desc.layout)
    tile.store(gl.full([512], 7.0, gl.float32, layout))
    fence_async_shared()
    tma_store(out_desc, [0], tile)
    tma_store_wait(0, read=READ)
    gl.store(found_ptr + at, gl.load(out_ptr + at))
