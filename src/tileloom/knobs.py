"""Every setting of tileloom: typed, grouped, settable from Python or by `TILELOOM_*` variables.

>>> from tileloom import knobs
>>> with knobs.scope({"dispatch.warn": False}):
...     assert knobs.get("dispatch.warn") is False

The only module that reads the environment; it does so when a knob is first asked for, never at
import. A leaf module: it imports nothing of the package.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


def _read_bool(text: str) -> bool:
    word = text.strip().lower()
    if word not in _TRUE | _FALSE:
        raise ValueError("one of 1, true, yes, on, 0, false, no, off")
    return word in _TRUE


def _read_path(text: str) -> Path:
    if not text.strip():
        raise ValueError("a path")
    return Path(text).expanduser()


def _read_jit(text: str) -> str:
    word = text.strip().lower()
    if word not in ("allow", "forbid"):
        raise ValueError("allow or forbid")
    return word


def _read_tier(text: str) -> str:
    word = text.strip().lower()
    if word not in ("auto", "packed", "direct", "seam", "plain"):
        raise ValueError("auto, packed, direct, seam or plain")
    return word


def _read_seconds(text: str) -> float:
    seconds = float(text) if text.strip().replace(".", "", 1).isdigit() else 0.0
    if not 0 < seconds <= 1e6:
        raise ValueError("a number of seconds, above 0 and at most a million")
    return seconds


def _default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "tileloom"


class KnobError(ValueError):
    """A setting does not exist, or its environment variable holds a text that cannot be read."""


@dataclass(frozen=True)
class Knob:
    """One setting: its type, its default, the variable that sets it, and what it does."""

    name: str
    variable: str
    default: Callable[[], Any]
    read: Callable[[str], Any]
    kind: str
    help: str


KNOBS: dict[str, Knob] = {
    knob.name: knob
    for knob in (
        Knob("cache.dir", "TILELOOM_CACHE_DIR", _default_cache_dir, _read_path, "path",
             "Folder for everything that tileloom keeps between runs."),
        Knob("debug.labels", "TILELOOM_DEBUG_LABELS", lambda: False, _read_bool, "bool",
             "Refuse labels out of range in cross_entropy; waits for the GPU at each call."),
        Knob("debug.lengths", "TILELOOM_DEBUG_LENGTHS", lambda: False, _read_bool, "bool",
             "Refuse wrong cu_seqlens in attention_varlen; waits for the GPU at each call."),
        Knob("launch.bundle", "TILELOOM_BUNDLE", lambda: None, _read_path, "path",
             "Bundle of compiled kernels in which launches look before they compile."),
        Knob("launch.jit", "TILELOOM_JIT", lambda: "allow", _read_jit, "text",
             "allow, or forbid: a launch whose kernel is in no bundle then raises."),
        Knob("launch.tier", "TILELOOM_LAUNCH_TIER", lambda: "auto", _read_tier, "text",
             "How prepared launches reach the driver: auto, packed, direct, seam or plain."),
        Knob("log.levels", "TILELOOM_LOGS", lambda: "", str, "text",
             "Loggers to show, in the grammar of TORCH_LOGS: +dispatch,tuning,-launch."),
        Knob("dispatch.warn", "TILELOOM_DISPATCH_WARN", lambda: True, _read_bool, "bool",
             "Warn once when a call takes a backend that costs more than 20 % over the best."),
        Knob("tuning.timeout", "TILELOOM_TUNING_TIMEOUT", lambda: 120.0, _read_seconds, "seconds",
             "Seconds that one config may compile before its worker is killed."),
    )
}  # fmt: skip

_set: dict[str, Any] = {}


def _unknown(name: str) -> KnobError:
    near = difflib.get_close_matches(name, KNOBS, n=1)
    hint = f" Did you mean '{near[0]}'?" if near else f" Known knobs: {', '.join(sorted(KNOBS))}."
    return KnobError(f"knobs: there is no knob '{name}'.{hint}")


def get(name: str) -> Any:
    """Return the value of a knob: set from Python, else from the environment, else its default.

    Args:
        name: For example ``"cache.dir"``.

    Returns:
        The value, of the knob's own type.

    Raises:
        KnobError: If there is no such knob, or its variable holds a text that cannot be read.
    """
    knob = KNOBS.get(name)
    if knob is None:
        raise _unknown(name)
    if name in _set:
        return _set[name]
    text = os.environ.get(knob.variable)
    if text is None:
        return knob.default()
    try:
        return knob.read(text)
    except (ValueError, RuntimeError) as error:  # of expanduser: there is no such user
        raise KnobError(
            f"knobs: {knob.variable}={text!r} cannot be read; it must be {error}. "
            f"Try: unset {knob.variable}, or give it such a value."
        ) from None


def set(name: str, value: Any) -> None:
    """Set a knob for this process, over its environment variable.

    Args:
        name: For example ``"dispatch.warn"``.
        value: A value of the knob's type, or a text as its variable takes it.

    Raises:
        KnobError: If there is no such knob, the text cannot be read, or the value is of another
            type.
    """
    knob = KNOBS.get(name)
    if knob is None:
        raise _unknown(name)
    if isinstance(value, str):
        try:
            value = knob.read(value)
        except (ValueError, RuntimeError) as error:
            raise KnobError(
                f"knobs: {name} is set to {value!r}; it must be {error}. Try: such a value."
            ) from None
    else:
        value = _checked(knob, value)
    _set[name] = value


_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "True or False"),
    "path": ((os.PathLike,), "a path"),
    "seconds": ((int, float), "a number of seconds, above 0 and at most a million"),
    "text": ((), "a text"),
}


def _checked(knob: Knob, value: Any) -> Any:
    """Refuse a value of another type than the knob's; what is no text has not been read."""
    types, wanted = _TYPES[knob.kind]
    fits = isinstance(value, types) and (knob.kind == "bool" or not isinstance(value, bool))
    if knob.kind == "seconds" and fits:
        fits = 0 < value <= 1e6
    if not fits and not (value is None and knob.default() is None):
        is_plain = value is None or isinstance(value, (bool, int, float))
        given = repr(value) if is_plain else f"a {type(value).__name__}"
        raise KnobError(
            f"knobs: {knob.name} is set to {given}; it must be {wanted}. Try: such a value."
        )
    return Path(value) if isinstance(value, os.PathLike) else value  # pyright: ignore[reportUnknownArgumentType]


@contextlib.contextmanager
def scope(values: Mapping[str, Any]) -> Generator[None]:
    """Set knobs inside a `with` block and give the old values back at its end.

    Args:
        values: Knob names and their values.
    """
    before = dict(_set)
    try:
        for name, value in values.items():
            set(name, value)
        yield
    finally:
        _set.clear()
        _set.update(before)


def environment_of_cuda(name: str) -> str | None:
    """Return a variable that CUDA itself reads, such as ``"CUDA_LAUNCH_BLOCKING"``; None if unset.

    What it sets is CUDA's to decide: it is no knob of tileloom's.
    """
    return os.environ.get(name)


def variables_of_triton() -> tuple[tuple[str, str], ...]:
    """Return the `TRITON_*` variables and their values, which a compiling process must share."""
    return tuple(sorted((k, v) for k, v in os.environ.items() if k.startswith("TRITON_")))


def unknown_variables() -> dict[str, str | None]:
    """Find `TILELOOM_*` variables in the environment that no knob reads.

    Returns:
        For each such variable the nearest known one, or None.
    """
    # Compared without the prefix that all share, which would make anything look near.
    known = {knob.variable.removeprefix("TILELOOM_"): knob.variable for knob in KNOBS.values()}
    found = [v for v in os.environ if v.startswith("TILELOOM_") and v not in known.values()]
    near = {v: difflib.get_close_matches(v.removeprefix("TILELOOM_"), known, n=1) for v in found}
    return {v: known[names[0]] if names else None for v, names in near.items()}
