"""The instructions that the Gluon vocabulary becomes, on this Triton and on the others."""

# ruff: noqa: E501
from __future__ import annotations

import os
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from triton.compiler.errors import CompilationError
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.cpasync import gluon_cases
from tests.launch.versions import OTHERS, triton_folder
from tileloom import emulator
from tileloom.launch.aot import KernelSpec, compile_aot

ROOT = Path(__file__).parents[2]
LAYOUT = {"swizzle_byte_width": 128, "element_bitwidth": 32, "rank": 2}
DESC = "tensordesc<{}[16, 32],{{layout}}>"


def spec(name, signature, aligned=(), **constants):
    descs = [n for n, kind in signature.items() if kind.startswith("tensordesc")]
    return KernelSpec(
        name, f"tests.cpasync.gluon_cases:{name}_kernel", True,
        signature | dict.fromkeys(constants, "constexpr"), constants, ("sm_90",),
        layouts=dict.fromkeys(descs, LAYOUT),
        aligned=(*(n for n, kind in signature.items() if kind.startswith("*")), *aligned),
    )  # fmt: skip


FP32 = DESC.format("fp32")
POINTERS = {"x_ptr": "*fp32", "y_ptr": "*fp32"}
SPECS = {
    "ring": spec("ring", {"x_desc": FP32, "y_desc": FP32, "tiles": "i32"}),
    "tails": spec("tails", {**POINTERS, "n": "i32"}, PIECE=4),
    "tails8": spec("tails", {**POINTERS, "n": "i32"}, aligned=("n",), PIECE=2),
    "tails16": spec("tails", {**POINTERS, "n": "i32"}, aligned=("n",), PIECE=4),
    "arrivals": spec("arrivals", POINTERS),
    "hand_on": spec("hand_on", {"desc": FP32, "flag": "*i32", "out_ptr": "*fp32"}),
    "publish": spec("publish", {"desc": FP32, "x_ptr": "*fp32", "out_ptr": "*fp32"}),
    "meet": spec("meet", POINTERS),
    "reduce": spec("reduce", {"x_ptr": "*i32", "desc": DESC.format("i32")}, KIND="xor"),
}
ADDRESS = r"\[[^\]]*\]"
WANTED = {
    "ring": [
        r"cp\.async\.bulk\.tensor\.2d\.shared::c\w+\.global\S*complete_tx::bytes\S* ",
        r"cp\.async\.bulk\.tensor\.2d\.global\.shared::cta\S*bulk_group\S* ",
        r"cp\.async\.bulk\.wait_group\.read\s+0;", r"fence\.proxy\.async\.shared::cta;",
        r"fence\.mbarrier_init\.release\.cluster;", r"mbarrier\.arrive\.expect_tx\S* _, \S+, 2048;",
        r"mbarrier\.init\.shared::cta\.b64 \S+, 1;", r"mbarrier\.inval", r"mbarrier\.try_wait\.parity",
    ],
    # How many bytes are written is in the instruction, how many of them are read in a register:
    # the rest are zeros. Where the mask may cut a piece, pieces are small.
    "tails": [
        rf"cp\.async\.ca\.shared\.global {ADDRESS}, {ADDRESS}, 0x4, %r\d+;",
        r"cp\.async\.commit_group;", r"cp\.async\.wait_group\s+1;", r"cp\.async\.wait_group\s+0;",
    ],
    "tails8": [rf"cp\.async\.ca\.shared\.global {ADDRESS}, {ADDRESS}, 0x8, %r\d+;"],
    "tails16": [rf"cp\.async\.cg\.shared\.global {ADDRESS}, {ADDRESS}, 0x10, %r\d+;"],
    "arrivals": [
        r"cp\.async\.mbarrier\.arrive\.noinc\.shared\S*\.b64",
        r"cp\.async\.mbarrier\.arrive\.shared\S*\.b64", r"mbarrier\.init\.shared::cta\.b64 \S+, 128;",
    ],
    "hand_on": [
        r"cp\.async\.bulk\.wait_group 0;", r"st\.release\.gpu\.global\.b32",
        r"ld\.acquire\.gpu\.global\.b32", r"fence\.proxy\.async;",
    ],
    "publish": [r"fence\.proxy\.async\.global;"],
    "meet": [r"bar\.sync 8, 256;", r"bar\.arrive 8, 256;", r"bar\.sync 9, 256;"],
    "reduce": [r"cp\.reduce\.async\.bulk\.tensor\.2d\.global\.shared::cta\.xor\S* "],
}  # fmt: skip


ARCHS = [
    *((name, arch) for name in SPECS for arch in ("sm_90", "sm_100")),
    *((name, "sm_80") for name in ("tails", "tails8", "tails16")),
]


@pytest.mark.parametrize(("name", "arch"), ARCHS)
def test_instructions(name, arch):
    compiled = compile_aot(SPECS[name], arch)
    missing = [text for text in WANTED[name] if not re.search(text, compiled.ptx)]
    assert missing == []
    assert compiled.spill_bytes == 0


def test_the_threads_meet_before_a_release_and_after_a_whole_wait():
    ptx = compile_aot(SPECS["hand_on"], "sm_90").ptx
    order = re.findall(r"wait_group 0;|bar\.sync\s+\d|barrier\.sync|st\.release", ptx)
    at = order.index("wait_group 0;")
    assert order[at + 1].startswith("bar")
    release = order.index("st.release")
    assert at < release
    assert order[release - 1].startswith("bar")


def described(x, dtype):
    return TensorDescriptor.from_tensor(
        x, [16, 32], gl.NVMMASharedLayout.get_default_for([16, 32], dtype)
    )


def words_of(error):
    """What a user sees: Triton wraps the error of a function in one for each caller."""
    return "\n".join(traceback.format_exception(error))


@pytest.mark.parametrize(
    ("kind", "dtype", "said"),
    [
        ("avg", gl.int32, "tma_reduce: kind is 'avg'; known: add, min, max, and, or, xor. "
         "Try: kind='add'."),
        ("max", gl.float32, "tma_reduce: kind='max' of fp32; the hardware takes fp16, bf16, int32, "
         "uint32, int64, uint64. Try: another dtype, or gl.atomic operations."),
        ("and", gl.float32, "tma_reduce: kind='and' of fp32; the hardware takes int32, uint32, "
         "int64, uint64. Try: another dtype, or gl.atomic operations."),
    ],
)  # fmt: skip
def test_what_the_hardware_does_not_combine(kind, dtype, said):
    x = torch.zeros(3, 16, 32, dtype=torch.int32 if dtype == gl.int32 else torch.float32)
    with pytest.raises(CompilationError) as caught, emulator.run():
        gluon_cases.reduce_kernel[(1,)](x, described(x[0], dtype), kind, num_warps=4)
    assert said in words_of(caught.value)


REFUSED = [
    ('cp.load_acquire(flag)', 'cp.load_acquire(flag, "device")', "hand_on",
     "load_acquire: scope is 'device'; known: cta, cluster, gpu, sys. Try: scope='gpu'."),
    ('cp.store_release(flag, 1)', 'cp.store_release(flag, 1, "world")', "hand_on",
     "store_release: scope is 'world'; known: cta, cluster, gpu, sys. Try: scope='gpu'."),
    ('cp.fence_proxy_async("all")', 'cp.fence_proxy_async("local")', "hand_on",
     "fence_proxy_async: space is 'local'; known: shared, global, all. Try: space='shared'."),
    ("tile = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES, SIZE], flat)",
     "tile = gl.allocate_shared_memory(gl.int8, [STAGES, SIZE], flat)\n"
     "    x_ptr = x_ptr.cast(gl.pointer_type(gl.int8), bitcast=True)\n"
     "    cp.cp_async(tile.index(0), x_ptr + gl.arange(0, SIZE, gl.BlockedLayout([2], [32], [4], [0])))",
     "tails", "cp_async: the layout of pointer gives a thread 2 bytes together; cp.async copies 4, 8 "
     "or 16. Try: size_per_thread=16 along the contiguous dimension."),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "case", "said"), REFUSED)
def test_wrong_arguments_get_a_sentence(old, new, case, said, tmp_path):
    from tests.cpasync.test_gluon import TEXT
    from tests.emulator.support import load_text

    assert old in TEXT
    module = load_text(case, TEXT.replace(old, new), tmp_path)
    with pytest.raises(CompilationError) as caught, emulator.run():
        module.CASES[case]()
    assert said in words_of(caught.value)


CHOSEN = (
    "test_instructions or meet_before or (test_boxes and corner3) "
    "or (test_values and (late-machine or random-ttgir))"
)
AT_LEAST = 21 + 1 + 5 + 2 * 9


@pytest.mark.parametrize("version", OTHERS)
def test_on_another_triton(version):
    folder = triton_folder(version)
    if folder is None:
        pytest.skip(f"Triton {version} is not in .triton-versions; `make test` installs it")
    files = [f"tests/cpasync/test_{name}.py" for name in ("gluon", "gluon_ptx")]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *files, "-q", "-k", CHOSEN, "-n", "0",
         "-p", "no:cacheprovider"],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
        env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT / 'src'}", "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed is not None
    assert int(passed[1]) >= AT_LEAST
