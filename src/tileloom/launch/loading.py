"""Compiled kernels: taken from Triton's cache by their name there, and loaded on a device."""

from __future__ import annotations

from typing import Any


def cached(source: Any, key: str) -> Any:
    """Take a compiled kernel from Triton's cache.

    Triton finds it by hashing all of itself, which a process does once, in a third of a second;
    another process that has compiled the kernel can say its name.

    Args:
        source: What `compat.ast_source` gave.
        key: The `hash` of Triton's CompiledKernel in the process that compiled it.

    Returns:
        The CompiledKernel; None if the cache does not have it, or if Triton is told to compile
        always, to take files in place of what it makes, or to tell somebody of each kernel.
    """
    from triton import knobs
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime.cache import get_cache_manager

    settings: Any = knobs.compilation
    if settings.always_compile or settings.override or settings.listener is not None:
        return None
    name = f"{source.name[:150]}.json"
    group = get_cache_manager(key).get_group(name) or {}
    return CompiledKernel(source, group, key) if name in group else None


def load(compiled: Any) -> None:
    """Load a compiled kernel on the current device, where it is not loaded yet.

    Triton 3.6 compiles a launcher in C for each signature, in a fifth of a second; here it does so
    when something goes through it, which what tileloom launches does not.

    Args:
        compiled: Triton's CompiledKernel.

    Raises:
        OutOfResources: Triton's, if it needs more than the device has.
    """
    from triton import knobs
    from triton.runtime.driver import driver
    from triton.runtime.errors import OutOfResources

    active: Any = driver.active
    runtime: Any = knobs.runtime
    hooks = (runtime.kernel_load_start_hook, runtime.kernel_load_end_hook)
    is_watched = any(hook is not None and getattr(hook, "calls", True) for hook in hooks)
    if compiled.module is not None or hasattr(active.utils, "launch") or is_watched:
        compiled._init_handles()
        return
    device, metadata = active.get_current_device(), compiled.metadata
    most = active.utils.get_device_properties(device)["max_shared_mem"]
    if metadata.shared > most:
        raise OutOfResources(metadata.shared, most, "shared memory")
    found = active.utils.load_binary(compiled.name, compiled.kernel, metadata.shared, device)
    names = ("module", "function", "n_regs", "n_spills", "n_max_threads")
    for name, value in zip(names, found):
        setattr(compiled, name, value)
    threads = metadata.num_warps * metadata.target.warp_size
    if threads > compiled.n_max_threads:
        raise OutOfResources(threads, compiled.n_max_threads, "threads")
    compiled._run = _Launcher(compiled)


class _Launcher:
    """Triton's launcher of a kernel, made when it is first called."""

    def __init__(self, compiled: Any) -> None:
        self._source, self._metadata = compiled.src, compiled.metadata
        self._made: Any = None

    def __call__(self, *arguments: Any) -> Any:
        if self._made is None:
            from triton.runtime.driver import driver

            active: Any = driver.active
            self._made = active.launcher_cls(self._source, self._metadata)
        return self._made(*arguments)
