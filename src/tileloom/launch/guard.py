"""The generated front of a launcher: tests that the arguments are those it was made for, and goes.

`build` writes one function for one *signature*, the kinds of a launch's arguments (tensor,
descriptor, or the type of a number), and compiles it with `exec`. It reads like this one, for a
kernel `add(x, y, n, BLOCK)`:

    def launch(_grid, /, x=MISSING, y=MISSING, n=MISSING, BLOCK=MISSING, *_rest, **_options):
        if (_rest or _options or signal0 or signal1
                or type(n) is not kind2 or type(BLOCK) is not kind3):
            return _slow(_grid, (x, y, n, BLOCK), _rest, _options)
        try:
            a0 = x.data_ptr(); a1 = y.data_ptr()
            at = (a0, a1)
            mask = _seen(at)
            if mask is None:
                if not (x.is_cuda and y.is_cuda):
                    return _slow(...)
                mask = _see(at)
            key = (_grid, mask, x.dtype, y.dtype, n, BLOCK)
            known, entry = _last
            if known != key:
                entry = _get(key)
                if entry is not None:
                    _last = key, entry
        except (AttributeError, TypeError):
            return _slow(...)
        if entry is None:
            return _miss(key, _grid, (x, y, n, BLOCK))
        return entry(_stream(0), a0, a1)

`_seen` knows addresses that were those of tensors on a GPU, and which of them 16 divides. Host and
devices share one space of addresses, so no tensor on the host has such an address.
Nothing in it holds a tensor. What the key has decides everything the entry was prepared for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tileloom.launch import descriptors
from tileloom.launch.specialize import Parameter, Unsupported, exact, is_descriptor
from tileloom.launch.tiers import ADDRESS, NUMBER

TENSOR = "tensor"
LIMIT = 1024
"""How many launches' addresses a guard knows."""

Kinds = tuple[Any, ...]
_SCALARS = (int, bool, float, type(None))


@dataclass(frozen=True)
class DescriptorKind:
    """The kind of an argument that is a TMA descriptor of some class."""

    type: type


def kinds_of(parameters: Sequence[Parameter], values: Sequence[Any]) -> Kinds:
    """Return the kind of each argument: `TENSOR`, a `DescriptorKind`, or the type of a value.

    Raises:
        Unsupported: If an argument is of a kind that has no guard.
    """
    kinds: list[Any] = []
    for parameter, value in zip(parameters, values):
        kind = type(value)
        if parameter.is_constexpr:
            exact(value)
            kinds.append(kind)
        elif kind in _SCALARS:
            kinds.append(kind)
        elif hasattr(value, "data_ptr"):
            kinds.append(TENSOR)
        elif is_descriptor(value):
            kinds.append(DescriptorKind(kind))
        else:
            raise Unsupported(f"{parameter.name} is a {kind.__name__}")
    return tuple(kinds)


def forms_of(
    parameters: Sequence[Parameter], values: Sequence[Any], *, numbers_vary: bool
) -> list[Any]:
    """Return what `Variant.entry` takes for arguments: values, and what stands for the others.

    Args:
        parameters: The kernel's.
        values: The arguments.
        numbers_vary: Whether floats are given in each launch; else they are fixed too.
    """
    forms: list[Any] = []
    for parameter, kind, value in zip(parameters, kinds_of(parameters, values), values):
        if kind is TENSOR:
            forms.append(ADDRESS)
        elif isinstance(kind, DescriptorKind):
            forms.append(descriptors.of(value))
        elif kind is float and not parameter.is_constexpr and numbers_vary:
            forms.append(NUMBER)
        else:
            forms.append(value)
    return forms


@dataclass(frozen=True)
class Host:
    """What a guard calls, and what it tests in each launch.

    Attributes:
        slow: `(grid, values, rest, options)`: any launch that is not like the guard's.
        miss: `(key, grid, values)`: one that is, but has not been prepared.
        get: From a key to its entry, or None.
        grid_of: `(grid, values)`: the grid as a tuple of integers.
        signals: Lists and dictionaries of Triton; see `watch.signals`.
        stream: From a device's number to its current stream.
        device: The current device's number, where there is more than one.
        is_single: Whether there is one device.
    """

    slow: Callable[..., Any]
    miss: Callable[..., Any]
    get: Callable[[Any], Any]
    grid_of: Callable[..., Any]
    signals: Sequence[Any]
    stream: Callable[[int], int]
    device: Callable[[], int]
    is_single: bool


_SOURCE = """
def launch(_grid, /, {parameters}*_rest, **_options):
    global _last
    if {refused}:
        return _slow(_grid, ({names}), _rest, _options)
    try:
        if type(_grid) is not tuple:
            _grid = _grid_of(_grid, ({names}))
        {body}
        _key = ({key})
        _known, _entry = _last
        if _known != _key:
            _entry = _get(_key)
            if _entry is not None:
                _last = _key, _entry
    except (AttributeError, TypeError):
        return _slow(_grid, ({names}), _rest, _options)
    if _entry is None:
        return _miss(_key, _grid, ({names}))
    return _entry(_stream({device}), {values})
"""
_NOTHING = (None, None)


def forget(guard: Callable[..., Any]) -> None:
    """Make a guard forget the launch that it went to last."""
    guard.__globals__["_last"] = _NOTHING


def build(parameters: Sequence[Parameter], kinds: Kinds, host: Host) -> Callable[..., Any]:
    """Write and compile the guard of one signature.

    Args:
        parameters: The kernel's.
        kinds: What `kinds_of` says of the arguments.
        host: What it calls.

    Returns:
        `launch(grid, *args, **constexprs)`.
    """
    scope: dict[str, Any] = {
        "_slow": host.slow, "_miss": host.miss, "_get": host.get, "_grid_of": host.grid_of,
        "_stream": host.stream, "_device": host.device, "_last": _NOTHING,
    }  # fmt: skip
    refused = ["_rest", "_options", *signal_tests(host.signals, scope)]
    texts = _Texts(scope)
    for index, (parameter, kind) in enumerate(zip(parameters, kinds)):
        name = parameter.name
        if kind is TENSOR:
            texts.tensor(index, parameter)
        elif isinstance(kind, DescriptorKind):
            texts.descriptor(index, name, kind.type)
        else:
            scope[f"_kind{index}"] = kind
            refused.append(f"type({name}) is not _kind{index}")
            texts.scalar(parameter, kind)
        scope[f"_default{index}"] = parameter.default
    given = "".join(f"{p.name}=_default{i}, " for i, p in enumerate(parameters))
    lines = texts.lines()
    if not host.is_single:
        lines.append("_index = _device()")
        texts.key.append("_index")
    source = _SOURCE.format(
        parameters=given,
        names="".join(f"{p.name}, " for p in parameters),
        refused=" or ".join(refused),
        body="\n        ".join(lines) or "pass",
        key="".join(f"{part}, " for part in ["_grid", *texts.key]),
        device="0" if host.is_single else "_index",
        values=", ".join(texts.values),
    )
    exec(compile(source, "<tileloom launcher>", "exec"), scope)
    return scope["launch"]


def signal_tests(signals: Sequence[Any], scope: dict[str, Any]) -> list[str]:
    """A test of each signal: that it is empty, or, where it is not now, that it is as now."""
    tests: list[str] = []
    for i, signal in enumerate(signals):
        scope[f"_signal{i}"] = signal
        if not signal:
            tests.append(f"_signal{i}")
        else:
            scope[f"_known{i}"] = signal.copy()
            tests.append(f"_signal{i} != _known{i}")
    return tests


class Addresses(dict[tuple[int, ...], Any]):
    """Addresses of tensors of one launch that were seen on a GPU, and how they are aligned.

    The value is 0 where 16 divides all that Triton asks of; else a tuple that says of which.

    Args:
        aligned: Which of the addresses Triton asks of.
    """

    def __init__(self, aligned: Sequence[bool]) -> None:
        super().__init__()
        self._aligned = aligned

    def see(self, addresses: tuple[int, ...]) -> Any:
        """Remember addresses, and return their value."""
        asked = tuple([not a & 15 for a, is_asked in zip(addresses, self._aligned) if is_asked])
        if len(self) >= LIMIT:
            self.clear()
        value = self[addresses] = 0 if all(asked) else asked
        return value


class _Texts:
    """The pieces of a guard's source, collected argument by argument."""

    def __init__(self, scope: dict[str, Any]) -> None:
        self.scope = scope
        self.reads: list[str] = []
        self.tests: list[str] = []
        self.on_gpu: list[str] = []
        self.addresses: dict[str, bool] = {}
        self.key: list[str] = []
        self.values: list[str] = []

    def tensor(self, index: int, parameter: Parameter) -> None:
        name, address = parameter.name, f"_a{index}"
        self.reads.append(f"{address} = {name}.data_ptr()")
        self.on_gpu.append(f"{name}.is_cuda")
        self.addresses[address] = parameter.specialize and parameter.align
        self.key.append(f"{name}.dtype")
        self.values.append(address)

    def descriptor(self, index: int, name: str, kind: type) -> None:
        spec, base, address = f"_s{index}", f"_b{index}", f"_a{index}"
        self.reads += [
            f"{spec} = {name}._tileloom_spec",
            f"{base} = {name}.base",
            f"{address} = {base}.data_ptr()",
        ]
        fields = ["shape", "strides", "block_shape", "padding"]
        known = {field.name for field in dataclasses.fields(kind)}
        if "round_f32_to_tf32" in known:
            fields.append("round_f32_to_tf32")
        self.tests += [
            f"{base}.dtype is {spec}.dtype",
            *(f"{name}.{field} == {spec}.{field}" for field in fields),
        ]
        if "layout" in known:
            same = f"{name}.layout is {spec}.layout or {name}.layout == {spec}.layout"
            self.tests.append(f"({same})")
        self.on_gpu.append(f"{base}.is_cuda")
        self.addresses[address] = False
        self.key.append(spec)
        self.values.append(address)

    def scalar(self, parameter: Parameter, kind: type) -> None:
        name = parameter.name
        if kind is float:
            if parameter.is_constexpr:
                self.key.append(f"repr({name})")
            else:
                self.values.append(name)
        elif kind is not type(None):
            self.key.append(name)

    def lines(self) -> list[str]:
        """The body's lines: reads, tests, and the mask of what is aligned to 16 bytes."""
        lines = list(self.reads)
        if self.tests:
            lines.append(f"if not ({' and '.join(self.tests)}): raise AttributeError")
        if self.addresses:
            known = Addresses(list(self.addresses.values()))
            self.scope |= {"_seen": known.get, "_see": known.see}
            lines += [
                f"_at = ({''.join(f'{address}, ' for address in self.addresses)})",
                "_mask = _seen(_at)",
                "if _mask is None:",
                f"    if not ({' and '.join(self.on_gpu)}): raise AttributeError",
                "    _mask = _see(_at)",
            ]
            self.key.insert(0, "_mask")
        return lines
