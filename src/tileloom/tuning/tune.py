"""One tuning: compile the candidates, compare them with a launch's own arguments, refine, record.

Each stage adds candidates and hands the best on: the list, reduction blocks halved where registers
keep programs off the SMs, a search over more configs, coordinate descent.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import statistics
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tileloom import log
from tileloom.tuning.arguments import Snapshot, tensors_named
from tileloom.tuning.clocks import Clock
from tileloom.tuning.config import Config, distinct
from tileloom.tuning.coordinate_descent import CoordescTuner, MeasureAll
from tileloom.tuning.loaded import Loaded
from tileloom.tuning.measure import CallTimer, Comparison, Timing, compare
from tileloom.tuning.store import Candidate

_log = log.get_logger("tuning")

SPILLS = 16
"""Registers of a thread in memory above which a generated kernel's config is not measured."""

_CALLS = 20

Search = Callable[[MeasureAll], Config]


@dataclass(frozen=True)
class Stages:
    """What is tried.

    Attributes:
        configs: The list, the default first.
        most_spills: Registers of a thread that may lie in memory; None for any number.
        scaled: From a config and its registers to one more candidate, or None.
        search: Chooses among further configs by measuring them; starts where it likes.
        descent: Refines the best of all.
    """

    configs: Sequence[Config]
    most_spills: int | None = SPILLS
    scaled: Callable[[Config, int | None], Config | None] | None = None
    search: Search | None = None
    descent: CoordescTuner | None = None

    @property
    def names(self) -> str:
        """The stages behind the list, as a record's key has them."""
        given = {"scaled": self.scaled, "search": self.search, "descent": self.descent}
        return "+".join(["list", *(name for name, value in given.items() if value is not None)])


@dataclass
class Outcome:
    """What a tuning found.

    Attributes:
        winner: The best config; None until something ran.
        found_by: The stage that found it: ``"list"``, ``"scaled"``, ``"search"``, ``"descent"``.
        tried: Every config that was tried.
        measured: Date, rounds, seconds, clock.
    """

    winner: Config
    found_by: str
    tried: dict[Config, Candidate]
    measured: dict[str, Any] = field(default_factory=dict)


class Session:
    """Compares loaded configs with the arguments of one launch, inside a `with` block.

    Arguments that the kernel changes have their values back before each launch, outside of what is
    timed, and at the end.
    """

    def __init__(
        self,
        loaded: Loaded,
        arguments: Sequence[Any],
        changed: Sequence[str],
        zeroed: Sequence[str],
        make_timer: Callable[[Callable[[], Any]], CallTimer],
        fits: Callable[[torch.Tensor], bool],
    ) -> None:
        """Describe it; nothing is copied yet.

        Args:
            loaded: The kernel's configs.
            arguments: Of the launch, in order.
            changed: Names of those that the kernel reads and writes.
            zeroed: Names of those that each launch is to find filled with zeros.
            make_timer: From what restores the arguments to what takes the time.
            fits: Whether a copy of a tensor may lie on its device.
        """
        self._loaded = loaded
        self._arguments = arguments
        self._names = changed, zeroed
        self._make_timer = make_timer
        self._fits = fits
        self._began = time.perf_counter()
        self._rounds = 0
        self._clock: Clock | None = None
        self.tried: dict[Config, Candidate] = {}

    def __enter__(self) -> Session:
        some = next(iter(self._loaded.launches.values()))
        named = dict(zip(some.parameters, self._arguments))
        changed, zeroed = (tensors_named(names, named) for names in self._names)
        self._kept = Snapshot(changed, zeroed, fits=self._fits)
        self._timer = self._make_timer(self._kept.restore)
        if torch.cuda.is_available():
            self._clock = Clock(self._loaded.device)
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        # Where the device is lost, that error says why; restoring would only hide it.
        with contextlib.nullcontext() if kind is None else contextlib.suppress(RuntimeError):
            self._kept.restore()

    def compare(self, configs: Sequence[Config]) -> Comparison:
        """Compare loaded configs, in order of preference, and note what is found of each."""
        found = compare([self._call(c) for c in configs], self._timer, on_round=self._on_round)
        for config, one in zip(configs, found.timings):
            known = self.tried.get(config)
            if known is None or one.ms is not None:
                self.note(config, one)
        return found

    def note(self, config: Config, timing: Timing | None = None) -> None:
        """Note what is found of a loaded config; without a timing, that none was needed."""
        found = timing or Timing()
        costs = self._loaded.costs(config)
        self.tried[config] = Candidate(
            config.to_dict(), found.ms, found.ratio, found.reason, **costs
        )

    def time(self, config: Config) -> float:
        """Return the median device time of a loaded config, in ms."""
        return statistics.median(self._timer.sample([self._call(config)] * (1 + _CALLS))[1:])

    def measure(self, configs: Sequence[Config]) -> list[float]:
        """Compile and time configs, of which the first is the one to beat; see `MeasureAll`.

        What cannot be told from the first counts as that one.
        """
        self._loaded.load_all(configs)
        there = [config for config in configs if config in self._loaded.launches]
        found = self.compare(there)
        times = {c: one.ratio for c, one in zip(there, found.timings) if one.ratio is not None}
        own = times.get(configs[0], math.inf)
        equal = {there[i] for i in found.equal}
        if configs[0] in equal:
            times |= dict.fromkeys(equal, own)
        return [times.get(config, math.inf) for config in configs]

    def _call(self, config: Config) -> Callable[[], Any]:
        launcher = self._loaded.launches[config].launcher
        return lambda: launcher(*self._arguments, stream=self._loaded.stream())

    def _on_round(self, done: int, left: int) -> None:
        self._rounds += bool(done)
        if self._clock is not None:
            self._clock.read()
        _log.info("%s: round %d of %d configs", self._loaded.kernel.short_name, done, left)

    def summary(self) -> dict[str, Any]:
        """Return what a reader of the record needs to judge its times."""
        return {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seconds": round(time.perf_counter() - self._began, 3),
            "rounds": self._rounds,
            "clock": None if self._clock is None else self._clock.summary(),
            "time": "device events around each launch, cold L2, in rotation",
        }


def tune(
    loaded: Loaded,
    stages: Stages,
    session: Session,
    known: Mapping[Config, Candidate],
    incumbent: Config | None,
) -> Outcome:
    """Find the best config.

    Args:
        loaded: The kernel's configs.
        stages: What to try.
        session: What compares.
        known: What an earlier tuning found out; of these only the incumbent is measured again.
        incumbent: Its winner.

    Returns:
        The winner, and all that is known now.

    Raises:
        NoTritonConfigsError: If no config runs.
    """
    loaded.failures |= {c: one.reason for c, one in known.items() if one.ms is None and one.reason}
    order = [c for c in stages.configs if c not in known or c == incumbent]
    if incumbent is not None and incumbent not in order:
        order.append(incumbent)
    loaded.load_all(order)
    if not loaded.launches:
        raise loaded.none_runs()
    listed = set(order)
    if stages.scaled is not None:
        order = _with_scaled(loaded, stages, order)
    candidates = loaded.runnable(order, stages.most_spills)
    if len(candidates) == 1 and stages.search is None and stages.descent is None:
        best = candidates[0]  # there is nothing to measure
        found_by = "list" if best in listed else "scaled"
        if best not in known:
            session.note(best)
    else:
        best, found_by = _compare(loaded, stages, session, candidates, listed)
    tried = {**known, **session.tried}
    tried |= {c: Candidate(c.to_dict(), reason=why) for c, why in loaded.failures.items()}
    for config in order:
        if config not in tried:
            costs = loaded.costs(config)
            why = f"not measured: {costs['spills']} registers of a thread lie in memory"
            tried[config] = Candidate(config.to_dict(), reason=why, **costs)
    return Outcome(best, found_by, tried, session.summary())


def _compare(
    loaded: Loaded,
    stages: Stages,
    session: Session,
    candidates: Sequence[Config],
    listed: Container[Config],
) -> tuple[Config, str]:
    """Measure candidates, search and refine; return the winner and the stage that found it."""
    with session:
        found = session.compare(candidates)
        if found.winner is None:
            failed = {c: one.reason for c, one in zip(candidates, found.timings)}
            raise loaded.none_runs(failed)
        best = candidates[found.winner]
        found_by = "list" if best in listed else "scaled"
        if stages.search is not None:
            chosen = stages.search(session.measure)
            own, other = session.measure([best, chosen]) if chosen != best else (1.0, 1.0)
            if other < own:
                best, found_by = chosen, "search"
        if stages.descent is not None:
            refined = stages.descent.descend(session.measure, best, tried=candidates)
            best, found_by = (refined, "descent") if refined != best else (best, found_by)
    return best, found_by


def _with_scaled(loaded: Loaded, stages: Stages, order: Sequence[Config]) -> list[Config]:
    """Add configs that follow from the registers of others, until there is no new one."""
    assert stages.scaled is not None
    grown, new = distinct(order), list(order)
    while new:
        made = [
            more
            for config in new
            if config in loaded.launches
            and (more := stages.scaled(config, loaded.costs(config)["registers"])) is not None
        ]
        new = [config for config in distinct(made) if config not in grown]
        loaded.load_all(new)
        grown += new
    return grown
