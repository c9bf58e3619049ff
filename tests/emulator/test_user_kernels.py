"""What users' Triton kernels do beside arithmetic: autotuning, printing, rounding, refusals."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tileloom import emulator
from tileloom.emulator.devices import cuda_on_cpu

RAN: list[int] = []


@triton.autotune(
    configs=[
        triton.Config({"BLOCK": 32}, pre_hook=lambda _: RAN.append(32)),
        triton.Config({"BLOCK": 64}, num_warps=2, pre_hook=lambda _: RAN.append(64)),
    ],
    key=["n"],
    reset_to_zero=["out_ptr"],
)
@triton.jit
def accumulate(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


def test_an_autotuned_kernel_plays_each_candidate_once_and_then_the_first():
    x, out = torch.randn(100), torch.zeros(100)
    with emulator.run() as run:
        accumulate[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x, out, 100)
    assert RAN == [32, 64, 32]
    assert [launch.grid for launch in run.launches] == [(4, 1, 1), (2, 1, 1), (4, 1, 1)]
    assert torch.equal(out, x)


@triton.autotune(configs=[triton.Config({"PAST": p}) for p in (0, 8)], key=[])
@triton.jit
def reads_past(x_ptr, PAST: tl.constexpr):
    tl.store(x_ptr, tl.load(x_ptr + PAST))


def test_a_fault_of_one_candidate_is_named():
    with pytest.raises(emulator.OutOfBoundsError, match="touches element 8"), emulator.run():
        reads_past[(1,)](torch.zeros(8))


def test_a_benchmark_in_a_checked_file_runs_once():
    x, out = torch.ones(100), torch.zeros(100)
    with emulator.run() as run, cuda_on_cpu(run.target):
        times = triton.testing.do_bench(
            lambda: accumulate.fn[(4,)](x, out, 100, 32), quantiles=[0.5, 0.2, 0.8]
        )
    assert times == [1.0, 1.0, 1.0]
    assert len(run.launches) == 1
    assert torch.equal(out, x)


@triton.jit
def print_hex(x_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.device_print("x", x, hex=True)
    tl.device_print("sum", tl.sum(x, 0), hex=True)
    tl.device_print("x", x)


def test_device_print_in_hexadecimal_shows_the_bits(capsys):
    with emulator.run():
        print_hex[(1,)](torch.tensor([-1, 2], dtype=torch.int16), 2)
    assert capsys.readouterr().out.splitlines() == [
        "program (0, 0, 0) x:  [0xffff 0x0002]",
        "program (0, 0, 0) sum:  0x00000001",
        "program (0, 0, 0) x:  [-1  2]",
    ]


@triton.jit
def towards_zero(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at).to(out_ptr.dtype.element_ty, fp_downcast_rounding="rtz")
    tl.store(out_ptr + at, x)


@pytest.mark.parametrize("level", ["ttir", "machine"])
def test_rounding_towards_zero_to_half(level):
    x = torch.cat([torch.randn(252) * 100, torch.tensor([65519.0, -1e9, 6e-8, -1e-9])])
    out = torch.zeros(256, dtype=torch.float16)
    with emulator.run(level=level):
        towards_zero[(1,)](x, out, 256)
    up = torch.nextafter(out, torch.copysign(torch.tensor(torch.inf), x).half()).float()
    assert (out.float().abs() <= x.abs()).all()
    assert (up.abs() > x.abs()).all()
    assert out[-4:].tolist() == [65504.0, -65504.0, 2.0**-24, 0.0]


@triton.jit
def exchange(x_ptr, out_ptr, PTX: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.inline_asm_elementwise(PTX, "=r,r", [tl.load(x_ptr + at)], tl.int32, True, 1)
    tl.store(out_ptr + at, x)


@pytest.mark.parametrize(
    ("ptx", "why"),
    [
        ("shfl.sync.bfly.b32 $0, $1, 1, 0x1f, 0xffffffff;",
         "(what other lanes of the warp hold is the layout's business)"),
        ("frobnicate.b32 $0, $1;", "('frobnicate' is not known)"),
        ("griddepcontrol.stay; mov.b32 $0, $1;",
         "(of griddepcontrol only wait and launch_dependents are known)"),
    ],
    ids=["shuffle", "unknown", "griddepcontrol"],
)  # fmt: skip
def test_refused_ptx_says_why_and_what_to_do(ptx, why):
    x = torch.zeros(32, dtype=torch.int32)
    with pytest.raises(emulator.UnsupportedKernelError) as caught, emulator.run():
        exchange[(1,)](x, x.clone(), ptx, 32)
    text = str(caught.value)
    assert f"emulator: unsupported inline PTX: {ptx.split(';')[0]}" in text
    assert (
        f"{why}. Try: the operation that Triton or Gluon has for it\n    at   test_user_k" in text
    )


@triton.jit
def rows_by_descriptor(desc, rows_ptr, out_ptr, BLOCK: tl.constexpr):
    rows = tl.load(rows_ptr + tl.arange(0, 32))
    at = tl.arange(0, 32)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out_ptr + at, desc.gather(rows, 0))


@triton.jit
def scaled(a_ptr, scale_ptr, out_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    a = tl.load(a_ptr + i[:, None] * SIZE + i[None, :])
    scale = tl.load(scale_ptr + i[:, None] * (SIZE // 32) + tl.arange(0, SIZE // 32)[None, :])
    c = tl.dot_scaled(a, scale, "e4m3", a, scale, "e4m3")
    tl.store(out_ptr + i[:, None] * SIZE + i[None, :], c)


def test_what_hopper_has_not_is_refused_with_a_way_out():
    desc = triton.tools.tensor_descriptor.TensorDescriptor.from_tensor(torch.randn(64, 32), [1, 32])
    rows = torch.zeros(32, dtype=torch.int32)
    with pytest.raises(emulator.UnsupportedKernelError) as caught, emulator.run():
        rows_by_descriptor[(1,)](desc, rows, torch.zeros(32, 32), 32)
    assert "Hopper's TMA neither gathers nor scatters rows. Try: rows by pointers" in str(
        caught.value
    )


def test_a_scaled_product_is_played_where_the_compiler_has_taken_it_apart():
    a = torch.randn(64, 64).to(torch.float8_e4m3fn)
    scale, out = torch.full((64, 2), 128, dtype=torch.uint8), torch.zeros(64, 64)
    with emulator.run(level="ttgir"):
        scaled[(1,)](a, scale, out, 64)
    torch.testing.assert_close(out, a.float() @ a.float() * 4, rtol=1e-2, atol=1e-2)
    with pytest.raises(emulator.UnsupportedKernelError) as caught, emulator.run(level="ttir"):
        scaled[(1,)](a, scale, out, 64)
    assert (
        "operation 'tt.dot_scaled' is played once the compiler has taken it apart. "
        "Try: level='ttgir' or 'machine'"
    ) in str(caught.value)
