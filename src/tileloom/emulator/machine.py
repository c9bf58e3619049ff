"""The machine: partitions of a program as generators, what is in flight, and the scheduler.

Asynchronous operations complete when the schedule says so: ``late`` completes one only when every
partition is blocked, the newest first; ``eager`` completes each at once; ``random`` picks. A
deadlock is a state with no runnable partition and nothing in flight.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tileloom.emulator import endings
from tileloom.emulator.barriers import NamedBarrier
from tileloom.emulator.endings import BarrierUse
from tileloom.emulator.happens_before import Clock, GlobalChecker, SharedChecker, join
from tileloom.emulator.inflight import InFlight, Queue
from tileloom.emulator.ir import Loc
from tileloom.emulator.memory import SharedBuffer, Storage
from tileloom.emulator.report import Access, Reporter

if TYPE_CHECKING:
    from tileloom.emulator.lower import Program
    from tileloom.emulator.memory import View
    from tileloom.emulator.spinning import Turns
    from tileloom.emulator.stream import Ahead
    from tileloom.emulator.timeline import Timeline

SCHEDULES = ("late", "eager", "random")
_STEPS_TO_REST = 10_000  # after which a loop that does not wait lets others act
Frame = list[Any]


class Wait:
    """Why a partition does not go on.

    Attributes:
        ready: Tells whether it may go on.
        text: What it waits for, for deadlock reports.
        then: Called when it goes on; may return another wait.
        lack: Tells what is missing for it to go on, as a deadlock's hint; empty for nothing known.
        loc: The statement.
        poll: Set for a spinning loop: the state of memory that it has already looked at.
        loop: Its turns, of a spinning loop.
    """

    __slots__ = ("lack", "loc", "loop", "poll", "ready", "text", "then", "timed")

    def __init__(
        self, ready: Callable[[], bool], text: Callable[[], str], loc: Loc,
        then: Callable[[], Wait | None] | None = None,
        poll: int | None = None, timed: bool = False, lack: Callable[[], str] | None = None,
    ) -> None:  # fmt: skip
        self.ready = ready
        self.text = text
        self.loc = loc
        self.then = then
        self.poll = poll
        self.timed = timed
        self.lack = lack
        self.loop: Turns | None = None


class Partition:
    """A warp-specialised partition of a program: one logical thread with a clock.

    In a cluster there is one for each CTA. They make up a team, of which the first one runs the
    program, and books are kept for all.
    """

    def __init__(
        self, cta: Cta, name: str, warps: int, parent: Partition | None = None, rank: int = 0
    ) -> None:
        launch = cta.launch
        self.cta = cta
        self.name = name
        self.rank = rank
        self.team: list[Partition] = [self]
        self.left: tuple[Clock, Clock] = ({}, {})
        self.warps = warps
        self.key = launch.new_key()
        self.clock: Clock = dict(parent.clock if parent else launch.settled)
        self.fence: Clock = dict(parent.fence if parent else launch.settled)
        self.clock[self.key] = 0
        self.wgmma = Queue(launch.new_key())
        self.copies = Queue(launch.new_key())
        self.groups: list[int] = []
        self.flying: set[int] = set()
        self.stores = Queue(launch.new_key())
        self.stored_key = launch.new_key()
        self.passes_key = cta.new_phase_key()
        self.generator: Generator[Wait | None, None, Any] | None = None
        self.wait: Wait | None = None
        self.finished = False
        self.here: Loc | None = None
        self.release_fence: tuple[Clock, Clock, dict[int, int]] | None = None
        self.many, self.one = launch.new_key(), launch.new_key()  # of stores: many threads', one's
        # Their times when its threads last met, and up to where all know TMA stores to be written.
        self.met = {self.many: 0, self.one: 0, self.stored_key: 0}
        self.spoke_alone: set[tuple[int, int]] = set()  # those that a thread's release reaches to
        self.observed: list[tuple[Clock, Clock]] = []
        self.looks = 0  # since it began, and the clock's steps that were no deeds
        self.idle = 0
        self.looked_at: dict[int, int] = {}
        self.rests_at = 0
        self.rested = False
        self.timed = False
        self.since = 0
        self.track = len(cta.partitions)
        self.first_thread = 0
        if rank == 0:
            for other in range(1, launch.program.module.num_ctas):
                above = parent.team[other] if parent else None
                mate = Partition(cta, name, warps, above, other)
                mate.team = [mate]
                self.team.append(mate)

    @property
    def title(self) -> str:
        """The name for reports; in a cluster with the CTA's number."""
        if self.cta.clustered:
            return f"{self.name}, CTA {self.rank}"
        return self.name

    def learn(self, clock: Clock, fence: Clock) -> None:
        """Let all threads take over what somebody else knew."""
        join(self.clock, clock)
        join(self.fence, fence)
        written = clock.get(self.stored_key, 0)
        if written > self.met[self.stored_key]:
            self.met = {**self.met, self.stored_key: written}

    def look(self, loc: Loc, addresses: Any) -> None:
        """Note a read of global memory; reading one place again is what a spinning loop does."""
        first = int(addresses.flat[0]) if addresses.size else 0
        if self.looked_at.get(id(loc)) == first:
            self.looks += 1
            self.idle += 1
        self.looked_at[id(loc)] = first

    def fence_proxies(self, *, shared: bool = True, memory: bool = True) -> None:
        """Let asynchronous operations see what is known: in shared memory, in global memory."""
        if shared:
            join(self.fence, self.clock)
        if memory:
            join(self.fence, {-key: value for key, value in self.clock.items()})

    def report(
        self, kind: str, message: str, loc: Loc, what: str, *, other: Access | None = None,
        hint: str = "", severity: str = "error", details: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """Report a fault of this partition at a statement."""
        at = Access(loc, what, self.title, self.cta.program)
        self.cta.launch.reporter.add(
            kind, message, at, other=other, hint=hint, severity=severity, details=details
        )


class Cta:
    """One program of the grid (a CTA): partitions, shared buffers, what is in flight."""

    def __init__(self, launch: Launch, program: tuple[int, int, int]) -> None:
        self.launch = launch
        self.program = program
        self.aborted = False
        self.clustered = launch.program.module.num_ctas > 1
        self.partitions: list[Partition] = []
        self.inflight: list[InFlight] = []
        self.buffers: dict[int, SharedBuffer] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.addresses: list[View] = []
        self.phase_keys: list[int] = []
        self.main = Partition(self, "main", launch.program.module.num_warps)
        self.partitions.append(self.main)
        func = launch.program.module.kernel
        frame: Frame = [None] * func.slots
        frame[0] = self.main
        for slot, value in zip(func.args, launch.args):
            frame[slot] = value
        self.main.generator = launch.program.run_blocks(func.blocks, frame)

    def new_phase_key(self) -> int:
        """Return a clock key for what is known of waits and phases; it orders no memory."""
        self.phase_keys.append(self.launch.new_key())
        return self.phase_keys[-1]

    def issue(
        self, kind: str, partition: Partition, run: Callable[[], None], loc: Loc, *,
        queue: tuple[str, int] | None = None, guard: Callable[[], bool] | None = None,
        outlives: bool = False,
    ) -> None:  # fmt: skip
        """Put an asynchronous operation in flight; the eager schedule completes it at once."""
        operation = InFlight(kind, partition, run, loc, queue, guard, self.launch.now, outlives)
        self.inflight.append(operation)
        if self.launch.options.schedule == "eager" and self.candidates()[-1:] == [operation]:
            self.complete(operation)

    def candidates(self) -> list[InFlight]:
        """Return the operations that may complete now."""
        heads: set[tuple[str, int]] = set()
        found = []
        for operation in self.inflight:
            if operation.queue is not None:
                if operation.queue in heads:
                    continue
                heads.add(operation.queue)
            if operation.guard is None or operation.guard():
                found.append(operation)
        return found

    def complete(self, operation: InFlight) -> None:
        """Let an operation take effect."""
        self.inflight.remove(operation)
        launch = self.launch
        launch.now += 1
        launch.seen = {}
        if launch.timeline is not None:
            launch.timeline.flight(self, operation, launch.now)
        operation.run()
        if launch.options.schedule == "eager":
            for other in self.candidates():
                if other.guard is not None and other in self.inflight:
                    self.complete(other)

    def force(self, ready: Callable[[], bool], kind: str) -> None:
        """Complete operations of a kind until a condition holds."""
        while not ready():
            pick = next((o for o in self.candidates() if o.kind == kind), None)
            if pick is None:
                return
            self.complete(pick)

    def end(self) -> None:
        """Complete what is in flight; what others may not see yet only where nobody looks."""
        stays = self.launch.program.communicates
        while flying := [o for o in self.candidates() if not (stays and o.outlives)]:
            self.complete(flying[0])
        if self.inflight:
            self.launch.landing.append(self)

    @property
    def finished(self) -> bool:
        """Whether every partition has ended."""
        return all(p.finished for p in self.partitions)


@dataclass
class Options:
    """How a launch is played; see `tileloom.emulator.run`."""

    schedule: str = "late"
    seed: int = 0
    level: str = "ttgir"
    sms: int = 132
    smem: int = 232448
    max_steps: int = 20_000_000
    war_fence: str = "warning"
    fences: bool = True
    costs: tuple[str, ...] = ()


@dataclass
class HostEvent:
    """Something that the host does while kernels run."""

    action: Callable[[Launch], None]
    text: str


@dataclass
class Launch:
    """One kernel launch: arguments, storages, checkers, and the scheduler's state."""

    program: Program
    args: list[Any]
    grid: tuple[int, int, int]
    reporter: Reporter
    options: Options
    storages: list[Storage]
    host_events: list[HostEvent] = field(default_factory=list)
    timeline: Timeline | None = None

    def __post_init__(self) -> None:
        self.now = 0
        self.steps = 0
        self.clock_ns = 1_000_000
        self.version = 0
        self.keys = 0
        self.shared = SharedChecker(self.options.war_fence)
        self.memory = GlobalChecker()
        self.releases: list[tuple[Clock, Clock]] = [({}, {})]
        self.scratch: dict[Any, Any] = {}
        self.rng = random.Random(self.options.seed)
        self.explore = self.options.schedule == "random"
        self.polls = 0
        self.seen: dict[int, tuple[Turns | None, int]] = {}  # loops when all looked again
        self.active: list[Cta] = []
        self.landing: list[Cta] = []  # ended, with writes in flight
        self.uses: dict[tuple[str, Loc], BarrierUse] = {}
        self.waits: set[int] = set()
        self.ended = False
        self.ahead: Ahead | None = None
        self.settled: Clock = {}
        self.lets_dependents_start = False

    def new_key(self) -> int:
        """Return a clock key that nobody has."""
        self.keys += 1
        return self.keys

    def use_of(self, name: str, at: Loc) -> BarrierUse:
        """Return the books about the mbarriers of one allocation."""
        found = self.uses.get((name, at))
        if found is None:
            found = self.uses[name, at] = BarrierUse(name, at)
        return found

    def changed(self) -> None:
        """Note that memory which others may poll has changed."""
        self.version += 1
        self.polls = 0

    def programs(self) -> Iterator[tuple[int, int, int]]:
        """Yield the program ids of the grid, x fastest."""
        for z in range(self.grid[2]):
            for y in range(self.grid[1]):
                for x in range(self.grid[0]):
                    yield x, y, z

    def run(self) -> None:
        """Run the whole grid."""
        together = self.options.sms if self.program.communicates or self.host_events else 1
        waiting = self.programs()
        hung = False
        if self.options.schedule == "eager":
            while self.host_events:
                self.play_host_event()
        while True:
            while len(self.active) < together and (program := next(waiting, None)) is not None:
                self.active.append(Cta(self, program))
            if not self.active:
                break
            self.round()
            for cta in [c for c in self.active if c.finished]:
                self.active.remove(cta)
                hung |= cta.aborted
                endings.check_program(cta)
                cta.end()
        while self.landing:
            self.land()
        self.ended = not hung
        endings.check_launch(self)

    def play_host_event(self) -> None:
        """Let the host do the next thing on its list."""
        event = self.host_events.pop(0)
        event.action(self)
        self.changed()
        self.seen = {}

    def land(self) -> None:
        """Let a write of a program that has ended take effect, the newest program's first."""
        cta = self.landing[-1]
        cta.complete(cta.candidates()[0])
        if not cta.inflight:
            self.landing.pop()

    # ---- scheduling
    def round(self) -> None:
        """Give every runnable partition a turn; if none ran, complete something."""
        if self.explore:
            self._random_round()
            return
        ran = False
        for cta in self.active:
            for partition in cta.partitions:
                if partition.finished:
                    continue
                wait = partition.wait
                if wait is None or wait.ready():
                    self._advance(partition)
                    ran = ran or not partition.rested
        if not ran:
            self._unblock()

    def _random_round(self) -> None:
        rng = self.rng
        if self.host_events and rng.random() < 0.02:
            self.play_host_event()
        if self.landing and rng.random() < 0.02:
            self.land()
        cta = rng.choice(self.active)
        ready = [
            p for p in cta.partitions
            if not p.finished and (p.wait is None or p.wait.ready())
        ]  # fmt: skip
        flying = cta.candidates() if cta.inflight else []
        if ready and (not flying or rng.random() < 0.7):
            self._advance(rng.choice(ready))
        elif flying:
            cta.complete(rng.choice(flying))
        elif len(self.active) == 1 or not any(
            c.inflight or any(not p.finished and (p.wait is None or p.wait.ready())
                              for p in c.partitions)
            for c in self.active
        ):  # fmt: skip
            self._unblock()

    def _advance(self, partition: Partition) -> None:
        """Run a partition until it blocks (or, exploring, until its next visible step)."""
        generator = partition.generator
        wait = partition.wait
        partition.wait = None
        partition.rested, partition.rests_at = False, self.steps + _STEPS_TO_REST
        start = self.now
        if self.timeline is not None and wait is not None:
            self.timeline.waited(partition, wait, partition.since, start)
        try:
            while True:
                while wait is not None:
                    if not wait.ready():
                        partition.wait = wait
                        return
                    wait = wait.then() if wait.then is not None else None
                wait = next(generator)  # pyright: ignore[reportArgumentType]
                if wait is None and self.explore:
                    return
        except StopIteration:
            partition.finished = True
        finally:
            self.now += 1
            partition.since = self.now
            if self.timeline is not None:
                self.timeline.ran(partition, start, self.now)

    def _unblock(self) -> None:
        """Nobody can run: complete an operation, let the host act, let pollers look again."""
        done = False
        for cta in self.active:
            flying = cta.candidates() if cta.inflight else []
            if flying:
                cta.complete(flying[-1])
                done = True
        if done:
            return
        pollers = {
            p.key: p.wait for c in self.active for p in c.partitions
            if not p.finished and p.wait is not None and p.wait.poll is not None
        }  # fmt: skip
        rested = any(p.rested for c in self.active for p in c.partitions if not p.finished)
        if self.landing and (self.polls or rested or not pollers):
            self.land()  # once they have looked at what is there
            return
        if self.host_events and not self.landing:
            self.play_host_event()
            return
        timed = any(wait.timed for wait in pollers.values())
        patience = 200 if timed else 4096
        if rested or (pollers and self.polls < patience and not self._still(pollers)):
            self.polls += not rested
            self.clock_ns += 1 << min(self.polls, 40) if timed else 1000
            for wait in pollers.values():
                wait.poll = -1
            self.seen = {k: (w.loop, w.loop.count) for k, w in pollers.items() if w.loop}
            return
        self._deadlock()

    def _still(self, pollers: dict[int, Wait]) -> bool:
        """Whether all that poll have had one turn since all looked again, as the one before it."""
        return self.seen.keys() == pollers.keys() and all(
            (loop := wait.loop) is not None and loop.still
            and self.seen[key] == (loop, loop.count - 1)
            for key, wait in pollers.items()
        )  # fmt: skip

    def _deadlock(self) -> None:
        blocked = [
            p for c in self.active for p in c.partitions if not p.finished and p.wait is not None
        ]
        endings.report_deadlock(self, blocked)
        for cta in self.active:
            cta.aborted = True
            for p in cta.partitions:
                p.finished = True
            cta.inflight.clear()

    def count_steps(self, steps: int, partition: Partition, loc: Loc) -> None:
        """Count work at the end of a loop's turn and stop a kernel that does not end."""
        self.steps += steps
        if self.steps <= self.options.max_steps:
            return
        partition.here = loc
        endings.report_steps(self, partition, loc)
        raise StepsExceeded


class StepsExceeded(Exception):
    """Ends a launch that went over its steps while reports are collected."""
