"""Grids that follow each other on a stream: a kernel that begins before the one ahead has ended.

With Triton's option `launch_pdl` (CUDA's programmatic dependent launch) the blocks of a kernel may
start as soon as all blocks of the kernel ahead have ended or have called `gdc_launch_dependents`,
and room is there. What a block does before it needs anything of the kernels ahead, and the launch
itself, then take no time. Without the option both functions do nothing.
Source: PTX ISA 8.x, `griddepcontrol`; the names are those of `triton.language.extra.cuda`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def gdc_wait():
    """Wait until the kernels ahead have ended and all that they wrote is visible.

    By every partition that reads or writes global memory, before it first does. A kernel that calls
    `gdc_launch_dependents` must call this too: only so has a kernel behind it waited for all ahead.
    """
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1)


@gluon.jit
def gdc_launch_dependents():
    """Let the blocks of the kernel behind start, as soon as all blocks have said so or ended."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1
    )
