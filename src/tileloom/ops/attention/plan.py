"""What a call of attention comes to, kept: backend, shapes of the outputs, and the bound launch.

A plan is made from a real call and found again by everything that it was made from. A call that
finds one checks nothing, chooses nothing and makes no dataclass: it allocates and launches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tileloom.ops._op import Choice, announce, is_eager, is_watched

if TYPE_CHECKING:
    from tileloom.ops.attention.config import AttentionConfig
    from tileloom.ops.attention.philox import PhiloxState
    from tileloom.ops.attention.problem import Offsets

LIMIT = 1024
"""How many plans are kept; beyond it, all are dropped and made anew."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One kind of call.

    Attributes:
        choice: The decision.
        slower_than: The backend that would be more than 20 % faster, if it refused.
        out: Size and stride of O, in memory order.
        lse: Size and stride of LSE.
        like_lse: An empty tensor of LSE's dtype and device.
        launch: `launch(q, k, v, mask, bias, key_lengths, state, out, lse)`; of packed sequences
            their offsets follow.
    """

    choice: Choice
    slower_than: str | None
    out: tuple[tuple[int, ...], tuple[int, ...]]
    lse: tuple[tuple[int, ...], tuple[int, ...]]
    like_lse: torch.Tensor
    launch: Callable[..., None]

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        bias: torch.Tensor | None,
        key_lengths: torch.Tensor | None,
        state: PhiloxState | None,
        *offsets: Offsets,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate the outputs and launch; q's device is the current one.

        Args:
            q: Queries; all tensors are like those that the plan was made from.
            k: Keys.
            v: Values.
            mask: Bool tensor or None.
            bias: Floating tensor or None.
            key_lengths: `[B]` or None.
            state: Seed and offset of dropout, or None.
            offsets: Those of packed sequences, whose tensors have B = 1.

        Returns:
            O and LSE.
        """
        out = q.new_empty_strided(*self.out)
        lse = self.like_lse.new_empty_strided(*self.lse)
        self.launch(q, k, v, mask, bias, key_lengths, state, out, lse, *offsets)
        return out, lse

    def announce(self) -> None:
        """Make the decision visible to whoever wants to see it."""
        if self.slower_than is not None or is_watched():
            announce(self.choice, slower_than=self.slower_than)


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
        q.get_device(), k.get_device(), v.get_device(), q.dtype, k.dtype, v.dtype,
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), unaligned, extras, rest,
    )  # fmt: skip


def short_key(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: object,
    scale: object,
    dropout_p: float,
    config: AttentionConfig | None,
) -> Any:
    """Return the key of a call without mask and bias that may go straight to its plan.

    Args:
        q: What the user gave, unchecked; so are the others.
        k: Keys.
        v: Values.
        is_causal: Whether the mask is causal.
        scale: A number or None.
        dropout_p: A number.
        config: A config or None.

    Returns:
        The key, which ends with the options as `tileloom::attention_fwd` takes them (`options_of`);
        None if the call has to take the long way: it is not `_op.is_eager`, is under autocast, or
        has an argument of a type that the checks will refuse.
    """
    tensors = (q, k, v)
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors) or not is_eager(tensors):
        return None
    if torch._C._is_any_autocast_enabled():
        return None
    if type(is_causal) is not bool or type(scale) not in _SCALES:
        return None
    if scale is None:
        width = q.shape[-1]
        scale = 1.0 / math.sqrt(width) if width else 1.0
    right = 0 if is_causal else None
    on_host = dropout_p != 0.0 and not torch.cuda.is_current_stream_capturing()
    try:
        text = "" if config is None else config.encode()
        return key_of(
            q, k, v, None, None, None, None, right, None, None, scale, dropout_p, on_host, text
        )
    except (AttributeError, RuntimeError):  # a config that is none; a tensor without strides
        return None


def options_of(key: Any) -> tuple[Any, ...]:
    """Return bounds, scale and dropout's probability of a `short_key`, and the config's text."""
    *numbers, _, text = key[-1]
    return (*numbers, text)


_SCALES = (type(None), float)
_checked: dict[Any, Plan] = {}


def checked(key: Any) -> Plan | None:
    """Return the plan of a call whose arguments have passed the checks before."""
    plan = _checked.get(key)
    if plan is None or torch._C._cuda_getDevice() != key[0]:
        return None
    return plan


def note(key: Any) -> None:
    """Remember that a call passed the checks and was run."""
    plan = _plans.get(key)
    if plan is not None:
        if len(_checked) >= LIMIT:
            _checked.clear()
        _checked[key] = plan


def find(key: Any) -> Plan | None:
    """Return the plan of a key, None if there is none yet."""
    return _plans.get(key)


def keep(key: Any, plan: Plan) -> None:
    """Keep a plan."""
    if len(_plans) >= LIMIT:
        _plans.clear()
    _plans[key] = plan
