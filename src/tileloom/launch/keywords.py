"""What is said of the keywords of a launch and of `prepare`: compile options and misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from tileloom.errors import OptionError, UnknownOptionError, shown_value
from tileloom.launch import compat

WARPS = (1, 2, 4, 8, 16, 32)
"""The numbers of warps that Triton compiles a block for."""


def nearest(name: str, names: Sequence[str]) -> str:
    """Return the one of some names that is like a name, as it is written in a call.

    Args:
        name: What was given.
        names: What there is.

    Returns:
        For example ``"BLOCK="``; nothing if none is like it.
    """
    near = difflib.get_close_matches(name, names, n=1)
    return f"{near[0]}=" if near else ""


def not_given(missing: Sequence[str], options: Mapping[str, Any], signature: str) -> str:
    """Say which parameters a launch lacks, and first which of its keywords nothing is called.

    Args:
        missing: The parameters that are not given; at least one.
        options: What was given by keyword and is no parameter.
        signature: A sentence that lists the parameters.

    Returns:
        The text.
    """
    known = compat.option_names(90) if options else []
    unknown = [name for name in options if name not in known]
    lacks = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not given. {signature}"
    if not unknown:
        return f"launch: {lacks} Try: give every parameter that has no default."
    verb = "is no parameter and no compile option" if len(unknown) == 1 else (
        "are no parameters and no compile options"
    )  # fmt: skip
    remedies = [near for near in (nearest(name, missing) for name in unknown) if near]
    return (
        f"launch: {', '.join(unknown)} {verb}, and {lacks} "
        f"Try: {' and '.join(remedies) or 'one of these'}."
    )


def check_warps(op: str, warps: object) -> None:
    """Refuse a number of warps that Triton would refuse while it compiles.

    Args:
        op: The function.
        warps: What was given as ``num_warps``.

    Raises:
        OptionError: If it is no power of 2 from 1 to 32.
    """
    if type(warps) is not int or warps not in WARPS:
        raise OptionError(
            f"{op}: num_warps is {shown_value(warps)}; Triton takes 1, 2, 4, 8, 16 or 32. Try: 4."
        )


def check_options(kernel: Any, options: Mapping[str, Any]) -> None:
    """Refuse compile options that Triton does not have.

    Args:
        kernel: The jitted function; of anything else, such as a tuner, nothing is known.
        options: The options by name.

    Raises:
        UnknownOptionError: With the nearest one that there is.
    """
    from triton.runtime.jit import JITFunction

    if not isinstance(kernel, JITFunction):
        return
    known = compat.option_names(90)
    for name in options:
        if name in kernel.arg_names:
            raise UnknownOptionError(
                f"launch.prepare: {name} is a parameter of '{kernel.__name__}', no compile option. "
                f"Try: launcher[grid](..., {name}=...), or launcher.bind(grid, ..., {name}=...)."
            )
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Try: one of {', '.join(known)}."
            raise UnknownOptionError(f"launch.prepare: Triton has no compile option {name}. {hint}")
