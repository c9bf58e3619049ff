"""The backward as it is measured: its call, and what is right."""

from __future__ import annotations

import torch

from tileloom.bench.case import AttentionCase
from tileloom.bench.contender import Call, Contender, Inputs
from tileloom.bench.scores import Kept, bias_of, hide

Results = tuple[torch.Tensor, ...]

_TOGETHER = 16


def backward_call(contender: Contender, case: AttentionCase, inputs: Inputs) -> Call:
    """Run a contender's forward once, and return the call of its backward alone.

    Args:
        contender: Who.
        case: The problem.
        inputs: q, k, v and dout in the contender's layout.

    Returns:
        A call that gives dq, dk and dv in that layout, and dbias where the case wants it; the
        graph is kept from call to call.
    """
    leaves = tuple(t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    bias = inputs.bias
    if bias is not None and case.bias_gradient:
        bias = bias.detach().requires_grad_()
        leaves = (*leaves, bias)
    with torch.enable_grad(), contender.scope():
        out = contender.prepare(case, Inputs(*leaves[:3], bias=bias))()
    out = out[0] if isinstance(out, tuple) else out
    return lambda: torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)


def joined(tensor: torch.Tensor) -> torch.Tensor:
    """Join 16 rows or some more to one, over all leading dimensions: windows laid evenly.

    A row that sees two keys, or one that a single label dominates, has the error of one element:
    the baseline's may be small by luck, and its RMS says nothing about another's. Where 16 does not
    divide the rows, the windows are a little longer and overlap, so that the last one is no
    remainder with a few rows of its own.
    """
    if tensor.dim() < 2 or tensor.numel() == 0:
        return tensor.reshape(1, -1)
    flat = tensor.flatten(0, -2)
    rows = flat.shape[0]
    windows = max(rows // _TOGETHER, 1)
    length = -(-rows // windows)
    if windows * length > rows:
        starts = torch.arange(windows) * (rows - length) // max(windows - 1, 1)
        flat = flat[(starts[:, None] + torch.arange(length)).flatten().to(flat.device)]
    return flat.reshape(windows, -1)


def head_gradients(
    inputs: Inputs, case: AttentionCase, kept: Kept, *, compute_dtype: torch.dtype
) -> Results:
    """Compute dQ, dK and dV by the formula, every step in `compute_dtype`, head by head.

    Args:
        inputs: q `[B, Hq, Lq, D]`, k and v `[B, Hkv, Lk, D]`, dout as q; Hkv divides Hq.
        case: Masks, dropout, and whether dbias is wanted.
        kept: Gives the scores that dropout keeps.
        compute_dtype: Dtype of every step and of the results.

    Returns:
        dq, dk and dv, and dbias if it is wanted.

    Memory: the results, and about four matrices `[Lq, Lk]`.
    """
    tensors = (inputs.q, inputs.k, inputs.v)
    assert inputs.dout is not None
    dq, dk, dv = (torch.zeros_like(t, dtype=compute_dtype) for t in tensors)
    dbias = None
    if inputs.bias is not None and case.bias_gradient:
        dbias = torch.zeros_like(inputs.bias, dtype=compute_dtype)
    scale = inputs.q.shape[3] ** -0.5
    batch, heads, len_q, _ = inputs.q.shape
    group = heads // inputs.k.shape[1]
    rows = slice(0, len_q)
    for b in range(batch):
        for h in range(heads):
            q, do = (t[b, h].to(compute_dtype) for t in (inputs.q, inputs.dout))
            k, v = (t[b, h // group].to(compute_dtype) for t in (inputs.k, inputs.v))
            scores = q @ k.t() * scale
            if inputs.bias is not None:
                scores += bias_of(inputs.bias, b, h, rows).to(compute_dtype)
            hide(scores, case, rows)
            p = torch.softmax(scores, 1)
            dp = do @ v.t()
            dropped = p
            if case.dropout_p:
                factor = kept(case, b * heads + h, rows, q.device).to(compute_dtype)
                factor /= 1 - case.dropout_p
                dp *= factor
                dropped = p * factor
            ds = p * (dp - (p * dp).sum(1, keepdim=True))
            dq[b, h] = ds @ k * scale
            dk[b, h // group] += ds.t() @ q * scale
            dv[b, h // group] += dropped.t() @ do
            if dbias is not None:
                part = bias_of(dbias, b, h, rows)
                part += ds if part.shape[0] == len_q else ds.sum(0, keepdim=True)
    return (dq, dk, dv) if dbias is None else (dq, dk, dv, dbias)
