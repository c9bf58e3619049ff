"""Imported by the server that children are forked from: what each would do before its first launch.

Triton hashes its own libraries, hundreds of megabytes, before it compiles anything in a process.
"""

from __future__ import annotations

from triton.experimental.gluon import language as language
from triton.runtime.cache import triton_key

from tileloom.emulator import check as check
from tileloom.emulator.lower import load_lowerings

load_lowerings()
triton_key()
