"""Autotuners whose times are recorded, over the fake libcuda of tests/launch/fake_cuda.py."""

from __future__ import annotations

import math

from tests.launch.fake_cuda import DeviceTensor
from tests.tuning.store_samples import PLATFORM
from tests.tuning.tuned_kernels import FACTS, meta, scale

from tileloom.tuning.autotuner import CachingAutotuner
from tileloom.tuning.bandwidth import DebugAutotuner
from tileloom.tuning.cached import cached_autotune
from tileloom.tuning.config import Config
from tileloom.tuning.hints import HeuristicType


class Recorded:
    """A timer that gives each config its time, and notes who asks."""

    def __init__(self, tuner, restore):
        self.tuner, self.restore = tuner, restore

    def sample(self, calls):
        found = []
        for call in calls:
            launcher = next(
                cell.cell_contents
                for cell in call.__closure__
                if hasattr(cell.cell_contents, "config")
            )
            self.restore()
            call()
            self.tuner.asked.append(launcher.config)
            ms = self.tuner.times(launcher.config)
            if math.isinf(ms):
                raise RuntimeError("an illegal instruction was encountered")
            found.append(ms)
        return found


class Replayed(CachingAutotuner):
    """Takes its times from a function: ``Replayed.times = lambda config: 0.1``."""

    times = staticmethod(lambda config: 0.1)
    asked: list[Config] = []  # noqa: RUF012 - tests set it anew

    def make_timer(self, restore):
        return Recorded(type(self), restore)

    def platform(self):
        return PLATFORM


class ReplayedDebug(DebugAutotuner):
    times = staticmethod(lambda config: 0.1)
    asked: list[Config] = []  # noqa: RUF012

    def make_timer(self, restore):
        return Recorded(type(self), restore)

    def platform(self):
        return PLATFORM


def by_block(**times):
    """Times by XBLOCK: ``by_block(b64=0.3, b128=0.1)``."""
    return lambda config: times[f"b{config.kwargs['XBLOCK']}"]


def config(xblock, num_warps=4, **more):
    return Config({"XBLOCK": xblock, **more}, num_warps=num_warps, num_stages=1)


CONFIGS = [config(64), config(128), config(256)]
STREAM = 0x5EA


def make(kind, fn=None, configs=None, facts=None, heuristic=HeuristicType.POINTWISE, **changes):
    """Make an autotuner of `scale`, as generated code does."""
    options = {name: changes.pop(name) for name in ("size_hints", "search") if name in changes}
    return cached_autotune(
        options.get("size_hints", {"x": 1024}), CONFIGS if configs is None else configs,
        meta(**changes), heuristic, inductor_meta=FACTS | (facts or {}),
        caching_autotuner_cls=kind, search=options.get("search"),
    )(fn or scale)  # fmt: skip


def arguments(n=1000):
    return DeviceTensor(), DeviceTensor(), n


def run(tuner, *args, cuda=None):
    """Launch; with the fake library, so that it knows the kernel's parameters from then on."""
    result = tuner.run(*(args or arguments()), stream=STREAM)
    if cuda is not None:
        cuda.define(result)
        tuner.run(*(args or arguments()), stream=STREAM)
    return result
