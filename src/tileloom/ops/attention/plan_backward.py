"""What a backward of attention comes to, kept, as `plan.py` keeps forwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tileloom.ops._op import Choice, announce, is_watched
from tileloom.ops.attention.philox import PhiloxState
from tileloom.ops.attention.plan import LIMIT
from tileloom.ops.attention.problem import Offsets

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Size = tuple[tuple[int, ...], tuple[int, ...]]


def readable(
    dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what every backend takes: a contiguous last dimension, and LSE contiguous.

    A gradient of a sum has strides of 0; the rest is so already where the forward made it.

    Args:
        dout: Gradient of O, `[B, Hq, Lq, Dv]`.
        out: The forward's output, likewise.
        lse: The forward's log-sum-exp, `[B, Hq, Lq]`.
    """
    dout, out = (t.contiguous() if t.shape[3] > 1 and t.stride(3) != 1 else t for t in (dout, out))
    return dout, out, lse.contiguous()


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """One kind of call.

    Attributes:
        choice: The decision.
        slower_than: The backend that would be more than 20 % faster, if it refused.
        sizes: Size and stride of dq, dk, dv and dbias, in memory order.
        is_written: Which of them the call asks for; the others have no element.
        is_readable: Whether dout, out and lse may be taken as they are; else by `readable`.
        launch: `launch(dout, dlse, q, k, v, out, lse, mask, bias, key_lengths, state, dq, dk, dv,
            dbias)`, with None for a gradient that is not asked for; of packed sequences their
            offsets follow.
    """

    choice: Choice
    slower_than: str | None
    sizes: tuple[Size, Size, Size, Size]
    is_written: tuple[bool, bool, bool, bool]
    is_readable: bool
    launch: Callable[..., None]

    def run(
        self,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        mask: torch.Tensor | None,
        bias: torch.Tensor | None,
        key_lengths: torch.Tensor | None,
        state: PhiloxState | None,
        *offsets: Offsets,
    ) -> Gradients:
        """Allocate the gradients and launch; q's device is the current one.

        Args:
            dout: Gradient of O; all tensors are like those that the plan was made from.
            dlse: Gradient of LSE or None.
            q: Queries.
            k: Keys.
            v: Values.
            out: The forward's output.
            lse: The forward's log-sum-exp.
            mask: Bool tensor or None.
            bias: Floating tensor or None.
            key_lengths: `[B]` or None.
            state: Seed and offset of dropout, or None.
            offsets: Those of packed sequences, whose tensors have B = 1.

        Returns:
            dq, dk, dv and dbias.
        """
        of_q, of_k, of_v, of_bias = self.sizes
        dq = q.new_empty_strided(*of_q)
        dk = k.new_empty_strided(*of_k)
        dv = v.new_empty_strided(*of_v)
        dbias = (q if bias is None else bias).new_empty_strided(*of_bias)
        is_q, is_k, is_v, is_bias = self.is_written
        if not self.is_readable:
            dout, out, lse = readable(dout, out, lse)
        self.launch(
            dout, dlse, q, k, v, out, lse, mask, bias, key_lengths, state, dq if is_q else None,
            dk if is_k else None, dv if is_v else None, dbias if is_bias else None,
            *offsets,
        )  # fmt: skip
        return dq, dk, dv, dbias

    def announce(self) -> None:
        """Make the decision visible to whoever wants to see it."""
        if self.slower_than is not None or is_watched():
            announce(self.choice, slower_than=self.slower_than)


_plans: dict[Any, BackwardPlan] = {}


def key_of(tensors: tuple[torch.Tensor | None, ...], *rest: Any) -> Any:
    """Return everything that a plan is made from.

    Args:
        tensors: All tensors of the call, in its order.
        rest: Whatever else the call has, by value.
    """
    layouts = [
        None if t is None
        else (t.shape, t.stride(), t.dtype, t.get_device(), t.data_ptr() & 15)
        for t in tensors
    ]  # fmt: skip
    return (*layouts, rest, torch.are_deterministic_algorithms_enabled())


def find(key: Any) -> BackwardPlan | None:
    """Return the plan of a key, None if there is none yet."""
    return _plans.get(key)


def keep(key: Any, plan: BackwardPlan) -> None:
    """Keep a plan."""
    if len(_plans) >= LIMIT:
        _plans.clear()
    _plans[key] = plan
