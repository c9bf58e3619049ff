"""Run a group of cases with the portable kernel on Triton's interpreter; one JSON line a case.

    TRITON_INTERPRET=1 PYTHONPATH=src python -m tests.ops.attention.interpreted shown

A process of its own: the variable decides what `triton.jit` builds when a kernel is imported.
"""

from __future__ import annotations

import json
import sys
import traceback

import torch
from tests.ops.attention import cases

import tileloom
from tileloom.ops import record_choices
from tileloom.ops.attention.config import TritonConfig, triton_rule
from tileloom.target import H100, override
from tileloom.testing import poisoned_memory


def run(case: cases.AttentionCase, config: TritonConfig | None = None) -> None:
    """Run and judge one case; raises if it is wrong."""
    inputs = case.inputs()
    config = config or triton_rule(cases.problem_of(inputs), H100)
    before = [t.clone() for t in (inputs.q, inputs.k, inputs.v)]
    with override(H100), record_choices() as made, poisoned_memory():
        out, lse = tileloom.attention(
            inputs.q, inputs.k, inputs.v, **inputs.options, return_lse=True, config=config
        )
    assert [choice.backend for choice in made] == ["triton"]
    for tensor, copy in zip((inputs.q, inputs.k, inputs.v), before):
        assert torch.equal(tensor.nan_to_num(7.0), copy.nan_to_num(7.0))
    cases.check(inputs, out, lse)


def main(group: str) -> None:
    """Print an empty error for each case that is right, else its traceback."""
    torch.set_num_threads(1)
    for case in cases.GROUPS[group]:
        error = ""
        try:
            run(case)
        except Exception:
            error = traceback.format_exc()
        print(json.dumps({"id": case.id, "error": error}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
