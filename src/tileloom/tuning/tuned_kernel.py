"""A jitted function that chooses its own blocks, warps and grid from its arguments.

The decorators of `front.py` make it. Each kind of launch has a plan, an autotuner with candidates
for its sizes; a launch finds its plan by types, alignments and sizes rounded up to powers of two.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, cast

import torch

from tileloom import log
from tileloom.errors import ArgumentError, OptionError, shown_value
from tileloom.launch import prepare
from tileloom.launch.specialize import MISSING, Unsupported, exact, parameters_of, specialize
from tileloom.target import target_of
from tileloom.tuning.cached import cached_autotune
from tileloom.tuning.config import Config, distinct
from tileloom.tuning.grids import GridExpr
from tileloom.tuning.heuristics_lists import configs as list_configs
from tileloom.tuning.hints import (
    MAX_BLOCK,
    DeviceProperties,
    Facts,
    HeuristicType,
    block_name,
    is_reduced,
    next_power_of_2,
)

LIMIT = 1024
"""How many launches a kernel remembers exactly; beyond it, all are dropped and told apart anew."""

_log = log.get_logger("tuning")

_TYPES = {
    "pointwise": HeuristicType.POINTWISE,
    "reduction": HeuristicType.REDUCTION,
    "persistent_reduction": HeuristicType.PERSISTENT_REDUCTION,
    "cooperative_reduction": HeuristicType.REDUCTION,
    "split_scan": HeuristicType.SPLIT_SCAN,
}
_BLOCKS = (*map(block_name, MAX_BLOCK), "RSPLIT")
_GRIDS = {"cooperative_reduction": "CooperativeReductionGrid", "split_scan": "SplitScanGrid"}


class TunedKernel:
    """A jitted function that chooses its own blocks; the decorators make it.

    A launch is a call with the function's arguments, without those that its configs set. It may be
    called from any thread, on the current stream. It holds no tensor.

    Attributes:
        fn: The jitted function.
        kind: The decorator's name.
        sizes: The argument that is the size of each dimension.
    """

    def __init__(
        self,
        fn: Any,
        kind: str,
        sizes: Mapping[str, str],
        facts: Facts,
        configs: Sequence[Config] | None,
        changed: Sequence[str],
        zeroed: Sequence[str],
        refine: bool,
    ) -> None:
        """Describe it; nothing is compiled. See the decorators for the arguments."""
        self.fn = fn
        self.kind = kind
        self.sizes = dict(sizes)
        self._facts = facts
        self._given = configs
        self._changed = list(changed)
        self._zeroed = list(zeroed)
        self._refine = refine
        self._parameters = self._read()
        self._open = [p.name for p in self._parameters if not p.is_constexpr]
        self._plans: dict[Any, Any] = {}
        self._known: dict[Any, tuple[Any, int]] = {}
        self._launchers: dict[Config, Any] = {}
        self._lock = threading.Lock()
        dims = [dim for dim in sizes if not is_reduced(dim)]
        grid = _GRIDS.get(kind, f"Grid{len(dims)}D")
        self._grid = {"grid_type": grid, "numels": self.sizes, "kernel_name": self.__name__}
        self._check(dims)

    @property
    def __name__(self) -> str:
        return self.fn.__name__

    def __repr__(self) -> str:
        return f"<{self.kind} kernel {self.__name__}, tuned by {', '.join(self.sizes.values())}>"

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Launch the kernel.

        Args:
            args: Its arguments in order, without the constants that its configs set.
            named: Arguments by name.

        Returns:
            What the launch returns; None if there is nothing to do.

        Raises:
            ArgumentError: If an argument is missing, given twice or unknown, or a size is no
                integer.
            DeviceError: If a tensor is not on a GPU, and no emulator runs.
            NoTritonConfigsError: If no candidate runs.
        """
        key = _exact(args, named)
        known = self._known.get(key)
        if known is not None:
            return _launch(*known, args)
        values = self._in_order(args, named)
        sizes = {dim: self._size(name, values[name]) for dim, name in self.sizes.items()}
        if not all(size for dim, size in sizes.items() if not is_reduced(dim)):
            return None
        tensor = next((v for v in values.values() if isinstance(v, torch.Tensor)), None)
        if tensor is None or target_of(tensor).kind != "cuda":
            return self._launch_first(sizes, values)
        found = self._plan_of(tensor.device, sizes, values), tensor.get_device()
        if len(args) == len(self._open) and key is not None:
            with self._lock:
                if len(self._known) >= LIMIT:
                    self._known.clear()
                self._known[key] = found
        return _launch(*found, [values[name] for name in self._open])

    def __getitem__(self, grid: object) -> NoReturn:
        raise OptionError(
            f"tuning: '{self.__name__}' is given a grid, {shown_value(grid)}, but its grid follows "
            f"from its sizes. Try: {self.__name__}({', '.join(self._open)}), without one."
        )

    def candidates(self, *by_position: object, **sizes: int) -> list[Config]:
        """List the configs that a launch of such sizes chooses from, the default first.

        Args:
            by_position: Refused: sizes are given by name.
            sizes: The size of each dimension, by the name of the kernel's argument.

        Raises:
            ArgumentError: If a size is missing, unknown or no integer.
        """
        wanted = list(self.sizes.values())
        if by_position or set(sizes) != set(wanted):
            given = ", ".join(
                [
                    *map(shown_value, by_position),
                    *(f"{n}={shown_value(v)}" for n, v in sizes.items()),
                ]
            )
            raise ArgumentError(
                f"tuning: candidates of '{self.__name__}' is given {given or 'nothing'}; it takes "
                f"the sizes {', '.join(wanted)} by name. Try: "
                f"candidates({', '.join(f'{name}=1024' for name in wanted)})."
            )
        hints = {
            dim: next_power_of_2(self._size(name, sizes[name])) for dim, name in self.sizes.items()
        }
        return self._candidates(hints, self._facts)

    # From a launch to its plan

    def _plan_of(
        self, device: torch.device, sizes: Mapping[str, int], values: Mapping[str, Any]
    ) -> Any:
        """The plan of this kind of launch, made where it is the first."""
        hints = {dim: next_power_of_2(size) for dim, size in sizes.items()}
        kinds, pairs = self._kinds(values)
        exactly = torch.are_deterministic_algorithms_enabled()
        key = (device.index, exactly, *hints.values(), *kinds)
        with self._lock:
            plan = self._plans.get(key)
            if plan is None:
                plan = self._plans[key] = self._plan(device, hints, pairs, exactly)
            return plan

    def _candidates(self, hints: Mapping[str, int], facts: Facts) -> list[Config]:
        listed = self._given or list_configs(self.kind, hints, facts)
        names = set(self.fn.arg_names)
        if self.kind == "persistent_reduction":  # whole rows: constants of generated kernels
            whole = {block_name(dim): size for dim, size in hints.items() if is_reduced(dim)}
            listed = [c.with_kwargs(**{**whole, **c.kwargs}) for c in listed]
        return distinct(c.without_kwargs(*(set(c.kwargs) - names)) for c in listed)

    def _kinds(self, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What tells this launch's kernel from others: type and property of each argument."""
        pairs: dict[str, Any] = {}
        kinds: list[Any] = []
        for parameter in self._parameters:
            if parameter.name not in values:
                continue
            value = values[parameter.name]
            try:
                pairs[parameter.name] = specialize(parameter, value)
                kinds.append(exact(value) if parameter.is_constexpr else None)
            except Unsupported as why:
                raise ArgumentError(
                    f"tuning: {parameter.name} of '{self.__name__}' is {why}, which a tuned kernel "
                    "does not take. Try: tensors, integers, floats, bools and None."
                ) from None
        return (*pairs.values(), *kinds), pairs

    def _plan(
        self,
        device: torch.device,
        hints: Mapping[str, int],
        pairs: Mapping[str, Any],
        deterministic: bool,
    ) -> Any:
        """The autotuner for one kind of launch."""
        properties = device_properties(device)
        facts = replace(
            self._facts,
            deterministic=deterministic,
            multi_processor_count=properties.multi_processor_count,
            major=properties.major or 0,
        )
        signature = {p.name: pairs.get(p.name, ("constexpr",))[0] for p in self._parameters}
        names = self.fn.arg_names
        divisible = {
            (names.index(name),): [["tt.divisibility", 16]]
            for name, (kind, found) in pairs.items()
            if found == "D" and kind != "constexpr"
        }
        constants = {name: found for name, (kind, found) in pairs.items() if kind == "constexpr"}
        triton_meta = {
            "signature": signature,
            "device": properties,
            "constants": constants,
            "configs": [divisible],
            "restore_value": self._changed,
            "reset_to_zero": self._zeroed,
        }
        inductor_meta = {
            **self._grid,
            "coordinate_descent_tuning": self._refine,
            "deterministic": deterministic,
        }
        make = cached_autotune(
            dict(hints),
            self._candidates(hints, facts),
            triton_meta=triton_meta,
            inductor_meta=inductor_meta,
            heuristic_type=_TYPES[self.kind],
            custom_kernel=True,
        )
        return make(self.fn)

    def _launch_first(self, sizes: Mapping[str, int], values: Mapping[str, Any]) -> Any:
        """A launch that nothing can be measured for."""
        hints = {dim: next_power_of_2(size) for dim, size in sizes.items()}
        config = self._candidates(hints, self._facts)[0]
        _log.debug("%s is not measured here and takes %s", self.__name__, config)
        launcher = self._launchers.get(config)
        if launcher is None:
            options = {n: v for n, v in config.all_kwargs().items() if n not in config.kwargs}
            launcher = self._launchers[config] = prepare(self.fn, **options)
        grid = GridExpr.from_meta(self._grid, config).evaluate(values)
        return launcher[grid](**{**values, **config.kwargs})

    # Arguments

    def _read(self) -> tuple[Any, ...]:
        from triton.runtime.jit import JITFunction

        found = parameters_of(self.fn) if isinstance(self.fn, JITFunction) else None
        if found is None:
            raise OptionError(
                f"tuning: {self.kind} decorates a {type(self.fn).__name__}; it must be a function "
                "made by triton.jit, whose parameters are given by position. Try: @triton.jit "
                "below it."
            )
        return found

    def _check(self, dims: Sequence[str]) -> None:
        names = self.fn.arg_names
        for dim, name in self.sizes.items():
            if name not in names:
                raise OptionError(
                    f"tuning: sizes says that {name!r} is the size of {dim.rstrip('_')}, which is "
                    f"no argument of '{self.__name__}'; those are {', '.join(names)}. Try: one of "
                    "these."
                )
        for what, given in (("changed", self._changed), ("zeroed", self._zeroed)):
            for name in given:
                if name not in names:
                    raise OptionError(
                        f"tuning: {what} names {name!r}, which is no argument of "
                        f"'{self.__name__}'; those are {', '.join(names)}. Try: one of these."
                    )
        if "x" not in dims:
            raise OptionError(
                f"tuning: sizes of '{self.__name__}' has {', '.join(self.sizes) or 'nothing'}; it "
                "must name the size of x. Try: sizes=dict(x='rows', r='cols')."
            )
        constant = {p.name for p in self._parameters if p.is_constexpr}
        for dim, name in self.sizes.items():
            if name in constant:
                raise OptionError(
                    f"tuning: sizes says that {name!r} is the size of {dim.rstrip('_')}, but it is "
                    f"a constexpr of '{self.__name__}'. Try: the argument that holds the size."
                )
        if self.kind == "split_scan" and "XBLOCK" in names:
            raise OptionError(
                f"tuning: '{self.__name__}' has XBLOCK, but a split scan gives each program blocks "
                "of one row. Try: leave XBLOCK out of its parameters, and take program_id(1) for "
                "the row."
            )
        needed = self._needed(dims)
        if missing := sorted(needed - constant):
            raise OptionError(
                f"tuning: '{self.__name__}' has no {', '.join(missing)}, which its configs set. "
                f"Try: {missing[0]}: tl.constexpr among its parameters."
            )
        for config in self._given or ():
            odd = sorted(config.kwargs.keys() - constant)
            left = sorted(needed - config.kwargs.keys())
            if odd or left:
                wrong = f"sets {', '.join(odd)}" if odd else f"does not set {', '.join(left)}"
                raise OptionError(
                    f"tuning: the config {config} {wrong}; configs of '{self.__name__}' set "
                    f"{', '.join(sorted(needed))}, and may set {', '.join(sorted(constant))}. "
                    "Try: these names."
                )
            whole = sorted(
                {block_name(d) for d in self.sizes if is_reduced(d)} & set(config.kwargs)
            )
            if whole and self.kind == "persistent_reduction":
                raise OptionError(
                    f"tuning: the config {config} sets {whole[0]}, but a persistent reduction "
                    "holds each row whole: it is the row's size rounded up. Try: leave it out of "
                    "configs."
                )
            for name in sorted(config.kwargs.keys() & (needed | set(_BLOCKS))):
                value = config.kwargs[name]
                if type(value) is not int or value < 1 or value & (value - 1):
                    raise OptionError(
                        f"tuning: the config {config} sets {name} to {shown_value(value)}; a block "
                        f"of '{self.__name__}' is a power of two. Try: {name}=128."
                    )

    def _needed(self, dims: Sequence[str]) -> set[str]:
        """Blocks without which the grid, or a kernel with candidates of ours, has no tile."""
        loops = self.kind in ("reduction", "cooperative_reduction") and not self._given
        reduced = [d for d in self.sizes if is_reduced(d) and (loops or self.kind == "split_scan")]
        needed = {block_name(dim) for dim in [*dims, *reduced]}
        if self._facts.no_x_dim:
            needed.discard("XBLOCK")
        return needed | ({"RSPLIT"} if self.kind == "cooperative_reduction" else set())

    def _in_order(self, args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name, in the order of the parameters, without those of the configs."""
        given = dict(zip(self._open, args))
        wrong = ""
        if len(args) > len(self._open):
            wrong = f"{len(args)} arguments are given by position"
        elif twice := [name for name in given if name in named]:
            wrong = f"{', '.join(twice)} is given twice"
        elif odd := [name for name in named if name not in self.fn.arg_names]:
            wrong = f"{', '.join(odd)} is no argument"
        elif own := [name for name in named if name in self._set_by_configs()]:
            wrong = f"{', '.join(own)} is given, which the configs set,"
        values: dict[str, Any] = {}
        for parameter in self._parameters:
            name = parameter.name
            value = given[name] if name in given else named.get(name, parameter.default)
            if value is not MISSING:
                values[name] = value
            elif not parameter.is_constexpr and not wrong:
                wrong = f"{name} is missing"
        if wrong:
            raise ArgumentError(
                f"tuning: {wrong} in a launch of '{self.__name__}', which takes "
                f"{', '.join(self._open)}. Try: these in order, compile-time arguments by name."
            )
        return values

    def _set_by_configs(self) -> set[str]:
        """Names that a launch cannot give, because each candidate has its own value."""
        blocks = {block_name(dim) for dim in self.sizes} | {"RSPLIT"}
        return blocks.union(*(config.kwargs for config in self._given or ()))

    def _size(self, name: str, value: Any) -> int:
        if type(value) is not int or value < 0:
            raise ArgumentError(
                f"tuning: {name} of '{self.__name__}' is {shown_value(value)}; it is a size, an "
                f"integer of at least 0. Try: {name}=tensor.shape[0]."
            )
        return value


def _exact(args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """What a launch's plan follows from, without deciding what of it matters; None if unknown."""
    parts: list[Any] = [torch.are_deterministic_algorithms_enabled()]
    for value in (*args, *named.values()) if named else args:
        kind = type(value)
        if hasattr(value, "data_ptr"):
            parts.append((value.dtype, value.data_ptr() & 15, value.get_device()))
        elif kind is float:  # by value only where it may be compiled in
            parts.append((kind, repr(value)) if named else kind)
        else:
            parts.append((kind, value))
    key = (*parts, *named)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _launch(plan: Any, index: int, given: Sequence[Any]) -> Any:
    """Launch on the current stream of a device."""
    stream = cast(Any, torch._C)._cuda_getCurrentRawStream(index)
    if torch.cuda.current_device() == index:
        return plan.run(*given, stream=stream)
    with torch.cuda.device(index):
        return plan.run(*given, stream=stream)


def device_properties(device: torch.device) -> DeviceProperties:
    """Read what heuristics ask of a GPU."""
    found: Any = torch.cuda.get_device_properties(device)
    return DeviceProperties(
        type=device.type,
        index=device.index if device.index is not None else torch.cuda.current_device(),
        multi_processor_count=found.multi_processor_count,
        cc=found.major * 10 + found.minor,
        major=found.major,
        regs_per_multiprocessor=getattr(found, "regs_per_multiprocessor", None),
        max_threads_per_multi_processor=getattr(found, "max_threads_per_multi_processor", None),
        max_threads_per_block=getattr(found, "max_threads_per_block", 1024),
        warp_size=getattr(found, "warp_size", 32),
    )
