"""Times modules that torch.compile wrote on a GPU, as they are and with their imports changed.

PYTHONPATH=src:. python scripts/inductor_modules.py [--out FILE] [--commit HASH] [NAME ...]

The modules are those of tests/tuning/modules for the installed torch; without any,
`python -m tests.tuning.make_modules` writes them. Results are judged by the accuracy rule first.
Then, for each module:

first     seconds until the end of the first call with empty caches, in turn with the original's:
          import, compiling in PyTorch's workers, tuning; the median of several. The workers are up
          and have imported what they need
device    milliseconds of a call on the device, both in rotation, with a cold L2 cache
launch    microseconds of the host for a launch of the module's first kernel, in turn
tunes     for each kernel with more than one candidate: how many tunes from an empty store chose a
          config within 1 % of the best by one long measurement of all of them together; the worst
          choice, and the original's, over the best
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import statistics
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from tests.tuning.make_modules import FOLDER, MODELS, VERSION, arguments
from tests.tuning.modules import kernels_of, load, warm_worker
from tests.tuning.test_swap_gpu import INACCURATE, check_results, imported

from tileloom import knobs
from tileloom.tuning.config import Config
from tileloom.tuning.measure import DeviceTimer, Plan, compare
from tileloom.tuning.store import Store
from tileloom.tuning.swap import swapped

WHO = ("ours", "original")


class Seen:
    """Stands for a kernel and keeps the arguments of its first launch."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.first: tuple[Any, ...] | None = None

    def run(self, *args: Any, stream: int) -> Any:
        """Launch the kernel."""
        if self.first is None:
            self.first = args
        return self.kernel.run(*args, stream=stream)


def kernels_in(module: Any) -> dict[str, Any]:
    """A module's kernels by name, in the order of its text."""
    return {name: v for name, v in vars(module).items() if hasattr(v, "launchers")}


def first_arguments(module: Any, given: Sequence[torch.Tensor]) -> dict[str, tuple[Any, ...]]:
    """What a call gives to each of the module's kernels the first time."""
    own = kernels_in(module)
    seen = {name: Seen(kernel) for name, kernel in own.items()}
    vars(module).update(seen)
    module.call(list(given))
    vars(module).update(own)
    return {name: one.first for name, one in seen.items() if one.first is not None}


@contextlib.contextmanager
def empty_caches() -> Generator[Path]:
    """Nothing is compiled and nothing is tuned inside a `with` block; yields a folder."""
    from torch._inductor.utils import fresh_cache

    with (
        tempfile.TemporaryDirectory() as folder,
        fresh_cache(),
        knobs.scope({"cache.dir": Path(folder)}),
    ):
        yield Path(folder)


def first_call(text: str, stem: str, given: Sequence[torch.Tensor]) -> dict[str, float]:
    """Seconds of a module's import, which compiles, and of its first call, which tunes."""
    with empty_caches() as folder:
        torch.cuda.synchronize()
        began = time.perf_counter()
        module = imported(text, folder / f"{stem}.py")
        there = time.perf_counter()
        module.call(list(given))
        torch.cuda.synchronize()
        ended = time.perf_counter()
    return {"import": there - began, "call": ended - there}


def first_calls(
    sources: dict[str, str], name: str, given: Sequence[torch.Tensor], repeats: int
) -> dict[str, Any]:
    """First calls of both in turn: the median of each part, and of the whole."""
    found: dict[str, list[dict[str, float]]] = {who: [] for who in WHO}
    for turn in range(repeats):
        for who in WHO if turn % 2 else WHO[::-1]:
            found[who].append(first_call(sources[who], f"{name}_{who}_{turn}", given))
    return {
        who: {
            "seconds": statistics.median(sum(one.values()) for one in all_),
            **{part: statistics.median(one[part] for one in all_) for part in ("import", "call")},
        }
        for who, all_ in found.items()
    }


def launch_us(kernels: dict[str, Any], args: tuple[Any, ...]) -> dict[str, float]:
    """Microseconds of the host: medians of 40 samples of 50 launches, in turn."""
    stream = torch.cuda.current_stream().cuda_stream
    samples: dict[str, list[float]] = {who: [] for who in kernels}
    for _ in range(40):
        for who, kernel in kernels.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(50):
                kernel.run(*args, stream=stream)
            samples[who].append((time.perf_counter() - began) / 50)
    torch.cuda.synchronize()
    return {who: statistics.median(times) * 1e6 for who, times in samples.items()}


def candidates_of(tuner: Any) -> int:
    """How many configs a tune compared."""
    record = Store().find(*tuner._identity(tuner._stages))
    return 0 if record is None else sum(one.ms is not None for one in record.candidates)


def tunes(
    source: str, name: str, args: tuple[Any, ...], original: Config, repeats: int
) -> dict[str, Any] | None:
    """Tune a kernel anew several times; None where there is nothing to choose.

    Args:
        source: The kernel's source, its imports changed.
        name: Its name.
        args: A launch's arguments.
        original: What Inductor chose.
        repeats: How many times.
    """
    stream = torch.cuda.current_stream().cuda_stream
    with tempfile.TemporaryDirectory() as folder:
        tuner = getattr(load(source, Path(folder)), name)
        tuner.precompile(warm_cache_only=True)
        winners: list[Config] = []
        seconds: list[float] = []
        for turn in range(repeats):
            tuner.forget()
            tuner.autotune_cache_info.clear()
            with knobs.scope({"cache.dir": Path(folder) / str(turn)}):
                began = time.perf_counter()
                tuner.run(*args, stream=stream)
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - began)
                winners.append(tuner.winner)
                if candidates_of(tuner) < 2:
                    return None
        tuner.forget()
        listed = list(dict.fromkeys([*tuner.configs, *winners, original]))
        loaded = tuner._loaded
        loaded.load_all(listed)
        there = [config for config in listed if config in loaded.launches]
        runs = [loaded.launches[config].make() for config in there]
    timer = DeviceTimer(torch.device("cuda", torch.cuda.current_device()))
    found = compare(
        [lambda run=run: run(*args, stream=stream) for run in runs],
        timer,
        Plan(rounds=41, most_rounds=41, screen=1.5),
    )
    ratios = {config: one.ratio or float("inf") for config, one in zip(there, found.timings)}
    best = min(ratios.values())
    return {
        "configs": len(there),
        "tunes": repeats,
        "within": sum(ratios[winner] <= 1.01 * best for winner in winners),
        "worst": max(ratios[winner] for winner in winners) / best,
        "original": ratios[original] / best,
        "original_over_worst": ratios[original] / max(ratios[winner] for winner in winners),
        "seconds": statistics.median(seconds),
    }


def measured(name: str, repeats: int, times: int) -> dict[str, Any]:
    """Judge a module, run it both ways, and return its row of the record."""
    text = (FOLDER / f"{name}.txt").read_text()
    sources = {"ours": swapped(text), "original": text}
    device = torch.device("cuda", torch.cuda.current_device())
    given = arguments(MODELS[name], device)
    row: dict[str, Any] = {"module": name}
    with empty_caches() as folder:
        modules = {
            who: imported(source, folder / f"{name}_{who}.py") for who, source in sources.items()
        }
        judges = (VERSION, name) not in INACCURATE
        check_results(MODELS[name], given, *modules.values(), judges_theirs=judges)
        kernels = {who: kernels_in(module) for who, module in modules.items()}
        row["configs"] = {
            who: {n: str(Config.of(kernel.launchers[0].config)) for n, kernel in own.items()}
            for who, own in kernels.items()
        }
        launched = first_arguments(modules["ours"], given)
        first = next(iter(launched))
        row["launch"] = launch_us({who: kernels[who][first] for who in WHO}, launched[first])
        calls = [lambda module=modules[who]: module.call(given.copy()) for who in WHO]
        found = compare(calls, DeviceTimer(device), Plan(rounds=15, most_rounds=15, screen=100.0))
        row["device"] = dict(zip(WHO, [one.ms for one in found.timings]))
        row["tunes"] = {}
        for own, source in kernels_of(sources["ours"]) if times else ():
            chosen = Config.of(kernels["original"][own].launchers[0].config)
            if own in launched and (of := tunes(source, own, launched[own], chosen, times)):
                row["tunes"][own] = of
    if repeats:
        row["first"] = first_calls(sources, name, given, repeats)
    return row


def warmed_workers() -> float:
    """Bring up PyTorch's compile workers; return the median of what importing tileloom took them.

    Each also compiles a kernel: the first one of a process lets Triton hash itself, a third of a
    second, and load its compiler, whoever's it is.
    """
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    AsyncCompile.warm_pool()
    AsyncCompile.wait_pool_ready()
    pool = AsyncCompile.process_pool()
    jobs = [pool.submit(warm_worker) for _ in range(get_compile_threads())]
    return statistics.median(job.result() for job in jobs)


def main() -> None:
    """Measure, print each row, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="modules; default: all")
    parser.add_argument("--out", type=Path, help="where to write the record, as JSON")
    parser.add_argument("--commit", default="unknown", help="of tileloom, for the record")
    parser.add_argument("--repeats", type=int, default=3, help="first calls of each; 0: none")
    parser.add_argument("--times", type=int, default=20, help="tunes of each kernel; 0: none")
    options = parser.parse_args()
    names = options.names or sorted(path.stem for path in FOLDER.glob("*.txt"))
    imports = warmed_workers()
    rows: list[dict[str, Any]] = []
    record = {
        "card": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "commit": options.commit,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "modules": VERSION,
        "worker_import_s": imports,
        "rows": rows,
    }
    for name in names:
        rows.append(measured(name, options.repeats, options.times))
        print(json.dumps(rows[-1]), flush=True)
        if options.out:
            options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
