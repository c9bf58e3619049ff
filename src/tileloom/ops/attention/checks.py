"""What `attention` asks of its arguments: a sentence for each that does not fit.

The operators ask the same where they have no plan yet, so that no kernel sees sizes that do not fit
each other, whoever calls.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import get_args

import torch

from tileloom.errors import (
    DeviceError,
    DtypeError,
    OptionError,
    ShapeError,
    UnsupportedError,
    shown_value,
)
from tileloom.ops.attention import masks
from tileloom.ops.attention.config import (
    AttentionConfig,
    GluonSm90Config,
    ReferenceConfig,
    TritonConfig,
)
from tileloom.ops.attention.config_backward import AttentionBackwardConfig
from tileloom.ops.attention.masks import Band, Mask, causal, dense_of
from tileloom.ops.attention.reference import check_probability

_LARGEST = torch.finfo(torch.float32).max  # the precision of the softmax
_CONFIGS = (ReferenceConfig, TritonConfig, GluonSm90Config)
_BACKWARD_CONFIGS = get_args(AttentionBackwardConfig)


def check_return_lse(name: str, return_lse: object) -> None:
    """Refuse what only counts as true or false."""
    if not isinstance(return_lse, bool):
        raise OptionError(
            f"{name}: return_lse is {shown_value(return_lse)}; it must be True or False."
        )


def resolve_mask(name: str, mask: Mask | torch.Tensor | None, is_causal: bool) -> Mask:
    """Return what a function's `mask` and `is_causal` mean together.

    Raises:
        OptionError: If one is of a type that is not accepted.
    """
    if not isinstance(is_causal, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionError(
            f"{name}: is_causal is {shown_value(is_causal)}; it must be True or False. Try: "
            "mask=tileloom.masks.causal(...) for another anchor."
        )
    if mask is None:
        shown = Mask(Band())
    elif isinstance(mask, torch.Tensor):
        shown = dense_of(name, "mask", mask)
    elif isinstance(mask, Mask):
        shown = mask
    else:
        raise OptionError(
            f"{name}: mask is a {type(mask).__name__}; it must be a bool tensor, a value of "
            "tileloom.masks, or None. Try: tileloom.masks.causal() for a causal one, "
            "torch.as_tensor(mask) for an array."
        )
    return shown & causal() if is_causal else shown


def check_dense(function: str, name: str, given: object, *, remedy: str = "") -> None:
    """Refuse what is no dense tensor.

    Args:
        function: The function's name.
        name: The argument's.
        given: What the caller gave.
        remedy: What to do with a nested tensor.

    Raises:
        DtypeError: If it is none.
    """
    if not isinstance(given, torch.Tensor):
        raise DtypeError(
            f"{function}: {name} is a {type(given).__name__}; it must be a torch.Tensor. Try: "
            f"torch.as_tensor({name})."
        )
    if given.is_nested:
        remedy = remedy or f"{name}.to_padded_tensor(0.0)"
        raise DtypeError(
            f"{function}: {name} is a nested tensor; supported: dense strided tensors. Try: "
            f"{remedy}."
        )
    if given.layout is not torch.strided:
        raise DtypeError(
            f"{function}: {name} is a {given.layout} tensor; supported: dense strided tensors. "
            f"Try: {name}.to_dense()."
        )


def table(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    """Print shapes, dtypes, devices and strides, a line for each tensor."""
    rows = [
        f"  {name}: shape {tuple(t.shape)}, {t.dtype}, {t.device}, strides {t.stride()}"
        for name, t in (("q", q), ("k", k), ("v", v))
    ]
    return "\n".join(rows)


def _shape_error(what: str, expected: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                 remedy: str) -> ShapeError:  # fmt: skip
    return ShapeError(
        f"attention: {what}.\n{table(q, k, v)}\n  Expected: {expected}. Try: {remedy}."
    )


def check_dtype(function: str, name: str, t: torch.Tensor) -> None:
    """Refuse a dtype that no backend takes."""
    if not t.dtype.is_floating_point or t.dtype.itemsize < 2:
        raise DtypeError(
            f"{function}: {name} has dtype {t.dtype}; supported: torch.float16, torch.bfloat16, "
            f"torch.float32, torch.float64. Try: {name}.to(torch.bfloat16)."
        )


def check_beside_q(function: str, name: str, t: torch.Tensor, q: torch.Tensor) -> None:
    """Refuse keys or values of another dtype or on another device than the queries."""
    if t.dtype != q.dtype:
        raise DtypeError(
            f"{function}: {name} has dtype {t.dtype}, q has {q.dtype}; they must be the same. "
            f"Try: {name}.to(q.dtype)."
        )
    if t.device != q.device:
        raise DeviceError(
            f"{function}: {name} is on {t.device}, q on {q.device}; they must be on the same "
            f"device. Try: {name}.to(q.device)."
        )


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse tensors that do not fit each other.

    Raises:
        ShapeError: If sizes do not fit.
        DtypeError: If one is no dense tensor, or dtypes differ or are not supported.
        DeviceError: If the tensors lie on different devices.
    """
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_dense(
            *("attention", name, t),
            remedy=f"{name}.to_padded_tensor(0.0) and masks.key_lengths, or attention_varlen, "
            "which takes jagged ones as values() and offsets()",
        )
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 4:
            raise _shape_error(
                f"{name} has {t.dim()} dimensions", "[B, H, L, D] for each of q, k and v", q, k, v,
                f"{name}.unsqueeze(0) when it lacks the batch"
            )  # fmt: skip
        check_dtype("attention", name, t)
    for name, t in (("k", k), ("v", v)):
        check_beside_q("attention", name, t, q)
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


def broadcasts(shape: Sequence[int], full: tuple[int, ...]) -> bool:
    """Whether a shape broadcasts to another one of four dimensions."""
    if len(shape) > 4:
        return False
    # Not `n in (1, m)`, which torch.compile answers with no where m is a symbol.
    return not any(n != 1 and n != m for n, m in zip(reversed(shape), reversed(full)))


def check_bias_and_mask(function: str, shown: Mask, bias: torch.Tensor | None) -> None:
    """Refuse a bias, a mask or key lengths that are no dense tensors, or a bias of no floats.

    Raises:
        DtypeError: If one is such.
    """
    for name, t in (("mask", shown.visible), ("bias", bias), ("key_lengths", shown.lengths)):
        if t is not None:
            check_dense(function, name, t)
    if bias is not None and (not bias.dtype.is_floating_point or bias.dtype.itemsize < 2):
        hint = "pass it as mask=" if bias.dtype is torch.bool else "bias.to(q.dtype)"
        raise DtypeError(
            f"{function}: bias has dtype {bias.dtype}; supported: torch.float16, torch.bfloat16, "
            f"torch.float32, torch.float64. Try: {hint}."
        )


def _fitting(name: str, t: torch.Tensor, full: tuple[int, int, int, int]) -> str:
    """Say what to do with a mask or a bias that does not broadcast to the scores."""
    if t.dim() > 4:
        return f"{name}.flatten(0, {t.dim() - 4}) when the batch is spread over dimensions"
    if t.dim() == 2 and tuple(t.shape) == (full[0], full[3]):
        return f"{name}[:, None, None] for one row of keys for each sequence"
    if t.dim() == 3 and broadcasts((t.shape[0], 1, *t.shape[1:]), full):
        return f"{name}[:, None] when it lacks the heads"
    if any(broadcasts(_placed(t, at), full) for at in itertools.combinations(range(4), t.dim())):
        return f"give {name} four dimensions, of size 1 where it is the same for all"
    sizes = zip(reversed(t.shape), reversed(full), ("keys", "queries", "heads", "sequences"))
    wrong = [
        f"{want} {what} in place of {size}" for size, want, what in sizes if size not in (1, want)
    ]
    return f"a {name} of {', '.join(reversed(wrong))}, or of size 1 there"


def _placed(t: torch.Tensor, at: Sequence[int]) -> tuple[int, ...]:
    """The shape of a tensor whose dimensions stand at some of four places."""
    sizes = dict(zip(at, t.shape))
    return tuple(sizes.get(place, 1) for place in range(4))


def check_extras(q: torch.Tensor, k: torch.Tensor, shown: Mask, bias: torch.Tensor | None) -> None:
    """Refuse a mask, a bias or key lengths that do not fit q and k.

    Raises:
        ShapeError: If one does not broadcast to the scores, or has not an entry for each sequence.
        DtypeError: If one is no dense tensor, or the bias is no floating tensor.
        DeviceError: If one is not where q is.
    """
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    check_bias_and_mask("attention", shown, bias)
    for name, t in (("mask", shown.visible), ("bias", bias)):
        if t is not None and not broadcasts(t.shape, full):
            raise ShapeError(
                f"attention: {name} has shape {tuple(t.shape)}, which does not broadcast to "
                f"[B, Hq, Lq, Lk] = {full}. Try: {_fitting(name, t, full)}."
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
            f"{name}: scores is {shown_value(scores)}; no backend changes the scores yet, only "
            "None is accepted. Try: express it as bias=."
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
            f"{name}: scale is {shown_value(scale)}; it must be a finite Python number. Try: "
            "scale=None for 1 / sqrt(D), or scale.item()."
        )
    return float(scale)


def check_operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
    band: Band,
    scale: float,
) -> None:
    """Refuse, where an operator is called by itself, what `attention` would have refused.

    Raises:
        TileloomError: As `check_tensors` and `check_extras` do.
        OptionError: If a bound of the band is negative or the scale is not finite.
    """
    check_tensors(q, k, v)
    check_extras(q, k, mask_of("attention", mask, key_lengths, band, scale), bias)


def mask_of(
    name: str,
    mask: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
    band: Band,
    scale: float,
) -> Mask:
    """Put together what an operator got of a mask; the scale is looked at on the way.

    Raises:
        OptionError: If a bound is negative or the scale is not finite.
        ShapeError: If the lengths are not one-dimensional.
        DtypeError: If the mask is not bool, or the lengths are no integers.
    """
    bounds = (band.left_top, band.right_top, band.left_bottom, band.right_bottom)
    if any(bound is not None and bound < 0 for bound in bounds):
        raise OptionError(
            f"{name}: left_top, right_top, left_bottom and right_bottom are {bounds}; each must be "
            "an int >= 0 or None. Try: None for no bound."
        )
    if not abs(scale) <= _LARGEST:
        raise OptionError(f"{name}: scale is {scale}; it must be finite. Try: scale=1 / sqrt(D).")
    shown = Mask(band)
    if mask is not None:
        shown = shown & dense_of(name, "mask", mask)
    if key_lengths is not None:
        shown = shown & masks.key_lengths(key_lengths)
    return shown


def check_gradients(
    name: str,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    sizes: tuple[int, int, int, int],
    like: torch.Tensor,
) -> None:
    """Refuse what an operator of a backward got of a forward's results and their gradients.

    Args:
        name: The operator's.
        dout: Gradient of O.
        dlse: Gradient of LSE, or None.
        out: O.
        lse: LSE.
        sizes: What O has to have, `(B, Hq, Lq, Dv)`.
        like: q.

    Raises:
        ShapeError: If a shape is not that of the forward's result.
        DtypeError: If dout or out has not q's dtype, or LSE not float32 (float64 for float64).
        DeviceError: If one is not where q is.
    """
    for text, t, shape in (
        ("dout", dout, sizes), ("out", out, sizes), ("lse", lse, sizes[:3]),
        ("dlse", dlse, sizes[:3]),
    ):  # fmt: skip
        if t is None:
            continue
        if tuple(t.shape) != shape:
            raise ShapeError(
                f"{name}: {text} has shape {tuple(t.shape)}; it must be {shape}. Try: what the "
                "forward gave."
            )
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        wanted = like.dtype if len(shape) == 4 else wide
        if t.dtype != wanted:
            raise DtypeError(
                f"{name}: {text} has dtype {t.dtype}; it must be {wanted}. Try: what the forward "
                "gave."
            )
        if t.device != like.device:
            raise DeviceError(
                f"{name}: {text} is on {t.device}, q on {like.device}; they must be on the same "
                f"device. Try: {text}.to(q.device)."
            )
