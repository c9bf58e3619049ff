"""What a list of configs depends on: hints, properties of the device, facts about the kernel.

The names and members are those that Inductor's generated modules use, so that such a module finds
them here. Sizes are dictionaries of powers of two: ``x``, `y`, `z` for dimensions that programs
share out, ``r0_``, ``r1_`` for dimensions that are reduced.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from tileloom.errors import OptionError, shown_value

Sizes = Mapping[str, int]

MAX_BLOCK = {"x": 4096, "y": 1024, "z": 1024, "r0_": 65536, "r1_": 32768}
"""The largest block of each dimension; a block must divide it."""

MAX_GRID = {"x": 2**31 - 1, "y": 65535, "z": 65535}
"""How many programs CUDA starts at most along each dimension."""

MAX_RSPLIT = 64
"""Programs that share a row of a cooperative reduction at most."""

MAX_TENSOR = 2**20
"""Elements of a tensor in a Triton kernel at most."""

MIN_DOT = 16
"""The smallest block that a matrix product takes."""


class ReductionHint(enum.Enum):
    """How the elements of one reduction lie in memory."""

    INNER = 0
    """Side by side."""
    OUTER = 1
    """Far apart; neighbours belong to other reductions."""
    OUTER_TINY = 2
    """Far apart, and few."""
    DEFAULT = 3
    """Not known."""


class TileHint(enum.Enum):
    """The form of two-dimensional tiles."""

    SQUARE = 0
    DEFAULT = 1


class AutotuneHint(enum.Enum):
    """Further candidates that a kernel asks for."""

    ONE_ELEMENT_PER_THREAD = 0


class HeuristicType(enum.Enum):
    """The decorator that a kernel has; what may be tuned depends on it."""

    PERSISTENT_REDUCTION = 1
    POINTWISE = 2
    REDUCTION = 3
    SPLIT_SCAN = 4
    TEMPLATE = 5
    USER_AUTOTUNE = 6
    FIXED = 7


class DeviceProperties(NamedTuple):
    """What heuristics ask of a device; generated code spells it out.

    Attributes:
        type: The device's type, as PyTorch names it.
        index: Its number.
        multi_processor_count: Streaming multiprocessors (SMs).
        cc: Compute capability as one number: 90 for Hopper.
        major: Its first digit.
        regs_per_multiprocessor: Registers of an SM.
        max_threads_per_multi_processor: Threads that an SM holds.
        max_threads_per_block: Threads of a program at most.
        warp_size: Threads of a warp.
    """

    type: str
    index: int | None  # pyright: ignore[reportIncompatibleMethodOverride]
    multi_processor_count: int
    cc: int
    major: int | None = None
    regs_per_multiprocessor: int | None = None
    max_threads_per_multi_processor: int | None = None
    max_threads_per_block: int | None = None
    warp_size: int | None = None

    @property
    def warp_size_or_default(self) -> int:
        """Threads of a warp, 32 if not given."""
        return self.warp_size if self.warp_size is not None else 32


@dataclass(frozen=True)
class Facts:
    """Facts about a kernel, and settings; the sizes apart, all that a list of configs depends on.

    Attributes:
        reduction_hint: How the elements of a reduction lie.
        tile_hint: The form of two-dimensional tiles.
        autotune_hints: Further candidates to add.
        autotune_pointwise: Whether pointwise kernels have more than one candidate.
        max_autotune: Whether to try all candidates where hints would choose.
        min_elem_per_thread: Elements that each thread of a pointwise kernel has at least.
        num_load: Loads in the kernel.
        num_reduction: Reductions in the kernel.
        num_dynamic: Arguments that are sizes not known at compile time.
        add_persistent_rblock: Whether to add a candidate that takes a whole row at once.
        tiling_scores: How much coalesced memory traffic each dimension has, for three dimensions.
        tma_min_block_sizes: The smallest block of each dimension that TMA takes.
        persistent: Whether the kernel holds whole rows, so that reduction blocks are constants.
        rsplit_size: Rows of a program of a mix-order reduction; 0 for other kernels.
        multi_stages: Whether the loop of a mix-order reduction may be pipelined.
        min_split_scan_rblock: The smallest reduction block of a split scan.
        min_xblock: Smallest XBLOCK of a reduction.
        min_rblock: Smallest R0_BLOCK of a reduction.
        native_matmul: Whether the reduction is a matrix product done by `tl.dot`.
        no_x_dim: Whether a reduction has no XBLOCK, which is then 1.
        deterministic: Whether results may not depend on measurements.
        contiguous_r: Whether some load or store is contiguous along the reduction, as far as known.
        multi_processor_count: SMs of the device; 0 if not known.
        major: First digit of its compute capability; 0 if not known.
    """

    reduction_hint: ReductionHint = ReductionHint.DEFAULT
    tile_hint: TileHint = TileHint.DEFAULT
    autotune_hints: tuple[AutotuneHint, ...] = ()
    autotune_pointwise: bool = True
    max_autotune: bool = False
    min_elem_per_thread: int = 0
    num_load: int = 0
    num_reduction: int = 0
    num_dynamic: int = 0
    add_persistent_rblock: bool = False
    tiling_scores: Mapping[str, float] | None = None
    tma_min_block_sizes: Mapping[str, int] | None = None
    persistent: bool = False
    rsplit_size: int = 0
    multi_stages: bool = True
    min_split_scan_rblock: int = 256
    min_xblock: int = 1
    min_rblock: int = 1
    native_matmul: bool = False
    no_x_dim: bool = False
    deterministic: bool = False
    contiguous_r: bool = True
    multi_processor_count: int = 0
    major: int = 0

    def __post_init__(self) -> None:
        for name, kind in (("reduction_hint", ReductionHint), ("tile_hint", TileHint)):
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise OptionError(
                    f"Facts: {name} is {shown_value(value)}; it must be one of "
                    f"{', '.join(str(hint) for hint in kind)}. Try: {kind.DEFAULT}."
                )

    @classmethod
    def of(
        cls,
        inductor_meta: Mapping[str, Any] | None,
        triton_meta: Mapping[str, Any] | None,
        **known: Any,
    ) -> Facts:
        """Read the facts that generated code states.

        Args:
            inductor_meta: The kernel's facts and settings.
            triton_meta: Its signature and device.
            known: Facts given to the decorator itself, under the names of the attributes.
        """
        meta, compiled = inductor_meta or {}, triton_meta or {}
        found = {ours: meta[theirs] for theirs, ours in _INDUCTOR.items() if meta.get(theirs)}
        for name in _ON:  # on, unless said otherwise
            if meta.get(name) is not None:
                found[_ON[name]] = bool(meta[name])
        found["max_autotune"] = any(meta.get(n) for n in ("max_autotune", "max_autotune_pointwise"))
        found["deterministic"] = any(meta.get(name) for name in _DETERMINISTIC)
        found["native_matmul"] = bool(compiled.get("native_matmul"))
        found["num_dynamic"] = sum(n.startswith("ks") for n in compiled.get("signature", ()))
        if "autotune_hints" in found:
            found["autotune_hints"] = members(AutotuneHint, found["autotune_hints"])
        device = compiled.get("device")
        if device is not None:
            found["multi_processor_count"] = device.multi_processor_count
            found["major"] = device.major or 0
        return cls(**{**found, **known})


_INDUCTOR = {
    "RSPLIT_SIZE": "rsplit_size",
    "persistent_reduction": "persistent",
    **{
        name: name
        for name in (
            "autotune_hints", "num_load", "num_reduction", "add_persistent_rblock",
            "tiling_scores", "tma_min_block_sizes", "min_split_scan_rblock", "min_xblock",
            "min_rblock", "no_x_dim",
        )
    },
}  # fmt: skip
_ON = {
    "autotune_pointwise": "autotune_pointwise",
    "has_loadstore_with_contiguous_rdim": "contiguous_r",
    "mix_order_reduction_allow_multi_stages": "multi_stages",
}
_DETERMINISTIC = (
    "deterministic",
    "force_filter_reduction_configs",
    "are_deterministic_algorithms_enabled",
)
FACTS = tuple(field.name for field in fields(Facts))


def member(kind: Any, value: Any) -> Any:
    """Return the member of an enumeration that a name, a member of PyTorch's own, or None says."""
    if not value:
        return kind.DEFAULT
    name = getattr(value, "name", str(value).rpartition(".")[2])
    if name not in kind.__members__:
        raise OptionError(
            f"{kind.__name__}: the hint is {shown_value(value)}; it must be one of "
            f"{', '.join(kind.__members__)}. Try: {kind.__name__}.{next(iter(kind.__members__))}."
        )
    return kind[name]


def members(kind: Any, values: Iterable[Any]) -> tuple[Any, ...]:
    """Return the members that names or members of PyTorch's own say, in one order."""
    return tuple(sorted((member(kind, value) for value in values), key=lambda m: m.value))


def is_reduced(dim: str) -> bool:
    """Whether a dimension is reduced, not shared out among programs."""
    return dim.startswith("r")


def reduced_size(sizes: Sizes) -> int:
    """Return the elements of one reduction: the product over the reduced dimensions."""
    return math.prod(size for dim, size in sizes.items() if is_reduced(dim))


def block_name(dim: str) -> str:
    """Return the name of a dimension's block: ``r0_`` has R0_BLOCK."""
    return f"{dim.upper()}BLOCK"


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n, and 1 for what is below."""
    return 1 << max(n - 1, 0).bit_length()


def last_power_of_2(n: int) -> int:
    """Return the largest power of two that is at most n, and 1 for what is below."""
    return 1 << max(n.bit_length() - 1, 0)


def check_sizes(caller: str, sizes: Any) -> dict[str, int]:
    """Return size hints as a dictionary.

    Raises:
        OptionError: If a dimension does not exist, or a size is no power of two.
    """
    if not isinstance(sizes, Mapping) or not sizes or any(dim not in MAX_BLOCK for dim in sizes):
        raise OptionError(
            f"{caller}: size_hints is {shown_value(sizes)}; it must be a dictionary of sizes with "
            f"the keys {', '.join(MAX_BLOCK)}. Try: size_hints={{'x': 1024, 'r0_': 4096}}."
        )
    for dim, size in sizes.items():
        if type(size) is not int or size < 1 or size & (size - 1):
            near = next_power_of_2(size) if type(size) is int else 1024
            raise OptionError(
                f"{caller}: the size hint of {dim} is {shown_value(size)}; a size hint is a power "
                f"of two. Try: size_hints={{..., {dim!r}: {near}}}, the size rounded up."
            )
    return dict(sizes)
