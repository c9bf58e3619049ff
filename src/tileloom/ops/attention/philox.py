"""Where dropout's random numbers come from: the seed and the offset of a Philox generator.

On a GPU in eager mode these are exactly those of PyTorch's default generator, which then advances
as it does for `mem_eff_attention`: by one number for each score, rounded up to a multiple of 4.
While a CUDA graph is captured and under `torch.compile`, the seed is drawn on the device by
`torch.randint`, so that each replay has a new one, and the offset is 0; the same on the CPU, from
the CPU's default generator.
`torch.manual_seed` makes all of these repeatable.

Whatever draws here is the forward: a backward gets the forward's seed and offset. A generator whose
state a captured graph can read, as newer PyTorch may have, would be asked in `_state` alone.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy
import torch
from torch._C._functorch import peek_interpreter_stack

from tileloom.errors import DeviceError, OptionError
from tileloom.launch.bound import Number
from tileloom.ops import _op
from tileloom.ops.attention.problem import AttentionProblem
from tileloom.ops.attention.reference import check_probability

PhiloxState = tuple[torch.Tensor, torch.Tensor]
"""Seed and offset: int64 tensors without a dimension, on the CPU or on the GPU they are for."""

_SCHEMA = "philox_state(Tensor like, SymInt count) -> (Tensor, Tensor)"
_SEEDS = 2**63 - 1


def _drawn(device: torch.device) -> PhiloxState:
    """Draw a seed on a device."""
    seed = torch.randint(_SEEDS, (), dtype=torch.int64, device=device)
    return seed, torch.zeros((), dtype=torch.int64, device=device)


def _state(like: torch.Tensor, count: int) -> PhiloxState:
    if not like.is_cuda or torch.cuda.is_current_stream_capturing():
        return _drawn(like.device)
    generator = torch.cuda.default_generators[like.get_device()]
    offset = generator.get_offset()
    generator.set_offset(offset + (count + 3) // 4 * 4)
    return _signed(generator.initial_seed()), _signed(offset)


def _signed(value: int) -> torch.Tensor:
    """Put 64 bits into an int64 tensor on the CPU."""
    return torch.tensor(value - 2**64 if value >= 2**63 else value, dtype=torch.int64)


def _fake(like: torch.Tensor, count: int) -> PhiloxState:
    del count
    device = "cpu" if like.is_cuda else like.device
    return torch.empty((), dtype=torch.int64, device=device), torch.empty(
        (), dtype=torch.int64, device=device
    )


_philox_state = _op.register(
    _SCHEMA,
    _state,
    _fake,
    no_gradient="philox_state: random numbers have no gradient. Try: like.detach().",
    is_random=True,
)


def draw(like: torch.Tensor, count: int, name: str = "attention") -> PhiloxState:
    """Take the seed and the offset of a call that needs `count` random numbers.

    Args:
        like: A tensor on the device of the call.
        count: Scores that dropout decides on: `B * Hq * Lq * Lk`; of packed sequences
            `S * Hq * max_q * max_k`.
        name: The function that is called, for the error.

    Returns:
        Seed and offset, int64 without a dimension: on the CPU for a GPU in eager mode, else on the
        device of `like`.

    Raises:
        OptionError: If more are needed than 64 bits count.
    """
    if torch.compiler.is_compiling() or peek_interpreter_stack() is not None:
        return _drawn(like.device)
    if isinstance(count, int) and count >= 2**63:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionError(
            f"{name}: dropout needs {count} random numbers, one for each score, and the "
            "generator counts to 2^63. Try: bounds of the lengths (max_q, max_k) that are closer."
        )
    return _philox_state(like.detach() if like.requires_grad else like, count)


def state_of(
    name: str,
    q: torch.Tensor,
    dropout_p: float,
    seed: torch.Tensor | None,
    offset: torch.Tensor | None,
) -> PhiloxState | None:
    """Check what an operator got of dropout's state; None without dropout.

    Args:
        name: The operator's.
        q: Its queries.
        dropout_p: Its probability.
        seed: Its seed.
        offset: Its offset.

    Raises:
        OptionError: If the probability is out of range, or seed or offset is missing or no int64
            number.
        DeviceError: If seed and offset lie on different devices, or on another GPU than q.
    """
    if not dropout_p:
        return None
    check_probability(name, dropout_p)
    if seed is None or offset is None:
        raise OptionError(
            f"{name}: dropout_p is {dropout_p}, and philox_seed or philox_offset is None. Try: "
            "tileloom.attention, which draws both."
        )
    for text, tensor in (("philox_seed", seed), ("philox_offset", offset)):
        if tensor.dtype != torch.int64 or tensor.dim():
            raise OptionError(
                f"{name}: {text} has dtype {tensor.dtype} and shape {tuple(tensor.shape)}; it must "
                f"be an int64 tensor without a dimension. Try: torch.tensor({text})."
            )
    if seed.device != offset.device or seed.device not in (q.device, torch.device("cpu")):
        raise DeviceError(
            f"{name}: philox_seed is on {seed.device}, philox_offset on {offset.device}; they must "
            f"be both on the CPU or both on {q.device}, as q is. Try: .to(q.device) for both."
        )
    return seed, offset


def is_on_host(state: PhiloxState | None) -> bool:
    """Whether kernels get seed and offset as numbers, not as addresses."""
    return state is not None and not state[0].is_cuda


class DropoutArguments(NamedTuple):
    """What a kernel takes of dropout.

    Attributes:
        addresses: `seed_at` and `offset_at`, tensors on the device or None.
        numbers: `seed` and `offset` where there are no addresses, else 0.
        threshold: The least word of Philox that keeps a score.
        keep_scale: 1 / (1 - p).
        varies: Whether `numbers` are others in each launch.
    """

    addresses: tuple[torch.Tensor | None, torch.Tensor | None]
    numbers: tuple[int, int]
    threshold: int
    keep_scale: float
    varies: bool

    def bound(self) -> tuple[int | Number, int | Number, int, float]:
        """Return the numbers for `Launcher.bind`; `dropout_values` has those of each launch."""
        seed, offset = self.numbers
        if self.varies:
            return Number(seed), Number(offset), self.threshold, self.keep_scale
        return seed, offset, self.threshold, self.keep_scale


def dropout_arguments(problem: AttentionProblem, state: PhiloxState | None) -> DropoutArguments:
    """Return what the kernels of a problem take of dropout."""
    if state is None:
        return DropoutArguments((None, None), (0, 0), 0, 1.0, False)
    rest = (threshold_of(problem.dropout_p), 1.0 / (1.0 - problem.dropout_p))
    if is_on_host(state):
        return DropoutArguments((None, None), (int(state[0]), int(state[1])), *rest, True)
    return DropoutArguments(state, (0, 0), *rest, False)


def dropout_values(
    state: PhiloxState | None,
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """Return the addresses and the numbers that each bound launch takes of dropout, in order."""
    if state is None:
        return (), ()
    if is_on_host(state):
        return (), (int(state[0]), int(state[1]))
    return state, ()


@functools.lru_cache(maxsize=256)
def threshold_of(dropout_p: float) -> int:
    """Return the least 32-bit number that Philox may give where a score is kept.

    A score is kept where the uniform `x * 2^-32 + 2^-33` is above the probability, both in float32;
    that rises with x, so the kernels compare integers.

    Args:
        dropout_p: In 0 .. 1, 1 excluded.
    """
    probability = numpy.float32(dropout_p)
    low, high = 0, 2**32 - 1  # whose uniform is 1
    while low < high:
        middle = (low + high) // 2
        uniform = numpy.float32(middle) * numpy.float32(2.0**-32) + numpy.float32(2.0**-33)
        low, high = (low, middle) if uniform > probability else (middle + 1, high)
    return low
