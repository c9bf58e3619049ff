"""One compile pass over the shipped kernels for each version of Triton, shared by all tests."""

import pickle
import re

from filelock import FileLock
from tests.launch.versions import triton_folder

from tileloom.cli.inspect import shipped_specs
from tileloom.launch.aot import compile_in_workers

OWN = "own"
SPECS = shipped_specs()
# Tiles and transposes of one source that differ in little else; the others of it stand for them.
ALIKE = re.compile(
    r"matmul_gluon_sm90\[(256x128|128x128|64x256|128x64|64x64|64x32)-(linear|fused)\]"
    r"|matmul_gluon_sm90\[128x256-(nn|tt|fp32)\]|matmul_gluon_sm90\[128x128-split.*"
    r"|matmul_gluon_sm90\[(128x64|128x32|64x64|64x32)-swap.*|matmul_gluon_sm90\[128x16-swap\]"
    r"|matmul_triton\[(nn|ragged).*"
)


def is_quick(name):
    """Whether a kernel is compiled without `full` too."""
    return ALIKE.fullmatch(name) is None


def pairs(version, *, full):
    """What is compiled. Without `full` not all.

    No kernel that is ALIKE; and of a portable function the first and the last spec stand for all on
    other architectures than sm_90, which only the own Triton compiles for, and on other Tritons
    than the own one and 3.6.0, which GPU machines have.
    """
    every = [(spec, arch) for spec in SPECS.values() for arch in spec.archs]
    if full:
        return every
    ends = _ends()
    return [
        (spec, arch)
        for spec, arch in every
        if is_quick(spec.name)
        and (version == OWN or arch == "sm_90")
        and (spec.gluon or spec.name in ends or (arch == "sm_90" and version in (OWN, "3.6.0")))
    ]


def _ends():
    """Names of the first and the last quick spec of each function."""
    by_function = {}
    for name, spec in SPECS.items():
        if is_quick(name):
            by_function.setdefault(spec.function, []).append(name)
    return {name for names in by_function.values() for name in (names[0], names[-1])}


def compile_once(version, *, full, shared, cache):
    """Results by (name, arch). The first process to come compiles, the others wait and read."""
    path = shared / f"shipped-{version}-{'full' if full else 'quick'}.pickle"
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            results = compile_in_workers(
                pairs(version, full=full),
                workers=2,
                timeout_s=400,
                triton_path=None if version == OWN else triton_folder(version),
                cache_dir=cache / version,
            )
            path.write_bytes(pickle.dumps({(r.name, r.arch): r for r in results}))
        return pickle.loads(path.read_bytes())
