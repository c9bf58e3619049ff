"""Times the kernels of examples/cpasync on a Hopper GPU, beside cuBLAS, torch and device copies.

PYTHONPATH=src python scripts/time_cpasync.py [--cubins FOLDER] [--out FILE] [--commit HASH]

The kernels come from FOLDER, which `examples/cpasync/cubins.py FOLDER` wrote where the CuTe DSL is,
or are compiled here. Each result is checked before it is timed. All contenders of a table run in
turns in one process (`tileloom.bench.timer`): medians of milliseconds, with GB/s or TFLOP/s.

axpby       cp.async by size and modifier, 2^28 elements, beside torch.add
copy        TMA by box, stages and kind of wait, 1 GiB of float16, a block for as many boxes as it
            has stages or as many blocks as are resident, beside copy_ (a memcpy) and others
gemm        4096^3 and 8192^3 in float16, beside cuBLAS
split_k     few tiles and a long K, beside cuBLAS
"""

from __future__ import annotations

import argparse
import datetime
import importlib
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
cubins: Any = importlib.import_module("cubins")

Call = Callable[[], Any]
# Of a call: what it does, and whether its result is right.
Contender = tuple[Call, Callable[[], bool]]


def timed(
    contenders: dict[str, Contender], amount: float, unit: str, rounds: int = 9
) -> dict[str, Any]:
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
    for name, done in interleave(runners, Plan(rounds=rounds), timer).items():
        if done.error is not None:
            rows[name] = {"error": done.error}
            continue
        ms = [sample.device_ms for sample in done.samples]
        low, *_, high = statistics.quantiles(ms, n=5)
        middle = statistics.median(ms)
        rows[name] = {"ms": middle, "ms_20": low, "ms_80": high, unit: amount / middle / 1e6}
    return rows


def accurate(actual: torch.Tensor, reference: torch.Tensor, baseline: torch.Tensor) -> bool:
    """Whether a result keeps the accuracy rule."""
    try:
        assert_accurate(actual, reference, baseline)
    except AccuracyError as error:
        print(error, file=sys.stderr)
        return False
    return True


def time_axpby(binary: Callable[[str], Any]) -> dict[str, Any]:
    """cp.async by size and modifier; 12 bytes an element."""
    n = 2**28
    x, y = (torch.randn(n, device="cuda") for _ in range(2))
    z = torch.empty_like(x)
    part = slice(n - 2**20, n)
    right, plain = 2 * x[part].double() - 0.5 * y[part].double(), 2 * x[part] - 0.5 * y[part]

    def is_right() -> bool:
        good = accurate(z[part], right, plain)
        z.fill_(float("nan"))
        return good

    found: dict[str, Contender] = {}
    for name in cubins.KERNELS:
        if name.startswith("axpby"):
            _, size, modifier = name.split("-")
            for kind, blocks in (("", None), (" resident", 4 * cubins.sms())):
                call = cubins.prepare_axpby(binary(name), 2.0, x, -0.5, y, z, blocks)
                found[f"cp.async.{modifier} {size}{kind}"] = (call, is_right)
    found["torch.add"] = (lambda: torch.add(x, y, alpha=-0.5, out=z), lambda: True)
    return {f"{n} elements": timed(found, 12 * n, "GB/s")}


def time_copy(binary: Callable[[str], Any]) -> dict[str, Any]:
    """TMA by box, stages and kind of wait; 2 bytes for each byte of 1 GiB."""
    source = torch.randn(32768, 16384, device="cuda").half()
    target = torch.empty_like(source)

    def is_right() -> bool:
        same = torch.equal(source, target)
        target.zero_()
        return same

    found: dict[str, Contender] = {}
    for name in cubins.KERNELS:
        if name.startswith("copy"):
            made = binary(name)
            _, box, stages, wait = name.split("-")
            shown = f"{box.replace('x', ' x ')} B, {stages}"
            fit = min(3, 220 * 1024 // (made.shared_bytes + 1024)) * cubins.sms()
            found[f"{shown} {wait}"] = (cubins.prepare_copy(made, source, target), is_right)
            resident = cubins.prepare_copy(made, source, target, fit)
            found[f"{shown} resident-{wait}"] = (resident, is_right)
    words, written = source.view(torch.int64), target.view(torch.int64)
    found["copy_"] = (lambda: target.copy_(source), is_right)  # cudaMemcpyAsync
    found["mul"] = (lambda: torch.mul(source, 1, out=target), is_right)
    found["bitwise_or"] = (lambda: torch.bitwise_or(words, 0, out=written), is_right)
    return {"1 GiB": timed(found, 2 * source.numel() * 2, "GB/s", rounds=5)}


def time_gemm(binary: Callable[[str], Any]) -> dict[str, Any]:
    """Large products in float16."""
    tables = {}
    for size in (4096, 8192):
        a, b = (torch.randn(size, size, device="cuda").half() for _ in range(2))
        c = torch.full((size, size), torch.nan, dtype=torch.float16, device="cuda")
        found = {
            "cpasync": (
                cubins.prepare_gemm(binary("gemm-float16"), a, b, c),
                _first_rows(a, b, lambda c=c: c),
            ),
            "cuBLAS": (lambda a=a, b=b: a @ b.T, lambda: True),
        }
        tables[f"{size}^3"] = timed(found, 2.0 * size**3 / 1e3, "TFLOP/s")
    return tables


def time_split_k(binary: Callable[[str], Any]) -> dict[str, Any]:
    """Few tiles and a long K; C is cleared in the time taken."""
    tables = {}
    for m, n, k in ((128, 256, 65536), (512, 512, 16384)):
        a, b = (torch.randn(rows, k, device="cuda").half() for rows in (m, n))
        c = torch.full((m, n), torch.nan, device="cuda")
        add = cubins.prepare_gemm(binary("split_k-float16"), a, b, c, cubins.parts(m, n, k))
        found = {
            "cpasync": (
                lambda c=c, add=add: (c.zero_(), add()),
                _first_rows(a, b, lambda c=c: c),
            ),
            "cuBLAS": (lambda a=a, b=b: a @ b.T, lambda: True),
        }
        tables[f"{m} x {n} x {k}"] = timed(found, 2.0 * m * n * k / 1e3, "TFLOP/s")
    return tables


def _first_rows(a: torch.Tensor, b: torch.Tensor, out: Callable[[], Any]) -> Callable[[], bool]:
    """A check of the first 256 rows of a product."""
    right = a[:256].double() @ b.double().T
    plain = (a[:256].float() @ b.float().T).to(out().dtype)
    return lambda: accurate(out()[:256], right, plain)


TABLES = {"axpby": time_axpby, "copy": time_copy, "gemm": time_gemm, "split_k": time_split_k}


def main() -> None:
    """Time, print, and write a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cubins", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--only", nargs="*", choices=sorted(TABLES), default=sorted(TABLES))
    given = parser.parse_args()

    def binary(name: str) -> Any:
        if given.cubins:
            return cubins.Binary.load(given.cubins / f"{name}.json")
        return cubins.compile_kernel_of(name)

    device = torch.device("cuda", torch.cuda.current_device())
    report: dict[str, Any] = {
        "machine": describe_machine(device),
        "commit": given.commit,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "tables": {},
    }
    for name in given.only:
        report["tables"][name] = TABLES[name](binary)
        for cell, rows in report["tables"][name].items():
            print(f"{name}, {cell}")
            for contender, row in rows.items():
                short = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
                print("   ", contender, short)
        if given.out:
            given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
