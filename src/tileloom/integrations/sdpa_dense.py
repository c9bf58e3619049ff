"""The replaced operators on dense batches: found plans, allocated results, one launch.

A plan is found again by everything that it was made from, as in `ops.attention.plan`: a call that
finds one checks and chooses nothing. It is not that module's own since PyTorch's layouts of the
results are fixed, whatever the inputs' are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tileloom.integrations.sdpa_checks import Refused, check_backward, check_call, check_choice
from tileloom.integrations.sdpa_conventions import (
    Asked,
    Call,
    Given,
    Gradients,
    drawn,
    empty_gradients,
    heads_first,
    padded_lse,
    rows_of_lse,
    scalar,
)
from tileloom.ops import _op
from tileloom.ops._op import Choice
from tileloom.ops.attention import autograd, backward
from tileloom.ops.attention.config import choose, outpaced_by
from tileloom.ops.attention.config_backward import choose_backward
from tileloom.ops.attention.philox import PhiloxState, is_on_host
from tileloom.ops.attention.plan import LIMIT
from tileloom.ops.attention.plan_backward import key_of, readable
from tileloom.ops.attention.problem import AttentionProblem
from tileloom.target import target_of


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


def _find(
    call: Call,
    tensors: tuple[torch.Tensor | None, ...],
    rest: tuple[Any, ...],
    make: Callable[[], _Plan],
) -> _Plan:
    """Find what a call on a GPU comes to, or make it; raise what it was refused by."""
    if not call.query.is_cuda:
        return make()
    key = key_of((call.query, call.key, call.value, call.bias, *tensors), *call.options(), *rest)
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


def forward_dense(call: Call, *, with_lse: bool) -> tuple[torch.Tensor, ...]:
    """Compute a forward.

    Args:
        call: The call.
        with_lse: Whether the log-sum-exp is asked for.

    Returns:
        The output `[B, M, H, Kv]`, contiguous; the log-sum-exp as `padded_lse` gives it, or
        `[B, H, 0]`; seed and offset.

    Raises:
        Refused: If PyTorch's kernel has to run.
    """
    plan = _find(call, (), (call.is_captured,), lambda: _plan_forward(call))
    plan.announce()
    state = drawn(call)
    out, lse = _outputs(call)
    if plan.launch is None:
        out.zero_()
        lse.fill_(-torch.inf)
    else:
        with _op.device_guard(call.query):
            plan.launch(*_forward_tensors(call, state, out, lse))
    if with_lse:
        lse = padded_lse(lse, may_see_nothing=call.may_see_nothing)
    else:
        lse = lse.new_empty((*lse.shape[:2], 0))
    return out, lse, *state


def _plan_forward(call: Call) -> _Plan:
    check_call(call)
    problem, target = _problem(call), target_of(call.query)
    choice = choose(problem, target)
    check_choice(choice)
    launch = None
    if not problem.is_empty:
        example = scalar(call)
        tensors = _forward_tensors(call, (example, example), *_outputs(call))
        with _op.device_guard(call.query):
            launch = autograd.binder(choice.config)(problem, choice.config, *tensors)
    return _Plan(choice, outpaced_by(choice, problem, target), launch)


def _outputs(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the output, `[B, M, H, Kv]`, and tileloom's log-sum-exp."""
    out = call.query.new_empty((*call.query.shape[:3], call.value.shape[3]))
    return out, call.query.new_empty(call.sizes(), dtype=torch.float32)


def _forward_tensors(
    call: Call, state: PhiloxState, out: torch.Tensor, lse: torch.Tensor
) -> tuple[Any, ...]:
    """Return what a forward's launch takes."""
    q, k, v, o = (heads_first(t) for t in (call.query, call.key, call.value, out))
    return q, k, v, None, call.bias, None, state if call.dropout_p else None, o, lse


def backward_dense(call: Call, given: Given, state: PhiloxState | None, asked: Asked) -> Gradients:
    """Compute a backward.

    Args:
        call: The call.
        given: What the forward and the upstream gradient are.
        state: The forward's seed and offset, None without dropout.
        asked: How the gradients are wanted.

    Returns:
        The gradients as `empty_gradients` lays them out.

    Raises:
        Refused: If PyTorch's kernel has to run.
    """
    tensors = (given.grad_out, given.out, given.logsumexp)
    plan = _find(
        call, tensors, (asked, is_on_host(state)), lambda: _plan_backward(call, given, state, asked)
    )
    plan.announce()
    gradients = empty_gradients(call, asked)
    if plan.launch is None:
        for gradient in gradients:
            if gradient is not None:
                gradient.zero_()
        return gradients
    tensors = _backward_tensors(call, given, state, gradients)
    with _op.device_guard(call.query):
        plan.launch(*tensors)
    dbias, written = gradients[3], tensors[-1]
    if dbias is not None and dbias is not written:
        dbias.copy_(written)
    return gradients


def _plan_backward(call: Call, given: Given, state: PhiloxState | None, asked: Asked) -> _Plan:
    check_call(call)
    check_backward(call, given, asked)
    problem, target = _problem(call), target_of(call.query)
    choice = choose_backward(problem, target)
    check_choice(choice)
    launch = None
    if not problem.is_empty:
        tensors = _backward_tensors(call, given, state, empty_gradients(call, asked))
        with _op.device_guard(call.query):
            launch = backward.binder(choice.config)(problem, choice.config, *tensors)
    return _Plan(choice, outpaced_by(choice, problem, target), launch)


def _backward_tensors(
    call: Call, given: Given, state: PhiloxState | None, gradients: Gradients
) -> tuple[Any, ...]:
    """Return what a backward's launch takes."""
    q, k, v = (heads_first(t) for t in (call.query, call.key, call.value))
    dq, dk, dv = (heads_first(t) for t in gradients[:3])
    lse = rows_of_lse(given.logsumexp, call.sizes()[2])
    dout, out, lse = readable(heads_first(given.grad_out), heads_first(given.out), lse)
    dbias = gradients[3]
    if dbias is not None and not dbias.is_contiguous():  # the kernels write whole rows of it
        dbias = torch.empty(dbias.shape, dtype=dbias.dtype, device=dbias.device)
    return dout, None, q, k, v, out, lse, None, call.bias, None, state, dq, dk, dv, dbias


def _problem(call: Call) -> AttentionProblem:
    q, k, v = (heads_first(t) for t in (call.query, call.key, call.value))
    return AttentionProblem.of(
        q, k, v, None, call.bias, None, call.band, call.multiplier, call.dropout_p
    )
