"""Wrong arguments of the Gluon vocabulary are told while the kernel is traced, in a sentence."""

from __future__ import annotations

import pytest
import torch
from triton.compiler.errors import CompilationError
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.emulator.support import load_text
from tileloom import emulator

KERNEL = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from tileloom.cpasync import gluon as cp

@gluon.jit
def kernel(desc, pointer):
    tile = gl.allocate_shared_memory(gl.float32, [16, 32], desc.layout)
    small = gl.allocate_shared_memory(gl.float32, [8, 32], desc.layout)
    half = gl.allocate_shared_memory(gl.float16, [16, 32], desc.layout)
    bars = cp.mbarrier_allocate(1)
    bar = bars.index(0)
    cp.mbarrier_init(bar, count=1)
    cp.fence_barrier_init()
    {}
"""
DESCRIPTOR = (
    "; it must be a TMA descriptor. Try: TensorDescriptor.from_tensor(tensor, block_shape, layout) "
    "as the argument of the launch."
)
COORD = "; the descriptor's box [16, 32] takes 2, one for each dimension. Try: [0, 0]."
TILE = "Try: gl.allocate_shared_memory(tensor_desc.dtype, [16, 32], tensor_desc.layout)."
WRONG = [
    ("cp.tma_load(pointer, [0, 0], bar, tile)",
     "tma_load: tensor_desc is pointer<fp32>" + DESCRIPTOR),
    ("cp.tma_store(pointer, [0, 0], tile)",
     "tma_store: tensor_desc is pointer<fp32>" + DESCRIPTOR),
    ("cp.tma_reduce(pointer, [0, 0], tile)",
     "tma_reduce: tensor_desc is pointer<fp32>" + DESCRIPTOR),
    ("cp.tma_load(desc, [0], bar, tile)", "tma_load: coord has length 1" + COORD),
    ("cp.tma_load(desc, 0, bar, tile)", "tma_load: coord is 0" + COORD),
    ("cp.tma_load(desc, gl.program_id(0), bar, tile)", "tma_load: coord is int32" + COORD),
    ("cp.tma_store(desc, [0, 0, 0], tile)", "tma_store: coord has length 3" + COORD),
    ("cp.tma_reduce(desc, [0], tile)", "tma_reduce: coord has length 1" + COORD),
    ("cp.tma_load(desc, [0, 0], 0, tile)",
     "tma_load: barrier is 0; it must be an mbarrier in shared memory. Try: bars.index(0) of bars "
     "= cp.mbarrier_allocate(1)."),
    ("cp.tma_load(desc, [0, 0], bar, pointer)",
     "tma_load: result is pointer<fp32>; it must be a tile in shared memory. " + TILE),
    ("cp.tma_load(desc, [0, 0], bar, small)",
     "tma_load: result is a tile of fp32 [8, 32] in shared memory; the descriptor's box is of fp32 "
     "[16, 32]. " + TILE),
    ("cp.tma_store(desc, [0, 0], half)",
     "tma_store: src is a tile of fp16 [16, 32] in shared memory; the descriptor's box is of fp32 "
     "[16, 32]. " + TILE),
    ("cp.mbarrier_wait(bar, 2)",
     "mbarrier_wait: phase is 2; it is a parity, 0 or 1. Try: 2 & 1, where 2 counts phases."),
    ("cp.mbarrier_wait(bar, -1)",
     "mbarrier_wait: phase is -1; it is a parity, 0 or 1. Try: -1 & 1, where -1 counts phases."),
    ("cp.named_barrier_sync(7, 128)",
     "named_barrier_sync: ident is 7; 8 to 15 are free, the others are Triton's own. Try: 8."),
    ("cp.named_barrier_arrive(16, 128)",
     "named_barrier_arrive: ident is 16; 8 to 15 are free, the others are Triton's own. Try: 8."),
    ("cp.named_barrier_sync(8, 100)",
     "named_barrier_sync: threads is 100; it must be a multiple of 32, the threads of a warp, up "
     "to 1024. Try: 128."),
]  # fmt: skip


@pytest.mark.parametrize(("line", "said"), WRONG, ids=[line for line, _ in WRONG])
def test_what_is_wrong_is_said_with_the_line(line, said, tmp_path):
    module = load_text("wrong", KERNEL.format(line), tmp_path)
    x = torch.zeros(16, 32)
    layout = gl.NVMMASharedLayout.get_default_for([16, 32], gl.float32)
    desc = TensorDescriptor.from_tensor(x, [16, 32], layout)
    with emulator.run(), pytest.raises(CompilationError) as caught:
        module.kernel[(1,)](desc, x, num_warps=4)
    texts, error = [], caught.value
    while error is not None:  # a function inside another one says whence it was called
        texts.append(str(error))
        error = error.__cause__
    assert said in "\n".join(texts)
    assert line in texts[0]
