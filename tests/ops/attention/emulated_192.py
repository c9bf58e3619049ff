"""The Hopper backward's kernel for 192 columns on the emulator; `CASES` for its mutants.

    tileloom check tests/ops/attention/emulated_192.py --sms 2 [--mutate --kernels KERNEL_FILE]

The calls are those of `emulated_backward.py`; every path that synchronises is in them.
"""

from __future__ import annotations

from tests.ops.attention.emulated_backward import cases_of

CASES = cases_of(("d192x128-full-bf16-64x2", "d192x128-window-lengths-bf16-64x2"))
