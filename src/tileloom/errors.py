"""The exceptions of tileloom. Each text is a sentence about the caller's own arguments.

A leaf module: it imports nothing of the package. Every class derives from the builtin exception
that a Python user would expect to catch, and from `TileloomError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


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


def bullet_list(reasons: Mapping[str, Sequence[str]]) -> str:
    """Format reasons by backend, one line each, for the text of an `UnsupportedError`.

    Args:
        reasons: For each backend's name, the reasons why it refuses.

    Returns:
        Lines of the form ``- backend: reason; reason``.
    """
    return "\n".join(f"- {name}: {'; '.join(why)}" for name, why in reasons.items())
