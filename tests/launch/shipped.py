"""One compile pass over the shipped kernels for each version of Triton, shared by all tests."""

import pickle
import re

from filelock import FileLock
from tests.launch.versions import KNOWN_FAULTS, triton_folder

from tileloom.cli.inspect import shipped_specs
from tileloom.launch.aot import compile_in_workers

OWN = "own"
SPECS = shipped_specs()
# Tiles and transposes of one source that differ in little else; the others of it stand for them.
ALIKE = re.compile(
    r"matmul_gluon_sm90\[(256x128|128x128|64x256|128x64|64x64|64x32)-(linear|fused)\]"
    r"|matmul_gluon_sm90\[128x256-(nn|tt|fp32)\]|matmul_gluon_sm90\[128x128-split.*"
    r"|matmul_gluon_sm90\[(128x64|128x32|64x64|64x32|128x128|192x128)-swap.*"
    r"|matmul_gluon_sm90\[128x16-swap\]|matmul_gluon_sm90\[128x256-(swap|edges)\]"
    r"|matmul_gluon_sm90\[(64x80|64x256|128x128|128x256|192x128)-edge.*"
    r"|matmul_gluon_sm90\[128x256-swap-edge.*"
    r"|matmul_triton\[(nn|ragged).*"
)


def is_quick(name):
    """Whether a kernel is compiled without `full` too."""
    return ALIKE.fullmatch(name) is None


def pairs(version, *, full):
    """What is compiled. Without `full` not all.

    No kernel that is ALIKE. All others for sm_90 on 3.6.0, which GPU machines have. On the other
    versions one in three in Gluon, which on the own Triton are not those of the others, and those
    with a known fault; of portable functions the first and the last spec: on the own Triton for
    every architecture, on others for sm_90.
    """
    every = [(spec, arch) for spec in SPECS.values() for arch in spec.archs]
    if full:
        return every
    names = _names(version)
    return [
        (spec, arch)
        for spec, arch in every
        if spec.name in names and (version == OWN or arch == "sm_90")
    ]


def _names(version):
    """Names of the quick specs of a version."""
    quick = [name for name in SPECS if is_quick(name)]
    if version == "3.6.0":
        return set(quick)
    by_function = {}
    for name in quick:
        by_function.setdefault(SPECS[name].function, []).append(name)
    chosen = {name for of, name in KNOWN_FAULTS if of == version}
    for names in by_function.values():
        gluon = SPECS[names[0]].gluon
        first = 1 % len(names) if version == OWN else 0
        chosen.update(names[first::3] if gluon else (names[0], names[-1]))
    return chosen


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
