"""How many blocks of a kernel fit on one streaming multiprocessor (SM), and why not more.

The limits are those of the CUDA programming guide's table of technical specifications, for the
three architectures that tileloom compiles for. They are written here and not taken from
`tileloom.target`, which loads torch: a compiling process that needs none starts in half the time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tileloom.errors import OptionError


@dataclass(frozen=True)
class SmLimits:
    """What one SM has.

    Attributes:
        capability: Compute capability as one number, for example 90.
        registers: 32-bit registers.
        threads: Resident threads.
        blocks: Resident blocks.
        shared_bytes: Shared memory of the SM.
    """

    capability: int
    registers: int
    threads: int
    blocks: int
    shared_bytes: int

    @property
    def shared_bytes_block(self) -> int:
        """Shared memory that one block may ask for: all but what the system keeps for a block."""
        return self.shared_bytes - _RESERVED_BYTES


_RESERVED_BYTES = 1024  # of shared memory, for each block
_SHARED_UNIT = 128  # bytes
_REGISTER_UNIT = 256  # registers, for each warp
_WARP_UNIT = 4  # warps, one for each of the four schedulers

LIMITS: dict[str, SmLimits] = {
    "sm_80": SmLimits(80, 65536, 2048, 32, 164 * 1024),
    "sm_90": SmLimits(90, 65536, 2048, 32, 228 * 1024),
    "sm_100": SmLimits(100, 65536, 2048, 32, 228 * 1024),
}


def normal_arch(arch: str) -> str:
    """Return the name that tileloom uses for an architecture: ``"sm_90"`` for ``"sm_90a"``.

    Args:
        arch: With or without the `a` of the architecture-specific instruction set, which the
            compiler always uses from sm_90 on.

    Raises:
        OptionError: If tileloom does not compile for it.
    """
    match = re.fullmatch(r"(?:sm_?)?(\d+)a?", arch.strip().lower())
    name = f"sm_{match.group(1)}" if match else arch
    if name not in LIMITS:
        raise OptionError(
            f"arch is '{arch}'; tileloom compiles for {', '.join(LIMITS)} (sm_90a and sm_100a "
            "mean the same). Try: sm_90."
        )
    return name


def limits_of(arch: str) -> SmLimits:
    """Return the limits of an architecture, under any of its names; see `normal_arch`."""
    return LIMITS[normal_arch(arch)]


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def blocks_per_sm(limits: SmLimits, *, registers: int, threads: int, shared_bytes: int) -> int:
    """Count the blocks of a kernel that one SM holds at a time.

    Args:
        limits: The SM.
        registers: Registers of each thread at launch.
        threads: Threads of a block, the warps of all partitions included.
        shared_bytes: Shared memory of a block, static and dynamic.

    Returns:
        At least 1 for a kernel that can run, 0 for one that no SM can hold.
    """
    if shared_bytes > limits.shared_bytes_block or threads > 1024:
        return 0
    warps = _round_up(threads, 32) // 32
    per_warp = _round_up(max(registers, 1) * 32, _REGISTER_UNIT)
    by_registers = (limits.registers // per_warp // _WARP_UNIT * _WARP_UNIT) // warps
    by_shared = limits.shared_bytes // (_round_up(shared_bytes, _SHARED_UNIT) + _RESERVED_BYTES)
    return min(limits.blocks, limits.threads // (warps * 32), by_registers, by_shared)
