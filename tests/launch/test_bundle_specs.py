"""What `specs_of` says of arguments of the wrong type; see test_bundle_build.py for right ones."""

from __future__ import annotations

import pytest
import torch

from tileloom.errors import OptionError
from tileloom.launch import Signature, specs_of

pytest.importorskip("triton")
TYPES = {"x": "*fp32", "y": "*fp32:16", "out": "*fp32", "n": "i32"}
GOOD = Signature(TYPES, {"BLOCK": 8})


def refusal(signatures, archs=("sm_90",)):
    from tests.launch.bundle_kernels import add_kernel

    with pytest.raises(OptionError) as caught:
        specs_of(add_kernel, signatures, archs)
    return str(caught.value)


@pytest.mark.parametrize(
    ("archs", "text"),
    [
        ("sm_90", "archs is 'sm_90'; it must be a list of names. Try: archs=['sm_90']."),
        (90, "archs is 90; it must be a list of names. Try: archs=['sm_90']."),
        ([90], "archs has 90, of type int; each must be a name. Try: archs=['sm_90']."),
    ],
)
def test_archs(archs, text):
    assert refusal([GOOD], archs) == f"bundle: {text}"


def test_signatures_are_a_list_of_signatures():
    assert refusal(GOOD) == (
        "bundle: signatures is a Signature; it must be a list of Signature. Try: [signature]."
    )
    assert refusal([TYPES]) == (
        "bundle: signatures has a dict; each must be a Signature. Try: Signature(types, constants)."
    )
    assert refusal(TYPES) == (
        "bundle: signatures is a dict; it must be a list of Signature. Try: "
        "[Signature(types, constants)]."
    )


@pytest.mark.parametrize(
    ("kind", "hint"),
    [
        ("*float32", "Did you mean '*fp32'?"),
        ("*bfloat16:16", "Did you mean '*bf16:16'?"),
        ("int64", "Did you mean 'i64'?"),
        ("tensordesc<float16[64, 64]>", "Did you mean 'tensordesc<fp16[64, 64]>'?"),
        (torch.bfloat16, "Try: '*bf16' for a tensor, 'bf16' for a number."),
        ("constexpr", "Try: one of these; a compile-time parameter stands in constants."),
        (7, "Try: one of these; a compile-time parameter stands in constants."),
    ],
)
def test_types(kind, hint):
    assert refusal([Signature({**TYPES, "x": kind}, {"BLOCK": 8})]) == (
        f"bundle: the type of x of add_kernel[0] is {kind!r}; it must be a text such as '*bf16' "
        "(a tensor), 'i32' or 'fp32' (a number), or 'tensordesc<bf16[64, 64]>'. " + hint
    )


@pytest.mark.parametrize("warps", [3, 0, 64, "4", True])
def test_warps(warps):
    assert refusal([Signature(TYPES, {"BLOCK": 8}, num_warps=warps)]) == (
        f"bundle: num_warps of add_kernel[0] is {warps!r}; Triton takes 1, 2, 4, 8, 16 or 32. "
        "Try: 4."
    )


def test_stages():
    assert "num_stages of add_kernel[0] is -1; it must be an integer from 0 on. Try: 3." in refusal(
        [Signature(TYPES, {"BLOCK": 8}, num_stages=-1)]
    )


@pytest.mark.parametrize("kind", ["*kfp32", "*fp8e4nv", "*i1", "*u64:16", "tensordesc<bf16[64]>"])
def test_types_that_are_right(kind):
    from tests.launch.bundle_kernels import add_kernel

    (spec,) = specs_of(add_kernel, [Signature({**TYPES, "x": kind}, {"BLOCK": 8})], ["sm_90"])
    assert spec.signature["x"] == kind.removesuffix(":16")
