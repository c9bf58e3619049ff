"""From a kernel's facts and its configs to compiled kernels, in worker processes first.

The workers compile into Triton's own cache, from where this process takes what it launches. A
compiler that aborts or an assembler that hangs costs one config and not the process.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tileloom import knobs, log
from tileloom.errors import OptionError
from tileloom.launch import compat
from tileloom.launch.aot import CompileResult, KernelSpec, compile_in_workers
from tileloom.launch.loading import cached
from tileloom.launch.workers import WorkerPool
from tileloom.tuning import declared
from tileloom.tuning.config import Config
from tileloom.tuning.identity import Problem

_log = log.get_logger("tuning")
_MOST_WORKERS = 8  # each takes some hundred MB
_KEPT_S = 60.0
_COOPERATIVE = ("launch_cooperative_grid", "launch_pdl")


@dataclass(frozen=True)
class Kernel:
    """A jitted function with everything that its configs leave open.

    Attributes:
        fn: The jitted function.
        types: Type of each parameter that is neither constant nor of the config.
        constants: Values of constant parameters.
        aligned: Parameters that are divisible by 16.
        options: Compile options that every config has.
        file: The file of generated code that holds it, if it is such.
    """

    fn: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...]
    options: Mapping[str, Any]
    file: str = ""

    @classmethod
    def of(
        cls,
        fn: Any,
        triton_meta: Mapping[str, Any],
        inductor_meta: Mapping[str, Any],
        file: str | None,
    ) -> Kernel:
        """Read what generated code states of a kernel.

        Args:
            fn: The jitted function.
            triton_meta: ``signature`` (types by parameter), ``constants``, ``configs`` (whose first
                says which parameters are divisible by 16), and compile options.
            inductor_meta: Facts; ``assert_indirect_indexing`` keeps assertions in the kernel.
            file: The file that holds it, for generated code.
        """
        constants = dict(triton_meta.get("constants") or {})
        signature = triton_meta["signature"]
        types = {
            name: str(signature[name])
            for name in fn.arg_names
            if name not in constants and signature.get(name, "constexpr") != "constexpr"
        }
        options: dict[str, Any] = {
            "debug": bool(inductor_meta.get("assert_indirect_indexing", False)),
            "sanitize_overflow": False,
            **{name: bool(triton_meta.get(name, False)) for name in _COOPERATIVE},
        }
        if "enable_fp_fusion" in triton_meta:
            options["enable_fp_fusion"] = triton_meta["enable_fp_fusion"]
        if triton_meta.get("disable_ftz"):
            options["enable_reflect_ftz"] = False
        aligned = _aligned(fn.arg_names, (triton_meta.get("configs") or [{}])[0])
        return cls(fn, types, constants, aligned, options, file or "")

    @functools.cached_property
    def name(self) -> str:
        """``"module:name"`` of the function."""
        return declared.full_name(self.fn)

    @functools.cached_property
    def source(self) -> str:
        """Hash of the function's source; see `compat.source_hash`."""
        return declared.source_hash(self.fn)

    @property
    def short_name(self) -> str:
        """The function's name."""
        return self.fn.__name__

    def parameters(self, inductor_meta: Mapping[str, Any]) -> list[str]:
        """Return the names of the arguments that a launch gives, in order."""
        declared = {p.name for p in self.fn.params if p.is_constexpr}
        given = [name for name in self.fn.arg_names if name not in declared]
        return [*given, *inductor_meta.get("extra_launcher_args", ())]

    def problem(
        self, size_hints: Mapping[str, int] | None, stages: str = "list", arch: str = "sm_90"
    ) -> Problem:
        """Return what a winner of this kernel is stored under; see `Problem`."""
        return Problem(
            self.name,
            self.source,
            self.types,
            self.constants,
            self.aligned,
            self.options,
            size_hints,
            stages,
            arch,
            tuple(self.fn.arg_names),
            bool(self.fn.is_gluon()),
        )

    def parts(self, config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split what a config compiles: the constants by parameter, and the compile options.

        Raises:
            OptionError: If a parameter has neither a type nor a value.
        """
        given = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        values = {**given, **self.constants, **config.kwargs}
        left = [name for name in self.fn.arg_names if name not in self.types]
        missing = [name for name in left if name not in values]
        if missing:
            raise OptionError(
                f"tuning: {', '.join(missing)} of '{self.short_name}' has neither a type in "
                f"triton_meta['signature'] nor a value in the config {config}. Try: add it to the "
                "config, or to triton_meta['constants']."
            )
        unknown = [name for name in config.kwargs if name not in left]
        if unknown:
            raise OptionError(
                f"tuning: the config {config} sets {', '.join(unknown)}, which is no constexpr "
                f"parameter of '{self.short_name}'; those are {', '.join(left) or 'none'}. Try: a "
                "config of these."
            )
        options: dict[str, Any] = {**given, **self.options}
        if config.num_ctas != 1:
            options["num_ctas"] = config.num_ctas
        if config.maxnreg is not None:
            options["maxnreg"] = config.maxnreg
        return {name: values[name] for name in left}, options

    def spec(self, config: Config, arch: str) -> KernelSpec:
        """Describe a config for the workers and for bundles.

        Args:
            config: The config.
            arch: For example ``"sm_90"``.
        """
        constants, options = self.parts(config)
        return KernelSpec(
            name=f"{self.short_name}[{config}]",
            function=self.name,
            gluon=bool(self.fn.is_gluon()),
            signature={name: self.types.get(name, "constexpr") for name in self.fn.arg_names},
            constexprs=constants,
            archs=(arch,),
            num_warps=options.pop("num_warps"),
            num_stages=options.pop("num_stages"),
            aligned=self.aligned,
            options=options,
            file=self.file,
        )

    def wanted(self, config: Config, arch: str) -> dict[str, Any]:
        """Return what a bundle knows the compiled config by; see `bundle_key.kernel_key`."""
        constants, options = self.parts(config)
        return {
            "function": self.name,
            "source": self.source,
            "arch": arch,
            "types": dict(self.types),
            "constants": constants,
            "aligned": sorted(self.aligned),
            "options": options,
        }

    def compile(self, config: Config, capability: int) -> Any:
        """Compile a config in this process, or take it from Triton's cache.

        Args:
            config: The config.
            capability: Compute capability as one number, such as 90.

        Returns:
            Triton's CompiledKernel; it is not loaded yet.
        """
        import triton

        spec = self.spec(config, f"sm_{capability}")
        source = self._source(spec, declared.loaded(self.fn))
        options = {**compat.compile_options(spec.num_warps, spec.num_stages), **spec.options}
        return triton.compile(source, target=compat.gpu_target(capability), options=options)

    def compile_all(self, configs: Sequence[Config], capability: int) -> dict[Config, Any]:
        """Compile configs side by side in this process: most of it is not Python's.

        Args:
            configs: The configs.
            capability: Compute capability as one number, such as 90.

        Returns:
            For each config what `compile` returns, or the exception that it raises.
        """

        def one(config: Config) -> Any:
            try:
                return self.compile(config, capability)
            except Exception as error:
                return error

        threads = min(len(configs), len(os.sched_getaffinity(0)))
        if threads < 2:
            return {config: one(config) for config in configs}
        with ThreadPoolExecutor(threads) as pool:
            return dict(zip(configs, pool.map(one, configs)))

    def cached(self, config: Config, capability: int, key: str) -> Any:
        """Take a config from Triton's cache by its name there; see `loading.cached`."""
        return cached(self._source(self.spec(config, f"sm_{capability}"), self.fn), key)

    def _source(self, spec: KernelSpec, fn: Any) -> Any:
        return compat.ast_source(
            fn, gluon=spec.gluon, signature=spec.signature, constexprs=spec.constexprs,
            aligned=spec.aligned,
        )  # fmt: skip

    @functools.cached_property
    def is_importable(self) -> bool:
        """Whether another process finds the function: in generated code, or in a module."""
        fn = declared.loaded(self.fn)
        inner = fn.fn
        if self.file:
            return Path(inner.__code__.co_filename) == Path(self.file)
        module, name = inner.__module__, inner.__qualname__
        if module == "__main__" or "." in name or not _is_found(module):
            return False
        found = getattr(sys.modules[module], name, None)
        while found is not None and found is not fn:
            found = getattr(found, "fn", None)
        return found is fn


def _is_found(module: str) -> bool:
    """Whether an import in another process would find a module that this one has loaded."""
    parent = module.rpartition(".")[0]
    if module not in sys.modules or (parent and parent not in sys.modules):
        return False
    path = getattr(sys.modules[parent], "__path__", None) if parent else None
    return any(finder.find_spec(module, path) is not None for finder in sys.meta_path)


def _aligned(names: Sequence[str], attributes: Any) -> tuple[str, ...]:
    """Return which parameters an attribute table of Triton's says are divisible by 16."""
    places: list[int]
    if isinstance(attributes, Mapping):
        places = [
            path[0]
            for path, facts in attributes.items()
            if any(fact[0] == "tt.divisibility" and fact[1] % 16 == 0 for fact in facts)
        ]
    else:  # PyTorch's named tuple, where it found no Triton
        places = list(getattr(attributes, "divisible_by_16", ()))
    return tuple([names[place] for place in places])


def precompile(
    kernel: Kernel,
    configs: Sequence[Config],
    arch: str,
    *,
    workers: int | None = None,
    timeout_s: float | None = None,
) -> dict[Config, CompileResult]:
    """Compile configs in worker processes, into Triton's cache.

    Args:
        kernel: The kernel.
        configs: The configs.
        arch: For example ``"sm_90"``.
        workers: Processes; by default one for each core, at most 8.
        timeout_s: Seconds for one config; by default the knob ``tuning.timeout``. A worker that
            takes longer is killed with the assembler that it started.

    Returns:
        For each config its costs, or why it does not compile. Nothing where another process would
        not find the kernel, or another one of its name: then it is compiled in this one.
    """
    if not kernel.is_importable:
        _log.info("%s is compiled in this process: no other can import it", kernel.name)
        return {}
    from triton import knobs as of_triton

    pairs = [(kernel.spec(config, arch), arch) for config in configs]
    cache, limit = Path(of_triton.cache.dir), timeout_s or knobs.get("tuning.timeout")
    # What this process needs to take their work from the cache, while they come up.
    hashing = threading.Thread(target=compat.hash_triton, daemon=True)
    hashing.start()
    source = kernel.source
    with _pools.one(cache, limit) as pool:
        while True:
            is_fresh = pool.is_empty
            with progress(f"compiling {kernel.short_name}", len(configs)) as step:
                results = compile_in_workers(
                    pairs,
                    workers=workers or min(_MOST_WORKERS, len(os.sched_getaffinity(0))),
                    on_result=lambda result, step=step: step(result.error is not None),
                    pool=pool,
                )
            other = any(r.error is None and r.launch.source != source for r in results)
            if is_fresh or not (other or all(r.error is not None for r in results)):
                break
            pool.close()  # these have imported the module before; it may have been another then
    hashing.join()
    return {} if other else dict(zip(configs, results))


class _Pools:
    """The workers of this process, kept for a while: they take a second or two to come up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: WorkerPool | None = None
        self._key: Any = None
        self._timer: threading.Timer | None = None

    @contextlib.contextmanager
    def one(self, cache_dir: Path, timeout_s: float) -> Generator[WorkerPool]:
        """Lend the workers, to one thread at a time.

        Args:
            cache_dir: Folder for Triton's cache.
            timeout_s: Seconds for one kernel.
        """
        with self._lock:
            self._stop_timer()
            key = (cache_dir, timeout_s, tuple(sys.path), knobs.variables_of_triton())
            if self._pool is None or key != self._key:
                self._close()
                self._pool = WorkerPool(
                    cache_dir=cache_dir, triton_path=None, timeout_s=timeout_s, is_kept=True
                )
                self._key = key
            try:
                yield self._pool
            finally:
                self._timer = threading.Timer(_KEPT_S, self.close)
                self._timer.daemon = True
                self._timer.start()

    def close(self) -> None:
        """End the workers."""
        with self._lock:
            self._stop_timer()
            self._close()

    def _close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def leave(self) -> None:
        """In a forked child: the workers are the parent's."""
        self._lock, self._timer = threading.Lock(), None
        if self._pool is not None:
            self._pool.leave()
            self._pool = None


_pools = _Pools()
atexit.register(_pools.close)
os.register_at_fork(after_in_child=_pools.leave)


@contextlib.contextmanager
def progress(what: str, total: int) -> Generator[Callable[[bool], None]]:
    """Show a line on a terminal that counts, inside a `with` block; elsewhere only in the log.

    Args:
        what: What is done.
        total: How many there will be.

    Yields:
        What to call when one is done, with whether it failed.
    """
    shown = sys.stderr if sys.stderr is not None and sys.stderr.isatty() else None
    done, failed, width = 0, 0, 0

    def step(has_failed: bool) -> None:
        nonlocal done, failed, width
        done += 1
        failed += has_failed
        text = f"tileloom: {what}: {done} of {total}"
        text += f", {failed} failed" if failed else ""
        _log.info("%s", text.removeprefix("tileloom: "))
        if shown is not None:
            print(f"\r{text.ljust(width)}", end="", file=shown, flush=True)
            width = max(width, len(text))

    try:
        yield step
    finally:
        if shown is not None and width:
            print(f"\r{' ' * width}\r", end="", file=shown, flush=True)
