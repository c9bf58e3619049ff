"""The example kernels, compiled with no GPU: their copies, and what ptxas says of them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.cpasync import examples

PRINTED = {
    "axpby": "axpby: 8 cp.async.cg, 4 cp.async.commit_group, 2 cp.async.wait_group\n",
    "tma_copy": "tma_copy: 1 cp.async.bulk.tensor.2d.shared::cta.global, "
    "1 cp.async.bulk.tensor.2d.global, 1 mbarrier.try_wait\n",
    # Two loads, a store for each 64 columns, four wgmma in the first slice and in the loop.
    "gemm": "gemm: 2 cp.async.bulk.tensor.2d.shared::cta.global, "
    "4 cp.async.bulk.tensor.2d.global, 0 cp.reduce.async.bulk.tensor.2d.global, "
    "8 wgmma.mma_async, 16 stmatrix\n",
    "split_k_gemm": "split_k_gemm: 2 cp.async.bulk.tensor.2d.shared::cta.global, "
    "0 cp.async.bulk.tensor.2d.global, 8 cp.reduce.async.bulk.tensor.2d.global, "
    "8 wgmma.mma_async, 0 stmatrix\n",
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU test_gpu.py runs them")
@pytest.mark.parametrize("name", examples.NAMES)
def test_example_compiles_and_says_that_it_did_not_run(kernels, name, capsys):
    examples.load(name).main()
    expected = f"{PRINTED[name]}compiled for sm_90a; not run: no Hopper GPU here\n"
    assert capsys.readouterr().out == expected


def assembled(ptx, arch, folder):
    """What ptxas says: registers, bytes of spills, and every warning."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas-blackwell"
    (folder / "k.ptx").write_text(ptx)
    command = [tool, "-v", "-arch", arch, "k.ptx", "-o", "k.cubin"]
    said = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stderr
    registers = int(re.search(r"Used (\d+) registers", said)[1])
    spills = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    return registers, spills, [line for line in said.splitlines() if "info" not in line[:30]]


@pytest.mark.parametrize(
    ("name", "arguments", "registers"),
    [
        ("axpby", (), 64),
        ("tma_copy", (torch.bfloat16,), 64),
        ("tma_copy", (torch.float32,), 64),
        # 384 threads share 65536 registers; each warpgroup then takes or gives its own.
        ("gemm", (torch.float16, torch.float16), 168),
        ("gemm", (torch.bfloat16,), 168),
        ("split_k_gemm", (torch.bfloat16,), 168),
    ],
)
def test_assembler_neither_spills_nor_serialises_wgmma(
    kernels, name, arguments, registers, tmp_path
):
    ptx = examples.ptx_of(name, *arguments)
    used, spills, said = assembled(ptx, "sm_90a", tmp_path)
    assert used <= registers
    assert spills == 0
    assert [line for line in said if "spill" not in line and "stack frame" not in line] == []


@pytest.mark.parametrize(("name", "arch"), [("axpby", "sm_80"), ("tma_copy", "sm_100a")])
def test_copies_compile_for_other_architectures(kernels, name, arch):
    assert f".target {arch}\n" in examples.ptx_of(name, arch=arch)
