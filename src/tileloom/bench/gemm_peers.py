"""Who matrix products are measured beside: cuBLAS, Inductor, the seed's operator, Triton, QuACK."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tileloom.bench.function_run import FunctionContender
from tileloom.bench.gemm_case import GemmCase
from tileloom.bench.peers import import_fault

Function = Callable[..., torch.Tensor]
_SEED_TILE = 128


def _no_wait(case: GemmCase) -> str | None:
    return "it waits for no chunk" if case.chunks else None


def _compiled(mode: str | None) -> FunctionContender[GemmCase]:
    def make(case: GemmCase) -> Function:
        torch._dynamo.reset()
        compiled: Any = torch.compile(case.eager, dynamic=False, mode=mode)
        return compiled

    def refuse(case: GemmCase) -> str | None:
        return _no_wait(case) or (None if case.is_fused else "it is torch.mm: nothing to fuse")

    return FunctionContender("compile" if mode is None else "compile-max", make, refuse)


def _refuse_seed(case: GemmCase) -> str | None:
    """Say where the original refuses; where it would hang, the words behind the flags are set."""
    if not case.chunks:
        return "it only multiplies chunks that are waited for"
    if case.is_fused:
        return "it has no epilogue"
    if case.dtype != torch.bfloat16:
        return f"it takes bfloat16, not {case.dtype_name}"
    if case.m % case.chunks or case.m // case.chunks % _SEED_TILE:
        return f"its chunks are multiples of {_SEED_TILE} rows"
    if case.n % 8 or case.k % 8:
        return "its rows and columns are multiples of 8 elements"
    return None


def _seed(case: GemmCase) -> Function:
    del case
    # By text: where PyTorch is built without it, the name is missing only when it is called.
    return lambda a, b, flags: torch.ops.symm_mem._async_input_mm(a, b, flags, 0)


def _refuse_triton(case: GemmCase) -> str | None:
    if case.is_fused:
        return "it has no epilogue"
    if case.dtype == torch.float32 or not case.b_flips or case.n % 8 or case.k % 8:
        return "it takes half precision, b by columns and rows that are multiples of 16 bytes"
    return _no_wait(case)


def _triton(case: GemmCase) -> Function:
    """A tile of 128 x 256 x 64, 8 warps and 3 stages: what Triton's tutorial tunes to."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from tileloom.bench.pieces_persistent import persistent_matmul_kernel
    from tileloom.target import target_of

    kernel: Any = persistent_matmul_kernel
    tiles = -(-case.m // 128) * -(-case.n // 256)

    def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = a.new_empty(case.m, case.n)
        kernel[(min(target_of(a).sms, tiles),)](
            TensorDescriptor.from_tensor(a, [128, 64]),
            TensorDescriptor.from_tensor(b.mT, [256, 64]),
            TensorDescriptor.from_tensor(out, [128, 128]),
            *(case.m, case.n, case.k, 128, 256, 64, 8),
            num_warps=8,
            num_stages=3,
        )
        return out

    return call


_QUACK = {"relu": "relu", "gelu_tanh": "gelu_tanh_approx", "silu": "silu"}


def _refuse_quack(case: GemmCase) -> str | None:
    if case.activation and case.residual:
        return "QuACK adds what is added before the activation"
    if case.activation and case.activation not in _QUACK:
        return f"QuACK has no {case.activation} epilogue"
    return _no_wait(case) or import_fault("quack.gemm_interface")


def _quack(*, tuned: bool) -> FunctionContender[GemmCase]:
    def make(case: GemmCase) -> Function:
        package: Any = importlib.import_module("quack.gemm_interface")
        if case.activation:
            options = {"activation": _QUACK[case.activation], "store_preact": False, "tuned": tuned}
            if case.bias:
                return lambda a, b, bias: package.gemm_act(a, b, bias=bias, **options)[1]
            return lambda a, b: package.gemm_act(a, b, **options)[1]
        if case.bias and case.residual:
            return lambda a, b, bias, r: package.gemm_add(a, b, r, bias=bias, tuned=tuned)
        if case.residual:
            return lambda a, b, r: package.gemm_add(a, b, r, tuned=tuned)
        if case.bias:
            return lambda a, b, bias: package.gemm(a, b, bias=bias, tuned=tuned)
        return lambda a, b: package.gemm(a, b, tuned=tuned)

    return FunctionContender("quack-tuned" if tuned else "quack", make, _refuse_quack)


GEMM_PEERS: Mapping[str, FunctionContender[GemmCase]] = {
    "torch": FunctionContender("torch", lambda case: case.eager),
    "compile": _compiled(None),
    "compile-max": _compiled("max-autotune-no-cudagraphs"),
    "seed": FunctionContender("seed", _seed, _refuse_seed),
    "triton": FunctionContender("triton", _triton, _refuse_triton),
    "quack": _quack(tuned=False),
    "quack-tuned": _quack(tuned=True),
}
"""By name; `compile-max` and `quack-tuned` try many kernels for each case, which takes minutes."""
DEFAULT_GEMM_PEERS = ("torch", "compile", "seed", "triton", "quack")


def takes_part(name: str, case: GemmCase) -> bool:
    """Whether a peer could have anything to do with a case: those that cannot get no column."""
    if name == "torch":
        return True
    if name == "seed":
        return case.chunks > 0
    if name in ("compile", "compile-max"):
        return case.is_fused and not case.chunks
    if name == "triton":
        return not case.is_fused and not case.chunks
    return not case.chunks
