"""A problem, a machine and records for the tests of the store."""

from tileloom.tuning.identity import Platform, Problem
from tileloom.tuning.store import Candidate, Record

PLATFORM = Platform("NVIDIA H100 80GB HBM3", "580.159.04", "3.7.1", "12.8")
PROBLEM = Problem(
    kernel="kernels:add_kernel",
    source="5" * 64,
    types={"x": "*fp32", "n": "i32"},
    constants={"scale": 1.0, "gone": None},
    aligned=("x",),
    options={"num_ctas": 1, "launch_pdl": True},
    size_hints={"x": 1024},
)
CONFIGS = ({"XBLOCK": 128, "num_warps": 4, "num_stages": 1},
           {"XBLOCK": 256, "num_warps": 4, "num_stages": 1})  # fmt: skip


def record(winner=0, problem=PROBLEM, platform=PLATFORM, **changes):
    candidates = [
        Candidate(config, ms=0.01 + 0.001 * abs(i - winner), ratio=1 + 0.1 * abs(i - winner))
        for i, config in enumerate(CONFIGS)
    ]
    fields = {
        "problem": problem.as_json(),
        "platform": platform,
        "winner": CONFIGS[winner],
        "found_by": "list",
        "candidates": tuple(candidates),
        "measured": {"rounds": 7},
    }
    return Record(**{**fields, **changes})
