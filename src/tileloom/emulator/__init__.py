"""Run Gluon and Triton kernels for Hopper on a CPU, and be told about every race and deadlock.

>>> from tileloom import emulator
>>> with emulator.run(arch="sm_90a", schedule="late") as run:
...     pass  # my_kernel[grid](a_desc, b_desc, c_desc, K, num_warps=4)
>>> run.reports
[]
"""

from tileloom.emulator.report import (
    AssertError,
    BarrierError,
    DeadlockError,
    EmulatorError,
    ExitError,
    IRSyntaxError,
    LaunchError,
    OutOfBoundsError,
    PendingError,
    ProxyError,
    RaceError,
    Report,
    ReportError,
    StepLimitError,
    UninitializedError,
    UnsupportedKernelError,
)
from tileloom.emulator.session import Run, run

__all__ = [
    "AssertError",
    "BarrierError",
    "DeadlockError",
    "EmulatorError",
    "ExitError",
    "IRSyntaxError",
    "LaunchError",
    "OutOfBoundsError",
    "PendingError",
    "ProxyError",
    "RaceError",
    "Report",
    "ReportError",
    "Run",
    "StepLimitError",
    "UninitializedError",
    "UnsupportedKernelError",
    "run",
]
