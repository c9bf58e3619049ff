"""`tileloom::async_input_matmul`: a product that starts while rows of A are still arriving.

One flag for each chunk of rows says that they are there. On a GPU one persistent kernel waits for
them, tile by tile; on the CPU the reference waits here.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from tileloom import knobs
from tileloom.errors import ConfigError, UnsupportedError, bullet_list
from tileloom.ops import _op
from tileloom.ops._op import Choice
from tileloom.ops._plans import Plans, plan_key
from tileloom.ops.gemm.autograd import new_output
from tileloom.ops.gemm.config import GluonSm90Config, ReferenceConfig, TritonConfig, decode
from tileloom.ops.gemm.plans import check_registered
from tileloom.ops.gemm.problem import MatmulProblem
from tileloom.ops.gemm.reference import matmul_reference
from tileloom.ops.gemm.rule import gluon_rule
from tileloom.ops.gemm.signals import late
from tileloom.scheduling.decode import is_signalled
from tileloom.target import Target, target_of

Tensor = torch.Tensor
FOREVER = -1
"""A time-out in microseconds that never comes."""

_NO_GRADIENT = (
    "async_input_matmul: a gradient is asked for, and there is none. Try: torch.no_grad(), and "
    "tileloom.matmul where gradients are needed."
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What was decided for calls like one; see `plans.Plan`.

    Attributes:
        choice: The decision.
        shape: Of the output.
        launch: `launch(a, b, bias, residual, out, flags, epoch, timeout_us)`, the epoch signed.
    """

    choice: Choice
    shape: tuple[int, ...]
    launch: Callable[..., None]

    def run(
        self,
        a: Tensor,
        b: Tensor,
        signals: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        out: Tensor,
        epoch: int,
        timeout_us: int,
        op: str = "async_input_matmul",
    ) -> Tensor:
        """Write `out` and return it."""
        if _op.is_watched():
            _op.announce(self.choice)
        if timeout_us < 0 and a.is_cuda:
            check_queues(op)
        signed = (epoch + 2**31) % 2**32 - 2**31
        with _op.device_guard(a):
            self.launch(a, b, bias, residual, out, signals, signed, timeout_us)
        return out


_plans: Plans[Plan] = Plans()


def even_offsets(m: int, chunks: int) -> tuple[int, ...]:
    """Cut `m` rows into chunks that differ by one row at most."""
    return tuple(m * chunk // chunks for chunk in range(chunks + 1))


def choose_async(problem: MatmulProblem, target: Target, text: str) -> Choice:
    """Choose backend and config of a product that waits, in the manner of `config.choose`.

    Raises:
        ConfigError: If an explicit config cannot run the problem.
        UnsupportedError: If the GPU is no Hopper, or the tensors do not suit its TMA unit.
    """
    op = "async_input_matmul"
    config = decode(text)
    if target.kind == "cpu" and config is None:
        return Choice(op, "reference", ReferenceConfig(), "rule", {}, problem)
    if config is not None and not isinstance(config, GluonSm90Config):
        raise ConfigError(
            f"{op}: config={config} waits for no chunk; only GluonSm90Config does. Try: "
            "config=None."
        )
    chosen = gluon_rule(problem, target.sms) if config is None else config
    reasons = chosen.reasons_against(problem, target)
    if reasons and config is not None:
        raise ConfigError(
            f"{op}: config={config} cannot run this problem: {'; '.join(reasons)}. Try: "
            "config=None."
        )
    if reasons:
        refused = {"gluon_sm90": reasons, "triton": TritonConfig().reasons_against(problem, target)}
        raise UnsupportedError(
            f"{op}: no backend takes this problem. Try: waiting for all chunks, then "
            f"tileloom.matmul.\n{bullet_list(refused)}"
        )
    source = "rule" if config is None else "explicit"
    return Choice(op, "gluon_sm90", chosen, source, {}, problem)


def _key(
    a: Tensor, b: Tensor, signals: Tensor, bias: Tensor | None, residual: Tensor | None,
    out: Tensor, offsets: tuple[int, ...], pivot: int, activation: str, config: str,
    any_value: bool,
) -> Hashable:  # fmt: skip
    """Everything that a plan is made from."""
    tensors = (a, b, signals, bias, residual, out)
    return plan_key(tensors, offsets, pivot, activation, config, any_value)


def plan_found(
    a: Tensor,
    b: Tensor,
    signals: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    offsets: tuple[int, ...],
    pivot: int,
    activation: str,
) -> Plan | None:
    """Return the plan that a call without config was run by, if one was kept."""
    return _plans.get(
        _key(a, b, signals, bias, residual, out, offsets, pivot, activation, "", False)
    )


def _plan_of(
    a: Tensor,
    b: Tensor,
    signals: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    offsets: tuple[int, ...],
    pivot: int,
    activation: str,
    config: str,
    *,
    any_value: bool,
) -> Plan:
    """Decide how a call runs, or find what was decided."""
    key = _key(a, b, signals, bias, residual, out, offsets, pivot, activation, config, any_value)
    found = _plans.get(key) if a.is_cuda else None
    if found is not None:
        return found
    from tileloom.ops.gemm.async_api import check_async

    op = "async_input_mm" if any_value else "async_input_matmul"
    check_async(op, a, b, signals, pivot, offsets)
    check_registered(op, a, b, bias, residual, activation)
    wide = [t if t is None else t.unsqueeze(0) for t in (a, b, residual, out)]
    a3, b3, residual3, out3 = wide
    assert a3 is not None
    assert b3 is not None
    assert out3 is not None
    chunks = len(offsets) - 1
    problem = MatmulProblem.of(a3, b3, out3, bias, residual3, activation, chunks)
    target = target_of(a)
    choice = choose_async(problem, target, config)
    if isinstance(choice.config, GluonSm90Config):
        from tileloom.ops.gemm.launch_gluon_sm90 import bind_async_matmul, params_of

        params = params_of(problem, choice.config, chunk_offsets=offsets, chunk_pivot=pivot)
        with _op.device_guard(a):
            launch = bind_async_matmul(problem, choice.config, params, a3, b3, bias, residual3,
                                       out3, signals, any_value=any_value)  # fmt: skip
    else:
        launch = _reference_launch(problem, offsets, pivot, any_value=any_value)
    plan = Plan(choice, tuple(out.shape), launch)
    return _plans.put(key, plan) if a.is_cuda else plan


def _reference_launch(
    problem: MatmulProblem, offsets: tuple[int, ...], pivot: int, *, any_value: bool
) -> Callable[..., None]:
    """Wait on the CPU, chunk by chunk, and compute each as it comes."""

    def launch(
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        out: Tensor,
        flags: Tensor,
        epoch: int,
        timeout_us: int,
    ) -> None:
        chunks = len(offsets) - 1
        end = None if timeout_us < 0 else time.monotonic() + timeout_us / 1e6
        for chunk in ((pivot + s) % chunks for s in range(chunks)):
            first, last = offsets[chunk], offsets[chunk + 1]
            if first == last:
                continue
            while not _is_there(flags, chunk, epoch, any_value=any_value):
                if end is not None and time.monotonic() > end:
                    raise late(a.device, chunk, int(flags[chunk]), epoch % 2**32)
                time.sleep(1e-5)
            rows = slice(first, last)
            part = None if residual is None else residual[rows]
            out[rows] = matmul_reference(
                a[rows], b, bias=bias, residual=part, out_dtype=out.dtype,
                activation=problem.activation or None,  # pyright: ignore[reportArgumentType]
            )  # fmt: skip

    return launch


_BLOCKED_BY = {
    "CUDA_LAUNCH_BLOCKING": "a launch returns only when its kernel has ended",
    "CUDA_DEVICE_MAX_CONNECTIONS": "all streams share one queue, and a copy stands behind the "
    "kernel that waits for it",
}


@functools.cache
def blocked_by() -> str | None:
    """Name what in CUDA's environment, read once as CUDA does, lets no later copy start."""
    return next((name for name in _BLOCKED_BY if knobs.environment_of_cuda(name) == "1"), None)


def check_queues(op: str) -> None:
    """Refuse to wait for ever where a copy that is queued later cannot start.

    Raises:
        UnsupportedError: If CUDA's environment says so.
    """
    name = blocked_by()
    if name is not None:
        raise UnsupportedError(
            f"{op}: {name} is 1, so that {_BLOCKED_BY[name]}; chunks that are queued after this "
            "call would never arrive, and it would wait for ever. Try: timeout_s=10 and everything "
            f"that brings rows queued before this call, or unset {name}."
        )


def _is_there(flags: Tensor, chunk: int, epoch: int, *, any_value: bool) -> bool:
    flag = int(flags[chunk])
    return flag != 0 if any_value else is_signalled(flag, epoch)


def run(
    a: Tensor,
    b: Tensor,
    signals: Tensor,
    offsets: tuple[int, ...],
    pivot: int,
    epoch: int,
    timeout_us: int,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    out_dtype: torch.dtype | None,
    config: str,
    *,
    any_value: bool = False,
) -> Tensor:
    """Allocate the output and start the product; all arguments are checked."""
    out = new_output(a, b, out_dtype)
    if out.numel() == 0:
        return out
    if a.shape[1] == 0:  # nothing is awaited: no row of A has an element
        part = matmul_reference(a, b, bias=bias, activation=activation or None,  # pyright: ignore[reportArgumentType]
                                residual=residual, out_dtype=out.dtype)  # fmt: skip
        return out.copy_(part)
    plan = _plan_of(a, b, signals, bias, residual, out, offsets, pivot, activation, config,
                    any_value=any_value)  # fmt: skip
    op = "async_input_mm" if any_value else "async_input_matmul"
    return plan.run(a, b, signals, bias, residual, out, epoch, timeout_us, op)


def _forward(
    a: Tensor,
    b: Tensor,
    chunk_signals: Tensor,
    chunk_pivot: int,
    chunk_offsets: list[int],
    epoch: int,
    timeout_us: int,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    out_dtype: torch.dtype | None,
    config: str,
) -> Tensor:
    offsets = tuple(chunk_offsets)
    return run(a, b, chunk_signals, offsets, chunk_pivot, epoch, timeout_us, bias, residual,
               activation, out_dtype, config)  # fmt: skip


def _fake(a: Tensor, b: Tensor, *rest: object) -> Tensor:
    out_dtype = rest[8]
    assert out_dtype is None or isinstance(out_dtype, torch.dtype)
    return new_output(a, b, out_dtype)


async_input_matmul_op = _op.register(
    "async_input_matmul(Tensor a, Tensor b, Tensor chunk_signals, int chunk_pivot, "
    "int[] chunk_offsets, int epoch, int timeout_us, Tensor? bias, Tensor? residual, "
    "str activation, ScalarType? out_dtype, str config) -> Tensor",
    _forward,
    _fake,
    no_gradient=_NO_GRADIENT,
)


def _seed_forward(a: Tensor, b: Tensor, a_chunk_signals: Tensor, a_chunk_pivot: int) -> Tensor:
    from tileloom.ops.gemm.async_api import check_async

    offsets = even_offsets(a.shape[0], a_chunk_signals.numel())
    check_async("async_input_mm", a, b, a_chunk_signals, a_chunk_pivot, offsets)
    return run(a, b, a_chunk_signals, offsets, a_chunk_pivot, 1, FOREVER, None, None, "", None, "",
               any_value=True)  # fmt: skip


def _seed_fake(a: Tensor, b: Tensor, *rest: object) -> Tensor:
    del rest
    return new_output(a, b, None)


async_input_mm = _op.register(
    "async_input_mm(Tensor a, Tensor b, Tensor a_chunk_signals, SymInt a_chunk_pivot) -> Tensor",
    _seed_forward,
    _seed_fake,
    no_gradient=_NO_GRADIENT,
)
"""`symm_mem::_async_input_mm` by its schema: any flag that is not 0 releases its chunk."""
