"""The other implementations of attention that ours is measured beside.

Each peer either runs or gives its reason; none is left out silently.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tileloom.bench.case import AttentionCase
from tileloom.bench.contender import Call, Contender, Inputs
from tileloom.errors import OptionError


def _sdpa(name: str, backend: SDPBackend, *, has_own_mask: bool = False) -> Contender:
    def prepare(case: AttentionCase, inputs: Inputs) -> Call:
        q, k, v, bias = inputs.q, inputs.k, inputs.v, inputs.bias
        causal, grouped, p = case.is_causal, case.heads_q != case.heads_kv, case.dropout_p

        def call() -> torch.Tensor:
            return scaled_dot_product_attention(
                q, k, v, bias, dropout_p=p, is_causal=causal, enable_gqa=grouped
            )

        return call

    def refuse(case: AttentionCase, inputs: Inputs) -> str | None:
        del inputs
        return "SDPA has no windows" if case.window else None

    def describe(case: AttentionCase, inputs: Inputs) -> Mapping[str, Any]:
        del case, inputs
        return {"backend": f"torch SDPA, {backend.name}"}

    def scope() -> contextlib.AbstractContextManager[Any]:
        return cast("Any", sdpa_kernel)([backend])

    return Contender(
        name, "peer", prepare, refuse, scope=scope, describe=describe, has_own_mask=has_own_mask
    )


def _why(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no text'}"


def import_fault(module: str) -> str | None:
    """Say why a peer's module cannot be imported; None if it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken install raises whatever it likes
        return f"{module} cannot be imported ({_why(error)})"
    return None


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package}, version unknown"


def _fa4() -> Contender:
    """FlashAttention-4 (CuTe DSL); takes `[B, L, H, D]`, so it gets its inputs in that layout."""

    def refuse(case: AttentionCase, inputs: Inputs) -> str | None:
        del inputs
        fault = import_fault("flash_attn.cute")
        if fault is not None:
            return fault
        if case.is_causal and case.len_q != case.len_k:
            return "its causal mask counts from the bottom right corner, the case's from the top"
        if case.bias or case.dropout_p:
            return "it has neither biases nor dropout"
        return None

    def prepare(case: AttentionCase, inputs: Inputs) -> Call:
        function: Any = importlib.import_module("flash_attn.cute").flash_attn_func
        q, k, v = inputs.q, inputs.k, inputs.v
        options: dict[str, Any] = {"causal": case.is_causal}
        if case.window:
            options["window_size"] = (case.window, 0)
        return lambda: function(q, k, v, **options)

    def read(out: Any) -> torch.Tensor:
        return cast("Any", out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    def describe(case: AttentionCase, inputs: Inputs) -> Mapping[str, Any]:
        del case, inputs
        return {"backend": f"{_version('flash-attn-4')}, {_version('nvidia-cutlass-dsl')}"}

    def layout(t: torch.Tensor) -> torch.Tensor:
        return t.transpose(1, 2).contiguous()

    return Contender("fa4", "peer", prepare, refuse, layout, read, describe=describe)


def _flex() -> Contender:
    """FlexAttention by `torch.compile`; only when asked for, since it compiles for each case."""

    def prepare(case: AttentionCase, inputs: Inputs) -> Call:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        function = cast("Any", torch).compile(flex_attention, dynamic=False)
        options: dict[str, Any] = {"enable_gqa": case.heads_q != case.heads_kv}
        if case.is_causal:
            options["block_mask"] = create_block_mask(
                lambda b, h, i, j: i >= j,
                *(None, None, case.len_q, case.len_k),
                device=str(inputs.q.device),
            )
        q, k, v = inputs.q, inputs.k, inputs.v
        return lambda: function(q, k, v, **options)

    def describe(case: AttentionCase, inputs: Inputs) -> Mapping[str, Any]:
        del case, inputs
        return {"backend": "torch.compile(flex_attention)"}

    def refuse(case: AttentionCase, inputs: Inputs) -> str | None:
        del inputs
        is_plain = not (case.bias or case.dropout_p or case.window)
        return None if is_plain else "it is only measured without bias, dropout and window"

    return Contender("flex", "peer", prepare, refuse, describe=describe)


PEERS: Mapping[str, Callable[[], Contender]] = {
    "cudnn": lambda: _sdpa("cudnn", SDPBackend.CUDNN_ATTENTION, has_own_mask=True),
    "flash": lambda: _sdpa("flash", SDPBackend.FLASH_ATTENTION, has_own_mask=True),
    "efficient": lambda: _sdpa("efficient", SDPBackend.EFFICIENT_ATTENTION),
    "fa4": _fa4,
    "flex": _flex,
}
DEFAULT_PEERS = ("cudnn", "flash", "efficient", "fa4")
QUICK_PEERS = ("cudnn", "efficient")


def attention_peers(names: Sequence[str]) -> tuple[Contender, ...]:
    """Make the peers of these names.

    Args:
        names: Keys of `PEERS`: ``"cudnn"``, ``"flash"`` (FlashAttention-2 in PyTorch),
            ``"efficient"`` (PyTorch's memory-efficient kernel), ``"fa4"``, ``"flex"``.

    Returns:
        The contenders, in the order of `names`.

    Raises:
        OptionError: If there is no peer of a name.
    """
    for name in names:
        if name not in PEERS:
            raise OptionError(
                f"bench: --peers names {name!r}; there are {', '.join(PEERS)}. "
                f"Try: --peers {','.join(DEFAULT_PEERS)}."
            )
    return tuple(PEERS[name]() for name in dict.fromkeys(names))
