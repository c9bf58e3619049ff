"""The specification of attention, in plain torch: any precision, differentiable, on any device.

    S = scale * Q K^T + bias,  hidden keys -> -inf
    P = softmax(S),  LSE = log(sum(exp(S))),  O = (P * Z) V
    Z = 0 where dropout drops a score, else 1 / (1 - dropout_p);  1 without dropout

A row that sees no key gives 0 and LSE -inf. A key that no query of its head sees is selected away
from K and V and may hold anything, NaN included.
"""

from __future__ import annotations

from typing import Any

import torch

from tileloom.errors import OptionError, shown_value
from tileloom.ops.attention.masks import Band, Mask, causal, dense

Philox = tuple[int | torch.Tensor, int | torch.Tensor]
"""Seed and offset."""


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Mask | torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    philox: Philox | torch.Tensor | None = None,
    return_lse: bool = False,
    compute_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute attention by its formula; the arguments are those of `tileloom.attention`.

    Args:
        q: Queries, `[B, Hq, Lq, D]`, any floating dtype and strides.
        k: Keys, `[B, Hkv, Lk, D]`; Hkv divides Hq.
        v: Values, `[B, Hkv, Lk, Dv]`.
        mask: Bool tensor (True = visible) or a value of `tileloom.masks`.
        bias: Added to the scaled scores, broadcastable to `[B, Hq, Lq, Lk]`.
        is_causal: Means `mask & masks.causal("top_left")`.
        scale: Multiplier of the scores; default `1 / sqrt(D)`.
        dropout_p: Probability that a score is dropped, below 1.
        philox: Seed and offset of `dropout_uniforms`, which decide on each score, or the uniforms
            themselves; needed where `dropout_p` is not 0.
        return_lse: Whether to return the log-sum-exp as well.
        compute_dtype: Precision of every step; default: that of the inputs, at least float32.
            `torch.float64` gives the reference of the accuracy tests, `q.dtype` their baseline.

    Returns:
        Output `[B, Hq, Lq, Dv]` in `compute_dtype` when that is given, else in q's dtype; with
        `return_lse` also the natural log-sum-exp `[B, Hq, Lq]`, at least float32.

    Memory: three tensors of `[B, Hq, Lq, Lk]` in `compute_dtype`; five of 64-bit integers more with
        dropout.
    Determinism: that of torch's matmul.
    Gradients: by autograd, to any order; `attention_reference_backward` has them as formulas.
    """
    dtype = compute_dtype or torch.promote_types(q.dtype, torch.float32)
    scores, visible, _, v = _scores(q, k, v, mask, bias, is_causal, scale, dtype)
    empty = ~visible.any(3, keepdim=True)
    p = torch.softmax(scores.masked_fill(empty, 0.0), 3).masked_fill(empty, 0.0)
    out = torch.matmul(_dropped(p, dropout_p, philox), v)
    out = out if compute_dtype else out.to(q.dtype)
    if not return_lse:
        return out
    scores = scores.masked_fill(empty, 0.0).to(torch.promote_types(dtype, torch.float32))
    # Not torch.logsumexp, whose gradient exp(S - LSE) is wrong where LSE has lost the logarithm.
    peak = scores.detach().amax(3, keepdim=True) if scores.shape[3] else scores.sum(3, keepdim=True)
    lse = (scores - peak).exp().sum(3).log() + peak[..., 0]
    return out, lse.masked_fill(empty[..., 0], float("-inf"))


def attention_reference_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Mask | torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    philox: Philox | torch.Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Compute the gradients of `attention_reference` by their formulas, without autograd.

        dV = (P * Z)^T dO,  dP = Z * dO V^T,  dS = P * (dP - rowsum(P * dP) + dLSE)
        dQ = scale * dS K,  dK = scale * dS^T Q,  dbias = dS, summed where the bias broadcasts

    Args:
        dout: Gradient of the output, `[B, Hq, Lq, Dv]`.
        dlse: Gradient of the log-sum-exp, `[B, Hq, Lq]`, or None. Ignored where a row sees no key.
        q: Queries, `[B, Hq, Lq, D]`.
        k: Keys, `[B, Hkv, Lk, D]`.
        v: Values, `[B, Hkv, Lk, Dv]`.
        mask: As in `attention_reference`; so are bias, is_causal, scale, dropout_p and
            philox.
        bias: See `mask`.
        is_causal: See `mask`.
        scale: See `mask`.
        dropout_p: See `mask`.
        philox: See `mask`.
        compute_dtype: Precision of every step; default: that of the inputs, at least float32.

    Returns:
        dq, dk, dv and dbias (None without a bias), each of its input's shape, in `compute_dtype`
        when that is given, else in its input's dtype.

    Memory: five tensors of `[B, Hq, Lq, Lk]` in `compute_dtype`; five of 64-bit integers more with
        dropout.
    Determinism: that of torch's matmul.
    """
    dtype = compute_dtype or torch.promote_types(q.dtype, torch.float32)
    batch, heads, _, head_dim = q.shape
    heads_kv, len_k = k.shape[1:3]
    width, dtypes = v.shape[3], (q.dtype, k.dtype, v.dtype)
    if scale is None:
        scale = float(head_dim**-0.5) if head_dim else 1.0
    scores, visible, k, v = _scores(q, k, v, mask, bias, is_causal, scale, dtype)
    empty = ~visible.any(3, keepdim=True)
    p = torch.softmax(scores.masked_fill(empty, 0.0), 3).masked_fill(~visible, 0.0)
    dout = dout.to(dtype)
    dp = _dropped(torch.matmul(dout, v.transpose(2, 3)), dropout_p, philox)
    change = -(p * dp).sum(3, keepdim=True)
    if dlse is not None:
        change = change + dlse.to(dtype)[..., None]
    ds = (p * (dp + change)).masked_fill(~visible, 0.0)
    dq = torch.matmul(ds, k) * scale
    dk = torch.matmul(ds.transpose(2, 3), q.to(dtype)) * scale
    dv = torch.matmul(_dropped(p, dropout_p, philox).transpose(2, 3), dout)
    group = (batch, heads_kv, heads // max(heads_kv, 1), len_k)
    dk, dv = dk.reshape(*group, head_dim).sum(2), dv.reshape(*group, width).sum(2)
    dbias = None if bias is None else ds.sum_to_size(bias.shape)
    if compute_dtype is None:
        dq, dk, dv = (t.to(own) for t, own in zip((dq, dk, dv), dtypes))
        dbias = None if bias is None or dbias is None else dbias.to(bias.dtype)
    return dq, dk, dv, dbias


def dropout_uniforms(
    seed: int | torch.Tensor,
    offset: int | torch.Tensor,
    size: tuple[int, int, int, int],
    *,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Give the random numbers by which dropout decides: a score is kept where it is above p.

    The score of batch b, head h, row i and key j has the linear index
    `offset + ((b * H + h) * Lq + i) * Lk + j`, in 64 bits. Its number is word `index % 4` of
    Philox4x32-10 with the seed as key and `index // 4` as counter, and its uniform
    `word * 2^-32 + 2^-33` in float32. So has PyTorch's `mem_eff_attention`, forward and backward.
    Packed sequences: sequence s is batch s of `(S, Hq, max_q, max_k)`, with rows and keys counted
    inside the sequence.

    Args:
        seed: The generator's seed, 64 bits, signed or not.
        offset: The generator's offset; it need not be a multiple of 4.
        size: `(B, Hq, Lq, Lk)`.
        device: Where to compute.

    Returns:
        Uniforms in (0, 1], `[B, Hq, Lq, Lk]`, float32.

    Raises:
        OptionError: If seed or offset is no integer, or a size none from 0.

    Memory: five tensors of that shape of 64-bit integers.
    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
    """
    _check_numbers(seed, offset, size)
    offset = (offset + 2**63) % 2**64 - 2**63 if isinstance(offset, int) else offset
    index = torch.arange(size[0] * size[1] * size[2] * size[3], device=device).view(size) + offset
    word = index & 3
    index = (index >> 2) & _LOW_62
    words = philox_4x32((index & _LOW_32, index >> 32, 0, 0), (seed & _LOW_32, (seed >> 32)))
    chosen = words[3]
    for lane in (2, 1, 0):
        chosen = torch.where(word == lane, words[lane], chosen)
    return chosen.to(torch.float32) * 2.0**-32 + 2.0**-33


def check_probability(name: str, dropout_p: float) -> None:
    """Refuse what is no probability below 1; float32 decides, as in the kernels.

    Args:
        name: Who is called.
        dropout_p: What the caller gave.

    Raises:
        OptionError: If it is no number, or out of range.
    """
    is_number = isinstance(dropout_p, (int, float, torch.SymFloat)) and dropout_p is not True  # pyright: ignore[reportUnnecessaryIsInstance]
    if not is_number or not 0.0 <= dropout_p < 1.0 - 2.0**-25:
        remedy = "dropout_p=0.0, which drops nothing"
        if type(dropout_p) is not bool and not is_number and hasattr(dropout_p, "__float__"):
            remedy = "float(dropout_p)"
        raise OptionError(
            f"{name}: dropout_p is {shown_value(dropout_p)}; it must be a Python number in "
            f"0.0 .. 1.0, 1.0 excluded. Try: {remedy}."
        )


def _check_numbers(seed: object, offset: object, size: object) -> None:
    for name, given in (("seed", seed), ("offset", offset)):
        is_integer = isinstance(given, int) and not isinstance(given, bool)
        if isinstance(given, torch.Tensor):
            is_integer = given.numel() == 1 and given.dtype in (torch.int64, torch.int32)
        if not is_integer:
            raise OptionError(
                f"dropout_uniforms: {name} is {shown_value(given)}; it must be an int, or an "
                f"integer tensor of one element. Try: int({name})."
            )
    sizes: tuple[object, ...] = size if isinstance(size, tuple) else ()
    if len(sizes) != 4 or not all(isinstance(n, (int, torch.SymInt)) and n >= 0 for n in sizes):
        raise OptionError(
            f"dropout_uniforms: size is {shown_value(size)}; it must be a tuple of four ints >= 0, "
            "(B, Hq, Lq, Lk). Try: (1, Hq, Lq, Lk) for one sequence."
        )


def philox_4x32(
    counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]
) -> tuple[Any, Any, Any, Any]:
    """Encrypt a counter by ten rounds of Philox4x32.

    Args:
        counter: Four int64 tensors, or numbers, of 32 bits each.
        key: Two.

    Returns:
        Four of 32 bits each.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):  # a product wraps to 64 bits, and those are the right ones
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        k0, k1 = k0 & _LOW_32, k1 & _LOW_32
        c0, c2 = ((b >> 32) & _LOW_32) ^ c1 ^ k0, ((a >> 32) & _LOW_32) ^ c3 ^ k1
        c1, c3 = b & _LOW_32, a & _LOW_32
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


_LOW_32 = 2**32 - 1
_LOW_62 = 2**62 - 1


def _dropped(
    p: torch.Tensor,
    dropout_p: float,
    philox: Philox | torch.Tensor | None,
) -> torch.Tensor:
    """Multiply by Z."""
    if not dropout_p:
        return p
    if philox is None:
        raise OptionError(
            f"attention_reference: dropout_p is {dropout_p}, and philox is None; it must be a seed "
            "and an offset. Try: philox=(0, 0)."
        )
    uniforms = philox
    if not isinstance(uniforms, torch.Tensor):
        size = (p.shape[0], p.shape[1], p.shape[2], p.shape[3])
        uniforms = dropout_uniforms(*uniforms, size, device=p.device)
    kept = uniforms > torch.tensor(dropout_p, dtype=torch.float32, device=p.device)
    return torch.where(kept, p * (1.0 / (1.0 - dropout_p)), 0.0)


def _scores(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask | torch.Tensor | None,
    bias: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give S (hidden keys -inf), what is visible, and k and v for each query head."""
    batch, heads, len_q, head_dim = q.shape
    len_k, group = k.shape[2], heads // max(k.shape[1], 1)
    if scale is None:
        scale = float(head_dim**-0.5) if head_dim else 1.0
    shown = (
        Mask(Band()) if mask is None else dense(mask) if isinstance(mask, torch.Tensor) else mask
    )
    if is_causal:
        shown = shown & causal()
    visible = shown.materialize(batch, len_q, len_k, q.device)
    if bias is not None:
        visible = visible & (bias != float("-inf"))
        # Finite in its own dtype is finite here: only -inf hides a key.
        bias = torch.where(visible, bias.to(dtype).clamp(min=torch.finfo(dtype).min), 0.0)
    visible = visible.expand(batch, heads, len_q, len_k)
    seen = visible.reshape(batch, k.shape[1], group * len_q, len_k).any(2)[..., None]
    k = torch.where(seen, k.to(dtype), 0.0).repeat_interleave(group, 1)
    v = torch.where(seen, v.to(dtype), 0.0).repeat_interleave(group, 1)
    scores = torch.matmul(q.to(dtype), k.transpose(2, 3)) * scale
    if bias is not None:
        scores = scores + bias
    return scores.masked_fill(~visible, float("-inf")), visible, k, v
