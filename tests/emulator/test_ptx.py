"""Inline PTX: parsing, values, packing, divergence, and a clear refusal of the rest."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tileloom import emulator
from tileloom.emulator import ptx, ptx_values
from tileloom.emulator.ir import Loc
from tileloom.emulator.lower_ptx import unknown_ptx

PLACE = Loc("user.py", 7)


def play(text, count=4, **inputs):
    """Run value instructions; inputs are raw words a lane, by register name."""
    lanes = ptx.Lanes(ptx.parse(text), count, None, PLACE)
    for name, words in inputs.items():
        lanes.registers[name] = np.asarray(words)
    assert list(lanes.run()) == []
    return lanes


def f32(*values):
    return np.array(values, np.float32).view(np.uint32)


def u32(*values):
    return np.array(values, np.int64).astype(np.uint32)


VALUES = [
    ("add.s32 d, a, b;", u32(1, -2, 2**31 - 1, 5), u32(2, -3, 1, -5), u32(3, -5, -(2**31), 0)),
    ("sub.u32 d, a, b;", u32(1, 5, 0, 9), u32(2, 5, 1, 3), u32(-1, 0, -1, 6)),
    ("mul.lo.s32 d, a, b;", u32(3, -4, 65536, 7), u32(5, 6, 65536, -7), u32(15, -24, 0, -49)),
    ("mul.hi.u32 d, a, b;", u32(2**31, 3, 2**32 - 1, 0), u32(4, 5, 2**32 - 1, 9), u32(2, 0, 2**32
    - 2, 0)), ("mad.lo.u32 d, a, b, 10;", u32(1, 2, 3, 4), u32(5, 6, 7, 8), u32(15, 22, 31, 42)),
    ("div.s32 d, a, b;", u32(7, -7, 7, -7), u32(2, 2, -2, -2), u32(3, -3, -3, 3)),
    ("rem.s32 d, a, b;", u32(7, -7, 7, -7), u32(2, 2, -2, -2), u32(1, -1, 1, -1)),
    ("shl.b32 d, a, b;", u32(1, 1, 1, -1), u32(0, 31, 32, 4), u32(1, 2**31, 0, -16)),
    ("shr.s32 d, a, b;", u32(-8, 8, -1, 1), u32(1, 1, 40, 1), u32(-4, 4, -1, 0)),
    ("shr.u32 d, a, b;", u32(-8, 8, -1, 1), u32(1, 1, 40, 1), u32(0x7FFFFFFC, 4, 0, 0)),
    ("and.b32 d, a, b;", u32(12, 7, 1, 0), u32(10, 2, 1, 5), u32(8, 2, 1, 0)),
    ("xor.b32 d, a, b;", u32(12, 7, 1, 0), u32(10, 2, 1, 5), u32(6, 5, 0, 5)),
    ("min.s32 d, a, b;", u32(-1, 3, 5, 0), u32(1, 2, 5, -9), u32(-1, 2, 5, -9)),
    ("max.u32 d, a, b;", u32(-1, 3, 5, 0), u32(1, 2, 5, 9), u32(-1, 3, 5, 9)),
    ("fma.rn.f32 d, a, b, a;", f32(1, 2, -3, 0.5), f32(4, 0.5, 2, 8), f32(5, 3, -9, 4.5)),
    ("add.ftz.f32 d, a, b;", f32(1, 2, 3, 4), f32(0.5, 0.25, -3, 1e9), f32(1.5, 2.25, 0, 1e9 + 4)),
    ("max.f32 d, a, b;", f32(1, np.nan, -3, 4), f32(2, 5, -4, np.nan), f32(2, 5, -3, 4)),
    ("ex2.approx.ftz.f32 d, a;", f32(0, 1, -1, 10), f32(0, 0, 0, 0), f32(1, 2, 0.5, 1024)),
    ("prmt.b32 d, a, b, 0x5410;", u32(0x11112222, 1, 2, 3), u32(0x33334444, 4, 5, 6),
     u32(0x44442222, 0x40001, 0x50002, 0x60003)),
    ("lop3.b32 d, a, b, a, 0x3C;", u32(12, 7, 1, 0), u32(10, 2, 1, 5), u32(6, 5, 0, 5)),
    ("bfe.u32 d, a, 4, 8;", u32(0xABCD, 0xFF0, 0, 0x123), u32(0, 0, 0, 0), u32(0xBC, 0xFF, 0,
    0x12)), ("popc.b32 d, a;", u32(0, 1, 255, -1), u32(0, 0, 0, 0), u32(0, 1, 8, 32)),
    ("cvt.rni.s32.f32 d, a;", f32(1.5, 2.5, -1.5, 1e20), f32(0, 0, 0, 0), u32(2, 2, -2, 2**31 - 1)),
    ("cvt.rn.f32.s32 d, a;", u32(1, -5, 0, 100), u32(0, 0, 0, 0), f32(1, -5, 0, 100)),
    ("mov.b32 d, 0f3F800000;", u32(0, 0, 0, 0), u32(0, 0, 0, 0), f32(1, 1, 1, 1)),
    ("neg.f32 d, a;", f32(1, -2, 0, 3), f32(0, 0, 0, 0), f32(-1, 2, -0.0, -3)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "a", "b", "expected"), VALUES, ids=[v[0] for v in VALUES])
def test_value_instructions(text, a, b, expected):
    lanes = play(text, a=a, b=b)
    assert lanes.registers["d"].view(np.uint32).tolist() == expected.tolist()


def f64(*values):
    return np.array(values, np.float64).view(np.uint64)


_TINY, _ULP, _MOST = 2.0**-60, 2.0**-52, float(np.finfo(np.float64).max)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("rn", (1, -1, 1, np.inf, 0.0)),
        ("rz", (1, -1, 1 - _ULP / 2, _MOST, 0.0)),
        ("rm", (1, -1 - _ULP, 1 - _ULP / 2, _MOST, -0.0)),
        ("rp", (1 + _ULP, -1, 1, np.inf, 0.0)),
    ],
)
def test_fused_doubles_round_once_as_they_are_told(mode, expected):
    a, b = f64(1, -1, 1, 1e308, 1), f64(1, 1, 1, 10, 1)
    c = f64(_TINY, -_TINY, -_TINY, 0, -1)
    lanes = play(f"fma.{mode}.f64 d, a, b, c;", 5, a=a, b=b, c=c)
    assert lanes.registers["d"].tolist() == f64(*expected).tolist()


def test_fused_doubles_keep_what_a_product_alone_would_lose():
    x = f64(1 + 2.0**-30, np.inf, np.nan, -0.0)
    c = f64(-1 - 2.0**-29, -1, 1, -0.0)
    lanes = play("fma.rn.f64 d, a, b, c;", a=x, b=f64(1 + 2.0**-30, 1, 1, 1), c=c)
    found = lanes.registers["d"].view(np.float64)
    assert found[:2].tolist() == [_TINY, np.inf]
    assert np.isnan(found[2])
    assert found[3:].view(np.uint64).tolist() == f64(-0.0).tolist()


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_fused_doubles_are_what_fractions_say(mode):
    """Sums that cancel, ties, and what Philox multiplies: each as exact numbers round."""
    draw, n = np.random.default_rng(3), 400
    wild = [draw.standard_normal(n) * 2.0 ** draw.integers(-40, 40, n) for _ in range(3)]
    near = -(wild[0] * wild[1]) * (1 + draw.integers(-3, 4, n) * _ULP)
    ties = [draw.integers(-9, 9, n) * scale for scale in (1.0, _ULP / 2, 1.0)]
    words = 2.0**84 + draw.integers(0, 2**32, n) * 2.0**32, np.full(n, 0.75 + 2.0**-32)
    for a, b, c in (wild, (*wild[:2], near), ties, (*words, np.full(n, 2.0**82 - 2.0**52))):
        lanes = play(f"fma.{mode}.f64 d, a, b, c;", n, a=f64(*a), b=f64(*b), c=f64(*c))
        right = [ptx_values._fused(*map(float, given), mode) for given in zip(a, b, c, strict=True)]
        assert lanes.registers["d"].tolist() == f64(*right).tolist()


def test_predicates_select_lanes():
    lanes = play(
        ".reg .pred p, q; setp.lt.s32 p|q, a, 0; @p mov.u32 d, 1; @!p mov.u32 d, 2;"
        "selp.b32 e, 10, 20, q;",
        a=u32(-1, 1, -5, 0),
    )
    assert lanes.registers["d"].tolist() == [1, 2, 1, 2]
    assert lanes.registers["e"].tolist() == [20, 10, 20, 10]


def test_a_vote_is_of_32_neighbours():
    text = """{.reg .pred p, any, all; setp.ne.u32 p, a, 0;
        vote.sync.any.pred any, p, 0xffffffff; vote.sync.all.pred all, !p, 0xffffffff;
        selp.b32 d, 1, 0, any; selp.b32 e, 1, 0, all; }"""
    a = np.zeros(70, np.uint32)
    a[[40, 69]] = 1
    lanes = play(text, 70, a=a)
    assert lanes.registers["d"].tolist() == [0] * 32 + [1] * 38
    assert lanes.registers["e"].tolist() == [1] * 32 + [0] * 38


@pytest.mark.parametrize(
    ("vote", "reason"),
    [
        ("vote.sync.ballot.b32 d, p, 0xffffffff;", "only vote"),
        ("vote.sync.any.pred p, p, 1;", "some"),
    ],
)
def test_other_votes_are_refused(vote, reason):
    with pytest.raises(emulator.UnsupportedKernelError, match=reason):
        play(".reg .pred p; setp.ne.u32 p, a, 0; " + vote, a=u32(0, 1, 2, 3))


def test_lanes_that_branch_apart_meet_again():
    text = """{
        .reg .pred p;
        .reg .b32 n;
        mov.u32 n, 0;
        LOOP:
        setp.eq.u32 p, a, 1;
        @p bra DONE;
        .reg .b32 low; .reg .pred odd;
        and.b32 low, a, 1;
        setp.eq.u32 odd, low, 1;
        @odd bra ODD;
        shr.u32 a, a, 1;
        bra NEXT;
        ODD:
        mad.lo.u32 a, a, 3, 1;
        NEXT:
        add.u32 n, n, 1;
        bra LOOP;
        DONE:
        mov.u32 d, n;
    }"""
    assert _with_partition(text, u32(1, 6, 7, 27)).tolist() == [0, 8, 16, 111]


class _Launch:
    steps, explore = 0, False

    def count_steps(self, steps, partition, loc):
        self.steps += steps


class _Cta:
    launch = _Launch()


class _Partition:
    cta = _Cta()
    clock = types.MappingProxyType({0: 0})
    key = 0
    looks = idle = 0
    rests_at = 100_000
    timed = False


def _with_partition(text, a):
    lanes = ptx.Lanes(ptx.parse(text), len(a), _Partition(), PLACE)
    lanes.registers["a"] = a
    assert list(lanes.run()) == []
    return lanes.registers["d"]


def test_vectors_are_packed_and_unpacked():
    lanes = play("mov.b64 w, {a, b}; mov.b64 {lo, hi}, w;", a=u32(1, 2, 3, 4), b=u32(5, 6, 7, 8))
    assert lanes.registers["w"].dtype == np.uint64
    assert lanes.registers["w"][0] == 1 | 5 << 32
    assert lanes.registers["hi"].tolist() == [5, 6, 7, 8]


def test_two_floats_become_one_packed_register():
    lanes = play(
        "cvt.rn.bf16x2.f32 d, a, b; cvt.rn.f16x2.f32 e, a, b;",
        a=f32(1, 2, 3, 4),
        b=f32(0.5, -1, 7, 0),
    )
    high_first = torch.tensor([0.5, 1.0]).to(torch.bfloat16).view(torch.uint16).tolist()
    assert lanes.registers["d"][0] == high_first[0] | high_first[1] << 16
    assert lanes.registers["e"].view(np.float16).tolist() == [0.5, 1, -1, 2, 7, 3, 0, 4]


def test_scopes_labels_comments_and_register_ranges_are_read():
    code = ptx.parse(
        "{ // a comment\n .reg .b32 r<3>; /* more */ L: mov.u32 r0, {x, y}; @!p bra L; }"
    )
    assert [i.name for i in code.instructions] == ["mov.u32", "bra"]
    assert code.labels == {"L": 0}
    assert code.registers == {"r0": "b32", "r1": "b32", "r2": "b32"}
    assert code.instructions[0].operands == ("r0", "{x, y}")
    assert code.instructions[1].negated


@pytest.mark.parametrize(
    "text",
    [
        "vadd.s32.s32 d, a, b;",
        "add.f8 d, a, a;",
        "mov.u32 d, %envreg3;",
        "shfl.sync.bfly.b32 d, a, 1, 31, -1;",
        "add.s32 d, a;",
        "@p add.s32 d, a, a;",
        "@p st.release.gpu.global.b32 [a];",
    ],
)
def test_unknown_instruction_is_refused_with_its_text_and_line(text):
    with pytest.raises(emulator.UnsupportedKernelError) as caught:
        play(text, a=u32(1, 2, 3, 4), b=u32(1, 2, 3, 4))
    assert "unsupported inline PTX" in str(caught.value)
    assert "user.py:7" in str(caught.value)


def test_unknown_ptx_lists_what_is_not_understood():
    assert unknown_ptx("mov.u32 $0, 1; bar.sync 8, 256;") == []
    assert unknown_ptx("mov.u32 $0, 1; wgmma.fence.sync.aligned;") == ["wgmma.fence.sync.aligned"]


@triton.jit
def _asm_pairs(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    y = tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $1, $1;", "=r,r", [x], tl.bfloat16, True, 2
    )
    tl.store(out_ptr + at, y)


@triton.jit
def _asm_bytes(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    y = tl.inline_asm_elementwise("prmt.b32 $0, $1, $1, 0x0123;", "=r,r", [x], tl.int8, True, 4)
    tl.store(out_ptr + at, y)


@triton.jit
def _asm_two_results(x_ptr, a_ptr, b_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    a, b = tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.f32 p, $2, 0f00000000; selp.b32 $0, 1, 0, p; neg.f32 $1, $2; }",
        "=r,=f,f", [x], (tl.int32, tl.float32), True, 1,
    )  # fmt: skip
    tl.store(a_ptr + at, a)
    tl.store(b_ptr + at, b)


@triton.jit
def _asm_count_threads(out_ptr):
    tl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.s32 [$1], 1; mov.u32 $0, 0;", "=r,l", [out_ptr.to(tl.int64)],
        tl.int32, False, 1,
    )  # fmt: skip
    tl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;
        @p red.relaxed.gpu.global.add.s32 [$1+4], 1; mov.u32 $0, 0; }""",
        "=r,l", [out_ptr.to(tl.int64)], tl.int32, False, 1,
    )  # fmt: skip


@triton.jit
def _asm_clock(out_ptr):
    start = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], tl.int64, False, 1)
    tl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .b64 t;
        AGAIN: mov.u64 t, %globaltimer; setp.lt.s64 p, t, $1; @p bra AGAIN; mov.u32 $0, 0; }""",
        "=r,l", [start + 1000000], tl.int32, False, 1,
    )  # fmt: skip
    end = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], tl.int64, False, 1)
    tl.store(out_ptr, end - start)


def test_packed_elements():
    x = torch.randn(64, dtype=torch.bfloat16)
    out = torch.zeros_like(x)
    with emulator.run():
        _asm_pairs[(1,)](x, out, 64)
    torch.testing.assert_close(out, (x.float() * x.float() + x.float()).to(torch.bfloat16))


def test_packed_bytes_keep_their_order():
    x = torch.arange(64, dtype=torch.int8)
    out = torch.zeros_like(x)
    with emulator.run():
        _asm_bytes[(1,)](x, out, 64)
    assert torch.equal(out, x.reshape(-1, 4).flip(1).reshape(-1))


def test_several_results():
    x = torch.randn(64)
    a, b = torch.zeros(64, dtype=torch.int32), torch.zeros(64)
    with emulator.run():
        _asm_two_results[(1,)](x, a, b, 64)
    assert torch.equal(a, (x > 0).int())
    assert torch.equal(b, -x)


def test_every_thread_runs_the_text_unless_one_is_elected():
    out = torch.zeros(2, dtype=torch.int32)
    with emulator.run():
        _asm_count_threads[(1,)](out, num_warps=4)
    assert out.tolist() == [128, 1]


def test_the_virtual_clock_moves_on():
    out = torch.zeros(1, dtype=torch.int64)
    with emulator.run():
        _asm_clock[(1,)](out)
    assert 1_000_000 <= out.item() < 100_000_000
