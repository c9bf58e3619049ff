"""What modules written by `torch.compile` find in the place of Inductor's `triton_heuristics`.

The decorators have the parameters that generated code gives. Each computes the list of candidates
and hands it to `cached_autotune`. All other names of the original that such a module, or code
around it, may ask for are resolved on first use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tileloom.errors import OptionError, shown_value
from tileloom.tuning.cached import cached_autotune
from tileloom.tuning.combo import ComboPlan, combo_plan
from tileloom.tuning.config import Config
from tileloom.tuning.heuristics_lists import configs as list_configs
from tileloom.tuning.heuristics_lists import foreach_configs
from tileloom.tuning.hints import (
    Facts,
    HeuristicType,
    ReductionHint,
    TileHint,
    check_sizes,
    member,
)
from tileloom.tuning.tune import Search

Meta = dict[str, Any]
Decorator = Callable[[Any], Any]

_ELSEWHERE = {
    "AutotuneHint": "hints", "DeviceProperties": "hints", "HeuristicType": "hints",
    "CachingAutotuner": "autotuner", "NoTritonConfigsError": "loaded",
    "DebugAutotuner": "bandwidth", "start_graph": "bandwidth", "end_graph": "bandwidth",
    "GridExpr": "grids", "Grid1D": "grids", "Grid2D": "grids", "Grid3D": "grids",
    "BatchMatmulGrid3D": "grids", "Grid2DWithYZOverflow": "grids",
    "MixOrderReductionGrid": "grids", "CooperativeReductionGrid": "grids",
    "SplitScanGrid": "grids", "FixedGrid": "grids", "PrecomputedGrid": "grids",
    "ComboKernelGrid": "grids", "SequentialComboKernelGrid": "grids",
    "SequentialFlattenComboKernelGrid": "grids", "RoundRobinComboKernelGrid": "grids",
    "triton_config": "heuristics", "triton_config_reduction": "heuristics",
    "triton_config_tiled_reduction": "heuristics", "make_matmul_triton_config": "heuristics",
    "match_target_block_product": "heuristics", "adapt_config_for_tiling": "heuristics",
}  # fmt: skip

DECORATORS = (
    "pointwise", "reduction", "persistent_reduction", "cooperative_reduction", "split_scan",
    "foreach", "template", "fixed_config", "user_autotune",
)  # fmt: skip

_HERE = ("cached_autotune", "config_from_dict", "config_to_dict")


def __getattr__(name: str) -> Any:
    module = _ELSEWHERE.get(name)
    if module is None:
        raise AttributeError(f"module 'tileloom.tuning.generated' has no attribute '{name}'")
    return getattr(importlib.import_module(f"tileloom.tuning.{module}"), name)


def __dir__() -> list[str]:
    return sorted([*_ELSEWHERE, *DECORATORS, *_HERE])


def pointwise(
    size_hints: Mapping[str, int],
    triton_meta: Meta,
    tile_hint: Any = None,
    filename: str | None = None,
    min_elem_per_thread: int = 0,
    inductor_meta: Meta | None = None,
    return_configs: bool = False,
) -> Any:
    """Tune a kernel that computes each element by itself.

    Args:
        size_hints: Size of each dimension, powers of two.
        triton_meta: Signature, constants, device.
        tile_hint: A `TileHint`.
        filename: The module's file; needed where there is more than one candidate.
        min_elem_per_thread: Elements that each thread has at least.
        inductor_meta: Facts and settings.
        return_configs: Whether to return the list of candidates instead of a decorator.

    Returns:
        A decorator of a jitted function.

    Raises:
        OptionError: If a size is no power of two, or the filename is missing.
        UnsupportedError: If the dimensions are not x, y and z.
    """
    known = {"tile_hint": member(TileHint, tile_hint), "min_elem_per_thread": min_elem_per_thread}
    kind = HeuristicType.POINTWISE
    meta = {**(inductor_meta or {}), "min_elem_per_thread": min_elem_per_thread}
    return _tuned("pointwise", kind, size_hints, triton_meta, meta, filename, known, return_configs)


def _reduction(name: str, kind: HeuristicType) -> Callable[..., Any]:
    def decorate(
        size_hints: Mapping[str, int],
        reduction_hint: Any = False,
        triton_meta: Meta | None = None,
        filename: str | None = None,
        inductor_meta: Meta | None = None,
        return_configs: bool = False,
    ) -> Any:
        hint = member(ReductionHint, reduction_hint)
        meta = {**(inductor_meta or {}), "reduction_hint": hint}
        known = {"reduction_hint": hint}
        return _tuned(
            name, kind, size_hints, triton_meta or {}, meta, filename, known, return_configs
        )

    decorate.__name__ = decorate.__qualname__ = name
    decorate.__doc__ = _REDUCTION_DOC.format(_REDUCTIONS[name])
    return decorate


_REDUCTIONS = {
    "reduction": "a kernel that reduces rows and loops over each",
    "persistent_reduction": "a kernel that reduces rows and holds each whole",
    "cooperative_reduction": "a kernel that reduces rows, each shared by several programs",
    "split_scan": "a kernel that scans rows, each shared by several programs",
}
_REDUCTION_DOC = """Tune {}.

    Args:
        size_hints: Size of each dimension, powers of two.
        reduction_hint: A `ReductionHint`.
        triton_meta: Signature, constants, device.
        filename: The module's file; needed where there is more than one candidate.
        inductor_meta: Facts and settings.
        return_configs: Whether to return the list of candidates instead of a decorator.

    Returns:
        A decorator of a jitted function.

    Raises:
        OptionError: If a size is no power of two, or the filename is missing.
        UnsupportedError: If such a kernel does not have these dimensions.
"""

reduction = _reduction("reduction", HeuristicType.REDUCTION)
persistent_reduction = _reduction("persistent_reduction", HeuristicType.PERSISTENT_REDUCTION)
cooperative_reduction = _reduction("cooperative_reduction", HeuristicType.REDUCTION)
split_scan = _reduction("split_scan", HeuristicType.SPLIT_SCAN)


def foreach(
    triton_meta: Meta, filename: str | None = None, inductor_meta: Meta | None = None
) -> Decorator:
    """Tune the warps of a kernel that does the same for many tensors.

    Args:
        triton_meta: Signature, constants, device.
        filename: The module's file; needed under max-autotune.
        inductor_meta: Facts and settings.
    """
    listed = foreach_configs(Facts.of(inductor_meta, triton_meta))
    kind = HeuristicType.TEMPLATE
    return _autotuned("foreach", None, listed, kind, triton_meta, inductor_meta, filename)


def template(
    num_stages: int,
    num_warps: int,
    triton_meta: Meta,
    num_consumer_groups: int = 0,
    num_buffers_warp_spec: int = 0,
    filename: str | None = None,
    inductor_meta: Meta | None = None,
) -> Decorator:
    """Take the one config that a template was written for.

    Args:
        num_stages: Depth of the software pipeline.
        num_warps: Warps of a program.
        triton_meta: Signature, constants, device.
        num_consumer_groups: Of other builds of Triton; must be 0.
        num_buffers_warp_spec: Of other builds of Triton; must be 0.
        filename: The module's file.
        inductor_meta: Facts and settings.

    Raises:
        OptionError: If it asks for what the supported versions of Triton do not have.
    """
    chosen = {
        "num_stages": num_stages, "num_warps": num_warps,
        "num_consumer_groups": num_consumer_groups, "num_buffers_warp_spec": num_buffers_warp_spec,
    }  # fmt: skip
    listed = [Config.from_dict(chosen)]
    kind = HeuristicType.TEMPLATE
    return _autotuned("template", None, listed, kind, triton_meta, inductor_meta, filename)


def fixed_config(
    config: Mapping[str, Any],
    filename: str | None,
    triton_meta: Meta,
    inductor_meta: Meta | None = None,
) -> Decorator:
    """Take the one config that was chosen when the kernel was written.

    Args:
        config: A flat dictionary; see `Config.from_dict`.
        filename: The module's file.
        triton_meta: Signature, constants, device.
        inductor_meta: Facts and settings.
    """
    listed = [Config.from_dict(config)]
    kind = HeuristicType.FIXED
    return _autotuned("fixed_config", None, listed, kind, triton_meta, inductor_meta, filename)


def user_autotune(
    configs: Sequence[Any],
    triton_meta: Meta,
    filename: str | None = None,
    inductor_meta: Meta | None = None,
    custom_kernel: bool = False,
) -> Decorator:
    """Tune a user's kernel among the user's configs.

    Args:
        configs: Flat dictionaries, or configs; none means Triton's default one, as generated code
            writes it for a kernel without `triton.autotune`.
        triton_meta: Signature, constants, device.
        filename: The module's file; needed where there is more than one config.
        inductor_meta: Facts and settings.
        custom_kernel: Whether configs whose registers spill are measured too.
    """
    listed = [Config.of(config) for config in configs] or [Config({})]
    kind = HeuristicType.USER_AUTOTUNE
    return _autotuned(
        "user_autotune", None, listed, kind, triton_meta, inductor_meta, filename, custom_kernel
    )


def config_to_dict(config: Config) -> dict[str, Any]:
    """Return a config as a flat dictionary; see `Config.to_dict`."""
    return config.to_dict()


def config_from_dict(config: Mapping[str, Any]) -> Config:
    """Make a config of a flat dictionary; see `Config.from_dict`."""
    return Config.from_dict(config)


def _tuned(
    name: str,
    kind: HeuristicType,
    size_hints: Mapping[str, int],
    triton_meta: Meta,
    inductor_meta: Meta,
    filename: str | None,
    known: Mapping[str, Any],
    return_configs: bool,
) -> Any:
    plan = combo_plan(inductor_meta, triton_meta)
    if plan is not None:
        meta = {**inductor_meta, **_combo_fields(plan)}
        return _autotuned(
            name, None, [plan.base], kind, triton_meta, meta, filename, search=plan.tune
        )
    sizes = check_sizes(name, size_hints)
    if inductor_meta.get("no_x_dim") and name != "pointwise":
        sizes["x"] = 1
    listed = list_configs(name, sizes, Facts.of(inductor_meta, triton_meta, **known))
    if return_configs:
        return listed
    return _autotuned(name, sizes, listed, kind, triton_meta, inductor_meta, filename)


def _combo_fields(plan: ComboPlan) -> Meta:
    """What coordinate descent may change of a combo kernel."""
    return {
        "combo_coordesc_field_order": list(plan.fields),
        "combo_coordesc_field_limits": plan.fields,
    }


def _autotuned(
    name: str,
    size_hints: Mapping[str, int] | None,
    listed: Sequence[Config],
    kind: HeuristicType,
    triton_meta: Meta,
    inductor_meta: Meta | None,
    filename: str | None,
    custom_kernel: bool = False,
    search: Search | None = None,
) -> Decorator:
    if len(listed) > 1 and not filename:
        raise OptionError(
            f"{name}: filename is {shown_value(filename)}, but there are {len(listed)} configs to "
            "choose from, and the winner is kept by the module's file. Try: filename=__file__."
        )
    return cached_autotune(
        size_hints,
        listed,
        triton_meta=triton_meta,
        inductor_meta=inductor_meta or {},
        heuristic_type=kind,
        filename=filename,
        custom_kernel=custom_kernel,
        search=search,
    )
