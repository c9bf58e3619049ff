"""The public function `attention`: checks its arguments, then calls `tileloom::attention_fwd`."""

from __future__ import annotations

import torch

from tileloom.errors import GradientError, unknown_option
from tileloom.ops._op import has_tangent
from tileloom.ops.attention import plan as plans
from tileloom.ops.attention.autograd import attention_fwd
from tileloom.ops.attention.checks import (
    check_extras,
    check_options,
    check_return_lse,
    check_tensors,
    resolve_mask,
)
from tileloom.ops.attention.config import AttentionConfig
from tileloom.ops.attention.config_backward import AttentionBackwardConfig
from tileloom.ops.attention.masks import Mask
from tileloom.ops.attention.philox import draw

_OPTIONS = (
    *("mask", "bias", "is_causal", "scale", "dropout_p", "scores", "return_lse"),
    *("config", "backward_config"),
)
_ELSEWHERE = {  # what other libraries call it
    "attn_mask": "mask= for bools, bias= for numbers",
    "attn_bias": "bias=",
    "enable_gqa": "leaving it out: grouped heads always work",
    "causal": "is_causal=",
    "softmax_scale": "scale=",
    "window_size": "mask=tileloom.masks.window(left, right)",
    "alibi_slopes": "bias=, with the slopes times the distances",
    "deterministic": "torch.use_deterministic_algorithms(True)",
    "training": "dropout_p=0.0 in evaluation",
    "p": "dropout_p=",
}
_NO_TANGENT = (
    "attention: one of q, k, v and bias carries a forward-mode tangent, and there are only "
    "reverse-mode gradients. Try: tileloom.ops.attention.attention_reference, which has both."
)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Mask | torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    scores: None = None,
    return_lse: bool = False,
    config: AttentionConfig | None = None,
    backward_config: AttentionBackwardConfig | None = None,
    **unknown: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax attention of queries over keys and values.

    Math: `O = dropout(softmax(scale * Q K^T + bias)) V` over the keys that the mask shows; the
        softmax and the sums are in float32.
    Equivalent: `torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)`.

    Args:
        q: Queries, `[B, Hq, Lq, D]`, float16, bfloat16 or float32 (float64 by the reference), any
            strides: `[B, L, H, D].transpose(1, 2)` costs no copy.
        k: Keys, `[B, Hkv, Lk, D]`, dtype and device of q; Hkv divides Hq.
        v: Values, `[B, Hkv, Lk, Dv]`, dtype and device of q.
        mask: A bool tensor that broadcasts to `[B, Hq, Lq, Lk]` (True = visible), or a value of
            `tileloom.masks`.
        bias: Added to the scaled scores: a floating tensor that broadcasts to `[B, Hq, Lq, Lk]`,
            any strides.
        is_causal: Means `mask & masks.causal("top_left")`.
        scale: Multiplier of the scores; default `1 / sqrt(D)`.
        dropout_p: Probability in 0.0 .. 1.0, 1.0 excluded, that a score is dropped; what is kept
            is multiplied by `1 / (1 - dropout_p)`. LSE is that of all scores. There is no switch
            for training: pass 0.0 in evaluation.
        scores: Only None as yet.
        return_lse: Whether to return the log-sum-exp of each row as well.
        config: Forces a backend: a `ReferenceConfig`, `TritonConfig` or `GluonSm90Config` of
            `tileloom.ops.attention.config`. Default: the fastest that takes the problem.
        backward_config: Forces the backend of the gradients: a `ReferenceConfig`,
            `TritonBackwardConfig` or `GluonSm90BackwardConfig` of
            `tileloom.ops.attention.config_backward`. Default: the fastest that takes the problem,
            the reference after a `ReferenceConfig`.
        unknown: Any other keyword is refused with the nearest option.

    Returns:
        Output `[B, Hq, Lq, Dv]` in q's dtype; it lies in memory in q's order of dimensions
        (`[B, Lq, Hq, Dv]` when q does). With `return_lse` also `[B, Hq, Lq]`: float32 (float64 for
        float64 inputs), the natural logarithm of the sum of exponentials. A row that sees no key
        gives 0 and -inf. A key that no query sees may hold anything, NaN included.

    Raises:
        ShapeError: If sizes do not fit each other.
        DtypeError: If dtypes differ or are not supported.
        DeviceError: If the tensors lie on different devices.
        OptionError: If an option is out of range.
        UnknownOptionError: If there is no such option.
        GradientError: If a tensor carries a forward-mode tangent; in the backward, if a gradient of
            the gradient is asked for (`create_graph=True`).
        ConfigError: If `config` cannot run the problem, or, in the backward, `backward_config`; it
            lists the reasons.
        UnsupportedError: If no backend can; it lists the reasons of each.

    Memory: the outputs, and a copy of `[B]` integers where key lengths are not contiguous; the
        reference backend three tensors `[B, Hq, Lq, Lk]` more. The backward keeps the inputs, O
        and LSE; besides the gradients it needs `[B, Hq, Lq]` float32 (twice with a bias or in
        float32; on Hopper twice, and q's size in float32, its rows rounded up to 128 and its head
        dim to 64, 128 or 256, and for dq in a fixed order 4 bytes for each key head's 64 or 128
        keys), a copy of dO where its last dimension has a stride (on Hopper also where its rows do
        not begin at multiples of 16 bytes), and for the gradient of a bias that broadcasts up to
        8 MiB; the reference five tensors `[B, Hq, Lq, Lk]`.
    Random numbers: those of `tileloom.testing.dropout_uniforms`, of which nothing is stored. In
        eager mode on a GPU their seed and offset are those of PyTorch's default generator, which
        advances by `B * Hq * Lq * Lk`, rounded up to a multiple of 4. While a CUDA graph is
        captured, under `torch.compile` and on the CPU, the seed is drawn by `torch.randint` on q's
        device: each replay has a new one. A backward has the mask of its forward.
    Determinism: bitwise repeatable in every backend on a GPU, gradients included, but for dq of the
        Hopper backward, which adds it up in no fixed order unless
        `torch.use_deterministic_algorithms(True)` (or `backward_config`) asks for one.
    Gradients: of q, k, v and bias (summed to its own shape), through O and LSE. None of the second
        order; `attention_reference` has those.
    Autocast: q, k and v are cast to autocast's dtype, as by
        `torch.nn.functional.scaled_dot_product_attention`; a bias keeps its own.
    Hardware: fast on Hopper (sm_90); portable kernel from sm_80 on; the CPU by the reference.
    Source: FlashAttention (arXiv 2205.14135, 2307.08691, 2407.08608); `mem_eff_attention`.

    Example:
        >>> q, k, v = torch.randn(3, 1, 2, 16, 32).unbind(0)
        >>> attention(q, k, v, is_causal=True).shape
        torch.Size([1, 2, 16, 32])
    """
    is_simple = mask is None and bias is None and scores is None and backward_config is None
    is_simple = is_simple and type(dropout_p) is float and type(return_lse) is bool and not unknown
    key = plans.short_key(q, k, v, is_causal, scale, dropout_p, config) if is_simple else None
    plan = None if key is None else plans.checked(key)
    if plan is not None:
        state = draw(q, _scores(q, k)) if dropout_p else None
        if torch.is_grad_enabled() and torch._C._any_requires_grad(q, k, v):
            *options, text = plans.options_of(key)
            seed, offset = state or (None, None)
            out, lse = attention_fwd(q, k, v, None, None, None, *options, seed, offset, text, "")
        else:
            out, lse = plan.run(q, k, v, None, None, None, state)
        return (out, lse) if return_lse else out
    if unknown:
        raise unknown_option("attention", next(iter(unknown)), _OPTIONS, _ELSEWHERE)
    check_return_lse("attention", return_lse)
    shown = resolve_mask("attention", mask, is_causal)
    q, k, v = cast(q, k, v)
    check_tensors(q, k, v)
    check_extras(q, k, shown, bias)
    scale = check_options("attention", q, scale, dropout_p, scores, config, backward_config)
    if has_tangent((q, k, v, bias)):
        raise GradientError(_NO_TANGENT)
    seed, offset = None, None
    if dropout_p:
        seed, offset = draw(q, _scores(q, k))
    band = shown.band
    out, lse = attention_fwd(
        q,
        k,
        v,
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
    if key is not None:
        plans.note(key)
    return (out, lse) if return_lse else out


def _scores(q: torch.Tensor, k: torch.Tensor) -> int:
    return q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]


def cast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Apply autocast: floating tensors but those of float64, which it leaves alone."""
    kind = tensors[0].device.type if isinstance(tensors[0], torch.Tensor) else ""  # pyright: ignore[reportUnnecessaryIsInstance]
    if kind in ("", "meta") or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        t.to(dtype)
        if isinstance(t, torch.Tensor) and t.is_floating_point() and t.dtype != torch.float64  # pyright: ignore[reportUnnecessaryIsInstance]
        else t
        for t in tensors
    )
