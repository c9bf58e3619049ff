"""TMA descriptors that repeat: what one is, apart from its tensor, and a table of encoded ones.

Triton encodes every descriptor in every launch. Here a `Spec` is all of a descriptor but the
address; a `TensorMaps` table keeps, for one spec, the 128 encoded bytes of the addresses seen last.
Neither holds a tensor. Encoding is work of the host alone, legal while a CUDA graph is captured.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tileloom.launch import tensor_map

LIMIT = 64
"""How many addresses one table keeps."""

_TABLES, _SPECS = 1024, 4096

# CUtensorMapDataType by Triton's number of the element type; they differ in three.
_ELEMENT_TYPE = {8: 10, 9: 8, 10: 9}
_TF32 = 11
_MEMO = "_tileloom_spec"
_lock = threading.Lock()


@dataclass(frozen=True, eq=False)
class Spec:
    """A TMA descriptor without its tensor. Equal descriptors have the same spec, found by `of`.

    Attributes:
        kind: The class of the descriptor: Triton's or Gluon's.
        shape: As given, in elements.
        strides: As given, in elements.
        block_shape: As given.
        dtype: Of the tensor.
        padding: ``"zero"`` or ``"nan"``: what lies outside.
        layout: Of a tile in shared memory, for Gluon's.
        round_f32_to_tf32: Whether fp32 is rounded to TF32 on the way.
    """

    kind: type
    shape: Sequence[int]
    strides: Sequence[int]
    block_shape: Sequence[int]
    dtype: Any
    padding: str
    layout: Any
    round_f32_to_tf32: bool

    def with_base(self, base: Any) -> Any:
        """Return a descriptor of this spec over a tensor, as Triton's own path takes it."""
        made = object.__new__(self.kind)
        made.__dict__.update(
            base=base, shape=self.shape, strides=self.strides, block_shape=self.block_shape,
            padding=self.padding,
        )  # fmt: skip
        if self.layout is not None:
            made.__dict__["layout"] = self.layout
        if self.round_f32_to_tf32:
            made.__dict__["round_f32_to_tf32"] = True
        return made


_specs: dict[Any, Spec] = {}


def _copy(numbers: Any) -> Sequence[int]:
    return list(numbers) if isinstance(numbers, list) else numbers


def of(descriptor: Any) -> Spec:
    """Return the spec of a descriptor, and leave it on the descriptor itself for the next launch.

    Args:
        descriptor: A `TensorDescriptor` of Triton or Gluon. What is left there is compared field
            by field when it is used, so a changed descriptor is seen.

    Returns:
        The spec; the same object for equal descriptors.
    """
    base = descriptor.base
    layout = getattr(descriptor, "layout", None)
    rounds = bool(getattr(descriptor, "round_f32_to_tf32", False))
    key = (
        type(descriptor), type(descriptor.shape), tuple(descriptor.shape),
        type(descriptor.strides), tuple(descriptor.strides), type(descriptor.block_shape),
        tuple(descriptor.block_shape), base.dtype, descriptor.padding, repr(layout), rounds,
    )  # fmt: skip
    with _lock:
        spec = _specs.get(key)
        if spec is None:
            if len(_specs) >= _SPECS:
                _specs.clear()
            spec = _specs[key] = Spec(
                type(descriptor), _copy(descriptor.shape), _copy(descriptor.strides),
                _copy(descriptor.block_shape), base.dtype, descriptor.padding, layout, rounds,
            )  # fmt: skip
    descriptor.__dict__[_MEMO] = spec
    return spec


def renewed(descriptor: Any) -> bool:
    """Find the spec of a descriptor anew; say whether it is another than was left on it."""
    return descriptor.__dict__.get(_MEMO) is not of(descriptor)


def renew() -> None:
    """Give a forked child a lock of its own."""
    global _lock
    _lock = threading.Lock()


class TensorMaps(dict[int, Any]):
    """The encoded descriptors of one spec by address; one that is missing is encoded.

    Args:
        spec: All but the address.
        meta: How the kernel was compiled to read it: the entry of `tensordesc_meta`.
    """

    def __init__(self, spec: Spec, meta: Mapping[str, Any]) -> None:
        super().__init__()
        shape = [int(n) for n in spec.shape]
        if meta["fp4_padded"]:
            shape[-1] *= 2
        kind: int = meta["elem_type"]
        self._arguments = (shape, [int(n) for n in spec.strides], meta["block_size"])
        self._options: dict[str, Any] = {
            "element_bytes": meta["elem_size"],
            "element_type": _TF32 if spec.round_f32_to_tf32 else _ELEMENT_TYPE.get(kind, kind),
            "swizzle": meta["swizzle"],
            "fill": int(spec.padding == "nan"),
        }

    def encode(self, address: int) -> Any:
        """Encode the descriptor of one address."""
        return tensor_map.encode_tiled(address, *self._arguments, **self._options)

    def __missing__(self, address: int) -> Any:
        encoded = self.encode(address)
        with _lock:
            if len(self) >= LIMIT:
                del self[next(iter(self))]
            self[address] = encoded
        return encoded


_tables: dict[Any, TensorMaps] = {}


def tensor_maps(spec: Spec, meta: Mapping[str, Any]) -> TensorMaps:
    """Return the table of encoded descriptors of a spec, one for each way to read it.

    Args:
        spec: All but the address.
        meta: As `TensorMaps` takes it.
    """
    key = (spec, repr(meta))
    with _lock:
        if key not in _tables:
            if len(_tables) >= _TABLES:
                _tables.clear()
            _tables[key] = TensorMaps(spec, meta)
        return _tables[key]
