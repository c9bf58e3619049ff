"""The masks of transformers as masks of tileloom: what `integrations.hf_attention` registers.

transformers asks a mask function once a forward pass (not once a layer) for the mask of an
attention: query `i` sees key `j` when ``mask_function(b, h, i + q_offset, j + kv_offset)`` says so
and the 2-D padding mask shows the key. Known mask functions (causal, bidirectional, both sliding
windows) become a `tileloom.masks` value, which costs no `[B, 1, Lq, Lk]` tensor and which the
Hopper kernel takes; any other one becomes the bool tensor that transformers itself would make.

The value travels through the model's code as a `LazyMask`: a bool tensor for everybody who looks
at it, that is written out only if somebody computes with it.

transformers is imported inside functions: this module costs nothing until it is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from tileloom import log
from tileloom.errors import OptionError, UnsupportedError
from tileloom.ops.attention import masks
from tileloom.ops.attention.masks import Band, Mask

Padding = Literal["auto", "right", "unknown"]

_log = log.get_logger("transformers")


class LazyMask(torch.Tensor):
    """A bool mask `[B, 1, Lq, Lk]` that is written out only when an operation needs its values.

    `tileloom_mask` holds the same mask as a value of `tileloom.masks`. Slicing, moving, comparing,
    or adding to it gives the plain tensors that the written-out mask gives, so that a model which
    handles masks itself stays right; it only loses the shortcut.
    """

    tileloom_mask: Mask
    _write_out: Callable[[], torch.Tensor]

    @classmethod
    def of(
        cls,
        value: Mask,
        write_out: Callable[[], torch.Tensor],
        size: tuple[int, int, int, int],
        device: torch.device,
    ) -> LazyMask:
        """Make a mask of a given size on a device.

        Args:
            value: The mask itself.
            write_out: Gives the same mask as a bool tensor of that size, True = visible.
            size: `(B, 1, Lq, Lk)`.
            device: Where the written-out mask lies.

        Returns:
            The mask; no memory is allocated on the device.
        """
        self = torch.Tensor._make_wrapper_subclass(cls, size, dtype=torch.bool, device=device)
        self.tileloom_mask = value
        self._write_out = write_out
        return self

    def dense(self) -> torch.Tensor:
        """Write the mask out as a plain bool tensor, `[B, 1, Lq, Lk]`, True = visible."""
        _log.info("a mask %s is written out as a bool tensor", tuple(self.shape))
        return self._write_out()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Say what it is without writing it out."""
        del tensor_contents
        return f"LazyMask(shape={tuple(self.shape)}, {self.tileloom_mask})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run any operation on the written-out mask; refuse to write into it.

        Raises:
            UnsupportedError: If the operation writes into the mask: attention would not see it.
        """
        if func._schema.is_mutable and args and isinstance(args[0], LazyMask):
            raise UnsupportedError(
                f"LazyMask: {func} writes into a mask of tileloom in place, which attention would "
                "not see. Try: mask = mask.clone() before writing, and pass that on."
            )
        args, kwargs = pytree.tree_map_only(LazyMask, LazyMask.dense, (args, kwargs or {}))
        return func(*args, **kwargs)


def is_traced(tensor: torch.Tensor | None) -> bool:
    """Whether a tensor has no values as yet: under tracing, or where it is fake."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return True
    if tensor is None:
        return False
    from torch._subclasses.fake_tensor import FakeTensor

    return tensor.is_meta or isinstance(tensor, (FakeTensor, torch.fx.Proxy))


def is_captured(tensor: torch.Tensor) -> bool:
    """Whether a CUDA graph is being captured, so that the host must not wait for values."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def band_of(mask_function: Callable[..., Any]) -> tuple[int | None, int | None] | None:
    """Recognise a mask function of transformers as a diagonal band.

    Args:
        mask_function: What transformers passes to a mask interface.

    Returns:
        How far a query sees to the left and to the right, None for all the way; or None when the
        function is not one of the four that are known (by the identity of its code).
    """
    from transformers import masking_utils as hf

    if mask_function is hf.causal_mask_function:
        return None, 0
    if mask_function is hf.bidirectional_mask_function:
        return None, None
    parts = _closure(mask_function, hf.and_masks(hf.causal_mask_function), "mask_functions")
    if not isinstance(parts, tuple) or len(parts) != 2:
        return None
    overlay, base = parts
    if base is hf.causal_mask_function:
        size = _closure(overlay, hf.sliding_window_overlay(1), "sliding_window")
        return (size - 1, 0) if isinstance(size, int) and size >= 1 else None
    if base is hf.bidirectional_mask_function:
        template = hf.sliding_window_bidirectional_overlay(1)
        size = _closure(overlay, template, "sliding_window")
        return (size, size) if isinstance(size, int) and size >= 0 else None
    return None


def _closure(function: Any, template: Any, name: str) -> Any:
    """The variable `name` that a function closed over, if it has the template's very code."""
    code = getattr(function, "__code__", None)
    if code is None or code is not template.__code__ or name not in code.co_freevars:
        return None
    return function.__closure__[code.co_freevars.index(name)].cell_contents


def place_band(
    left: int | None, right: int | None, len_q: int, len_k: int, shift: int
) -> Mask | None:
    """Write a band whose diagonal is shifted as a mask of tileloom.

    Args:
        left: Keys visible before the query's position, None for all.
        right: Keys visible after it, None for all.
        len_q: Number of queries, Lq.
        len_k: Number of keys, Lk.
        shift: Query i stands at key i + shift.

    Returns:
        The mask, with bounds that hide nothing left out; None if tileloom has no such mask.
    """
    if right is not None and right + shift >= len_k - 1:
        right = None
    if left is not None and left - shift >= len_q - 1:
        left = None
    mask = Mask(Band())
    if right is not None:
        if right + shift < 0:
            return None
        mask = mask & masks.window(None, right + shift)
    if left is not None:
        if left - shift >= 0:
            mask = mask & masks.window(left - shift, None)
        elif shift == len_k - len_q:
            mask = mask & masks.window(left, None, anchor="bottom_right")
        else:
            return None
    return mask


def place_padding(shown: torch.Tensor, padding: Padding, *, bottom_anchored: bool) -> Mask:
    """Write a padding mask as a mask of tileloom.

    Args:
        shown: Which keys are no padding, `[B, Lk]`, bool.
        padding: What is known of it; see `hf_attention.register`.
        bottom_anchored: Whether the mask it is combined with counts from the last key. Such a
            band would follow `key_lengths`, so lengths cannot be used beside it.

    Returns:
        Nothing hidden, `key_lengths`, or a dense mask `[B, 1, 1, Lk]`.

    Raises:
        OptionError: If `padding="right"` was promised and does not hold (on the CPU; on a GPU the
            promise is checked by a device-side assertion, without waiting for it).
    """
    by_tensor = masks.dense(shown[:, None, None, :])
    if padding == "unknown" or (padding == "auto" and is_captured(shown)):
        return by_tensor
    lengths = shown.sum(1, dtype=torch.int32)
    places = torch.arange(shown.shape[1], device=shown.device)
    is_right = (shown == (places < lengths[:, None])).all()
    if padding == "right":
        _check_promise(is_right)
        return by_tensor if bottom_anchored else masks.key_lengths(lengths)
    # The one synchronisation of a forward pass; transformers' own SDPA mask has the same.
    full, right = torch.stack([shown.all(), is_right]).tolist()
    if full:
        return Mask(Band())
    return masks.key_lengths(lengths) if right and not bottom_anchored else by_tensor


def _check_promise(is_right: torch.Tensor) -> None:
    text = (
        "register: padding is 'right', but this batch has padding before or between its tokens. "
        "Try: padding='auto', which looks once a forward pass, or tokenizer.padding_side='right'."
    )
    if is_right.is_cuda:
        torch._assert_async(is_right, text)  # pyright: ignore[reportPrivateImportUsage]
    elif not is_right:
        raise OptionError(text)


def make_mask(padding: Padding, options: dict[str, Any]) -> torch.Tensor:
    """Do the work of a mask interface of transformers.

    Args:
        padding: What is known of the padding; see `hf_attention.register`.
        options: The keyword arguments that transformers passes to a mask interface.

    Returns:
        A `LazyMask`, or a plain bool tensor `[B, 1, Lq, Lk]` when the mask is none of ours.
        Never None, which would leave it to the module what is meant.
    """
    from transformers.masking_utils import sdpa_mask

    dense_options: dict[str, Any] = {
        **options,
        "allow_is_causal_skip": False,
        "allow_is_bidirectional_skip": False,
    }

    def write_out() -> torch.Tensor:
        mask = sdpa_mask(**dense_options)
        assert mask is not None, "sdpa_mask skipped a mask that it was told not to skip"
        return mask

    sizes = _sizes(options)
    value = None
    if sizes is not None and not is_traced(options.get("attention_mask")):
        value = _value(sizes, padding, options)
    if value is None or sizes is None:
        return write_out()
    batch, len_q, len_k, _, _ = sizes
    device = torch.device(options.get("device") or "cpu")
    return LazyMask.of(value, write_out, (batch, 1, len_q, len_k), device)


def _sizes(options: dict[str, Any]) -> tuple[int, int, int, int, int] | None:
    """`(B, Lq, Lk, q_offset, kv_offset)`, or None when they are not plain integers."""
    names = ("batch_size", "q_length", "kv_length", "q_offset", "kv_offset")
    sizes = tuple(options.get(name, 0) for name in names)
    # A static cache keeps its offset on the GPU, so that a captured graph can be replayed.
    if "q_length" not in options or any(type(size) is not int for size in sizes):
        return None
    batch, len_q, len_k, q_offset, kv_offset = sizes
    return batch, len_q, len_k, q_offset, kv_offset


def _value(
    sizes: tuple[int, int, int, int, int], padding: Padding, options: dict[str, Any]
) -> Mask | None:
    _, len_q, len_k, q_offset, kv_offset = sizes
    band = None
    with contextlib.suppress(AttributeError, KeyError):
        band = band_of(options["mask_function"])
    if band is None:
        return None
    placed = place_band(*band, len_q, len_k, q_offset - kv_offset)
    shown = options.get("attention_mask")
    if placed is None or shown is None:
        return placed
    if shown.dim() != 2 or shown.dtype is not torch.bool:
        return None
    missing = max(kv_offset + len_k - shown.shape[1], 0)
    shown = torch.nn.functional.pad(shown, (0, missing))[:, kv_offset : kv_offset + len_k]
    bottom_anchored = placed.band.left_bottom is not None or placed.band.right_bottom is not None
    return placed & place_padding(shown, padding, bottom_anchored=bottom_anchored)
