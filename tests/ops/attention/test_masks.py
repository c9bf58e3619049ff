"""Masks: what `materialize` writes is what the definition says, key by key."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tileloom import masks
from tileloom.errors import DtypeError, OptionError, ShapeError
from tileloom.ops.attention.masks import Band, Mask

BOUNDS = st.none() | st.integers(0, 9)
ANCHORS = st.sampled_from(["top_left", "bottom_right"])


def sees(left, right, anchor, row, column, len_q, n):
    """The definition of a window, for one query and one key."""
    place = row if anchor == "top_left" else row + n - len_q
    is_near = (left is None or column >= place - left) and (
        right is None or column <= place + right
    )
    return column < n and is_near


@st.composite
def windows(draw):
    return draw(BOUNDS), draw(BOUNDS), draw(ANCHORS)


@settings(deadline=None, max_examples=200)
@given(
    parts=st.lists(windows(), max_size=3),
    len_q=st.integers(1, 8),
    len_k=st.integers(1, 8),
    lengths=st.none() | st.lists(st.integers(-2, 12), min_size=2, max_size=2),
    seed=st.none() | st.integers(0, 99),
)
def test_combined_masks_show_what_every_part_shows(parts, len_q, len_k, lengths, seed):
    mask = Mask(Band())
    for left, right, anchor in parts:
        mask = mask & masks.window(left, right, anchor=anchor)
    if lengths is not None:
        mask = masks.key_lengths(torch.tensor(lengths)) & mask
    visible = None
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        visible = torch.rand(2, 3, len_q, len_k, generator=generator) < 0.5
        mask = visible & mask
    written = mask.materialize(2, len_q, len_k).expand(2, 3, len_q, len_k)
    for b, h, i, j in itertools.product(range(2), range(3), range(len_q), range(len_k)):
        n = len_k if lengths is None else min(max(lengths[b], 0), len_k)
        expected = j < n and all(sees(*part, i, j, len_q, n) for part in parts)
        expected = expected and (visible is None or bool(visible[b, h, i, j]))
        assert bool(written[b, h, i, j]) == expected, (b, h, i, j)


def test_causal_anchors_differ_where_lengths_do():
    top_left = masks.causal().materialize(1, 2, 4)[0, 0]
    bottom_right = masks.causal("bottom_right").materialize(1, 2, 4)[0, 0]
    assert top_left.tolist() == [[True, False, False, False], [True, True, False, False]]
    assert bottom_right.tolist() == [[True, True, True, False], [True, True, True, True]]


def test_bottom_right_counts_from_each_sequences_own_length():
    mask = masks.causal("bottom_right") & masks.key_lengths(torch.tensor([4, 1]))
    shown = mask.materialize(2, 2, 4)
    assert shown.sum((1, 2, 3)).tolist() == [3 + 4, 0 + 1]


def test_huge_bounds_neither_overflow_nor_hide():
    most = 2**62
    mask = masks.window(most, most) & masks.window(most, most, anchor="bottom_right")
    assert bool(mask.materialize(1, 5, 3).all())
    assert mask.band.clamped(5, 3) == (8, 8, 8, 8)


def test_two_lengths_combine_to_the_shorter():
    mask = masks.key_lengths(torch.tensor([3, 1])) & masks.key_lengths(torch.tensor([2, 4]))
    assert mask.materialize(2, 1, 4).sum(3).flatten().tolist() == [2, 1]


def test_a_mask_is_frozen():
    with pytest.raises(AttributeError):
        masks.causal().band = Band()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: masks.causal("left"), OptionError,
         "masks.causal: anchor is 'left'; it must be 'top_left' or 'bottom_right'."),
        (lambda: masks.window(-1, None), OptionError,
         "masks.window: left is -1; it must be an int >= 0, or None for 'no bound'. Try: left=None "
         "where other libraries take -1."),
        (lambda: masks.window(torch.tensor(3), None), OptionError,
         "masks.window: left is a tensor of torch.int64 and shape (); it must be an int >= 0, or "
         "None for 'no bound'. Try: int(left)."),
        (lambda: masks.window(0, 2.0), OptionError,
         "masks.window: right is 2.0; it must be an int >= 0, or None for 'no bound'. Try: "
         "right=None where other libraries take -1."),
        (lambda: masks.window(True, None), OptionError,
         "masks.window: left is True; it must be an int >= 0, or None for 'no bound'. Try: "
         "left=None where other libraries take -1."),
        (lambda: masks.window(0, 0, anchor="centre"), OptionError,
         "masks.window: anchor is 'centre'; it must be 'top_left' or 'bottom_right'."),
        (lambda: masks.key_lengths(torch.ones(2, 1, dtype=torch.int64)), ShapeError,
         "masks.key_lengths: lengths has shape (2, 1); it must be [B], one number of keys for each "
         "sequence. Try: lengths.reshape(-1)."),
        (lambda: masks.key_lengths(torch.ones(2)), DtypeError,
         "masks.key_lengths: lengths has dtype torch.float32; supported: torch.int32, torch.int64. "
         "Try: lengths.to(torch.int32)."),
        (lambda: masks.causal() & torch.ones(2, 2), DtypeError,
         "masks.dense: visible has dtype torch.float32; supported: torch.bool (True = visible). "
         "Try: pass numbers to add to the scores as bias= instead."),
    ],
)  # fmt: skip
def test_wrong_masks_are_refused_with_a_sentence(make, error, text):
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value) == text
