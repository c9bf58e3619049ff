"""tileloom as an attention implementation of Hugging Face transformers.

    from tileloom.integrations import hf_attention
    with hf_attention.register():
        model = AutoModel.from_pretrained(path, attn_implementation="tileloom")
        ...

Two functions are registered, the attention and the mask. With the first alone transformers makes
no mask at all for a name it does not know, and every padded batch is wrong without a word.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, get_args

import torch

from tileloom.errors import (
    OptionError,
    TileloomError,
    UnsupportedError,
    known_keywords,
    shown_value,
)
from tileloom.integrations.hf_masks import LazyMask, Padding, make_mask
from tileloom.ops.attention import masks
from tileloom.ops.attention.api import attention

# What modules of transformers pass along to an attention function without changing its scores.
_HARMLESS = {
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "cu_seqlens",
    "deterministic",
    "encoder_hidden_states",
    "hidden_states",
    "max_length_k",
    "max_length_q",
    "max_seqlen",
    "mm_token_type_ids",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "seq_idx",
    "token_type_ids",
    "use_cache",
}
_MODIFIERS = {
    "softcap": "a soft cap on the scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "head_mask": "a factor on the weights of each head",
    "block_indices": "a choice of key blocks for each query",
    "block_table": "a paged cache",
    "cache": "a paged cache",
}


class MissingTransformersError(TileloomError, ImportError):
    """transformers is not installed, or too old to have an attention and a mask interface."""


@dataclass
class _Entry:
    """One registered name: our two functions, what stood there before, and how many hold it."""

    options: tuple[Padding, frozenset[str]]
    ours: tuple[Callable[..., Any], Callable[..., Any]]
    before: tuple[Any, Any]
    holders: int = 0


_entries: dict[str, _Entry] = {}
_lock = threading.Lock()


class Registration:
    """A hold on a registered name; the last one to be removed takes the name out again.

    Attributes:
        name: What to pass as ``attn_implementation``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._held = True

    def remove(self) -> None:
        """Give the hold back. Calling it again does nothing.

        With the last hold on a name, transformers gets back what it had under that name before,
        usually nothing: a model that still asks for it raises a `KeyError` in transformers.
        """
        with _lock:
            if not self._held:
                return
            self._held = False
            entry = _entries[self.name]
            entry.holders -= 1
            if entry.holders:
                return
            del _entries[self.name]
            for mapping, ours, before in zip(interfaces(), entry.ours, entry.before):
                if mapping.get(self.name) is not ours:
                    continue  # somebody registered another function over ours; it stays
                if before is None:
                    del mapping[self.name]
                else:
                    mapping[self.name] = before

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        """Name and state."""
        return f"Registration({self.name!r}, {'held' if self._held else 'removed'})"


@known_keywords
def register(
    name: str = "tileloom", *, padding: Padding = "auto", ignore: Iterable[str] = ()
) -> Registration:
    """Register tileloom's attention, and the masks it takes, with transformers under a name.

    Models loaded or switched to the name afterwards use it:
    ``AutoModel.from_pretrained(path, attn_implementation="tileloom")``, or
    ``model.set_attn_implementation("tileloom")``. Registering the same name again with the same
    options is harmless: each call returns its own hold.

    Args:
        name: The name; one that transformers knows already is replaced until `remove`.
        padding: How to learn whether a batch is padded on the right only, so that `key_lengths`
            (which the Hopper kernel takes) can stand for its padding mask. ``"auto"`` looks at the
            2-D mask once a forward pass: one synchronisation with a GPU, never one a layer, and
            none while a graph is captured or compiled. ``"right"`` takes the caller's word and
            synchronises nothing; a batch that breaks it raises on the CPU and stops the GPU with a
            device-side assertion. ``"unknown"`` never looks, and passes a bool tensor.
        ignore: Keyword arguments of the model's attention modules that do not change the scores.
            Unknown ones are refused otherwise, since one that does would be lost.

    Returns:
        A `Registration`: call its `remove`, or use it in a `with` statement.

    Raises:
        MissingTransformersError: If transformers cannot be imported or is older than version 5.
        OptionError: If the name is empty or held with other options, or `padding` is unknown.
    """
    if not isinstance(name, str) or not name or "/" in name or "|" in name:
        raise OptionError(
            f"register: name is {shown_value(name)}; it must be a text without '/' and '|', which "
            "transformers reads as a kernel on the Hub. Try: name='tileloom'."
        )
    if padding not in get_args(Padding):
        raise OptionError(
            f"register: padding is {shown_value(padding)}; it must be one of "
            f"{', '.join(get_args(Padding))}. Try: padding='auto'."
        )
    if isinstance(ignore, str):
        raise OptionError(
            f"register: ignore is the text {ignore!r}; it must be names of keyword arguments. "
            f"Try: ignore=({ignore!r},)."
        )
    names = tuple(ignore) if isinstance(ignore, Iterable) else (ignore,)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not all(isinstance(one, str) for one in names):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionError(
            f"register: ignore is {shown_value(ignore)}; it must be names of keyword arguments. "
            "Try: ignore=('my_argument',)."
        )
    options = (padding, frozenset(names))
    attention_map, mask_map = interfaces()
    with _lock:
        entry = _entries.get(name)
        if entry is None:
            ours = _functions(*options)
            before = (attention_map.get(name), mask_map.get(name))
            entry = _entries[name] = _Entry(options, ours, before)
            attention_map[name], mask_map[name] = ours
        elif entry.options != options:
            raise OptionError(
                f"register: '{name}' is registered with padding={entry.options[0]!r} and ignore="
                f"{sorted(entry.options[1])}. Try: remove that registration first, or another name."
            )
        entry.holders += 1
    return Registration(name)


def interfaces() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the two tables of transformers that all models share: attentions, then masks.

    Raises:
        MissingTransformersError: If transformers cannot be imported or is older than version 5.
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise MissingTransformersError(
            f"register: transformers 5 or later is needed, and importing it failed: {error}. "
            "Try: pip install 'transformers>=5'."
        ) from error
    return AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping


def _functions(
    padding: Padding, ignore: frozenset[str]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def tileloom_attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return attention_forward(*args, ignore=ignore, **kwargs)

    def tileloom_mask(**options: Any) -> torch.Tensor:
        return make_mask(padding, options)

    return tileloom_attention, tileloom_mask


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_bias: torch.Tensor | None = None,
    ignore: frozenset[str] = frozenset(),
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Run `tileloom.attention` as transformers runs an attention function.

    A mask, whoever made it, is the whole truth about what is visible, as in eager attention:
    `is_causal`, `module.is_causal` and `sliding_window` count only where there is none.

    Args:
        module: The attention module; its `is_causal` counts when the argument is None.
        query: `[B, Hq, Lq, D]`.
        key: `[B, Hkv, Lk, D]`; grouped heads are not repeated.
        value: `[B, Hkv, Lk, Dv]`.
        attention_mask: A `LazyMask`, a bool tensor (True = visible) or numbers to add to the
            scores, either broadcastable to `[B, Hq, Lq, Lk]`; or None.
        dropout: Probability that a weight is dropped; modules pass 0.0 in evaluation.
        scaling: Multiplier of the scores; None for `1 / sqrt(D)`.
        is_causal: Whether a query sees only the keys up to its own position.
        sliding_window: How many keys a query sees, its own included, in causal attention.
        position_bias: Numbers to add to the scaled scores, broadcastable to `[B, Hq, Lq, Lk]`.
        ignore: Further keyword arguments that do not change the scores.
        kwargs: What else the module passes along.

    Returns:
        The output `[B, Lq, Hq, Dv]`, contiguous, and None for the weights.

    Raises:
        UnsupportedError: If an argument asks for what the operator cannot do yet.
    """
    who = type(module).__name__
    _refuse(who, kwargs, ignore)
    _refuse_packing(who, query.shape[0], attention_mask, kwargs, ignore)
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    mask, bias = _mask_and_bias(who, attention_mask)
    if attention_mask is None:
        mask = _implied(who, query, key, is_causal, sliding_window)
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    out = attention(query, key, value, mask=mask, bias=bias, scale=scaling, dropout_p=dropout)
    assert isinstance(out, torch.Tensor), "the log-sum-exp was not asked for"
    return out.transpose(1, 2).contiguous(), None


def _refuse(who: str, kwargs: dict[str, Any], ignore: frozenset[str]) -> None:
    remedy = "Try: attn_implementation='eager' for this model."
    if kwargs.get("output_attentions"):
        raise UnsupportedError(
            f"{who}: output_attentions is True; tileloom never writes the attention weights out. "
            f"{remedy}"
        )
    for name, value in kwargs.items():
        if value is None or name in _HARMLESS or name in ignore or name == "output_attentions":
            continue
        given = value if isinstance(value, (int, float, str)) else f"a {type(value).__name__}"
        if name in _MODIFIERS:
            raise UnsupportedError(
                f"{who}: {name} is {given}, which asks for {_MODIFIERS[name]}; tileloom has that "
                f"not yet and would have to ignore it. {remedy}"
            )
        raise UnsupportedError(
            f"{who}: the keyword argument {name} ({given}) is not known; if it changes the scores, "
            f"ignoring it would be wrong. Try: register(ignore=({name!r},)) if it does not."
        )


def _refuse_packing(
    who: str,
    batch: int,
    attention_mask: torch.Tensor | None,
    kwargs: dict[str, Any],
    ignore: frozenset[str],
) -> None:
    """Refuse FlashAttention's packed sequences where no mask keeps them apart.

    transformers makes a mask of them where positions say so and there is no cache; such a mask is
    a plain tensor.
    """
    starts = kwargs.get("cu_seq_lens_q")
    is_shown = attention_mask is not None and not isinstance(attention_mask, LazyMask)
    if starts is None or is_shown or "cu_seq_lens_q" in ignore or starts.shape[0] <= batch + 1:
        return
    raise UnsupportedError(
        f"{who}: cu_seq_lens_q is of {starts.shape[0] - 1} sequences, and the mask is of {batch}, "
        "which would let them see each other. Try: position_ids that begin anew with each sequence "
        "and use_cache=False, of which transformers makes the mask."
    )


def _mask_and_bias(
    who: str, given: torch.Tensor | None
) -> tuple[masks.Mask | torch.Tensor | None, torch.Tensor | None]:
    if given is None:
        return None, None
    if isinstance(given, LazyMask):
        return given.tileloom_mask, None
    if not isinstance(given, torch.Tensor):
        raise UnsupportedError(
            f"{who}: attention_mask is a {type(given).__name__}; it must be a tensor. Try: pass "
            "the model a 2-D mask [B, L] of 1 for tokens and 0 for padding."
        )
    if given.dim() != 4:
        raise UnsupportedError(
            f"{who}: attention_mask has shape {tuple(given.shape)}; it must have the four "
            "dimensions [B, H, Lq, Lk] here. Try: give the model itself the 2-D mask [B, L]; it "
            "makes the mask of its layers."
        )
    if given.dtype is torch.bool:
        return given, None
    if given.dtype.is_floating_point:
        return None, given
    raise UnsupportedError(
        f"{who}: attention_mask has dtype {given.dtype}; it must be bool (True = visible) or "
        "floating (added to the scores). Try: mask.bool()."
    )


def _implied(
    who: str, query: torch.Tensor, key: torch.Tensor, is_causal: bool, sliding_window: int | None
) -> masks.Mask | None:
    """What is visible where no mask is given."""
    len_q, len_k = query.shape[2], key.shape[2]
    if not is_causal:
        if sliding_window is None:
            return None
        raise UnsupportedError(
            f"{who}: sliding_window is {sliding_window} in attention that is not causal, without "
            "a mask; libraries differ in what that means. Try: call the whole model, which makes "
            "the mask."
        )
    left = None if sliding_window is None else sliding_window - 1
    if len_q == 1:
        return None if left is None else masks.window(left, None, anchor="bottom_right")
    if len_q != len_k:
        raise UnsupportedError(
            f"{who}: causal attention of {len_q} queries to {len_k} keys without a mask; it is not "
            "known which key belongs to the first query. Try: call the whole model, which makes "
            "the mask, or pass is_causal=False."
        )
    return masks.causal() if left is None else masks.window(left, 0)
