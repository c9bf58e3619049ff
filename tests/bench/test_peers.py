import sys
from types import ModuleType

import pytest
import torch
from tests.bench.fakes import CAUSAL, CPU, SMALL, FakeTimer, right, session

from tileloom.bench import PEERS, AttentionCase, attention_peers, run_cell
from tileloom.bench.peers import DEFAULT_PEERS, QUICK_PEERS
from tileloom.errors import OptionError


class CountingTimer(FakeTimer):
    """Every call takes 1 ms, whoever makes it."""

    def warm(self, call, calls):
        for i in range(calls):
            call(i)
            self.spend(1.0, 5.0)


def test_names():
    assert list(PEERS) == ["cudnn", "flash", "efficient", "fa4", "flex"]
    assert "flex" not in DEFAULT_PEERS
    assert set(QUICK_PEERS) < set(DEFAULT_PEERS)
    assert [peer.name for peer in attention_peers(["fa4", "cudnn", "fa4"])] == ["fa4", "cudnn"]
    assert {peer.side for peer in attention_peers(list(PEERS))} == {"peer"}


def test_an_unknown_peer():
    with pytest.raises(OptionError, match=r"--peers names 'fa3'; there are cudnn, flash, "):
        attention_peers(["cudnn", "fa3"])


@pytest.mark.parametrize("case", [SMALL, CAUSAL])
def test_the_flash_backend_runs_here_and_is_right(case):
    cell = run_cell(case, attention_peers(["flash"]), session(CountingTimer()))
    assert cell.entries[0].status == "ok", cell.entries[0].reason
    assert cell.entries[0].about == {"backend": "torch SDPA, FLASH_ATTENTION"}


@pytest.mark.parametrize("name", ["cudnn", "efficient"])
def test_a_backend_that_this_machine_lacks_gives_its_reason(name):
    cell = run_cell(SMALL, attention_peers([name]), session(CountingTimer()))
    assert cell.entries[0].status == "failed"
    assert "RuntimeError" in cell.entries[0].reason


def test_grouped_heads_are_asked_for():
    case = AttentionCase("grouped", 1, 4, 2, 32, 32, 16, True, "float32")
    inputs = case.inputs(CPU, 0)
    (flash,) = attention_peers(["flash"])
    call = flash.prepare(case, inputs)
    with flash.scope():
        torch.testing.assert_close(call(), right(inputs, True), rtol=1e-5, atol=1e-5)


def _fa4_module(monkeypatch, function):
    package, cute = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    cute.flash_attn_func = function
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)


@pytest.mark.parametrize("with_lse", [True, False])
def test_fa4_gets_its_own_layout_and_is_read_back(monkeypatch, with_lse):
    from tileloom.bench import Inputs

    def flash_attn_func(q, k, v, causal):
        assert q.is_contiguous()
        assert q.shape == (1, 64, 2, 32)
        inputs = Inputs(*(t.transpose(1, 2) for t in (q, k, v)))
        out = right(inputs, causal).transpose(1, 2)
        return (out, None) if with_lse else out

    _fa4_module(monkeypatch, flash_attn_func)
    cell = run_cell(CAUSAL, attention_peers(["fa4"]), session(CountingTimer()))
    assert cell.entries[0].status == "ok", cell.entries[0].reason


def test_fa4_says_why_it_cannot(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    cell = run_cell(SMALL, attention_peers(["fa4"]), session(CountingTimer()))
    assert cell.entries[0].status == "refused"
    assert "flash_attn.cute cannot be imported (ModuleNotFoundError" in cell.entries[0].reason
    _fa4_module(monkeypatch, None)
    (fa4,) = attention_peers(["fa4"])
    uneven = AttentionCase("u", 1, 2, 2, 32, 64, 32, True, "float32")
    assert "bottom right corner" in fa4.refuse(uneven, uneven.inputs(CPU, 0))


def test_flex_is_right(monkeypatch):
    """Without its compiler, which this test is not about."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    case = AttentionCase("f", 1, 4, 2, 128, 128, 32, True, "float32")
    inputs = case.inputs(CPU, 0)
    (flex,) = attention_peers(["flex"])
    with pytest.warns(UserWarning, match="flex_attention called without torch.compile"):
        out = flex.prepare(case, inputs)()
    torch.testing.assert_close(out, right(inputs, True), rtol=1e-4, atol=1e-4)
