"""Times attention with head dims of q and k, and of v, that differ, on a GPU beside peers.

PYTHONPATH=src python scripts/time_head_dims.py [--out FILE] [--commit HASH] [--sweep]

4 sequences of 4,096 rows, bf16; as many heads as make the mean of both head dims 2,048 columns.
All contenders run in turn in one process, timed as by `time_packed.py`; medians of milliseconds,
and TFLOP/s of the visible scores. With `--sweep` the forward's configs run beside each other in
place of the peers.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from time_packed import timed
from torch.nn.attention import SDPBackend, sdpa_kernel

import tileloom
from tileloom.ops.attention.config import GluonSm90Config, gluon_rule
from tileloom.ops.attention.masks import Band
from tileloom.ops.attention.problem import AttentionProblem
from tileloom.target import target_of

BATCH, LENGTH, HIDDEN = 4, 4096, 2048
DIMS = ((192, 128), (64, 128), (128, 64), (256, 128), (128, 256))
Call = Callable[[], Any]
_PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}


class Setting:
    """Two head dims and a mask, with tensors `[B, L, H, D]` seen as `[B, H, L, D]`."""

    def __init__(self, dims: tuple[int, int], is_causal: bool) -> None:
        self.dims, self.is_causal = dims, is_causal
        self.heads = 2 * HIDDEN // sum(dims)
        draw: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.q, self.k, self.v, self.dout = (
            torch.randn(BATCH, LENGTH, self.heads, d, **draw).transpose(1, 2)
            for d in (dims[0], dims[0], dims[1], dims[1])
        )

    def flops(self, is_backward: bool) -> float:
        """Operations on visible scores; a backward has three products by D and two by Dv."""
        scores = BATCH * self.heads * LENGTH * LENGTH * (0.5 if self.is_causal else 1.0)
        d, d_v = self.dims
        return 2 * scores * (3 * d + 2 * d_v if is_backward else d + d_v)

    def peers(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """Those of PyTorch's kernels that take the call."""
        for name, backend in _PEERS.items():
            call = functools.partial(_by, backend, self.is_causal)
            try:
                call(self.q, self.k, self.v)
            except RuntimeError:
                continue
            yield name, call

    def forwards(self) -> dict[str, Call]:
        """The contenders."""
        ours = functools.partial(tileloom.attention, is_causal=self.is_causal)
        every = {"tileloom": ours, **dict(self.peers())}
        return {n: functools.partial(f, self.q, self.k, self.v) for n, f in every.items()}

    def backwards(self) -> dict[str, Call]:
        """The contenders' gradients of q, k and v."""
        calls: dict[str, Call] = {}
        ours = functools.partial(tileloom.attention, is_causal=self.is_causal)
        for name, call in {"tileloom": ours, **dict(self.peers())}.items():
            leaves = [t.detach().requires_grad_() for t in (self.q, self.k, self.v)]
            gradients = functools.partial(
                torch.autograd.grad, call(*leaves), leaves, self.dout, retain_graph=True
            )
            try:
                gradients()
            except RuntimeError:
                continue
            calls[name] = gradients
        return calls

    def configs(self) -> dict[str, Call]:
        """The rule's config and its neighbours."""
        band = Band(right_top=0) if self.is_causal else Band()
        problem = AttentionProblem.of(
            self.q, self.k, self.v, None, None, None, band, self.dims[0] ** -0.5
        )
        rule = gluon_rule(problem)
        every = [rule, *(
            GluonSm90Config(consumers, block_n, stages, "registers", registers, pin)
            for consumers, registers in ((2, 240), (3, 160))
            for block_n in (64, 128)
            for stages in (4, 3, 2)
            for pin in (False, True)
        )]  # fmt: skip
        found: dict[str, Call] = {}
        seen: set[tuple[int, int, bool]] = set()
        for config in every:
            form = (config.consumers, config.block_n, config.pin)
            if form in seen or config.reasons_against(problem, target_of(self.q)):
                continue
            if config.consumers == 3 and self.dims[1] > 64:
                continue
            if config.block_n == 128 and self.dims[1] > 128:
                continue
            seen.add(form)
            found[config.encode()] = functools.partial(
                tileloom.attention, self.q, self.k, self.v, is_causal=self.is_causal, config=config
            )
        return found

    def measure(self, rounds: int, *, sweep: bool) -> dict[str, Any]:
        """Time both directions, or the forward's configs."""
        row: dict[str, Any] = {"dims": self.dims, "causal": self.is_causal}
        kinds: dict[str, Callable[[], dict[str, Call]]]
        kinds = {"forward": self.forwards, "backward": self.backwards}
        for kind, calls in {"configs": self.configs}.items() if sweep else kinds.items():
            flops = self.flops(kind == "backward")
            row[kind] = {
                name: {"ms": round(ms, 4), "tflops": round(flops / ms / 1e9, 1)}
                for name, ms in timed(calls(), rounds).items()
            }
        return row


def _by(
    backend: SDPBackend, is_causal: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    with sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--dims", nargs="*", help="as 192x128; all by default")
    args = parser.parse_args()
    torch.manual_seed(0)
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": args.commit,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "rows": [],
    }
    for dims in DIMS:
        if args.dims and f"{dims[0]}x{dims[1]}" not in args.dims:
            continue
        for is_causal in (False, True):
            row = Setting(dims, is_causal).measure(args.rounds, sweep=args.sweep)
            record["rows"].append(row)
            print(json.dumps(row), flush=True)
            if args.out is not None:
                args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
