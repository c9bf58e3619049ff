"""`cached_autotune`: from configs and the facts of generated code to an autotuner."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tileloom.errors import known_keywords
from tileloom.tuning.autotuner import CachingAutotuner
from tileloom.tuning.bandwidth import DebugAutotuner
from tileloom.tuning.config import Config
from tileloom.tuning.hints import HeuristicType, Sizes
from tileloom.tuning.tune import Search


@known_keywords
def cached_autotune(
    size_hints: Sizes | None,
    configs: Sequence[Any],
    triton_meta: Mapping[str, Any],
    heuristic_type: HeuristicType,
    filename: str | None = None,
    inductor_meta: Mapping[str, Any] | None = None,
    custom_kernel: bool = False,
    caching_autotuner_cls: type[CachingAutotuner] | None = None,
    search: Search | None = None,
) -> Callable[[Any], CachingAutotuner]:
    """Return a decorator that makes an autotuner of a jitted function.

    Args:
        size_hints: Powers of two by dimension.
        configs: The candidates, the default first; `tileloom.tuning.Config` or Triton's own.
        triton_meta: ``signature``, ``constants``, ``configs``, ``device``; ``restore_value`` and
            ``reset_to_zero`` name arguments that a launch changes.
        heuristic_type: The decorator's kind.
        filename: The file of generated code that holds the function; None for other functions.
        inductor_meta: Facts and settings: ``grid_type``, ``kernel_name``, ``mutated_arg_names``,
            ``optimize_mem``, ``coordinate_descent_tuning``, ``profile_bandwidth`` and others.
        custom_kernel: Whether a user wrote the kernel.
        caching_autotuner_cls: The class to make; a subclass may measure in another way. By default
            `CachingAutotuner`, or `DebugAutotuner` where ``profile_bandwidth`` is set; of a file of
            generated code an instance of Inductor's own class too, where Inductor is loaded.
        search: Chooses among further configs; see `tune.Stages`.

    Returns:
        From a function made by `triton.jit` to a `CachingAutotuner`. It raises `OptionError` if
        there is no config, a config holds a hook, or a name is no argument.
    """
    facts, compiled = dict(inductor_meta or {}), dict(triton_meta)
    changed = [*facts.pop("mutated_arg_names", ()), *compiled.pop("restore_value", ())]
    zeroed = list(compiled.pop("reset_to_zero", ()))
    optimize_mem = bool(facts.pop("optimize_mem", True))
    candidates = [Config.of(config) for config in configs]

    def decorator(fn: Any) -> CachingAutotuner:
        kind = caching_autotuner_cls or _usual(bool(facts.get("profile_bandwidth")), filename)
        own = candidates
        if "XBLOCK" not in fn.arg_names:  # a kernel of one element of x a program
            own = [config.without_kwargs("XBLOCK") for config in candidates]
        return kind(
            fn,
            compiled,
            own,
            mutated_arg_names=tuple(dict.fromkeys(changed)),
            reset_to_zero_arg_names=zeroed,
            optimize_mem=optimize_mem,
            heuristic_type=heuristic_type,
            size_hints=size_hints,
            inductor_meta=facts,
            custom_kernel=custom_kernel,
            filename=filename,
            search=search,
        )

    return decorator


def _usual(reports: bool, filename: str | None) -> type[CachingAutotuner]:
    if filename and "torch._inductor.runtime" in sys.modules:
        from tileloom.tuning import inductor

        return inductor.DebugAutotuner if reports else inductor.CachingAutotuner
    return DebugAutotuner if reports else CachingAutotuner
