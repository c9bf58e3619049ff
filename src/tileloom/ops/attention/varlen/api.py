"""The public function `attention_varlen`: it checks, then calls its operator."""

from __future__ import annotations

import torch

from tileloom.errors import GradientError, OptionError, unknown_option
from tileloom.ops._op import has_tangent
from tileloom.ops.attention.api import cast
from tileloom.ops.attention.checks import check_options, check_return_lse, resolve_mask
from tileloom.ops.attention.config import AttentionConfig
from tileloom.ops.attention.config_backward import AttentionBackwardConfig
from tileloom.ops.attention.masks import Mask
from tileloom.ops.attention.philox import draw
from tileloom.ops.attention.varlen.autograd import attention_varlen_fwd
from tileloom.ops.attention.varlen.checks import (
    bound_of,
    check_extras,
    check_offsets,
    check_tensors,
)

_NAME = "attention_varlen"
_OPTIONS = (
    *("mask", "bias", "is_causal", "scale", "dropout_p", "return_lse", "config"),
    "backward_config",
)
_ELSEWHERE = {  # what other libraries call it
    "causal": "is_causal=, or mask=tileloom.masks.causal('bottom_right')",
    "softmax_scale": "scale=",
    "window_size": "mask=tileloom.masks.window(left, right, anchor='bottom_right')",
    "enable_gqa": "leaving it out: grouped heads always work",
    "return_aux": "return_lse=",
    "seqused_k": "mask=tileloom.masks.key_lengths(seqused_k)",
    "attn_bias": "bias=",
    "attn_mask": "mask= for bools, bias= for numbers",
    "alibi_slopes": "bias=, with the slopes times the distances",
    "deterministic": "torch.use_deterministic_algorithms(True)",
}
_NO_TANGENT = (
    "attention_varlen: one of q, k, v and bias carries a forward-mode tangent, and there are only "
    "reverse-mode gradients. Try: tileloom.ops.attention.varlen.attention_varlen_reference, which "
    "has both."
)
_UNREAD = (
    "attention_varlen: max_q or max_k is a tensor, which is not read, and dropout's random numbers "
    "depend on both. Try: numbers, such as those of all rows."
)


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_q: int | torch.Tensor,
    max_k: int | torch.Tensor,
    *,
    mask: Mask | torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    config: AttentionConfig | None = None,
    backward_config: AttentionBackwardConfig | None = None,
    **unknown: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax attention inside each of several sequences, packed one after the other.

    Math: that of `tileloom.attention`, for each sequence s by itself, with the queries
    `cu_seqlens_q[s] .. cu_seqlens_q[s + 1] - 1` and the keys between the same entries of
    `cu_seqlens_k`. Anchors, windows, biases and dropout count rows and keys inside the sequence.
    Equivalent: `torch.nn.attention.varlen.varlen_attn`, whose `window_size=(left, right)` is
    `masks.window(left, right, anchor="bottom_right")`.

    Args:
        q: Queries, `[Tq, Hq, D]`, float16, bfloat16 or float32 (float64 by the reference), any
            strides.
        k: Keys, `[Tk, Hkv, D]`, dtype and device of q; Hkv divides Hq.
        v: Values, `[Tk, Hkv, Dv]`, dtype and device of q.
        cu_seqlens_q: Where sequences begin and end: `[S + 1]`, int32, on the device of q, from 0 to
            Tq, never falling. Sequences may be empty, and as many as there is memory for.
        cu_seqlens_k: The same for keys, from 0 to Tk.
        max_q: Length of the longest sequence of queries, or more, up to 2^31 - 1. A tensor without
            a dimension is accepted and never read: Tq is taken.
        max_k: The same for keys.
        mask: A value of `tileloom.masks`, whose anchors and key lengths `[S]` are those of each
            sequence; or a bool tensor that broadcasts to `[S, Hq, max_q, max_k]` (True = visible).
        bias: Added to the scaled scores: a floating tensor that broadcasts to
            `[S, Hq, max_q, max_k]`, as the bias of a padded batch; such as `[Hq, max_q, max_k]`,
            one for all sequences.
        is_causal: Means `mask & masks.causal("top_left")`.
        scale: Multiplier of the scores; default `1 / sqrt(D)`.
        dropout_p: As in `attention`, with the random numbers of the padded batch: the generator
            advances by `S * Hq * max_q * max_k`.
        return_lse: Whether to return the log-sum-exp of each row as well.
        config: Forces a backend, as in `attention`.
        backward_config: Forces the backend of the gradients, as in `attention`.
        unknown: Any other keyword is refused with the nearest option.

    Returns:
        Output `[Tq, Hq, Dv]` in q's dtype and order of dimensions. With `return_lse` also
        `[Hq, Tq]`: float32 (float64 for float64 inputs), the natural logarithm of the sum of
        exponentials. A row that sees no key gives 0 and -inf. A key that no query sees may hold
        anything, NaN included; no sequence sees anything of another.

    Raises:
        ShapeError: If sizes do not fit each other.
        DtypeError: If dtypes differ or are not supported.
        DeviceError: If the tensors lie on different devices.
        OptionError: If an option is out of range; on the CPU also if the offsets do not begin with
            0, fall, do not end with the number of rows, or have a sequence above its bound. On a
            GPU they are checked with the knob `debug.lengths` only, since that waits for the GPU;
            unchecked, no memory outside of the tensors is touched, and what is written for the
            sequences concerned is undefined.
        UnknownOptionError: If there is no such option.
        GradientError: If a tensor carries a forward-mode tangent, or a gradient of the gradient is
            asked for.
        ConfigError: If `config` cannot run the problem, or, in the backward, `backward_config`.
        UnsupportedError: If no backend can; it lists the reasons of each.

    Memory: the outputs. The backward keeps the inputs, O and LSE, and needs what that of
        `attention` needs for Tq rows; the Hopper one for `Tq + 128 S` rows.
    Synchronisation: none, the offsets stay where they are (the reference backend reads them); other
        lengths recompile nothing.
    Determinism: as of `attention`.
    Gradients: of q, k, v and bias, through O and LSE. None of the second order.
    Autocast: as of `attention`.
    Hardware: fast on Hopper (sm_90); portable kernel from sm_80 on; the CPU by the reference.
    Source: `torch.nn.attention.varlen`; FlashAttention's variable length interface.

    Example:
        >>> from tileloom import attention_varlen
        >>> q, k, v = torch.randn(3, 10, 2, 32).unbind(0)
        >>> cu = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> attention_varlen(q, k, v, cu, cu, 7, 7, is_causal=True).shape
        torch.Size([10, 2, 32])
    """
    if unknown:
        raise unknown_option(_NAME, next(iter(unknown)), _OPTIONS, _ELSEWHERE)
    check_return_lse(_NAME, return_lse)
    shown = resolve_mask(_NAME, mask, is_causal)
    q, k, v = cast(q, k, v)
    check_tensors(q, k, v)
    check_offsets(q, cu_seqlens_q, cu_seqlens_k)
    most_q, most_k = bound_of("max_q", max_q, q.shape[0]), bound_of("max_k", max_k, k.shape[0])
    check_extras(q, (cu_seqlens_q.shape[0] - 1, q.shape[1], most_q, most_k), shown, bias)
    scale = check_options(_NAME, q, scale, dropout_p, None, config, backward_config)
    if dropout_p and not (isinstance(max_q, int) and isinstance(max_k, int)):
        raise OptionError(_UNREAD)
    if has_tangent((q, k, v, bias)):
        raise GradientError(_NO_TANGENT)
    seed, offset = None, None
    if dropout_p:
        scores = (cu_seqlens_q.shape[0] - 1) * q.shape[1] * most_q * most_k
        seed, offset = draw(q, scores, _NAME)
    band = shown.band
    out, lse = attention_varlen_fwd(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        most_q,
        most_k,
        shown.visible,
        bias,
        shown.lengths,
        band.left_top,
        band.right_top,
        band.left_bottom,
        band.right_bottom,
        scale,
        dropout_p,
        seed,
        offset,
        "" if config is None else config.encode(),
        "" if backward_config is None else backward_config.encode(),
    )
    return (out, lse) if return_lse else out
