"""Which keys a query may see, as a frozen value: `causal`, `window`, `key_lengths`, and `&`.

A mask is kept in its normal form, so that every backend has one thing to implement. With row `i`,
column `j`, `n` the number of keys of the sequence and `s = n - Lq` the shift between the anchors,
key `j` is visible when

    i - left_top <= j <= i + right_top                  (anchor "top_left")
    i + s - left_bottom <= j <= i + s + right_bottom    (anchor "bottom_right")
    j < n

and `dense[b, h, i, j]` is True where such a tensor is given. Every combination with `&` has this
form: the smaller of two bounds is the bound of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from tileloom.errors import (
    DeviceError,
    DtypeError,
    OptionError,
    ShapeError,
    known_keywords,
    shown_value,
)

Anchor = Literal["top_left", "bottom_right"]
Bound = int | None
_FAR = 2**62  # beyond every length, and still an int64


@dataclass(frozen=True)
class Band:
    """The diagonal band of a mask: four bounds, None where there is none."""

    left_top: Bound = None
    right_top: Bound = None
    left_bottom: Bound = None
    right_bottom: Bound = None

    @property
    def is_unbounded(self) -> bool:
        """Whether every key is visible as far as the band goes."""
        return (
            self.left_top is None
            and self.right_top is None
            and self.left_bottom is None
            and self.right_bottom is None
        )

    @property
    def has_left(self) -> bool:
        """Whether a key can be too far to the left."""
        return self.left_top is not None or self.left_bottom is not None

    @property
    def has_right(self) -> bool:
        """Whether a key can be too far to the right."""
        return self.right_top is not None or self.right_bottom is not None

    def clamped(self, len_q: int, len_k: int) -> tuple[int, int, int, int]:
        """Return the four bounds as integers that kernels can add to without overflow.

        Args:
            len_q: Number of queries.
            len_k: Number of keys.

        Returns:
            `(left_top, right_top, left_bottom, right_bottom)`, each at most `len_q + len_k`,
            which hides nothing and so also stands for None.
        """
        most = len_q + len_k
        bounds = (self.left_top, self.right_top, self.left_bottom, self.right_bottom)
        left_top, right_top, left_bottom, right_bottom = (
            most if b is None else min(b, most) for b in bounds
        )
        return left_top, right_top, left_bottom, right_bottom


def _smaller(a: Bound, b: Bound) -> Bound:
    if a is None:
        return b
    return a if b is None else min(a, b)


@dataclass(frozen=True, eq=False)
class Mask:
    """A mask in normal form. Make one with `causal`, `window`, `key_lengths` or `dense`.

    Attributes:
        band: The diagonal band.
        lengths: Number of visible keys of each sequence, `[B]`, int32 or int64, or None. Values
            outside `0 .. Lk` count as the nearest bound.
        visible: A bool tensor that broadcasts to `[B, Hq, Lq, Lk]`, True = visible, or None.
    """

    band: Band
    lengths: torch.Tensor | None = None
    visible: torch.Tensor | None = None

    def __and__(self, other: Mask | torch.Tensor) -> Mask:
        """Return the mask of the keys that both masks show.

        Inside `torch.compile(fullgraph=True)` write `masks.dense(tensor)` for a tensor.

        Raises:
            ShapeError: If both have lengths and not as many, or their tensors do not broadcast.
            DeviceError: If tensors lie on different devices.
        """
        if not isinstance(other, (Mask, torch.Tensor)):  # pyright: ignore[reportUnnecessaryIsInstance]
            return NotImplemented
        if isinstance(other, torch.Tensor):
            other = dense(other)
        a, b = self.band, other.band
        band = Band(
            _smaller(a.left_top, b.left_top),
            _smaller(a.right_top, b.right_top),
            _smaller(a.left_bottom, b.left_bottom),
            _smaller(a.right_bottom, b.right_bottom),
        )
        lengths, visible = self.lengths, self.visible
        _combinable("lengths", lengths, other.lengths)
        _combinable("visible", visible, other.visible)
        if other.lengths is not None:
            lengths = other.lengths if lengths is None else torch.minimum(lengths, other.lengths)
        if other.visible is not None:
            visible = other.visible if visible is None else visible & other.visible
        return Mask(band, lengths, visible)

    __rand__ = __and__

    def materialize(
        self, batch: int, len_q: int, len_k: int, device: torch.device | str | None = None
    ) -> torch.Tensor:
        """Write the mask out as a bool tensor.

        Args:
            batch: Number of sequences, B.
            len_q: Number of queries, Lq.
            len_k: Number of keys, Lk.
            device: Where to; default: where the mask's own tensors are, else the CPU.

        Returns:
            Bool, True = visible, `[B or 1, H or 1, Lq, Lk]`: as small as broadcasting allows.

        Raises:
            OptionError: If a size is no number from 0.
            ShapeError: If the mask's own tensors do not fit the sizes.
        """
        _check_sizes(batch=batch, len_q=len_q, len_k=len_k)
        if self.lengths is not None and self.lengths.shape[0] != batch:
            raise ShapeError(
                f"masks: batch is {batch}, and key_lengths has {self.lengths.shape[0]} entries; "
                f"both must be the same. Try: batch={self.lengths.shape[0]}."
            )
        own_sizes = () if self.visible is None else tuple(reversed(self.visible.shape))
        wanted = (("len_k", len_k), ("len_q", len_q), ("heads", None), ("batch", batch))
        for size, (name, given) in zip(own_sizes, wanted):
            if given is not None and size != 1 and size != given:
                raise ShapeError(
                    f"masks: {name} is {given}, and the mask's tensor has shape "
                    f"{tuple(reversed(own_sizes))}; it must broadcast to [batch, heads, len_q, "
                    f"len_k]. Try: {name}={size}."
                )
        if device is None:
            own = self.lengths if self.lengths is not None else self.visible
            device = own.device if own is not None else "cpu"
        if self.band.is_unbounded and self.lengths is None:
            everything = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
            everything = everything.expand(1, 1, len_q, len_k)
            return everything if self.visible is None else everything & self.visible.to(device)
        rows = torch.arange(len_q, device=device)[:, None]
        cols = torch.arange(len_k, device=device)[None, :]
        if self.lengths is None:
            n = torch.full((1, 1, 1, 1), len_k, device=device)
        else:
            n = self.lengths.to(device).long().clamp(0, len_k).view(batch, 1, 1, 1)
        left_top, right_top, left_bottom, right_bottom = self.band.clamped(len_q, len_k)
        away, shift = cols - rows, n - len_q
        shown = (away >= -left_top) & (away <= right_top) & (cols < n)
        shown = shown & (away >= shift - left_bottom) & (away <= shift + right_bottom)
        return shown if self.visible is None else shown & self.visible.to(device)


def _combinable(name: str, a: torch.Tensor | None, b: torch.Tensor | None) -> None:
    """Refuse two tensors of masks that `&` cannot put together."""
    if a is None or b is None:
        return
    if a.device != b.device:
        raise DeviceError(
            f"masks: {name} of one mask is on {a.device}, of the other on {b.device}; they must be "
            f"on the same device. Try: {name}.to({str(a.device)!r})."
        )
    pairs = zip(reversed(a.shape), reversed(b.shape))
    is_fit = not any(n != m and (name == "lengths" or (n != 1 and m != 1)) for n, m in pairs)
    if not is_fit:
        raise ShapeError(
            f"masks: {name} of one mask has shape {tuple(a.shape)}, of the other {tuple(b.shape)}; "
            "they must fit each other. Try: masks that are made for the same call."
        )


def _check_sizes(**sizes: object) -> None:
    for name, size in sizes.items():
        if not isinstance(size, (int, torch.SymInt)) or isinstance(size, bool) or size < 0:
            raise OptionError(
                f"masks: {name} is {shown_value(size)}; it must be an int >= 0. Try: the size of "
                "the call's tensors."
            )


def _anchor(name: str, anchor: str) -> None:
    if not isinstance(anchor, str) or anchor not in ("top_left", "bottom_right"):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionError(
            f"masks.{name}: anchor is {shown_value(anchor)}; it must be 'top_left' or "
            "'bottom_right'."
        )


def _tensor(function: str, name: str, given: object) -> None:
    if not isinstance(given, torch.Tensor):
        raise DtypeError(
            f"masks.{function}: {name} is a {type(given).__name__}; it must be a torch.Tensor. "
            f"Try: torch.tensor({name})."
        )


@known_keywords
def causal(anchor: Anchor = "top_left") -> Mask:
    """Show each query the keys up to its own position.

    Args:
        anchor: ``"top_left"``: query i sees keys 0..i. ``"bottom_right"``: the last query sees
            the last key of its sequence, so query i sees keys 0..i + n - Lq, where n is the
            sequence's own number of keys (`key_lengths`, else Lk).

    Returns:
        A frozen mask; combine it with others by `&`.

    Raises:
        OptionError: If the anchor is neither.
    """
    _anchor("causal", anchor)
    return window(None, 0, anchor=anchor)


@known_keywords
def window(left: int | None, right: int | None, *, anchor: Anchor = "top_left") -> Mask:
    """Show each query the keys at most `left` before and `right` after its own position.

    Args:
        left: Number of keys visible before the query's position, or None for all.
        right: Number of keys visible after it, or None for all.
        anchor: Where the diagonal lies when Lq and the number of keys differ; see `causal`.

    Returns:
        A frozen mask; combine it with others by `&`.

    Raises:
        OptionError: If a bound is negative or not an integer, or the anchor is unknown.
    """
    _anchor("window", anchor)
    for name, bound in (("left", left), ("right", right)):
        if bound is None:
            continue
        is_number = isinstance(bound, (int, torch.SymInt)) and not isinstance(bound, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not is_number or bound < 0:
            remedy = f"{name}=None where other libraries take -1"
            if not is_number and not isinstance(bound, bool) and hasattr(bound, "__index__"):
                remedy = f"int({name})"
            raise OptionError(
                f"masks.window: {name} is {shown_value(bound)}; it must be an int >= 0, or None "
                f"for 'no bound'. Try: {remedy}."
            )
    left, right = (b if b is None else min(b, _FAR) for b in (left, right))
    if anchor == "top_left":
        return Mask(Band(left_top=left, right_top=right))
    return Mask(Band(left_bottom=left, right_bottom=right))


@known_keywords
def key_lengths(lengths: torch.Tensor) -> Mask:
    """Show of each sequence only its first keys: the mask of a right-padded batch.

    Args:
        lengths: Number of visible keys of each sequence, `[B]`, int32 or int64, on the device of
            the keys. It is read by the kernel, never by the host: no synchronisation.

    Returns:
        A frozen mask; combine it with others by `&`.

    Raises:
        ShapeError: If it is not one-dimensional.
        DtypeError: If it is not int32 or int64.
    """
    _tensor("key_lengths", "lengths", lengths)
    if lengths.dim() != 1:
        raise ShapeError(
            f"masks.key_lengths: lengths has shape {tuple(lengths.shape)}; it must be [B], one "
            "number of keys for each sequence. Try: lengths.reshape(-1)."
        )
    if lengths.dtype not in (torch.int32, torch.int64):
        raise DtypeError(
            f"masks.key_lengths: lengths has dtype {lengths.dtype}; supported: torch.int32, "
            "torch.int64. Try: lengths.to(torch.int32)."
        )
    return Mask(Band(), lengths=lengths)


@known_keywords
def dense(visible: torch.Tensor) -> Mask:
    """Wrap a bool tensor, so that it can be combined with other masks.

    Args:
        visible: Bool, True = visible, broadcastable to `[B, Hq, Lq, Lk]`.

    Returns:
        A frozen mask; combine it with others by `&`.

    Raises:
        DtypeError: If the tensor is not bool.
    """
    _tensor("dense", "visible", visible)
    return dense_of("masks.dense", "visible", visible)


def dense_of(function: str, name: str, visible: torch.Tensor) -> Mask:
    """Wrap a bool tensor that a function got under some name.

    Raises:
        DtypeError: If the tensor is not bool.
    """
    if visible.dtype is not torch.bool:
        remedy = f"{name}.bool()"
        if visible.is_floating_point():
            remedy = "pass numbers to add to the scores as bias= instead"
        raise DtypeError(
            f"{function}: {name} has dtype {visible.dtype}; supported: torch.bool (True = "
            f"visible). Try: {remedy}."
        )
    return Mask(Band(), visible=visible)
