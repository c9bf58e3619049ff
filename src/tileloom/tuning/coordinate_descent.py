"""Coordinate descent: from a good config to a better one, a field at a time.

All neighbours of a field are measured together with the config they start from, so that a clock
that drifts favours none of them. Nothing is measured twice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tileloom import log
from tileloom.tuning.config import Config
from tileloom.tuning.hints import MAX_BLOCK, MAX_TENSOR, MIN_DOT, Sizes, block_name

_DIMS = {block_name(dim): dim for dim in MAX_BLOCK}
_STEPPED = ("num_stages", "NUM_STAGES")
_THRESHOLD = 0.001
_DOT_BLOCKS = ("XBLOCK", "YBLOCK", "R0_BLOCK")

_log = log.get_logger("tuning")

MeasureAll = Callable[[Sequence[Config]], Sequence[float]]
"""From configs, of which the first is the one to beat, to their times; infinity for a failure."""


def field_of(config: Config, name: str) -> int | None:
    """Return the value of a tunable field, None if the config does not have it."""
    if name in ("num_warps", "num_stages"):
        return getattr(config, name)
    return config.kwargs.get(name)


def with_field(config: Config, name: str, value: int) -> Config:
    """Return the config with another value of a field."""
    if name == "num_warps":
        return replace(config, num_warps=value)
    if name == "num_stages":
        return replace(config, num_stages=value)
    return config.with_kwargs(**{name: value})


class CoordescTuner:
    """Refines a config.

    A block may grow to its size hint, warps to the threads of a block; nothing shrinks below 1.
    """

    def __init__(
        self,
        is_mm: bool = False,
        is_native_matmul: bool = False,
        is_mix_order_reduction: bool = False,
        name: str = "unknown",
        size_hints: Sizes | None = None,
        inductor_meta: Mapping[str, Any] | None = None,
        frozen_fields: Collection[str] = (),
    ) -> None:
        """Describe the kernel.

        Args:
            is_mm: Whether it is a matrix product by blocks, whose stages are tuned as well.
            is_native_matmul: Whether it is Inductor's own matrix product: blocks of at least 16.
            is_mix_order_reduction: Whether it reduces over both orders: NUM_STAGES is tuned, and
                XBLOCK stays within RSPLIT_SIZE.
            name: What to call it in the log.
            size_hints: Powers of two by dimension.
            inductor_meta: Read for ``warp_size``, ``max_threads_per_block``, ``min_xblock``,
                ``min_rblock``, ``coordinate_descent_search_radius``,
                ``coordinate_descent_check_all_directions``, and the fields of combo kernels:
                ``combo_coordesc_field_order`` and ``combo_coordesc_field_limits``.
            frozen_fields: Fields that keep their values.
        """
        self.is_mm = is_mm
        self.is_native_matmul = is_native_matmul
        self.is_mix_order_reduction = is_mix_order_reduction
        self.name = name
        self.size_hints = size_hints
        self.inductor_meta = inductor_meta or {}
        self.frozen_fields = frozenset(frozen_fields)

    @property
    def tunable_fields(self) -> list[str]:
        """The fields in the order in which they are tried."""
        combined = self.inductor_meta.get("combo_coordesc_field_order") or ()
        fields = [*combined, *_DIMS, "BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps"]
        if self.is_native_matmul:
            fields.remove("ZBLOCK")
        if self.is_mm or self.is_native_matmul:
            fields.append("num_stages")
        if self.is_mix_order_reduction:
            fields.append("NUM_STAGES")
        return [name for name in fields if name not in self.frozen_fields]

    def get_config_max(self, block: str) -> int:
        """Return the largest value of a block, by its own limit and the size hint."""
        dim = _DIMS[block]
        return min(MAX_BLOCK[dim], (self.size_hints or {}).get(dim, MAX_BLOCK[dim]))

    def value_too_large(self, name: str, value: int) -> bool:
        """Whether a field may not be so large; blocks of products (BLOCK_M) have no limit."""
        limits = self.inductor_meta.get("combo_coordesc_field_limits") or {}
        if name in limits:
            return value > limits[name]
        if name in _DIMS:
            return value > self.get_config_max(name)
        if name == "num_warps":
            threads = self.inductor_meta.get("max_threads_per_block") or 1024
            return value > threads // (self.inductor_meta.get("warp_size") or 32)
        return False

    def value_too_small(self, name: str, value: int) -> bool:
        """Whether a field may not be so small."""
        least = 1
        if name == "XBLOCK":
            least = self.inductor_meta.get("min_xblock") or 1
        elif name == "R0_BLOCK":
            least = self.inductor_meta.get("min_rblock") or 1
        if self.is_native_matmul and name in _DOT_BLOCKS:
            least = max(least, MIN_DOT)
        return value < least

    def get_neighbour_values(
        self, name: str, value: int, radius: int = 1, include_self: bool = False
    ) -> list[int]:
        """Return the values near one, the larger ones first.

        Blocks and warps are doubled and halved, stages counted up and down. NUM_STAGES is looked
        at two steps away at least: 1 may beat 2 and lose to 3.

        Args:
            name: The field.
            value: Its value.
            radius: Steps in each direction.
            include_self: Whether the value itself stands at the end.
        """
        if name == "NUM_STAGES":
            radius = max(radius, 2)
        found: list[int] = []
        for is_up, refuses in ((True, self.value_too_large), (False, self.value_too_small)):
            near = value
            for _ in range(radius):
                if name in _STEPPED:
                    near += 1 if is_up else -1
                else:
                    near = near * 2 if is_up else near // 2
                if refuses(name, near):
                    break
                found.append(near)
        return [*found, value] if include_self else found

    def is_valid_config(self, config: Config) -> bool:
        """Whether a config keeps what no single field can tell."""
        if self.is_mix_order_reduction:
            return config.kwargs["XBLOCK"] <= config.kwargs["RSPLIT_SIZE"]
        if self.is_native_matmul:
            whole = self.inductor_meta.get("native_matmul_persistent_rblock")
            whole = whole or (self.size_hints or {}).get("r0_", 1)
            blocks = {"R0_BLOCK": whole} | dict(config.kwargs)
            return math.prod(blocks.get(name, 1) for name in _DOT_BLOCKS) <= MAX_TENSOR
        return True

    def get_all_tuning_directions(self, config: Config) -> list[Config]:
        """Return every combination of neighbouring values of all fields, the config included."""
        radius = self.inductor_meta.get("coordinate_descent_search_radius", 1)
        names = [n for n in self.tunable_fields if field_of(config, n) is not None]
        near = [
            self.get_neighbour_values(n, field_of(config, n) or 0, radius, include_self=True)
            for n in names
        ]
        found: list[Config] = []
        for values in itertools.product(*near):
            made = config
            for name, value in zip(names, values):
                made = with_field(made, name, value)
            if self.is_valid_config(made):
                found.append(made)
        return found

    def autotune(
        self,
        func: Callable[[Config], float],
        baseline_config: Config,
        baseline_timing: float | None = None,
    ) -> Config:
        """Refine a config by a function that gives the time of one.

        Args:
            func: The time of a config; raising counts as infinity. It is asked once for each.
            baseline_config: Where to start.
            baseline_timing: Its time, if it is known.

        Returns:
            The best config found.
        """
        times: dict[Config, float] = {}
        if baseline_timing is not None:
            times[baseline_config] = baseline_timing

        def measure(configs: Sequence[Config]) -> list[float]:
            for config in configs:
                if config not in times:
                    try:
                        times[config] = func(config)
                    except Exception as why:
                        _log.debug("%s: %s failed: %s", self.name, config, why)
                        times[config] = math.inf
            return [times[config] for config in configs]

        return self.descend(measure, baseline_config)

    def descend(self, measure: MeasureAll, start: Config, tried: Collection[Config] = ()) -> Config:
        """Refine a config by a function that measures several together.

        Each field in turn is set to the fastest of its neighbouring values, if that is at least
        0.1 % faster, until a pass over all fields changes nothing. Where ``inductor_meta`` asks
        for all directions, every combination of neighbours is then tried too.

        Args:
            measure: See `MeasureAll`.
            start: Where to start.
            tried: Configs that `start` is known to be as fast as; they are not measured again.

        Returns:
            The best config found.
        """
        seen = {start, *tried}
        best = start
        is_better = True
        while is_better:
            is_better = False
            for name in self.tunable_fields:
                value = field_of(best, name)
                if value is None:
                    continue
                near = [with_field(best, name, v) for v in self.get_neighbour_values(name, value)]
                found = self._step(measure, best, near, seen)
                is_better = is_better or found is not best
                best = found
            if not is_better and self.inductor_meta.get("coordinate_descent_check_all_directions"):
                found = self._step(measure, best, self.get_all_tuning_directions(best), seen)
                is_better, best = found is not best, found
        return best

    def _step(
        self, measure: MeasureAll, best: Config, near: Sequence[Config], seen: set[Config]
    ) -> Config:
        new = [config for config in near if config not in seen and self.is_valid_config(config)]
        if not new:
            return best
        seen.update(new)
        own, *times = measure([best, *new])
        fastest = min(range(len(new)), key=times.__getitem__)
        if times[fastest] < own * (1 - _THRESHOLD):
            _log.debug("%s: from %s to %s", self.name, best, new[fastest])
            return new[fastest]
        return best
