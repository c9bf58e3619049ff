"""Tools to test kernels with, yours too: accuracy rule, poisoned memory, cases, dropout's mask."""

from tileloom.testing.accuracy import (
    AccuracyError,
    AccuracyReport,
    CaseError,
    WeakCaseError,
    assert_accurate,
)
from tileloom.testing.cases import Case, Layout, laid_out
from tileloom.testing.dropout import dropout_mask, dropout_uniforms
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
    "dropout_mask",
    "dropout_uniforms",
    "laid_out",
    "poison_",
    "poisoned_memory",
]
