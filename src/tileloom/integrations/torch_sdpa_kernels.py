"""The two kernels that `torch_sdpa` puts in PyTorch's place, as plain functions of their schemas.

They run below autograd: PyTorch keeps what its own formula asks for, and calls the backward.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tileloom.integrations.sdpa_conventions import (
    Call,
    Gradients,
    empty_gradients,
    heads_first,
    malformed,
    padded_lse,
    rows_of_lse,
)
from tileloom.ops import _op
from tileloom.ops._op import Choice
from tileloom.ops.attention import autograd as attention_forward
from tileloom.ops.attention import backward as attention_backward
from tileloom.ops.attention.config import choose, outpaced_by
from tileloom.ops.attention.config_backward import choose_backward
from tileloom.ops.attention.philox import PhiloxState, draw, is_on_host, state_of
from tileloom.ops.attention.plan import LIMIT
from tileloom.ops.attention.plan_backward import key_of, readable
from tileloom.ops.attention.problem import AttentionProblem
from tileloom.target import target_of


class Refused(Exception):
    """tileloom does not take a call, for the reason in the text; nothing has been computed."""


Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int]


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float,
    custom_mask_type: int,
    compute_log_sumexp: bool = False,
    *,
    scale: float | None = None,
    seqlen_k: torch.Tensor | None = None,
    window_size: int | None = None,
) -> Outputs:
    """Compute `aten::_efficient_attention_forward`; the arguments are those of `Call`.

    Returns:
        The output `[B, M, H, Kv]`, contiguous; the log-sum-exp as `padded_lse` gives it, or
        `[B, H, 0]`; seed and offset of the random numbers, on the CPU, or on the GPU while a graph
        is captured; M and N, or the longest sequences.

    Raises:
        Refused: If PyTorch's kernel has to run.
    """
    call = Call(
        query, key, value, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        custom_mask_type, scale, window_size, seqlen_k,
    )  # fmt: skip
    is_captured = _is_capturing(query)
    plan = _plan(call, "forward", (bias,), lambda: _forward_plan(call, is_captured), is_captured)
    if call.window and torch.is_grad_enabled() and query.requires_grad:
        warnings.warn(_WINDOW_IS_LOST, stacklevel=2)
    plan.announce()
    device = query.device if is_captured else "cpu"
    state = draw(query, call.scores) if dropout_p else (_scalar(device), _scalar(device))
    out, lse = _outputs(call)
    if plan.launch is None:
        out.zero_()
        lse.fill_(-torch.inf)
    else:
        with _op.device_guard(query):
            plan.launch(*_forward_tensors(call, state if dropout_p else None, out, lse))
    if compute_log_sumexp:
        lse = padded_lse(lse, may_see_nothing=call.may_see_nothing)
    else:
        lse = lse.new_empty((*lse.shape[:2], 0))
    return out, lse, *state, query.shape[1], key.shape[1]


def _outputs(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the output, `[B, M, H, Kv]`, and tileloom's log-sum-exp."""
    out = call.query.new_empty((*call.query.shape[:3], call.value.shape[3]))
    return out, call.query.new_empty(call.sizes(), dtype=torch.float32)


def _forward_tensors(
    call: Call, state: PhiloxState | None, out: torch.Tensor, lse: torch.Tensor
) -> tuple[Any, ...]:
    """Return what a forward's launch takes."""
    q, k, v, o = (heads_first(t) for t in (call.query, call.key, call.value, out))
    return q, k, v, None, call.bias, None, state, o, lse


def _forward_plan(call: Call, is_captured: bool) -> _Plan:
    _check(call)
    problem, target = _problem(call), target_of(call.query)
    choice = choose(problem, target)
    _check_choice(choice)
    launch = None
    if not problem.is_empty:
        bind = attention_forward.binder(choice.config)
        state = None
        if call.dropout_p:  # an example, as the tensors are
            device = call.query.device if is_captured else "cpu"
            state = (_scalar(device), _scalar(device))
        with _op.device_guard(call.query):
            launch = bind(problem, choice.config, *_forward_tensors(call, state, *_outputs(call)))
    return _Plan(choice, outpaced_by(choice, problem, target), launch)


_WINDOW_IS_LOST = (
    "aten::_efficient_attention_forward: window_size is given and a gradient will be asked for; "
    "PyTorch's formula for it does not pass window_size on, so that the gradients will be those of "
    "another mask. Try: tileloom.attention(mask=tileloom.masks.window(...))."
)


def backward(
    grad_out: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    logsumexp: torch.Tensor,
    dropout_p: float,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    custom_mask_type: int,
    bias_requires_grad: bool,
    *,
    scale: float | None = None,
    num_splits_key: int | None = None,
    window_size: int | None = None,
    shared_storage_dqdkdv: bool = False,
) -> Gradients | tuple[None, None, None, None]:
    """Compute `aten::_efficient_attention_backward`.

    Args:
        grad_out: Gradient of the output, `[B, M, H, Kv]`; without it there are no gradients.
        query: As in `Call`; so are the other arguments that it has.
        key: See `query`.
        value: See `query`.
        bias: See `query`.
        out: The forward's output, `[B, M, H, Kv]`.
        cu_seqlens_q: See `query`.
        cu_seqlens_k: See `query`.
        max_seqlen_q: See `query`.
        max_seqlen_k: See `query`.
        logsumexp: The forward's, padded.
        dropout_p: See `query`.
        philox_seed: The forward's.
        philox_offset: The forward's.
        custom_mask_type: See `query`.
        bias_requires_grad: Whether bias gets a gradient.
        scale: See `query`.
        num_splits_key: Into how many parts PyTorch's kernel divides the keys; tileloom's do not
            need to be told.
        window_size: See `query`.
        shared_storage_dqdkdv: Whether the first three gradients lie in one tensor.

    Returns:
        The gradients of query, key, value and bias, as `empty_gradients` lays them out.

    Raises:
        Refused: If PyTorch's kernel has to run.
    """
    if grad_out is None:
        return None, None, None, None
    call = Call(
        query, key, value, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        custom_mask_type, scale, window_size,
    )  # fmt: skip
    state = state_of(_BACKWARD, query, dropout_p, philox_seed, philox_offset)
    given = (grad_out, out, logsumexp)
    asked = (bias_requires_grad, shared_storage_dqdkdv)

    def make() -> _Plan:
        _check(call)
        _check_backward(call, *given, num_splits_key, *asked)
        return _backward_plan(call, given, state, _gradients(call, *asked))

    plan = _plan(call, "backward", (bias, *given), make, *asked, num_splits_key, is_on_host(state))
    plan.announce()
    gradients = _gradients(call, *asked)
    if plan.launch is None:
        for gradient in gradients:
            if gradient is not None:
                gradient.zero_()
        return gradients
    with _op.device_guard(query):
        plan.launch(*_backward_tensors(call, given, state, gradients))
    return gradients


_BACKWARD = "aten::_efficient_attention_backward"


def _gradients(call: Call, bias_requires_grad: bool, shared_storage_dqdkdv: bool) -> Gradients:
    return empty_gradients(
        call.query, call.key, call.value, call.bias,
        bias_requires_grad=bias_requires_grad, shared_storage_dqdkdv=shared_storage_dqdkdv,
    )  # fmt: skip


def _backward_tensors(
    call: Call,
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    state: PhiloxState | None,
    gradients: Gradients,
) -> tuple[Any, ...]:
    """Return what a backward's launch takes."""
    grad_out, out, logsumexp = given
    q, k, v = (heads_first(t) for t in (call.query, call.key, call.value))
    dq, dk, dv = (heads_first(t) for t in gradients[:3])
    lse = rows_of_lse(logsumexp, call.sizes()[2])
    dout, o, lse = readable(heads_first(grad_out), heads_first(out), lse)
    return dout, None, q, k, v, o, lse, None, call.bias, None, state, dq, dk, dv, gradients[3]


def _backward_plan(
    call: Call,
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    state: PhiloxState | None,
    gradients: Gradients,
) -> _Plan:
    problem, target = _problem(call), target_of(call.query)
    choice = choose_backward(problem, target)
    _check_choice(choice)
    launch = None
    if not problem.is_empty:
        bind = attention_backward.binder(choice.config)
        tensors = _backward_tensors(call, given, state, gradients)
        with _op.device_guard(call.query):
            launch = bind(problem, choice.config, *tensors)
    return _Plan(choice, outpaced_by(choice, problem, target), launch)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What one kind of call comes to.

    Attributes:
        choice: The decision.
        slower_than: The backend that would be more than 20 % faster, if it refused.
        launch: As the backend's binder gives it; None where nothing is to be computed.
    """

    choice: Choice
    slower_than: str | None
    launch: Callable[..., None] | None

    def announce(self) -> None:
        """Make the decision visible to whoever wants to see it."""
        if self.slower_than is not None or _op.is_watched():
            _op.announce(self.choice, slower_than=self.slower_than)


_plans: dict[Any, _Plan | Refused] = {}


def _plan(
    call: Call,
    name: str,
    tensors: tuple[torch.Tensor | None, ...],
    make: Callable[[], _Plan],
    *rest: Any,
) -> _Plan:
    """Find what a call on a GPU comes to, or make it; raise what it was refused by."""
    if not call.query.is_cuda:
        return make()
    key = key_of((call.query, call.key, call.value, *tensors), name, *call.options(), *rest)
    plan = _plans.get(key)
    if plan is None:
        try:
            plan = make()
        except Refused as refused:
            plan = refused
        if len(_plans) >= LIMIT:
            _plans.clear()
        _plans[key] = plan
    if isinstance(plan, Refused):
        raise Refused(*plan.args)
    return plan


KERNELS: dict[str, Callable[..., Any]] = {
    "_efficient_attention_forward": forward,
    "_efficient_attention_backward": backward,
}
"""What replaces which operator of `aten`."""


def _check(call: Call) -> None:
    """Refuse what no kernel of tileloom computes, and what PyTorch's own has to refuse."""
    fault = malformed(call)
    if fault is not None:
        raise Refused(fault)
    if call.is_packed:
        raise Refused("packed sequences are not wired yet")
    if call.seqlen_k is not None:
        raise Refused("seqlen_k is given, which PyTorch's backward is never told of")


def _check_backward(
    call: Call,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    num_splits_key: int | None,
    bias_requires_grad: bool,
    shared_storage_dqdkdv: bool,
) -> None:
    batch, rows, heads, _ = call.query.shape
    expected = (batch, rows, heads, call.value.shape[3])
    for name, tensor in (("grad_out", grad_out), ("out", out)):
        if tuple(tensor.shape) != expected or tensor.dtype != call.query.dtype:
            raise Refused(f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}")
    if logsumexp.dim() != 3 or logsumexp.dtype != torch.float32:
        raise Refused("logsumexp is not a float32 tensor of three dimensions")
    if tuple(logsumexp.shape[:2]) != call.sizes()[:2] or logsumexp.shape[2] < call.sizes()[2]:
        raise Refused(f"logsumexp has shape {tuple(logsumexp.shape)}")
    if bias_requires_grad and call.bias is None:
        raise Refused("bias_requires_grad without a bias")
    if (num_splits_key or 1) > 1 and torch.are_deterministic_algorithms_enabled():
        raise Refused(f"num_splits_key is {num_splits_key} where algorithms are deterministic")
    is_alike = call.query.shape == call.key.shape == call.value.shape
    if shared_storage_dqdkdv and not is_alike:
        raise Refused("shared_storage_dqdkdv for gradients of different shapes")


def _check_choice(choice: Choice) -> None:
    """Refuse what only the reference takes where there are kernels: it needs all scores."""
    if choice.backend == "reference" and choice.refused:
        raise Refused("; ".join(choice.refused["triton"]))


def _problem(call: Call) -> AttentionProblem:
    q, k, v = (heads_first(t) for t in (call.query, call.key, call.value))
    return AttentionProblem.of(
        q, k, v, None, call.bias, None, call.band, call.multiplier, call.dropout_p
    )


def _scalar(device: torch.device | str) -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)


def _is_capturing(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
