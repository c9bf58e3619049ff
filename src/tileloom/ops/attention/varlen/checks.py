"""What `attention_varlen` asks of its arguments: a sentence for each that does not fit."""

from __future__ import annotations

from itertools import pairwise

import torch

from tileloom import knobs
from tileloom.errors import DeviceError, DtypeError, OptionError, ShapeError, shown_value
from tileloom.ops.attention.checks import (
    broadcasts,
    check_beside_q,
    check_bias_and_mask,
    check_dense,
    check_dtype,
    mask_of,
    table,
)
from tileloom.ops.attention.masks import Band, Mask

_NAME = "attention_varlen"
_LONGEST = 2**31 - 1  # of int32 offsets


def _shape_error(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, what: str, expected: str, remedy: str
) -> ShapeError:
    return ShapeError(f"{_NAME}: {what}.\n{table(q, k, v)}\n  Expected: {expected}. Try: {remedy}.")


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse tensors that do not fit each other.

    Raises:
        ShapeError: If sizes do not fit.
        DtypeError: If one is no dense tensor, or dtypes differ or are not supported.
        DeviceError: If the tensors lie on different devices.
    """
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_dense(_NAME, name, t, remedy=f"{name}.values(), and its offsets() as cu_seqlens")
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 3:
            raise _shape_error(q, k, v, f"{name} has {t.dim()} dimensions",
                               "[T, H, D] for each of q, k and v",
                               "tileloom.attention for a padded batch [B, H, L, D]")  # fmt: skip
        check_dtype(_NAME, name, t)
    for name, t in (("k", k), ("v", v)):
        check_beside_q(_NAME, name, t, q)
    # Each text is made only where it is needed: a compiler takes a printed size for a constant.
    if v.shape[1] != k.shape[1]:
        raise _shape_error(q, k, v, f"k has {k.shape[1]} heads, v has {v.shape[1]}",
                           "the same number of heads in k and v",
                           "slice or expand the heads of one")  # fmt: skip
    if (q.shape[1] % k.shape[1]) if k.shape[1] else q.shape[1]:
        raise _shape_error(q, k, v, f"k has {k.shape[1]} heads, q has {q.shape[1]}",
                           "Hq a multiple of Hkv (grouped heads)",
                           "k.repeat_interleave(...) if the groups are uneven")  # fmt: skip
    if v.shape[0] != k.shape[0]:
        raise _shape_error(q, k, v, f"k has {k.shape[0]} rows, v has {v.shape[0]}",
                           "the same Tk in k and v", "slice the longer one")  # fmt: skip
    if k.shape[2] != q.shape[2]:
        raise _shape_error(q, k, v, f"k has head dim {k.shape[2]}, q has {q.shape[2]}",
                           "the same D in q and k (v's may differ)",
                           "torch.nn.functional.pad(k, (0, D - k.shape[2]))")  # fmt: skip


def check_offsets(q: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> None:
    """Refuse offsets of a wrong shape, dtype or device; their values are not looked at.

    Raises:
        ShapeError: If they are not one-dimensional, empty, or of different sizes.
        DtypeError: If they are not int32.
        DeviceError: If they are not where q is.
    """
    for name, t in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(t, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DtypeError(
                f"{_NAME}: {name} is a {type(t).__name__}; it must be an int32 tensor [S + 1]. "
                f"Try: torch.tensor({name}, dtype=torch.int32, device=q.device)."
            )
        check_dense(_NAME, name, t)
        if t.dtype != torch.int32:
            raise DtypeError(
                f"{_NAME}: {name} has dtype {t.dtype}; it must be torch.int32. Try: "
                f"{name}.to(torch.int32)."
            )
        if t.dim() != 1 or t.shape[0] == 0:
            raise ShapeError(
                f"{_NAME}: {name} has shape {tuple(t.shape)}; it must be [S + 1]: 0, and where "
                "each sequence ends. Try: torch.nn.functional.pad(lengths.cumsum(0), (1, 0))."
            )
        if t.device != q.device:
            raise DeviceError(
                f"{_NAME}: {name} is on {t.device}, q on {q.device}; they must be on the same "
                f"device. Try: {name}.to(q.device)."
            )
    if cu_seqlens_q.shape[0] != cu_seqlens_k.shape[0]:
        raise ShapeError(
            f"{_NAME}: cu_seqlens_q has {cu_seqlens_q.shape[0]} entries, cu_seqlens_k "
            f"{cu_seqlens_k.shape[0]}; both must have one more than there are sequences. Try: the "
            "same tensor twice for self-attention."
        )


def bound_of(name: str, given: int | torch.Tensor, total: int) -> int:
    """Return the bound of a sequence's length; a tensor stays unread, and the bound is all rows.

    Raises:
        OptionError: If it is no number, negative, or above 2^31 - 1.
    """
    if isinstance(given, torch.Tensor):
        if given.dim() or given.is_floating_point() or given.dtype == torch.bool:
            raise OptionError(
                f"{_NAME}: {name} has dtype {given.dtype} and shape {tuple(given.shape)}; it must "
                "be an int, or an integer tensor without a dimension. Try: the number of all rows, "
                "if the lengths are on the GPU."
            )
        return total
    is_number = isinstance(given, (int, torch.SymInt)) and not isinstance(given, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not is_number or given < 0 or given > _LONGEST:
        remedy = "the number of all rows, if the lengths are on the GPU"
        if not is_number and not isinstance(given, bool) and hasattr(given, "__index__"):
            remedy = f"int({name})"
        raise OptionError(
            f"{_NAME}: {name} is {shown_value(given)}; it must be an int in 0 .. 2^31 - 1, the "
            f"length of the longest sequence or more. Try: {remedy}."
        )
    return given


def check_extras(
    q: torch.Tensor,
    full: tuple[int, int, int, int],
    shown: Mask,
    bias: torch.Tensor | None,
) -> None:
    """Refuse a mask, a bias or key lengths that do not fit `[S, Hq, max_q, max_k]`.

    Raises:
        ShapeError: If one does not broadcast to it.
        DtypeError: If one is no dense tensor, or the bias is no floating tensor.
        DeviceError: If one is not where q is.
    """
    check_bias_and_mask(_NAME, shown, bias)
    for name, t in (("mask", shown.visible), ("bias", bias)):
        if t is None:
            continue
        if not broadcasts(t.shape, full):
            raise ShapeError(
                f"{_NAME}: {name} has shape {tuple(t.shape)}, which does not broadcast to "
                f"[S, Hq, max_q, max_k] = {full}; rows and keys are counted inside each sequence. "
                f"Try: give {name} four dimensions, of size 1 where it is the same for all."
            )
    if shown.lengths is not None and shown.lengths.shape[0] != full[0]:
        raise ShapeError(
            f"{_NAME}: key_lengths has {shown.lengths.shape[0]} entries, and there are {full[0]} "
            "sequences; it must have one entry for each. Try: key_lengths.expand(S) when they "
            "share one length."
        )
    for name, t in (("mask", shown.visible), ("bias", bias), ("key_lengths", shown.lengths)):
        if t is not None and t.device != q.device:
            raise DeviceError(
                f"{_NAME}: {name} is on {t.device}, q on {q.device}; they must be on the same "
                f"device. Try: {name}.to(q.device)."
            )


def check_operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    padded: tuple[int, int, int],
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
    band: Band,
    scale: float,
) -> None:
    """Refuse, where an operator is called by itself, what `attention_varlen` would have refused.

    Raises:
        TileloomError: As `check_tensors`, `bound_of` and `check_extras` do.
    """
    check_tensors(q, k, v)
    sequences, max_q, max_k = padded
    full = (sequences, q.shape[1], bound_of("max_q", max_q, 0), bound_of("max_k", max_k, 0))
    check_extras(q, full, mask_of(_NAME, mask, key_lengths, band, scale), bias)


def check_values(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_q: int,
    max_k: int,
) -> None:
    """Refuse offsets that are wrong: on the CPU; on a GPU with the knob `debug.lengths` only.

    Raises:
        OptionError: If offsets do not begin with 0, fall, or do not end with the number of rows, or
            a sequence is longer than its bound.
    """
    if cu_seqlens_q.device.type != "cpu" and not knobs.get("debug.lengths"):
        return
    check_offsets(q, cu_seqlens_q, cu_seqlens_k)
    for x, cu, most, total in (
        ("q", cu_seqlens_q, max_q, q.shape[0]),
        ("k", cu_seqlens_k, max_k, k.shape[0]),
    ):
        ends: list[int] = cu.tolist()
        if ends[0] != 0:
            raise OptionError(
                f"{_NAME}: cu_seqlens_{x} begins with {ends[0]}; it must begin with 0. Try: "
                "torch.nn.functional.pad(lengths.cumsum(0), (1, 0))."
            )
        lengths = [b - a for a, b in pairwise(ends)]
        for s, length in enumerate(lengths):
            if length < 0:
                raise OptionError(
                    f"{_NAME}: cu_seqlens_{x} falls from {ends[s]} to {ends[s + 1]} at sequence "
                    f"{s}; it must never fall. Try: the cumulated lengths, not the lengths."
                )
        if ends[-1] != total:
            remedy = f"{x}[:{ends[-1]}] to leave rows out"
            if ends[-1] > total:
                remedy = f"lengths whose sum is {total}"
            raise OptionError(
                f"{_NAME}: cu_seqlens_{x} ends with {ends[-1]}, and {x} has {total} rows; both "
                f"must be the same. Try: {remedy}."
            )
        if lengths and max(lengths) > most:
            raise OptionError(
                f"{_NAME}: max_{x} is {most}, and sequence {lengths.index(max(lengths))} has "
                f"{max(lengths)} rows; it must be at least the length of the longest sequence. "
                f"Try: max_{x}={max(lengths)}."
            )
