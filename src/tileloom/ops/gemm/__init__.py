"""Matrix products: `matmul`, and `async_input_matmul`, whose input may still be arriving."""

from tileloom.ops.gemm.api import matmul
from tileloom.ops.gemm.reference import matmul_reference

__all__ = ["matmul", "matmul_reference"]
