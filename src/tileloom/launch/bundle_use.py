"""What the package's own launches ask before they compile: is the kernel in a bundle?

The bundle is the one of `use_bundle`, else that of the knob ``launch.bundle`` (`TILELOOM_BUNDLE`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tileloom import knobs, log
from tileloom.errors import CompileError
from tileloom.launch.bundle import Bundle, load_bundle
from tileloom.launch.bundle_format import Variant
from tileloom.launch.bundle_key import kernel_key, options_that_differ

_log = log.get_logger("launch")
_given: list[Bundle] = []  # none or one


def use_bundle(bundle: Bundle | str | Path | None) -> None:
    """Let the package's operators, and launchers of `launch.prepare`, take kernels from a bundle.

    A launch looks there before it compiles, by all that the kernel would be compiled from: source,
    types, alignments, constants, options and architecture. What is not there is compiled as before,
    or refused where the knob ``launch.jit`` says ``"forbid"``. Launches that were made already keep
    the kernel they have.

    Args:
        bundle: A bundle or a file's path; None for that of `TILELOOM_BUNDLE`, if any.

    Raises:
        BundleError: If the file is no bundle, has another format, or is damaged.
    """
    used = load_bundle(bundle) if isinstance(bundle, str | Path) else bundle
    _given[:] = [] if used is None else [used]


@functools.lru_cache(maxsize=8)
def _opened(path: Path) -> Bundle:
    return load_bundle(path)


def active_bundle() -> Bundle | None:
    """Return the bundle in which launches look, None if there is none."""
    if _given:
        return _given[0]
    path = knobs.get("launch.bundle")
    return None if path is None else _opened(Path(path))


def find_kernel(
    function: str,
    source: str,
    arch: str,
    *,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    aligned: Iterable[str],
    options: Mapping[str, Any],
) -> tuple[Bundle, Variant] | None:
    """Look for a kernel in the active bundle, before it is compiled.

    Args:
        function: ``"module:name"``; this and all others as for `bundle_key.kernel_key`.
        source: Hash of its source.
        arch: For example ``"sm_90"``.
        types: Type of each parameter that is no constant.
        constants: Values of the others.
        aligned: Parameters that are specialised as divisible by 16.
        options: Compile options.

    Returns:
        The bundle and the variant in it; None if the kernel is to be compiled.

    Raises:
        CompileError: If it is not there and compiling is forbidden; the text has all of the above.
        BundleError: If the bundle cannot be read.
    """
    bundle = active_bundle()
    forbidden = knobs.get("launch.jit") == "forbid"
    if bundle is None and not forbidden:
        return None
    aligned = sorted(aligned)
    key = kernel_key(
        function, source, arch, types=types, constants=constants, aligned=aligned, options=options
    )
    found = None if bundle is None else bundle.find(key)
    if bundle is not None and found is not None:
        _log.info("%s for %s: '%s' of '%s'", function, arch, found.name, bundle.path)
        return bundle, found
    if forbidden:
        raise CompileError(
            _forbidden(function, source, arch, types, constants, aligned, options, key, bundle)
        )
    _log.info("%s for %s: not in '%s', key %s", function, arch, bundle and bundle.path, key)
    return None


def _forbidden(
    function: str,
    source: str,
    arch: str,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    aligned: list[str],
    options: Mapping[str, Any],
    key: str,
    bundle: Bundle | None,
) -> str:
    where = "there is no bundle" if bundle is None else f"'{bundle.path}' does not hold it"
    if bundle is not None and _has_other_source(bundle, function, source):
        where += ": it was built from another source of this function"
    return (
        f"launch: {function} for {arch} would have to be compiled, which TILELOOM_JIT=forbid (knob "
        f"launch.jit) forbids, and {where}.\n"
        f"  types: {_listed(types)}\n"
        f"  multiples of 16: {', '.join(aligned) or 'none'}\n"
        f"  constants: {_listed(constants)}\n"
        f"  options: {_listed(options_that_differ(options))}\n"
        f"  key: {key}\n"
        "Try: build a bundle with this kernel (`tileloom bundle build`), or allow compiling."
    )


def _has_other_source(bundle: Bundle, function: str, source: str) -> bool:
    sources = {v.source for v in bundle.variants() if v.function == function}
    return bool(sources) and source not in sources


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{n}={v if isinstance(v, str) else repr(v)}" for n, v in values.items()) or (
        "none"
    )
