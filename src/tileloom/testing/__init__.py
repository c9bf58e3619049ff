"""Tools to test kernels with, yours too: the accuracy rule, poisoned memory, cases, layouts."""

from tileloom.testing.accuracy import (
    AccuracyError,
    AccuracyReport,
    CaseError,
    WeakCaseError,
    assert_accurate,
)
from tileloom.testing.cases import Case, Layout, laid_out
from tileloom.testing.poison import CanaryError, Guarded, MemoryGuard, poison_, poisoned_memory

__all__ = [
    "AccuracyError",
    "AccuracyReport",
    "CanaryError",
    "Case",
    "CaseError",
    "Guarded",
    "Layout",
    "MemoryGuard",
    "WeakCaseError",
    "assert_accurate",
    "laid_out",
    "poison_",
    "poisoned_memory",
]
