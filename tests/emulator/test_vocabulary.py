"""The names in reports: buffers by their variable, functions as the kernel's file knows them."""

from __future__ import annotations

import pytest

from tests.emulator.support import load_text
from tileloom import emulator
from tileloom.emulator.ir import Loc
from tileloom.emulator.vocabulary import in_words_of, variable_of

KERNEL = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
{imports}


@gluon.jit
def allocate():
    return gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())


@gluon.jit
def wait_kernel():
    ready = allocate()
    mbarrier.wait(ready, 0)
"""


@pytest.mark.parametrize(
    ("imports", "name"),
    [
        ("", "mbarrier.init"),
        ("from tileloom.cpasync import TensorMap  # not gluon", "mbarrier.init"),
        ("from tileloom.cpasync import gluon as cp", "mbarrier_init"),
        ("from tileloom.cpasync.gluon import mbarrier_init", "mbarrier_init"),
        ("import tileloom.cpasync.gluon", "mbarrier_init"),
    ],
)
def test_a_barrier_by_its_variable_and_a_function_by_its_import(imports, name, tmp_path):
    module = load_text("waits", KERNEL.format(imports=imports), tmp_path)
    with emulator.run(collect=True) as run:
        module.wait_kernel[(1,)](num_warps=4)
    assert run.errors[0].message == f"mbarrier ready is used before {name}"
    assert run.errors[0].at.what == name.replace("init", "wait")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fence_async_shared() after the last mbarrier.init",
         "fence_barrier_init() after the last mbarrier_init"),
        ("tma.store_wait(0) before the end", "tma_store_wait(0) before the end"),
        ("pair every bar.arrive with a bar.sync",
         "pair every named_barrier_arrive with a named_barrier_sync"),
        ("the store needs cp.async.bulk.wait_group, or the end",
         "the store needs tma_store_wait(0, read=False), or the end"),
        ("async_copy.wait_group() must come first", "cp_async_wait() must come first"),
        ("shared buffer my_mbarrier.initial", "shared buffer my_mbarrier.initial"),
    ],
)  # fmt: skip
def test_words(text, words, tmp_path):
    (tmp_path / "kernel.py").write_text("from tileloom.cpasync import gluon\n")
    (tmp_path / "plain.py").write_text("# tileloom.cpasync.gluon\n")
    assert in_words_of(Loc(str(tmp_path / "kernel.py"), 1), text) == words
    assert in_words_of(Loc(str(tmp_path / "plain.py"), 1), text) == text


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        (["return allocate()", "full = helper(2)"], "full"),
        (["return allocate()", "full: gl.tensor = helper(x=2)"], "full"),
        (["return allocate()", "return helper()", "done = outer()"], "done"),
        (["return allocate()", "use(helper())", "done = outer()"], "smem"),
        (["return allocate()", "a, b = helper()"], "smem"),
        (["return allocate()", "if a == b: helper()"], "smem"),
        (["return allocate()"], "smem"),
    ],
)
def test_variable_of_who_called(lines, name, tmp_path):
    path = tmp_path / "kernel.py"
    path.write_text("\n".join(lines))
    loc = None
    for number in range(len(lines), 0, -1):
        loc = Loc(str(path), number, caller=loc)
    assert variable_of(loc, "smem") == name
    assert variable_of(Loc(str(path), 1, name="tile", caller=loc), "smem") == "tile"
