"""Grids: callables that need not be called again, and what a grid may be.

A callable grid is called with the arguments by name, as Triton calls it. What it returns is kept
where that depends on nothing but values that a launch's guard tests as well: the callable closes
over nothing, names only modules and functions, and has read no tensor.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

_LIMIT = 1024
_PLAIN = (int, bool, str, type(None))


class _Recorder(Mapping[str, Any]):
    """The arguments by name; remembers which were read, by whatever method."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _is_closed(function: Any) -> bool:
    """Whether a callable is a plain function of its argument alone."""
    if not isinstance(function, types.FunctionType) or function.__closure__:
        return False
    if function.__defaults__ or function.__kwdefaults__:
        return False
    scope = function.__globals__
    named = [scope[name] for name in function.__code__.co_names if name in scope]
    return all(isinstance(value, types.ModuleType) or callable(value) for value in named)


def _tuple(grid: Any) -> Any:
    """A grid as a tuple; what is no sequence as it is, for `normal_grid` to refuse."""
    try:
        return tuple(grid)
    except TypeError:
        return grid


class Grids:
    """Evaluates the grids of one launcher.

    Args:
        names: Names of the kernel's parameters, in order.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._reads: dict[Any, tuple[int, ...]] = {}
        self._known: dict[Any, tuple[int, ...]] = {}

    def __call__(self, grid: Any, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return a grid as a tuple: a sequence as it is, a callable's answer.

        Args:
            grid: What stood in the brackets.
            values: The arguments, in the order of the parameters.
        """
        if not callable(grid):
            return _tuple(grid)
        code = getattr(grid, "__code__", None)
        reads = self._reads.get(code)
        if reads is not None:
            key = (code, *[(type(values[i]), values[i]) for i in reads])
            known = self._known.get(key)
            if known is not None:
                return known
        return self._evaluate(grid, values)

    def _evaluate(self, grid: Callable[..., Any], values: Sequence[Any]) -> tuple[Any, ...]:
        named = dict(zip(self._names, values))
        if not _is_closed(grid):
            return _tuple(grid(named))
        given = _Recorder(named)
        try:
            whole = tuple(grid(given))
        except (AttributeError, TypeError):  # it wants a real dict, or is wrong: then it says so
            return _tuple(grid(named))
        code: Any = grid.__code__
        read = given.read | {self._names[i] for i in self._reads.get(code, ())}
        reads = tuple(i for i, name in enumerate(self._names) if name in read)
        if all(type(values[i]) in _PLAIN for i in reads):
            if len(self._known) >= _LIMIT:
                self.forget()
            self._reads[code] = reads
            self._known[(code, *[(type(values[i]), values[i]) for i in reads])] = whole
        return whole

    def forget(self) -> None:
        """Drop every answer."""
        self._known.clear()
        self._reads.clear()
