"""What `tileloom check` runs of `cpasync.gluon`, for the mutants of the device code under it.

tileloom check tests/cpasync/emulated.py [--mutate --kernels src/tileloom/device/barriers.py]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tests.cpasync import gluon_cases


def _run(case: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
    result, right = case()
    assert torch.equal(result, right)


CASES = {name: partial(_run, case) for name, case in gluon_cases.CASES.items()}
