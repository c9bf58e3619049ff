"""The hint of a deadlock says what each barrier lacks, that of an arrival too many who is ahead."""

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


AHEAD = (
    "hint partition 'load_tiles' expects the next copies before those of this phase are there: "
    "before this statement, its wait for the slot to be empty may be missing or have the wrong "
    "parity\n"
)
EXCESS = {
    "no wait for empty": (
        "specialised_gemm", "            mbarrier.wait(empty.index(slot), phase ^ 1)\n", "",
        "full[0] gets 1 more arrival by mbarrier.expect while its phase 0 has all 1 and waits for "
        "bytes only\n", AHEAD,
    ),
    "an arrival beside expect": (
        "specialised_gemm", "            tma_load(a_desc",
        "            mbarrier.arrive(full.index(slot), count=1)\n            tma_load(a_desc",
        "full[0] gets 1 more arrival by mbarrier.arrive while its phase 0 has all 1 and waits for "
        "bytes only\n",
        "hint raise the count given to mbarrier.init, or let fewer threads or partitions arrive",
    ),
    "released by too many": (
        "specialised_gemm", "mbarrier.arrive(empty.index((count - 1) % STAGES), count=1)\n",
        "mbarrier.arrive(empty.index((count - 1) % STAGES), count=2)\n",
        "gets 2 more arrivals by mbarrier.arrive while its phase 2 lacks only 1 of 1\n",
        "hint raise the count given to mbarrier.init, or let fewer threads or partitions arrive",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXCESS)
def test_hint_of_an_arrival_too_many(name, tmp_path):
    case, old, new, message, hint = EXCESS[name]
    module = support.planted(SimpleNamespace(id=name, case=case, old=old, new=new), tmp_path)
    with pytest.raises(emulator.BarrierError) as caught, emulator.run():
        module.main()
    assert message in str(caught.value)
    assert hint in str(caught.value)
