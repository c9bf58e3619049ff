"""The reader takes what four Triton releases print, and refuses what it does not know."""

from __future__ import annotations

import pytest

from tests.emulator import make_dumps, support
from tileloom import emulator
from tileloom.emulator import capture
from tileloom.emulator.ir import parse_type, split_top, walk
from tileloom.emulator.irtext import read_module
from tileloom.emulator.lower import Program, known_ops

VERSIONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
KERNELS = {"pipelined_gemm": "pipelined_gemm", "named_barriers": "attention",
           "copied_gemm": "copied_gemm", "split_sum": "split_sum",
           "cluster_gemm": "cluster_gemm"}  # fmt: skip
DUMPS = [(v, c) for v in VERSIONS for c in KERNELS if (v, c) != ("3.6.0", "cluster_gemm")]


def dump(version, case):
    level = make_dumps.DUMPED[case]
    return (make_dumps.DUMPS / version / f"{KERNELS[case]}.{level}.mlir").read_text()


@pytest.mark.parametrize(("version", "case"), DUMPS)
def test_golden_dumps_run_to_the_right_result(version, case, monkeypatch):
    level = make_dumps.DUMPED[case]
    program = Program(read_module(dump(version, case)), level=level)
    program.is_gluon = case != "split_sum"
    monkeypatch.setattr(capture, "_program", lambda text: program)
    with emulator.run(level=level, schedule="random", seed=2) as run:
        result, expected = support.load_case(case).main()
    assert support.close(result, expected)
    assert run.reports == []


@pytest.mark.parametrize(("version", "case"), DUMPS)
def test_every_operation_of_a_dump_is_known_and_has_a_line(version, case):
    known = set(known_ops())
    module = read_module(dump(version, case))
    ops = [op for op in walk(module.kernel.blocks) if op.name != "arith.constant"]
    assert {op.name for op in ops} <= known
    assert sum(op.loc.line > 0 for op in ops) > 0.85 * len(ops)


HEADER = """#loc = loc(unknown)
#loc1 = loc("user.py":12:4)
module attributes {"ttg.num-warps" = 4 : i32} {
  tt.func public @k(%x: !tt.ptr<f32> {tt.divisibility = 16 : i32} loc("x"(#loc1))) {
"""
FOOTER = """    tt.return loc(#loc)
  } loc(#loc)
} loc(#loc)
"""


def module_with(line):
    return read_module(HEADER + f"    {line} loc(#loc1)\n" + FOOTER)


class _Partition:
    """As much of a partition as an operation asks for before it runs."""


def run_line(line):
    program = Program(module_with(line))
    frame = [_Partition()] + [0] * program.module.kernel.slots
    program.module.kernel.blocks[0].ops[0].run(frame)


def test_unknown_operation_is_refused_where_it_stands():
    with pytest.raises(emulator.UnsupportedKernelError) as caught:
        run_line("ttng.tmem_alloc : () -> !ttg.memdesc<128x128xf32, #tmem>")
    assert "operation 'ttng.tmem_alloc' is one of Blackwell's" in str(caught.value)
    assert "user.py:12" in str(caught.value)


def test_unknown_attribute_is_refused():
    with pytest.raises(
        emulator.UnsupportedKernelError, match="attribute 'sparsity' that is not known"
    ):
        run_line("%0 = tt.load %x {sparsity = 2 : i32} : !tt.ptr<f32>")


def test_unknown_word_is_refused():
    with pytest.raises(
        emulator.UnsupportedKernelError, match="word 'compressed' that is not known"
    ):
        run_line("%0 = tt.load %x compressed : !tt.ptr<f32>")


def test_unreadable_line_names_itself():
    with pytest.raises(emulator.IRSyntaxError) as caught:
        module_with("%0 = (this is no operation)")
    assert "line 5 of the IR: cannot read this operation: %0 = (this is no operation)" in str(
        caught.value
    )
    assert "user.py:12" in str(caught.value)


def test_value_without_a_definition_names_itself():
    with pytest.raises(
        emulator.IRSyntaxError, match="value %nobody is not defined before this line"
    ):
        module_with("%0 = arith.addi %nobody, %nobody : i32")


def test_a_branch_never_taken_is_no_error():
    text = (
        HEADER
        + (
            "    %false = arith.constant false loc(#loc)\n"
            "    scf.if %false {\n"
            "      ttng.tmem_alloc : () -> !ttg.memdesc<128x128xf32, #tmem> loc(#loc1)\n"
            "    } loc(#loc)\n"
        )
        + FOOTER
    )
    program = Program(read_module(text))
    frame = [None] * program.module.kernel.slots
    constant, branch, _ = program.module.kernel.blocks[0].ops
    constant.run(frame)
    assert list(branch.run(frame)) == []


@pytest.mark.parametrize(
    ("text", "kind", "elem", "shape", "pointee"),
    [
        ("i32", "scalar", "i32", (), ""),
        ("tensor<64x32xbf16, #mma>", "tensor", "bf16", (64, 32), ""),
        ("tensor<128x!tt.ptr<f16>, #b>", "tensor", "ptr", (128,), "f16"),
        ("!tt.ptr<f32, 1>", "ptr", "ptr", (), "f32"),
        ("!tt.tensordesc<tensor<1x1x64x64xbf16, #shared>>", "desc", "bf16", (1, 1, 64, 64), ""),
        ("!tt.tensordesc<64x64xf8E4M3FN, #shared>", "desc", "f8E4M3FN", (64, 64), ""),
        ("!ttg.memdesc<2x64x64xbf16, #shared, #smem, mutable>", "memdesc", "bf16", (2, 64, 64), ""),
        ("!ttg.async.token", "token", "!ttg.async.token", (), ""),
    ],
)
def test_types(text, kind, elem, shape, pointee):
    found = parse_type(text)
    assert (found.kind, found.elem, found.shape, found.pointee) == (kind, elem, shape, pointee)


def test_split_top_minds_brackets_arrows_and_strings():
    assert split_top('a<b, c>, (d -> e), "f, g", h') == ["a<b, c>", "(d -> e)", '"f, g"', "h"]


def test_locations_keep_names_and_call_sites():
    text = (
        '#loc = loc("k.py":1:0)\n#loc1 = loc("k.py":9:2)\n#loc2 = loc("v"(#loc1))\n'
        "#loc3 = loc(callsite(#loc2 at #loc4))\n" + '#loc4 = loc("k.py":20:6)\n'
        "module {\n  tt.func public @k() {\n    %c = arith.constant 1 : i32 loc(#loc3)\n"
        "    tt.return loc(#loc)\n  } loc(#loc)\n} loc(#loc)\n"
    )
    loc = read_module(text).kernel.blocks[0].ops[0].loc
    assert (loc.file, loc.line, loc.name) == ("k.py", 9, "v")
    assert [place.line for place in loc.chain()] == [9, 20]
