"""Phase overruns: an mbarrier that goes two phases on while a wait for one of them is pending.

A wait knows its phase by the parity only. If the mbarrier completes the next phase too before the
waiter has looked, the wait takes it for the phase that still runs: it hangs, or passes with a later
one. Whether that happens in the run at hand is luck, so it is judged by what everybody knows:

- Whoever passes a wait leaves a mark in its clock. A phase may complete only when its arrivals
  know the marks of all waits that the phase before it let pass.
- A wait is pending for the first phase of its parity that the waiter does not know to be over.
  The mbarrier must not be past that phase.

Phases that nobody waits for are free: a ring's last releases are waited for by no one. A TMA load
passes on what its issuer knew, as it could not have completed otherwise; that orders no memory, so
these marks have keys of their own. Who arrives in a phase knows those before it to be over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tileloom.emulator.ir import Loc
from tileloom.emulator.report import Access

if TYPE_CHECKING:
    from tileloom.emulator.barriers import Barrier
    from tileloom.emulator.happens_before import Clock
    from tileloom.emulator.machine import Cta, Partition

Arrival = tuple["Partition", Loc, str]
_AHEAD = (
    "let the waiter arrive, after this wait, at a barrier that is waited for before this one is "
    "signalled again"
)
_STALE = "this partition knows that phase to be over already: its parity is that of an old phase"


def known(partition: Partition) -> Clock:
    """Return what a partition knows of waits and phases: what its asynchronous work passes on."""
    clock = partition.clock
    return {key: clock[key] for key in partition.cta.phase_keys if key in clock}


class Phases:
    """The waits on one mbarrier.

    Attributes:
        key: The clock key of the phases that somebody knows to be over.
    """

    def __init__(self, cta: Cta) -> None:
        self.key = cta.new_phase_key()
        self._passed: dict[int, tuple[int, Partition, Loc, bool]] = {}
        self._pending: dict[int, tuple[int, Partition, Loc]] = {}
        self._last: Arrival | None = None

    def begin(
        self, barrier: Barrier, partition: Partition, parity: int, loc: Loc, *, blocks: bool
    ) -> None:
        """Look at a wait that begins: it is for the first phase that it may be for.

        Args:
            barrier: The mbarrier.
            partition: Who waits.
            parity: For the phase of this parity.
            loc: The statement.
            blocks: Whether it goes on only when the phase is over; else it may come again.
        """
        barrier.use.waited = True
        over = partition.clock.get(self.key, 0)
        target = over if over & 1 != parity else over + 1
        if barrier.phase > target:
            self._report(barrier, target, partition, loc, blocks=blocks, sure=True)
        elif blocks and not barrier.passed(parity):
            self._pending[partition.passes_key] = (target, partition, loc)

    def passed(self, barrier: Barrier, partition: Partition, loc: Loc, *, blocks: bool) -> None:
        """Leave the mark of a wait that went on."""
        key = partition.passes_key
        self._pending.pop(key, None)
        count = partition.clock[key] = partition.clock.get(key, 0) + 1
        partition.clock[self.key] = barrier.phase
        self._passed[key] = (count, partition, loc, blocks)

    def completed(self, barrier: Barrier, arrival: Arrival) -> None:
        """Judge a phase that has just completed, by its last arrival."""
        before, self._passed = self._passed, {}
        self._last = arrival
        barrier.clock[self.key] = barrier.phase
        for key, (count, partition, loc, blocks) in before.items():
            if barrier.clock.get(key, 0) < count:
                self._report(barrier, barrier.phase - 1, partition, loc, blocks=blocks, sure=False)
        for key, (target, partition, loc) in list(self._pending.items()):
            if barrier.phase > target:
                del self._pending[key]
                self._report(barrier, target, partition, loc, blocks=True, sure=True)

    def _report(
        self, barrier: Barrier, target: int, partition: Partition, loc: Loc, *,
        blocks: bool, sure: bool,
    ) -> None:  # fmt: skip
        """Report a wait that `target` completed phases let pass, and one more no longer."""
        what = "wait" if blocks else "test"
        which = f"the {what} for phase {target - 1}" if target else (
            f"the {what} that a fresh mbarrier lets pass"
        )  # fmt: skip
        order = "completes" if sure else "may complete"
        why = "" if sure else ", which nothing orders before it,"
        stale = partition.clock.get(self.key, 0) == target and sure
        assert self._last is not None, "a phase has completed"
        who, where, how = self._last
        partition.report(
            "barrier",
            f"mbarrier {barrier.name} {order} its phase {target} before {which}{why} is over: the "
            f"{what} knows the parity only, so it hangs, or passes with phase {target + 1}",
            loc, f"mbarrier.{what}",
            other=Access(where, how, who.title, who.cta.program),
            hint=_STALE if stale else _AHEAD, severity="error" if blocks else "warning",
        )  # fmt: skip
