"""Row-wise calls inside `tileloom.tuning.operators()` on a GPU: each tile's time beside the rule's.

PYTHONPATH=src:. python scripts/tuned_rowwise.py [--out FILE] [--commit HASH]

bfloat16; forward and, where the case says so, backward. Times are those of the tuning itself:
events around each call, a cold L2 cache, in rotation.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

import tileloom
from tileloom import knobs, tuning
from tileloom.tuning.store import Store, read_record


def numbers(*size: int) -> torch.Tensor:
    """Normal numbers that ask for a gradient."""
    device = torch.device("cuda", torch.cuda.current_device())
    return torch.randn(size, device=device, dtype=torch.bfloat16, requires_grad=True)


def both(call: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> None:
    """Run a call and its backward."""
    out = call(*tensors)
    out.backward(torch.randn_like(out))


def labels(count: int, classes: int) -> torch.Tensor:
    """A class for each row."""
    return torch.randint(classes, (count,), device=numbers(1).device)


CASES: dict[str, Callable[[], Any]] = {
    "rms_norm 4096 x 4096": lambda: both(tileloom.rms_norm, numbers(4096, 4096), numbers(4096)),
    "layer_norm 65536 x 1024": lambda: both(
        tileloom.layer_norm, numbers(65536, 1024), numbers(1024), numbers(1024)
    ),
    "softmax 2048 x 32768": lambda: both(tileloom.softmax, numbers(2048, 32768)),
    "rms_norm 512 x 131072": lambda: tileloom.rms_norm(numbers(512, 131072), numbers(131072)),
    "cross_entropy 4096 x 50257": lambda: both(
        tileloom.cross_entropy, numbers(4096, 50257), labels(4096, 50257)
    ),
    "swiglu 8192 x 14336": lambda: tileloom.swiglu(numbers(8192, 14336), numbers(8192, 14336)),
}


def tuned(name: str) -> list[dict[str, Any]]:
    """Tune a case with an empty store, and return a row for each kernel."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, knobs.scope({"cache.dir": Path(folder)}):
        with tuning.operators():
            CASES[name]()
        for path in Store().files():
            record = read_record(path)
            rule, winner = record.candidates[0], record.known()[record.config]
            rows.append({
                "case": name,
                "kernel": record.problem["kernel"],
                "rule": rule.config,
                "rule_ms": rule.ms,
                "rule_ratio": rule.ratio,
                "winner": winner.config,
                "winner_ms": winner.ms,
                "tiles": len(record.candidates),
                "seconds": record.measured["seconds"],
            })  # fmt: skip
    return rows


def main() -> None:
    """Tune every case, print each row, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="unknown")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in CASES:
        rows += tuned(name)
        print(json.dumps(rows[-1]), flush=True)
    record = {
        "card": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "commit": given.commit,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "rows": rows,
    }
    if given.out:
        given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
