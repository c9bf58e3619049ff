"""NVIDIA's device library by table: values against torch, and what the table lacks."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from tileloom import emulator
from tileloom.emulator.libdevice import function_named

X = torch.linspace(-2.93, 3.07, 61, dtype=torch.float64)
ONE = {
    "lgamma": torch.lgamma, "erfc": torch.erfc, "erfcx": torch.special.erfcx, "log1p": torch.log1p,
    "erfinv": torch.erfinv, "normcdf": torch.special.ndtr, "normcdfinv": torch.special.ndtri,
    "erfcinv": lambda x: torch.erfinv(1 - x), "sinpi": lambda x: torch.sin(torch.pi * x),
    "cospi": lambda x: torch.cos(torch.pi * x), "j0": torch.special.bessel_j0,
    "cyl_bessel_i1": torch.special.i1, "round": torch.round,
    "logb": lambda x: torch.floor(torch.log2(x.abs())), "rcbrt": lambda x: 1 / np.cbrt(x.numpy()),
    "saturatef": lambda x: x.clamp(0, 1), "isfinited": torch.isfinite, "signbitd": torch.signbit,
    "drcp_rn": lambda x: 1 / x, "double2int_ru": torch.ceil, "float2ll_rd": torch.floor,
    "tgamma": lambda x: torch.exp(torch.lgamma(x)) * torch.where(
        (x < 0) & (torch.floor(x) % 2 != 0), -1.0, 1.0),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE)
def test_functions_of_one_number(name):
    with np.errstate(all="ignore"):
        said = function_named(f"__nv_{name}")(X.numpy())
    got = torch.as_tensor(np.asarray(said, np.float64))
    expected = torch.as_tensor(ONE[name](X)).double()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-9, equal_nan=True)


def test_functions_of_integers():
    words = np.array([0, 1, -1, 0x00F0, -(2**31)], np.int32)

    def said(name, *more):
        return np.asarray(function_named(f"__nv_{name}")(words, *more)).tolist()

    assert said("popc") == [0, 1, 32, 4, 1]
    assert said("clz") == [32, 31, 0, 24, 0]
    assert said("ffs") == [0, 1, 1, 5, 32]
    assert said("brev") == [0, -(2**31), -1, 0x0F000000, 1]
    assert said("mulhi", words) == [0, 0, 0, 0, 2**30]
    assert said("umulhi", words) == [0, 0, -2, 0, 2**30]
    assert said("uint2float_rn") == [0, 1, float(2**32), 240, float(2**31)]
    assert function_named("__nv_popcll")(words.astype(np.int64))[2] == 64
    assert function_named("__nv_float_as_int")(np.float32([1])).tolist() == [0x3F800000]


# Directed rounding of arithmetic, Bessel functions of any order, and instructions of bytes.
LACKS = re.compile(
    r"(f|d)(add|sub|mul|div|sqrt|rcp|maf?)_r[duz]|double2float_r[duz]|u?(int|ll)2(float|double)_r[duz]"
    r"|ull2(float|double)_r[duz]|[jy]nf?|byte_perm|u?r?hadd|u?sad|u?mul24|rcp64h|hiloint2double"
    r"|double2(hi|lo)int"
)


def test_what_the_table_lacks_is_known():
    names = set(re.findall(r'"__nv_(\w+)"', inspect.getsource(libdevice)))
    missing = {name for name in names if function_named(f"__nv_{name}") is None}
    assert len(names) > 300
    assert sorted(name for name in missing if not LACKS.fullmatch(name)) == []


@triton.jit
def _library(x_ptr, out_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.store(out_ptr + tl.arange(0, N), libdevice.lgamma(x) + libdevice.ilogb(x))


@triton.jit
def _rounds_down(x_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.store(x_ptr + tl.arange(0, N), libdevice.add_rd(x, x))


def test_a_kernel_calls_the_library_and_what_it_lacks_is_refused_by_name():
    x, out = torch.linspace(0.1, 9, 64), torch.zeros(64)
    with emulator.run():
        _library[(1,)](x, out, 64)
        torch.testing.assert_close(out, torch.lgamma(x) + torch.floor(torch.log2(x)))
        with pytest.raises(emulator.UnsupportedKernelError, match="'__nv_fadd_rd' is not in the t"):
            _rounds_down[(1,)](x, 64)
