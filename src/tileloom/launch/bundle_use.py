"""What the package's own launches ask before they compile: is the kernel in a bundle?

The bundle is the one of `use_bundle`, else that of the knob ``launch.bundle`` (`TILELOOM_BUNDLE`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tileloom import knobs, log
from tileloom.errors import CompileError
from tileloom.launch import compat, driver, watch
from tileloom.launch.aot import KernelSpec
from tileloom.launch.bundle import Bundle, load_bundle
from tileloom.launch.bundle_key import kernel_key, options_that_differ
from tileloom.launch.bundle_variant import BundledVariant
from tileloom.launch.specialize import Parameter, specialize

_log = log.get_logger("launch")
_given: list[Bundle] = []  # none or one


def use_bundle(bundle: Bundle | str | Path | None) -> None:
    """Let the package's operators, and launchers of `launch.prepare`, take kernels from a bundle.

    A launch looks there before it compiles, by all that the kernel would be compiled from: source,
    types, alignments, constants, options and architecture. What is not there is compiled as before,
    or refused where the knob ``launch.jit`` says ``"forbid"``. Every launcher forgets the kernels
    that it has.

    Args:
        bundle: A bundle or a file's path; None for that of `TILELOOM_BUNDLE`, if any.

    Raises:
        BundleError: If the file is no bundle, has another format, or is damaged.
    """
    used = bundle
    if used is not None and not isinstance(used, Bundle):
        used = load_bundle(used)
    _given[:] = [] if used is None else [used]
    watch.refresh()


_recordings: list[list[KernelSpec]] = []


@contextlib.contextmanager
def record_specs() -> Generator[list[KernelSpec]]:
    """Collect every kernel that is launched inside a `with` block, to build a bundle of them.

    Launches of the package's operators are seen, and those of launchers of `launch.prepare`; all
    threads' alike. What Triton alone may launch (see `refuse_plain`) is not, nor what is launched
    by `kernel[grid]` or played by `emulator.run`: a block that records nothing ends with a warning.

    Yields:
        A list that grows by one spec a kernel; `build_bundle` takes them.

    >>> with record_specs() as specs:  # doctest: +SKIP
    ...     model(x)
    >>> build_bundle("model.bundle", [(s, s.archs[0]) for s in specs])  # doctest: +SKIP
    """
    specs: list[KernelSpec] = []
    _recordings.append(specs)
    watch.refresh()  # so that launchers look for the kernels they have already
    try:
        yield specs
        if not specs:
            log.warn(
                "record_specs: no kernel was recorded: no launch of an operator, or of a launcher "
                "of launch.prepare, reached a GPU here; those of kernel[grid] and of emulator.run "
                "are not seen. Try: run it on the GPU, outside emulator.run."
            )
    finally:
        _recordings[:] = [other for other in _recordings if other is not specs]


def _recorded_name(kernel: Any, key: str) -> str:
    return f"{kernel.__name__}[{key[:16]}]"


def _spec(kernel: Any, wanted: Mapping[str, Any], key: str, file: str) -> KernelSpec:
    given = {name: value for name, value in wanted["options"].items() if value is not None}
    config = {"num_warps": 4, "num_stages": 3} | given
    return KernelSpec(
        name=_recorded_name(kernel, key),
        function=wanted["function"],
        gluon=kernel.is_gluon(),
        signature={name: wanted["types"].get(name, "constexpr") for name in kernel.arg_names},
        constexprs=wanted["constants"],
        archs=(wanted["arch"],),
        num_warps=config.pop("num_warps"),
        num_stages=config.pop("num_stages"),
        aligned=tuple(wanted["aligned"]),
        options=options_that_differ(config),
        file=file,
    )


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
    kernel: Any,
    parameters: Sequence[Parameter],
    values: Sequence[Any],
    options: Mapping[str, Any],
    device: int,
) -> BundledVariant | None:
    """Look for a launch's kernel in the active bundle, before it is compiled.

    Args:
        kernel: The jitted function.
        parameters: Its parameters.
        values: All arguments, in their order.
        options: Compile options.
        device: The device's number.

    Returns:
        The kernel, loaded; None if it is to be compiled.

    Raises:
        CompileError: If it is not there and compiling is forbidden; the text has all that was
            looked for.
        BundleError: If the bundle cannot be read.
        Unsupported: If only Triton's own path takes such arguments.
    """
    if active_bundle() is None and not is_forbidden() and not _recordings:
        return None
    wanted = _wanted(kernel, parameters, values, options, device)
    record_wanted(kernel, wanted)
    return find_wanted(kernel, wanted, device)


def record_wanted(kernel: Any, wanted: Mapping[str, Any], file: str = "") -> None:
    """Note a launch's kernel for `record_specs`.

    Args:
        kernel: The jitted function.
        wanted: The arguments of `kernel_key` by name.
        file: The file of generated code that holds it, if it is such.
    """
    key = kernel_key(**wanted) if _recordings else ""
    for specs in _recordings:
        if all(spec.name != _recorded_name(kernel, key) for spec in specs):
            specs.append(_spec(kernel, wanted, key, file))


def find_wanted(kernel: Any, wanted: Mapping[str, Any], device: int) -> BundledVariant | None:
    """Look for a kernel in the active bundle by all that it would be compiled from.

    Args:
        kernel: The jitted function.
        wanted: The arguments of `kernel_key` by name.
        device: The device's number.

    Returns:
        The kernel, loaded; None if it is to be compiled.

    Raises:
        CompileError, BundleError: As `find_kernel`.
    """
    bundle = active_bundle()
    if bundle is None and not is_forbidden():
        return None
    key = kernel_key(**wanted)
    function, arch = wanted["function"], wanted["arch"]
    found = None if bundle is None else bundle.find(key)
    if bundle is not None and found is not None:
        _log.info("%s for %s: '%s' of '%s'", function, arch, found.name, bundle.path)
        return BundledVariant(bundle, found, kernel, device)
    if is_forbidden():
        raise CompileError(_forbidden(wanted, key, bundle))
    if bundle is not None:
        _log.info("%s for %s: not in '%s', key %s", function, arch, bundle.path, key)
    return None


def is_forbidden() -> bool:
    """Whether the knob ``launch.jit`` forbids to compile."""
    return knobs.get("launch.jit") == "forbid"


def refuse_plain(name: str) -> None:
    """Refuse a launch by Triton's own path, which would compile, where that is forbidden.

    Args:
        name: The kernel's.

    Raises:
        CompileError: If it is forbidden.
    """
    if is_forbidden():
        raise CompileError(
            f"launch: '{name}' would go through Triton's own launch, and be compiled, because of a "
            "hook, a debugging mode, the plain tier, pinned memory or an argument that only Triton "
            "takes; TILELOOM_JIT=forbid (knob launch.jit) forbids it. Try: without these, or allow "
            "compiling."
        )


def _wanted(
    kernel: Any,
    parameters: Sequence[Parameter],
    values: Sequence[Any],
    options: Mapping[str, Any],
    device: int,
) -> dict[str, Any]:
    """Everything that a launch's kernel would be compiled from, as `kernel_key` takes it."""
    pairs = {p.name: specialize(p, value) for p, value in zip(parameters, values)}
    inner = kernel.fn
    return {
        "function": f"{inner.__module__}:{inner.__qualname__}",
        "source": compat.source_hash(kernel),
        "arch": f"sm_{driver.capability(device)}",
        "types": {n: kind for n, (kind, _) in pairs.items() if kind != "constexpr"},
        "constants": {n: value for n, (kind, value) in pairs.items() if kind == "constexpr"},
        "aligned": sorted(n for n, (kind, p) in pairs.items() if kind != "constexpr" and p == "D"),
        "options": dict(options),
    }


def _forbidden(wanted: Mapping[str, Any], key: str, bundle: Bundle | None) -> str:
    function = wanted["function"]
    where = "there is no bundle" if bundle is None else f"'{bundle.path}' does not hold it"
    if bundle is not None and _has_other_source(bundle, function, wanted["source"]):
        where += ": it was built from another source of this function"
    return (
        f"launch: {function} for {wanted['arch']} would have to be compiled, which "
        f"TILELOOM_JIT=forbid (knob launch.jit) forbids, and {where}.\n"
        f"  types: {_listed(wanted['types'])}\n"
        f"  multiples of 16: {', '.join(wanted['aligned']) or 'none'}\n"
        f"  constants: {_listed(wanted['constants'])}\n"
        f"  options: {_listed(options_that_differ(wanted['options']))}\n"
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
