"""Norms through rings of shared memory on the emulator; `CASES` for the mutants of their kernels.

tileloom check tests/ops/rowwise/norms/emulated.py --sms 2 [--mutate --kernels KERNEL_FILE]

Rings of three places and of two; a program takes more rows than its ring has places.
"""

from __future__ import annotations

from functools import partial

from tests.ops.rowwise.norms import cases
from tests.ops.rowwise.norms.cases import NormCase

from tileloom.testing import poisoned_memory


def _checked(case: NormCase) -> None:
    """Run and judge a call inside a run of the emulator that is there already."""
    inputs = case.inputs()
    with poisoned_memory():
        results = cases.run(inputs)
    cases.check(inputs, results)


CASES = {case.id: partial(_checked, case) for case in (*cases.RINGS[:2], *cases.WALKS[:2])}
