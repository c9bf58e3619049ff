"""The public function `async_input_matmul`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

import torch

from tileloom.errors import (
    DtypeError,
    GradientError,
    OptionError,
    ShapeError,
    shown_value,
    unknown_option,
)
from tileloom.ops._op import has_tangent
from tileloom.ops._plans import Plans, is_short, plan_key
from tileloom.ops.gemm import checks
from tileloom.ops.gemm.async_input import (
    FOREVER,
    Plan,
    async_input_matmul_op,
    even_offsets,
    plan_found,
)
from tileloom.ops.gemm.config import MatmulConfig
from tileloom.ops.gemm.problem import Activation

_OP = "async_input_matmul"
_OPTIONS = ("chunk_pivot", "chunk_offsets", "epoch", "timeout_s", "bias", "activation", "residual",
            "out_dtype", "config")  # fmt: skip
B = TypeVar("B", torch.Tensor, Sequence[torch.Tensor])


def async_input_matmul(
    a: torch.Tensor,
    b: B,
    chunk_signals: torch.Tensor,
    *,
    chunk_pivot: int = 0,
    chunk_offsets: Sequence[int] | None = None,
    epoch: int = 1,
    timeout_s: float | None = None,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: MatmulConfig | None = None,
    **unknown: object,
) -> B:
    """Multiply while rows of the first operand are still arriving.

    Math: `activation(a @ b + bias) + residual`, as `tileloom.matmul`, bit for bit.
    A chunk of a's rows is there when its flag has reached `epoch`. The kernel visits the chunks as
    a ring from `chunk_pivot`, and only its loading warp waits: acquire at system scope, a proxy
    fence, then TMA. A tile with rows of several chunks waits for each; no tile lies outside a.

    Args:
        a: `[M, K]`, float16 or bfloat16, rows or columns contiguous; its rows may not be there yet.
        b: `[K, N]`, a's dtype and device, or a sequence of such: each is multiplied by the one a.
        chunk_signals: uint32 `[n]` on a's device, contiguous: one flag for each chunk, written by a
            copy engine (a stream write), a peer, the host or another kernel after the rows it
            announces. Never reset: epochs count modulo 2^32, and a flag up to 2^31 - 1 ahead is
            there.
        chunk_pivot: The chunk that is visited first, `0 .. n - 1`.
        chunk_offsets: `n + 1` integers: the first row of each chunk, and M; they may be uneven, and
            chunks empty. Default: even, differing by one row at most.
        epoch: What a flag must reach, `0 .. 2^32 - 1`.
        timeout_s: Seconds after the kernel's start at which it gives up waiting and ends; None:
            never.
        bias: `[N]`, added to every row before the activation.
        activation: `"relu"`, `"gelu"`, `"gelu_tanh"`, `"silu"` or None.
        residual: `[M, N]`, added after the activation.
        out_dtype: float16, bfloat16 or float32; default: a's.
        config: A `GluonSm90Config` of `tileloom.ops.gemm.config`. Default: by a rule.
        unknown: Any other keyword is refused with the nearest option.

    Returns:
        `[M, N]`, contiguous; a list of them where b is a sequence.

    Raises:
        ShapeError: If sizes do not fit, or the offsets do not cover M without falling.
        DtypeError: If dtypes are wrong; flags are torch.uint32.
        DeviceError: If the tensors lie on different devices.
        OptionError: If the pivot, the epoch or the time is out of range.
        UnknownOptionError: If there is no such option.
        GradientError: If a gradient is asked for.
        UnsupportedError: If the GPU is no Hopper or the tensors do not suit its TMA unit; without
            a time-out also where `CUDA_LAUNCH_BLOCKING` or `CUDA_DEVICE_MAX_CONNECTIONS` is 1.
        SignalTimeoutError: On the CPU at once; on a GPU from the next call of tileloom, or from
            `tileloom.check_signals()`, once the kernel has ended.

    Memory: the output; for chunks that are uneven or end inside tiles a table of 20 bytes for each
        chunk and 20 more, kept with the plan.
    Determinism: bitwise the plain product, whatever the order of arrival.
    Autocast: leaves it alone: rows that are not there yet cannot be cast.
    Hardware: Hopper (sm_90); the CPU by the reference. There the call blocks the calling thread
        until the flags are there, without a time-out for ever: another thread must write them.
    Deadlock: the kernel takes every multiprocessor. What brings the rows must be copies, peers, or
        kernels launched before it; and a kernel that is launched for the first time while it spins
        may not load. Launch each kernel of the producer once beforehand, and copy on a stream of
        high priority that was used before.
    Source: PyTorch's `PersistentAsyncInputScheduler` and `symm_mem::_async_input_mm`.

    Example:
        >>> a, w = torch.randn(4, 16), torch.randn(32, 16)
        >>> flags = torch.ones(2, dtype=torch.uint32)
        >>> async_input_matmul(a, w.mT, flags).shape
        torch.Size([4, 32])
    """
    key = None
    if not unknown and config is None and isinstance(b, torch.Tensor):
        key = _short_key(
            a, b, chunk_signals, bias, residual, chunk_offsets, chunk_pivot, activation, out_dtype
        )
        plan = None if key is None else _short.get(key)
        if plan is not None:
            timeout_us = _check_times(epoch, timeout_s)
            out = a.new_empty(plan.shape, dtype=out_dtype or a.dtype)
            return plan.run(a, b, chunk_signals, bias, residual, out, epoch, timeout_us)
    if unknown:
        raise unknown_option(_OP, next(iter(unknown)), _OPTIONS, checks.ELSEWHERE)
    if not isinstance(b, torch.Tensor):
        _check_list(b)
        return [  # pyright: ignore[reportReturnType]
            async_input_matmul(
                a, one, chunk_signals, chunk_pivot=chunk_pivot, chunk_offsets=chunk_offsets,
                epoch=epoch, timeout_s=timeout_s, bias=bias, activation=activation,
                residual=residual, out_dtype=out_dtype, config=config,
            )
            for one in b
        ]  # fmt: skip
    checks.check_operands(_OP, a, b)
    _check_signals(_OP, chunk_signals, a)
    count = chunk_signals.numel()
    offsets = even_offsets(a.shape[0], count)
    if chunk_offsets is not None:
        offsets = _read_offsets(chunk_offsets)
    check_async(_OP, a, b, chunk_signals, chunk_pivot, offsets)
    checks.check_options(_OP, activation, out_dtype, config)
    checks.check_extras(_OP, a, bias, residual, (a.shape[0], b.shape[1]))
    timeout_us = _check_times(epoch, timeout_s)
    if has_tangent((a, b, bias, residual)):
        raise GradientError(f"{_OP}: a forward-mode derivative is asked for, and there is none.")
    packed = bias if bias is None or bias.is_contiguous() else bias.contiguous()
    result = async_input_matmul_op(
        a, b, chunk_signals, chunk_pivot, list(offsets), epoch, timeout_us, packed, residual,
        activation or "", out_dtype, "" if config is None else config.encode(),
    )  # fmt: skip
    if key is not None and packed is bias:
        plan = plan_found(
            a, b, chunk_signals, bias, residual, result, offsets, chunk_pivot, activation or ""
        )
        if plan is not None:
            _short.put(key, plan)
    return result


def _check_list(b: object) -> None:
    """Refuse what is neither a matrix nor a list of matrices."""
    if not isinstance(b, (list, tuple)):
        raise DtypeError(
            f"{_OP}: b is a {type(b).__name__}; it must be a torch.Tensor, or a list of them for "
            "several products of one a. Try: torch.as_tensor(b)."
        )
    for number, one in enumerate(b):
        if not isinstance(one, torch.Tensor):
            raise DtypeError(
                f"{_OP}: entry {number} of b is a {type(one).__name__}; each must be a "
                "torch.Tensor. Try: torch.as_tensor of it."
            )


def _read_offsets(given: Any) -> tuple[Any, ...]:
    try:
        return tuple(given)
    except TypeError:
        raise OptionError(
            f"{_OP}: chunk_offsets is {shown_value(given)}; it must be a tuple of Python ints. "
            "Try: the first row of each chunk, then M."
        ) from None


_short: Plans[Plan] = Plans()
"""Plans of calls whose arguments have passed the checks."""


def _short_key(
    a: torch.Tensor,
    b: torch.Tensor,
    signals: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    offsets: Sequence[int] | None,
    pivot: int,
    activation: str | None,
    out_dtype: torch.dtype | None,
) -> Hashable:
    """The key of a call that may go straight to its plan; None if it takes the long way."""
    tensors = (a, b, signals, bias, residual)
    if offsets is not None and type(offsets) not in (tuple, list):
        return None
    # What equals integers is not accepted as such.
    numbers = (pivot,) if offsets is None else (pivot, *offsets)
    if not _INT.issuperset(map(type, numbers)):
        return None
    if not isinstance(signals, torch.Tensor) or not is_short(tensors):
        return None
    return plan_key(tensors, numbers, activation or "", out_dtype)


_INT = frozenset((int,))


def check_async(
    op: str,
    a: torch.Tensor,
    b: torch.Tensor,
    signals: torch.Tensor,
    pivot: int,
    offsets: tuple[int, ...],
) -> None:
    """Refuse operands, flags, a pivot or offsets that do not belong together."""
    checks.check_operands(op, a, b)
    for name, tensor in (("a", a), ("b", b)):
        if tensor.dim() != 2:
            raise ShapeError(
                f"{op}: {name} has {tensor.dim()} dimensions; chunks are rows of one matrix, so it "
                f"must have 2. Try: {name}[0]."
            )
    _check_signals(op, signals, a)
    count, rows = signals.numel(), a.shape[0]
    if len(offsets) != count + 1:
        raise ShapeError(
            f"{op}: chunk_offsets has {len(offsets)} entries, and chunk_signals {count}; it must "
            "have one more than there are chunks. Try: the first row of each chunk, then M."
        )
    if not all(type(entry) is int for entry in offsets):
        raise OptionError(f"{op}: chunk_offsets is {offsets}; it must be a tuple of Python ints.")
    if offsets[0] != 0 or offsets[-1] != rows:
        raise ShapeError(
            f"{op}: chunk_offsets runs from {offsets[0]} to {offsets[-1]}; it must run from 0 to "
            f"M = {rows}."
        )
    for index in range(count):
        if offsets[index + 1] < offsets[index]:
            raise ShapeError(
                f"{op}: chunk_offsets falls from {offsets[index]} to {offsets[index + 1]} at entry "
                f"{index + 1}; each chunk must begin where the one before it ends."
            )
    if type(pivot) is not int or not 0 <= pivot < count:
        raise OptionError(
            f"{op}: chunk_pivot is {shown_value(pivot)}; it must be in 0 .. {count - 1}, a chunk's "
            "number."
        )


def _check_signals(op: str, signals: object, a: torch.Tensor) -> None:
    if not isinstance(signals, torch.Tensor):
        raise DtypeError(
            f"{op}: chunk_signals is a {type(signals).__name__}; it must be a torch.Tensor of "
            "dtype torch.uint32."
        )
    if signals.dtype != torch.uint32:
        remedy = "flags of torch.zeros(chunks, dtype=torch.uint32), which the sender writes too"
        if signals.dtype == torch.int32:
            remedy = "chunk_signals.view(torch.uint32)"
        raise DtypeError(
            f"{op}: chunk_signals has dtype {signals.dtype}; it must be torch.uint32. Try: "
            f"{remedy}."
        )
    checks.check_device(op, "chunk_signals", signals, a)
    if signals.dim() != 1 or not signals.is_contiguous() or signals.numel() == 0:
        raise ShapeError(
            f"{op}: chunk_signals has shape {tuple(signals.shape)} and strides {signals.stride()}; "
            "it must be contiguous, of one dimension, with a flag for each chunk."
        )


def _check_times(epoch: object, timeout_s: object) -> int:
    """Check epoch and time-out, and return the latter in microseconds."""
    if type(epoch) is not int or not 0 <= epoch < 2**32:
        raise OptionError(
            f"{_OP}: epoch is {shown_value(epoch)}; it must be an int in 0 .. 2^32 - 1."
        )
    if timeout_s is None:
        return FOREVER
    if (
        not isinstance(timeout_s, (int, float))
        or isinstance(timeout_s, bool)
        or not 0 <= timeout_s <= 1e9
    ):
        raise OptionError(
            f"{_OP}: timeout_s is {shown_value(timeout_s)}; it must be seconds in 0 .. 1e9, or "
            "None to wait for ever."
        )
    return int(timeout_s * 1e6)
