"""The name under which a launcher and a bundle mean the same compiled kernel."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

DEFAULT_OPTIONS: dict[str, Any] = {
    "num_warps": 4,
    "num_stages": 3,
    "num_ctas": 1,
    "enable_fp_fusion": True,
    "debug": False,
    "instrumentation_mode": "",
    "launch_cooperative_grid": False,
    "launch_pdl": False,
}
"""Triton's own values on 3.6 to 3.9; an option that has its default is the same as none."""


def options_that_differ(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the compile options that are neither None nor at Triton's default, sorted by name."""
    return {
        name: options[name]
        for name in sorted(options)
        if options[name] is not None and options[name] != DEFAULT_OPTIONS.get(name)
    }


def kernel_key(
    function: str,
    source: str,
    arch: str,
    *,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    aligned: Iterable[str],
    options: Mapping[str, Any],
) -> str:
    """Name a compiled kernel by everything that it was compiled from, but not by the compiler.

    Triton's version is left out: a bundle serves whatever version the machine has, or none.

    Args:
        function: ``"module:name"``.
        source: Its hash; see `compat.source_hash`.
        arch: For example ``"sm_90"``.
        types: Type of each parameter that is no constant, in the words of `KernelSpec`.
        constants: Values of the others: compile-time parameters, numbers that are specialised as
            1, and None.
        aligned: Parameters that are specialised as divisible by 16.
        options: Compile options; those at Triton's default may be left out.

    Returns:
        A hexadecimal SHA-256. Values are told apart by type: 1, 1.0 and True differ. One that JSON
        does not know counts by its `repr`.
    """
    parts = [
        function,
        source,
        arch,
        {name: kind.replace(" ", "") for name, kind in types.items()},
        dict(constants),
        sorted(aligned),
        options_that_differ(options),
    ]
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=repr)
    return hashlib.sha256(text.encode()).hexdigest()
