"""PTX instructions that touch memory, barriers or the clock."""

from __future__ import annotations

import re
from collections.abc import Generator
from functools import lru_cache
from typing import Any

import numpy as np

from tileloom.emulator import dtypes, global_access, global_edges, ptx_mbarrier, stream
from tileloom.emulator.barriers import NamedBarrier
from tileloom.emulator.ir import Loc
from tileloom.emulator.lower_async import wait_stores
from tileloom.emulator.lower_barriers import release_inits
from tileloom.emulator.machine import Partition, Wait
from tileloom.emulator.memory import Storage
from tileloom.emulator.ptx import Instruction, Lanes
from tileloom.emulator.ptx_values import WORD, width, words

Steps = Generator[Wait | None, None, None]
_ORDERS = ("relaxed", "acquire", "release", "acq_rel", "volatile", "weak")
_SCOPES = ("cta", "cluster", "gpu", "sys")
_ELEMENT = {8: "i8", 16: "i16", 32: "i32", 64: "i64"}
NAMED_BARRIERS = 16
FIRST_FREE = 8  # of Triton 3.6 to 3.9


_KNOWN_PARTS = frozenset({
    *_ORDERS, *_SCOPES, "global", "noftz", "nc", "L1::no_allocate", "L1", "no_allocate", "mmio",
    "v2", "v4",
})  # fmt: skip


@lru_cache(maxsize=1024)
def unknown_form(name: str) -> str | None:
    """Say why an instruction that acts outside its registers cannot be played.

    Args:
        name: The opcode with its suffixes, for example ``ld.acquire.gpu.global.b32``.

    Returns:
        The reason; None if it is known.
    """
    kind, *parts = name.split(".")
    if kind == "mbarrier":
        return ptx_mbarrier.unknown_form(parts)
    if kind not in ("fence", "cp") and "shared" in name:
        return "of shared memory only mbarriers are known: load and store buffers by Gluon"
    if kind in ("bar", "barrier"):
        words_ = [p for p in parts if p not in ("cta", "aligned")]
        if words_ not in (["sync"], ["arrive"], ["warp", "sync"]):
            return "only sync and arrive are known"
    elif kind in ("fence", "membar"):
        proxies = {"async", "alias", "tensormap::generic"}
        if not set(parts) & ({"acq_rel", "sc", "acquire", "release", "mbarrier_init"} | proxies):
            return None if kind == "membar" else "this fence is not known"
    elif kind == "cp":
        if parts[:3] not in (["async", "bulk", "commit_group"], ["async", "bulk", "wait_group"]):
            return "only cp.async.bulk.commit_group and wait_group are known"
    elif kind in ("ld", "st", "atom", "red"):
        known = _KNOWN_PARTS | (
            {*global_access.RMW_OPS, "cas"} if kind in ("atom", "red") else set()
        )
        strange = next((p for p in parts[:-1] if p not in known), None)
        if not re.fullmatch(r"[busf](8|16|32|64)|bf16|f16", parts[-1] if parts else ""):
            strange = parts[-1] if parts else name
        return strange and f"'.{strange}' is not known"
    elif kind == "griddepcontrol":
        if parts not in (["wait"], ["launch_dependents"]):
            return "of griddepcontrol only wait and launch_dependents are known"
    elif kind not in ("nanosleep", "elect", "prefetch", "trap"):
        return f"'{kind}' is not known"
    return None


def play(lanes: Lanes, i: Instruction) -> Steps:
    """Run one instruction that acts outside its registers."""
    name = i.parts[0]
    if why := unknown_form(i.name):
        raise lanes.fail(why, i)
    if lanes.partition.cta.clustered and name in (
        "ld",
        "st",
        "atom",
        "red",
        "bar",
        "barrier",
        "mbarrier",
    ):
        raise lanes.fail("in a cluster each CTA would run it; that is not played", i)
    if name in ("bar", "barrier"):
        yield from _named_barrier(lanes, i)
    elif name in ("ld", "st", "atom", "red"):
        yield None
        _memory(lanes, i)
    elif name == "fence" or name == "membar":
        _fence(lanes, i)
    elif name == "cp":
        yield from _bulk(lanes, i)
    elif name == "mbarrier":
        operand = next((o for o in i.operands if o.startswith("[")), "")
        yield from ptx_mbarrier.play(lanes, i, _address(lanes, operand, i))
    elif name == "nanosleep":
        lanes.partition.cta.launch.clock_ns += 32
    elif name == "elect":
        target = i.operands[0].partition("|")[2] or i.operands[0]
        lane = np.arange(lanes.count) % 32
        lanes.write(target.strip(), lane == 0)
    elif name == "griddepcontrol":
        (stream.wait if i.parts[1] == "wait" else stream.launch_dependents)(lanes.partition)
    elif name == "trap":
        lanes.partition.report("assert", "the kernel traps", lanes.loc, "trap")


def _number(lanes: Lanes, operand: str, i: Instruction) -> int:
    values = lanes.raw(operand, "u32")
    chosen = values if lanes.mask is None else values[lanes.mask]
    if not (chosen == chosen[0]).all():
        raise lanes.fail("lanes give different numbers", i)
    return int(chosen[0])


def _named_barrier(lanes: Lanes, i: Instruction) -> Steps:
    partition: Partition = lanes.partition
    words_ = [p for p in i.parts[1:] if p not in ("cta", "aligned")]
    if words_ == ["warp", "sync"]:
        return
    ident = _number(lanes, i.operands[0], i)
    everyone = 32 * partition.cta.launch.program.module.num_warps
    count = _number(lanes, i.operands[1], i) if len(i.operands) > 1 else everyone
    yield None
    wait = meet(partition, words_[0], ident, count, lanes.loc)
    if wait is not None:
        yield wait


def meet(partition: Partition, verb: str, ident: int, count: int, loc: Loc) -> Wait | None:
    """Let a partition arrive at a named barrier, and wait there if the verb is ``sync``.

    Args:
        partition: Who arrives, with all its threads.
        verb: ``sync`` or ``arrive``.
        ident: The barrier's number.
        count: The thread count that the instruction names.
        loc: The statement.

    Returns:
        A wait if the others have not arrived yet.
    """
    what = f"bar.{verb} {ident}, {count}"
    if not 0 <= ident < NAMED_BARRIERS or count % 32 or count <= 0:
        partition.report(
            "barrier",
            f"{what}: the barrier's number must be 0 to 15 and the count a multiple of 32",
            loc, what,
        )  # fmt: skip
        return None
    named = partition.cta.named.get(ident)
    if named is None:
        if ident < FIRST_FREE:
            partition.report(
                "barrier",
                f"{what}: numbers below {FIRST_FREE} are for the compiler's own barriers, of a "
                "program's threads and of each partition's", loc, what, severity="warning",
                hint=f"{FIRST_FREE} to {NAMED_BARRIERS - 1}",
            )  # fmt: skip
        named = partition.cta.named[ident] = NamedBarrier(ident)
    mine = named.arrive(partition, count, loc, what)
    if verb == "arrive":
        return None
    global_edges.meet(partition)
    if named.round > mine:
        named.acquire(partition)
        return None
    return Wait(
        lambda: named.round > mine, lambda: f"{what}: {named.state()}", loc,
        lambda: named.acquire(partition), lack=named.lack,
    )  # fmt: skip


def _fence(lanes: Lanes, i: Instruction) -> None:
    partition = lanes.partition
    parts = set(i.parts[1:])
    if "proxy" in parts:
        if "async" in i.name:
            for one in partition.team:
                one.fence_proxies(shared="global" not in parts, memory="shared" not in i.name)
        return
    if "mbarrier_init" in parts:
        release_inits(partition)
        return
    if "cta" not in parts:
        for one in partition.team:
            global_edges.fence(one)


def _bulk(lanes: Lanes, i: Instruction) -> Steps:
    name = i.name
    if name == "cp.async.bulk.commit_group":
        return
    pending = _number(lanes, i.operands[0], i)
    full = not name.endswith("read")
    wait = wait_stores(lanes.partition, pending, lanes.loc, i.text, full=full, meets=False)
    if wait is not None:
        yield wait


def _address(lanes: Lanes, operand: str, i: Instruction) -> np.ndarray:
    match = re.match(r"\[\s*([%$\w]+)\s*(?:\+\s*(-?\w+))?\s*\]$", operand)
    if match is None:
        raise lanes.fail(f"address {operand}", i)
    base = lanes.raw(match.group(1), "u64").astype(np.int64)
    return base + int(match.group(2) or "0", 0)


def _order_and_scope(i: Instruction) -> tuple[str, str]:
    weak = "weak" if i.parts[0] in ("ld", "st") else "relaxed"
    order = next((p for p in i.parts if p in _ORDERS), weak)
    return order, next((p for p in i.parts if p in _SCOPES), "gpu")


def _memory(lanes: Lanes, i: Instruction) -> None:
    kind = i.parts[0]
    if kind == "ld":
        _load(lanes, i)
    elif kind == "st":
        _store(lanes, i)
    else:
        _atomic(lanes, i)


def _vector(operand: str) -> list[str]:
    return [n.strip() for n in operand.strip("{}").split(",")]


def _place(
    lanes: Lanes, where: np.ndarray, size: int, i: Instruction
) -> tuple[Storage, Any] | None:
    """Return the storage and the elements that the lanes which run mean."""
    used = np.unique(where if lanes.mask is None else where[lanes.mask])
    storage, index = global_access.locate(lanes.partition, used, None, size, i.name, lanes.loc)
    if storage is None:
        return None
    return storage, global_access.selector(storage, index, size)


def _load(lanes: Lanes, i: Instruction) -> None:
    order, scope = _order_and_scope(i)
    partition = lanes.partition
    elem = _ELEMENT[width(i.type)]
    size = dtypes.size_of(elem)
    where = _address(lanes, i.operands[1], i)
    mask = lanes.mask
    strong = order != "weak"
    names = _vector(i.operands[0])
    for n, name in enumerate(names):
        value = global_access.read(
            partition, where + n * size, mask, None, elem, lanes.loc, i.name, atomic=strong
        )
        lanes.write(name, value.view(WORD[width(i.type)]))
    if strong and (place := _place(lanes, where, size, i)) is not None:
        global_edges.acquire(partition, *place, order, scope)


def _store(lanes: Lanes, i: Instruction) -> None:
    order, scope = _order_and_scope(i)
    partition = lanes.partition
    elem = _ELEMENT[width(i.type)]
    size = dtypes.size_of(elem)
    where = _address(lanes, i.operands[0], i)
    strong = order != "weak"
    releases = order in global_edges.RELEASES
    for n, name in enumerate(_vector(i.operands[1])):
        bits = lanes.raw(name, i.type)
        values = np.ascontiguousarray(bits).view(dtypes.numpy_type(elem))
        global_access.write(
            partition, where + n * size, values, lanes.mask, elem, lanes.loc, i.name,
            atomic=strong, releases=releases,
        )  # fmt: skip
    if strong and (place := _place(lanes, where, size, i)) is not None:
        who = _who(lanes, where, counts=False)
        global_edges.release(partition, *place, order, scope, modify=False, who=who)


def _who(lanes: Lanes, where: np.ndarray, *, counts: bool) -> str:
    """Which threads release, as `global_edges.release` has it.

    Of threads that write to one place one is seen; where they are counted, all may be.
    """
    active = lanes.active()
    if global_edges.is_first_alone(active):
        return "first"
    counts = counts and int(np.count_nonzero(active)) > 1
    return "all" if counts or np.unique(where[active]).size > 1 else "any"


def _atomic(lanes: Lanes, i: Instruction) -> None:
    operations = global_access.RMW_OPS | {"cas"}
    order, scope = _order_and_scope(i)
    operation = next(p for p in i.parts[1:] if p in operations)
    operands = list(i.operands)
    target = operands.pop(0) if i.parts[0] == "atom" else None
    where = _address(lanes, operands[0], i)
    kind = i.type
    elem = {"f32": "f32", "f64": "f64", "f16": "f16", "bf16": "bf16"}.get(
        kind, _ELEMENT[width(kind)]
    )
    if operation in ("min", "max") and kind[0] == "u":
        operation = "u" + operation

    def values(operand: str) -> Any:
        raw = np.ascontiguousarray(lanes.raw(operand, kind))
        return dtypes.from_bits(raw, elem)

    compare = values(operands[1]) if operation == "cas" else None
    old = global_access.atomic(
        lanes.partition, "exch" if operation == "cas" else operation, order, scope, where,
        values(operands[-1]), lanes.mask, elem, lanes.loc, compare, i.name,
        _who(lanes, where, counts=operation in ("add", "inc")),
    )  # fmt: skip
    if target is not None:
        lanes.write(target, words(dtypes.to_bits(old, elem), f"b{width(kind)}"))
