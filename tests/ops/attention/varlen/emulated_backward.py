"""The Hopper backward of packed sequences on the emulator; `CASES` for its mutants.

tileloom check tests/ops/attention/varlen/emulated_backward.py --sms 2 [--mutate --kernels FILE]
"""

from __future__ import annotations

from functools import partial

from tests.ops.attention.varlen.emulated import checked, hopper_plays

CASES = {
    play.name: partial(checked, play)
    for play in hopper_plays()
    if "d64-" in play.name and play.backward is not None
}
