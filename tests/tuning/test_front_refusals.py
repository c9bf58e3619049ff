"""Wrong uses of the decorators for kernels of one's own: one sentence each."""

from __future__ import annotations

import re

import pytest
import torch
import triton
import triton.language as tl
from tests.tuning.front_kernels import row_max, row_sum

from tileloom import tuning
from tileloom.errors import ArgumentError, OptionError
from tileloom.tuning import Config


@triton.jit
def plain_kernel(x, n, XBLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, XBLOCK), n)


X = torch.zeros(64)
NAMED = "those are x, n, XBLOCK. Try: one of these."
WRONG = {
    "a size that names no argument": (
        lambda: tuning.pointwise(sizes={"x": "m"})(plain_kernel),
        OptionError,
        f"tuning: sizes says that 'm' is the size of x, which is no argument of 'plain_kernel'; "
        f"{NAMED}",
    ),
    "a changed argument that is none": (
        lambda: tuning.pointwise(sizes={"x": "n"}, changed=["y"])(plain_kernel),
        OptionError,
        f"tuning: changed names 'y', which is no argument of 'plain_kernel'; {NAMED}",
    ),
    "no configs": (
        lambda: tuning.pointwise(sizes={"x": "n"}, configs=[]),
        OptionError,
        "tuning: the list of configs of pointwise is empty; it needs at least one. Try: "
        "configs=[tileloom.tuning.Config({'XBLOCK': 128})], or leave configs out.",
    ),
    "a config with other names": (
        lambda: tuning.pointwise(sizes={"x": "n"}, configs=[{"BLOCK": 64}])(plain_kernel),
        OptionError,
        "tuning: the config BLOCK: 64, num_warps: 4, num_stages: 3 sets BLOCK; configs of "
        "'plain_kernel' set XBLOCK, and may set XBLOCK. Try: these names.",
    ),
    "a config without a block": (
        lambda: tuning.pointwise(sizes={"x": "n"}, configs=[Config({})])(plain_kernel),
        OptionError,
        "tuning: the config num_warps: 4, num_stages: 3 does not set XBLOCK; configs of "
        "'plain_kernel' set XBLOCK, and may set XBLOCK. Try: these names.",
    ),
    "an unknown dimension": (
        lambda: tuning.reduction(sizes={"rows": "n"}),
        OptionError,
        "tuning: sizes of reduction names a dimension 'rows'; dimensions are x, y and z, and r or "
        "r0, r1 for those that are reduced. Try: sizes=dict(x='rows', r='cols').",
    ),
    "a reduced dimension of a pointwise kernel": (
        lambda: tuning.pointwise(sizes={"x": "n", "r": "n"}),
        OptionError,
        "tuning: sizes of pointwise has 'r', but such a kernel reduces nothing. Try: "
        "sizes=dict(x='n'), or the decorator tileloom.tuning.reduction.",
    ),
    "a reduction of nothing": (
        lambda: tuning.reduction(sizes={"x": "n"}),
        OptionError,
        "tuning: sizes of reduction has x; it must name the size of r, which is reduced. Try: "
        "sizes=dict(x='rows', r='cols').",
    ),
    "a constant for a size": (
        lambda: tuning.pointwise(sizes={"x": "XBLOCK"})(plain_kernel),
        OptionError,
        "tuning: sizes says that 'XBLOCK' is the size of x, but it is a constexpr of "
        "'plain_kernel'. Try: the argument that holds the size.",
    ),
    "an unknown hint": (
        lambda: tuning.reduction(sizes={"x": "n", "r": "n"}, hint="square"),
        OptionError,
        "tuning: hint of reduction is 'square'; it must be None or one of 'inner', 'outer', "
        "'outer_tiny'. Try: hint='inner'.",
    ),
    "a block that the kernel does not have": (
        lambda: tuning.reduction(sizes={"x": "n", "r": "n"})(plain_kernel),
        OptionError,
        "tuning: 'plain_kernel' has no R0_BLOCK, which its configs set. Try: "
        "R0_BLOCK: tl.constexpr among its parameters.",
    ),
    "no kernel": (
        lambda: tuning.pointwise(sizes={"x": "n"})(print),
        OptionError,
        "tuning: pointwise decorates a builtin_function_or_method; it must be a function made by "
        "triton.jit, whose parameters are given by position. Try: @triton.jit below it.",
    ),
    "no x": (
        lambda: tuning.pointwise(sizes={"y": "n"})(plain_kernel),
        OptionError,
        "tuning: sizes of 'plain_kernel' has y; it must name the size of x. Try: "
        "sizes=dict(x='rows', r='cols').",
    ),
    "words of generated code": (
        lambda: tuning.pointwise(sizes={"x": "n"}, triton_meta={}),
        OptionError,
        "tuning: pointwise is given sizes and triton_meta; sizes is for kernels of your own, the "
        "other is what generated code gives. Try: sizes, hint, configs, changed, zeroed, "
        "max_autotune, loads, refine.",
    ),
    "a size that is none": (
        lambda: row_sum(X, X, 4.0, 16),
        ArgumentError,
        "tuning: rows of 'row_sum' is 4.0; it is a size, an integer of at least 0. Try: "
        "rows=tensor.shape[0].",
    ),
    "an argument missing": (
        lambda: row_sum(X, X, 4),
        ArgumentError,
        "tuning: cols is missing in a launch of 'row_sum', which takes x, y, rows, cols. Try: "
        "these in order, compile-time arguments by name.",
    ),
    "an argument given twice": (
        lambda: row_sum(X, X, 4, 16, rows=4),
        ArgumentError,
        "tuning: rows is given twice in a launch of 'row_sum', which takes x, y, rows, cols. Try: "
        "these in order, compile-time arguments by name.",
    ),
    "too many arguments": (
        lambda: row_sum(X, X, 4, 16, 1),
        ArgumentError,
        "tuning: 5 arguments are given by position in a launch of 'row_sum', which takes x, y, "
        "rows, cols. Try: these in order, compile-time arguments by name.",
    ),
    "a block that the configs set": (
        lambda: row_sum(X, X, 4, 16, XBLOCK=32),
        ArgumentError,
        "tuning: XBLOCK is given, which the configs set, in a launch of 'row_sum', which takes x, "
        "y, rows, cols. Try: these in order, compile-time arguments by name.",
    ),
    "a hint that is a text": (
        lambda: tuning.Facts(reduction_hint="inner"),
        OptionError,
        "Facts: reduction_hint is 'inner'; it must be one of ReductionHint.INNER, "
        "ReductionHint.OUTER, ReductionHint.OUTER_TINY, ReductionHint.DEFAULT. Try: "
        "ReductionHint.DEFAULT.",
    ),
    "no arguments at all": (
        lambda: tuning.pointwise(),
        OptionError,
        "tuning: pointwise is given no sizes, and as a decorator of generated code there is "
        "missing a required argument: 'size_hints'. Try: "
        "@tileloom.tuning.pointwise(sizes=dict(x='n')), with the names of the arguments that are "
        "the sizes.",
    ),
    "an option misspelt": (
        lambda: tuning.reduction(size={"x": "rows"}),
        OptionError,
        "tuning: reduction is given no sizes, and as a decorator of generated code there is "
        "missing a required argument: 'size_hints'. Try: "
        "@tileloom.tuning.reduction(sizes=dict(x='rows', r='cols')), with the names of the "
        "arguments that are the sizes.",
    ),
    "no parentheses": (
        lambda: tuning.split_scan(print),
        OptionError,
        "tuning: split_scan is given no sizes, but <built-in function print>. Try: "
        "@tileloom.tuning.split_scan(sizes=dict(x='rows', r='cols')), with the names of the "
        "arguments that are the sizes.",
    ),
    "sizes that are a text": (
        lambda: tuning.pointwise(sizes="n"),
        OptionError,
        "tuning: sizes of pointwise is 'n'; it must be a dictionary from dimensions to the names "
        "of arguments. Try: sizes=dict(x='n').",
    ),
    "a size that is a number": (
        lambda: tuning.persistent_reduction(sizes={"x": 3}),
        OptionError,
        "tuning: sizes of persistent_reduction is {'x': 3}; it must be a dictionary from "
        "dimensions to the names of arguments. Try: sizes=dict(x='rows', r='cols').",
    ),
    "a scan with XBLOCK": (
        lambda: tuning.split_scan(sizes={"x": "rows", "r": "cols"})(row_sum.fn),
        OptionError,
        "tuning: 'row_sum' has XBLOCK, but a split scan gives each program blocks of one row. "
        "Try: leave XBLOCK out of its parameters, and take program_id(1) for the row.",
    ),
    "a grid": (
        lambda: row_sum[(1,)],
        OptionError,
        "tuning: 'row_sum' is given a grid, (1,), but its grid follows from its sizes. Try: "
        "row_sum(x, y, rows, cols), without one.",
    ),
    "candidates of nothing": (
        lambda: row_sum.candidates(),
        ArgumentError,
        "tuning: candidates of 'row_sum' is given nothing; it takes the sizes rows, cols by name. "
        "Try: candidates(rows=1024, cols=1024).",
    ),
    "candidates of other sizes": (
        lambda: row_sum.candidates(16, n=4),
        ArgumentError,
        "tuning: candidates of 'row_sum' is given 16, n=4; it takes the sizes rows, cols by name. "
        "Try: candidates(rows=1024, cols=1024).",
    ),
    "candidates of a size that is none": (
        lambda: row_sum.candidates(rows=4, cols="many"),
        ArgumentError,
        "tuning: cols of 'row_sum' is 'many'; it is a size, an integer of at least 0. Try: "
        "cols=tensor.shape[0].",
    ),
    "one config and no list": (
        lambda: tuning.pointwise(sizes={"x": "n"}, configs={"XBLOCK": 64}),
        OptionError,
        "tuning: configs of pointwise is {'XBLOCK': 64}; it must be a list of configs. Try: "
        "configs=[tileloom.tuning.Config({'XBLOCK': 128})], or leave configs out.",
    ),
    "a block that is no power of two": (
        lambda: tuning.pointwise(sizes={"x": "n"}, configs=[{"XBLOCK": 96}])(plain_kernel),
        OptionError,
        "tuning: the config XBLOCK: 96, num_warps: 4, num_stages: 3 sets XBLOCK to 96; a block of "
        "'plain_kernel' is a power of two. Try: XBLOCK=128.",
    ),
    "a block that is a text": (
        lambda: tuning.pointwise(sizes={"x": "n"}, configs=[{"XBLOCK": "64"}])(plain_kernel),
        OptionError,
        "tuning: the config XBLOCK: 64, num_warps: 4, num_stages: 3 sets XBLOCK to '64'; a block "
        "of 'plain_kernel' is a power of two. Try: XBLOCK=128.",
    ),
    "a part of a row that is held whole": (
        lambda: tuning.persistent_reduction(
            sizes={"x": "rows", "r": "cols"}, configs=[{"XBLOCK": 1, "R0_BLOCK": 256}]
        )(row_max.fn),
        OptionError,
        "tuning: the config XBLOCK: 1, R0_BLOCK: 256, num_warps: 4, num_stages: 3 sets R0_BLOCK, "
        "but a persistent reduction holds each row whole: it is the row's size rounded up. Try: "
        "leave it out of configs.",
    ),
    "a constant that is a list": (
        lambda: Config({"XBLOCK": [64]}),
        OptionError,
        "Config: XBLOCK is [64]; a compile-time argument is a Python number, a text, None, or "
        "another value that can be hashed. Try: Config({'XBLOCK': 128}).",
    ),
    "a name and no list": (
        lambda: tuning.pointwise(sizes={"x": "n"}, changed="x"),
        OptionError,
        "tuning: changed of pointwise is 'x'; it must be a list of names of arguments. Try: "
        "changed=['x'].",
    ),
    "loads that are a text": (
        lambda: tuning.pointwise(sizes={"x": "n"}, loads="many"),
        OptionError,
        "tuning: loads of pointwise is 'many'; it must be a number of loads, an integer of at "
        "least 0. Try: loads=2.",
    ),
    "a switch that is a text": (
        lambda: tuning.pointwise(sizes={"x": "n"}, refine="no"),
        OptionError,
        "tuning: refine of pointwise is 'no'; it must be True or False. Try: refine=True.",
    ),
    "an unknown argument": (
        lambda: row_sum(X, X, 4, 16, eps=1),
        ArgumentError,
        "tuning: eps is no argument in a launch of 'row_sum', which takes x, y, rows, cols. Try: "
        "these in order, compile-time arguments by name.",
    ),
}


@pytest.mark.parametrize(("make", "error", "text"), WRONG.values(), ids=WRONG)
def test_mistakes_get_a_sentence(make, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        make()
