"""Tuning of operators: of several configs of one call, the fastest on this GPU.

    with tileloom.tuning.operators():
        tileloom.rms_norm(x, weight)

Outside of such a block an operator decides by its measured rule and measures nothing. Inside, the
first call of each kind compares what the rule says with configs near it, and the winner goes to the
store: a later process that tunes finds it and measures nothing. What was decided inside holds
afterwards, for calls that are alike.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tileloom import log
from tileloom.errors import ArgumentError, shown_value
from tileloom.tuning.config import Config

if TYPE_CHECKING:
    from tileloom.tuning.identity import Platform

_log = log.get_logger("tuning")
_lock = threading.Lock()
_inside = 0

at_begin: list[Callable[[], None]] = []
"""Called when a block begins: what operators have decided before is to be decided anew."""

Call = Callable[[], Any]


class _NoneRunsError(Exception):
    """No config of a call ran."""


def operators(*given: object, **named: object) -> contextlib.AbstractContextManager[None]:
    """Tune operators at their first calls inside a `with` block, in all threads of the process.

    A call is tuned for its exact row length, dtype and options, and for its number of rows rounded
    up to a power of two. It compiles about ten configs, in this process, and takes seconds. The
    rule's config is always a candidate, and wins unless another is more than 0.5 % faster.

    Nothing is tuned inside the capture of a CUDA graph, under PyTorch's deterministic algorithms,
    for calls with an explicit config, and on the CPU.

    Args:
        given: Nothing; which operators are tuned follows from what is called inside.
        named: Nothing.

    Raises:
        ArgumentError: If it is given anything.
    """
    if given or named:
        shown = [
            *map(shown_value, given),
            *(f"{name}={shown_value(value)}" for name, value in named.items()),
        ]
        raise ArgumentError(
            f"tuning: operators is given {', '.join(shown)}; it takes no arguments, and tunes "
            "every operator that is called inside the block. Try: with tuning.operators():"
        )
    return _tuned_inside()


@contextlib.contextmanager
def _tuned_inside() -> Generator[None]:
    global _inside
    with _lock:
        _inside += 1
    for drop in at_begin:
        drop()
    try:
        yield
    finally:
        with _lock:
            _inside -= 1


def is_on(tensor: torch.Tensor) -> bool:
    """Whether a call with a tensor that is decided now is tuned."""
    return (
        _inside > 0
        and tensor.is_cuda
        and not torch.are_deterministic_algorithms_enabled()
        and not torch.cuda.is_current_stream_capturing()
    )


@functools.cache
def source_of(*folders: str) -> str:
    """Return a hash of the Python files of folders, which an operator's winners depend on."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders for path in Path(folder).glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def best(
    operator: str,
    source: str,
    facts: Mapping[str, Any],
    candidates: Sequence[Config],
    prepare: Callable[[Config], Call],
    device: torch.device,
    changed: Sequence[torch.Tensor] = (),
) -> Config | None:
    """Find the fastest of an operator's configs for a call: in the store, or by measuring.

    Args:
        operator: For example ``"tileloom.ops.rowwise:rms_norm_forward"``.
        source: What of its code the answer depends on; see `source_of`.
        facts: What of the call it depends on.
        candidates: The configs, the rule's first.
        prepare: From a config to what runs the call; raises where it cannot.
        device: A GPU.
        changed: Tensors that the call changes, restored before each.

    Returns:
        The winner; None where none of them runs, so that the call has the error of its own.
    """
    from tileloom.tuning.identity import Problem
    from tileloom.tuning.store import OPERATOR, Record, Store

    arch, platform = _where(device)
    problem = Problem(operator, source, {}, constants=facts, stages=OPERATOR, arch=arch).as_json()

    def make(known: Record | None) -> Record:
        del known  # all are measured together
        _log.info("%s: %d configs are compiled and compared", operator, len(candidates))
        return Record(problem, platform, **_compared(candidates, prepare, device, changed))

    def is_enough(record: Record) -> bool:
        return all(config in record.known() for config in candidates)

    try:
        return Store().find_or_make(problem, platform, is_enough, make).config
    except _NoneRunsError:  # nothing is kept: memory may be short now, and not later
        return None


def _where(device: torch.device) -> tuple[str, Platform]:
    """The architecture, and what winners of a device are stored under."""
    from tileloom.target import target_of_device
    from tileloom.tuning.identity import platform_of

    major, minor = target_of_device(device).capability
    return f"sm_{major}{minor}", platform_of(device)


def _compared(
    candidates: Sequence[Config],
    prepare: Callable[[Config], Call],
    device: torch.device,
    changed: Sequence[torch.Tensor],
) -> dict[str, Any]:
    """Compile and compare configs; the parts of a record beside problem and platform."""
    from tileloom.tuning.arguments import Snapshot
    from tileloom.tuning.measure import DeviceTimer, compare
    from tileloom.tuning.store import Candidate

    began = time.perf_counter()
    calls: dict[Config, Call] = {}
    reasons: dict[Config, str] = {}
    kept = Snapshot(changed)
    for config in candidates:
        try:
            call = prepare(config)
            for _ in range(3):  # compiled, recognised, prepared
                call()
        except Exception as error:
            reasons[config] = f"{type(error).__name__}: {error}"
        else:
            calls[config] = call
    there = list(calls)
    if not there:
        raise _NoneRunsError
    found = compare(list(calls.values()), DeviceTimer(device, before=kept.restore))
    kept.restore()
    timed = {
        config: Candidate(config.to_dict(), one.ms, one.ratio, one.reason)
        for config, one in zip(there, found.timings)
    }
    tried = [
        timed.get(config) or Candidate(config.to_dict(), reason=reasons[config])
        for config in candidates
    ]
    if found.winner is None:
        raise _NoneRunsError
    winner = there[found.winner]
    return {
        "winner": winner.to_dict(),
        "found_by": "list",
        "candidates": tuple(tried),
        "measured": {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seconds": round(time.perf_counter() - began, 3),
            "rounds": found.rounds,
            "time": "device events around each call, cold L2, in rotation",
        },
    }
