from __future__ import annotations

import logging

import pytest

from tileloom import log


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
