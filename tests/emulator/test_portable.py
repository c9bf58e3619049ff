"""Portable kernels give torch's results at every level, in every element type."""

from __future__ import annotations

import pytest
import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.emulator import kernels
from tileloom import emulator

LEVELS = ["ttir", "ttgir", "machine"]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.uint32, torch.int64]


def sample(dtype, n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return (torch.randn(n, generator=generator, dtype=torch.float64) * 3).to(dtype)
    info = torch.iinfo(dtype)
    low, high = max(info.min, -(2**62)), min(info.max, 2**62)
    return torch.randint(low, high, (n,), generator=generator, dtype=torch.int64).to(dtype)


def truncated(function):
    """Integer division and remainder of C: towards zero."""
    mode = {"floordiv": "trunc", "mod": None}[function]

    def apply(x, y):
        x, y = x.to(torch.int64), y.to(torch.int64)
        quotient = torch.div(x, y, rounding_mode="trunc")
        return quotient if mode else x - quotient * y

    return apply


BINARY = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "max": torch.maximum,
    "min": torch.minimum, "lt": torch.lt, "ne": torch.ne,
}  # fmt: skip
INTEGER_BINARY = {
    **BINARY, "and": torch.bitwise_and, "xor": torch.bitwise_xor, "floordiv": truncated("floordiv"),
    "mod": truncated("mod"), "shl": lambda x, y: x << (y & 7), "shr": lambda x, y: x >> (y & 7),
}  # fmt: skip


def as_signed(x):
    """Give unsigned values a type that torch can calculate with, and a mask to wrap results."""
    return x.to(torch.int64) if x.dtype in (torch.uint8, torch.uint16, torch.uint32) else x


@pytest.mark.parametrize("op", INTEGER_BINARY)
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integer_arithmetic(dtype, op):
    x, y = sample(dtype, 200), sample(dtype, 200, 1)
    y = torch.where(y.to(torch.int64) == 0, torch.ones_like(y), y)
    is_bool = op in ("lt", "ne")
    out = torch.zeros(200, dtype=torch.bool if is_bool else dtype)
    with emulator.run(level="ttir"):
        kernels.binary[(1,)](x, y, out, 200, op, 256)
    expected = INTEGER_BINARY[op](as_signed(x), as_signed(y)).to(out.dtype)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("op", [*BINARY, "div"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_float_arithmetic(dtype, op):
    x, y = sample(dtype, 200), sample(dtype, 200, 1)
    is_bool = op in ("lt", "ne")
    out = torch.zeros(200, dtype=torch.bool if is_bool else dtype)
    with emulator.run(level="ttgir"):
        kernels.binary[(1,)](x, y, out, 200, op, 256)
    expected = {**BINARY, "div": torch.div}[op](x, y)
    torch.testing.assert_close(
        out, expected, rtol=1e-7 if dtype != torch.float64 else 1e-15, atol=0
    )


UNARY = {
    "exp": torch.exp, "exp2": torch.exp2, "log": torch.log, "log2": torch.log2, "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt, "sin": torch.sin, "cos": torch.cos, "abs": torch.abs, "neg": torch.neg,
    "floor": torch.floor, "ceil": torch.ceil, "erf": torch.erf, "sigmoid": torch.sigmoid,
}  # fmt: skip


@pytest.mark.parametrize("op", UNARY)
def test_unary_functions(op):
    x = sample(torch.float32, 200).abs() + 0.01
    out = torch.zeros_like(x)
    with emulator.run(level="ttgir"):
        kernels.unary[(1,)](x, out, 200, op, 256)
    torch.testing.assert_close(out, UNARY[op](x), rtol=1e-5, atol=1e-6)


CASTS = [
    (torch.float32, torch.bfloat16), (torch.float32, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.int32), (torch.float32, torch.int8), (torch.int32, torch.float32),
    (torch.int64, torch.int16), (torch.uint8, torch.int32), (torch.int8, torch.int64),
    (torch.int32, torch.bfloat16), (torch.float32, torch.float8_e4m3fn),
    (torch.float32, torch.float8_e5m2), (torch.float8_e5m2, torch.float16),
    (torch.float32, torch.float64),
]  # fmt: skip


@pytest.mark.parametrize(("source", "target"), CASTS, ids=str)
def test_casts(source, target):
    if source.is_floating_point:
        x = (torch.linspace(-100, 100, 100, dtype=torch.float32)).to(source)
    else:
        x = sample(source, 100)
    out = torch.zeros(100, dtype=target)
    with emulator.run(level="ttgir"):
        kernels.cast[(1,)](x, out, 100, 128)
    assert torch.equal(out.to(torch.float64), x.to(target).to(torch.float64))


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("target", "x", "expected"),
    [
        (torch.float8_e5m2, [INF, -INF, 1e9, NAN], [57344, -57344, 57344, NAN]),
        (torch.float8_e4m3fn, [INF, -INF, 1e9, NAN], [448, -448, 448, NAN]),
        (torch.int8, [300.7, -129, 1e9, NAN], [44, 127, -1, 0]),  # cvt.rzi.s16, then the low byte
        (torch.uint8, [300.7, -1, 1e9, NAN], [44, 0, 255, 0]),
        (torch.int32, [1e12, -1e12, -1.9, NAN], [2**31 - 1, -(2**31), -1, 0]),
        (torch.int64, [1e30, -1e30, -1.9, NAN], [2**63 - 1, -(2**63), -1, -(2**63)]),
    ],
    ids=str,
)
def test_casts_of_what_does_not_fit_are_the_hardwares(target, x, expected):
    out = torch.zeros(4, dtype=target)
    with emulator.run():
        kernels.cast[(1,)](torch.tensor(x), out, 4, 4)
    if target.is_floating_point:
        torch.testing.assert_close(out.float(), torch.tensor(expected).float(), equal_nan=True)
        x = out.clone().view(torch.uint8).fill_(0x7C).view(target)  # infinity in e5m2: no cast
        with emulator.run():
            kernels.cast[(1,)](x, out, 4, 4)
        assert torch.equal(out.view(torch.uint8), x.view(torch.uint8))
    else:
        assert out.tolist() == expected


@pytest.mark.parametrize("level", LEVELS)
def test_reductions(level):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    x[3, 7] = x[3, 9] = 9.0
    out = torch.zeros(6, 8)
    with emulator.run(level=level):
        kernels.reductions[(1,)](x, out, 8, 64)
    expected = [x.sum(1), x.max(1).values, x.min(1).values, x.argmax(1), x.argmax(1), x.argmin(1)]
    torch.testing.assert_close(out, torch.stack([e.float() for e in expected]))
    assert out[3, 3] == 7


@pytest.mark.parametrize("level", LEVELS)
def test_scans(level):
    x, y = torch.randn(4, 16), torch.randn(4, 16)
    total, back, product, affine = (torch.zeros(4, 16) for _ in range(4))
    with emulator.run(level=level):
        kernels.scans[(1,)](x, y, total, back, product, affine, 4, 16)
    expected = torch.zeros(4)
    for i in range(16):
        expected = expected * y[:, i] + x[:, i]
    torch.testing.assert_close(total, x.cumsum(1))
    torch.testing.assert_close(back, x.flip(1).cumsum(1).flip(1))
    torch.testing.assert_close(product, y.cumprod(0))
    torch.testing.assert_close(affine[:, -1], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
def test_shapes(level):
    x = torch.arange(32.0)
    out = torch.zeros(32)
    with emulator.run(level=level):
        kernels.shapes[(1,)](x, out, 32)
    swapped = x.reshape(16, 2).flip(1).reshape(-1)
    assert torch.equal(out, swapped.reshape(8, 4).T.reshape(-1).flip(0))


def test_gather_and_histogram():
    x = torch.randn(64)
    index = torch.randint(0, 64, (64,), dtype=torch.int32)
    out, counts = torch.zeros(64), torch.zeros(64, dtype=torch.int32)
    with emulator.run():
        kernels.gather_and_count[(1,)](x, index, out, counts, 64, 64)
    assert torch.equal(out, x[index.long()])
    assert torch.equal(counts.long(), torch.bincount(index, minlength=64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("level", LEVELS)
def test_matmul(dtype, arch, level):
    if level == "machine" and arch == "sm_90a" and not emulator.dialect.PIPELINED_DOT_HAS_FENCE:
        pytest.skip("this Triton's compiler leaves the fence out: test_missing_compiler_fence")
    a, b = torch.randn(70, 136, dtype=dtype), torch.randn(136, 48, dtype=dtype)
    c = torch.zeros(70, 48, dtype=torch.float32)
    with emulator.run(arch=arch, level=level) as run:
        kernels.matmul[(2, 1)](a, b, c, 70, 48, 136, "ieee", 64, 64, 32, num_stages=3)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-4, atol=1e-3)
    assert run.reports == []


@pytest.mark.skipif(
    emulator.dialect.PIPELINED_DOT_HAS_FENCE, reason="this Triton's compiler puts the fence in"
)
def test_missing_compiler_fence_is_reported():
    a, b = torch.randn(64, 128, dtype=torch.float16), torch.randn(128, 64, dtype=torch.float16)
    c = torch.zeros(64, 64)
    with pytest.raises(emulator.ProxyError), emulator.run(level="machine"):
        kernels.matmul[(1, 1)](a, b, c, 64, 64, 128, "ieee", 64, 64, 32, num_stages=3)


def test_tf32_is_truncated_and_ieee_is_not():
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    exact, coarse = torch.zeros(64, 64), torch.zeros(64, 64)
    with emulator.run(level="ttir"):
        kernels.matmul[(1, 1)](a, b, exact, 64, 64, 64, "ieee", 64, 64, 32)
        kernels.matmul[(1, 1)](a, b, coarse, 64, 64, 64, "tf32", 64, 64, 32)
    cut = [(t.view(torch.int32) & ~0x1FFF).view(torch.float32) for t in (a, b)]
    torch.testing.assert_close(exact, a @ b, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(coarse, cut[0] @ cut[1], rtol=1e-5, atol=1e-4)
    assert (coarse - a @ b).abs().max() > 1e-3


@pytest.mark.parametrize("level", LEVELS)
def test_matmul_by_descriptors(level):
    a, b = torch.randn(100, 96, dtype=torch.bfloat16), torch.randn(96, 72, dtype=torch.bfloat16)
    c = torch.zeros(100, 72, dtype=torch.bfloat16)
    with emulator.run(level=level, schedule="random"):
        kernels.matmul_by_descriptors[(2, 2)](
            TensorDescriptor.from_tensor(a, [64, 32]), TensorDescriptor.from_tensor(b, [32, 64]),
            TensorDescriptor.from_tensor(c, [64, 64]), 96, 64, 64, 32,
        )  # fmt: skip
    torch.testing.assert_close(c.float(), (a.float() @ b.float()), rtol=0.01, atol=0.1)


@pytest.mark.parametrize("level", ["ttir", "ttgir"])
def test_attention_in_bf16(level):
    q, k, v = (torch.randn(1, 2, 90, 32, dtype=torch.bfloat16) for _ in range(3))
    o = torch.zeros_like(q)
    with emulator.run(level=level):
        kernels.attention[(2, 2)](q, k, v, o, 90, 32**-0.5 * 1.4426950408889634, 64, 32, 32)
    expected = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float())
    torch.testing.assert_close(o.float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("schedule", ["late", "random"])
def test_atomics(schedule):
    x = torch.randint(0, 1000, (300,), dtype=torch.int32)
    total = torch.zeros(8, dtype=torch.int32)
    top, bits, slot = (torch.zeros(1, dtype=torch.int32) for _ in range(3))
    with emulator.run(schedule=schedule):
        kernels.atomics[(3,)](x, total, top, bits, slot, 300, 128)
    expected = torch.zeros(8, dtype=torch.int32).index_add_(0, torch.arange(300) % 8, x)
    assert torch.equal(total, expected)
    assert top.item() == x.max().item()
    assert bits.item() == 7
    assert slot.item() in (1, 2, 3)


@pytest.mark.parametrize("schedule", ["late", "eager", "random"])
def test_a_spin_lock_orders_programs(schedule):
    lock, value = torch.zeros(1, dtype=torch.int32), torch.zeros(64)
    with emulator.run(schedule=schedule, seed=4) as run:
        kernels.locked_add[(5,)](lock, value, 64)
    assert value.tolist() == [5.0] * 64
    assert run.reports == []


def test_random_numbers_are_tritons():
    out = torch.zeros(64)
    with emulator.run(level="ttir"):
        kernels.random_numbers[(1,)](out, 7, 64)
    assert 0 <= out.min() < out.max() < 1
    assert len(out.unique()) == 64


def test_while_loops_and_branches():
    x = torch.tensor([1, 6, 7, 27], dtype=torch.int32)
    out = torch.zeros(4, dtype=torch.int32)
    with emulator.run():
        kernels.collatz[(4,)](x, out)
    assert out.tolist() == [0, 8, 16, 111]


@pytest.mark.parametrize("level", LEVELS)
def test_functions_that_are_not_inlined(level):
    x = torch.randn(4)
    out = torch.zeros(4)
    with emulator.run(level=level):
        kernels.calls[(4,)](x, out)
    torch.testing.assert_close(out, 2 * x * x + x + 2)


def test_out_of_bounds_names_tensor_lane_and_line():
    x, out = torch.randn(100), torch.zeros(100)
    with pytest.raises(emulator.OutOfBoundsError) as caught, emulator.run():
        kernels.unary[(1,)](x, out, 120, "copy", 128)
    text = str(caught.value)
    assert "'x_ptr' (100 elements): 20 of 120 lanes, the first touches element 100" in text
    assert "tl.load(x_ptr + at, mask=at < n, other=1)" in text


def test_programs_that_overlap_are_reported():
    x = torch.randn(256)
    out = torch.zeros(200)
    with emulator.run(collect=True) as run:
        kernels.binary[(2,)](x, x, out[56:], 144, "add", 128)
    assert run.reports == []
    value = torch.zeros(64)
    with pytest.raises(emulator.RaceError, match="'value_ptr' is written by"), emulator.run():
        unguarded[(2,)](value, 64)


@triton.jit
def unguarded(value_ptr, BLOCK: triton.language.constexpr):
    at = triton.language.arange(0, BLOCK)
    triton.language.store(value_ptr + at, triton.language.program_id(0).to(triton.language.float32))
