"""Calls with dropout that the emulator's and the GPU's tests share, and how they are judged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tests.ops.attention import cases, gradients
from tests.ops.attention.cases import BF16, FP16, FP32, AttentionCase

import tileloom
from tileloom import masks
from tileloom.ops.attention.config import triton_rule
from tileloom.ops.attention.config_backward import triton_backward_rule
from tileloom.target import H100, target_of

State = tuple[int | torch.Tensor, int | torch.Tensor]

_EVERYTHING = masks.window(50, 20, anchor="bottom_right")
FORMS: tuple[AttentionCase, ...] = (
    AttentionCase("plain", (2, 4, 2, 70, 92, 32, 32), FP16),
    AttentionCase("odd-keys", (2, 3, 3, 40, 93, 64, 64), BF16),
    AttentionCase("causal", (1, 4, 1, 130, 130, 64, 64), FP16, options={"is_causal": True}),
    AttentionCase(
        "window-lengths", (3, 2, 2, 80, 101, 32, 32), BF16,
        mask=cases.lengths(-3, 31, 1000, then=_EVERYTHING),
    ),
    AttentionCase("latent", (1, 4, 2, 70, 93, 192, 128), BF16, options={"is_causal": True}),
    AttentionCase("float", (1, 4, 2, 65, 70, 32, 16), FP32),
    AttentionCase("bias-of-heads", (2, 4, 2, 40, 64, 32, 32), FP16, bias=cases.added((4, 1, 64))),
    AttentionCase("wide", (1, 2, 1, 33, 70, 300, 264), BF16),
    AttentionCase(
        "everything", (2, 4, 2, 100, 131, 72, 40), FP16,
        layouts=("transposed", "gapped", "transposed"),
        mask=lambda case, device: cases.lengths(111, 40, then=_EVERYTHING)(case, device)
        & cases.visible((2, 1, 100, 131))(case, device),
        bias=cases.added((2, 4, 100, 131)), options={"scale": 0.2},
    ),
)  # fmt: skip
"""Every mask, bias and dtype, keys that are a multiple of 4 and that are not."""


def drawn_at(inputs: cases.Inputs) -> State:
    """The state that the next call will draw; the generators are left as they are."""
    if inputs.q.is_cuda:
        generator = torch.cuda.default_generators[inputs.q.get_device()]
        return generator.initial_seed(), generator.get_offset()
    before = torch.get_rng_state()
    seed = torch.randint(2**63 - 1, (), dtype=torch.int64)
    torch.set_rng_state(before)
    return seed, 0


def portable(inputs: cases.Inputs) -> dict[str, Any]:
    """The options that force the portable kernels, with the sizes that dispatch would choose."""
    problem = replace(cases.problem_of(inputs), dropout_p=0.5)
    target = target_of(inputs.q) if inputs.q.is_cuda else H100
    return {
        "config": triton_rule(problem, target),
        "backward_config": triton_backward_rule(problem, target),
    }


def check(
    inputs: cases.Inputs, out: torch.Tensor, lse: torch.Tensor, p: float, state: State | None
) -> None:
    """Judge O and LSE: those of a reference with the same mask."""
    chosen = {"dropout_p": p, "philox": state}
    cases.check(cases.Inputs(inputs.q, inputs.k, inputs.v, {**inputs.options, **chosen}), out, lse)


def check_gradients(
    inputs: cases.Inputs,
    given: gradients.Upstream,
    results: list[torch.Tensor],
    p: float,
    state: State,
) -> None:
    """Judge all gradients."""
    options = {**inputs.options, "dropout_p": p, "philox": state}
    gradients.check(cases.Inputs(inputs.q, inputs.k, inputs.v, options), given, results)


def _plain(size: tuple[int, int, int, int], width: int, device: Any) -> tuple[Any, Any]:
    """Zero queries and keys: every score has the same weight."""
    b, h, m, n = size
    q = torch.zeros(b, h, m, width, device=device, dtype=FP16)
    return q, torch.zeros(b, h, n, width, device=device, dtype=FP16)


def recovered(
    size: tuple[int, int, int, int],
    p: float,
    *,
    device: Any = "cpu",
    width: int = 512,
    **options: Any,
) -> torch.Tensor:
    """The mask of a forward, by values that are rows of the identity, `width` keys at a time."""
    b, h, _, n = size
    q, k = _plain(size, 16, device)
    width = min(n, width)
    shown: list[torch.Tensor] = []
    before = None if str(device) == "cpu" else torch.cuda.get_rng_state()
    for first in range(0, n, width):
        if before is not None:
            torch.cuda.set_rng_state(before)
        last = min(n, first + width)
        v = torch.zeros(b, h, n, last - first, device=device, dtype=FP16)
        v[:, :, first:last] = torch.eye(last - first, device=device, dtype=FP16)
        shown.append(tileloom.attention(q, k, v, dropout_p=p, **options) != 0)
    return torch.cat(shown, 3)


def recovered_backward(
    size: tuple[int, int, int, int],
    p: float,
    *,
    device: Any = "cpu",
    width: int = 512,
    is_wide: bool = False,
    **options: Any,
) -> torch.Tensor:
    """The mask of a backward: dV is the transposed weights where dO is rows of the identity.

    With `is_wide` q and k are as wide as v, as the Hopper kernels want it.
    """
    b, h, m, n = size
    q, k = _plain(size, width if is_wide else 16, device)
    width = width if is_wide else min(m, width)
    v = torch.zeros(b, h, n, width, device=device, dtype=FP16, requires_grad=True)
    out = tileloom.attention(q, k, v, dropout_p=p, **options)
    shown: list[torch.Tensor] = []
    for first in range(0, m, width):
        last = min(m, first + width)
        dout = torch.zeros_like(out)
        dout[:, :, first:last, : last - first] = torch.eye(last - first, device=device)
        (dv,) = torch.autograd.grad(out, v, dout, retain_graph=True)
        shown.append(dv[..., : last - first].transpose(2, 3) != 0)
    return torch.cat(shown, 2)
