"""Mutants: which a source has, who notices them, and what `tileloom check --mutate` says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.emulator import support
from tileloom.cli.main import main
from tileloom.emulator.findings import settings
from tileloom.emulator.judge import Judge
from tileloom.emulator.mutate import functions_of, mutants
from tileloom.emulator.synchronising import Helpers

CASE = Path(support.CASES)
WAYS = settings(["late", "random"], [0], ["ttgir"])
ONE = ["--schedule", "late", "--level", "ttgir", "--mutate"]


def changes_of(case):
    return mutants((CASE / f"{case}.py").read_text())


def test_mutants_cover_every_synchronising_statement():
    found = changes_of("specialised_gemm")
    assert len(found) == len({m.text for m in found})
    changes = {m.change for m in found}
    assert changes >= {
        "removed wait", "removed arrive", "removed expect", "removed init",
        "removed fence_async_shared",
        "removed store_wait", "phase inverted", "predicate removed", "count of init one higher",
        "count of arrive one higher", "store_wait leaves one more in flight",
        "warpgroup_mma_wait leaves one more in flight", "half the bytes expected",
        "arrive before the warpgroup_mma_wait above it",
    }  # fmt: skip
    assert {"ld.acquire made relaxed", "st.release made relaxed"} <= {
        m.change for m in changes_of("flag_chain")
    }
    assert "memory order made relaxed" in {m.change for m in changes_of("split_sum")}
    assert "half the arrivals expected" in {m.change for m in changes_of("named_barriers")}
    assert {m.function for m in found} == {"load_tiles", "multiply_tiles", "specialised_gemm"}


def test_mutants_under_the_names_of_cpasync():
    """The names that `tileloom.cpasync.gluon` gives to Gluon's functions are damaged alike."""
    plain = """
@gluon.jit
def kernel(full, desc):
    mbarrier.init(full, count=4)
    mbarrier.invalidate(full)
    mbarrier.expect(full, desc.block_type.nbytes)
    mbarrier.wait(full, 0)
    mbarrier.arrive(full, count=2)
    async_copy.commit_group()
    async_copy.wait_group(0)
    tma.store_wait(0)
"""
    names = {
        "mbarrier.init": "cp.mbarrier_init", "mbarrier.invalidate": "cp.mbarrier_invalidate",
        "mbarrier.expect": "cp.arrive_and_expect_tx", "mbarrier.wait": "cp.mbarrier_wait",
        "mbarrier.arrive": "cp.mbarrier_arrive", "async_copy.commit_group": "cp.cp_async_commit",
        "async_copy.wait_group": "cp.cp_async_wait", "tma.store_wait": "cp.tma_store_wait",
    }  # fmt: skip
    named = plain
    for old, new in names.items():
        named = named.replace(old, new)
    assert [m.line for m in mutants(named)] == [m.line for m in mutants(plain)]
    assert {m.line for m in mutants(plain)} == set(range(4, 12))
    changes = {m.change for m in mutants(named)}
    assert changes >= {
        "phase inverted", "half the bytes expected", "half the arrivals expected",
        "tma_store_wait leaves one more in flight", "cp_async_wait leaves one more in flight",
        "removed mbarrier_wait", "count of mbarrier_arrive one higher",
    }  # fmt: skip
    only = "@gluon.jit\ndef kernel(b):\n"
    for name in (
        "fence_barrier_init", "fence_proxy_async", "mbarrier_arrive_each_thread",
        "mbarrier_cp_async_arrive", "mbarrier_cp_async_arrive_noinc",
    ):  # fmt: skip
        assert [m.change for m in mutants(f"{only}    cp.{name}(b)\n")] == [f"removed {name}"]


def test_mutants_leave_the_rest_of_the_file_alone():
    text = (CASE / "shared_exchange.py").read_text()
    for mutant in changes_of("shared_exchange"):
        before, after = text.splitlines(), mutant.text.splitlines()
        differing = [i for i, (a, b) in enumerate(zip(before, after), 1) if a != b]
        swapped = "above it" in mutant.change
        assert differing == ([mutant.line - 1, mutant.line] if swapped else [mutant.line])
        assert len(before) == len(after)


HELPERS = """
@gluon.jit
def hand_on(bar):
    \"\"\"Only hands on.\"\"\"
    arrive_each_thread(bar)

@gluon.jit
def meet(bar):
    hand_on(bar)
    mbarrier.wait(bar, 0)

@gluon.jit
def works(bar, x):
    x.store(1)
    mbarrier.wait(bar, 0)

def not_a_kernel(bar):
    mbarrier.wait(bar, 0)
"""
CALLER = """
@gluon.jit
def kernel(x, bar):
    y = x.load()  # größer: columns count bytes
    hand_on(bar)
    meet(bar); works(bar, x); not_a_kernel(bar)
"""


def test_helpers_that_only_synchronise_count_where_they_are_called():
    helpers = Helpers.of([CALLER, HELPERS])
    assert (helpers.releases, helpers.others) == ({"hand_on"}, {"meet"})
    assert helpers.working == {"works", "kernel"}
    found = mutants(CALLER, helpers)
    assert [(m.line, m.change) for m in found] == [
        (5, "hand_on before the load above it"), (5, "removed hand_on"), (6, "removed meet"),
    ]  # fmt: skip
    assert "    pass; works(bar, x)" in found[2].text
    assert "    hand_on(bar)  # größer: columns count bytes\n    y = x.load()\n" in found[0].text


WRAPPED = """
@gluon.constexpr_function
def _ptx(operation, threads):
    \"\"\"Nothing here waits.\"\"\"
    return f"bar.{operation} 8, {threads}; mov.u32 $0, 0;"

@gluon.jit
def release(empty, slot, NAMED: gl.constexpr):
    if NAMED:
        text: gl.constexpr = _ptx("arrive", 160)
        gl.inline_asm_elementwise(text, "=r,r", [slot], gl.int32, False, 1)
    else:
        arrive_each_thread(empty.index(slot // 2))

@gluon.jit
def release_all(empty, NAMED: gl.constexpr):
    for slot in gl.static_range(2):
        release(empty, slot, NAMED)

@gluon.jit
def load_acquire(flag):
    return gl.inline_asm_elementwise("ld.acquire.gpu.b32 $0, [$1];", "=r,l", [flag], gl.int32,
                                     False, 1)

@gluon.jit
def announce(flag, value):
    thread_barrier()
    gl.inline_asm_elementwise("st.release.gpu.b32 [$1], $2;", "=r,l,r", [flag, value], gl.int32,
                              False, 1)

@gluon.jit
def turn(flag, step, seen):
    if step > 0:
        while seen < step:
            seen = load_acquire(flag)
    return seen

@gluon.jit
def place(step):
    return step // 2

@gluon.jit
def copy(x, y):
    y.store(x.load())
"""
WRAPPING = """
from wrapped import release_all as let_go

@gluon.jit
def kernel(x, y, empty, flag, STEPS: gl.constexpr):
    seen = 0
    for step in range(STEPS):
        seen = turn(flag, step, seen)
        other = turn(flag, step, seen)
        copy(x, y)
        let_go(empty, True)
        place(step)
        gl.store(flag, other)
        announce(flag, step)
        value = x.load()
        announce(flag, value)
"""


def test_synchronisation_is_found_however_helpers_wrap_it():
    """In branches and loops, as PTX, nested, under another name, with a result."""
    helpers = Helpers.of([WRAPPING, WRAPPED])
    assert helpers.releases == {"release", "release_all", "let_go", "announce"}
    assert helpers.others == {"load_acquire", "turn"}
    assert helpers.working == {"copy", "kernel"}
    found = [(m.line, m.change) for m in mutants(WRAPPING, helpers)]
    assert found == [
        (8, "removed turn"),  # `seen` has a value before; `other` has none
        (11, "let_go before the copy above it"), (11, "removed let_go"),
        (14, "announce before the store above it"), (14, "removed announce"),
        (16, "removed announce"),  # not before the load, whose value it announces
    ]  # fmt: skip
    inside = [(m.function, m.change) for m in mutants(WRAPPED)]
    assert inside == [
        ("release", "removed inline_asm_elementwise"), ("release", "removed arrive_each_thread"),
        ("release_all", "removed release"),
        ("load_acquire", "ld.acquire made relaxed"), ("announce", "removed thread_barrier"),
        ("announce", "inline_asm_elementwise before the thread_barrier above it"),
        ("announce", "removed inline_asm_elementwise"),
        ("announce", "st.release made relaxed"),
        ("turn", "removed the loop that polls"),
    ]  # fmt: skip


def test_helpers_are_found_where_the_kernels_import_them(driver):
    """And in what these import: not executed, and whether or not they are damaged themselves."""
    library = driver.with_name("borrowed_kernels.py")
    text = library.read_text().replace("mbarrier.wait(", "waiting.until(")
    assert text.count("waiting.until(") == 2
    library.write_text(f"from deeper import waiting\n{text}")
    (driver.parent / "deeper").mkdir()
    (driver.parent / "deeper" / "__init__.py").write_text("raise SystemExit\n")
    helper = "@gluon.jit\ndef {0}(bar, phase):\n    if phase >= 0:\n        {1}(bar, phase)\n"
    for name, text in (
        ("waiting", "from .still import wait_for\n" + helper.format("until", "wait_for")),
        ("still", helper.format("wait_for", "mbarrier.wait")),
    ):
        (driver.parent / "deeper" / f"{name}.py").write_text(text)
    changes = {m.change for m in Judge(driver, WAYS, [library]).mutants()[library]}
    assert "removed until" in changes


PTX = '''
@gluon.constexpr_function
def text_of(test):
    return f"""
ld.acquire.sys.global.b32 v, [$1]; {test} größer
fence.proxy.async.global; mov.b32 $0, v;
"""

@gluon.jit
def kernel(flag):
    """Says fence.proxy.async; and means it."""
    gl.inline_asm_elementwise(text_of("no"), "=r,l", [flag], gl.int32, False, 1)

def not_of_a_kernel():
    return "st.release.sys.global.b32 [$1], $2;"
'''


def test_ptx_is_damaged_where_its_text_stands():
    found = mutants(PTX)
    assert [(m.line, m.change, m.function) for m in found] == [
        (5, "ld.acquire made relaxed", "text_of"),
        (6, "removed fence.proxy.async.global", "text_of"),
        (12, "removed inline_asm_elementwise", "kernel"),
    ]  # fmt: skip
    assert found[0].source == "ld.acquire.sys.global.b32 v, [$1]; {test} größer"
    assert found[0].text == PTX.replace("ld.acquire", "ld.relaxed")
    assert found[1].text == PTX.replace("fence.proxy.async.global;", "")
    assert functions_of("kernel", [PTX]) == {"kernel", "text_of"}


@pytest.mark.parametrize("case", ["shared_exchange", "flag_chain", "split_sum"])
def test_every_mutant_of_a_case_is_reported(case):
    verdicts = list(Judge(CASE / f"{case}.py", WAYS).verdicts())
    assert len(verdicts) >= 1
    unreported = [(v.mutant.line, v.mutant.change) for v in verdicts if v.outcome != "reported"]
    assert unreported == []
    assert {v.setting for v in verdicts} <= set(WAYS)


@pytest.mark.full
@pytest.mark.parametrize(
    "case", ["pipelined_gemm", "specialised_gemm", "copied_gemm", "named_barriers"]
)
def test_every_mutant_of_a_large_case_is_noticed_or_harmless(case):
    verdicts = list(Judge(CASE / f"{case}.py", WAYS).verdicts())
    assert [(v.mutant.line, v.mutant.change) for v in verdicts if not v.noticed] == []
    assert sum(v.outcome == "reported" for v in verdicts) > 0.8 * len(verdicts)


@pytest.fixture
def driver(tmp_path):
    """A file that borrows its kernel from a module beside it."""
    text = (CASE / "shared_exchange.py").read_text()
    cut = text.index("def main(")
    (tmp_path / "borrowed_kernels.py").write_text(text[:cut])
    called = text[cut:].replace("shared_exchange[", "borrowed_kernels.shared_exchange[")
    path = tmp_path / "driver.py"
    path.write_text(f"import borrowed_kernels, torch\n{called}CASES = {{'one': main}}\n")
    return path


def test_mutants_of_a_module_that_the_file_imports(driver, capsys):
    library = driver.with_name("borrowed_kernels.py")
    assert main(["check", str(driver), *ONE, "--kernels", str(library), "--line", "14"]) == 0
    out = capsys.readouterr().out
    assert "borrowed_kernels.py:14  removed wait" in out
    assert "by case one   (schedule late, level ttgir)" in out
    assert out.strip().endswith("2 mutants, 0 that nobody notices")


def test_verdicts_as_json(driver, capsys):
    library = str(driver.with_name("borrowed_kernels.py"))
    options = [*ONE, "--kernels", library, "--line", "26", "--json"]
    assert main(["check", str(driver), *options]) == 0
    mutants = json.loads(capsys.readouterr().out)["mutants"]
    assert [m["mutation"] for m in mutants] == [
        "arrive before the load above it", "count of arrive one higher", "removed arrive",
    ]  # fmt: skip
    assert mutants[0] == {
        "file": library, "line": 26, "function": "drain", "outcome": "reported",
        "statement": "mbarrier.arrive(free.index(i % 2), count=1)",
        "mutation": "arrive before the load above it", "detail": mutants[0]["detail"],
        "schedule": "late", "seed": 0, "level": "ttgir", "case": "one", "harmless": None,
    }  # fmt: skip
    assert mutants[0]["detail"].startswith("race at borrowed_kernels.py:")


def test_kernels_that_the_file_does_not_import_are_refused(driver, capsys):
    stray = CASE / "names.py"
    assert main(["check", str(driver), *ONE, "--kernels", str(stray)]) == 2
    assert "names.py is not a module that the checked file imports" in capsys.readouterr().err


def test_nothing_to_damage_is_an_error(driver, capsys):
    assert main(["check", str(driver), *ONE]) == 2
    assert "check: no statement of driver.py synchronises; there is" in capsys.readouterr().err
    library = str(driver.with_name("borrowed_kernels.py"))
    assert main(["check", str(driver), *ONE, "--kernels", library, "--line", "1"]) == 2
    said = capsys.readouterr().err
    assert "no statement of borrowed_kernels.py on line 1 synchronises; there is nothing" in said
    assert "Try: --kernels with the file that holds the kernels." in said


LONELY = """
import torch, triton, triton.language as tl

@triton.jit
def lonely(x_ptr):
    tl.atomic_add(x_ptr, 1, sem="release")MARK

def main():
    lonely[(1,)](torch.zeros(1, dtype=torch.int32))
"""


def test_an_unnoticed_mutant_fails_the_command_unless_it_is_marked(tmp_path, capsys):
    path = tmp_path / "lonely.py"
    path.write_text(LONELY.replace("MARK", ""))
    assert main(["check", str(path), *ONE]) == 1
    assert "UNNOTICED" in capsys.readouterr().out
    assert main(["check", str(path), *ONE, "--github"]) == 1
    assert capsys.readouterr().out.startswith(
        f"::error file={path},line=6,title=tileloom mutant::memory order made relaxed: nobody"
    )
    path.write_text(LONELY.replace("MARK", "  # tileloom: harmless(nobody reads x)"))
    assert main(["check", str(path), *ONE]) == 0
    assert "harmless: nobody reads x" in capsys.readouterr().out


def test_a_file_that_is_wrong_as_it_is_has_no_mutants(tmp_path, capsys):
    path = tmp_path / "lonely.py"
    path.write_text(LONELY.replace("MARK", "").replace("torch.zeros(1,", "torch.zeros(0,"))
    assert main(["check", str(path), *ONE]) == 1
    text = capsys.readouterr().err
    assert "is not correct as it is. Try: tileloom check without --mutate." in text
    assert "[out-of-bounds]" in text


TWO = (
    LONELY.replace("MARK", "")
    + """

@triton.jit
def helper(x_ptr):
    return tl.atomic_add(x_ptr, 1, sem="acquire")

@triton.jit
def noticed(x_ptr, out_ptr):
    tl.store(out_ptr, helper(x_ptr))
"""
)


def test_a_kernel_limits_what_is_damaged_and_what_counts(tmp_path, capsys):
    path = tmp_path / "lonely.py"
    path.write_text(TWO.replace("    lonely[(1,)]", "    noticed[(1,)](*torch.zeros(2, 1, "
                    "dtype=torch.int32))\n    lonely[(1,)]"))  # fmt: skip
    assert functions_of("noticed", [TWO]) == {"noticed", "helper"}
    judged = {
        m.function for m in next(iter(Judge(path, WAYS, kernel="noticed").mutants().values()))
    }
    assert judged == {"helper"}
    assert main(["check", f"{path}:lonely", *ONE]) == 1
    out = capsys.readouterr().out
    assert "lonely.py:6  memory order made relaxed" in out
    assert "1 mutants, 1 that nobody notices" in out
    assert main(["check", f"{path}:lonly", *ONE]) == 2
    said = capsys.readouterr().err
    assert f"lonely.py has no jitted function 'lonly' to damage. Try: {path}:lonely." in said


APART = """
import pathlib, torch, triton, triton.language as tl

@triton.jit
def counted(x_ptr):
    tl.atomic_add(x_ptr, 1)

@triton.jit
def other(x_ptr):
    tl.store(x_ptr, 2)

def play(kernel):
    x = torch.zeros(1, dtype=torch.int32)
    with open(pathlib.Path(PLACE) / kernel.__name__, "a") as file:
        file.write("played ")
    kernel[(1,)](x)
    assert int(x) == 1 + (kernel is other)

CASES = {"other": lambda: play(other), "counted": lambda: play(counted)}
"""


def test_a_mutant_runs_in_the_cases_that_have_its_statement(tmp_path):
    """The others compile to the same; they are played once, undamaged, under the first setting."""
    path = tmp_path / "apart.py"
    path.write_text(APART.replace("PLACE", repr(str(tmp_path))))
    verdicts = list(Judge(path, settings(["late", "eager"], [0], ["ttgir"])).verdicts())
    assert [(v.mutant.change, v.outcome) for v in verdicts] == [
        ("memory order made relaxed", "unnoticed")
    ]
    assert (tmp_path / "other").read_text().split() == ["played"]
    assert (tmp_path / "counted").read_text().split() == ["played"] * 3
