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
    r"|matmul_triton\[(nn|ragged).*"
)


def is_quick(name):
    """Whether a kernel is compiled without `full` too."""
    return ALIKE.fullmatch(name) is None


def pairs(version, *, full):
    """What is compiled: without `full` no kernel that is ALIKE, and of others' Tritons only sm_90.

    The environment's own Triton compiles for every architecture.
    """
    every = [(spec, arch) for spec in SPECS.values() for arch in spec.archs]
    if full:
        return every
    return [(s, a) for s, a in every if is_quick(s.name) and (version == OWN or a == "sm_90")]


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
