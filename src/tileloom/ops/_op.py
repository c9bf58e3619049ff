"""The small machinery that operators share: registration, and a dispatch that can be inspected."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib.util
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch._C import _is_tracing, _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import TransformType, peek_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from tileloom import knobs, log
from tileloom.errors import (
    ConfigError,
    GradientError,
    TileloomError,
    UnsupportedError,
    bullet_list,
)
from tileloom.target import Target

_T = TypeVar("_T")
_LIB = torch.library.Library("tileloom", "FRAGMENT")
_log = log.get_logger("dispatch")
_is_logged = _log.isEnabledFor


class PerformanceWarning(UserWarning):
    """A call takes a backend that costs more than 20 % over the best one, for a stated reason."""


@dataclass(frozen=True)
class Choice:
    """Which backend runs a problem, and why.

    Attributes:
        op: The operator's name.
        backend: The backend that runs.
        config: Its frozen config.
        source: What decided: ``"explicit"``, ``"table"``, ``"tuned"`` or ``"rule"``.
        refused: For each backend that was asked and refused, its reasons.
        problem: The problem itself.
    """

    op: str
    backend: str
    config: Any
    source: str
    refused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    problem: Any = None


def choose(
    op: str,
    problem: Any,
    target: Target,
    config: Any,
    candidates: Sequence[Any],
    *,
    option: str = "config",
    what: str = "this problem",
) -> Choice:
    """Choose backend and config: an explicit config, else the first that takes the problem.

    Args:
        op: The operator's name.
        problem: What is to be computed.
        target: Where.
        config: What the caller forces; None: nothing.
        candidates: Configs, the fastest first.
        option: What the caller's option is called.
        what: What the candidates are asked to compute, for the error.

    Returns:
        The decision with its source, and the reasons of every backend that refused.

    Raises:
        ConfigError: If the explicit config cannot run the problem.
        UnsupportedError: If no candidate can.
    """
    name = op.removesuffix("_bwd")
    if config is not None:
        reasons = config.reasons_against(problem, target)
        if reasons:
            raise ConfigError(
                f"{name}: {option}={config} cannot run this problem: {'; '.join(reasons)}. Try: "
                f"{option}=None, which chooses a backend that can."
            )
        return Choice(op, config.backend, config, "explicit", {}, problem)
    refused: dict[str, tuple[str, ...]] = {}
    for candidate in candidates:
        reasons = candidate.reasons_against(problem, target)
        if not reasons:
            return Choice(op, candidate.backend, candidate, "rule", refused, problem)
        refused[candidate.backend] = reasons
    raise UnsupportedError(f"{name}: no backend takes {what}.\n{bullet_list(refused)}")


_records: contextvars.ContextVar[tuple[list[Choice], ...]] = contextvars.ContextVar(
    "tileloom_choices", default=()
)


@contextlib.contextmanager
def record_choices() -> Generator[list[Choice]]:
    """Collect the dispatch decision of every operator call inside a `with` block.

    The decision of a backward is collected where its forward was called, although on a GPU it runs
    in a thread of autograd's; not that of a function compiled by `torch.compile`.

    Yields:
        A list that grows by one `Choice` a call, in order.
    """
    made: list[Choice] = []
    token = _records.set((*_records.get(), made))
    try:
        yield made
    finally:
        _records.reset(token)


@functools.lru_cache(maxsize=256)
def _warn_once(text: str) -> None:
    log.warn(text, PerformanceWarning)


@functools.cache
def _configure_logs() -> None:
    """Obey `TILELOOM_LOGS` from the first decision on, in scripts as on the command line."""
    log.configure(knobs.get("log.levels"))


def announce(choice: Choice, *, slower_than: str | None = None) -> None:
    """Make a dispatch decision visible: to `record_choices`, the log, and as a warning if slow.

    Args:
        choice: The decision.
        slower_than: The backend that would have been more than 20 % faster, if it refused.
    """
    _configure_logs()
    if is_watched():
        for made in _records.get():
            made.append(choice)
        _log.info("%s: %s by %s: %s", choice.op, choice.backend, choice.source, choice.config)
    if slower_than is not None and knobs.get("dispatch.warn"):
        why = "; ".join(choice.refused[slower_than])
        _warn_once(
            f"{choice.op}: the {choice.backend} backend runs where {slower_than} would be more "
            f"than 20 % faster, because: {why}."
        )


def read_config(op: str, option: str, text: str, read: Callable[[str], _T]) -> _T:
    """Read a config from the text that an operator's schema carries.

    Args:
        op: The operator's name.
        option: What the caller's option is called.
        text: The text.
        read: Reads it; a text that no config writes may raise whatever it likes.

    Raises:
        ConfigError: If no config writes such a text.
    """
    try:
        return read(text)
    except TileloomError:
        raise
    except (ValueError, IndexError, TypeError):
        raise ConfigError(
            f"{op}: {option} is {text!r}, which no config writes; it must be the text of its "
            f"encode(), of integers and bools, or '' to choose one. Try: {option}=None."
        ) from None


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed; it is not imported."""
    return importlib.util.find_spec("triton") is not None


def portable_reasons(target: Target) -> list[str]:
    """Why no portable kernel runs on a target: there is no GPU, an older one, or no Triton."""
    why: list[str] = []
    if target.kind == "cpu":
        why.append("it needs a GPU (or the emulator), and the tensors are on the CPU")
    elif target.capability < (8, 0):
        why.append(
            f"it needs compute capability 8.0 or later, and {target.name} has "
            f"{target.capability[0]}.{target.capability[1]}"
        )
    return why if has_triton() else [*why, "Triton is not installed"]


def hopper_reasons(target: Target) -> list[str]:
    """Why no Hopper kernel runs on a target: there is no GPU, another one, or no Triton."""
    why: list[str] = []
    if target.kind == "cpu":
        why.append("it needs a Hopper GPU (or the emulator), and the tensors are on the CPU")
    elif target.capability != (9, 0):
        why.append(
            f"it needs compute capability 9.0, and {target.name} has "
            f"{target.capability[0]}.{target.capability[1]}"
        )
    return why if has_triton() else [*why, "Triton is not installed"]


def pipeline_reasons(target: Target) -> list[str]:
    """Why a cp.async pipeline may not feed the tensor cores: it needs a fence between proxies."""
    from tileloom.launch import compat

    if target.capability[0] == 10:
        return [
            "num_stages is above 1, and Triton's cp.async pipeline into tcgen05.mma lacks a proxy "
            "fence (seen in the PTX of 3.6.0 and 3.7.1)"
        ]
    if target.capability[0] != 9 or not has_triton():
        return []
    version = compat.triton_version()
    if compat.has_wgmma_proxy_fence(version):
        return []
    return [
        f"num_stages is above 1, and Triton {'.'.join(map(str, version))} puts no proxy fence "
        "between cp.async and wgmma; 3.7.1 and later do"
    ]


def tf32_reasons(name: str, rows: int, dtype: torch.dtype, target: Target) -> list[str]:
    """Why a tile of so many rows, called `name`, cannot multiply float32 exactly on sm_100."""
    if dtype != torch.float32 or target.capability[0] != 10 or rows < 64:
        return []
    return [
        f"{name} is {rows}, and for sm_100 Triton compiles float32 products of 64 rows or more to "
        "TF32 (seen in the PTX of 3.7.1)"
    ]


def device_guard(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Make the tensor's GPU the current one inside a `with` block; nothing on the CPU."""
    if tensor.is_cuda:
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()


_NO_TRANSFORM = (
    "{}: it is called under torch.func.grad, vjp or jacrev, which PyTorch does not offer to "
    "operators with a gradient of their own. Try: torch.autograd.grad, or backward()."
)


class Operator:
    """An operator that is registered with PyTorch, and a short way to its implementation.

    Calling it means the same as calling `overload`. Where nothing watches (`is_eager`), the call
    goes round PyTorch's dispatcher, which costs tens of microseconds where operators are written in
    Python.

    Attributes:
        overload: What `torch.compile`, export and dispatch modes see.
    """

    def __init__(
        self,
        overload: torch._ops.OpOverload,
        impl: Callable[..., Any],
        with_gradient: Callable[..., Any],
    ) -> None:
        self.overload = overload
        name = overload._schema.name.partition("::")[2].removesuffix("_fwd")
        self._no_transform = _NO_TRANSFORM.format(name)
        self._impl = impl
        self._with_gradient = with_gradient

    def __call__(self, *args: Any) -> Any:
        if not is_eager(args):
            if not is_compiling() and _is_transformed(args):
                raise GradientError(self._no_transform)
            return self.overload(*args)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return self._with_gradient(*args)
        return self._impl(*args)


watches: list[Callable[[], None]] = []
"""Called before every call of an operator: what an earlier kernel has said is raised there."""

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None), int, float, bool, str))
_are_plain = _PLAIN.issuperset


def is_eager(args: Sequence[Any]) -> bool:
    """Whether a call on these arguments runs at once on a GPU, and nobody watches the dispatcher.

    False for a first argument that is no CUDA tensor, for tensor subclasses, for views whose values
    are the negatives of their memory (`x.conj().imag`: the dispatcher copies them), and under
    `torch.compile`, dispatch and function modes, functorch, forward-mode tangents, tracing, a
    profiler, `record_choices` and logging of decisions.
    """
    if is_compiling():
        return False
    for look in watches:
        look()
    return (
        args[0].is_cuda
        and _are_plain(map(type, args))
        and (args[0].dtype is torch.bfloat16 or not _any_negated(args))
        and not _len_torch_dispatch_stack()
        and not _len_torch_function_stack()
        and peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and not _is_tracing()
        and not _profiler_enabled()
        and not _records.get()
        and not _is_logged(logging.INFO)
    )


def _is_transformed(args: Sequence[Any]) -> bool:
    """Whether `torch.func` asks for a gradient of a call; PyTorch's own refusal says little."""
    top = peek_interpreter_stack()
    if top is None or top.key() != TransformType.Grad:
        return False
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*args)


def _any_negated(args: Sequence[Any]) -> bool:
    """Whether a kernel would read the wrong sign; no complex dtype has parts of bfloat16."""
    return any([arg.is_neg() for arg in args if isinstance(arg, torch.Tensor)])


def is_watched() -> bool:
    """Whether dispatch decisions go to `record_choices` or to the log."""
    return bool(_records.get()) or _is_logged(logging.INFO)


def _refuse_vmap(name: str, reason: str) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(reason)

    torch.library.register_vmap(f"tileloom::{name}", refuse, lib=_LIB)


def register(
    schema: str,
    impl: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    no_gradient: str | None = None,
    setup_context: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
    backward: Callable[..., Any] | None = None,
    is_random: bool = False,
    no_vmap: str | None = None,
) -> Operator:
    """Define `tileloom::<schema>` with an implementation, a fake, and a gradient or its refusal.

    Args:
        schema: The operator's schema without its namespace.
        impl: Runs it, on CPU and GPU tensors alike.
        fake: Gives outputs of the right shape, dtype and strides, without data.
        no_gradient: The sentence of the `GradientError` when a gradient is asked for.
        setup_context: `(ctx, inputs, output)`: keeps what the gradient needs, as in
            `torch.autograd.Function`.
        backward: `(ctx, *grads)`: one gradient or None for each input of the schema. Either these
            two are given, or `no_gradient`.
        is_random: Whether it draws from a generator of PyTorch's.
        no_vmap: The sentence of the `UnsupportedError` under `torch.vmap`; None leaves PyTorch's
            fallback, which calls the operator once for each entry.

    Returns:
        The operator.
    """
    name = schema.split("(", 1)[0]
    tags = [torch.Tag.needs_fixed_stride_order]
    tags += [torch.Tag.nondeterministic_seeded] if is_random else []
    _LIB.define(schema, tags=tags)
    for key in ("CPU", "CUDA"):
        _LIB.impl(name, impl, key)
    torch.library.register_fake(f"tileloom::{name}", fake, lib=_LIB)
    if no_vmap is not None:
        _refuse_vmap(name, no_vmap)
    overload = getattr(torch.ops.tileloom, name).default
    if backward is not None and setup_context is not None:
        setup_context, backward = _with_records(setup_context, backward)
        torch.library.register_autograd(
            f"tileloom::{name}", backward, setup_context=setup_context, lib=_LIB
        )
        return Operator(overload, impl, _function(name, impl, setup_context, backward).apply)

    def refuse(*args: Any) -> Any:
        raise GradientError(no_gradient)

    def at_autograd(*args: Any) -> Any:
        if needs_gradient(args):
            refuse()
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args)

    _LIB.impl(name, at_autograd, "Autograd")
    return Operator(overload, impl, refuse)


def _function(
    name: str,
    impl: Callable[..., Any],
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
) -> Any:
    """Make a `torch.autograd.Function` that keeps its context while it runs forward.

    With a `setup_context` of its own, PyTorch would inspect the signature in every call, which
    takes 80 us of a GPU host's time.
    """

    def forward(ctx: Any, *args: Any) -> Any:
        output = impl(*args)
        setup_context(ctx, args, output)
        return output

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), members)


def _with_records(
    setup_context: Callable[..., None], backward: Callable[..., Any]
) -> tuple[Callable[..., None], Callable[..., Any]]:
    """Let a backward report to those who watched its forward: autograd has threads of its own."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.records = _records.get()
        setup_context(ctx, inputs, output)

    def run(ctx: Any, *grads: Any) -> Any:
        if not ctx.records:
            return backward(ctx, *grads)
        here = _records.get()
        token = _records.set((*here, *(r for r in ctx.records if all(r is not h for h in here))))
        try:
            return backward(ctx, *grads)
        finally:
            _records.reset(token)

    return setup, run


def needs_gradient(tensors: Sequence[Any]) -> bool:
    """Whether one of the tensors asks for a gradient, or carries a forward-mode tangent."""
    if torch.is_grad_enabled() and any(
        t.requires_grad for t in tensors if isinstance(t, torch.Tensor)
    ):
        return True
    return has_tangent(tensors)


def has_tangent(tensors: Sequence[Any]) -> bool:
    """Whether one of the tensors carries a forward-mode tangent."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    given = (t for t in tensors if isinstance(t, torch.Tensor))
    return any(forward_ad.unpack_dual(t).tangent is not None for t in given)
