"""Time the first launch of a bundled kernel in a new process: `time_bundle.py BUNDLE [RUNS]`.

The bundle is that of the tests (`tests.launch.bundle_samples:for_gpu`). Each run is a process of
its own that has imported torch and made its tensors; then it is timed, in ms:

    import    `tileloom.launch` and what a bundle needs
    open      the file and its manifest
    first     the first launch until the GPU is done: kernel read, checked, loaded, launched
    second    the next launch, until the GPU is done
    host      a later launch, host time alone, median of 1000

"open" and "first" together are what a second process pays where Triton would compile or ask its
cache. Prints JSON: medians and worst over the runs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

_CHILD = """
import json, sys, time
import torch
path, name = sys.argv[1:]
q, k, v = torch.randn(3, 2, 4, 1024, 128, device="cuda", dtype=torch.bfloat16)
x = torch.randn(4096, device="cuda")
out = torch.empty_like(x)
torch.cuda.synchronize()
before = "triton" in sys.modules  # PyTorch itself may have done it
clock = time.perf_counter
times = [clock()]
from tileloom.launch.bundle import load_bundle
times.append(clock())
bundle = load_bundle(path)
times.append(clock())
if name == "add":
    kernel = bundle.kernel("add[fp32]")
    def launch():
        kernel[(4,)](x, x, out, 4096)
else:
    from tests.launch.bundle_child import launch_attention
    full = "attention_fwd_gluon_sm90[d128-causal-bf16]"
    def launch():
        launch_attention(bundle, full, q, k, v, causal=True, sms=132)
    torch.full_like(q, float("nan")), torch.zeros(1, dtype=torch.int32, device="cuda")
    torch.full((2, 4, 1024), float("nan"), device="cuda")
    torch.cuda.synchronize()
    from tileloom.launch import TensorDescriptor
    times[-1] = clock()
for _ in range(2):
    launch()
    torch.cuda.synchronize()
    times.append(clock())
host = []
for _ in range(1000):
    start = clock()
    launch()
    host.append(clock() - start)
torch.cuda.synchronize()
spans = [b - a for a, b in zip(times, times[1:])] + [sorted(host)[500]]
if name != "add":
    spans[1] = 0.0  # the imports of the test's own launcher lie in it
assert ("triton" in sys.modules) == before, "tileloom imported Triton"
print(json.dumps([1e3 * s for s in spans]))
"""

_NAMES = ("import", "open", "first", "second", "host")


def main() -> None:
    """Run the processes and print what they took."""
    path, runs = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 8
    result: dict[str, dict[str, tuple[float, float]]] = {}
    for name in ("add", "attention"):
        print(f"{name}, {runs} processes", file=sys.stderr)
        rows = []
        for _ in range(runs):
            done = subprocess.run(
                [sys.executable, "-c", _CHILD, path, name],
                env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                sys.exit(done.stderr)
            rows.append(json.loads(done.stdout))
        result[name] = {
            label: (round(statistics.median(column), 4), round(max(column), 4))
            for label, column in zip(_NAMES, zip(*rows))
        }
    print(json.dumps({"ms, median and worst": result, "runs": runs}, indent=2))


if __name__ == "__main__":
    main()
