"""The operators. Importing this package registers the schema of each under `torch.ops.tileloom`."""

from tileloom.ops import attention, gemm, rowwise
from tileloom.ops._op import Choice, PerformanceWarning, record_choices

__all__ = [
    "Choice", "PerformanceWarning", "attention", "gemm", "record_choices", "rowwise",
]  # fmt: skip
