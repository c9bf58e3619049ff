"""Times packed attention on a GPU beside peers, and beside the plain kernel by arithmetic done.

PYTHONPATH=src python scripts/time_packed.py [--out FILE] [--commit HASH]

16,384 rows and a hidden size of 2,048, bf16. Lengths are log-normal around 4,096 or 512, or all
4,096; the plain call has 4 sequences of 4,096. All contenders run in turn in one process, each
sample after the L2 cache was overwritten and while the GPU is kept busy until the host has launched
it; medians of milliseconds, and TFLOP/s of the visible scores (a backward counts 2.5 times a
forward).
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

import tileloom
from tileloom import masks

ROWS, HIDDEN = 16_384, 2_048
LEAD = 3_000_000  # clocks; without it whoever comes first behind a pause pays 0.15 ms a call
Call = Callable[[], Any]


def lengths(count: int, sigma: float) -> list[int]:
    """Log-normal lengths that add up to ROWS."""
    draw = torch.randn(count, generator=torch.Generator().manual_seed(1))
    parts = torch.exp(draw * sigma)
    whole = (parts / parts.sum() * ROWS).long().clamp(min=1)
    whole[whole.argmax()] += ROWS - int(whole.sum())
    return whole.tolist()


def timed(calls: dict[str, Call], rounds: int, calls_a_sample: int = 3) -> dict[str, float]:
    """Median milliseconds of each call, in turns."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    flush = torch.empty(64 * 2**20, dtype=torch.int32, device="cuda")
    for call in calls.values():
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name, call in calls.items():
            flush.zero_()
            torch.cuda._sleep(LEAD)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(calls_a_sample):
                call()
            end.record()
            end.synchronize()
            samples[name].append(begin.elapsed_time(end) / calls_a_sample)
        time.sleep(0.01)
    return {name: statistics.median(times) for name, times in samples.items()}


class Setting:
    """One choice of lengths, head dim and mask, with its tensors."""

    def __init__(self, name: str, lens: list[int], head_dim: int, is_causal: bool) -> None:
        self.name, self.lens, self.head_dim, self.is_causal = name, lens, head_dim, is_causal
        heads = HIDDEN // head_dim
        draw: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.q, self.k, self.v, self.dout = (
            torch.randn(ROWS, heads, head_dim, **draw) for _ in range(4)
        )
        self.cu = torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device="cuda")
        self.most = max(lens)
        batch = (4, 4096, heads, head_dim)
        self.plain = [torch.randn(batch, **draw).transpose(1, 2) for _ in range(4)]

    def flops(self, name: str, is_backward: bool) -> float:
        """Operations on visible scores."""
        lens = [4096] * 4 if name == "plain" else self.lens
        scores = sum(n * (n + 1) / 2 if self.is_causal else n * n for n in lens)
        return 4 * scores * HIDDEN * (2.5 if is_backward else 1.0)

    def packed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        """Our packed call."""
        mask = masks.causal("bottom_right") if self.is_causal else None
        return tileloom.attention_varlen(q, k, v, self.cu, self.cu, self.most, self.most, mask=mask)

    def forwards(self) -> dict[str, Call]:
        """The contenders."""
        q, k, v, cu, most = self.q, self.k, self.v, self.cu, self.most
        aten = torch.ops.aten
        return {
            "tileloom": lambda: self.packed(q, k, v),
            "plain": lambda: tileloom.attention(*self.plain[:3], is_causal=self.is_causal),
            "flash": lambda: aten._flash_attention_forward(
                q, k, v, cu, cu, most, most, 0.0, self.is_causal, False
            ),
            "efficient": lambda: aten._efficient_attention_forward(
                q[None], k[None], v[None], None, cu, cu, most, most, 0.0, int(self.is_causal), True
            ),
        }

    def backwards(self) -> dict[str, Call]:
        """The contenders' gradients of q, k and v."""
        leaves = [t.detach().requires_grad_() for t in (self.q, self.k, self.v)]
        plain = [t.detach().requires_grad_() for t in self.plain[:3]]
        out = self.packed(*leaves)
        plain_out = tileloom.attention(*plain, is_causal=self.is_causal)
        q, k, v, cu, most, dout = self.q, self.k, self.v, self.cu, self.most, self.dout
        aten, forwards = torch.ops.aten, self.forwards()
        flash, flash_lse, rng, unused, _ = forwards["flash"]()
        seed_out, seed_lse, seed, offset, *_ = forwards["efficient"]()
        return {
            "tileloom": lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
            "plain": lambda: torch.autograd.grad(
                plain_out, plain, self.plain[3], retain_graph=True
            ),
            "flash": lambda: aten._flash_attention_backward(
                dout, q, k, v, flash, flash_lse, cu, cu, most, most, 0.0, self.is_causal, rng,
                unused,
            ),
            "efficient": lambda: aten._efficient_attention_backward(
                dout[None], q[None], k[None], v[None], None, seed_out, cu, cu, most, most, seed_lse,
                0.0, seed, offset, int(self.is_causal), False,
            ),
        }  # fmt: skip

    def measure(self, rounds: int) -> dict[str, Any]:
        """Time both directions."""
        row: dict[str, Any] = {
            "lengths": self.name,
            "head_dim": self.head_dim,
            "causal": self.is_causal,
        }
        for is_backward in (False, True):
            calls = self.backwards() if is_backward else self.forwards()
            times = timed(calls, rounds)
            row["backward" if is_backward else "forward"] = {
                name: {
                    "ms": round(ms, 4),
                    "tflops": round(self.flops(name, is_backward) / ms / 1e9, 1),
                }
                for name, ms in times.items()
            }
        return row


def settings() -> list[tuple[str, list[int], int, bool]]:
    """Name of the lengths, lengths, head dim, and whether it is causal."""
    each = {"4096": lengths(4, 0.5), "equal": [4096] * 4, "512": lengths(32, 1.0)}
    return [
        (name, lens, head_dim, is_causal)
        for name, lens in each.items()
        for head_dim in (64, 128)
        for is_causal in (False, True)
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", type=int, help="only the setting of this number")
    args = parser.parse_args()
    torch.manual_seed(0)
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": args.commit,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "rows": [],
    }
    chosen = settings() if args.only is None else settings()[args.only : args.only + 1]
    for setting in chosen:
        row = Setting(*setting).measure(args.rounds)
        record["rows"].append(row)
        print(json.dumps(row), flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
