"""The exceptions of tileloom. Each text is a sentence about the caller's own arguments.

A leaf module: it imports nothing of the package. Every class derives from the builtin exception
that a Python user would expect to catch, and from `TileloomError`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class TileloomError(Exception):
    """The base of every exception that tileloom raises on purpose."""


class ShapeError(TileloomError, ValueError):
    """Sizes or strides of the given tensors do not fit each other."""


class DtypeError(TileloomError, TypeError):
    """A tensor has an element type that the operator does not take."""


class DeviceError(TileloomError, ValueError):
    """Tensors lie on different devices, or on one that the operator does not take."""


class OptionError(TileloomError, ValueError):
    """An option has a value outside its range, or options contradict each other."""


class UnknownOptionError(TileloomError, TypeError):
    """A keyword argument that the function does not have; the text names the nearest one."""


class UnsupportedError(TileloomError, NotImplementedError):
    """No backend takes the problem; the text says for each one why."""


class ConfigError(TileloomError, ValueError):
    """An explicit config cannot run the problem; the text lists its reasons."""


class GradientError(TileloomError, NotImplementedError):
    """A gradient was asked for that the operator cannot give."""


class CompileError(TileloomError, RuntimeError):
    """A kernel did not compile; the text names kernel, config, stage and the first cause."""


class BundleError(TileloomError, ValueError):
    """A bundle is damaged, or does not fit this machine, these versions or these arguments."""


class LaunchError(TileloomError, RuntimeError):
    """A kernel could not be loaded or launched; the text has the driver's own words."""


class ArgumentError(TileloomError, TypeError):
    """A launch has too many arguments, too few, or one of a type that the kernel cannot take."""


class SignalTimeoutError(TileloomError, TimeoutError):
    """A kernel gave up waiting for a chunk of its input; the text names chunk, epoch and flag."""


_LONGEST = 80  # characters of a value


def bullet_list(reasons: Mapping[str, Sequence[str]]) -> str:
    """Format reasons by backend, one line each, for the text of an `UnsupportedError`.

    Args:
        reasons: For each backend's name, the reasons why it refuses.

    Returns:
        Lines of the form ``- backend: reason; reason``.
    """
    return "\n".join(f"- {name}: {'; '.join(why)}" for name, why in reasons.items())


def shown_value(value: object) -> str:
    """Print what a caller gave where something else was asked for: one short line.

    Args:
        value: Anything; the numbers of tensors and arrays are not looked at.

    Returns:
        Its `repr`, cut at 80 characters; of a tensor its dtype and shape.
    """
    try:
        text = " ".join(_shown(value).split())
    except ValueError:  # more digits than Python prints
        return f"a {type(value).__name__} of too many digits to print"
    except Exception:  # whatever a stranger's class raises when it is looked at
        return f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _shown(value: Any) -> str:
    kind = type(value)
    if kind is list or kind is tuple:
        inner = ", ".join([_shown(item) for item in value[:_LONGEST]])
        if kind is list:
            return f"[{inner}]"
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if kind is dict:
        return f"{{{', '.join([f'{_shown(k)}: {_shown(v)}' for k, v in value.items()])}}}"
    is_tensor = hasattr(kind, "requires_grad")
    if not (is_tensor or (hasattr(kind, "__array__") and value.shape)):
        return repr(value)  # numbers of NumPy too
    name = "tensor" if is_tensor else kind.__name__
    return f"a {name} of {value.dtype} and shape {tuple(value.shape)}"


def unknown_option(
    op: str,
    name: str,
    options: Sequence[str],
    elsewhere: Mapping[str, str] | None = None,
    *,
    kind: str = "option",
) -> UnknownOptionError:
    """Make the error for a keyword that a function does not have.

    Args:
        op: The function.
        name: The keyword.
        options: The keywords that it has.
        elsewhere: What other libraries call an option, and what to write instead.
        kind: What to call such a keyword.

    Returns:
        The error; it names the nearest option.
    """
    remedy = (elsewhere or {}).get(name)
    if remedy is None:
        near = difflib.get_close_matches(name, options, n=1)
        remedy = f"{near[0]}=" if near else "one of these"
    return UnknownOptionError(
        f"{op}: there is no {kind} '{name}'; {kind}s: {', '.join(options)}. Try: {remedy}."
    )


def known_keywords(target: F) -> F:
    """Give a function's call with a keyword that it does not have a sentence.

    It names the nearest one that there is. More arguments by position than it takes get one too.

    Args:
        target: The function, or a class for its construction.

    Returns:
        The same class, or a function that takes and returns what `target` does.
    """
    function: Any = target.__init__ if isinstance(target, type) else target
    whole = list(inspect.signature(function).parameters.values())
    found = whole[1:] if isinstance(target, type) else whole
    assert all(p.kind is not p.VAR_KEYWORD for p in found), f"{target} takes any keyword"
    named = {p.name: None for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    known = [name for name in named if name != "cls"]
    title = target.__qualname__
    keywords = [p.name for p in found if p.kind is p.KEYWORD_ONLY]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in found)
    most = math.inf if takes_any else len(whole) - len(keywords)
    hidden = [p.name for p in whole[:1]] in (["self"], ["cls"])  # nobody writes it in a call

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in named:
                raise unknown_option(title, name, known, kind="argument")
        if len(args) > most:
            raise _too_many(title, args[hidden:], int(most) - hidden, keywords)
        return function(*args, **kwargs)

    if isinstance(target, type):
        target.__init__ = call
        return target  # pyright: ignore[reportReturnType]
    return call  # pyright: ignore[reportReturnType]


def _too_many(
    title: str, given: Sequence[object], most: int, keywords: Sequence[str]
) -> ArgumentError:
    """Make the error for more arguments by position than a function takes."""
    verb = "argument is" if len(given) == 1 else "arguments are"
    others = f", and by keyword {', '.join(keywords)}" if keywords else ""
    remedy = f"{keywords[0]}={shown_value(given[most])}" if keywords else "fewer"
    return ArgumentError(
        f"{title}: {len(given)} {verb} given by position; it takes {most or 'none'} there{others}. "
        f"Try: {remedy}."
    )


def check_fields(config: Any) -> None:
    """Refuse a config in which a field is no number, name or flag as its default is.

    Args:
        config: A dataclass; a field without a default is an int, one that is None is not looked at.

    Raises:
        OptionError: With the field and its value.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        default = 64 if field.default is dataclasses.MISSING else field.default
        if default is not None and type(value) is not type(default):
            raise OptionError(
                f"{type(config).__name__}: {field.name} is {shown_value(value)}; it must be of "
                f"type {type(default).__name__}. Try: {field.name}={default!r}."
            )
