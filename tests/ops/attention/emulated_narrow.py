"""The Hopper backward's kernel up to head dim 64 on the emulator; `CASES` for its mutants.

    tileloom check tests/ops/attention/emulated_narrow.py --sms 2 [--mutate --kernels KERNEL_FILE]

The calls are those of `emulated_backward.py`; every path that synchronises is in them.
"""

from __future__ import annotations

from tests.ops.attention.emulated_backward import cases_of

CASES = cases_of(
    (
        "d64-full-bf16-64x3",
        "d64-window-lengths-bf16-64x3",
        "d64-causal-ordered-bf16-64x3",
        "d64-full-persistent-bf16-64x3",
        "d64-window-lengths-persistent-bf16-64x3",
        "d64-causal-ordered-persistent-bf16-64x3",
    )
)
