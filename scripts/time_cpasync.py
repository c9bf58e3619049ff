"""Times the kernels of examples/cpasync on a Hopper GPU, beside cuBLAS, torch and device copies.

PYTHONPATH=src python scripts/time_cpasync.py [--out FILE] [--commit HASH] [--only WORD ...]

Needs the extra `cute`. Each result is checked before it is timed. All contenders of a table run in
turns in one process (`tileloom.bench.timer`): medians of milliseconds, with GB/s or TFLOP/s.

axpby       cp.async by size and modifier, 2^28 elements, beside torch.add
copy        TMA by box, stages and kind of wait, 1 GiB of float16, beside copy_ (a memcpy) and mul
gemm        4096^3 and 8192^3 in float16, beside cuBLAS
split_k     few tiles and a long K, beside cuBLAS
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tileloom.bench.machine import describe_machine
from tileloom.bench.timer import DeviceTimer, Plan, Runner, interleave
from tileloom.testing import AccuracyError, assert_accurate

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "cpasync"))

Call = Callable[[], Any]
# Of a call: what it does, and whether its result is right.
Contender = tuple[Call, Callable[[], bool]]


def timed(contenders: dict[str, Contender], amount: float, unit: str) -> dict[str, Any]:
    """Medians of all contenders, in turns; wrong ones are named and not timed."""
    right, rows = {}, {}
    for name, (call, is_right) in contenders.items():
        call()
        torch.cuda.synchronize()
        if is_right():
            right[name] = call
        else:
            rows[name] = {"wrong": True}
    runners = [Runner(name, lambda _, call=call: call()) for name, call in right.items()]
    timer = DeviceTimer(torch.device("cuda", torch.cuda.current_device()))
    for name, done in interleave(runners, Plan(), timer).items():
        if done.error is not None:
            rows[name] = {"error": done.error}
            continue
        ms = statistics.median(sample.device_ms for sample in done.samples)
        rows[name] = {"ms": ms, unit: amount / ms / 1e6}
    return rows


def accurate(actual: torch.Tensor, reference: torch.Tensor, baseline: torch.Tensor) -> bool:
    """Whether a result keeps the accuracy rule."""
    try:
        assert_accurate(actual, reference, baseline)
    except AccuracyError as error:
        print(error, file=sys.stderr)
        return False
    return True


def time_axpby() -> dict[str, Any]:
    """cp.async by size and modifier; 12 bytes an element."""
    import axpby

    n = 2**28
    x, y = (torch.randn(n, device="cuda") for _ in range(2))
    part = slice(n - 2**20, n)
    right, plain = 2 * x[part].double() - 0.5 * y[part].double(), 2 * x[part] - 0.5 * y[part]
    found: dict[str, Contender] = {}
    for size, modifier in ((16, "cg"), (16, "ca"), (8, "ca"), (4, "ca")):
        made = axpby.build(size, modifier)[0]
        out: list[torch.Tensor] = []

        def call(made: Any = made, out: list[torch.Tensor] = out) -> None:
            out[:] = [axpby.axpby(made, 2.0, x, -0.5, y)]

        found[f"cp.async.{modifier} {size}"] = (
            call,
            lambda out=out: accurate(out[0][part], right, plain),
        )
    found["torch.add"] = (lambda: torch.add(x, y, alpha=-0.5), lambda: True)
    return {f"{n} elements": timed(found, 12 * n, "GB/s")}


def time_copy() -> dict[str, Any]:
    """TMA by box, stages and kind of wait; 2 bytes for each byte of 1 GiB."""
    import tma_copy

    source = torch.randn(32768, 16384, device="cuda").half()
    target = torch.empty_like(source)
    found: dict[str, Contender] = {}
    rings = [
        tma_copy.Ring(rows, row_bytes, stages, read)
        for rows, row_bytes in ((16, 512), (32, 512), (64, 256), (64, 512), (128, 128))
        for stages in (4, 6)
        for read in (True, False)
        if rows * row_bytes * stages <= 220 * 1024
    ]
    for ring in rings:
        made = tma_copy.build(torch.float16, ring)[0]
        each = min(3, 220 * 1024 // (ring.rows * ring.row_bytes * ring.stages + 1024))
        wait = "read" if ring.read else "full"
        name = f"TMA {ring.rows} x {ring.row_bytes} B, {ring.stages} stages, wait {wait}"

        def call(made: Any = made, each: int = each) -> None:
            tma_copy.copy(made, source, target, each)

        def is_right() -> bool:
            same = torch.equal(source, target)
            target.zero_()
            return same

        found[name] = (call, is_right)
    found["copy_"] = (lambda: target.copy_(source), lambda: True)
    found["mul"] = (lambda: torch.mul(source, 1, out=target), lambda: True)
    return {"1 GiB": timed(found, 2 * source.numel() * 2, "GB/s")}


def _products(shapes: list[tuple[int, int, int]], splits: bool) -> dict[str, Any]:
    import gemm
    import split_k_gemm

    tables = {}
    made = gemm.build(torch.float16, torch.float32 if splits else None)[0]
    for m, n, k in shapes:
        a, b = (torch.randn(rows, k, device="cuda").half() for rows in (m, n))
        kind = torch.float32 if splits else torch.float16
        right = a[:256].double() @ b.double().T
        plain = (a[:256].float() @ b.float().T).to(kind)
        out: list[torch.Tensor] = [torch.empty(m, n, device="cuda", dtype=torch.float16)]

        def call(a: torch.Tensor = a, b: torch.Tensor = b, out: Any = out) -> None:
            if splits:
                out[:] = [split_k_gemm.split_k_gemm(made, a, b)]
            else:
                gemm.gemm(made, a, b, out[0])

        def is_right(out: Any = out, right: Any = right, plain: Any = plain) -> bool:
            return accurate(out[0][:256], right, plain)

        found: dict[str, Contender] = {
            "cpasync": (call, is_right),
            "cuBLAS": (lambda a=a, b=b: a @ b.T, lambda: True),
        }
        tables[f"{m} x {n} x {k}"] = timed(found, 2.0 * m * n * k / 1e3, "TFLOP/s")
    return tables


TABLES: dict[str, Callable[[], dict[str, Any]]] = {
    "axpby": time_axpby,
    "copy": time_copy,
    "gemm": lambda: _products([(4096,) * 3, (8192,) * 3], splits=False),
    "split_k": lambda: _products([(128, 256, 65536), (512, 512, 16384)], splits=True),
}


def main() -> None:
    """Time, print, and write a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--only", nargs="*", choices=sorted(TABLES), default=sorted(TABLES))
    given = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    report: dict[str, Any] = {
        "machine": describe_machine(device),
        "commit": given.commit,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "tables": {},
    }
    for name in given.only:
        report["tables"][name] = TABLES[name]()
        for cell, rows in report["tables"][name].items():
            print(f"{name}, {cell}")
            for contender, row in rows.items():
                print("   ", contender, {key: round(value, 4) for key, value in row.items()})
        if given.out:
            given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
