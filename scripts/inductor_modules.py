"""Times modules that torch.compile wrote on a GPU, as they are and with their imports changed.

PYTHONPATH=src:. python scripts/inductor_modules.py [--out FILE] [--commit HASH] [NAME ...]

The modules are those of tests/tuning/modules for the installed torch; without any,
`python -m tests.tuning.make_modules` writes them. For each module:

first     seconds of the first call: compiling and tuning, with nothing kept before
device    milliseconds of a call on the device, both in rotation, with a cold L2 cache; and ours
          over the original's
launch    microseconds of the host for a launch of the module's first kernel, of both
configs   what either chose for each kernel
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import triton
from tests.tuning.make_modules import FOLDER, MODELS, VERSION, arguments
from tests.tuning.test_swap_gpu import imported

from tileloom import knobs
from tileloom.tuning.measure import DeviceTimer, Plan, compare
from tileloom.tuning.swap import swapped


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


def kernels_of(module: Any) -> dict[str, Any]:
    """A module's kernels by name, in the order of its text."""
    return {name: v for name, v in vars(module).items() if hasattr(v, "launchers")}


def launch_us(kernel: Any, args: tuple[Any, ...]) -> float:
    """Microseconds of the host, the median of 40 samples of 50 launches."""
    stream = torch.cuda.current_stream().cuda_stream
    samples = []
    for _ in range(40):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(50):
            kernel.run(*args, stream=stream)
        samples.append((time.perf_counter() - began) / 50)
    torch.cuda.synchronize()
    return statistics.median(samples) * 1e6


def measured(name: str, folder: Path) -> dict[str, Any]:
    """Run a module both ways, and return its row of the record."""
    text = (FOLDER / f"{name}.txt").read_text()
    device = torch.device("cuda", torch.cuda.current_device())
    given = arguments(MODELS[name], device)
    row: dict[str, Any] = {"module": name, "first": {}, "launch": {}, "configs": {}}
    calls = []
    for who, source in (("original", text), ("ours", swapped(text))):
        began = time.perf_counter()
        module = imported(source, folder / f"{name}_{who}.py")
        module.call(given.copy())
        torch.cuda.synchronize()
        row["first"][who] = time.perf_counter() - began
        own = kernels_of(module)
        row["configs"][who] = {n: str(kernel.launchers[0].config) for n, kernel in own.items()}
        first, kernel = next(iter(own.items()))
        seen = Seen(kernel)
        setattr(module, first, seen)
        module.call(given.copy())
        setattr(module, first, kernel)
        assert seen.first is not None
        row["launch"][who] = launch_us(kernel, seen.first)
        calls.append(lambda module=module: module.call(given.copy()))
    found = compare(calls, DeviceTimer(device), Plan(rounds=15, most_rounds=31, screen=100.0))
    original, ours = (timing.ms for timing in found.timings)
    row["device"] = {"original": original, "ours": ours}
    if original and ours:
        row["device"]["ratio"] = ours / original
    return row


def main() -> None:
    """Measure, print each row, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="modules; default: all")
    parser.add_argument("--out", type=Path, help="where to write the record, as JSON")
    parser.add_argument("--commit", default="unknown", help="of tileloom, for the record")
    options = parser.parse_args()
    names = options.names or sorted(path.stem for path in FOLDER.glob("*.txt"))
    rows = []
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
        with knobs.scope({"cache.dir": folder / "tileloom"}):
            for name in names:
                rows.append(measured(name, folder))
                print(json.dumps(rows[-1]), flush=True)
    record = {
        "card": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "commit": options.commit,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "modules": VERSION,
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
