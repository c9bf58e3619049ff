"""The public function `attention`: checks its arguments, then calls `tileloom::attention_fwd`."""

from __future__ import annotations

import math
from typing import get_args

import torch

from tileloom.errors import (
    DeviceError,
    DtypeError,
    GradientError,
    OptionError,
    ShapeError,
    UnsupportedError,
    unknown_option,
)
from tileloom.ops._op import has_tangent
from tileloom.ops.attention import plan as plans
from tileloom.ops.attention.autograd import attention_fwd
from tileloom.ops.attention.config import (
    AttentionConfig,
    GluonSm90Config,
    ReferenceConfig,
    TritonConfig,
)
from tileloom.ops.attention.config_backward import AttentionBackwardConfig
from tileloom.ops.attention.masks import Band, Mask, causal, dense
from tileloom.ops.attention.philox import check_probability, draw

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
}
_LARGEST = torch.finfo(torch.float32).max  # the precision of the softmax
_CONFIGS = (ReferenceConfig, TritonConfig, GluonSm90Config)
_BACKWARD_CONFIGS = get_args(AttentionBackwardConfig)
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
        keys), a copy of dO where its last dimension has a stride, and for the
        gradient of a bias that broadcasts up to 8 MiB; the reference five tensors
        `[B, Hq, Lq, Lk]`.
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
    _check_tensors(q, k, v)
    _check_extras(q, k, shown, bias)
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


def check_return_lse(name: str, return_lse: object) -> None:
    """Refuse what only counts as true or false."""
    if not isinstance(return_lse, bool):
        given = "a tensor" if isinstance(return_lse, torch.Tensor) else repr(return_lse)
        raise OptionError(f"{name}: return_lse is {given}; it must be True or False.")


def resolve_mask(name: str, mask: Mask | torch.Tensor | None, is_causal: bool) -> Mask:
    """Return what a function's `mask` and `is_causal` mean together.

    Raises:
        OptionError: If one is of a type that is not accepted.
    """
    if not isinstance(is_causal, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionError(f"{name}: is_causal is {is_causal!r}; it must be True or False.")
    if mask is None:
        shown = Mask(Band())
    elif isinstance(mask, torch.Tensor):
        shown = dense(mask)
    elif isinstance(mask, Mask):
        shown = mask
    else:
        raise OptionError(
            f"{name}: mask is a {type(mask).__name__}; it must be a bool tensor, a value of "
            "tileloom.masks, or None."
        )
    return shown & causal() if is_causal else shown


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


def _table(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    rows = [("q", q), ("k", k), ("v", v)]
    return "\n".join(
        f"  {name}: shape {tuple(t.shape)}, {t.dtype}, {t.device}, strides {t.stride()}"
        for name, t in rows
    )


def _shape_error(what: str, expected: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                 remedy: str) -> ShapeError:  # fmt: skip
    return ShapeError(
        f"attention: {what}.\n{_table(q, k, v)}\n  Expected: {expected}. Try: {remedy}."
    )


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DtypeError(
                f"attention: {name} is a {type(t).__name__}; it must be a torch.Tensor."
            )
        if t.layout is not torch.strided or t.is_nested:
            kind = "nested" if t.is_nested else t.layout
            raise DtypeError(
                f"attention: {name} is a {kind} tensor; supported: "
                f"dense strided tensors. Try: {name}.to_dense(), or masks.key_lengths for lengths."
            )
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 4:
            raise _shape_error(
                f"{name} has {t.dim()} dimensions", "[B, H, L, D] for each of q, k and v", q, k, v,
                f"{name}.unsqueeze(0) when it lacks the batch"
            )  # fmt: skip
        if not t.dtype.is_floating_point or t.dtype.itemsize < 2:
            raise DtypeError(
                f"attention: {name} has dtype {t.dtype}; supported: torch.float16, "
                f"torch.bfloat16, torch.float32, torch.float64. Try: {name}.to(torch.bfloat16)."
            )
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype:
            raise DtypeError(
                f"attention: {name} has dtype {t.dtype}, q has {q.dtype}; they must be the same. "
                f"Try: {name}.to(q.dtype)."
            )
        if t.device != q.device:
            raise DeviceError(
                f"attention: {name} is on {t.device}, q on {q.device}; they must be on the same "
                f"device. Try: {name}.to(q.device)."
            )
        if t.shape[0] != q.shape[0]:
            raise _shape_error(f"{name} has batch {t.shape[0]}, q has {q.shape[0]}",
                               "the same B in q, k and v", q, k, v,
                               f"{name}.expand(q.shape[0], -1, -1, -1) to share one")  # fmt: skip
    if k.shape[1] != v.shape[1]:
        raise _shape_error(f"k has {k.shape[1]} heads, v has {v.shape[1]}",
                           "the same number of heads in k and v", q, k, v,
                           "slice or expand the heads of one")  # fmt: skip
    if (q.shape[1] % k.shape[1]) if k.shape[1] else q.shape[1]:
        raise _shape_error(f"k has {k.shape[1]} heads, q has {q.shape[1]}",
                           "Hq a multiple of Hkv (grouped heads)", q, k, v,
                           "k.repeat_interleave(...) if the groups are uneven")  # fmt: skip
    if k.shape[2] != v.shape[2]:
        raise _shape_error(f"k has {k.shape[2]} keys, v has {v.shape[2]}",
                           "the same Lk in k and v", q, k, v, "slice the longer one")  # fmt: skip
    if k.shape[3] != q.shape[3]:
        raise _shape_error(f"k has head dim {k.shape[3]}, q has {q.shape[3]}",
                           "the same D in q and k (v's may differ)", q, k, v,
                           "torch.nn.functional.pad(k, (0, D - k.shape[3]))")  # fmt: skip


def _broadcasts(shape: torch.Size, full: tuple[int, ...]) -> bool:
    if len(shape) > 4:
        return False
    return all(n in (1, m) for n, m in zip(reversed(shape), reversed(full)))


def _check_extras(q: torch.Tensor, k: torch.Tensor, shown: Mask, bias: torch.Tensor | None) -> None:
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if bias is not None and not isinstance(bias, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DtypeError(
            f"attention: bias is a {type(bias).__name__}; it must be a torch.Tensor or None. "
            "Try: torch.as_tensor(bias)."
        )
    if bias is not None and (not bias.dtype.is_floating_point or bias.dtype.itemsize < 2):
        hint = "pass it as mask=" if bias.dtype is torch.bool else "bias.to(q.dtype)"
        raise DtypeError(
            f"attention: bias has dtype {bias.dtype}; supported: torch.float16, torch.bfloat16, "
            f"torch.float32, torch.float64. Try: {hint}."
        )
    for name, t in (("mask", shown.visible), ("bias", bias)):
        if t is not None and not _broadcasts(t.shape, full):
            remedy = f"give {name} four dimensions, of size 1 where it is the same for all"
            if t.dim() == 2 and tuple(t.shape) == (full[0], full[3]):
                remedy = f"{name}[:, None, None] for one row of keys for each sequence"
            elif t.dim() == 3 and t.shape[0] == full[0]:
                remedy = f"{name}[:, None] when it lacks the heads"
            elif t.dim() > 4:
                remedy = (
                    f"{name}.flatten(0, {t.dim() - 4}) when the batch is spread over dimensions"
                )
            raise ShapeError(
                f"attention: {name} has shape {tuple(t.shape)}, which does not broadcast to "
                f"[B, Hq, Lq, Lk] = {full}. Try: {remedy}."
            )
    if shown.lengths is not None and shown.lengths.shape[0] != q.shape[0]:
        raise ShapeError(
            f"attention: key_lengths has {shown.lengths.shape[0]} entries, q has batch "
            f"{q.shape[0]}; it must have one entry for each sequence. Try: key_lengths.expand(B) "
            "when they share one length."
        )
    for name, t in (("mask", shown.visible), ("bias", bias), ("key_lengths", shown.lengths)):
        if t is not None and t.device != q.device:
            raise DeviceError(
                f"attention: {name} is on {t.device}, q on {q.device}; they must be on the same "
                f"device. Try: {name}.to(q.device)."
            )


def check_options(
    name: str,
    q: torch.Tensor,
    scale: float | None,
    dropout_p: float,
    scores: object,
    config: AttentionConfig | None,
    backward_config: AttentionBackwardConfig | None,
) -> float:
    """Refuse options out of range; return the scale.

    Raises:
        OptionError: If one is out of range.
        UnsupportedError: If one is not supported yet.
    """
    check_probability(name, dropout_p)
    if scores is not None:
        raise UnsupportedError(
            f"{name}: scores is {scores!r}; no backend changes the scores yet, only None is "
            "accepted. Try: express it as bias=."
        )
    if config is not None and not isinstance(config, _CONFIGS):
        raise OptionError(
            f"{name}: config is a {type(config).__name__}; it must be one of "
            "ReferenceConfig, TritonConfig, GluonSm90Config, or None."
        )
    if backward_config is not None and not isinstance(backward_config, _BACKWARD_CONFIGS):
        raise OptionError(
            f"{name}: backward_config is a {type(backward_config).__name__}; it must be one of "
            "ReferenceConfig, TritonBackwardConfig, GluonSm90BackwardConfig, or None."
        )
    if scale is None:
        return 1.0 / math.sqrt(q.shape[-1]) if q.shape[-1] else 1.0
    if isinstance(scale, torch.SymFloat):  # under torch.compile: known when it runs
        return scale  # pyright: ignore[reportReturnType]
    is_number = isinstance(scale, (int, float)) and not isinstance(scale, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not is_number or not abs(scale) <= _LARGEST:
        raise OptionError(
            f"{name}: scale is {scale!r}; it must be a finite Python number. Try: "
            "scale=None for 1 / sqrt(D), or scale.item()."
        )
    return float(scale)
