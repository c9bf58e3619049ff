"""From a compiled config to the function that launches it: one call by position, grid and all.

    def launcher(in_ptr0, out_ptr0, xnumel, stream):
        if <a hook, a profiler or a knob wants to see it>:
            return _again((in_ptr0, out_ptr0, xnumel), stream)
        _x = -(xnumel // -1024)
        _a0 = in_ptr0.data_ptr(); _a1 = out_ptr0.data_ptr()
        if <an address is not that of the launch before>:
            <whether they were seen before, or are a GPU's>
        if _x:
            return _entry(_x, 1, 1, stream, _a0, _a1, xnumel)

What is rare goes the long way, through Triton's own launcher.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tileloom import log
from tileloom.errors import ArgumentError, DeviceError, shown_value
from tileloom.launch import guard, tiers, watch
from tileloom.launch.specialize import Unsupported
from tileloom.tuning.config import Config
from tileloom.tuning.grids import GridExpr
from tileloom.tuning.precompile import Kernel

_log = log.get_logger("tuning")

_SOURCE = """
def launcher({parameters}stream):
    if {refused}:
        return _again(({arguments}), stream)
    {grid}
    {addresses}
    if {is_any}:
        return _entry({blocks}, stream, {values})
"""
# Each address is compared by itself: whatever threads mix here was seen, one by one.
_ADDRESSES = """
    global {lasts}
    try:
        {reads}
    except AttributeError:
        return _again(({arguments}), stream)
    if {differs}:
        _at = ({now},)
        if _seen(_at) != 0 and _check(({arguments})):
            return _again(({arguments}), stream)
        {lasts} = {now}
"""


class Launch:
    """One config of a kernel on one device, loaded.

    Attributes:
        kernel: The kernel.
        config: Its config.
        variant: The compiled kernel as a launcher holds it.
        parameters: Names of the arguments that a launch gives, in order.
    """

    def __init__(
        self,
        kernel: Kernel,
        config: Config,
        variant: tiers.Variant,
        inductor_meta: Mapping[str, Any],
        *,
        profile: Callable[[Config, Any], Any],
    ) -> None:
        """Prepare it.

        Args:
            kernel: The kernel.
            config: The config.
            variant: The compiled kernel.
            inductor_meta: Names the grid, and extra arguments of the launch that it reads.
            profile: From a config and a stream to what PyTorch's profiler shows of a launch.
        """
        self.kernel = kernel
        self.config = config
        self.variant = variant
        self._constants = kernel.parts(config)[0]
        self.parameters = kernel.parameters(inductor_meta)
        self._expressions = GridExpr.from_meta(inductor_meta, config)
        self._grid = self._expressions.function(self.parameters)
        self._profile = profile
        self._name = str(inductor_meta.get("kernel_name") or kernel.short_name)
        self._pointers: list[str] = []
        self._addresses = guard.Addresses([])

    @functools.cached_property
    def launcher(self) -> Callable[..., Any]:
        """What `make` returned first: enough to be measured by."""
        return self.make()

    def make(self) -> Callable[..., Any]:
        """Return ``launcher(*arguments, stream)``, with what callers of Inductor's ask of it.

        Its attributes are ``config``, ``n_regs``, ``n_spills``, ``shared``, ``cache_hash`` and
        ``store_cubin``.
        """
        try:
            launcher = self._fast()
        except Unsupported as why:
            _log.debug("%s stays with Triton's launcher: %s", self._name, why)
            launcher = self._slow()
        compiled = self.variant.compiled
        launcher.config = self.config
        launcher.n_regs = compiled.n_regs
        launcher.n_spills = getattr(compiled, "n_spills", None)
        launcher.shared = compiled.metadata.shared
        launcher.cache_hash = getattr(compiled, "hash", "")
        launcher.store_cubin = False
        return launcher

    def _fast(self) -> Any:
        from torch.autograd import profiler

        if not watch.is_quiet(self.kernel.fn):
            raise Unsupported("somebody watches launches")
        types = self.kernel.types
        forms: list[Any] = []
        pointers: list[str] = []
        values: list[str] = []
        for name in self.kernel.fn.arg_names:
            kind = types.get(name)
            if kind is None:
                forms.append(self._constants[name])
            elif kind.startswith("*"):
                forms.append(tiers.ADDRESS)
                values.append(f"_a{len(pointers)}")
                pointers.append(name)
            elif kind.startswith(("tensordesc", "nvTmaDesc")):
                raise Unsupported("it takes descriptors")
            else:
                forms.append(tiers.NUMBER)
                values.append(name)
        known = guard.Addresses([name in self.kernel.aligned for name in pointers])
        scope: dict[str, Any] = {
            "math": math,
            "_again": self._again,
            "_entry": self.variant.entry(None, forms),
            "_check": self._check,
            "_seen": known.get,
            "_profiler": profiler,
        }
        self._pointers, self._addresses = pointers, known
        tests = guard.signal_tests(watch.signals(self.kernel.fn), scope)
        arguments = "".join(f"{name}, " for name in self.parameters)
        scope |= dict.fromkeys([f"_l{i}" for i in range(len(pointers))])
        source = _SOURCE.format(
            parameters=arguments,
            arguments=arguments,
            refused=" or ".join(["_profiler._is_profiler_enabled", *tests]),
            addresses=_addresses(pointers, arguments),
            values=", ".join(values),
            **self._grid_texts(),
        )
        exec(compile(source, f"<tileloom launcher of {self._name}>", "exec"), scope)
        return scope["launcher"]

    def _grid_texts(self) -> dict[str, str]:
        """The lines that compute the grid, its three numbers, and whether there is a program."""
        found = self._expressions
        numbers = dict(zip("xyz", (found.x_grid, found.y_grid, found.z_grid)))
        open_ = {f"_{d}": n for d, n in numbers.items() if not (isinstance(n, int) and n > 0)}
        return {
            "grid": "\n    ".join([*found.prefix, *(f"{n} = {text}" for n, text in open_.items())]),
            "blocks": ", ".join(
                f"_{d}" if f"_{d}" in open_ else str(n) for d, n in numbers.items()
            ),
            "is_any": " and ".join(open_) or "True",
        }

    def _slow(self) -> Any:
        names = "".join(f"{name}, " for name in self.parameters)
        source = f"def launcher({names}stream):\n    return _again(({names}), stream)\n"
        scope: dict[str, Any] = {"_again": self._again}
        exec(source, scope)
        return scope["launcher"]

    def _again(self, arguments: Sequence[Any], stream: Any) -> Any:
        """A launch whose addresses are new, that somebody wants to see, or of nothing at all."""
        from torch.autograd import profiler

        self._check(arguments)
        grid = self._grid(*arguments)
        if not math.prod(grid):
            return None
        if not profiler._is_profiler_enabled:
            return self._by_triton(grid, arguments, stream)
        import torch

        record: Any = getattr(torch._C, "_profiler")._RecordFunctionFast  # noqa: B009
        with record(self._name, list(arguments), self._profile(self.config, stream)):
            return self._by_triton(grid, arguments, stream)

    def _by_triton(self, grid: tuple[int, ...], arguments: Sequence[Any], stream: Any) -> Any:
        given = dict(zip(self.parameters, arguments))
        whole = [
            given[n] if n in self.kernel.types else self._constants[n]
            for n in self.kernel.fn.arg_names
        ]
        compiled = self.variant.compiled
        if watch.has_hooks(self.kernel.fn) and hasattr(compiled, "launch_metadata"):
            from triton import knobs

            runtime = knobs.runtime
            seen = compiled.launch_metadata(grid, stream, *whole)
            hooks = (runtime.launch_enter_hook, runtime.launch_exit_hook)
            self.variant.run(
                *grid, stream, compiled.function, compiled.packed_metadata, seen, *hooks, *whole
            )
            return compiled
        return self.variant.launch(grid, stream, whole)

    def _check(self, arguments: Sequence[Any]) -> bool:
        """Refuse what the kernel cannot read; remember the addresses of what it can.

        Returns:
            Whether only Triton's own launcher may pass them on.
        """
        given = dict(zip(self.parameters, arguments))
        is_pinned = check_tensors(self.kernel, self._name, given)
        if not is_pinned:
            self._addresses.see(tuple([given[name].data_ptr() for name in self._pointers]))
        return is_pinned


def _addresses(pointers: Sequence[str], arguments: str) -> str:
    """The lines that read the tensors' addresses, and look at those that were not there last."""
    if not pointers:
        return "pass"
    count = range(len(pointers))
    lasts = ", ".join(f"_l{i}" for i in count)
    return _ADDRESSES.strip().format(
        lasts=lasts,
        arguments=arguments,
        reads="; ".join(f"_a{i} = {name}.data_ptr()" for i, name in enumerate(pointers)),
        differs=" or ".join(f"_a{i} != _l{i}" for i in count),
        now=", ".join(f"_a{i}" for i in count),
    )


def check_tensors(kernel: Kernel, name: str, given: Mapping[str, Any]) -> bool:
    """Refuse tensors that a kernel cannot read.

    Args:
        kernel: The kernel.
        name: What to call it.
        given: Arguments by name.

    Returns:
        Whether some lie in pinned memory of the host.

    Raises:
        DeviceError: If one is on the CPU, and not pinned.
        ArgumentError: If one is no tensor, or lies at an address that the kernel is not compiled
            for.
    """
    is_pinned = False
    for parameter in kernel.types:
        value = given[parameter]
        if not hasattr(value, "data_ptr"):
            if kernel.types[parameter].startswith("*"):
                raise ArgumentError(
                    f"tuning: {parameter} of '{name}' is {shown_value(value)}; it takes a tensor. "
                    f"Try: torch.as_tensor({parameter}, device=the GPU)."
                )
            continue
        address = value.data_ptr()
        if not value.is_cuda:
            is_pinned = True
            if address and not value.is_pinned():
                raise DeviceError(
                    f"tuning: {parameter} of '{name}' is on {value.device}; the kernel runs on a "
                    f"GPU. Try: {parameter}.to(the GPU)."
                )
        if parameter in kernel.aligned and address % 16:
            raise ArgumentError(
                f"tuning: {parameter} of '{name}' lies at address {address:#x}, which 16 does not "
                f"divide; the kernel is compiled for such. Try: {parameter}.clone()."
            )
    return is_pinned
