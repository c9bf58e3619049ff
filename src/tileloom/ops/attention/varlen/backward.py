"""`tileloom::attention_varlen_bwd`: the gradients of `tileloom::attention_varlen_fwd`."""

from __future__ import annotations

from typing import Any

import torch

from tileloom.ops import _op
from tileloom.ops.attention.backward import Gradients, binder, empty_gradients
from tileloom.ops.attention.config import ReferenceConfig, outpaced_by
from tileloom.ops.attention.config_backward import choose_backward, decode_backward
from tileloom.ops.attention.masks import Band, Mask
from tileloom.ops.attention.philox import state_of
from tileloom.ops.attention.plan_backward import readable
from tileloom.ops.attention.problem import AttentionProblem
from tileloom.ops.attention.varlen.checks import check_values
from tileloom.ops.attention.varlen.reference import attention_varlen_reference_backward
from tileloom.target import target_of

_NO_SECOND_GRADIENT = (
    "attention_varlen: a gradient of its gradient is asked for (create_graph=True), and there is "
    "none. Try: tileloom.ops.attention.varlen.attention_varlen_reference, which is differentiable "
    "to any order."
)
_SCHEMA = (
    "attention_varlen_bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
    "Tensor lse, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_q, SymInt max_k, "
    "Tensor? mask, Tensor? bias, Tensor? key_lengths, SymInt? left_top, SymInt? right_top, "
    "SymInt? left_bottom, SymInt? right_bottom, float scale, float dropout_p, "
    "Tensor? philox_seed, Tensor? philox_offset, bool needs_q, bool needs_kv, bool needs_bias, "
    "str config) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _as_batch(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, 1).unsqueeze(0)


def _as_given(gradients: Gradients, needs_q: bool, needs_kv: bool) -> Gradients:
    """Gradients `[1, H, T, D]` as `[T, H, D]`; what is not needed has no element."""
    needs = (needs_q, needs_kv, needs_kv)
    dq, dk, dv = (g[0].transpose(0, 1) if need else g for g, need in zip(gradients, needs))
    return dq, dk, dv, gradients[3]


def _backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_q: int,
    max_k: int,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
    left_top: int | None,
    right_top: int | None,
    left_bottom: int | None,
    right_bottom: int | None,
    scale: float,
    dropout_p: float,
    philox_seed: torch.Tensor | None,
    philox_offset: torch.Tensor | None,
    needs_q: bool,
    needs_kv: bool,
    needs_bias: bool,
    config: str,
) -> Gradients:
    check_values(cu_seqlens_q, cu_seqlens_k, max_q, max_k, q.shape[0], k.shape[0])
    state = state_of("attention_varlen_bwd", q, dropout_p, philox_seed, philox_offset)
    band = Band(left_top, right_top, left_bottom, right_bottom)
    padded = (cu_seqlens_q.shape[0] - 1, max_q, max_k)
    one_q, one_k, one_v, one_do, one_out = (_as_batch(t) for t in (q, k, v, dout, out))
    problem = AttentionProblem.of(
        one_q, one_k, one_v, mask, bias, key_lengths, band, scale, dropout_p, padded
    )
    target = target_of(q)
    choice = choose_backward(problem, target, decode_backward(config))
    _op.announce(choice, slower_than=outpaced_by(choice, problem, target))
    needs = (needs_q, needs_kv, needs_bias and bias is not None)
    gradients = empty_gradients(one_q, one_k, one_v, bias, *needs)
    wanted = (needs[0], needs[1], needs[1], needs[2])
    written = [g if is_wanted else None for g, is_wanted in zip(gradients, wanted)]
    if problem.is_empty:
        for own in gradients:
            own.zero_()
    elif choice.config.backend == "reference":
        shown = Mask(band, key_lengths, mask)
        with torch.autocast(q.device.type, enabled=False):  # it would lower the precision
            results = attention_varlen_reference_backward(
                dout, dlse, q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, mask=shown,
                bias=bias, scale=scale, dropout_p=dropout_p, philox=state,
            )  # fmt: skip
        for own, result in zip(written[:3], results[:3]):
            if own is not None:
                own[0].transpose(0, 1).copy_(result)
        if written[3] is not None and results[3] is not None:
            written[3].copy_(results[3])
    else:
        read = readable(one_do, one_out, lse[None])
        one_dlse = None if dlse is None else dlse[None]
        offsets = (cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous())
        tensors = (read[0], one_dlse, one_q, one_k, one_v, *read[1:], mask, bias, key_lengths,
                   state, *written, offsets)  # fmt: skip
        with _op.device_guard(q):
            binder(choice.config)(problem, choice.config, *tensors)(*tensors)
    return _as_given(gradients, needs_q, needs_kv)


def _fake(dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor,
          v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, cu_seqlens_q: torch.Tensor,
          cu_seqlens_k: torch.Tensor, max_q: int, max_k: int, mask: torch.Tensor | None,
          bias: torch.Tensor | None, *rest: Any) -> Gradients:  # fmt: skip
    del dout, dlse, out, lse, cu_seqlens_q, cu_seqlens_k, max_q, max_k, mask
    needs = rest[-4:-1]
    gradients = empty_gradients(_as_batch(q), _as_batch(k), _as_batch(v), bias, *needs)
    return _as_given(gradients, *needs[:2])


attention_varlen_bwd = _op.register(_SCHEMA, _backward, _fake, no_gradient=_NO_SECOND_GRADIENT)


def setup_context(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Keep what `gradient` needs: the forward's tensors, and both of its results."""
    q, k, v, cu_q, cu_k, max_q, max_k, mask, bias, lengths, *options = inputs
    *options, seed, offset, config, backward_config = options
    ctx.save_for_backward(q, k, v, cu_q, cu_k, mask, bias, lengths, seed, offset, *output)
    ctx.bounds, ctx.options = (max_q, max_k), options
    if not backward_config and config == ReferenceConfig().encode():
        backward_config = config
    ctx.backward_config = backward_config
    ctx.set_materialize_grads(False)


def gradient(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradient of each input of `attention_varlen_fwd`."""
    q, k, v, cu_q, cu_k, mask, bias, lengths, seed, offset, out, lse = ctx.saved_tensors
    needs_q, needs_k, needs_v = ctx.needs_input_grad[:3]
    needs_bias = ctx.needs_input_grad[8]
    if dout is None:
        dout = torch.zeros_like(out)
    dq, dk, dv, dbias = attention_varlen_bwd(
        dout, dlse, q, k, v, out, lse, cu_q, cu_k, *ctx.bounds, mask, bias, lengths, *ctx.options,
        seed, offset, needs_q, needs_k or needs_v, needs_bias, ctx.backward_config,
    )  # fmt: skip
    found = {0: dq if needs_q else None, 1: dk if needs_k else None, 2: dv if needs_v else None}
    found[8] = dbias if needs_bias else None
    return tuple(found.get(i) for i in range(len(ctx.needs_input_grad)))
