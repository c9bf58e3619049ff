"""`emulator.run`: the context in which launches are played, and what it found."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from tileloom import target as targets
from tileloom.emulator import endings, host
from tileloom.emulator.capture import captured
from tileloom.emulator.costs import COSTS
from tileloom.emulator.costs import check as look_at_costs
from tileloom.emulator.endings import RingUse
from tileloom.emulator.lower import Program
from tileloom.emulator.machine import SCHEDULES, HostEvent, Launch, Options, StepsExceeded
from tileloom.emulator.memory import Storage
from tileloom.emulator.report import KINDS, LaunchError, Report, Reporter
from tileloom.emulator.stream import Stream
from tileloom.emulator.timeline import Timeline
from tileloom.errors import OptionError, known_keywords

LEVELS = ("ttir", "ttgir", "machine")
_ARCHS = {"sm_80": (8, 0), "sm_90": (9, 0), "sm_90a": (9, 0)}


@dataclass
class LaunchInfo:
    """What one launch cost: its kernel, programs, checked accesses and steps; its rings.

    `places` are the files' names and lines that the kernel's operations come from.
    """

    kernel: str
    grid: tuple[int, int, int]
    shared_accesses: int
    global_accesses: int
    steps: int
    rings: tuple[RingUse, ...] = ()
    places: frozenset[tuple[str, int]] = frozenset()


@dataclass
class Run:
    """An emulated run; `run` makes one.

    Attributes:
        options: How launches are played.
        target: The hardware that the emulator plays.
        reporter: Where reports go.
        launches: What each launch cost.
        cost_reporter: Where reports of kind ``cost`` go; None: to the others.
    """

    options: Options
    target: targets.Target
    reporter: Reporter
    launches: list[LaunchInfo] = field(default_factory=list)
    cost_reporter: Reporter | None = None
    record: bool = False
    _timeline: Timeline | None = None
    _events: list[HostEvent] = field(default_factory=list)
    _stream: Stream = field(default_factory=Stream)

    @property
    def reports(self) -> list[Report]:
        """Everything found so far, in order."""
        return self.reporter.reports

    @property
    def errors(self) -> list[Report]:
        """The reports with severity ``error``."""
        return [r for r in self.reports if r.severity == "error"]

    @property
    def suppressed(self) -> list[tuple[Report, str]]:
        """Reports that a comment at their line suppresses, with the comment's reason."""
        return self.reporter.suppressed

    @property
    def capability(self) -> int:
        """The compute capability as Triton counts it, for example 90."""
        return self.target.capability[0] * 10 + self.target.capability[1]

    def host_write(self, tensor: torch.Tensor, value: Any) -> None:
        """Let the host write a tensor at an arbitrary moment of the next launch.

        Events happen in the order they were given: under ``late`` when every program is blocked,
        under ``eager`` before the first one starts, under ``random`` at any time. A write of at
        most 8 bytes is a release at system scope; larger ones are plain data.

        Args:
            tensor: A contiguous CPU tensor that the kernel sees.
            value: What to write: a tensor or number that broadcasts.
        """
        self._events.append(host.write_event(tensor, value))

    def host_call(self, action: Callable[[], Any]) -> None:
        """Let the host do something at an arbitrary moment of the next launch.

        Args:
            action: Called once. Memory it writes makes no happens-before edge.
        """
        self._events.append(HostEvent(lambda launch: action(), getattr(action, "__name__", "host")))

    def timeline(self, path: str | Path) -> None:
        """Write what happened as a Chrome trace; open it in Perfetto.

        Args:
            path: Where to write the JSON.

        Raises:
            LaunchError: If the run was made with ``timeline=False``.
        """
        if self._timeline is None:
            raise LaunchError(
                "emulator: this run kept no timeline. Try: emulator.run without timeline=False."
            )
        self._timeline.write(path)

    def launch(
        self, program: Program, args: list[Any], grid: tuple[int, int, int],
        storages: list[Storage], *, pdl: bool = False,
    ) -> None:  # fmt: skip
        """Play one launch; called by the captured driver."""
        self.reporter.kernel = program.name
        events, self._events = self._events, []
        launch = Launch(
            program, args, grid, self.reporter, self.options, storages, events, self._timeline
        )
        self._stream.begin(launch, pdl=pdl)
        costs = self.cost_reporter or self.reporter
        costs.kernel = program.name
        look_at_costs(program, self.options.costs, costs)
        launch.shared.fences = program.is_gluon or program.level == "machine"
        if self._timeline is not None:
            self._timeline.begin(program.name)
        try:
            with np.errstate(all="ignore"), contextlib.suppress(StepsExceeded):
                launch.run()
                while launch.host_events:
                    launch.play_host_event()
        finally:
            self.launches.append(
                LaunchInfo(
                    program.name,
                    grid,
                    launch.shared.count,
                    launch.memory.count,
                    launch.steps,
                    tuple(endings.rings(launch)),
                    program.places,
                )
            )


def _one_of(name: str, value: str, accepted: Sequence[str]) -> str:
    if value not in accepted:
        raise OptionError(
            f"emulator: {name}={value!r} is not known; accepted are {', '.join(accepted)}."
        )
    return value


def _some_of(name: str, values: Any, accepted: Sequence[str]) -> None:
    if isinstance(values, str):
        raise OptionError(
            f"emulator: {name}={values!r} is one text; it must be a list of them. "
            f"Try: {name}=[{values!r}]."
        )
    if not isinstance(values, Iterable):
        raise OptionError(f"emulator: {name} is {values!r}; it must be a list. Try: {name}=[].")
    for value in values:
        _one_of(name, value, accepted)


def _at_least_one(name: str, value: Any) -> None:
    if not isinstance(value, int) or value < 1:
        raise OptionError(
            f"emulator: {name} is {value!r}; it must be a whole number of at least 1."
        )


@known_keywords
@contextlib.contextmanager
def run(
    *,
    arch: str = "sm_90a",
    schedule: str = "late",
    level: str = "ttgir",
    seed: int = 0,
    collect: bool = False,
    ignore: Sequence[str] = (),
    timeline: bool = True,
    sms: int = 132,
    max_steps: int = 20_000_000,
    read_before_write_fence: str = "warning",
    costs: Sequence[str] = (),
) -> Generator[Run]:
    """Run every kernel launched inside the block on the emulator, on CPU tensors.

    Equivalent: the same launches on a Hopper GPU, with an adversary who decides when each copy and
    each matrix multiply completes, and an observer who knows which access was ordered before which.
    Inside, BLAS uses one thread, whatever was set before; that comes back at the end. Runs may be
    nested, but by one thread at a time: Triton's driver, which they replace, is one for all.

    Args:
        arch: ``sm_90a`` (or ``sm_90``), or ``sm_80`` for portable kernels.
        schedule: When asynchronous operations complete: ``late`` (only when every partition is
            blocked, the newest first), ``eager`` (at once), or ``random``.
        level: What is run: ``ttir`` (portable kernels before layouts), ``ttgir`` (as the author
            wrote it), or ``machine`` (after the compiler's shared-memory allocation and fences).
        seed: The seed of the ``random`` schedule.
        collect: Keep going after an error; reports stand in ``run.reports``.
        ignore: Kinds of reports to leave out.
        timeline: Keep a timeline of the first programs, for ``run.timeline(path)``.
        sms: Multiprocessors: how many programs run at the same time.
        max_steps: A kernel that takes more is reported as one that does not end.
        read_before_write_fence: Severity of a generic read that is ordered before an asynchronous
            write, but without a proxy fence: ``error``, ``warning``, ``info`` or ``ignore``.
        costs: Also say what is right but slow, as warnings of kind ``cost``: ``conflicts`` (bank
            conflicts of shared memory), ``registers`` (spills, and wgmma that the assembler
            serialises; at level ``machine`` only, it takes seconds a kernel).

    Yields:
        The run: reports, cost of each launch, host events.

    Raises:
        OptionError: If an argument is not one of those accepted.
        LaunchError: If another thread is in a run.
        ReportError: From the launch that met the first error, unless `collect` is set.

    Example:
        >>> from tileloom import emulator
        >>> with emulator.run(schedule="random", seed=3, collect=True) as found:
        ...     pass  # my_kernel[grid](a, b, c)
        >>> found.reports
        []
    """
    _one_of("arch", arch, tuple(_ARCHS))
    _one_of("schedule", schedule, SCHEDULES)
    _one_of("level", level, LEVELS)
    _one_of("read_before_write_fence", read_before_write_fence,
            ("error", "warning", "info", "ignore"))  # fmt: skip
    _some_of("ignore", ignore, KINDS)
    _some_of("costs", costs, COSTS)
    _at_least_one("sms", sms)
    _at_least_one("max_steps", max_steps)
    if type(seed) is not int:
        raise OptionError(f"emulator: seed is {seed!r}; it must be a whole number. Try: seed=0.")
    capability = _ARCHS[arch]
    smem = targets.SMEM_BYTES[capability]
    name = "NVIDIA H100 80GB HBM3" if capability == (9, 0) else "NVIDIA A100-SXM4-80GB"
    played = targets.Target("emulated", capability, sms, smem, name)
    options = Options(
        schedule, seed, level, sms, smem, max_steps, read_before_write_fence, costs=tuple(costs)
    )
    reporter = Reporter(collect, frozenset(ignore), schedule, seed, level)
    session = Run(options, played, reporter)
    if timeline:
        session._timeline = Timeline()
    with threadpool_limits(limits=1, user_api="blas"), targets.override(played), captured(session):
        yield session
