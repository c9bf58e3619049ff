"""Grids as Python expressions of a kernel's arguments, with the constants of its config folded in.

A grid knows the names that it reads, can be computed from a dictionary, and becomes a function that
a launch calls: nothing about the config is looked up any more then.

>>> from tileloom.tuning import Config
>>> grid = GridExpr.from_meta({"grid_type": "Grid2D"}, Config({"XBLOCK": 64, "YBLOCK": 1}))
>>> grid.x_grid, grid.y_grid, grid.z_grid
('-(xnumel // -64)', 'ynumel', 1)
>>> grid.evaluate({"xnumel": 100, "ynumel": 7})
(2, 7, 1)
"""

from __future__ import annotations

import ast
import builtins
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from tileloom.errors import ArgumentError, OptionError, shown_value
from tileloom.tuning.config import Config
from tileloom.tuning.hints import MAX_GRID

Expression = int | str
"""A number, or Python of the arguments' names."""

_SCOPE = {"math": math}


def ceildiv(numel: Expression, block: Expression | None) -> Expression:
    """Divide, rounding up; no block, or block 1, divides nothing."""
    if block is None or block == 1:
        return numel
    if isinstance(numel, int) and isinstance(block, int):
        return -(numel // -block)
    return f"-({_operand(numel)} // -{_operand(block)})"


def maximum(items: Iterable[Expression]) -> Expression:
    """Take the largest; numbers are folded into one."""
    left = _fold(items, max)
    return left[0] if len(left) == 1 else f"max({', '.join(map(str, left))})"


def summation(items: Iterable[Expression]) -> Expression:
    """Add up; numbers are folded into one."""
    return " + ".join(map(str, left)) if len(left := _fold(items, sum)) > 1 else left[0]


def product(items: Iterable[Expression]) -> Expression:
    """Multiply; numbers are folded into one, and a factor of 1 is left out."""
    left = [item for item in _fold(items, math.prod) if item != 1] or [1]
    return " * ".join(map(_operand, left)) if len(left) > 1 else left[0]


def _fold(items: Iterable[Expression], fold: Callable[[list[int]], int]) -> list[Expression]:
    items = list(items)
    numbers = [item for item in items if isinstance(item, int)]
    named: list[Expression] = [item for item in items if not isinstance(item, int)]
    return [*named, fold(numbers)] if numbers else named


def _operand(expression: Expression) -> str:
    text = str(expression)
    return text if text.isidentifier() or text.isdigit() else f"({text})"


class GridExpr:
    """The grid of a kernel with one config.

    Attributes:
        inductor_meta: The kernel's facts and settings. `numels` in it names the argument that is
            the size of a dimension, which generated code calls ``xnumel``, ``r0_numel`` and so on.
        meta: The config as a flat dictionary.
        prefix: Assignments that stand before the expressions.
        x_grid: Programs along x.
        y_grid: Programs along y.
        z_grid: Programs along z.
    """

    def __init__(self, inductor_meta: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        self.inductor_meta = inductor_meta
        self.meta = meta
        self.prefix: list[str] = []
        self.x_grid: Expression = 1
        self.y_grid: Expression = 1
        self.z_grid: Expression = 1
        self._generate()

    def _generate(self) -> None:
        """Fill in the expressions; each kind of grid has its own."""
        raise NotImplementedError

    @staticmethod
    def from_meta(inductor_meta: Mapping[str, Any], config: Config | Mapping[str, Any]) -> GridExpr:
        """Make the grid that a kernel's facts name as `grid_type`.

        Raises:
            OptionError: If there is no such kind of grid, or it does not suit the config.
        """
        name = inductor_meta.get("grid_type")
        kind = GRIDS.get(str(name))
        if kind is None:
            raise OptionError(
                f"inductor_meta: grid_type is {shown_value(name)}; it must be one of "
                f"{', '.join(GRIDS)}. "
                "Try: grid_type='Grid1D' for a kernel that has xnumel and XBLOCK."
            )
        return kind(inductor_meta, config.to_dict() if isinstance(config, Config) else config)

    @property
    def names(self) -> frozenset[str]:
        """The arguments that the expressions read."""
        source = "\n".join([*self.prefix, *map(str, (self.x_grid, self.y_grid, self.z_grid))])
        found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)]
        made = {node.id for node in found if isinstance(node.ctx, ast.Store)}
        known = made | set(_SCOPE) | set(dir(builtins))
        return frozenset(node.id for node in found) - known

    def evaluate(self, arguments: Mapping[str, Any]) -> tuple[int, int, int]:
        """Compute the grid.

        Args:
            arguments: Values by name; those that no expression reads are ignored.

        Raises:
            ArgumentError: If an expression reads a name that has no value.
        """
        names = sorted(self.names)
        missing = [name for name in names if name not in arguments]
        if missing:
            raise ArgumentError(self._unknown(missing, arguments))
        return self.function(names)(*(arguments[name] for name in names))

    def function(self, parameters: Sequence[str]) -> Callable[..., tuple[int, int, int]]:
        """Make a function from the values of a launch's arguments, in order, to the grid.

        Args:
            parameters: The arguments' names.

        Raises:
            ArgumentError: If an expression reads a name that is no parameter.
        """
        missing = sorted(self.names - set(parameters))
        if missing:
            raise ArgumentError(self._unknown(missing, parameters))
        lines = [*self.prefix, f"return ({self.x_grid}, {self.y_grid}, {self.z_grid})"]
        source = f"def grid({', '.join(parameters)}):\n" + "".join(
            f"    {line}\n" for line in lines
        )
        scope: dict[str, Any] = dict(_SCOPE)
        exec(compile(source, f"<{type(self).__name__}>", "exec"), scope)
        return cast(Callable[..., tuple[int, int, int]], scope["grid"])

    def numel(self, dim: str) -> str:
        """Return the name of the argument that is the size of a dimension."""
        return self.inductor_meta.get("numels", {}).get(dim, f"{dim}numel")

    def _unknown(self, missing: Sequence[str], known: Iterable[str]) -> str:
        return (
            f"{type(self).__name__}: the grid reads {', '.join(missing)}, but the launch has "
            f"{', '.join(known) or 'no arguments'}. Try: give the kernel such an argument, or "
            "another grid_type."
        )


class Grid1D(GridExpr):
    """Blocks of x."""

    def _generate(self) -> None:
        self.x_grid = ceildiv(self.numel("x"), self.meta.get("XBLOCK"))


class Grid2D(Grid1D):
    """Blocks of x and y."""

    def _generate(self) -> None:
        super()._generate()
        self.y_grid = ceildiv(self.numel("y"), self.meta.get("YBLOCK"))


class Grid3D(Grid2D):
    """Blocks of x, y and z."""

    def _generate(self) -> None:
        super()._generate()
        self.z_grid = ceildiv(self.numel("z"), self.meta.get("ZBLOCK"))


class BatchMatmulGrid3D(Grid3D):
    """Blocks of x, y and z, z along the grid's x, which takes the most."""

    def _generate(self) -> None:
        super()._generate()
        self.x_grid, self.z_grid = self.z_grid, self.x_grid


class Grid2DWithYZOverflow(Grid1D):
    """Blocks of x and y, those of y over the grid's y and z: the kernel finds z * (its y) + y."""

    def _generate(self) -> None:
        super()._generate()
        self._share_y(ceildiv(self.numel("y"), self.meta.get("YBLOCK")))

    def _share_y(self, blocks: Expression) -> None:
        """Spread blocks over y and z; no blocks at all stay none."""
        self.prefix += [
            f"y_grid_raw_ = {blocks}",
            f"y_grid_div_ = {ceildiv('y_grid_raw_', MAX_GRID['y'])}",
        ]
        self.y_grid = f"{ceildiv('y_grid_raw_', 'y_grid_div_')} if y_grid_div_ else 0"
        self.z_grid = "y_grid_div_"


class MixOrderReductionGrid(GridExpr):
    """Slabs of RSPLIT_SIZE rows, each walked in steps of XBLOCK."""

    def _generate(self) -> None:
        rows, block = self.meta.get("RSPLIT_SIZE"), self.meta.get("XBLOCK")
        if not rows or not block or rows % block:
            raise OptionError(
                f"MixOrderReductionGrid: RSPLIT_SIZE is {rows} and XBLOCK {block}; RSPLIT_SIZE "
                "must be a multiple of XBLOCK. Try: XBLOCK=1."
            )
        self.x_grid = ceildiv(self.numel("x"), rows)


class CooperativeReductionGrid(GridExpr):
    """RSPLIT programs share the rows of each block of x."""

    def _generate(self) -> None:
        split = self.meta.get("RSPLIT")
        if not split:
            raise OptionError(
                f"CooperativeReductionGrid: RSPLIT is {split}; it must be the number of programs "
                "that share a row. Try: cooperative_reduction, which sets it."
            )
        self.x_grid = split
        self.y_grid = ceildiv(self.numel("x"), self.meta.get("XBLOCK"))


class SplitScanGrid(GridExpr):
    """Blocks of each row along x, rows along y."""

    def _generate(self) -> None:
        block = self.meta.get("XBLOCK", 1)
        if block != 1:
            raise OptionError(
                f"SplitScanGrid: XBLOCK is {block}; a split scan takes one row a program. "
                "Try: inductor_meta={..., 'no_x_dim': True}, which makes it 1."
            )
        self.x_grid = ceildiv(self.numel("r0_"), self.meta.get("R0_BLOCK"))
        self.y_grid = self.numel("x")


class FixedGrid(GridExpr):
    """Three expressions that the kernel's facts state as `fixed_grid`."""

    @staticmethod
    def setup_grid_as_args() -> dict[str, Any]:
        """Return facts that make the grid three more arguments of each launch, at the end."""
        names = ["_grid_0", "_grid_1", "_grid_2"]
        return {"grid_type": "FixedGrid", "fixed_grid": names, "extra_launcher_args": names}

    def _generate(self) -> None:
        self.x_grid, self.y_grid, self.z_grid = self.inductor_meta["fixed_grid"]


class PrecomputedGrid(GridExpr):
    """A table from configs to three expressions: `precomputed_grids` of the kernel's facts."""

    def _generate(self) -> None:
        table = self.inductor_meta["precomputed_grids"]
        for entry in table:
            if all(self.meta.get(name) == value for name, value in entry["config"].items()):
                self.x_grid, self.y_grid, self.z_grid = entry["python"]
                return
        known = "; ".join(str(entry["config"]) for entry in table)
        raise OptionError(
            f"PrecomputedGrid: the config is {dict(self.meta)}, and none of the configs with a "
            f"grid: {known}. Try: one of these."
        )


class ComboKernelGrid(Grid2DWithYZOverflow):
    """The grid of several independent kernels in one launch; how x is shared differs."""

    def _generate(self) -> None:
        combo = self.inductor_meta["combo_grid_meta"]
        self.meta = {**(combo["default_config"] or {}), **self.meta}
        places = range(combo["num_kernels"])
        numels: list[Expression] = [combo[f"xnumel_{i}"] or f"xnumel_{i}" for i in places]
        self.x_grid = at_least(
            self._combo_x_grid(numels, [combo[f"no_x_dim_{i}"] for i in places]), combo
        )
        heights: list[Expression] = [
            combo[f"ynumel_{i}"] or f"ynumel_{i}" for i in places if f"ynumel_{i}" in combo
        ]
        if heights:
            self._share_y(ceildiv(maximum(heights), self.meta.get("YBLOCK")))

    def _combo_x_grid(self, xnumels: list[Expression], no_x_dims: list[bool]) -> Expression:
        """Share x.

        Args:
            xnumels: Size of x of each kernel.
            no_x_dims: Whether the kernel takes one element of x a program.
        """
        raise NotImplementedError


def at_least(blocks: Expression, combo: Mapping[str, Any]) -> Expression:
    """Raise the programs along x to what the kernels need, whose sizes may be known."""
    return maximum([blocks, combo["min_blocks"]]) if combo["min_blocks"] else blocks


class SequentialComboKernelGrid(ComboKernelGrid):
    """One kernel's blocks of x after the other's."""

    def _combo_x_grid(self, xnumels: list[Expression], no_x_dims: list[bool]) -> Expression:
        block = self.meta.get("XBLOCK")
        return summation(ceildiv(x, 1 if no_x else block) for x, no_x in zip(xnumels, no_x_dims))


class RoundRobinComboKernelGrid(ComboKernelGrid):
    """The kernels in turn, each with as many programs as the largest needs."""

    def _combo_x_grid(self, xnumels: list[Expression], no_x_dims: list[bool]) -> Expression:
        single = [x for x, no_x in zip(xnumels, no_x_dims) if no_x]
        blocked = [x for x, no_x in zip(xnumels, no_x_dims) if not no_x]
        if blocked:
            single.append(ceildiv(maximum(blocked), self.meta.get("XBLOCK")))
        return product([maximum(single), len(xnumels)])


class SequentialFlattenComboKernelGrid(GridExpr):
    """One kernel's blocks of x and y after the other's, each with blocks of its own."""

    def _generate(self) -> None:
        combo = self.inductor_meta["combo_grid_meta"]
        self.meta = {**(combo["default_config"] or {}), **self.meta}
        tiles = [self._tiles(combo, i) for i in range(combo["num_kernels"])]
        self.x_grid = at_least(summation(tiles), combo)

    def _tiles(self, combo: Mapping[str, Any], i: int) -> Expression:
        block = 1 if combo[f"no_x_dim_{i}"] else self.meta.get(f"XBLOCK_{i}")
        tiles = [ceildiv(combo[f"xnumel_{i}"] or f"xnumel_{i}", block)]
        if f"ynumel_{i}" in combo:
            height = combo[f"ynumel_{i}"] or f"ynumel_{i}"
            tiles.append(ceildiv(height, self.meta.get(f"YBLOCK_{i}")))
        return product(tiles)


GRIDS: dict[str, type[GridExpr]] = {
    kind.__name__: kind
    for kind in (
        Grid1D,
        Grid2D,
        Grid3D,
        BatchMatmulGrid3D,
        Grid2DWithYZOverflow,
        MixOrderReductionGrid,
        CooperativeReductionGrid,
        SplitScanGrid,
        FixedGrid,
        PrecomputedGrid,
        SequentialComboKernelGrid,
        SequentialFlattenComboKernelGrid,
        RoundRobinComboKernelGrid,
    )
}
"""Every kind of grid by the name that `grid_type` gives it."""
