"""The config of the kernel for one row (`kernel_triton_matvec.py`), and its rule."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from tileloom.errors import check_fields
from tileloom.ops import _op
from tileloom.ops.gemm.problem import MatmulProblem
from tileloom.target import Target

_MOST_SUMS = 96
"""Numbers that a thread adds to, of its 255 registers."""
_LIMIT = 2**31 - 1 - 8192


@dataclass(frozen=True)
class MatvecConfig:
    """The portable kernel for one row: whole columns of b in pieces, no tensor core.

    Attributes:
        block_n: Columns of a program, a power of two. block_k: Elements of k in a piece, a power
            of two. num_warps: Warps.
    """

    block_n: int = 4
    block_k: int = 2048
    num_warps: int = 4
    backend = "matvec"

    def __post_init__(self) -> None:
        """Refuse a field of a wrong type."""
        check_fields(self)

    def encode(self) -> str:
        """Return the config as the text that the operator's schema carries."""
        return "matvec:" + ",".join(str(getattr(self, f.name)) for f in fields(self))

    def reasons_against(self, problem: MatmulProblem, target: Target) -> tuple[str, ...]:
        """Return why this config cannot run the problem on the target; empty if it can."""
        why = _op.portable_reasons(target)
        known = (torch.float16, torch.bfloat16, torch.float32)
        for name, dtype in (("dtype", problem.dtype), ("out_dtype", problem.out_dtype)):
            if dtype not in known:
                why.append(f"{name} {dtype} is not float16, bfloat16 or float32")
        if problem.chunks:
            why.append("it waits for no chunk")
        if problem.m != 1:
            why.append(f"M is {problem.m}, not 1")
        if problem.k == 0:
            why.append("K is 0")
        elif problem.b.strides[1] != 1 and problem.k > 1:
            why.append(f"b has a stride of {problem.b.strides[1]} elements along K, not 1")
        for name, size in (("N", problem.n), ("K", problem.k)):
            if size > _LIMIT:
                why.append(f"{name} is {size}, more than {_LIMIT}")
        if problem.n * problem.l > _LIMIT:
            why.append(f"all batches have {problem.n * problem.l} columns, more than {_LIMIT}")
        return (*why, *self._faults())

    def _faults(self) -> list[str]:
        """What is wrong with the config's own numbers."""
        why: list[str] = []
        ranges = (("block_n", 1, 64), ("block_k", 64, 8192), ("num_warps", 1, 16))
        for name, least, most in ranges:
            value: int = getattr(self, name)
            if value < 1 or value & (value - 1) or not least <= value <= most:
                why.append(f"{name} is {value}, not a power of two in {least}..{most}")
        if why:
            return why
        sums = self.block_n * self.block_k // (32 * self.num_warps)
        if sums > _MOST_SUMS:
            why.append(f"a thread has {sums} sums, more than {_MOST_SUMS}")
        return why


def overlaps(target: Target) -> bool:
    """Whether a launch on the target may begin before the kernel ahead has ended."""
    return target.capability >= (9, 0)


def matvec_rule(problem: MatmulProblem, target: Target) -> MatvecConfig | None:
    """Give the config where it was measured to be the fastest, else None.

    docs/matmul_measurements.md has the numbers.

    One row of 16 bits on Hopper, b by columns, and whole pieces along K; or columns of b that start
    at no multiple of 16 bytes, which the Hopper kernel does not take.
    """
    is_half = problem.dtype in (torch.float16, torch.bfloat16)
    is_one = (problem.m, problem.l, problem.chunks) == (1, 1, 0) and problem.b_is_transposed
    if not (is_half and is_one and problem.k and target.capability == (9, 0)):
        return None
    if problem.b.strides[2] % 8:
        return MatvecConfig(2, 1024, 2)
    if problem.k % 1024:
        return None
    return MatvecConfig() if problem.k % 2048 == 0 else MatvecConfig(4, 1024, 2)
