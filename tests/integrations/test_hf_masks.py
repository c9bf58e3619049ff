import itertools
import logging

import pytest
import torch
from transformers import masking_utils as hf

from tileloom import masks
from tileloom.errors import OptionError, UnsupportedError
from tileloom.integrations.hf_masks import LazyMask, band_of, make_mask, place_band

FUNCTIONS = {
    "causal": hf.causal_mask_function,
    "full": hf.bidirectional_mask_function,
    "window-causal": hf.sliding_window_causal_mask_function(3),
    "window-both": hf.sliding_window_bidirectional_mask_function(2),
}
# q_length, kv_length, q_offset, kv_offset
PLACES = {
    "prefill": (7, 7, 0, 0),
    "decode": (1, 9, 8, 0),
    "chunk": (4, 9, 5, 0),
    "sliding cache": (4, 6, 9, 7),
    "static cache": (4, 12, 0, 0),
    "static cache, later": (3, 12, 4, 0),
    "cross": (3, 8, 0, 0),
    "prefix": (5, 8, 3, 0),
}
PADDINGS = {
    "none": None,
    "full": [12, 12],
    "right": [12, 5],
    "left": [-12, -5],
    "holes": "holes",
    "empty row": [12, 0],
}


def padding_mask(kind, length):
    if kind is None:
        return None
    mask = torch.ones(2, length, dtype=torch.bool)
    if kind == "holes":
        mask[0, 1::3] = False
        return mask
    for row, count in zip(mask, kind):
        if count >= 0:
            row[count * length // 12 :] = False
        else:
            row[: length + count * length // 12] = False
    return mask


def options(function, place, attention_mask):
    q_length, kv_length, q_offset, kv_offset = place
    return {
        "batch_size": 2, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset,
        "kv_offset": kv_offset, "mask_function": function, "attention_mask": attention_mask,
        "allow_is_causal_skip": True, "allow_is_bidirectional_skip": True, "use_vmap": False,
        "dtype": torch.float32, "device": torch.device("cpu"), "config": None,
    }  # fmt: skip


def expected(given):
    skip = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return hf.sdpa_mask(**{**given, **skip})


@pytest.mark.parametrize("padding", ["auto", "unknown"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_known_mask_shows_what_transformers_shows(function, padding):
    for place, kind in itertools.product(PLACES.values(), PADDINGS.values()):
        # a padding mask shorter than the cache, as a static cache has it, and one of its length
        for length in (place[1] + place[3], max(place[2] + place[0], 1)):
            given = options(FUNCTIONS[function], place, padding_mask(kind, length))
            mask = make_mask(padding, given)
            want = expected(given)
            where = (place, kind, length)
            assert mask.shape == want.shape, where
            assert torch.equal(mask & True, want), where
            if isinstance(mask, LazyMask):
                value = mask.tileloom_mask.materialize(2, place[0], place[1], "cpu")
                assert torch.equal(value.expand(want.shape), want), where


@pytest.mark.parametrize("place", ["prefill", "decode", "chunk", "sliding cache", "static cache"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_usual_places_need_no_written_out_mask(function, place):
    given = options(FUNCTIONS[function], PLACES[place], None)
    assert isinstance(make_mask("auto", given), LazyMask)


def test_padding_becomes_lengths_when_it_is_on_the_right():
    def keys(kind, padding="auto", function="full", place="prefill"):
        attention_mask = padding_mask(PADDINGS[kind], 7)
        given = options(FUNCTIONS[function], PLACES[place], attention_mask)
        return make_mask(padding, given).tileloom_mask

    assert keys("right").lengths.tolist() == [7, 2]
    assert keys("right").visible is None
    assert keys("right", function="causal").lengths.tolist() == [7, 2]
    assert keys("full").lengths is None
    assert keys("full").visible is None
    assert keys("left").lengths is None
    assert keys("left").visible.shape == (2, 1, 1, 7)
    assert keys("holes").visible.shape == (2, 1, 1, 7)
    assert keys("right", padding="unknown").visible.shape == (2, 1, 1, 7)
    assert keys("right", padding="right").lengths.tolist() == [7, 2]


def test_a_broken_promise_of_right_padding_is_reported():
    given = options(FUNCTIONS["full"], PLACES["prefill"], padding_mask(PADDINGS["left"], 7))
    with pytest.raises(OptionError, match="padding before or between its tokens"):
        make_mask("right", given)


def test_an_unknown_mask_function_is_written_out_by_transformers():
    chunked = hf.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.int64))
    other = hf.and_masks(hf.causal_mask_function, lambda b, h, q, k: k != 1)
    three = hf.and_masks(
        hf.sliding_window_overlay(3), hf.causal_mask_function, hf.causal_mask_function
    )
    for function in (chunked, other, three):
        assert band_of(function) is None
        given = options(function, PLACES["prefill"], padding_mask(PADDINGS["right"], 7))
        mask = make_mask("auto", given)
        assert type(mask) is torch.Tensor
        assert torch.equal(mask, expected(given))


def test_the_sizes_of_a_window_are_read_from_the_mask_function():
    assert band_of(hf.sliding_window_causal_mask_function(5)) == (4, 0)
    assert band_of(hf.sliding_window_bidirectional_mask_function(5)) == (5, 5)
    assert band_of(hf.causal_mask_function) == (None, 0)
    assert band_of(hf.bidirectional_mask_function) == (None, None)


def test_bounds_that_hide_nothing_are_left_out():
    assert place_band(None, 0, 1, 9, 8).band.is_unbounded  # one query at the last key
    assert place_band(8, 0, 1, 9, 8).band.is_unbounded
    assert not place_band(7, 0, 1, 9, 8).band.is_unbounded
    assert not place_band(None, 0, 2, 9, 7).band.is_unbounded


def test_an_offset_on_the_device_gives_a_plain_tensor():
    given = options(FUNCTIONS["causal"], PLACES["chunk"], None)
    given["q_offset"] = torch.tensor(given["q_offset"])
    mask = make_mask("auto", given)
    assert type(mask) is torch.Tensor
    assert torch.equal(mask, expected(options(FUNCTIONS["causal"], PLACES["chunk"], None)))


def test_a_lazy_mask_computes_like_the_mask_it_stands_for(caplog):
    given = options(FUNCTIONS["causal"], PLACES["chunk"], padding_mask(PADDINGS["left"], 9))
    mask, want = make_mask("auto", given), expected(given)
    assert isinstance(mask, torch.Tensor)
    assert (mask.shape, mask.dtype, mask.device) == (want.shape, want.dtype, want.device)
    with caplog.at_level(logging.INFO, logger="tileloom.transformers"):
        assert "LazyMask" in repr(mask)
        assert not caplog.records  # printing it does not write it out
        assert torch.equal(mask[:, :, 1:, :3], want[:, :, 1:, :3])
        assert "written out" in caplog.text
    assert torch.equal(mask.to(torch.float32), want.float())
    assert torch.equal(torch.where(mask, 0.0, -1.0), torch.where(want, 0.0, -1.0))
    assert torch.equal(torch.cat([mask, want], 2), torch.cat([want, want], 2))
    assert torch.equal(~mask, ~want)
    assert mask.sum() == want.sum()
    assert type(mask.clone()) is torch.Tensor


def test_values_are_not_read_while_a_graph_is_traced():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        attention_mask = torch.ones(2, 7, dtype=torch.bool)
        mask = make_mask("auto", options(FUNCTIONS["full"], PLACES["prefill"], attention_mask))
        assert not isinstance(mask, LazyMask)
        assert mask.shape == (2, 1, 7, 7)


def test_writing_into_a_lazy_mask_is_refused():
    """Attention would not see what is written, so nobody may believe it does."""
    ones = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    mask = LazyMask.of(masks.causal(), ones.clone, (1, 1, 4, 4), torch.device("cpu"))
    with pytest.raises(UnsupportedError, match="in place"):
        mask.fill_(False)
    assert not mask.clone().fill_(False).any()
