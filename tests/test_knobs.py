from __future__ import annotations

from pathlib import Path

import pytest

from tileloom import knobs


def test_default_then_variable_then_python(monkeypatch):
    monkeypatch.delenv("TILELOOM_DISPATCH_WARN", raising=False)
    assert knobs.get("dispatch.warn") is True
    monkeypatch.setenv("TILELOOM_DISPATCH_WARN", "off")
    assert knobs.get("dispatch.warn") is False
    with knobs.scope({"dispatch.warn": True}):
        assert knobs.get("dispatch.warn") is True
    assert knobs.get("dispatch.warn") is False


@pytest.mark.parametrize("text", ["1", "true", "YES", " on "])
def test_true_words(monkeypatch, text):
    monkeypatch.setenv("TILELOOM_DISPATCH_WARN", text)
    assert knobs.get("dispatch.warn") is True


def test_unreadable_variable_says_what_to_do(monkeypatch):
    monkeypatch.setenv("TILELOOM_DISPATCH_WARN", "maybe")
    with pytest.raises(knobs.KnobError) as caught:
        knobs.get("dispatch.warn")
    assert str(caught.value) == (
        "knobs: TILELOOM_DISPATCH_WARN='maybe' cannot be read; it must be one of 1, true, yes, on, "
        "0, false, no, off. Try: unset TILELOOM_DISPATCH_WARN, or give it such a value."
    )


def test_empty_path_is_refused(monkeypatch):
    monkeypatch.setenv("TILELOOM_CACHE_DIR", " ")
    with pytest.raises(knobs.KnobError, match="it must be a path"):
        knobs.get("cache.dir")


@pytest.mark.parametrize("text", ["0", "-1", "nan", "1e3", "2000000", ""])
def test_seconds(monkeypatch, text):
    monkeypatch.setenv("TILELOOM_TUNING_TIMEOUT", "2.5")
    assert knobs.get("tuning.timeout") == 2.5
    monkeypatch.setenv("TILELOOM_TUNING_TIMEOUT", text)
    with pytest.raises(knobs.KnobError, match="it must be a number of seconds, above 0 and at"):
        knobs.get("tuning.timeout")


def test_cache_dir(monkeypatch):
    monkeypatch.delenv("TILELOOM_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert knobs.get("cache.dir") == Path("/somewhere/tileloom")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert knobs.get("cache.dir") == Path.home() / ".cache" / "tileloom"
    monkeypatch.setenv("TILELOOM_CACHE_DIR", "~/mine")
    assert knobs.get("cache.dir") == Path.home() / "mine"


@pytest.mark.parametrize("call", [knobs.get, lambda name: knobs.set(name, 1)])
def test_unknown_knob_names_the_nearest(call):
    with pytest.raises(knobs.KnobError, match=r"no knob 'dispatch.wran'. Did you mean 'dispatch.w"):
        call("dispatch.wran")
    known = r"no knob 'zzz'. Known knobs: cache.dir, debug.labels, debug.lengths, dispatch"
    with pytest.raises(knobs.KnobError, match=known):
        call("zzz")


def test_scope_restores_after_an_exception_and_keeps_what_was_set():
    with knobs.scope({"log.levels": "outer"}):
        with pytest.raises(RuntimeError), knobs.scope({"log.levels": "inner"}):
            raise RuntimeError
        assert knobs.get("log.levels") == "outer"
        with pytest.raises(knobs.KnobError), knobs.scope({"log.levels": "inner", "nothing": 1}):
            pass
        assert knobs.get("log.levels") == "outer"


def test_unknown_variables_are_found(monkeypatch):
    monkeypatch.setenv("TILELOOM_DISPATCH_WARM", "1")
    monkeypatch.setenv("TILELOOM_QQQQQQQQ", "1")
    monkeypatch.setenv("TILELOOM_LOGS", "bench")
    found = knobs.unknown_variables()
    assert found["TILELOOM_DISPATCH_WARM"] == "TILELOOM_DISPATCH_WARN"
    assert found["TILELOOM_QQQQQQQQ"] is None
    assert "TILELOOM_LOGS" not in found


def test_every_knob_is_whole():
    for name, knob in knobs.KNOBS.items():
        assert name == knob.name
        assert knob.variable.startswith("TILELOOM_")
        assert knob.help.endswith(".")


def test_a_variable_that_cuda_reads(monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert knobs.environment_of_cuda("CUDA_LAUNCH_BLOCKING") == "1"
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING")
    assert knobs.environment_of_cuda("CUDA_LAUNCH_BLOCKING") is None


def test_a_text_set_from_python_is_read_as_the_variable_is():
    with knobs.scope({"dispatch.warn": "no", "tuning.timeout": "7"}):
        assert knobs.get("dispatch.warn") is False
        assert knobs.get("tuning.timeout") == 7.0
    text = r"^knobs: launch\.tier is set to 'foo'; it must be .*plain.*\. Try: such a value\.$"
    with pytest.raises(knobs.KnobError, match=text):
        knobs.set("launch.tier", "foo")
    assert knobs.get("launch.tier") == "auto"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("cache.dir", 5, "cache.dir is set to 5; it must be a path."),
        ("cache.dir", None, "cache.dir is set to None; it must be a path."),
        ("cache.dir", b"x", "cache.dir is set to a bytes; it must be a path."),
        ("launch.jit", True, "launch.jit is set to True; it must be a text."),
        ("launch.jit", b"forbid", "launch.jit is set to a bytes; it must be a text."),
        ("launch.tier", ["packed"], "launch.tier is set to a list; it must be a text."),
        ("dispatch.warn", 0, "dispatch.warn is set to 0; it must be True or False."),
        ("tuning.timeout", True, "tuning.timeout is set to True; it must be a number of seconds, "
                                 "above 0 and at most a million."),
        ("tuning.timeout", 0, "tuning.timeout is set to 0; it must be a number of seconds, above 0 "
                              "and at most a million."),
        ("tuning.timeout", float("nan"), "tuning.timeout is set to nan; it must be a number of "
                                         "seconds, above 0 and at most a million."),
        ("launch.bundle", 7, "launch.bundle is set to 7; it must be a path."),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_told(name, value, text):
    before = knobs.get(name)
    with pytest.raises(knobs.KnobError) as caught:
        knobs.set(name, value)
    assert str(caught.value) == f"knobs: {text} Try: such a value."
    with pytest.raises(knobs.KnobError), knobs.scope({name: value}):
        pass
    assert knobs.get(name) == before


def test_values_of_the_right_type_are_taken(tmp_path):
    given = {"cache.dir": tmp_path, "launch.bundle": None, "tuning.timeout": 1,
             "launch.jit": "Forbid", "debug.labels": True}  # fmt: skip
    with knobs.scope(given):
        assert knobs.get("cache.dir") == tmp_path
        assert knobs.get("launch.bundle") is None
        assert knobs.get("tuning.timeout") == 1
        assert knobs.get("launch.jit") == "forbid"
