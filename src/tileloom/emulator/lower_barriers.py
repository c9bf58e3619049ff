"""Lowerings of what orders: mbarriers, fences, and the barriers of a cluster."""

from __future__ import annotations

from collections.abc import Iterator

from tileloom.emulator import cluster, dialect, global_edges
from tileloom.emulator.barriers import MAX_COUNT, Barrier
from tileloom.emulator.cluster import Spread, spread_of
from tileloom.emulator.ir import Loc, Op
from tileloom.emulator.lower import STEP, Program, Run, lowers
from tileloom.emulator.lower_shared import view_of
from tileloom.emulator.machine import Frame, Partition, Wait
from tileloom.emulator.memory import View
from tileloom.emulator.report import Access


def barrier_of(
    partition: Partition, view: View, loc: Loc, what: str, rank: int | None = None
) -> Barrier | None:
    """Return the mbarrier in a view, reporting one that was not initialised.

    Args:
        partition: Who uses it.
        view: The view of one mbarrier (in a cluster, of one for each CTA).
        loc: The statement.
        what: The use, for the report.
        rank: The CTA that it lies in; the partition's own by default.

    Returns:
        The mbarrier; None if there is none.
    """
    rank = partition.rank if rank is None else rank
    barrier = view.buffer.bars.get((view.key[0], rank))
    program = partition.cta.program
    if barrier is None:
        partition.report(
            "barrier", f"mbarrier {view.name} is used before mbarrier.init", loc, what,
            other=Access(view.buffer.loc, "allocation", partition.title, program),
        )  # fmt: skip
        return None
    maker = barrier.made_by
    across = maker.rank != partition.rank
    shared = barrier.in_cluster or (across and dialect.CLUSTER_MEETS_AFTER_INIT)
    if partition.clock.get(maker.key, 0) < barrier.made_at and not shared:
        partition.report(
            "barrier", f"mbarrier {view.name} is used by a partition that need not see its "
            "initialisation yet", loc, what,
            other=Access(barrier.loc, "mbarrier.init", maker.title, program),
            hint="cluster.barrier() after the last mbarrier.init" if across else
            "initialise barriers before warp_specialize",
        )  # fmt: skip
    return barrier


def enabled(f: Frame, slot: int | None) -> bool:
    """Whether a predicate operand is absent or true."""
    return slot is None or bool(f[slot])


def owners(partition: Partition, spread: Spread) -> list[Partition]:
    """Return the members of a team whose CTAs own an mbarrier of their own in a view."""
    return [one for one in partition.team if spread.leads[one.rank] == one.rank]


@lowers("ttng.init_barrier", kind=STEP)
def _init(op: Op, program: Program) -> Run:
    (a,) = op.operands
    count = int(op.words[0])
    spread = spread_of(op.operand_types()[0], program.module)

    def run(f: Frame) -> None:
        view = view_of(f, a)
        for one in owners(f[0], spread):
            make_barrier(one, view, count, len(spread.group(one.rank)), op.loc)
        view.init[...] = True

    return run


def make_barrier(partition: Partition, view: View, count: int, sharers: int, loc: Loc) -> None:
    """Initialise the mbarrier in a view, for `count` arrivals from each CTA that shares it."""
    old = view.buffer.bars.get((view.key[0], partition.rank))
    if old is not None:
        partition.report(
            "barrier", f"mbarrier {view.name} is initialised again without invalidate", loc,
            "mbarrier.init",
            other=Access(old.loc, "mbarrier.init", old.made_by.title, partition.cta.program),
            hint="mbarrier.invalidate first",
        )  # fmt: skip
    if not 1 <= count * sharers <= MAX_COUNT:
        partition.report(
            "barrier", f"mbarrier {view.name} is initialised with count {count}; the hardware "
            f"takes 1 to {MAX_COUNT}", loc, "mbarrier.init",
        )  # fmt: skip
    launch = partition.cta.launch
    launch.shared.access(view, partition, "mbarrier.init", loc, write=True)
    use = launch.use_of(view.buffer.name, view.buffer.loc)
    use.slots.add(view.key[0])
    barrier = Barrier(view.name, count * sharers, launch.new_key(), loc, partition, use)
    partition.clock[partition.key] += 1
    view.buffer.bars[view.key[0], partition.rank] = barrier


@lowers("ttng.inval_barrier", kind=STEP)
def _invalidate(op: Op, program: Program) -> Run:
    (a,) = op.operands
    spread = spread_of(op.operand_types()[0], program.module)

    def run(f: Frame) -> None:
        view = view_of(f, a)
        for one in owners(f[0], spread):
            invalidate(one, view, op.loc)

    return run


def invalidate(partition: Partition, view: View, loc: Loc) -> None:
    """Invalidate the mbarrier in a view."""
    barrier = barrier_of(partition, view, loc, "mbarrier.invalidate")
    if barrier is None:
        return
    if barrier.unfinished(partition.clock.get(barrier.key, 0)):
        partition.report(
            "barrier", f"mbarrier {view.name} is invalidated while a copy that signals it is not "
            "known to be complete", loc, "mbarrier.invalidate", hint="wait for it first",
        )  # fmt: skip
    view.buffer.bars.pop((view.key[0], partition.rank), None)


def _routes(
    partition: Partition, view: View, spread: Spread, mask: int, loc: Loc, what: str
) -> Iterator[tuple[Partition, Barrier, bool]]:
    """Yield who arrives where, and whether it is the CTA that owns the mbarrier.

    The arrival at CTA `d` comes from CTA ``d & mask``. An mbarrier that CTAs share lies in the
    first of them, and each of them arrives there.
    """
    for one in partition.team:
        sender = partition.team[one.rank & mask]
        owner = spread.leads[one.rank]
        barrier = barrier_of(sender, view, loc, what, owner)
        if barrier is not None:
            yield sender, barrier, owner == one.rank


@lowers("ttng.barrier_expect", kind=STEP, attrs=["fromCTA"])
def _expect(op: Op, program: Program) -> Run:
    a, *rest = op.operands
    predicate = rest[0] if rest else None
    nbytes = int(op.words[0])
    spread = spread_of(op.operand_types()[0], program.module)
    mask = op.int_attr("fromCTA", -1)

    def run(f: Frame) -> None:
        if not enabled(f, predicate):
            return
        routes = _routes(f[0], view_of(f, a), spread, mask, op.loc, "mbarrier.expect")
        for sender, barrier, owned in routes:
            barrier.tx += nbytes if owned else 0
            barrier.arrive(sender, 1, op.loc, "mbarrier.expect")

    return run


@lowers("ttng.arrive_barrier", kind=STEP, attrs=["perThread", "fromCTA", "multicastCTA"],
        words=r"\d+|perThread")  # fmt: skip
def _arrive(op: Op, program: Program) -> Run:
    a, *rest = op.operands
    predicate = rest[0] if rest else None
    count = int(op.words[0])
    each = "perThread" in op.words or "perThread" in op.attrs
    spread = spread_of(op.operand_types()[0], program.module)
    mask = op.int_attr("fromCTA", -1) & ~op.int_attr("multicastCTA", 0)

    def run(f: Frame) -> None:
        if not enabled(f, predicate):
            return
        times = 32 * f[0].warps if each else 1
        routes = _routes(f[0], view_of(f, a), spread, mask, op.loc, "mbarrier.arrive")
        for sender, barrier, _ in routes:
            barrier.arrive(sender, count * times, op.loc, "mbarrier.arrive")

    return run


@lowers("ttng.wait_barrier", kind=STEP, words=r"deps")
def _wait(op: Op, program: Program) -> Run:
    own = op.text.split(" : ")[0].split(" deps ")[0].count("%")
    a, parity_slot = op.operands[:2]
    predicate = op.operands[2] if own > 2 else None
    loc, here = op.loc, id(op)
    spread = spread_of(op.operand_types()[0], program.module)

    def run(f: Frame) -> Wait | None:
        if not enabled(f, predicate):
            return None
        f[0].cta.launch.waits.add(here)
        view = view_of(f, a)
        parity = parity_of(f[0], f[parity_slot], loc, "mbarrier.wait")
        found = [
            (one, barrier) for one in owners(f[0], spread)
            if (barrier := barrier_of(one, view, loc, "mbarrier.wait")) is not None
        ]  # fmt: skip

        for one, barrier in found:
            barrier.phases.begin(barrier, one, parity, loc, blocks=True)

        def ready() -> bool:
            return all(barrier.passed(parity) for _, barrier in found)

        def known() -> None:
            for one, barrier in found:
                barrier.acquire(one, loc)

        def late() -> Barrier:
            return next((b for _, b in found if not b.passed(parity)), found[0][1])

        def text() -> str:
            return f"parity {parity} of {late().state()}"

        if ready():
            known()
            return None
        return Wait(ready, text, loc, known, lack=lambda: late().lack())

    return run


def parity_of(partition: Partition, given: int, loc: Loc, what: str) -> int:
    """Return a parity, reporting a number that is none: the hardware is not said to cut it."""
    if given not in (0, 1):
        partition.report(
            "barrier", f"{what} for parity {given}: a parity is 0 or 1", loc, what,
            hint="take the phase's number & 1",
        )  # fmt: skip
    return given & 1


# ---- fences
@lowers("ttng.fence_async_shared", "ttng.fence_async", kind=STEP, attrs=["bCluster"], words=r"")
def _proxy_fence(op: Op, program: Program) -> Run:
    def run(f: Frame) -> None:
        for one in f[0].team:
            one.fence_proxies(memory=False)

    return run


@lowers(
    "ttng.fence_mbarrier_init_release_cluster", "ttng.fence_mbarrier_init", kind=STEP, words=r""
)
def _init_fence(op: Op, program: Program) -> Run:
    return lambda f: release_inits(f[0])


def release_inits(partition: Partition) -> None:
    """Play fence.mbarrier_init: TMA sees the mbarriers that were initialised before."""
    for buffer in partition.cta.buffers.values():
        for barrier in buffer.bars.values():
            barrier.fenced = True


def check_init_fence(partition: Partition, barrier: Barrier, loc: Loc) -> None:
    """Note an mbarrier that the TMA unit may meet before its initialisation."""
    if barrier.fenced or not partition.cta.launch.shared.fences:
        return
    barrier.fenced = True
    if partition.fence.get(barrier.made_by.key, 0) < barrier.made_at:
        partition.report(
            "barrier", f"mbarrier {barrier.name} is given to a TMA load with no fence since its "
            "mbarrier.init", loc, "TMA load", severity="info",
            other=Access(
                barrier.loc, "mbarrier.init", barrier.made_by.title, partition.cta.program
            ),
            hint="fence_async_shared() after the last mbarrier.init",
        )  # fmt: skip


@lowers("ttng.fence", kind=STEP, attrs=["scope"], words=r"gpu|cta|sys|release|acquire|acq_rel")
def _other_fence(op: Op, program: Program) -> Run:
    def run(f: Frame) -> None:
        for one in f[0].team:
            global_edges.fence(one)

    return run


# ---- clusters
@lowers("ttng.cluster_barrier", kind=STEP, attrs=["relaxed"], words=r"")
def _cluster_barrier(op: Op, program: Program) -> Run:
    relaxed = op.attrs.get("relaxed") == "true"

    def run(f: Frame) -> None:
        if dialect.RELAXED_BARRIER_HAS_FENCE:
            release_inits(f[0])
        cluster.arrive_all(f[0], relaxed=relaxed)
        cluster.wait_all(f[0])

    return run


@lowers("ttng.cluster_arrive", kind=STEP, attrs=["relaxed"], words=r"")
def _cluster_arrive(op: Op, program: Program) -> Run:
    relaxed = op.attrs.get("relaxed") in ("true", "1 : i1")
    return lambda f: cluster.arrive_all(f[0], relaxed=relaxed)


@lowers("ttng.cluster_wait", kind=STEP, words=r"")
def _cluster_wait(op: Op, program: Program) -> Run:
    return lambda f: cluster.wait_all(f[0])
