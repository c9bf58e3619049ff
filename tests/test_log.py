from __future__ import annotations

import logging
import re
import runpy
import warnings
from pathlib import Path

import pytest

from tileloom import log
from tileloom.cli.doctor import check_settings
from tileloom.cli.main import main
from tileloom.ops import _op
from tileloom.tuning.identity import Platform
from tileloom.tuning.store import CacheWarning, Store

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def quiet():
    root = logging.getLogger("tileloom")
    handlers = list(root.handlers)
    levels = {name: log.get_logger(name).level for name in log.LOGGERS}
    yield
    root.handlers[:] = handlers
    for name, level in levels.items():
        log.get_logger(name).setLevel(level)


def test_loggers_are_the_standard_librarys():
    assert log.get_logger("one") is logging.getLogger("tileloom.one")


def test_silent_until_asked_for(capfd):
    log.get_logger("one").info("unseen")
    log.get_logger("one").warning("unseen too: the root has a NullHandler")
    assert capfd.readouterr() == ("", "")


def test_grammar(capfd):
    log.configure("+dispatch, launch,-tuning")
    for name in ("dispatch", "launch", "tuning", "transformers"):
        for level in ("debug", "info", "error"):
            getattr(log.get_logger(name), level)(level)
    shown = capfd.readouterr().err.splitlines()
    assert [s for s in shown if "transformers" not in s] == [
        "[tileloom.dispatch] debug",
        "[tileloom.dispatch] info",
        "[tileloom.dispatch] error",
        "[tileloom.launch] info",
        "[tileloom.launch] error",
        "[tileloom.tuning] error",
    ]


def test_configuring_twice_does_not_say_things_twice(capfd):
    log.configure("launch")
    log.configure("launch")
    log.get_logger("launch").info("once")
    assert capfd.readouterr().err == "[tileloom.launch] once\n"


@pytest.mark.parametrize("given", ["dispach", "+dispach", "tuning,-dispach"])
def test_an_unknown_logger_is_told_with_those_that_there_are(given):
    before = log.get_logger("tuning").level
    with pytest.raises(log.LoggerError) as caught:
        log.configure(given)
    assert str(caught.value) == (
        "log: there is no logger 'dispach'; loggers: dispatch, launch, torch_sdpa, transformers, "
        "tuning. Try: TILELOOM_LOGS=dispatch."
    )
    assert log.get_logger("tuning").level == before


def test_every_logger_is_listed_and_on_the_page():
    texts = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    used = {name for text in texts for name in re.findall(r'get_logger\("(\w+)"\)', text)}
    assert used == set(log.LOGGERS)
    page = (ROOT / "docs" / "settings.md").read_text()
    assert all(f"| `{name}` | " in page for name in log.LOGGERS)


def test_the_command_line_refuses_an_unknown_logger_and_doctor_lists_it(monkeypatch, capsys):
    monkeypatch.setenv("TILELOOM_LOGS", "+dispach")
    assert main(["explain", "gemm", "64", "64", "64"]) == 2
    assert "tileloom: log: there is no logger 'dispach'" in capsys.readouterr().err
    assert "log: there is no logger 'dispach'" in check_settings()[0].text


def test_empty_text_changes_nothing():
    before = list(logging.getLogger("tileloom").handlers)
    log.configure(" , ")
    assert logging.getLogger("tileloom").handlers == before


def test_a_warning_points_at_the_program_and_not_at_us_or_pytorch(tmp_path):
    """From an operator the way leads through PyTorch's dispatcher."""
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, tileloom\n"
        "from tileloom.target import H100, override\n"
        "from tileloom.tuning.store import Store\n"
        "def operator():\n"
        "    with override(H100):\n"
        "        tileloom.rms_norm(torch.randn(3, 4, 5, 6, 24).permute(3, 2, 1, 0, 4))\n"
        "def store(folder):\n"
        "    Store(folder).find({'kernel': 'a:b'}, PLATFORM)\n"
    )
    scope = runpy.run_path(str(program))
    scope["store"].__globals__["PLATFORM"] = Platform("gpu", "driver", "3.7.1", "12.8")
    damaged = Store(tmp_path).path({"kernel": "a:b"}, scope["store"].__globals__["PLATFORM"])
    damaged.write_text("{")
    _op._warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scope["operator"]()
        scope["store"](tmp_path)
    assert [(w.category, w.filename, w.lineno) for w in caught] == [
        (_op.PerformanceWarning, str(program), 6),
        (CacheWarning, str(program), 8),
    ]
