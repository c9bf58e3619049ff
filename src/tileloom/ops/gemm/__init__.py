"""Matrix products: `matmul`, and `async_input_matmul`, whose input may still be arriving."""

from tileloom.ops.gemm.api import matmul
from tileloom.ops.gemm.async_api import async_input_matmul
from tileloom.ops.gemm.reference import matmul_reference
from tileloom.ops.gemm.signals import check_signals

__all__ = ["async_input_matmul", "check_signals", "matmul", "matmul_reference"]
