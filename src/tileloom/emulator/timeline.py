"""A Chrome trace of an emulated run: a track for each partition, and what is in flight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tileloom.emulator.machine import Cta, InFlight, Partition, Wait

# Programs that get tracks of their own; a trace of thousands is of no use to anybody.
MAX_PROGRAMS = 16


class Timeline:
    """Collects spans; time is the emulator's step count, shown as microseconds."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._programs: dict[tuple[int, tuple[int, ...]], int] = {}
        self._named: set[tuple[int, int]] = set()
        self._launch = 0
        self._kernel = ""
        self._flights = 0

    def begin(self, kernel: str) -> None:
        """Start a launch."""
        self._launch += 1
        self._kernel = kernel

    def _process(self, cta: Cta) -> int | None:
        key = (self._launch, cta.program)
        found = self._programs.get(key)
        if found is None:
            if len(self._programs) >= MAX_PROGRAMS:
                return None
            found = self._programs[key] = len(self._programs) + 1
            name = f"{self._kernel} program {cta.program}"
            self._events.append(
                {"ph": "M", "pid": found, "name": "process_name", "args": {"name": name}}
            )
        return found

    def _span(
        self, cta: Cta, track: int, track_name: str, name: str, start: int, end: int, **args: Any
    ) -> None:
        process = self._process(cta)
        if process is None or end <= start:
            return
        if (process, track) not in self._named:
            self._named.add((process, track))
            self._events.append(
                {"ph": "M", "pid": process, "tid": track, "name": "thread_name",
                 "args": {"name": track_name}}
            )  # fmt: skip
        self._events.append(
            {"ph": "X", "pid": process, "tid": track, "name": name, "ts": start,
             "dur": end - start, "args": args}
        )  # fmt: skip

    def ran(self, partition: Partition, start: int, end: int) -> None:
        """Note that a partition ran."""
        where = str(partition.here) if partition.here else ""
        self._span(partition.cta, partition.track, partition.name, "run", start, end, line=where)

    def waited(self, partition: Partition, wait: Wait, start: int, end: int) -> None:
        """Note that a partition was blocked."""
        self._span(
            partition.cta, partition.track, partition.name, f"wait: {wait.text()}", start, end,
            line=str(wait.loc),
        )  # fmt: skip

    def flight(self, cta: Cta, operation: InFlight, end: int) -> None:
        """Note an asynchronous operation from its issue to its completion, as an async span."""
        process = self._process(cta)
        if process is None:
            return
        self._flights += 1
        name = f"{operation.kind} of {operation.partition.name}"
        common = {"pid": process, "tid": 100, "id": self._flights, "cat": "in flight", "name": name}
        args = {"line": str(operation.loc)}
        self._events.append({**common, "ph": "b", "ts": operation.start, "args": args})
        self._events.append({**common, "ph": "e", "ts": end})

    def write(self, path: str | Path) -> None:
        """Write the trace as JSON."""
        Path(path).write_text(json.dumps({"traceEvents": self._events}))
