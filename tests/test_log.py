from __future__ import annotations

import logging
import runpy
import warnings

import pytest

from tileloom import log
from tileloom.ops import _op
from tileloom.tuning.identity import Platform
from tileloom.tuning.store import CacheWarning, Store


@pytest.fixture(autouse=True)
def quiet():
    root = logging.getLogger("tileloom")
    handlers = list(root.handlers)
    levels = {name: log.get_logger(name).level for name in ("one", "two", "three", "four")}
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
    log.configure("+one, two,-three")
    for name in ("one", "two", "three", "four"):
        for level in ("debug", "info", "error"):
            getattr(log.get_logger(name), level)(level)
    shown = capfd.readouterr().err.splitlines()
    assert [s for s in shown if "four" not in s] == [
        "[tileloom.one] debug",
        "[tileloom.one] info",
        "[tileloom.one] error",
        "[tileloom.two] info",
        "[tileloom.two] error",
        "[tileloom.three] error",
    ]


def test_configuring_twice_does_not_say_things_twice(capfd):
    log.configure("one")
    log.configure("one")
    log.get_logger("one").info("once")
    assert capfd.readouterr().err == "[tileloom.one] once\n"


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
