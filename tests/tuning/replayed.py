"""Autotuners whose times are recorded, over the fake libcuda of tests/launch/fake_cuda.py."""

from __future__ import annotations

import math

from tests.tuning.store_samples import PLATFORM

from tileloom.tuning.autotuner import CachingAutotuner
from tileloom.tuning.bandwidth import DebugAutotuner
from tileloom.tuning.config import Config


class Recorded:
    """A timer that gives each config its time, and notes who asks."""

    def __init__(self, tuner, restore):
        self.tuner, self.restore = tuner, restore

    def sample(self, call, calls):
        launcher = call.__closure__[0].cell_contents if call.__closure__ else None
        for cell in call.__closure__ or ():
            if hasattr(cell.cell_contents, "config"):
                launcher = cell.cell_contents
        for _ in range(calls):
            self.restore()
            call()
        self.tuner.asked.append(launcher.config)
        ms = self.tuner.times(launcher.config)
        if math.isinf(ms):
            raise RuntimeError("an illegal instruction was encountered")
        return [ms] * calls


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
