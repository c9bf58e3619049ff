"""Kernels for the tests of the tuner, and what generated code would say of them."""

import triton
import triton.language as tl

from tileloom.tuning.hints import DeviceProperties

H100 = DeviceProperties("cuda", 0, 132, 90, 9, 65536, 2048, 1024, 32)


@triton.jit
def twice(value):
    return value * 2


@triton.jit
def scale(in_ptr0, out_ptr0, xnumel, XBLOCK: tl.constexpr):
    at = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    kept = at < xnumel
    tl.store(out_ptr0 + at, twice(tl.load(in_ptr0 + at, mask=kept)), mask=kept)


@triton.jit
def add_to(in_out_ptr0, in_ptr0, xnumel, scale, XBLOCK: tl.constexpr, EXTRA: tl.constexpr):
    at = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    kept = at < xnumel
    value = tl.load(in_out_ptr0 + at, mask=kept) + tl.load(in_ptr0 + at, mask=kept) * scale
    tl.store(in_out_ptr0 + at, value + EXTRA, mask=kept)


@triton.jit
def scale_by_tma(in_ptr0, out_ptr0, xnumel, XBLOCK: tl.constexpr):
    """`scale` by descriptors made on the device, which lie in scratch memory."""
    given = tl.make_tensor_descriptor(in_ptr0, [xnumel], [1], [XBLOCK])
    taken = tl.make_tensor_descriptor(out_ptr0, [xnumel], [1], [XBLOCK])
    at = [tl.program_id(0) * XBLOCK]
    taken.store(at, twice(given.load(at)))


@triton.jit
def wide(in_ptr0, out_ptr0, xnumel, XBLOCK: tl.constexpr):
    """No block above 512 compiles."""
    tl.static_assert(XBLOCK <= 512, "blocks are at most 512")
    at = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    tl.store(out_ptr0 + at, tl.load(in_ptr0 + at, mask=at < xnumel), mask=at < xnumel)


def meta(**changes):
    """The facts of `scale` as generated code states them."""
    return {
        "signature": {"in_ptr0": "*fp32", "out_ptr0": "*fp32", "xnumel": "i32",
                      "XBLOCK": "constexpr"},
        "device": H100,
        "constants": {},
        "configs": [{(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]]}],
    } | changes  # fmt: skip


FACTS = {"grid_type": "Grid1D", "kernel_name": "scale"}


@triton.jit
def rows(out_ptr0, xnumel):
    """One element a program."""
    tl.store(out_ptr0 + tl.program_id(0), xnumel)


@triton.jit
def row_sum(in_ptr0, out_ptr0, xnumel, r0_numel, XBLOCK: tl.constexpr, R0_BLOCK: tl.constexpr):
    row = (tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK))[:, None]
    total = tl.zeros([XBLOCK, R0_BLOCK], tl.float32)
    for start in range(0, r0_numel, R0_BLOCK):
        at = start + tl.arange(0, R0_BLOCK)[None, :]
        kept = (row < xnumel) & (at < r0_numel)
        total += tl.load(in_ptr0 + row * r0_numel + at, mask=kept, other=0.0)
    tl.store(out_ptr0 + row, tl.sum(total, 1)[:, None], mask=row < xnumel)


def device_properties(device):
    """What generated code states of a GPU."""
    import torch

    found = torch.cuda.get_device_properties(device)
    return DeviceProperties(
        "cuda", device.index, found.multi_processor_count, found.major * 10 + found.minor,
        found.major, 65536, found.max_threads_per_multi_processor, 1024, 32,
    )  # fmt: skip
