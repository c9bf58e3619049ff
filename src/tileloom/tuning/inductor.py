"""Autotuners that are instances of Inductor's class too, for code that asks with `isinstance`.

Kernels of generated modules are such where Inductor is loaded, as it is in a process that imports
one. Everything that a wrapper, a compile worker or Inductor's benchmarks call is ours; what only
Inductor's own methods call is inherited, and of no use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tileloom.tuning import autotuner, bandwidth

if TYPE_CHECKING:

    class _Original:
        """Inductor's class, of which a type checker need not know more."""

else:
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner as _Original


class CachingAutotuner(autotuner.CachingAutotuner, _Original):
    """See `autotuner.CachingAutotuner`."""


class DebugAutotuner(bandwidth.DebugAutotuner, _Original):
    """See `bandwidth.DebugAutotuner`."""
