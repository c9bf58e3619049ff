"""Keep ptxas from moving a wait above the arithmetic that should run before it."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _pin_ptx(values):
    """Copy `values` registers; arrive at barrier 15 if one of them is negative, which none is."""
    first, rest = values, range(1, values)
    text = f"{{ .reg .pred p; .reg .b32 a, b; mov.b32 a, ${first}; "
    text += "".join(f"mov.b32 b, ${values + i}; or.b32 a, a, b; " for i in rest)
    text += "setp.lt.s32 p, a, 0; @p bar.arrive 15, 256; "
    return text + "".join(f"mov.b32 ${i}, ${values + i}; " for i in range(values)) + "}"


@gluon.constexpr_function
def _pin_constraints(values):
    return ",".join(["=f"] * values + ["f"] * values)


@gluon.jit
def pin(x, VALUES: gl.constexpr):
    """Return x, which is float32 and never negative, and hold the next wait behind it.

    ptxas hoists `wgmma.wait_group 0` above exponentials that do not depend on it, and so takes away
    their overlap with the tensor cores (seen with ptxas 12.8 and 13.0). It moves nothing across a
    barrier instruction; this one is predicated on a sign bit that is never set, and costs five
    instructions. VALUES is the number of registers that x has in a thread.
    """
    text: gl.constexpr = _pin_ptx(VALUES)
    constraints: gl.constexpr = _pin_constraints(VALUES)
    return gl.inline_asm_elementwise(text, constraints, [x], gl.float32, False, VALUES)


@gluon.jit
def stay(x):
    """Return x, a 32-bit integer, and keep what is computed from it where it is written.

    LLVM moves what does not change out of a loop, also from under a branch that is hardly ever
    taken, and then holds it in registers. It moves nothing across assembly with side effects.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.int32, False, 1)
