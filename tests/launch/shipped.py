"""One compile pass over the shipped kernels for each version of Triton, shared by all tests."""

import pickle

from filelock import FileLock
from tests.launch.versions import triton_folder

from tileloom.cli.inspect import shipped_specs
from tileloom.launch.aot import compile_in_workers

OWN = "own"
SPECS = shipped_specs()


def pairs(version, *, full):
    """What is compiled: everything on the environment's own Triton, on the others sm_90 only."""
    every = [(spec, arch) for spec in SPECS.values() for arch in spec.archs]
    return [(s, a) for s, a in every if version == OWN or full or a == "sm_90"]


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
