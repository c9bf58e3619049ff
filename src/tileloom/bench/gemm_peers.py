"""Who matrix products are measured beside: cuBLAS, Inductor, the seed's operator, QuACK."""

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
    "quack": _quack(tuned=False),
    "quack-tuned": _quack(tuned=True),
}
"""By name; `compile-max` and `quack-tuned` try many kernels for each case, which takes minutes."""
DEFAULT_GEMM_PEERS = ("torch", "compile", "seed", "quack")


def takes_part(name: str, case: GemmCase) -> bool:
    """Whether a peer could have anything to do with a case: those that cannot get no column."""
    if name == "torch":
        return True
    if name == "seed":
        return case.chunks > 0
    if name in ("compile", "compile-max"):
        return case.is_fused and not case.chunks
    return not case.chunks
