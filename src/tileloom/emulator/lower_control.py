"""Lowerings of control flow: structured loops and branches, calls, warp specialisation."""

from __future__ import annotations

import linecache
import re
from collections import Counter
from collections.abc import Generator
from functools import lru_cache
from typing import Any

from tileloom.emulator import stream
from tileloom.emulator.global_edges import meet
from tileloom.emulator.ir import Block, Op, walk
from tileloom.emulator.lower import END, NEST, PURE, STEP, Program, Run, lowers
from tileloom.emulator.machine import Frame, Partition, Wait
from tileloom.emulator.spinning import Turns, rest

Steps = Generator[Wait | None, None, Any]
_LOOP_ATTRS = [
    "tt.num_stages", "tt.loop_unroll_factor", "tt.warp_specialize", "tt.flatten",
    "tt.disallow_acc_multi_buffer", "tt.scheduled_max_stage", "ttg.partition.stages",
    "llvm.loop_annotation",
]  # fmt: skip


@lowers(
    "scf.yield", "scf.condition", "tt.return", "ttg.warp_yield", "ttg.warp_return",
    "tt.reduce.return", "tt.scan.return", "tt.map_elementwise.return", "cf.br", "cf.cond_br",
    kind=END, words=r"",
)  # fmt: skip
def _end(op: Op, program: Program) -> Run:
    if op.name == "cf.br":
        ((label, values),) = op.successors
        return lambda f: (label, [f[s] for s in values])
    if op.name == "cf.cond_br":
        (condition,) = op.operands[:1]
        (yes, yes_values), (no, no_values) = op.successors

        def run(f: Frame) -> tuple[str, list[Any]]:
            if f[condition]:
                return yes, [f[s] for s in yes_values]
            return no, [f[s] for s in no_values]

        return run
    return lambda f: None


@lowers("ub.poison", words=r"")
def _poison(op: Op, program: Program) -> Run:
    (d,) = op.results

    def run(f: Frame) -> None:
        f[d] = 0

    return run


@lowers("scf.for", kind=NEST, attrs=_LOOP_ATTRS, words=r"unsigned")
def _for(op: Op, program: Program) -> Run:
    low, high, step = op.operands[:3]
    inits, results = op.operands[3:], op.results
    body = op.regions[0]
    index, *carried = body[0].args
    pure = program.build_blocks(body)
    length = len(body[0].ops)
    if pure:
        op.kind = PURE

        def run_pure(f: Frame) -> None:
            values = [f[s] for s in inits]
            for i in range(f[low], f[high], f[step]):
                f[index] = i
                for slot, value in zip(carried, values):
                    f[slot] = value
                values = program.run_pure(body, f)
                f[0].cta.launch.count_steps(length, f[0], op.loc)
            for slot, value in zip(results, values):
                f[slot] = value

        return run_pure

    def run(f: Frame) -> Steps:
        values = [f[s] for s in inits]
        launch = f[0].cta.launch
        for i in range(f[low], f[high], f[step]):
            f[index] = i
            for slot, value in zip(carried, values):
                f[slot] = value
            values = (yield from program.run_blocks(body, f)) or []
            launch.count_steps(length, f[0], op.loc)
            if (wait := rest(f[0], op.loc)) is not None:
                yield wait
        for slot, value in zip(results, values):
            f[slot] = value

    return run


@lowers("scf.if", kind=NEST, words=r"")
def _if(op: Op, program: Program) -> Run:
    (condition,) = op.operands
    results = op.results
    pure = all([program.build_blocks(r) for r in op.regions])
    then = op.regions[0]
    other = op.regions[1] if len(op.regions) > 1 else None
    if pure:
        op.kind = PURE

        def run_pure(f: Frame) -> None:
            region = then if f[condition] else other
            if region is not None:
                for slot, value in zip(results, program.run_pure(region, f)):
                    f[slot] = value

        return run_pure

    def run(f: Frame) -> Steps:
        region = then if f[condition] else other
        if region is not None:
            values = (yield from program.run_blocks(region, f)) or []
            for slot, value in zip(results, values):
                f[slot] = value

    return run


@lowers("scf.while", kind=NEST, attrs=_LOOP_ATTRS, words=r"")
def _while(op: Op, program: Program) -> Run:
    before, after = op.regions
    program.build_blocks(before)
    program.build_blocks(after)
    inits, results = op.operands, op.results
    length = len(before[0].ops) + len(after[0].ops)

    def run(f: Frame) -> Steps:
        values = [f[s] for s in inits]
        partition: Partition = f[0]
        turns = Turns(partition)
        while True:
            for slot, value in zip(before[0].args, values):
                f[slot] = value
            go, *passed = (yield from program.run_blocks(before, f)) or [False]
            if not go:
                for slot, value in zip(results, passed):
                    f[slot] = value
                return
            for slot, value in zip(after[0].args, passed):
                f[slot] = value
            before_turn = values
            values = (yield from program.run_blocks(after, f)) or []
            partition.cta.launch.count_steps(length, partition, op.loc)
            if (wait := turns.end(op.loc, before_turn, values)) is not None:
                yield wait

    return run


@lowers("tt.call", kind=NEST, words=r"@.*")
def _call(op: Op, program: Program) -> Run:
    name = op.strings[0] if op.strings else op.words[0][1:]
    func = program.module.funcs[name]
    operands, results = op.operands, op.results

    def run(f: Frame) -> Steps:
        values = yield from program.call(func, f[0], [f[s] for s in operands])
        for slot, value in zip(results, values):
            f[slot] = value

    return run


@lru_cache(maxsize=4096)
def function_name(file: str, line: int) -> str | None:
    """Return the name of the function that a source line stands in."""
    for number in range(line, 0, -1):
        match = re.match(r"\s*def (\w+)", linecache.getline(file, number))
        if match:
            return match.group(1)
    return None


def partition_name(blocks: list[Block], kernel: str, fallback: str) -> str:
    """Return the name of the function that a partition runs, as the user wrote it.

    It is the outermost function of an operation's call chain that is not the kernel itself. Some
    chains are cut short by the compiler, so the most frequent name wins.
    """
    names: Counter[str] = Counter()
    for op in walk(blocks):
        chain = [function_name(place.file, place.line) for place in op.loc.chain()]
        outer = next((n for n in reversed(chain) if n is not None and n != kernel), None)
        if outer:
            names[outer] += 1
    return names.most_common(1)[0][0] if names else fallback


def _first_warps(main: int, warps: list[int]) -> list[int]:
    """Return where each partition's warps start: larger ones first, as the compiler does."""
    starts = [0] * len(warps)
    at = main
    for i in sorted(range(len(warps)), key=lambda n: -warps[n]):
        starts[i] = at
        at += warps[i]
    return starts


_SPECIALIZE_ATTRS = [
    "requestedRegisters", "actualRegisters", "warpGroupStartIds", "ttg.total-num-warps",
    "partitionNumWarps",
]  # fmt: skip


@lowers("ttg.warp_specialize", kind=NEST, attrs=_SPECIALIZE_ATTRS, words=r"")
def _warp_specialize(op: Op, program: Program) -> Run:
    default, *workers = op.regions
    for region in op.regions:
        program.build_blocks(region)
    names = [partition_name(r, program.name, f"worker{i}") for i, r in enumerate(workers)]
    default_name = partition_name(default, program.name, "default")
    for i, name in enumerate(names):
        if name == default_name or name in names[:i]:
            names[i] = f"{name}#{i + 1}"
    operands, results = op.operands, op.results
    warps = op.partition_warps
    starts = _first_warps(program.module.num_warps, warps)

    def run(f: Frame) -> Steps:
        main: Partition = f[0]
        cta = main.cta
        captured = [f[s] for s in operands]
        children = []
        for name, region, count, first in zip(names, workers, warps, starts):
            child = Partition(cta, name, count, main)
            child.first_thread = 32 * first
            frame = list(f)
            frame[0] = child
            for slot, value in zip(region[0].args, captured):
                frame[slot] = value
            child.generator = program.run_blocks(region, frame)
            cta.partitions.append(child)
            children.append(child)
        for one in main.team:
            one.clock[one.key] += 1
        outer = main.name
        for one in main.team:
            one.name = default_name
        yield None
        values = (yield from program.run_blocks(default, f)) or []
        for slot, value in zip(results, values):
            f[slot] = value

        def ended() -> bool:
            return all(c.finished for c in children)

        if not ended():
            yield Wait(ended, lambda: "the other partitions of warp_specialize to end", op.loc)
        for child in children:
            for one, mate in zip(main.team, child.team):
                one.learn(mate.clock, mate.fence)
        for one in main.team:
            one.name = outer

    return run


@lowers("ttg.barrier", "gpu.barrier", "nvvm.barrier0", "ttg.local_barrier", kind=STEP,
        attrs=["addrSpace"],
        words=r"local|global_read|global_write|tensor_read|tensor_write|all|none|\|")  # fmt: skip
def _barrier(op: Op, program: Program) -> Run:
    # Threads of one partition meet: inside a partition the emulator has one logical thread, which
    # only remembers whether they have met since they stored to global memory.
    def run(f: Frame) -> None:
        meet(f[0])

    return run


@lowers("tt.grid_dependency_wait", "tt.grid_dependency_launch_dependents", kind=STEP, words=r"")
def _grid_dependency(op: Op, program: Program) -> Run:
    play = stream.wait if op.name == "tt.grid_dependency_wait" else stream.launch_dependents
    return lambda f: play(f[0])
