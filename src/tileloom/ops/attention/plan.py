"""What a call of attention comes to, kept: backend, shapes of the outputs, and the bound launch.

A plan is made from a real call and found again by everything that it was made from. A call that
finds one checks nothing, chooses nothing and makes no dataclass: it allocates and launches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tileloom.ops._op import Choice, announce, is_watched

LIMIT = 1024
"""How many plans are kept; beyond it, all are dropped and made anew."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One kind of call.

    Attributes:
        choice: The decision.
        slower_than: The backend that would be more than 20 % faster, if it refused.
        out: Size and stride of O, in memory order.
        lse: Size and dtype of LSE.
        launch: `launch(q, k, v, mask, bias, key_lengths, out, lse)`.
    """

    choice: Choice
    slower_than: str | None
    out: tuple[tuple[int, ...], tuple[int, ...]]
    lse: tuple[tuple[int, ...], torch.dtype]
    launch: Callable[..., None]

    def run(self, q: torch.Tensor, *rest: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate the outputs and launch; q's device is the current one.

        Args:
            q: Queries.
            rest: Keys, values, mask, bias, key lengths.

        Returns:
            O and LSE.
        """
        if self.slower_than is not None or is_watched():
            announce(self.choice, slower_than=self.slower_than)
        out = q.new_empty_strided(*self.out)
        lse = q.new_empty(self.lse[0], dtype=self.lse[1])
        self.launch(q, *rest, out, lse)
        return out, lse


_plans: dict[Any, Plan] = {}


def _layout(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() & 15


def key_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
    *rest: Any,
) -> Any:
    """Return everything that a plan is made from.

    Args:
        q: Queries on a GPU.
        k: Keys.
        v: Values.
        mask: Bool tensor or None.
        bias: Floating tensor or None.
        key_lengths: `[B]` or None.
        rest: Whatever else the call has, by value.
    """
    unaligned = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15
    if unaligned:
        unaligned = (q.data_ptr() & 15, k.data_ptr() & 15, v.data_ptr() & 15)
    extras = None
    if mask is not None or bias is not None or key_lengths is not None:
        extras = (_layout(mask), _layout(bias), _layout(key_lengths))
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, q.get_device(),
        unaligned, extras, rest,
    )  # fmt: skip


def find(key: Any) -> Plan | None:
    """Return the plan of a key, None if there is none yet."""
    return _plans.get(key)


def keep(key: Any, plan: Plan) -> None:
    """Keep a plan."""
    if len(_plans) >= LIMIT:
        _plans.clear()
    _plans[key] = plan
