import time
import warnings

import pytest
import torch

from tileloom.bench.timer import Plan, Sample
from tileloom.errors import UnsupportedError
from tileloom.ops.attention.reference import attention_reference
from tileloom.report.contest import Entrant, attention_contest, run_contest

PLAN = Plan(rounds=6, sample_ms=1.0, warm_ms=0.1, pause_s=0.0)


class Clock:
    """A timer for the CPU; a call may say itself how long it took."""

    def warm(self, call, calls):
        call(0)

    def sample(self, call, calls, lead_ms):
        started = time.perf_counter()
        said = getattr(call(0), "took_ms", None)
        return Sample(said or (time.perf_counter() - started) * 1e3, 1.0)

    def pause(self, seconds):
        pass

    def finish(self):
        pass


def qkv(dtype=torch.float16):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 2, 48, 32, generator=generator).to(dtype) for _ in range(3)]


def pair(q, k, v):
    return (
        attention_reference(q, k, v, compute_dtype=torch.float64),
        attention_reference(q, k, v, compute_dtype=q.dtype),
    )


def entrant(name, took_ms, make):
    def call():
        out = make()
        out.took_ms = took_ms
        return out

    return Entrant(name, call)


def test_who_is_right_is_timed_and_compared_with_ours():
    q, k, v = qkv()

    def refuse():
        warnings.warn(
            "Flash attention kernel not used because: (Triggered internally)", stacklevel=1
        )
        warnings.warn("It takes no mask. (Triggered internally at a.cpp:1)", stacklevel=1)
        warnings.warn("Math has been runtime disabled. (Triggered internally)", stacklevel=1)
        raise RuntimeError("no kernel here\nmore")

    def unsupported():
        raise UnsupportedError("attention: no backend takes this")

    rows = run_contest(
        "t",
        [
            entrant("tileloom", 2.0, lambda: attention_reference(q, k, v)),
            entrant("slow", 6.0, lambda: attention_reference(q, k, v)),
            entrant("fast", 1.0, lambda: attention_reference(q, k, v)),
            entrant("wrong", 0.1, lambda: attention_reference(q, k, v, scale=0.19)),
            entrant("refusing", 0.1, refuse),
            entrant("unsupported", 0.1, unsupported),
        ],
        *pair(q, k, v),
        Clock(),
        PLAN,
    ).rows
    assert [row.name for row in rows] == [
        "tileloom", "slow", "fast", "wrong", "refusing", "unsupported"
    ]  # fmt: skip
    assert [row.status for row in rows] == ["ok"] * 3 + ["wrong", "refused", "refused"]
    assert [row.median_us for row in rows] == pytest.approx(
        [2000.0, 6000.0, 1000.0, None, None, None]
    )
    assert rows[0].speedup is None
    assert (rows[1].speedup, rows[1].speedup_low, rows[1].speedup_high) == pytest.approx((3, 3, 3))
    assert rows[2].speedup == pytest.approx(0.5)
    assert rows[3].note.startswith("AccuracyError: wrong: ")
    assert rows[4].note == "RuntimeError: no kernel here; It takes no mask."
    assert rows[5].note == "UnsupportedError: attention: no backend takes this"


def test_without_ours_nobody_is_compared():
    q, k, v = qkv()
    rows = run_contest(
        "t",
        [
            entrant("tileloom", 1.0, lambda: attention_reference(q, k, v) * 2),
            entrant("peer", 1.0, lambda: attention_reference(q, k, v)),
        ],
        *pair(q, k, v),
        Clock(),
        PLAN,
    ).rows
    assert [row.status for row in rows] == ["wrong", "ok"]
    assert rows[1].speedup is None


@pytest.mark.parametrize("lengths", [None, torch.tensor([48, 31, 7, 1], dtype=torch.int32)])
def test_pytorch_gets_the_same_problem(lengths):
    rows = {r.name: r for r in attention_contest("t", *qkv(), lengths, Clock(), PLAN).rows}
    assert list(rows) == [
        "tileloom", "PyTorch cuDNN", "PyTorch flash", "PyTorch mem-efficient", "PyTorch math"
    ]  # fmt: skip
    assert rows["tileloom"].status == "ok"
    assert rows["tileloom"].note == "by reference"
    assert rows["PyTorch math"].status == "ok"  # the same mask, or it would be wrong
    assert rows["PyTorch cuDNN"].status == "refused"  # there is none on the CPU
    assert rows["PyTorch math"].speedup > 0
