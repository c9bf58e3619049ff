"""Times kernels that TileLang generated, with its copies and with ours, beside cuBLAS, on a Hopper.

python scripts/time_tilelang.py make FOLDER         where TileLang and the CuTe DSL are; no GPU
python scripts/time_tilelang.py FOLDER [--out FILE] [--commit HASH]         on a GPU, without them

With PYTHONPATH=src:. in the repository's root. The pipelined GEMM is the same PTX on both (a test
says so) and is timed once; of the GEMM with tails only ours is right, and both are timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

import torch
from tests.cpasync import tilelang_client
from tests.cpasync.test_tilelang import map_of
from time_cpasync import accurate, timed

from tileloom.bench.machine import describe_machine
from tileloom.cpasync.cubin import Cubin


def make(folder: Path) -> None:
    """Generate and compile; one file a kernel."""
    assert tilelang_client.find_tilelang(), "TileLang and the CuTe DSL are needed"
    folder.mkdir(parents=True, exist_ok=True)
    for name in tilelang_client.TIMED:
        made = tilelang_client.generate(name)
        kept: dict[str, Any] = {"made": dataclasses.asdict(made), "cubins": {}}
        for whose, namespace in tilelang_client.NAMESPACES.items():
            compiled = made.kernel.compile(tilelang_client.GPU, namespace=namespace)
            cubin = dataclasses.asdict(compiled)
            kept["cubins"][whose] = cubin | {"code": b64encode(cubin["code"]).decode()}
        if kept["cubins"]["ours"] == kept["cubins"]["theirs"]:
            del kept["cubins"]["theirs"]
        (folder / f"{name}.json").write_text(json.dumps(kept))


def table(path: Path) -> dict[str, Any]:
    """Time one kernel."""
    kept = json.loads(path.read_text())
    made = tilelang_client.Generated.of(kept["made"])
    n = int(path.stem.split()[1])
    a, b = (torch.randn(n, n, device="cuda").half() for _ in range(2))
    rows = slice(n - 256, n)
    right, plain = a[rows].double() @ b.double(), (a[rows].float() @ b.float()).half()
    verdicts: dict[str, bool] = {}
    contenders: dict[str, Any] = {"cuBLAS": (lambda: a @ b, lambda: True)}
    for whose, cubin in kept["cubins"].items():
        c = torch.empty(n, n, device="cuda", dtype=torch.float16)
        tensors = {"A": a, "B": b, "C": c}
        given = [
            map_of(made.maps[p], tensors[made.maps[p].tensor]) if p in made.maps else tensors[p]
            for p in made.kernel.parameters
        ]
        sizes = tuple(cubin["parameter_bytes"])
        binary = Cubin(**cubin | {"code": b64decode(cubin["code"]), "parameter_bytes": sizes})
        launch = binary.launcher(
            list(made.kernel.parameters.values()), grid=made.kernel.grid,
            shared_bytes=made.kernel.shared_bytes, device=torch.cuda.current_device(),
        )  # fmt: skip

        def call(launch: Any = launch, given: Any = given) -> None:
            launch(torch.cuda.current_stream().cuda_stream, *given)

        def is_right(c: torch.Tensor = c, whose: str = whose) -> bool:
            verdicts[whose] = accurate(c[rows], right, plain)
            return verdicts[whose] or whose == "theirs"  # timed, though wrong: see the page

        contenders[whose] = (call, is_right)
    found = timed(contenders, 2.0 * n**3 / 1e3, "TFLOP/s")
    return {name: row | {"right": verdicts.get(name, True)} for name, row in found.items()}


def main() -> None:
    """Make, or time and print and write a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="+", metavar="[make] FOLDER")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    given = parser.parse_args()
    *words, folder = given.folder
    if words == ["make"]:
        return make(Path(folder))
    report: dict[str, Any] = {
        "machine": describe_machine(torch.device("cuda", torch.cuda.current_device())),
        "commit": given.commit,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "tables": {path.stem: table(path) for path in sorted(Path(folder).glob("*.json"))},
    }
    print(json.dumps(report["tables"], indent=1))
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
