"""What is wrong once a program or a launch has ended: work in flight, barriers nobody waits for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tileloom.emulator.ir import Loc
from tileloom.emulator.report import Access, Report, quote_with_callers

if TYPE_CHECKING:
    from tileloom.emulator.barriers import Barrier
    from tileloom.emulator.machine import Cta, Launch, Partition


@dataclass
class BarrierUse:
    """How the mbarriers of one allocation were used over a launch.

    Attributes:
        name: The allocation's name.
        slots: Which mbarriers of it were initialised.
        at: The statement.
        phases: The most phases that one of them completed.
        signal: The first arrival at one of them.
        waited: Whether anybody waited for one of them.
    """

    name: str
    at: Loc
    slots: set[int] = field(default_factory=set[int])
    phases: int = 0
    signal: Access | None = None
    waited: bool = False


@dataclass(frozen=True)
class RingUse:
    """An allocation of several mbarriers that somebody waited for, and the most phases of one.

    `ended` says whether the launch came to its end.
    """

    kernel: str
    name: str
    at: Loc
    slots: int
    phases: int
    ended: bool

    @property
    def place(self) -> tuple[str, str, Loc]:
        """What its uses in several launches share."""
        return self.kernel, self.name, self.at


def check_program(cta: Cta) -> None:
    """Report asynchronous work that a program leaves unwaited, and named barriers half met.

    Args:
        cta: The program; all its partitions have ended.
    """
    if cta.aborted:
        return
    for partition in (one for lead in cta.partitions for one in lead.team):
        queue = partition.wgmma
        if partition.clock.get(queue.key, 0) < queue.issued and queue.last:
            partition.report(
                "exit", "the program ends while a wgmma of its own is not known to be complete",
                queue.last, "wgmma", hint="warpgroup_mma_wait(0) before the end",
            )  # fmt: skip
        queue = partition.stores
        if partition.clock.get(queue.key, 0) < queue.issued and queue.last:
            partition.report(
                "exit", "the program ends while a TMA store may still read its shared memory",
                queue.last, "TMA store", hint="tma.store_wait(0) before the end",
            )  # fmt: skip
    for buffer in cta.buffers.values():
        for (_, rank), barrier in buffer.bars.items():
            _check_loads(cta, barrier, [lead.team[rank] for lead in cta.partitions])
    for named in cta.named.values():
        if named.here:
            who, loc, what, _ = named.here[0]
            who.report(
                "barrier", f"the program ends with {named.arrived} of {named.expected} threads "
                f"waiting to be met at named barrier {named.ident}", loc, what, severity="info",
                hint="harmless here; pair every bar.arrive with a bar.sync",
            )  # fmt: skip


def _check_loads(cta: Cta, barrier: Barrier, partitions: Sequence[Partition]) -> None:
    """Report a copy into shared memory that nobody of a CTA has waited for."""
    load = barrier.unfinished(max(one.clock.get(barrier.key, 0) for one in partitions))
    if load is None:
        return
    load.partition.report(
        "exit", f"the program ends while a {load.kind} may still write its shared memory: nobody "
        f"has waited for mbarrier {barrier.name}", load.loc, load.kind,
        hint="wait for every copy that was issued, also one whose data is not needed",
    )  # fmt: skip


def check_launch(launch: Launch) -> None:
    """Report mbarriers that are signalled and that nobody waits for.

    A wait that the launch never came to may be for one of them; then this is no more than an info,
    and nothing at all if the launch hung before it.

    Args:
        launch: A launch that has ended.
    """
    skipped = launch.program.waits - launch.waits
    for use in launch.uses.values():
        if use.waited or use.signal is None or (skipped and not launch.ended):
            continue
        many = f" (all {len(use.slots)} of them)" if len(use.slots) > 1 else ""
        rest = ", in this launch" if skipped else ""
        launch.reporter.add(
            "barrier", f"mbarrier {use.name}{many} is signalled, but nobody waits for it{rest}",
            use.signal, other=Access(use.at, "allocation", "", ()),
            severity="info" if skipped else "warning",
            hint="it orders nothing: wait for it before what it guards is used, or leave it out",
        )  # fmt: skip


def rings(launch: Launch) -> list[RingUse]:
    """Return the allocations of several mbarriers that somebody waited for."""
    return [
        RingUse(launch.program.name, use.name, use.at, len(use.slots), use.phases, launch.ended)
        for use in launch.uses.values()
        if use.waited and len(use.slots) > 1
    ]


def never_reused(uses: Iterable[RingUse]) -> dict[RingUse, Report]:
    """Say which rings went round in no launch, so that nothing tested their parities.

    Args:
        uses: Of all launches of a check.

    Returns:
        An info for each ring of which no mbarrier ever completed a second phase, by a use of it.
        Where a launch did not end, this says nothing of its rings.
    """
    first: dict[tuple[str, str, Loc], RingUse] = {}
    done: set[tuple[str, str, Loc]] = set()
    for use in uses:
        first.setdefault(use.place, use)
        if use.phases > 1 or not use.ended:
            done.add(use.place)
    return {
        use: Report(
            "barrier", "info",
            f"no mbarrier of {use.name} ({use.slots} of them) completes a second phase in any run: "
            "what happens when the ring is reused is not tested",
            Access(use.at, "allocation", "", ()),
            hint=f"take sizes with at least {2 * use.slots + 1} steps", kernel=use.kernel,
        )
        for place, use in first.items() if place not in done
    }  # fmt: skip


def report_deadlock(launch: Launch, blocked: list[Partition]) -> None:
    """Report that no partition can go on: where each waits, and what is missing.

    Args:
        launch: The launch.
        blocked: Its partitions that have not ended, all of which wait.
    """
    lines: list[str] = []
    missing: list[str] = []
    waits = [(p, p.wait) for p in blocked if p.wait is not None]
    for p, wait in waits[:12]:
        who = f"partition '{p.name}'"
        if len(launch.active) > 1:
            who += f" of program {p.cta.program}"
        lines.append(f"{who} waits: {quote_with_callers(wait.loc)}  -- {wait.text()}")
        lack = wait.lack() if wait.lack is not None else ""
        if lack and lack not in missing:
            missing.append(lack)
    if len(waits) > 12:
        lines.append(f"... and {len(waits) - 12} more partitions")
    message = "every partition is blocked and no asynchronous operation is in flight"
    if any(wait.poll is not None for _, wait in waits):
        message = "every partition waits or spins, and nothing can change what it waits for"
    first, wait = waits[0]
    launch.reporter.add(
        "deadlock", message, Access(wait.loc, "wait", first.name, first.cta.program),
        details=tuple(lines), hint="; ".join(missing[:4]),
    )  # fmt: skip


def report_steps(launch: Launch, partition: Partition, loc: Loc) -> None:
    """Report that a kernel does not end: where each partition is, and what it may wait for.

    Args:
        launch: The launch.
        partition: Who took the last step.
        loc: The loop that it is in.
    """
    alive = [p for c in launch.active for p in c.partitions if not p.finished]
    lines = [
        f"partition '{p.name}' of program {p.cta.program}: "
        + (quote_with_callers(p.here) if p.here else "not started")
        for p in alive
    ]
    hint = "raise max_steps of emulator.run if the kernel is only long"
    idle = next((p for p in alive if p.here is None), None)
    if idle is not None:
        hint = (
            f"partition '{idle.name}' of program {idle.cta.program} has had no turn yet: if the "
            f"loop waits for it, let each turn of the loop read memory again; {hint}"
        )
    elif partition.looks and len(alive) > 1:
        hint = (
            "the loop reads memory that others write: if it waits for one of them, look at "
            f"what that one writes; {hint}"
        )
    launch.reporter.add(
        "steps", f"the kernel did not end within {launch.options.max_steps} steps",
        Access(loc, "loop", partition.name, partition.cta.program), details=tuple(lines[:12]),
        hint=hint,
    )  # fmt: skip
