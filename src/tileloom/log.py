"""Named loggers under `tileloom`, silent until asked for.

`TILELOOM_LOGS` (or the knob `log.levels`) takes a comma list in the grammar of `TORCH_LOGS`:
``dispatch`` shows INFO of that logger, ``+dispatch`` DEBUG, ``-dispatch`` only errors.
A leaf module: it imports nothing of the package.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import sys
import warnings
from pathlib import Path

LOGGERS = ("dispatch", "launch", "torch_sdpa", "transformers", "tuning")
"""The names of all loggers; a test holds it complete."""

_ROOT = logging.getLogger("tileloom")
_ROOT.addHandler(logging.NullHandler())


class LoggerError(ValueError):
    """A text for `configure` names a logger that there is not."""


def get_logger(name: str) -> logging.Logger:
    """Return the logger `tileloom.<name>`.

    Args:
        name: One of `LOGGERS`.

    Returns:
        The standard library's logger; no handler is added to it.
    """
    return _ROOT.getChild(name)


def configure(spec: str) -> None:
    """Show log messages on stderr as a comma list of names says.

    Args:
        spec: For example ``"+dispatch,tuning,-launch"``. An empty text changes nothing.

    Raises:
        LoggerError: If there is no such logger; nothing is changed.
    """
    names = [part.strip() for part in spec.split(",") if part.strip()]
    for name in names:
        if name.lstrip("+-") not in LOGGERS:
            near = difflib.get_close_matches(name, LOGGERS, n=1)
            raise LoggerError(
                f"log: there is no logger '{name.lstrip('+-')}'; loggers: {', '.join(LOGGERS)}. "
                f"Try: TILELOOM_LOGS={near[0] if near else LOGGERS[0]}."
            )
    if names and not any(type(h) is logging.StreamHandler for h in _ROOT.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
        _ROOT.addHandler(handler)
    for name in names:
        level = {"+": logging.DEBUG, "-": logging.ERROR}.get(name[0], logging.INFO)
        get_logger(name.lstrip("+-")).setLevel(level)


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the program that led here, past the package's own lines and PyTorch's.

    The end of a `with` block counts as a line of the program.

    Args:
        text: The warning.
        category: Its class.
    """
    folders = [f"{Path(__file__).parent}/", contextlib.__file__]
    if (torch := sys.modules.get("torch")) is not None and torch.__file__:
        folders.append(f"{Path(torch.__file__).parent}/")
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(tuple(folders)):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
