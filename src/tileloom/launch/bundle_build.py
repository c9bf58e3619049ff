"""Compile kernels in child processes and write them into a bundle; needs Triton, but no GPU."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tileloom.errors import BundleError, CompileError, OptionError, known_keywords
from tileloom.launch.aot import CompiledKernel, CompileResult, KernelSpec, compile_in_workers
from tileloom.launch.bundle_format import Constant, Parameter, Variant, path_of, write_bundle
from tileloom.launch.bundle_key import kernel_key, options_that_differ
from tileloom.launch.bundle_parameters import fields_of, ptx_fields, types_of

_PTX_VERSION = re.compile(r"^\.version\s+(\S+)", re.MULTILINE)
_PTX_TARGET = re.compile(r"^\.target\s+(\w+)", re.MULTILINE)


@known_keywords
def build_bundle(
    path: Path | str,
    pairs: Sequence[tuple[KernelSpec, str]],
    *,
    workers: int | None = None,
    timeout_s: float = 120,
    triton_path: Path | None = None,
    cache_dir: Path | None = None,
    on_result: Callable[[CompileResult], None] | None = None,
    winners: Sequence[Mapping[str, Any]] = (),
) -> list[Variant]:
    """Compile kernels with no GPU and write them into one file that launches without Triton.

    Building the same kernels twice with one toolchain gives the same bytes. The file appears whole
    or not at all, also where two processes build it at once: the later one stays.

    Args:
        path: The file; what is there is replaced once everything has been compiled.
        pairs: Kernels and architectures; see `bundle_specs.specs_of` for kernels of your own.
        workers: Number of compiling processes; by default one a core.
        timeout_s: Seconds for one kernel.
        triton_path: A folder with another Triton to compile with.
        cache_dir: Folder for Triton's cache, kept. By default a new one, deleted afterwards.
        on_result: Called in this process with each result as it arrives.
        winners: Records of tuned kernels, as plain data; see `tileloom.tuning.bundled`.

    Returns:
        What the bundle holds, in the order of `pairs`.

    Raises:
        OptionError: If there is nothing to build, a kernel is named twice, or the folder of `path`
            does not exist.
        CompileError: If a kernel does not compile; nothing is written.
        BundleError: If a kernel cannot be bundled; nothing is written.
        OSError: If the file cannot be written.
    """
    path = path_of(path)
    _check(path, pairs)
    results = compile_in_workers(
        pairs,
        workers=workers,
        timeout_s=timeout_s,
        triton_path=triton_path,
        cache_dir=cache_dir,
        on_result=on_result,
    )
    return bundle_results(path, [spec for spec, _ in pairs], results, winners)


def _is_pair(given: object) -> bool:
    return (
        isinstance(given, (tuple, list))
        and len(given) == 2
        and isinstance(given[0], KernelSpec)
        and isinstance(given[1], str)
    )


def _check(path: Path, pairs: Sequence[tuple[KernelSpec, str]]) -> None:
    given: Any = pairs
    if not isinstance(given, Sequence) or not all(map(_is_pair, given)):
        raise OptionError(
            f"bundle: pairs is {given!r:.80}; it must be a list of pairs "
            "of a KernelSpec and an architecture. Try: [(spec, 'sm_90') for spec in specs]."
        )
    if not pairs:
        raise OptionError("bundle: there is no kernel to build. Try: name at least one.")
    if path.is_dir():
        raise OptionError(
            f"bundle: path is '{path}', which is a folder; it must name a file. "
            f"Try: '{path / 'my.bundle'}'."
        )
    if not path.parent.is_dir():
        raise OptionError(
            f"bundle: path is '{path}'; it must name a file in a folder that exists. Try: make "
            f"the folder '{path.parent}' first."
        )
    named = [(spec.name, arch.removesuffix("a")) for spec, arch in pairs]
    if twice := sorted(
        {f"{name} for {arch}" for name, arch in named if named.count((name, arch)) > 1}
    ):
        raise OptionError(f"bundle: given twice: {', '.join(twice)}. Try: name each once.")


def bundle_results(
    path: Path,
    specs: Sequence[KernelSpec],
    results: Sequence[CompileResult],
    winners: Sequence[Mapping[str, Any]] = (),
) -> list[Variant]:
    """Write kernels that have been compiled already into a bundle; see `build_bundle`.

    Args:
        path: The file.
        specs: What was compiled.
        results: For each spec what became of it.
        winners: Records of tuned kernels, as plain data.
    """
    if failed := [result.error for result in results if result.error is not None]:
        raise CompileError("\n\n".join(failed))
    binaries: dict[bytes, int] = {}
    variants = [
        _variant(spec, result, binaries.setdefault(result.cubin, len(binaries)))
        for spec, result in zip(specs, results, strict=True)
        if result.error is None
    ]
    version = sys.modules["tileloom"].__version__
    write_bundle(path, variants, list(binaries), tileloom=version, winners=winners)
    return variants


def _variant(spec: KernelSpec, kernel: CompiledKernel, binary: int) -> Variant:
    facts = kernel.launch
    parameters = _parameters(spec, kernel)
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, **spec.options}
    variant = Variant(
        name=spec.name,
        function=spec.function,
        source=facts.source,
        key=kernel_key(
            spec.function,
            facts.source,
            kernel.arch,
            types={n: kind for n, kind in facts.signature.items() if kind != "constexpr"},
            constants=spec.constexprs,
            aligned=spec.aligned,
            options=options,
        ),
        arch=kernel.arch,
        target=_first(_PTX_TARGET, kernel.ptx),
        ptx_version=_first(_PTX_VERSION, kernel.ptx),
        toolkit=facts.toolkit,
        triton=kernel.triton,
        parameters=parameters,
        options={
            **{n: options[n] for n in ("num_warps", "num_stages")},
            **{n: _constant(spec, n, value) for n, value in options_that_differ(options).items()},
        },
        entry=facts.entry,
        threads=kernel.threads,
        num_ctas=facts.num_ctas,
        shared_bytes=kernel.shared_bytes,
        registers=kernel.registers,
        cooperative=facts.cooperative,
        pdl=facts.pdl,
        scratch_bytes=facts.scratch_bytes,
        binary=binary,
    )
    _check_layout(variant, kernel)
    return variant


def _first(pattern: re.Pattern[str], ptx: str) -> str:
    match = pattern.search(ptx)
    return match[1] if match else ""


def _parameters(spec: KernelSpec, kernel: CompiledKernel) -> tuple[Parameter, ...]:
    descriptors = iter(kernel.launch.descriptors)
    made: list[Parameter] = []
    for name, kind in kernel.launch.signature.items():
        value, descriptor = None, None
        if kind == "constexpr":
            value = _constant(spec, name, spec.constexprs[name])
        elif kind.startswith("tensordesc"):
            descriptor = _descriptor(spec, name, kernel.arch, next(descriptors, None))
        optional = name in kernel.launch.compile_time
        made.append(Parameter(name, kind, name in spec.aligned, optional, value, descriptor))
    return tuple(made)


def _constant(spec: KernelSpec, name: str, value: Any) -> Constant:
    """Return a constant that a manifest can hold: a type of Triton's goes by its name."""
    if type(value).__module__.startswith("triton."):
        return str(value)
    if value is not None and type(value) not in (bool, int, float, str):
        raise BundleError(
            f"bundle: {name} of kernel '{spec.name}' is a {type(value).__name__}; a bundle holds "
            "None, bool, int, float, str and Triton's types as constants. Try: pass it as several "
            "such parameters."
        )
    return value


_ENCODING = ("swizzle", "elem_size", "elem_type", "block_size", "fp4_padded")


def _descriptor(
    spec: KernelSpec, name: str, arch: str, encoding: dict[str, Any] | None
) -> dict[str, Any]:
    if encoding is None:
        raise BundleError(
            f"bundle: {name} of kernel '{spec.name}' is a descriptor, and {arch} has no tensor "
            "maps. Try: sm_90, or a kernel that takes pointers."
        )
    if encoding.get("is_im2col"):
        raise BundleError(
            f"bundle: {name} of kernel '{spec.name}' is an im2col descriptor; a bundle carries "
            "tiled ones. Try: launch this kernel by Triton."
        )
    return {key: encoding[key] for key in _ENCODING}


def _check_layout(variant: Variant, kernel: CompiledKernel) -> None:
    """Compare where this package puts the parameters with where the compiled kernel reads them."""
    ours, theirs = fields_of(types_of(variant.parameters)), ptx_fields(kernel.ptx)
    if ours != theirs:
        raise BundleError(
            f"bundle: kernel '{variant.name}' for {variant.arch}, compiled by Triton "
            f"{kernel.triton}, reads its parameters at {theirs}; tileloom would put them at "
            f"{ours}. Try: another Triton from 3.6 to 3.9, and report this."
        )
    if kernel.launch.profile_bytes:
        raise BundleError(
            f"bundle: kernel '{variant.name}' was compiled for Triton's profiler, which a bundle "
            "has not. Try: without instrumentation."
        )
