"""Who is measured: something that takes q, k, v and gives attention, or says why it cannot."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from tileloom.bench.case import AttentionCase


@dataclass(frozen=True)
class Inputs:
    """One set of inputs: `[B, H, L, D]` each; for a backward `dout`, the gradient of O, too.

    `bias` broadcasts to `[B, H, Lq, Lk]`.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor | None = None
    bias: torch.Tensor | None = None


Call = Callable[[], Any]
Prepare = Callable[["AttentionCase", Inputs], Call]


def _no_reason(case: AttentionCase, inputs: Inputs) -> str | None:
    del case, inputs
    return None


def _as_is(out: Any) -> torch.Tensor:
    return out


def _nothing_known(case: AttentionCase, inputs: Inputs) -> Mapping[str, Any]:
    del case, inputs
    return {}


@dataclass(frozen=True)
class Contender:
    """One column of the table.

    Attributes:
        name: The column's name.
        side: ``"ours"`` or ``"peer"``.
        prepare: Makes, outside the timing, what one set of inputs needs (another layout, a mask),
            and returns the call that is timed.
        refuse: Says, without running anything, why it cannot take the case; None if it can.
        layout: Lays one input out as the contender wants it; not timed, and not in its gradient.
        read: Turns an output, or a gradient, into `[B, H, L, D]`; not timed.
        scope: Makes the context inside which the calls run; entered outside the timing.
        describe: What there is to know of how it runs the case: backend, config, source, ...
        has_own_mask: Whether its dropout mask is not that of PyTorch's generator, so that its
            results cannot be judged.
    """

    name: str
    side: Literal["ours", "peer"]
    prepare: Prepare
    refuse: Callable[[AttentionCase, Inputs], str | None] = _no_reason
    layout: Callable[[torch.Tensor], torch.Tensor] = _as_is
    read: Callable[[Any], torch.Tensor] = _as_is
    scope: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    describe: Callable[[AttentionCase, Inputs], Mapping[str, Any]] = _nothing_known
    has_own_mask: bool = False

    def laid_out(self, inputs: Inputs) -> Inputs:
        """Return inputs in the layout of this contender."""
        given = (inputs.q, inputs.k, inputs.v, inputs.dout)
        laid = [None if t is None else self.layout(t) for t in given]
        return Inputs(*laid, bias=inputs.bias)  # pyright: ignore[reportArgumentType]
