"""Bad input: one clear error for each thing that the hardware or the emulator does not take."""

from __future__ import annotations

import re

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.errors import OutOfResources

from tests.emulator import support
from tests.emulator.cases.names import tma_load
from tests.emulator.test_irtext import run_line
from tileloom import emulator


@triton.jit
def copy(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at))


# ---- operations of other hardware
@gluon.jit
def use_tensor_memory(flag_ptr):
    layout: gl.constexpr = blackwell.TensorMemoryLayout([128, 64], 1)
    rows: gl.constexpr = gl.BlockedLayout([1, 64], [32, 1], [4, 1], [0, 1])
    if gl.load(flag_ptr) > 0:
        memory = blackwell.allocate_tensor_memory(gl.float32, [128, 64], layout)
        memory.store(gl.zeros([128, 64], gl.float32, rows))


def test_tensor_memory_is_refused_by_name_once_it_is_reached():
    with emulator.run():
        use_tensor_memory[(1,)](torch.zeros(1, dtype=torch.int32))
    with pytest.raises(emulator.UnsupportedKernelError) as caught, emulator.run():
        use_tensor_memory[(1,)](torch.ones(1, dtype=torch.int32))
    text = str(caught.value)
    assert "operation 'ttng.tmem_alloc' is one of Blackwell's (tensor memory, tcgen05)" in text
    assert "Try: a kernel with warpgroup_mma" in text
    assert re.search(
        r"at   test_refusals\.py:\d+  \| memory = blackwell\.allocate_tensor_memory", text
    )


@pytest.mark.parametrize(
    ("line", "whose"),
    [
        ("ttng.tc_gen5_commit %x : !tt.ptr<f32>", "Blackwell's"),
        ("ttng.clc_try_cancel %x : !tt.ptr<f32>", "Blackwell's"),
        ("%0 = amdg.buffer_load %x : !tt.ptr<f32>", "AMD's"),
        ("rocdl.sched.barrier 0", "AMD's"),
    ],
)
def test_operations_of_other_hardware_are_refused_by_name(line, whose):
    with pytest.raises(emulator.UnsupportedKernelError) as caught:
        run_line(line)
    assert f"is one of {whose}" in str(caught.value)
    assert "the emulator plays" in str(caught.value)
    assert "user.py:12" in str(caught.value)


def test_unknown_ptx_is_refused_with_its_text_and_the_kernels_line():
    @triton.jit
    def kernel(out_ptr):
        y = tl.inline_asm_elementwise("activemask.b32 $0;", "=r", [], tl.int32, False, 1)
        tl.store(out_ptr, y)

    with pytest.raises(emulator.UnsupportedKernelError) as caught, emulator.run():
        kernel[(1,)](torch.zeros(1, dtype=torch.int32))
    assert re.search(
        r"unsupported inline PTX: activemask.b32 \$0.*\n +at +test_refusals.py:\d+",
        str(caught.value),
    )


# ---- arguments
def test_a_tensor_that_is_not_on_the_cpu_is_refused():
    with pytest.raises(emulator.LaunchError) as caught, emulator.run():
        copy[(1,)](torch.zeros(8), torch.zeros(8, device="meta"), 8)
    assert str(caught.value) == (
        "emulator: argument 'out_ptr' is on meta; the emulator takes CPU tensors. "
        "Try: pass the tensor's .cpu()."
    )


@pytest.mark.gpu
def test_a_gpu_tensor_is_refused():
    with (
        pytest.raises(emulator.LaunchError, match=r"'out_ptr' is on cuda:0.*\.cpu\(\)"),
        emulator.run(),
    ):
        copy[(1,)](torch.zeros(8), torch.zeros(8, device="cuda"), 8)


def test_a_dtype_without_a_kernel_type_is_refused():
    with pytest.raises((emulator.LaunchError, KeyError)), emulator.run():
        copy[(1,)](torch.zeros(8, dtype=torch.complex64), torch.zeros(8), 8)


@gluon.jit
def describe_only(desc, out_ptr):
    gl.store(out_ptr, desc.shape[0])


def _describe(tensor, **changes):
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    desc = TensorDescriptor.from_tensor(torch.zeros(64, 64, dtype=torch.float16), [64, 64], layout)
    desc.base, desc.strides = tensor, list(tensor.stride())  # past Triton's own checks
    for name, value in changes.items():
        setattr(desc, name, value)
    return desc


HALF = torch.float16


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: _describe(torch.zeros(64, 68, dtype=HALF)[:, :64]),
         "a stride of 68 elements, 136 bytes, which is not a multiple of 16 bytes"),
        (lambda: _describe(torch.zeros(64 * 64 + 1, dtype=HALF)[1:].view(64, 64)),
         "base address 0x"),
        (lambda: _describe(torch.zeros(64, 128, dtype=HALF)[:, ::2]), "an innermost stride of 2"),
        (lambda: _describe(torch.zeros(64, 64, dtype=HALF), shape=[0, 64]),
         "shape [0, 64]; every size must be at least 1"),
    ],
    ids=["stride", "base", "innermost", "empty"],
)  # fmt: skip
def test_descriptors_that_the_hardware_refuses(make, text):
    with pytest.raises(emulator.LaunchError) as caught, emulator.run():
        describe_only[(1,)](make(), torch.zeros(1, dtype=torch.int32))
    assert f"emulator: tensor descriptor 'desc' has {text}" in str(caught.value)
    assert "Try: copy the tensor" in str(caught.value)


@triton.jit
def describe_on_the_device(x_ptr, out_ptr, stride):
    desc = tl.make_tensor_descriptor(x_ptr, [16, 16], [stride, 1], [16, 16])
    tl.store(out_ptr, tl.sum(desc.load([0, 0])))


def test_a_descriptor_made_on_the_device_is_checked_as_well():
    x, out = torch.ones(16, 20), torch.zeros(1)
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8))
    with emulator.run():
        describe_on_the_device[(1,)](x, out, 20)
    assert out.item() == 256
    expected = pytest.raises(emulator.LaunchError, match="a stride of 18 elements, 72 bytes")
    with expected, emulator.run():
        describe_on_the_device[(1,)](x, out, 18)


@gluon.jit
def load_a_large_box(desc, out_ptr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    buf = gl.allocate_shared_memory(gl.float16, [512, 32], desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, desc.block_type.nbytes)
    tma_load(desc, [0, 0], bar, buf)
    mbarrier.wait(bar, 0)
    rows = gl.expand_dims(gl.arange(0, 512, gl.SliceLayout(1, layout)), 1)
    cols = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, layout)), 0)
    gl.store(out_ptr + rows * 32 + cols, buf.load(layout))


def test_a_box_over_256_is_none_of_the_hardwares_since_triton_cuts_it():
    x, out = torch.randn(512, 32, dtype=HALF), torch.zeros(512, 32, dtype=HALF)
    layout = gl.NVMMASharedLayout.get_default_for([512, 32], gl.float16)
    with emulator.run() as run:
        load_a_large_box[(1,)](TensorDescriptor.from_tensor(x, [512, 32], layout), out)
    assert run.errors == []
    assert torch.equal(out, x)


# ---- resources
def test_a_grid_that_the_hardware_refuses():
    x = torch.zeros(8)
    with emulator.run(), pytest.raises(emulator.LaunchError) as caught:
        copy[(1, 65536)](x, x, 8)
    assert "'copy' is (1, 65536, 1); the hardware takes at most 2147483647 x 65535" in str(
        caught.value
    )


@triton.jit
def uses_an_operand_without_constraint(out_ptr):
    at = tl.arange(0, 32)
    y = tl.inline_asm_elementwise("add.s32 $0, $1, $2;", "=r,r", [at], tl.int32, True, 1)
    tl.store(out_ptr + at, y)


def test_inline_ptx_operands_without_a_constraint_are_refused():
    with emulator.run(), pytest.raises(emulator.UnsupportedKernelError) as caught:
        uses_an_operand_without_constraint[(1,)](torch.zeros(32, dtype=torch.int32))
    assert "inline PTX operand $2 has no constraint" in str(caught.value)
    assert "add.s32 $0, $1, $2" in str(caught.value)


@pytest.mark.parametrize("level", ["ttgir", "machine"])
def test_shared_memory_over_the_cards_is_refused(level):
    module = support.load_case("pipelined_gemm")
    with pytest.raises(OutOfResources) as caught, emulator.run(level=level):
        module.main(stages=64, k=64)
    assert "out of resource: shared memory" in str(caught.value)
    assert "Hardware limit: 232448" in str(caught.value)


@triton.jit
def endless(out_ptr):
    i = 0
    while i >= 0:
        i = (i + 1) % 1000
    tl.store(out_ptr, i)


def test_a_kernel_that_never_ends_is_stopped():
    with pytest.raises(emulator.StepLimitError) as caught, emulator.run(max_steps=20_000):
        endless[(1,)](torch.zeros(1, dtype=torch.int32))
    assert "did not end within 20000 steps" in str(caught.value)
    assert "while i >= 0" in str(caught.value)
    assert "raise max_steps of emulator.run if the kernel is only long" in str(caught.value)


@gluon.jit
def _spin(out_ptr, bar):
    i = 0
    while i >= 0:
        i = (i + 1) % 1000
    gl.store(out_ptr + i, i)
    mbarrier.arrive(bar, count=1)


@gluon.jit
def _wait_for_it(out_ptr, bar):
    mbarrier.wait(bar, 0)
    gl.store(out_ptr, 1)


@gluon.jit
def never_arrives(out_ptr):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    gl.warp_specialize([(_wait_for_it, (out_ptr, bar)), (_spin, (out_ptr, bar))], [4], [64])


def test_the_report_says_where_each_partition_is():
    with pytest.raises(emulator.StepLimitError) as caught, emulator.run(max_steps=20_000):
        never_arrives[(1,)](torch.zeros(1, dtype=torch.int32), num_warps=4)
    details = caught.value.report.details
    assert [re.sub(r"\d+  \|", "N  |", line) for line in details] == [
        f"partition '{name}' of program (0, 0, 0): test_refusals.py:N  | {line}"
        for name, line in [("_wait_for_it", "mbarrier.wait(bar, 0)"), ("_spin", "while i >= 0:")]
    ]
