"""`prepare(kernel)`: a launcher with the calling convention of Triton and less of its cost.

A launch that was prepared costs one generated guard (`guard.py`), one lookup and one call of the
driver (`tiers.py`). What is not prepared takes the long way, `Launcher._general`, which tells by
Triton's own rules (`specialize.py`) which compiled kernel is needed; the first launch of each goes
through `kernel[grid](...)` and compiles it. Only what is launched a second time is prepared.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MethodType
from typing import Any

from tileloom import knobs, log
from tileloom.errors import (
    ArgumentError,
    DeviceError,
    LaunchError,
    OptionError,
    shown_value,
)
from tileloom.launch import bundle_use, descriptors, guard, keywords, scratch, watch
from tileloom.launch.bound import BoundLaunch, Number
from tileloom.launch.driver import normal_grid
from tileloom.launch.grids import Grids
from tileloom.launch.specialize import (
    MISSING,
    Parameter,
    Unsupported,
    is_descriptor,
    parameters_of,
    reason_against,
    specializer,
)
from tileloom.launch.tiers import NUMBER, Variant, is_settled

LIMIT = 1024
"""How many launches a launcher keeps prepared; beyond it, all are dropped and made anew."""

_GUARDS = 16
_NO_DRIVER = "0 active drivers"  # of Triton's error on a machine without a GPU
_log = log.get_logger("launch")


class Launcher:
    """Launches one kernel; `prepare` makes it.

    `launcher[grid](*args, **constexprs)` takes what `kernel[grid](...)` takes, does the same and
    returns the same. It may be called from any thread. It holds compiled kernels, but no tensor.

    Attributes:
        kernel: The jitted function.
        options: Compile options given to `prepare`, the defaults of every launch.
    """

    def __init__(self, kernel: Any, options: dict[str, Any]) -> None:
        self.kernel = kernel
        self.options = options
        self._lock = threading.RLock()
        self._parameters: tuple[Parameter, ...] = ()
        self._call: Callable[..., Any] = self._first
        self._is_decided = False
        self._table: dict[Any, Any] = {}
        self._seen: dict[Any, bool] = {}  # launched once; whether it was tried to prepare it
        self._variants: dict[Any, Variant] = {}
        self._guards: dict[guard.Kinds, Callable[..., Any]] = {}
        watch.register(self)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        if grid is None:
            normal_grid(grid, self.name)
        return MethodType(self._call, grid)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Refuse a launch without a grid.

        Raises:
            ArgumentError: Always.
        """
        raise ArgumentError(
            f"launch: '{self.name}' is called without a grid, which stands in brackets. Try: "
            "launcher[grid](...), with grid = (blocks,)."
        )

    def __repr__(self) -> str:
        return f"<launcher of {self.name}>"

    @property
    def name(self) -> str:
        """The kernel's name."""
        return getattr(self.kernel, "__name__", type(self.kernel).__name__)

    def forget(self) -> None:
        """Drop everything that is prepared; the next launch decides anew."""
        with self._lock:
            self._call = self._first
            self._is_decided = False
            for made in self._guards.values():
                guard.forget(made)
            for table in (self._table, self._seen, self._variants, self._guards):
                table.clear()

    def renew(self) -> None:
        """Begin anew in a forked child."""
        self._lock = threading.RLock()

    def bind(self, grid: Any, *args: Any, **constexprs: Any) -> BoundLaunch:
        """Fix a launch but for its tensors; see `BoundLaunch`. Nothing is launched.

        Args:
            grid: The grid.
            args: Arguments as for a launch; the tensors are examples and are not kept. A `Number`
                is given in each launch too.
            constexprs: Arguments by keyword.

        Returns:
            An object whose `launch(*tensors)` launches.

        Raises:
            ArgumentError: If there are too many arguments, or some are missing, or a `Number` is
                given for a parameter that is compiled by value.
        """
        if not self._read():
            return BoundLaunch(self, grid, args, constexprs)
        values, options = self._in_order(args, constexprs)
        if options:
            raise ArgumentError(
                f"launch: {', '.join(options)} is no parameter of '{self.name}'. "
                f"{self._signature()} Try: give compile options to prepare()."
            )
        for parameter, value in zip(self._parameters, values):
            if isinstance(value, Number) and (parameter.specialize or not parameter.kind):
                raise ArgumentError(
                    f"launch: {parameter.name} of '{self.name}' is a Number, which varies, and its "
                    "value decides what is compiled. Try: annotate it as tl.int64, and name it in "
                    "do_not_specialize."
                )
        return BoundLaunch(self, grid, values, {})

    # The long way

    def _plain(self, grid: Any, /, *args: Any, **named: Any) -> Any:
        if bundle_use.is_forbidden() and cuda_driver() is not None:
            bundle_use.refuse_plain(self.name)
        try:
            return self.kernel[self._checked(grid)](*args, **(self.options | named))
        except RuntimeError as error:
            if _NO_DRIVER in str(error):
                raise DeviceError(self._no_gpu(args, named)) from error
            if scratch.NONE_SET in str(error):
                raise LaunchError(scratch.no_allocator(self.name)) from error
            raise
        except KeyError as error:
            if "unrecognised" not in str(error):
                raise
            unknown = next((name for name in named if name in str(error).split()), "")
            remedy = keywords.nearest(unknown, [p.name for p in self._parameters])
            raise ArgumentError(
                f"launch: {error.args[0]}: '{self.name}' has no such parameter, and Triton no such "
                f"compile option. {self._signature()} Try: {remedy or 'one of these'}."
            ) from error
        except TypeError as error:
            if "failed to specialize argument" not in str(error):
                raise
            raise ArgumentError(self._wrong_type(args, named, error)) from error
        except OverflowError as error:
            raise ArgumentError(
                f"launch: an argument of '{self.name}' does not fit into 64 bits. Try: a number "
                "from -2^63 to 2^64 - 1."
            ) from error

    def _checked(self, grid: Any) -> Any:
        """A grid that Triton takes, and the fast tiers too; a callable is checked in the launch."""
        if not callable(grid):
            return normal_grid(grid, self.name)
        sizes: Callable[..., Any] = grid
        return lambda named: normal_grid(sizes(named), self.name)

    def _first(self, grid: Any, /, *args: Any, **named: Any) -> Any:
        """The first launch, and any by a callable that was taken from the launcher before it."""
        if not self._is_decided:
            plain = not self._read() or knobs.get("launch.tier") == "plain"
            with self._lock:
                self._call = self._plain if plain else self._normal
                self._is_decided = True
        return self._call(grid, *args, **named)

    def _read(self) -> bool:
        """Read the kernel's parameters; False if only the plain tier can pass them on."""
        from triton.runtime.jit import JITFunction

        with self._lock:
            if not self._parameters and isinstance(self.kernel, JITFunction):
                self._parameters = parameters_of(self.kernel) or ()
                self._key = specializer(self._parameters)
                self._grids = Grids([p.name for p in self._parameters])
        return bool(self._parameters)

    def _normal(self, grid: Any, /, *args: Any, **named: Any) -> Any:
        return self._general(grid, *self._in_order(args, named))

    def _in_order(
        self, args: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        values = [p.default for p in self._parameters]
        if len(args) > len(values):
            raise ArgumentError(
                f"launch: {len(args)} arguments are given by position. {self._signature()} Try: "
                "compile options, such as num_warps, by keyword."
            )
        values[: len(args)] = args
        options: dict[str, Any] = {}
        places = {p.name: i for i, p in enumerate(self._parameters)}
        for name, value in named.items():
            place = places.get(name)
            if place is None:
                options[name] = value
            elif place < len(args):
                raise ArgumentError(
                    f"launch: {name} is given twice, by position and by keyword. "
                    f"{self._signature()} Try: give it once."
                )
            else:
                values[place] = value
        return values, options

    def _slow(self, grid: Any, values: Sequence[Any], rest: Any, options: Any) -> Any:
        """A launch that the guard in place refuses."""
        if rest:
            return self._normal(grid, *values, *rest, **options)
        # All are to be known, so no generator that stops at the first.
        renewed = [descriptors.renewed(value) for value in values if is_descriptor(value)]
        if any(renewed):
            return self._call(grid, *values, **options)
        return self._general(grid, list(values), options)

    def _general(self, grid: Any, values: list[Any], options: Mapping[str, Any]) -> Any:
        missing = [p.name for p, v in zip(self._parameters, values) if v is MISSING]
        if missing:
            raise ArgumentError(keywords.not_given(missing, options, self._signature()))
        for parameter, value in zip(self._parameters, values):
            if why := reason_against(parameter, value):
                raise ArgumentError(
                    f"launch: {parameter.name} of '{self.name}' is {shown_value(value)}; it is "
                    f"{why}."
                )
        if options.get("num_warps") is not None:
            keywords.check_warps("launch", options["num_warps"])
        active = cuda_driver()
        if active is None or not watch.is_quiet(self.kernel):
            return self._plain(grid, *values, **options)
        try:
            kinds = guard.kinds_of(self._parameters, values)
            if self._on_host(values):
                return self._plain(grid, *values, **options)
            device = active.get_current_device()
            identity = (device, self._key(values), tuple(options.items()))
            variant = self._variants.get(identity)
        except (Unsupported, TypeError):  # or what cannot be hashed
            return self._plain(grid, *values, **options)
        if variant is None:
            variant = bundle_use.find_kernel(
                self.kernel, self._parameters, values, {**self.options, **options}, device
            )
            if variant is not None:
                self._keep(identity, variant)
        if not options:
            self._install(kinds, active)
        whole = normal_grid(self._grids(grid, values), self.name)
        if variant is not None and not variant.reason:
            watch.check_globals(self.kernel)
            return variant.launch(whole, active.get_current_stream(device), values)
        compiled = self._plain(whole, *values, **options)
        if variant is None and compiled is not None and is_settled(device):
            self._keep(identity, Variant(compiled, self.kernel, device))
        return compiled

    def _keep(self, identity: Any, variant: Variant) -> None:
        with self._lock:
            if len(self._variants) >= LIMIT:
                self._variants.clear()
            self._variants[identity] = variant

    def _miss(self, key: Any, grid: Any, values: Sequence[Any]) -> Any:
        """A launch like the guard's, but of which nothing is prepared."""
        result = self._general(grid, list(values), {})
        tried = self._seen.get(key)
        if tried is None:  # a launch that never comes again costs no more than this
            if len(self._seen) >= LIMIT:
                self._seen.clear()
            self._seen[key] = False
        elif not tried:
            try:
                entry = self.entry(grid, values, numbers_vary=True)
            except Unsupported as why:
                self._seen[key] = True
                _log.debug("%s stays with Triton's launcher: %s", self.name, why)
                return result
            if entry is not None:
                with self._lock:
                    if len(self._table) >= LIMIT:
                        self._table.clear()
                    self._table[key] = entry
        return result

    def entry(
        self,
        grid: Any,
        values: Sequence[Any],
        *,
        numbers_vary: bool,
        varying: Collection[int] = (),
    ) -> Any:
        """Prepare a launch; see `Variant.entry`.

        Args:
            grid: The grid.
            values: All arguments, in the order of the parameters.
            numbers_vary: Whether floats are given in each launch.
            varying: Places of integers that are given in each launch.

        Returns:
            The entry; None if no kernel for such arguments is known yet, as long as a CUDA graph
            is captured before any tier was tested.

        Raises:
            Unsupported: If only Triton's own path may launch it.
        """
        active = cuda_driver()
        if active is None:
            return None
        device = active.get_current_device()
        variant = self._variants.get((device, self._key(values), ()))
        if variant is None or not is_settled(device):
            return None
        forms = guard.forms_of(self._parameters, values, numbers_vary=numbers_vary)
        for place in varying:
            forms[place] = NUMBER
        return variant.entry(normal_grid(self._grids(grid, values), self.name), forms)

    def _install(self, kinds: guard.Kinds, active: Any) -> None:
        """Put the guard of these kinds of arguments in front."""
        with self._lock:
            made = self._guards.get(kinds)
            if made is None:
                if len(self._guards) >= _GUARDS:
                    return
                made = guard.build(self._parameters, kinds, self.host(active))
                self._guards[kinds] = made
            self._call = made

    def host(self, active: Any = None) -> guard.Host:
        """What guards call and test; of the active driver, unless one is given."""
        active = active or cuda_driver()
        return guard.Host(
            slow=self._slow,
            miss=self._miss,
            get=self._table.get,
            grid_of=self._grids,
            signals=watch.signals(self.kernel),
            stream=active.get_current_stream,
            device=active.get_current_device,
            is_single=_device_count() == 1,
        )

    # Sentences

    def _on_host(self, values: Sequence[Any]) -> bool:
        """Whether a tensor lies in host memory that the GPU reads (pinned); refuse other memory."""
        for parameter, value in zip(self._parameters, values):
            tensor = value.base if is_descriptor(value) else value
            if not hasattr(tensor, "data_ptr") or tensor.is_cuda:
                continue
            if tensor.data_ptr() == 0 or tensor.is_pinned():
                return True
            raise DeviceError(
                f"launch: {parameter.name} of '{self.name}' is on {tensor.device}; a GPU reads "
                f"tensors on the GPU, or pinned ones. Try: {parameter.name}.to(the GPU)."
            )
        return False

    def _no_gpu(self, args: Sequence[Any], named: Mapping[str, Any]) -> str:
        given = {p.name: value for p, value in zip(self._parameters, args)} | dict(named)
        where = [f"{n} is on {v.device}" for n, v in given.items() if hasattr(v, "data_ptr")]
        return (
            f"launch: '{self.name}' needs a GPU, and Triton finds none here"
            f"{'; ' if where else ''}{', '.join(where)}. Try: a machine with a GPU, or "
            "`with tileloom.emulator.run():` around the launch, which takes tensors on the CPU."
        )

    def _signature(self) -> str:
        names = ", ".join(p.name for p in self._parameters)
        return f"The {len(self._parameters)} parameters of '{self.name}' are {names}."

    def _wrong_type(self, args: Sequence[Any], named: Mapping[str, Any], error: TypeError) -> str:
        names = [p.name for p in self._parameters]
        given = dict(zip(names, args)) | {n: v for n, v in named.items() if n in names}
        accepted = (int, bool, float, type(None), tuple)
        odd = [
            p.name
            for p in self._parameters
            if not p.is_constexpr
            and p.name in given
            and not isinstance(given[p.name], accepted)
            and not hasattr(given[p.name], "data_ptr")
            and not is_descriptor(given[p.name])
        ]
        remedy = "annotate a compile-time parameter as tl.constexpr"
        if odd and hasattr(given[odd[0]], "item"):  # a number of NumPy
            remedy = f"{odd[0]}.item()"
        told = [f"{name} is a {type(given[name]).__name__}" for name in odd]
        return (
            f"launch: {'; '.join(told) or error}; '{self.name}' takes tensors, descriptors, Python "
            f"numbers and None there. Try: {remedy}."
        )


def cuda_driver() -> Any:
    """Triton's active driver if it is the one for NVIDIA GPUs; None for any other, or none."""
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime.driver import driver

    try:
        active: Any = driver.active
    except RuntimeError as error:
        if _NO_DRIVER not in str(error):
            raise
        return None
    return active if isinstance(active, CudaDriver) else None


def _device_count() -> int:
    import torch

    return torch.cuda.device_count()


def prepare(
    kernel: Any,
    *,
    num_warps: int | None = None,
    num_stages: int | None = None,
    **options: Any,
) -> Launcher:
    """Make a launcher for a jitted kernel. Nothing is compiled and Triton is not loaded.

    Args:
        kernel: What `triton.jit` or `gluon.jit` made.
        num_warps: Warps of a block; default: Triton's.
        num_stages: Depth of Triton's software pipeline; default: Triton's.
        options: Other compile options of Triton, such as ``num_ctas`` or ``maxnreg``. Each call
            may override any of them by keyword, as with Triton; such a call is never prepared.

    Returns:
        The launcher. `launcher[grid](...)` has exactly the calling convention of `kernel[grid]`.

    Raises:
        OptionError: If `kernel` was not made by `triton.jit` or `gluon.jit`, or `num_warps` is no
            power of 2 from 1 to 32.
        UnknownOptionError: If Triton has no such compile option.
    """
    if not hasattr(kernel, "__getitem__") or not hasattr(kernel, "run"):
        raise OptionError(
            f"launch.prepare: kernel is a {type(kernel).__name__}; it must be a function made by "
            "triton.jit or gluon.jit. Try: prepare(triton.jit(function))."
        )
    if options:
        keywords.check_options(kernel, options)
    if num_warps is not None:
        keywords.check_warps("launch.prepare", num_warps)
    given = {"num_warps": num_warps, "num_stages": num_stages}
    return Launcher(kernel, {k: v for k, v in given.items() if v is not None} | options)


@functools.lru_cache(maxsize=1024)
def prepared(kernel: Any, **options: Any) -> Launcher:
    """Return the one launcher that the package's operators share for a kernel and options."""
    return prepare(kernel, **options)
