"""Compile kernels with no GPU and report what they cost: registers, spills, shared memory.

`compile_aot` compiles in this process, `compile_in_workers` in child processes, where a compiler
that aborts or hangs costs one result and not the caller.

>>> from tileloom.launch.aot import compile_in_workers
>>> from tileloom.ops.attention.kernels import shipped
>>> results = compile_in_workers([(spec, arch) for spec in shipped() for arch in spec.archs])
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import re
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tileloom.errors import CompileError, OptionError, known_keywords, shown_value
from tileloom.launch import compat
from tileloom.launch.occupancy import blocks_per_sm, limits_of, normal_arch

if TYPE_CHECKING:
    from tileloom.launch.workers import WorkerPool


@dataclass(frozen=True)
class KernelSpec:
    """A shipped config of a kernel, as something that can be compiled with no GPU.

    Attributes:
        name: Unique, for example ``"attention_fwd_gluon_sm90[d128-causal-bf16]"``.
        function: ``"module:name"`` of the jitted function; imported only where it is compiled.
        gluon: Whether it is a Gluon kernel.
        signature: Type of every parameter: ``"*bf16"``, ``"i32"``, ``"fp32"``, ``"constexpr"``,
            or ``"tensordesc<bf16[1, 1, 64, 128],{layout}>"``, where ``{layout}`` stands for the
            parameter's entry in `layouts`.
        constexprs: Values of the parameters of type ``"constexpr"``.
        archs: Architectures that the config ships for, for example ``("sm_80", "sm_90")``.
        num_warps: Warps of the block; with warp specialisation those of the first partition.
        num_stages: Depth of Triton's own pipeline; Gluon kernels have their own.
        layouts: For descriptors of Gluon kernels the keyword arguments of `NVMMASharedLayout`.
        aligned: Parameters to specialise as divisible by 16.
        options: Further compile options of Triton's, for example ``{"maxnreg": 128}``.
        spill_budget: Bytes of spill stores and loads that are allowed.
        spill_reason: The measurement that justifies a budget above 0.
        threads: Threads of the whole block where warp specialisation adds warps; only checked
            against what the compiler says.
        file: The module's file, where it is not found by its name alone.
    """

    name: str
    function: str
    gluon: bool
    signature: dict[str, str]
    constexprs: dict[str, object]
    archs: tuple[str, ...]
    num_warps: int = 4
    num_stages: int = 3
    layouts: dict[str, dict[str, Any]] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    spill_budget: int = 0
    spill_reason: str = ""
    threads: int | None = None
    file: str = ""

    def __post_init__(self) -> None:
        function: object = self.function
        if not isinstance(function, str) or ":" not in function:
            raise OptionError(
                f"KernelSpec: function is {shown_value(function)}; it must name a module and a "
                "function. Try: 'my_package.kernels:my_kernel'."
            )
        for name, given in (("signature", self.signature), ("constexprs", self.constexprs)):
            if not isinstance(given, Mapping):
                raise OptionError(
                    f"KernelSpec: {name} is {given!r:.80}; it must be a dictionary by the names of "
                    "parameters. Try: {'x': '*fp16', 'BLOCK': 'constexpr'}, or {'BLOCK': 128}."
                )


@dataclass(frozen=True)
class LaunchFacts:
    """What a launch of a compiled kernel needs to know, beside its binary.

    Attributes:
        entry: Name of the function in the binary.
        source: Hash of the kernel's source, see `compat.source_hash`.
        signature: Type of every parameter in order, the layouts of descriptors written out.
        compile_time: Parameters that the function itself declares as compile-time ones.
        descriptors: For each descriptor parameter in order how its tensor map is encoded; empty
            where the architecture has none, and Triton passes pointer, shape and strides.
        num_ctas: Blocks of a cluster.
        cooperative: Whether the whole grid must be resident.
        pdl: Whether it starts before the kernel ahead of it has ended.
        scratch_bytes: Global memory that each block needs.
        profile_bytes: The same for Triton's profiler.
        toolkit: Version of the assembler, for example ``"12.8"``.
    """

    entry: str
    source: str
    signature: dict[str, str]
    compile_time: frozenset[str]
    descriptors: tuple[dict[str, Any], ...]
    num_ctas: int
    cooperative: bool
    pdl: bool
    scratch_bytes: int
    profile_bytes: int
    toolkit: str


@dataclass(frozen=True)
class CompiledKernel:
    """What one kernel costs on one architecture, and its texts.

    Attributes:
        name: The spec's name.
        arch: For example ``"sm_90"``.
        registers: 32-bit registers of each thread at launch.
        spill_bytes: Bytes of spill stores plus spill loads.
        shared_bytes: Shared memory of a block.
        stages: Depth of the pipeline: the spec's `num_stages`, for Gluon its constant
            `NUM_STAGES` or `STAGES`, None where it has neither.
        num_warps: Warps of the whole block.
        threads: Threads of the whole block.
        occupancy: Blocks that one SM holds; 0 if none can hold it.
        compile_s: Seconds inside Triton's compiler, the import of Triton and of the kernel not
            counted.
        cached: Whether Triton's cache had the kernel, so that `compile_s` is no compile time.
        ptxas_warnings: What the assembler warned of; C75xx codes mean that it serialised wgmma.
        triton: Version of the compiler, for example ``"3.7.1"``.
        launch: What a launch needs beside the binary.
        error: Always None: what tells it from a `CompileFailure`.
    """

    name: str
    arch: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    stages: int | None
    num_warps: int
    threads: int
    occupancy: int
    compile_s: float
    cached: bool
    ptxas_warnings: tuple[str, ...]
    triton: str
    launch: LaunchFacts = field(repr=False)
    triton_folder: Path = field(repr=False)
    _packed: dict[str, bytes] = field(repr=False, compare=False)
    error: None = None

    @property
    def ttir(self) -> str:
        """The Triton IR; empty for a Gluon kernel, which has none."""
        return self._unpack("ttir").decode()

    @property
    def ttgir(self) -> str:
        """The Triton GPU IR."""
        return self._unpack("ttgir").decode()

    @property
    def ptx(self) -> str:
        """The PTX text."""
        return self._unpack("ptx").decode()

    @property
    def cubin(self) -> bytes:
        """The binary."""
        return self._unpack("cubin")

    @property
    def sass(self) -> str:
        """The machine code, disassembled at each call."""
        return compat.disassemble(self.cubin, self.triton_folder)

    def _unpack(self, name: str) -> bytes:
        return zlib.decompress(self._packed[name]) if name in self._packed else b""


@dataclass(frozen=True)
class CompileFailure:
    """A kernel that did not compile.

    Attributes:
        name: The spec's name.
        arch: For example ``"sm_90"``.
        error: What happened: kernel, architecture, stage, cause, and the compiler's last lines.
    """

    name: str
    arch: str
    error: str


CompileResult = CompiledKernel | CompileFailure
"""Test `result.error is None` to tell the two apart."""


@known_keywords
def compile_aot(spec: KernelSpec, arch: str, *, cache_dir: Path | None = None) -> CompiledKernel:
    """Compile a kernel in this process, with no GPU.

    The compiler may abort the process on an invalid layout: prefer `compile_in_workers`. Not for
    several threads at a time: it redirects `sys.stdout`, where Triton prints the assembler's log.

    Args:
        spec: The kernel.
        arch: Architecture, for example ``"sm_90"`` or ``"sm_90a"``, which mean the same. It may be
            one that the spec does not list.
        cache_dir: Folder for Triton's cache. By default a new one, deleted afterwards, so that
            `compile_s` is a compile time.

    Returns:
        The kernel's costs and texts.

    Raises:
        OptionError: If tileloom does not compile for `arch`.
        CompileError: If the spec does not fit the function, or the kernel does not compile.
    """
    import triton

    arch = normal_arch(arch)
    source = _source(spec, arch)
    _check_options(spec, limits_of(arch).capability)
    options = {**compat.compile_options(spec.num_warps, spec.num_stages), **spec.options}
    target = compat.gpu_target(limits_of(arch).capability)
    with (
        tempfile.TemporaryDirectory(prefix="tileloom-aot-") as fresh,
        compat.compiler_settings(cache_dir or Path(fresh)) as printed,
    ):
        started = time.perf_counter()
        try:
            compiled = triton.compile(source, target=target, options=options)
        except Exception as error:
            raise CompileError(_failure_text(spec, arch, error)) from error
        compile_s = time.perf_counter() - started
    log = printed.getvalue()
    cached = not _REGISTERS.search(log)
    if cached:
        try:
            log = compat.assemble_again(compiled.asm["ptx"], options, limits_of(arch).capability)
        except Exception:  # written for another assembler: Inductor sets TRITON_PTXAS_PATH late
            return compile_aot(spec, arch)
    registers, spill_bytes, warnings = read_assembler_log(log)
    packed = {
        name: zlib.compress(text.encode() if isinstance(text, str) else text, 1)
        for name, text in ((n, compiled.asm.get(n)) for n in ("ttir", "ttgir", "ptx", "cubin"))
        if text is not None
    }
    threads = _threads(compiled.asm["ptx"], compiled.metadata.num_warps)
    shared_bytes = int(compiled.metadata.shared)
    return CompiledKernel(
        name=spec.name,
        arch=arch,
        registers=registers,
        spill_bytes=spill_bytes,
        shared_bytes=shared_bytes,
        stages=_stages(spec),
        num_warps=-(-threads // 32),
        threads=threads,
        occupancy=blocks_per_sm(
            limits_of(arch), registers=registers, threads=threads, shared_bytes=shared_bytes
        ),
        compile_s=compile_s,
        cached=cached,
        ptxas_warnings=warnings,
        triton=".".join(map(str, compat.triton_version())),
        launch=_launch_facts(source, compiled.metadata, limits_of(arch).capability),
        triton_folder=Path(triton.__file__).parent,
        _packed=packed,
    )


_REGISTERS = re.compile(r"\bUsed (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_ENTRY_THREADS = re.compile(r"\.reqntid\s+(\d+)")
_NOTE = re.compile(r"^ptxas\b.*?(?:\bwarning\s*:\s*|(?=\(C\d+\)))(.*)$", re.MULTILINE)


def read_assembler_log(log: str) -> tuple[int, int, tuple[str, ...]]:
    """Read registers, spills and warnings from what `ptxas -v` wrote.

    Args:
        log: The text. It may name several functions.

    Returns:
        The most registers that any function uses, the spill bytes of all functions together, and
        each warning once: lines marked as one, and lines with a code such as ``(C7510)``, which
        the assembler calls information although they mean that it serialised wgmma.
    """
    registers = max((int(n) for n in _REGISTERS.findall(log)), default=0)
    spill_bytes = sum(int(a) + int(b) for a, b in _SPILLS.findall(log))
    warnings = tuple(dict.fromkeys(text.strip() for text in _NOTE.findall(log)))
    return registers, spill_bytes, warnings


def serialises_wgmma(warning: str) -> bool:
    """Say whether a text of `CompiledKernel.ptxas_warnings` has one of the codes C7500 to C7599."""
    return re.match(r"\(C75\d\d\)", warning) is not None


def _launch_facts(source: Any, metadata: Any, capability: int) -> LaunchFacts:
    return LaunchFacts(
        entry=metadata.name,
        source=compat.source_hash(source.fn),
        signature=dict(source.signature),
        compile_time=frozenset(p.name for p in source.fn.params if p.is_constexpr),
        descriptors=tuple(metadata.tensordesc_meta or ()),
        num_ctas=metadata.num_ctas,
        cooperative=metadata.launch_cooperative_grid,
        pdl=metadata.launch_pdl,
        scratch_bytes=metadata.global_scratch_size,
        profile_bytes=metadata.profile_scratch_size,
        toolkit=compat.assembler_version(capability),
    )


def _threads(ptx: str, num_warps: int) -> int:
    entry = _ENTRY_THREADS.search(ptx)
    return int(entry.group(1)) if entry else num_warps * 32


def _stages(spec: KernelSpec) -> int | None:
    if not spec.gluon:
        return spec.num_stages
    depth = (spec.constexprs.get(name) for name in ("NUM_STAGES", "STAGES"))
    return next((value for value in depth if isinstance(value, int)), None)


def _load(spec: KernelSpec, arch: str) -> Any:
    from triton.runtime.jit import JITFunction

    module, _, attribute = spec.function.partition(":")
    try:
        loaded = _load_file(module, spec.file) if spec.file else importlib.import_module(module)
        function = getattr(loaded, attribute)
    except Exception as error:
        raise CompileError(
            _failure_text(spec, arch, error, stage="importing the kernel")
        ) from error
    # A tuner or a heuristic may lie around the function; the emulator's is no JITFunction at all.
    while not isinstance(function, JITFunction) and hasattr(function, "fn"):
        function = function.fn
    if not isinstance(function, JITFunction) or function.is_gluon() != spec.gluon:
        wanted = "gluon.jit" if spec.gluon else "triton.jit"
        raise CompileError(
            f"compile: {spec.function} of kernel '{spec.name}' is a {type(function).__name__}; a "
            f"function made by {wanted} is needed. Try: set `gluon` as the decorator says, and "
            "unset TRITON_INTERPRET."
        )
    return function


def _load_file(name: str, file: str) -> ModuleType:
    """Import a module from a file; under its own name, which is in Triton's key of its kernels."""
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, file)
    if found is None or found.loader is None:
        raise ImportError(f"'{file}' is no Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _source(spec: KernelSpec, arch: str) -> Any:
    function = _load(spec, arch)
    names = list(function.arg_names)
    constant = {name for name, kind in spec.signature.items() if kind == "constexpr"}
    odd = {
        "signature": set(names) ^ set(spec.signature),
        "constexprs": constant ^ set(spec.constexprs),
        "aligned": set(spec.aligned) - set(names),
        "layouts": set(spec.layouts) - set(names),
    }
    for where, which in odd.items():
        if which:
            raise CompileError(
                f"compile: {where} of kernel '{spec.name}' and the parameters of {spec.function} "
                f"differ in {', '.join(sorted(which))}; the parameters are {', '.join(names)}. "
                f"Try: make {where} name each of them as the function does."
            )
    signature = {
        name: kind.replace("{layout}", _layout(spec.layouts[name])) if "{layout}" in kind else kind
        for name, kind in spec.signature.items()
    }
    return compat.ast_source(
        function, gluon=spec.gluon, signature=signature, constexprs=spec.constexprs,
        aligned=spec.aligned,
    )  # fmt: skip


def _check_options(spec: KernelSpec, capability: int) -> None:
    known = compat.option_names(capability) if spec.options else []
    for name in spec.options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Try: one of {', '.join(known)}."
            raise CompileError(
                f"compile: kernel '{spec.name}' has the option {name}, which Triton does not have. "
                f"{hint}"
            )


def _layout(arguments: Mapping[str, Any]) -> str:
    from triton.experimental.gluon import language as gl

    return repr(gl.NVMMASharedLayout(**arguments))


_STAGES = {
    "CompilationError": "the front end (Python to Triton IR)",
    "CompileTimeAssertionFailure": "the front end (Python to Triton IR)",
    "PTXASError": "the assembler (ptxas)",
}


def _failure_text(spec: KernelSpec, arch: str, error: Exception, *, stage: str = "") -> str:
    stage = stage or _STAGES.get(type(error).__name__, "lowering")
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
    text = [
        f"compile: kernel '{spec.name}' failed for {arch} in {stage}: {type(error).__name__}.",
        *(f"  {line}" for line in lines[:1] + lines[1:][-11:]),
    ]
    if spec.function.startswith("tileloom."):  # `inspect` knows no others
        text.append(f"Reproduce: tileloom inspect '{spec.name}' --arch {arch}")
    return "\n".join(text)


def compile_in_workers(
    pairs: Sequence[tuple[KernelSpec, str]],
    *,
    workers: int | None = None,
    timeout_s: float = 120,
    triton_path: Path | None = None,
    cache_dir: Path | None = None,
    on_result: Callable[[CompileResult], None] | None = None,
    pool: WorkerPool | None = None,
) -> list[CompileResult]:
    """Compile kernels in child processes: neither an abort nor a hang reaches the caller.

    Args:
        pairs: Kernels and architectures.
        workers: Number of processes; by default one for each core that this process may use, no
            more than there are pairs.
        timeout_s: Seconds for one kernel. A process that takes longer is killed with everything
            that it started, such as a hung assembler.
        triton_path: A folder with another Triton, put first on the children's import path.
        cache_dir: Folder for Triton's cache, kept. By default a new one, deleted afterwards.
        on_result: Called in this process with each result as it arrives.
        pool: Children that are there already, with a time-out, a Triton and a cache of their own.

    Returns:
        One result for each pair, in their order. What failed is a `CompileFailure`, whose text
        names the kernel and ends with the last lines that the compiler wrote.

    Raises:
        OptionError: If tileloom does not compile for one of the architectures, or `workers` or
            `timeout_s` is not positive.
    """
    from tileloom.launch.workers import WorkerPool

    if workers is not None and workers < 1:
        raise OptionError(
            f"compile: workers is {workers}; it must be at least 1, or None for one a core. "
            "Try: workers=None."
        )
    if not 0 < timeout_s <= 1e6:
        raise OptionError(
            f"compile: timeout_s is {timeout_s}; it must be a number of seconds, above 0 and at "
            "most a million. Try: 120."
        )
    jobs = [(spec, normal_arch(arch)) for spec, arch in pairs]
    if pool is not None:
        return pool.run(jobs, workers=workers, on_result=on_result)
    with tempfile.TemporaryDirectory(prefix="tileloom-aot-") as fresh:
        pool = WorkerPool(
            cache_dir=cache_dir or Path(fresh), triton_path=triton_path, timeout_s=timeout_s
        )
        return pool.run(jobs, workers=workers, on_result=on_result)
