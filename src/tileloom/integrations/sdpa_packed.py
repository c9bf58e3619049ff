"""The replaced operators on packed sequences: a batch of 1 with `cu_seqlens_q` and `cu_seqlens_k`.

`tileloom::attention_varlen_*` compute it. Only the log-sum-exp has to be laid out anew: PyTorch's
is that of a padded batch, `[S, H, longest sequence up to a multiple of 32]`, with +inf past each
sequence's end; tileloom's is `[H, T]`, T the rows of all sequences. Nothing waits for the GPU.
"""

from __future__ import annotations

import math

import torch

from tileloom.integrations.sdpa_checks import check_backward, check_call, check_choice
from tileloom.integrations.sdpa_conventions import (
    LSE_ROWS,
    Asked,
    Call,
    Given,
    Gradients,
    drawn,
    empty_gradients,
    heads_first,
)
from tileloom.ops.attention.config import choose
from tileloom.ops.attention.config_backward import choose_backward
from tileloom.ops.attention.philox import PhiloxState
from tileloom.ops.attention.problem import AttentionProblem
from tileloom.ops.attention.varlen.autograd import attention_varlen_fwd
from tileloom.ops.attention.varlen.backward import attention_varlen_bwd
from tileloom.target import target_of


def lse_of_sequences(lse: torch.Tensor, starts: torch.Tensor, longest: int) -> torch.Tensor:
    """Lay the log-sum-exp of packed rows out as PyTorch does.

    Args:
        lse: `[H, T]`; -inf where a row sees no key.
        starts: Where each sequence begins, and the last ends, int32 `[S + 1]`.
        longest: Length of the longest sequence, or more.

    Returns:
        `[S, H, longest up to a multiple of 32]`, contiguous: 0 where a row sees no key, +inf past
        each sequence's end.
    """
    heads, total = lse.shape
    rows = longest + -longest % LSE_ROWS
    if not total:
        return lse.new_full((starts.shape[0] - 1, heads, rows), math.inf)
    place = torch.arange(rows, dtype=starts.dtype, device=starts.device)
    at = (starts[:-1, None] + place).clamp_(max=total - 1)
    is_past = place >= (starts[1:] - starts[:-1])[:, None]
    padded = lse.t()[at].transpose(1, 2).contiguous()
    padded.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=0.0)
    return padded.masked_fill_(is_past[:, None], math.inf)


def lse_of_rows(logsumexp: torch.Tensor, starts: torch.Tensor, total: int) -> torch.Tensor:
    """Lay PyTorch's log-sum-exp out for packed rows.

    Args:
        logsumexp: `[S, H, P]`.
        starts: Where each sequence begins, and the last ends, int32 `[S + 1]`.
        total: T; what rows past the last sequence get is of no account.

    Returns:
        `[H, T]`, contiguous.
    """
    sequences, heads, rows = logsumexp.shape
    if not sequences or not rows:
        return logsumexp.new_zeros((heads, total))
    row = torch.arange(total, dtype=starts.dtype, device=starts.device)
    sequence = torch.searchsorted(starts[1:], row, right=True).clamp_(max=sequences - 1)
    place = (row - starts[sequence]).clamp_(0, rows - 1)
    return logsumexp[sequence, :, place].t().contiguous()


def forward_packed(call: Call, *, with_lse: bool) -> tuple[torch.Tensor, ...]:
    """Compute a forward; see `sdpa_dense.forward_dense`."""
    check_call(call)
    check_choice(choose(_problem(call), target_of(call.query)))
    assert call.cu_seqlens_q is not None, "check_call has seen it"
    state = drawn(call)
    seed, offset = state if call.dropout_p else (None, None)
    with torch.no_grad():
        out, lse = attention_varlen_fwd(
            call.query[0], call.key[0], call.value[0], call.cu_seqlens_q, call.cu_seqlens_k,
            *call.longest, None, None, call.seqlen_k, *call.bounds(), call.multiplier,
            call.dropout_p, seed, offset, "", "",
        )  # fmt: skip
    if with_lse:
        lse = lse_of_sequences(lse, call.cu_seqlens_q, call.longest[0])
    else:
        lse = lse.new_empty((*call.sizes()[:2], 0))
    return out.contiguous()[None], lse, *state


def backward_packed(call: Call, given: Given, state: PhiloxState | None, asked: Asked) -> Gradients:
    """Compute a backward; see `sdpa_dense.backward_dense`."""
    check_call(call)
    check_backward(call, given, asked)
    check_choice(choose_backward(_problem(call), target_of(call.query)))
    assert call.cu_seqlens_q is not None, "check_call has seen it"
    seed, offset = state or (None, None)
    lse = lse_of_rows(given.logsumexp, call.cu_seqlens_q, call.query.shape[1])
    with torch.no_grad():
        results = attention_varlen_bwd(
            given.grad_out[0], None, call.query[0], call.key[0], call.value[0], given.out[0], lse,
            call.cu_seqlens_q, call.cu_seqlens_k, *call.longest, None, None, None, *call.bounds(),
            call.multiplier, call.dropout_p, seed, offset, True, True, False, "",
        )  # fmt: skip
    if not asked.shared_storage_dqdkdv:
        dq, dk, dv = (gradient.contiguous()[None] for gradient in results[:3])
        return dq, dk, dv, None
    gradients = empty_gradients(call, asked)
    for own, result in zip(gradients[:3], results[:3]):
        own[0].copy_(result)
    return gradients


def _problem(call: Call) -> AttentionProblem:
    q, k, v = (heads_first(t) for t in (call.query, call.key, call.value))
    padded = (call.sizes()[0], *call.longest)
    return AttentionProblem.of(
        q, k, v, None, None, call.seqlen_k, call.band, call.multiplier, call.dropout_p, padded
    )
