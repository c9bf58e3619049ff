"""mbarriers by inline PTX, as `gl.inline_asm` of Triton 3.9 lets kernels write them.

A shared buffer given to inline PTX becomes an address: the number of the view, and a byte offset
that PTX may add to. Each thread that runs an instruction counts: 128 threads are 128 arrivals.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import numpy as np

from tileloom.emulator.barriers import Barrier
from tileloom.emulator.lower_barriers import barrier_of, invalidate, make_barrier, parity_of
from tileloom.emulator.machine import Wait
from tileloom.emulator.memory import View

if TYPE_CHECKING:
    from tileloom.emulator.ptx import Instruction, Lanes

_OFFSET_BITS = 16
_BYTES = 8
_MODIFIERS = frozenset({"shared", "shared::cta", "b64", "release", "acquire", "relaxed", "cta"})
_FORMS = (
    ["init"], ["inval"], ["arrive"], ["arrive", "expect_tx"], ["expect_tx"],
    ["try_wait", "parity"], ["test_wait", "parity"],
)  # fmt: skip


def unknown_form(parts: list[str]) -> str | None:
    """Say why an mbarrier instruction with these suffixes cannot be played; None if it can."""
    if [p for p in parts if p not in _MODIFIERS] in _FORMS:
        return None
    return "only init, inval, arrive, expect_tx, try_wait.parity and test_wait.parity are known"


def address_of(lanes: Lanes, view: View) -> int:
    """Return the address that inline PTX sees for a shared buffer."""
    addresses = lanes.partition.cta.addresses
    addresses.append(view)
    return len(addresses) << _OFFSET_BITS


def _view_at(lanes: Lanes, address: int, i: Instruction) -> View:
    addresses = lanes.partition.cta.addresses
    number, offset = address >> _OFFSET_BITS, address & ((1 << _OFFSET_BITS) - 1)
    if not 1 <= number <= len(addresses):
        raise lanes.fail("this is no address of a shared buffer", i)
    view = addresses[number - 1]
    at = view.key[0] + offset // _BYTES
    flat, init = view.buffer.data.reshape(-1), view.buffer.init.reshape(-1)
    if view.buffer.elem != "i64" or offset % _BYTES or at >= flat.size:
        raise lanes.fail(f"{view.name} has no mbarrier at byte {offset}", i)
    label = view.label if offset == 0 else f"{view.label}+{offset}"
    return View(view.buffer, flat[at : at + 1], init[at : at + 1], label)


def play(lanes: Lanes, i: Instruction, address: np.ndarray) -> Generator[Wait | None, None, None]:
    """Run one mbarrier instruction.

    Args:
        lanes: The threads.
        i: The instruction.
        address: What stands in its brackets, for each thread.
    """
    yield None
    partition = lanes.partition
    active = np.ones(lanes.count, np.bool_) if lanes.mask is None else lanes.mask
    (where,) = set(address[active].tolist())
    view = _view_at(lanes, where, i)
    threads = int(active.sum())
    verb = [p for p in i.parts[1:] if p not in _MODIFIERS]
    if verb == ["init"]:
        if threads > 1:
            partition.report(
                "barrier", f"mbarrier {view.name} is initialised by {threads} threads at once",
                lanes.loc, i.name, hint="let one thread do it: elect.sync, or %tid.x == 0",
            )  # fmt: skip
        make_barrier(partition, view, _number(lanes, i, 1), 1, lanes.loc)
        view.init[...] = True
        return
    if verb == ["inval"]:
        invalidate(partition, view, lanes.loc)
        return
    barrier = barrier_of(partition, view, lanes.loc, i.name)
    if barrier is None:
        return
    if verb[0] in ("try_wait", "test_wait"):
        yield from _wait(lanes, i, barrier, blocks=verb[0] == "try_wait")
        return
    if "expect_tx" in verb:
        barrier.tx += threads * _number(lanes, i, -1)
    if verb[0] == "arrive":
        counted = "expect_tx" not in verb and len(i.operands) > 2
        count = _number(lanes, i, 2) if counted else 1
        barrier.arrive(partition, count * threads, lanes.loc, i.name)


def _wait(
    lanes: Lanes, i: Instruction, barrier: Barrier, *, blocks: bool
) -> Generator[Wait | None, None, None]:
    partition = lanes.partition
    parity = parity_of(partition, _number(lanes, i, 2), lanes.loc, i.name)
    barrier.phases.begin(barrier, partition, parity, lanes.loc, blocks=blocks)
    if blocks and not barrier.passed(parity):
        yield Wait(
            lambda: barrier.passed(parity), lambda: f"parity {parity} of {barrier.state()}",
            lanes.loc, lack=barrier.lack,
        )  # fmt: skip
    passed = barrier.passed(parity)
    if passed:
        barrier.acquire(partition, lanes.loc, blocks=blocks)
    else:
        partition.looks += 1
    lanes.write(i.operands[0], np.full(lanes.count, passed))


def _number(lanes: Lanes, i: Instruction, operand: int) -> int:
    values = lanes.raw(i.operands[operand], "u32")
    chosen = values if lanes.mask is None else values[lanes.mask]
    if not (chosen == chosen[0]).all():
        raise lanes.fail("threads give different numbers", i)
    return int(chosen[0])
