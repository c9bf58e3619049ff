"""Grids that follow each other on a stream: a kernel that begins before the one ahead has ended.

With Triton's option `launch_pdl` (CUDA's programmatic dependent launch) the blocks of a kernel may
start as soon as all blocks of the kernel ahead have ended or have called `gdc_launch_dependents`,
and room is there. What a block does before it needs anything of the kernels ahead, and the launch
itself, then take no time. Without the option both functions, which are Triton's own, do nothing.

- `gdc_wait()` waits until the kernels ahead have ended and all that they wrote is visible: by every
  partition that reads or writes global memory, before it first does. A kernel that calls
  `gdc_launch_dependents` must call it too: only so has a kernel behind it waited for all ahead.
- `gdc_launch_dependents()` lets the blocks of the kernel behind start, as soon as all blocks have
  said so or ended.

Source: PTX ISA 8.x, `griddepcontrol`.
"""

from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["gdc_launch_dependents", "gdc_wait"]
