"""Launches of which all is known but the tensors' addresses: what an operator keeps in its plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tileloom.launch import descriptors, guard, watch
from tileloom.launch.specialize import Unsupported, is_descriptor

if TYPE_CHECKING:
    from tileloom.launch.launcher import Launcher

_SOURCE = """
def launch({names}):
    if {refused}:
        return _again({names})
    return _entry(_stream({device}), {addresses})
"""


@dataclass(frozen=True)
class Number:
    """A number that is given in each launch, among the arguments of `Launcher.bind`.

    Attributes:
        value: An example. The grid may not depend on it.
    """

    value: int


class BoundLaunch:
    """One launch with its grid and its numbers fixed, for tensors like those it was made with.

    Nothing is checked: whoever calls it has made sure that every tensor has the dtype, the device,
    the 16-byte alignment and, under a descriptor, the shape and strides of the one it stands for.
    It holds no tensor. Hooks, profilers, debugging and emulators see its launches as they see all.

    Attributes:
        launch: `launch(*tensors)`: one for each tensor and each descriptor among the arguments, in
            their order; for a descriptor the tensor below it, for a `Number` an integer.
    """

    def __init__(
        self, launcher: Launcher, grid: Any, values: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        self._named = named
        self._launcher = launcher
        self._grid = grid
        self._numbers = {i for i, v in enumerate(values) if isinstance(v, Number)}
        self._places = [
            i
            for i, v in enumerate(values)
            if i in self._numbers or hasattr(v, "data_ptr") or is_descriptor(v)
        ]
        # Addresses come from the caller; a descriptor is kept without its tensor.
        self._forms = [
            descriptors.of(v) if is_descriptor(v) else None if i in self._places else v
            for i, v in enumerate(values)
        ]
        self._tries = 0
        self.launch: Callable[..., Any] = self._first
        watch.register(self)

    def forget(self) -> None:
        """Drop what is prepared; the next launch decides anew."""
        self._tries = 0
        self.launch = self._first

    def renew(self) -> None:
        """Begin anew in a forked child: nothing to do."""

    def _values(self, tensors: Sequence[Any]) -> list[Any]:
        values = list(self._forms)
        for i, tensor in zip(self._places, tensors):
            form = values[i]
            values[i] = form.with_base(tensor) if isinstance(form, descriptors.Spec) else tensor
        return values

    def _again(self, *tensors: Any) -> Any:
        return self._launcher[self._grid](*self._values(tensors), **self._named)

    def _first(self, *tensors: Any) -> Any:
        """Launch the long way; from the second time on, try to prepare."""
        values = self._values(tensors)
        result = self._launcher[self._grid](*values, **self._named)
        self._tries += 1
        if self._tries > 1 and not self._named:
            try:
                entry = self._launcher.entry(
                    self._grid, values, numbers_vary=False, varying=self._numbers
                )
            except Unsupported:
                self.launch = self._again
            else:
                if entry is not None:
                    self.launch = self._build(entry)
        return result

    def _build(self, entry: Callable[..., Any]) -> Callable[..., Any]:
        host = self._launcher.host()
        scope: dict[str, Any] = {"_again": self._again, "_entry": entry, "_stream": host.stream}
        names = [f"t{i}" for i in range(len(self._places))]
        source = _SOURCE.format(
            names=", ".join(names),
            refused=" or ".join(guard.signal_tests(host.signals, scope)),
            device=host.device(),
            addresses=", ".join(
                name if i in self._numbers else f"{name}.data_ptr()"
                for i, name in zip(self._places, names)
            ),
        )
        exec(compile(source, "<tileloom bound launch>", "exec"), scope)
        return scope["launch"]
