"""TileLang's kernels on our copies, on a GPU: compiled elsewhere, launched by the driver alone.

`python -m tests.cpasync.tilelang_client .tilelang/cubins` compiles them where TileLang is; carry
that folder to the GPU machine, which needs neither TileLang nor the CuTe DSL.
"""

from __future__ import annotations

import pytest
import torch

from tests.cpasync import tilelang_client
from tests.cpasync.test_tilelang import map_of
from tests.house import ROOT
from tileloom.target import target_of_device
from tileloom.testing import assert_accurate

FOLDER = ROOT / ".tilelang" / "cubins"
SAVED = tilelang_client.saved()
IS_HOPPER = torch.cuda.is_available() and target_of_device(torch.device("cuda")).capability == (
    9,
    0,
)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_HOPPER, reason="needs a GPU of compute capability 9.0"),
]
# A, B and C of each program; B is None for those with one operand.
SHAPES = {
    "gemm": ((512, 512), (512, 512), (512, 512)),
    "pipelined_gemm": ((512, 512), (512, 512), (512, 512)),
    "copy": ((512, 512), None, (512, 512)),
    "row_sums": ((256, 512), None, (256,)),
    "vector": ((4096,), None, (4096,)),
    "evict_first": ((512, 512), None, (512, 512)),
    "split_k": ((128, 512), (512, 128), (128, 128)),
    "tails": ((500, 500), (500, 500), (500, 500)),
}


def cubin_of(name, whose="ours"):
    if not (FOLDER / f"{name}.json").exists():
        pytest.skip(f"{FOLDER} has no kernels; tests/cpasync/tilelang_client.py makes them")
    return tilelang_client.load_cubin(FOLDER, name, whose)


def launched(name, tensors):
    made = SAVED[name]
    kinds = list(made.kernel.parameters.values())
    launch = cubin_of(name).launcher(
        kinds, grid=made.kernel.grid, shared_bytes=made.kernel.shared_bytes,
        device=torch.cuda.current_device(),
    )  # fmt: skip
    arguments = [
        map_of(made.maps[p], tensors[made.maps[p].tensor]) if p in made.maps else tensors[p]
        for p in made.kernel.parameters
    ]
    launch(torch.cuda.current_stream().cuda_stream, *arguments)
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", SAVED)
def test_values(name):
    torch.manual_seed(0)
    a_shape, b_shape, c_shape = SHAPES[name]
    dtype = torch.float32 if name == "row_sums" else torch.float16
    out = torch.float32 if name in ("row_sums", "split_k") else torch.float16
    a = torch.randn(a_shape, device="cuda").to(dtype)
    b = None if b_shape is None else torch.randn(b_shape, device="cuda").to(dtype)
    c = torch.zeros(c_shape, device="cuda", dtype=out)
    launched(name, {"A": a, "B": b, "C": c})
    if name in ("copy", "vector", "evict_first"):
        assert torch.equal(c, a)
    elif b is None:
        assert_accurate(c, a.double().sum(1), a.sum(1))
    else:
        assert_accurate(c, a.double() @ b.double(), (a @ b).to(out))
