"""mbarriers and named barriers: counts, phases, transferred bytes, and the clocks they pass on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tileloom.emulator.endings import BarrierUse
from tileloom.emulator.happens_before import Clock, Record, join
from tileloom.emulator.ir import Loc
from tileloom.emulator.phases import Arrival, Phases
from tileloom.emulator.report import Access

if TYPE_CHECKING:
    from tileloom.emulator.machine import Partition

_MANY = (
    "raise the count given to mbarrier.init, or let fewer threads or partitions arrive in a phase"
)
# The hardware's tx-count and arrival count have 20 bits.
MAX_COUNT = (1 << 20) - 1


class Barrier:
    """One mbarrier.

    Attributes:
        key: Its clock key; the counter is the number of completed phases.
        count: Arrivals that complete a phase.
        pending: Arrivals still missing in the current phase.
        tx: Bytes still missing in the current phase.
        phase: Completed phases.
        arrived: Keys of the partitions that arrived in the current phase.
        fenced: Whether a fence is known to stand between its initialisation and the async proxy.
        in_cluster: Whether all CTAs of the cluster may use it.
        phases: Who waits for which phase.
        use: The books about all mbarriers of its allocation.
    """

    def __init__(
        self, name: str, count: int, key: int, loc: Loc, maker: Partition, use: BarrierUse
    ) -> None:
        self.name = name
        self.count = count
        self.pending = count
        self.tx = 0
        self.phase = 0
        self.arrived: set[int] = set()
        self.key = key
        self.loc = loc
        self.clock: Clock = {}
        self.fence: Clock = {}
        self.released: tuple[Clock, Clock] = ({}, {})
        self.loads: list[Record] = []
        self.last_load: Record | None = None
        self.made_by = maker
        self.made_at = maker.clock[maker.key] + 1
        self.fenced = False
        self.in_cluster = False
        self.use = use
        self.phases = Phases(maker.cta)

    def join(self, clock: Clock, fence: Clock) -> None:
        """Pass what an arriver knows on to later waiters."""
        join(self.clock, clock)
        join(self.fence, fence)

    def arrive(self, partition: Partition, count: int, loc: Loc, what: str) -> None:
        """Let a partition arrive; what it knows is passed on to later waiters."""
        partition.clock[partition.key] += 1
        self.join(partition.clock, partition.fence)
        self.count_down(partition, count, loc, what)
        partition.clock[self.phases.key] = self.phase

    def count_down(self, partition: Partition, count: int, loc: Loc, what: str) -> None:
        """Take arrivals off the current phase."""
        if count > self.pending:
            self._report_excess(partition, count, loc, what)
            count = self.pending
        self.pending -= count
        self.arrived.add(partition.key)
        self._settle((partition, loc, what))

    def _report_excess(self, partition: Partition, count: int, loc: Loc, what: str) -> None:
        """Report arrivals that are more than the current phase lacks."""
        state = f"lacks only {self.pending} of {self.count}"
        if not self.pending:
            state = f"has all {self.count} and waits for bytes only"
        ahead = (
            f"partition '{partition.title}' expects the next copies before those of this phase are "
            "there: before this statement, its wait for the slot to be empty may be missing or "
            "have the wrong parity"
        )
        is_ahead = "expect" in what and partition.key in self.arrived
        partition.report(
            "barrier",
            f"mbarrier {self.name} gets {count} more arrival{'s' * (count > 1)} by {what} while "
            f"its phase {self.phase} {state}",
            loc, what, hint=ahead if is_ahead else _MANY,
            other=Access(self.loc, "mbarrier.init", self.made_by.title, partition.cta.program),
        )  # fmt: skip

    def _settle(self, arrival: Arrival) -> None:
        """Complete the phase if nothing is missing after an arrival."""
        use = self.use
        if use.signal is None:
            partition, loc, what = arrival
            use.signal = Access(loc, what, partition.title, partition.cta.program)
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            use.phases = max(use.phases, self.phase)
            self.phases.completed(self, arrival)
            self.pending = self.count
            self.arrived.clear()
            self.clock[self.key] = self.phase
            self.fence[self.key] = self.fence[-self.key] = self.phase
            self.released = (dict(self.clock), dict(self.fence))
            self.made_by.cta.launch.changed()  # for a loop that only tests it

    def transfer(self, nbytes: int, known: Clock, arrival: Arrival) -> None:
        """Take arrived bytes off. Bytes may arrive before they are expected.

        Args:
            nbytes: How many.
            known: What the issuer knew of phases, as `phases.known` gives it.
            arrival: Who issued the copy, where, and what it is.
        """
        self.tx -= nbytes
        join(self.clock, known)
        self._settle(arrival)

    def unfinished(self, known: int) -> Record | None:
        """Return a copy that signals it in a later phase than the first `known` ones."""
        load = self.loads[0] if self.loads else self.last_load
        return load if load is not None and load.epoch > known else None

    def passed(self, parity: int) -> bool:
        """Whether a wait for this parity may go on."""
        return (self.phase & 1) != parity

    def acquire(self, partition: Partition, loc: Loc, *, blocks: bool = True) -> None:
        """Let a waiter that passed know what the arrivals of the completed phases knew."""
        partition.learn(*self.released)
        self.phases.passed(self, partition, loc, blocks=blocks)

    def state(self) -> str:
        """Return the barrier's state as deadlock reports show it."""
        rest = f"{self.tx} bytes outstanding"
        if self.tx < 0:
            rest = f"{-self.tx} bytes more than expected"
        return (
            f"mbarrier {self.name}: current phase {self.phase} (parity {self.phase & 1}), "
            f"{self.count - self.pending} of {self.count} arrivals, {rest}"
        )

    def lack(self) -> str:
        """Return what its phase lacks, as the hint of a deadlock."""
        if self.pending == 0 and self.tx > 0:
            return (
                f"mbarrier {self.name} expects {self.tx} bytes that no copy brings: mbarrier.expect"
                " takes the bytes of the copies that signal it, and a masked one brings none"
            )
        if self.tx < 0:
            return (
                f"the copies bring {-self.tx} bytes more to mbarrier {self.name} than "
                "mbarrier.expect says: before them, once for all of a phase"
            )
        hint = f"mbarrier {self.name} lacks {self.pending} of the {self.count} arrivals of a phase"
        if self.phase == 0 and self.pending == self.count:
            hint += " (of a fresh mbarrier, a wait for parity 1 passes)"
        return hint


class NamedBarrier:
    """One of the 16 hardware barriers of a program, as ``bar.sync`` and ``bar.arrive`` use it."""

    def __init__(self, ident: int) -> None:
        self.ident = ident
        self.expected = 0
        self.arrived = 0
        self.round = 0
        self.here: list[tuple[Partition, Loc, str, int]] = []
        self.before: list[tuple[Partition, Loc, str, int]] = []
        self.clock: Clock = {}
        self.fence: Clock = {}
        self.released: tuple[Clock, Clock] = ({}, {})

    def arrive(self, partition: Partition, count: int, loc: Loc, what: str) -> int:
        """Let all threads of a partition arrive.

        Args:
            partition: Who arrives.
            count: The thread count that the instruction names.
            loc: The statement.
            what: The instruction, for reports.

        Returns:
            The round that has to complete before a ``bar.sync`` goes on.
        """
        threads = 32 * partition.warps
        if self.here and count != self.expected:
            first = self.here[0]
            partition.report(
                "barrier",
                f"named barrier {self.ident} is used with {count} threads while a round with "
                f"{self.expected} threads is under way",
                loc,
                what,
                other=Access(first[1], first[2], first[0].name, partition.cta.program),
                hint="give every bar.sync and bar.arrive of one barrier the same thread count",
            )
        if any(one[0] is partition for one in self.here):
            partition.report(
                "barrier",
                f"partition '{partition.title}' arrives twice at named barrier {self.ident} in one "
                "round",
                loc,
                what,
                hint="each partition arrives once a round: pair every bar.arrive with a bar.sync",
            )
        self._check_turn(partition, loc, what)
        self.expected = count
        partition.clock[partition.key] += 1
        join(self.clock, partition.clock)
        join(self.fence, partition.fence)
        self.arrived += threads
        self.here.append((partition, loc, what, partition.clock[partition.key]))
        mine = self.round
        if self.arrived > count:
            partition.report(
                "barrier",
                f"{self.arrived} threads arrive at named barrier {self.ident}, which expects "
                f"{count}",
                loc,
                what,
                hint="the count is the number of threads of all partitions that sync or arrive",
            )
            self.arrived = count
        if self.arrived == count:
            self.round += 1
            self.arrived = 0
            self.before, self.here = self.here, []
            self.released = (dict(self.clock), dict(self.fence))
        return mine

    def _check_turn(self, partition: Partition, loc: Loc, what: str) -> None:
        """Report an arrival that may come while warps of the round before still arrive."""
        for other, at, verb, time in self.before:
            if partition.clock.get(other.key, 0) < time:
                partition.report(
                    "barrier", f"partition '{partition.title}' arrives at named barrier "
                    f"{self.ident} and does not know that '{other.title}' has met the round "
                    "before: warps of both may complete one round", loc, what,
                    other=Access(at, verb, other.title, partition.cta.program),
                    hint="give each group a barrier of its own, or let it wait for the other",
                )  # fmt: skip
                return

    def acquire(self, partition: Partition) -> None:
        """Let a partition whose ``bar.sync`` went on know what the others knew."""
        partition.learn(*self.released)

    def state(self) -> str:
        """Return the barrier's state as deadlock reports show it."""
        return f"named barrier {self.ident}: {self.arrived} of {self.expected} threads have arrived"

    def lack(self) -> str:
        """Return what it lacks, as the hint of a deadlock."""
        return (
            f"named barrier {self.ident} lacks {self.expected - self.arrived} of {self.expected} "
            "threads: those that come must name this number and this count"
        )
