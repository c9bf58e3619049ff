"""A deadlock's hint says what each barrier that somebody waits for lacks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from triton.experimental.gluon import language as gl

from tests.emulator import support
from tileloom import emulator

EXPECT = "mbarrier.expect(full.index(slot), a_desc.block_type.nbytes + b_desc.block_type.nbytes"
FAULTS = {
    "expects more bytes": (
        "specialised_gemm", EXPECT, EXPECT + " + 64",
        "hint mbarrier full[0] expects 64 bytes that no copy brings: mbarrier.expect takes the "
        "bytes of the copies that signal it, and a masked one brings none; mbarrier empty[0] lacks "
        "1 of the 1 arrivals of a phase (of a fresh mbarrier, a wait for parity 1 passes)",
    ),
    "expects fewer bytes": (
        "specialised_gemm", EXPECT, EXPECT + " - 64",
        "hint the copies bring 64 bytes more to mbarrier full[0] than mbarrier.expect says: before "
        "them, once for all of a phase",
    ),
    "wrong parity": (
        "specialised_gemm", "mbarrier.wait(empty.index(slot), phase ^ 1)",
        "mbarrier.wait(empty.index(slot), phase)",
        "mbarrier empty[0] lacks 1 of the 1 arrivals of a phase (of a fresh mbarrier, a wait for "
        "parity 1 passes)",
    ),
    "too few arrivals": (
        "shared_exchange", "mbarrier.init(free.index(i), count=1)",
        "mbarrier.init(free.index(i), count=2)",
        "mbarrier free[0] lacks 1 of the 2 arrivals of a phase\n",
    ),
    "too few arrivals, in PTX": (
        "ptx_mbarriers", "make(free.index(i), 128)", "make(free.index(i), 129)",
        "mbarrier ready[0] lacks 128 of the 128 arrivals of a phase; nobody that is left writes "
        "what a loop reads again and again",
    ),
    "named barrier": (
        "named_barriers", "named_barrier_sync(8 + WG, 256)", "named_barrier_sync(10 + WG, 256)",
        "named barrier 11 lacks 128 of 256 threads: those that come must name this number and "
        "this count",
    ),
    "spinning": (
        "flag_chain", "    signal(flags + pid)\n", "",
        "hint nobody that is left writes what a loop reads again and again",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_hint_of_a_deadlock(name, tmp_path):
    case, old, new, hint = FAULTS[name]
    if case == "ptx_mbarriers" and not hasattr(gl, "inline_asm"):
        pytest.skip("gl.inline_asm comes with Triton 3.9")
    module = support.planted(SimpleNamespace(id=name, case=case, old=old, new=new), tmp_path)
    with pytest.raises(emulator.DeadlockError) as caught, emulator.run():
        module.main()
    assert hint in str(caught.value)
