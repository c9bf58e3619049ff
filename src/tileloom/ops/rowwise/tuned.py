"""A row-wise call that a user has asked to tune: the rule's tile, or a faster one near it.

See `tileloom.tuning.operators`. The rule stays the default: it is the first candidate, and all that
is looked at where nobody tunes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from tileloom.errors import ConfigError
from tileloom.ops._op import Choice
from tileloom.ops.rowwise.config import Tile, TritonConfig
from tileloom.tuning import of_operators
from tileloom.tuning.config import Config

MOST_WARPS = 64
"""Warps of a multiprocessor: programs that wait for each other must all be there."""

_HERE = Path(__file__).parent


def neighbours(tile: Tile, width: int) -> list[Tile]:
    """Return a tile, and the tiles one step away from it.

    Args:
        tile: The rule's.
        width: Elements of a row. A tile that covers it goes on to do so.
    """
    size = "rows" if tile.block >= width else "block"
    steps: list[dict[str, Any]] = []
    for up in (True, False):
        warps = 2 * tile.num_warps if up else tile.num_warps // 2
        larger = 2 * getattr(tile, size) if up else getattr(tile, size) // 2
        steps += [{"num_warps": warps}, {size: larger}, {size: larger, "num_warps": warps}]
        if tile.per_sm > 1 or tile.stages > 1:
            steps.append({"per_sm": 2 * tile.per_sm if up else tile.per_sm // 2})
        if tile.stages > 1:
            steps.append({"stages": tile.stages + 1 if up else tile.stages - 1})
    if tile.split:
        steps.append({"split": False})
    made = [replace(tile, **step) for step in steps]
    fits = [t for t in made if not t.faults("tile") and t.num_warps * t.per_sm <= MOST_WARPS]
    return list(dict.fromkeys([tile, *fits]))


def tuned(
    choice: Choice,
    part: Literal["forward", "backward"],
    decide: Callable[[str], Callable[..., Any]],
    tensors: Sequence[torch.Tensor | None],
    *,
    changed: Sequence[torch.Tensor] = (),
) -> Choice:
    """Return a choice as it is, or, where a user tunes, with the fastest tile.

    Args:
        choice: By the rule, or explicit.
        part: Which of the config's tiles runs.
        decide: From a config's text to what runs the call; raises `ConfigError` if it cannot.
        tensors: The call's.
        changed: Those of them that it changes.
    """
    config, problem = choice.config, choice.problem
    is_open = isinstance(config, TritonConfig) and choice.source == "rule"
    first = next(tensor for tensor in tensors if tensor is not None)
    if not is_open or problem.is_empty or not of_operators.is_on(first):
        return choice
    tile = getattr(config, part)
    rows = problem.rows
    facts = {f.name: repr(getattr(problem, f.name)) for f in fields(problem) if f.name != "rows"}
    facts |= {
        "width": rows.width, "groups": rows.groups, "vector": rows.vector,
        "rows": 1 << max(rows.count - 1, 0).bit_length(),
    }  # fmt: skip

    def prepare(found: Config) -> Callable[[], Any]:
        run = decide(replace(config, **{part: _tile(found)}).encode())
        return lambda: run(*tensors)

    listed = [_config(one) for one in neighbours(tile, rows.width)]
    source = of_operators.source_of(str(_HERE), *map(str, sorted(_HERE.glob("*/"))))
    name = f"tileloom.ops.rowwise:{choice.op}_{part}"
    winner = of_operators.best(name, source, facts, listed, prepare, first.device, changed)
    if winner is None:
        return choice
    best = replace(config, **{part: _tile(winner)})
    try:  # the record may be of another number of rows
        decide(best.encode())
    except ConfigError:
        return choice
    return replace(choice, config=best, source="tuned")


def _config(tile: Tile) -> Config:
    names = ("block", "rows", "per_sm", "split", "ring", "ctas")
    blocks = {name: getattr(tile, name) for name in names}
    return Config(blocks, num_warps=tile.num_warps, num_stages=tile.stages)


def _tile(config: Config) -> Tile:
    return Tile(**config.kwargs, num_warps=config.num_warps, stages=config.num_stages)
