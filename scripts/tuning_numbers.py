"""Numbers of the tuner on a GPU: look-up, launch, agreement of tunings, Inductor's own beside it.

PYTHONPATH=src:. python scripts/tuning_numbers.py [--out FILE] [--commit HASH] [--repeats 20]

Subjects are kernels of tests/tuning with a list of configs each. For every subject:

second    a new process with the store of this one: time of the look-up, launches measured, times
          that Triton's compiler ran (out of its cache counts as none), and for which kernels
launch    host time of a tuned launch; of the bare launcher, which reads the tensors' addresses and
          calls the driver with a grid that is known, and asks nothing; of the entry below both, of
          known addresses; and of Inductor's own
choice    tunings from an empty store: how many chose a config within 1 % of the best, by one long
          measurement of all configs together; and how much slower the worst choice was
original  the same list tuned by Inductor's own: its choice's time over ours, and wall clock of a
          first call with nothing compiled, of both (medians of three); ours also (cold) where no
          compile worker has come up yet
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from pathlib import Path
from typing import Any

import torch
import triton
from tests.tuning import tuned_kernels as kernels

import tileloom
from tileloom import knobs
from tileloom.tuning import precompile
from tileloom.tuning.cached import cached_autotune
from tileloom.tuning.config import Config
from tileloom.tuning.hints import HeuristicType
from tileloom.tuning.measure import DeviceTimer, Plan, compare

ROWS, COLUMNS = 8192, 4096
SIGNATURES = {
    "scale": {"in_ptr0": "*fp32", "out_ptr0": "*fp32", "xnumel": "i32", "XBLOCK": "constexpr"},
    "add_to": {
        "in_out_ptr0": "*fp32", "in_ptr0": "*fp32", "xnumel": "i32", "scale": "fp32",
        "XBLOCK": "constexpr", "EXTRA": "constexpr",
    },
    "row_sum": {
        "in_ptr0": "*fp32", "out_ptr0": "*fp32", "xnumel": "i32", "r0_numel": "i32",
        "XBLOCK": "constexpr", "R0_BLOCK": "constexpr",
    },
}  # fmt: skip
HINTS = {
    "scale": {"x": 2**24},
    "add_to": {"x": 2**24},
    "row_sum": {"x": ROWS, "r0_": COLUMNS},
}
SUBJECTS = tuple(SIGNATURES)


def device() -> torch.device:
    """The GPU that everything runs on."""
    return torch.device("cuda", torch.cuda.current_device())


def stream() -> int:
    """The current stream."""
    return torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())


def configs_of(name: str) -> list[Config]:
    """The list of a subject."""
    if name == "row_sum":
        return [
            Config({"XBLOCK": x, "R0_BLOCK": r}, num_warps=w, num_stages=1)
            for x, r, w in (
                (1, 2048, 16), (1, 1024, 8), (1, 4096, 16), (2, 1024, 8), (8, 512, 8), (64, 8, 8),
            )
        ]  # fmt: skip
    blocks = ((1024, 4), (512, 4), (256, 4), (1024, 8), (2048, 8), (128, 4))
    return [Config({"XBLOCK": x}, num_warps=w, num_stages=1) for x, w in blocks]


def arguments_of(name: str) -> tuple[Any, ...]:
    """A launch's arguments."""
    if name == "row_sum":
        x = torch.randn(ROWS, COLUMNS, device=device())
        return x, torch.empty(ROWS, device=device()), ROWS, COLUMNS
    x = torch.randn(2**24, device=device())
    rest = () if name == "scale" else (0.5,)
    return x, torch.randn_like(x), x.numel(), *rest


def facts_of(name: str) -> tuple[dict[str, Any], dict[str, Any], HeuristicType]:
    """What generated code states of a subject."""
    compiled = kernels.meta(
        signature=SIGNATURES[name],
        device=kernels.device_properties(device()),
        constants={"EXTRA": 2} if name == "add_to" else {},
    )
    changed = ["in_out_ptr0"] if name == "add_to" else []
    facts = {"grid_type": "Grid1D", "kernel_name": name, "mutated_arg_names": changed}
    # No further stages: Inductor's own has none for these either.
    facts["dynamic_scale_rblock"] = False
    kind = HeuristicType.REDUCTION if name == "row_sum" else HeuristicType.POINTWISE
    return compiled, facts, kind


def ours(name: str) -> Any:
    """An autotuner of a subject."""
    compiled, facts, kind = facts_of(name)
    return cached_autotune(HINTS[name], configs_of(name), compiled, kind, inductor_meta=facts)(
        getattr(kernels, name)
    )


def original(name: str) -> Any:
    """Inductor's own autotuner of the same list."""
    from torch._inductor.runtime import hints, triton_heuristics

    compiled, facts, kind = facts_of(name)
    compiled["device"] = hints.DeviceProperties(*compiled["device"])
    listed = [
        triton.Config(dict(c.kwargs), num_warps=c.num_warps, num_stages=c.num_stages)
        for c in configs_of(name)
    ]
    facts |= {"autotune_local_cache": False, "autotune_remote_cache": False}
    made = triton_heuristics.cached_autotune(
        HINTS[name], listed, compiled, hints.HeuristicType[kind.name],
        filename=kernels.__file__, inductor_meta=facts,
    )  # fmt: skip
    return made(getattr(kernels, name))


SECOND = """
import json, sys, time
from scripts import tuning_numbers as numbers
from tileloom.tuning import autotuner, measure, store
from triton.compiler import compiler
asked, looked, stages = [], [], []
own = measure.DeviceTimer.sample
measure.DeviceTimer.sample = lambda *given: asked.append(1) or own(*given)
find = store.Store.find
def timed(*given):
    began = time.perf_counter()
    found = find(*given)
    looked.append((time.perf_counter() - began) * 1e3)
    return found
store.Store.find = timed
run = compiler.ASTSource.make_ir
def noted(source, *given, **named):
    stages.append(source.name)
    return run(source, *given, **named)
compiler.ASTSource.make_ir = noted
name = sys.argv[1]
tuner, arguments = numbers.ours(name), numbers.arguments_of(name)
began = time.perf_counter()
tuner.run(*arguments, stream=numbers.stream())
first = (time.perf_counter() - began) * 1e3
print(json.dumps({"lookup_ms": looked, "measured": len(asked), "compiled": len(stages),
                  "kernels": stages, "first_call_ms": first}))
"""


def second(name: str, folder: Path) -> dict[str, Any]:
    """What a second process does, with the store of this one."""
    path = os.pathsep.join([*sys.path, str(Path(__file__).resolve().parents[1])])
    environment = os.environ | {"TILELOOM_CACHE_DIR": str(folder), "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", SECOND, name], env=environment, capture_output=True, text=True,
        check=True, timeout=300,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def launch(name: str, tuner: Any, arguments: tuple[Any, ...]) -> dict[str, float]:
    """Medians of microseconds on the host; contenders take turns, the device is waited for."""
    theirs = original(name)
    theirs.run(*arguments, stream=stream())
    launcher = tuner.launchers[0]
    entry = launcher.__globals__["_entry"]
    given = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
    grid = tuner._loaded.launches[tuner.winner]._grid(*arguments)
    now = stream()
    names = [f"a{i}" for i in range(len(arguments))]
    reads = [
        f"{name}.data_ptr()" if isinstance(a, torch.Tensor) else name
        for name, a in zip(names, arguments)
    ]
    scope: dict[str, Any] = {"entry": entry}
    exec(
        f"def bare({', '.join(names)}, stream):\n"
        f"    return entry({', '.join(map(str, grid))}, stream, {', '.join(reads)})",
        scope,
    )
    bare = scope["bare"]
    contenders = {
        "tuned": lambda: tuner.run(*arguments, stream=now),
        "bare": lambda: bare(*arguments, stream=now),
        "entry": lambda: entry(*grid, now, *given),
        "inductor": lambda: theirs.run(*arguments, stream=now),
    }
    found: dict[str, list[float]] = {key: [] for key in contenders}
    for _ in range(60):
        for key, call in contenders.items():
            torch.cuda.synchronize()
            found[key].append(timeit.timeit(call, number=100) / 100 * 1e6)
    return {f"{key}_us": statistics.median(times) for key, times in found.items()}


def times_of_all(name: str, arguments: tuple[Any, ...]) -> dict[Config, float]:
    """The device time of every config, measured together for long, in ms."""
    with tempfile.TemporaryDirectory() as folder, knobs.scope({"cache.dir": Path(folder)}):
        tuner = ours(name)
        tuner.precompile()
        launchers = list(tuner.launchers)
        calls = [lambda run=launcher: run(*arguments, stream=stream()) for launcher in launchers]
        plan = Plan(rounds=61, most_rounds=61, screen=100.0)
        found = compare(calls, DeviceTimer(device()), plan)
    best = found.winner
    assert best is not None, "no config of the subject runs"
    return {
        launcher.config: (one.ratio or float("inf"))
        for launcher, one in zip(launchers, found.timings)
    }


def fresh(make: Any, arguments: tuple[Any, ...], folder: Path) -> tuple[Any, float]:
    """Tune with nothing compiled and nothing stored; the tuner, and seconds of its first call.

    Workers are kept as long as Triton's cache is the same folder, so it is emptied, not replaced.
    """
    from triton import knobs as of_triton

    for there in folder.iterdir():
        shutil.rmtree(there)
    with knobs.scope({"cache.dir": folder / "tileloom"}), of_triton.cache.scope():
        of_triton.cache.dir = str(folder / "triton")
        tuner = make()
        torch.cuda.synchronize()
        began = time.perf_counter()
        tuner.run(*arguments, stream=stream())
        torch.cuda.synchronize()
        return tuner, time.perf_counter() - began


def choices(name: str, arguments: tuple[Any, ...], repeats: int) -> dict[str, Any]:
    """How good tunings from an empty store choose, and how long they take."""
    ratios = times_of_all(name, arguments)
    best = min(ratios.values())
    chosen: list[float] = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder, knobs.scope({"cache.dir": Path(folder)}):
            tuner = ours(name)
            tuner.precompile(warm_cache_only=True)  # out of Triton's cache
            tuner.run(*arguments, stream=stream())
        chosen.append(ratios[tuner.winner] / best)
    seconds: dict[str, list[float]] = {"seconds": [], "original_seconds": []}
    with tempfile.TemporaryDirectory() as kept:
        precompile._pools.close()
        _, cold = fresh(lambda: ours(name), arguments, Path(kept))
        for _ in range(3):
            mine, one = fresh(lambda: ours(name), arguments, Path(kept))
            seconds["seconds"].append(one)
            theirs, one = fresh(lambda: original(name), arguments, Path(kept))
            seconds["original_seconds"].append(one)
    their_config = Config.of(theirs.launchers[0].config)
    return {
        "configs": len(ratios),
        "tunings": repeats,
        "within_1_percent": sum(ratio <= 1.01 for ratio in chosen),
        "worst": max(chosen),
        "original_over_ours": ratios[their_config] / ratios[mine.winner],
        "cold_seconds": cold,
        **{key: statistics.median(all_) for key, all_ in seconds.items()},
    }


def main() -> None:
    """Run everything, print a line a subject, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--subject", choices=SUBJECTS, action="append")
    given = parser.parse_args()
    from triton import knobs as of_triton

    # Where the variable is not set, Inductor sets it in the middle. The second process of the next
    # subject would look there for the small kernel by which the tiers are tested, which this
    # process has compiled before, elsewhere.
    os.environ["TRITON_CACHE_DIR"] = str(of_triton.cache.dir)
    subjects: dict[str, Any] = {}
    told = {
        "kind": "tileloom-tuning-numbers",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": given.commit,
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "tileloom": tileloom.__version__,
        "subjects": subjects,
    }
    for name in given.subject or SUBJECTS:
        arguments = arguments_of(name)
        with tempfile.TemporaryDirectory() as folder, knobs.scope({"cache.dir": Path(folder)}):
            tuner = ours(name)
            tuner.run(*arguments, stream=stream())
            subjects[name] = {
                "winner": tuner.winner.to_dict(),
                "second": second(name, Path(folder)),
                "launch": launch(name, tuner, arguments),
            }
        subjects[name]["choice"] = choices(name, arguments, given.repeats)
        print(name, json.dumps(subjects[name]), flush=True)
        if given.out is not None:
            given.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
