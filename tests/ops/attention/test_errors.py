"""A sentence for every wrong call: `error_texts.txt` has them all, word by word."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.ops.attention.error_texts import CALLS, text_of

import tileloom
from tileloom.errors import TileloomError

_PAGE = Path(__file__).with_name("error_texts.txt").read_text()
_EXPECTED = {
    name: text.rstrip("\n")
    for name, _, text in (part.partition("\n") for part in _PAGE.removeprefix("## ").split("\n## "))
}


def test_the_page_has_every_call():
    assert list(_EXPECTED) == list(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_gets_its_sentence(name):
    assert text_of(name) == _EXPECTED[name]
    with pytest.raises(TileloomError):
        CALLS[name]()


def test_an_unknown_option_is_refused():
    q, k, v = (torch.zeros(1, 2, 3, 8) for _ in range(3))
    with pytest.raises(TypeError, match=r"no option 'causal'.*Try: is_causal="):
        tileloom.attention(q, k, v, causal=True)
