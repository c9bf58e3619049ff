"""A clock that only contenders move, so that every number of a test is known beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tileloom.bench import AttentionCase, Contender, Inputs, Plan, Sample, Session
from tileloom.bench.reference import chunked_attention
from tileloom.testing import assert_accurate

SMALL = AttentionCase("small", 1, 2, 2, 64, 64, 32, False, "float32")
CAUSAL = AttentionCase("small-causal", 1, 2, 2, 64, 64, 32, True, "float32")
CPU = torch.device("cpu")


class FakeTimer:
    """Device and host time are what contenders say by `spend`; pauses are noted, not taken."""

    def __init__(self) -> None:
        self.device_ms = 0.0
        self.host_us = 0.0
        self.pauses: list[float] = []
        self.samples: list[tuple[int, float]] = []
        self.lost = False

    def spend(self, device_ms: float, host_us: float = 0.0) -> None:
        self.device_ms += device_ms
        self.host_us += host_us

    def warm(self, call: Callable[[int], Any], calls: int) -> None:
        for i in range(calls):
            call(i)

    def sample(self, call: Callable[[int], Any], calls: int, lead_ms: float) -> Sample:
        device, host = self.device_ms, self.host_us
        self.warm(call, calls)
        self.samples.append((calls, lead_ms))
        return Sample((self.device_ms - device) / calls, (self.host_us - host) / calls)

    def pause(self, seconds: float) -> None:
        self.finish()
        self.pauses.append(seconds)

    def finish(self) -> None:
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


class OneMs(FakeTimer):
    """Every call takes 1 ms, whatever it does."""

    def sample(self, call: Callable[[int], Any], calls: int, lead_ms: float) -> Sample:
        call(0)
        return Sample(1.0, 1.0)


def right(inputs: Inputs, is_causal: bool) -> torch.Tensor:
    case = AttentionCase("right", 1, 1, 1, 1, 1, 1, is_causal)
    return chunked_attention(inputs, case, compute_dtype=inputs.q.dtype)


def contender(
    name: str,
    timer: FakeTimer,
    ms: float,
    *,
    side: Any = "peer",
    spoil: Callable[[torch.Tensor, int], torch.Tensor] = lambda out, run: out,
    host_us: float = 5.0,
    **options: Any,
) -> Contender:
    """A contender of known speed; `spoil(out, run)` may change its output of the run-th call."""
    runs = [0]

    def prepare(case: AttentionCase, inputs: Inputs) -> Callable[[], torch.Tensor]:
        out = right(inputs, case.is_causal)

        def call() -> torch.Tensor:
            timer.spend(ms, host_us)
            runs[0] += 1
            return spoil(out, runs[0])

        return call

    return Contender(name, side, prepare, **options)


def session(timer: FakeTimer, **options: Any) -> Session:
    plan = options.pop("plan", Plan(rounds=6, sample_ms=4.0, warm_ms=2.0, pause_s=0.25))
    return Session(CPU, timer, plan, judge=assert_accurate, l2_bytes=1000, **options)
