"""What a launch costs on the host: `python -m tileloom.bench.launch_cost --commit ...`.

Prints microseconds of one launch with 19 arguments, with and without 4 TMA descriptors: raw (a
loop of cuLaunchKernel in C, arguments packed before), Triton, Inductor's launcher, `torch.add`,
and tileloom by each tier. Then whole calls of operators without gradients, each beside PyTorch's
own; and with `--bundle` the first launch from a bundle in a new process. Contenders take turns, a
batch of launches each; the device is synchronised between batches, outside the timed part.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tileloom import knobs, launch
from tileloom.launch import compat, driver
from tileloom.launch.descriptors import of, tensor_maps

BATCH, ROUNDS = 100, 60
INTEGERS = tuple(1000 + i for i in range(9))
CONSTANTS = (32,) * 5
Contender = Callable[[int], float]
"""From a number of launches to microseconds of one."""


def _python(statement: str, **scope: Any) -> Contender:
    timer = timeit.Timer(statement, globals=scope)
    return lambda n: timer.timeit(n) / n * 1e6


def _raw(compiled: Any, values: list[Any]) -> Contender:
    """The loop in C; `values` are ctypes objects in the order of the kernel's parameters."""
    folder = Path(tempfile.mkdtemp())
    source = Path(__file__).with_name("raw_launch.c")
    library = folder / "raw.so"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    function = ctypes.CDLL(str(library)).raw_launch
    function.restype = ctypes.c_double
    num_warps, _, shared = compiled.packed_metadata
    pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    start = ctypes.cast(driver.library().cuLaunchKernel, ctypes.c_void_p)
    handle = ctypes.c_void_p(compiled.function)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    def run(n: int) -> float:
        assert values
        cost = function(start, handle, 32 * num_warps, shared, stream, pointers, n)
        if cost < 0:
            raise RuntimeError("launch_cost: cuLaunchKernel refused the raw launch")
        return cost

    return run


def _values(arguments: tuple[Any, ...], compiled: Any) -> list[Any]:
    """The kernel's parameters as ctypes objects."""
    metas = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    values: list[Any] = []
    for argument in arguments[:14]:
        if hasattr(argument, "block_shape"):
            encoded = tensor_maps(of(argument), next(metas))[argument.base.data_ptr()]
            values.append(ctypes.create_string_buffer(encoded, 128))
            values += [ctypes.c_int32(n) for n in argument.shape]
            values += [ctypes.c_int64(n) for n in argument.strides]
        elif isinstance(argument, torch.Tensor):
            values.append(ctypes.c_uint64(argument.data_ptr()))
        else:
            values.append(ctypes.c_int32(argument))
    return [*values, ctypes.c_uint64(0), ctypes.c_uint64(0)]


def _bindings(compiled: Any, values: list[Any]) -> Contender | None:
    """`cuda.bindings`, the arguments' addresses prepared."""
    try:
        from cuda.bindings import driver as cuda  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    num_warps, _, shared = compiled.packed_metadata
    pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    scope = {
        "call": cuda.cuLaunchKernel, "f": cuda.CUfunction(compiled.function),
        "s": cuda.CUstream(torch.cuda.current_stream().cuda_stream), "keep": values,
        "p": ctypes.addressof(pointers), "keep_too": pointers,
    }  # fmt: skip
    return _python(f"call(f, 1, 1, 1, {32 * num_warps}, 1, 1, {shared}, s, p, 0)", **scope)


def _inductor(kernel: Any, arguments: tuple[Any, ...]) -> dict[str, Contender]:
    """The launcher that torch.compile makes for the same kernel, caught as it is called."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    caught: list[tuple[Any, ...]] = []
    plain = CachingAutotuner.run

    def spy(self: Any, *args: Any, **named: Any) -> Any:
        caught.append((self, args, named))
        return plain(self, *args, **named)

    a, b, c, d, e, *rest = arguments

    def compiled(*tensors: Any) -> Any:
        kernel[(1,)](*tensors, *rest)
        return tensors[0]

    CachingAutotuner.run = spy  # pyright: ignore[reportAttributeAccessIssue]
    try:
        made: Any = torch.compile(compiled)
        made(a, b, c, d, e)
        made(a, b, c, d, e)
    finally:
        CachingAutotuner.run = plain
    tuner, args, named = caught[-1]
    scope = {"launcher": tuner.launchers[0], "tuner": tuner, "args": args, "named": named}
    kind = type(getattr(tuner.launchers[0], "__self__", tuner.launchers[0])).__name__
    print(f"Inductor passes {len(args)} arguments and {sorted(named)} to a {kind}")
    return {
        "inductor launcher": _python("launcher(*args, **named)", **scope),
        "inductor autotuner.run": _python("tuner.run(*args, **named)", **scope),
    }


def _ours(kernel: Any, arguments: tuple[Any, ...]) -> dict[str, Contender]:
    names = " ".join(f"a{i}" for i in range(len(arguments))).split()
    scope = dict(zip(names, arguments))
    call = f"launcher[grid]({', '.join(names)})"
    found: dict[str, Contender] = {}
    for tier in ("seam", "direct", "packed"):
        with knobs.scope({"launch.tier": tier}):
            launcher = launch.prepare(kernel)
            for _ in range(4):
                launcher[(1,)](*arguments)
            if not launcher._table:
                print(f"the {tier} tier is not there on this Triton")
                continue
            found[f"tileloom {tier}"] = _python(call, launcher=launcher, grid=(1,), **scope)
            if tier == "packed":
                found |= _bound(launcher, arguments)
    return found


def _bound(launcher: Any, arguments: tuple[Any, ...]) -> dict[str, Contender]:
    bound = launcher.bind((1,), *arguments)
    tensors = [getattr(a, "base", a) for a in arguments[:5]]
    for _ in range(3):
        bound.launch(*tensors)
    entry = next(iter(launcher._table.values()))
    stream = torch.cuda.current_stream().cuda_stream
    addresses = [t.data_ptr() for t in tensors]
    given = dict(zip("abcde", tensors))
    return {
        "tileloom bound": _python("bound.launch(a, b, c, d, e)", bound=bound, **given),
        "tileloom entry alone": _python(
            f"entry({', '.join(map(str, [stream, *addresses]))})", entry=entry
        ),
    }


def contenders(with_descriptors: bool) -> dict[str, Contender]:
    """Prepare everything that is timed, for a kernel with or without TMA descriptors.

    Args:
        with_descriptors: Whether four of the five tensors are given as TMA descriptors.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    from tileloom.bench.pieces_launch import nineteen, nineteen_tma

    kernel: Any = nineteen_tma if with_descriptors else nineteen
    device = torch.cuda.current_device()
    tensors: list[Any] = [torch.zeros(64, 64, device=device) for _ in range(5)]
    if with_descriptors:
        shape = [64, 64], [64, 1], [16, 64]
        tensors[1:] = [TensorDescriptor(t, *shape) for t in tensors[1:]]
    arguments = (*tensors, *INTEGERS, *CONSTANTS)
    compiled = kernel[(1,)](*arguments)
    values = _values(arguments, compiled)
    names = " ".join(f"a{i}" for i in range(len(arguments))).split()
    scope = dict(zip(names, arguments))
    found: dict[str, Contender] = {"raw": _raw(compiled, values)}
    bindings = _bindings(compiled, values)
    if bindings is not None:
        found["cuda.bindings"] = bindings
    found["triton"] = _python(
        f"kernel[grid]({', '.join(names)})", kernel=kernel, grid=(1,), **scope
    )
    if not with_descriptors:
        try:
            found |= _inductor(kernel, arguments)
        except Exception as error:
            print(f"Inductor's launcher cannot be timed: {type(error).__name__}: {error}")
        small = torch.zeros(64, device=device)
        found["torch.add(out=)"] = _python("add(x, x, out=x)", add=torch.add, x=small)
    return found | _ours(kernel, arguments)


def measure(found: dict[str, Contender]) -> dict[str, dict[str, float]]:
    """Time contenders in turns.

    Args:
        found: By name.

    Returns:
        For each the median, and the tenth and ninetieth percentile of its rounds, in microseconds.
    """
    samples: dict[str, list[float]] = {name: [] for name in found}
    for round_ in range(ROUNDS + 5):
        for name, contender in found.items():
            cost = contender(BATCH)
            torch.cuda.synchronize()
            if round_ >= 5:
                samples[name].append(cost)
    result: dict[str, dict[str, float]] = {}
    for name, costs in samples.items():
        tenths = statistics.quantiles(costs, n=10)
        result[name] = {
            "median_us": round(statistics.median(costs), 3),
            "p10_us": round(tenths[0], 3),
            "p90_us": round(tenths[-1], 3),
        }
    return result


def calls() -> dict[str, dict[str, Contender]]:
    """Prepare calls of operators without gradients, small enough that the host is what they cost.

    Returns:
        For each call PyTorch's own, first, and ours.
    """
    import tileloom

    F = torch.nn.functional
    device = torch.cuda.current_device()
    q, k, v = torch.randn(3, 1, 8, 128, 64, device=device, dtype=torch.bfloat16)
    x = torch.randn(16, 4096, device=device, dtype=torch.bfloat16)
    a, b = torch.randn(2, 128, 128, device=device, dtype=torch.bfloat16)
    scope = {
        "q": q, "k": k, "v": v, "x": x, "w": x[0].clone(), "t": tileloom, "a": a, "b": b,
        "mm": torch.mm, "sdpa": F.scaled_dot_product_attention, "rms": F.rms_norm,
    }  # fmt: skip
    statements = {
        "attention": ("sdpa(q, k, v)", "t.attention(q, k, v)"),
        "attention, causal": (
            "sdpa(q, k, v, is_causal=True)", "t.attention(q, k, v, is_causal=True)",
        ),
        "matmul": ("mm(a, b)", "t.matmul(a, b)"),
        "rms_norm": ("rms(x, (4096,), w, 1e-6)", "t.rms_norm(x, w, eps=1e-6)"),
    }  # fmt: skip
    return {
        name: {"torch": _python(theirs, **scope), "tileloom": _python(ours, **scope)}
        for name, (theirs, ours) in statements.items()
    }


def first_launch(bundle: Path, runs: int = 8) -> Any:
    """Time the first launch from a bundle in new processes, by `scripts/time_bundle.py`.

    Args:
        bundle: What `tileloom bundle build --from tests.launch.bundle_samples:for_gpu` wrote.
        runs: Processes.

    Returns:
        What the script prints: milliseconds, median and worst.
    """
    script = Path(__file__).parents[3] / "scripts" / "time_bundle.py"
    command = [sys.executable, str(script), str(bundle), str(runs)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout)


def _show(title: str, rows: dict[str, dict[str, float]]) -> None:
    """Print contenders, each beside the first."""
    first, base = next(iter(rows)), next(iter(rows.values()))["median_us"]
    print(f"\n{title}: microseconds, median (10 % .. 90 %), above {first}, and in its terms")
    for name, row in rows.items():
        spread = f"({row['p10_us']:.2f} .. {row['p90_us']:.2f})"
        median = row["median_us"]
        print(f"  {name:24s}{median:8.2f}  {spread:20s}{median - base:+8.2f}{median / base:7.2f} x")


def main(arguments: list[str] | None = None) -> None:
    """Measure, print tables, and write JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="", help="what is measured, for the record")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    parser.add_argument("--bundle", type=Path, help="the tests' bundle, to time its first launch")
    options = parser.parse_args(arguments)
    launches: dict[str, dict[str, dict[str, float]]] = {}
    for title, with_descriptors in (("19 arguments", False), ("19 arguments, 4 of them TMA", True)):
        launches[title] = measure(contenders(with_descriptors))
        _show(title, launches[title])
    whole: dict[str, dict[str, dict[str, float]]] = {}
    with torch.no_grad():
        for title, pair in calls().items():
            whole[title] = measure(pair)
            _show(f"a call of {title}", whole[title])
    bundle = first_launch(options.bundle) if options.bundle else None
    print(f"\nfirst launch from a bundle: {json.dumps(bundle)}")
    if options.json:
        record = {
            "card": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat(),
            "commit": options.commit, "python": sys.version.split()[0],
            "torch": torch.__version__, "triton": ".".join(map(str, compat.triton_version())),
            "batch": BATCH, "rounds": ROUNDS, "cases": launches, "calls": whole,
            "first_launch_from_a_bundle": bundle,
        }  # fmt: skip
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
