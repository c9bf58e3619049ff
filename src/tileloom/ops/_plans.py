"""What a call decided is kept, so that the same call again allocates and launches, nothing more.

A plan is made from arguments that passed every check; its key is all that the checks, the choice of
a backend and the kernels' arguments depend on. Of the data pointers that is their alignment.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Hashable, Sequence
from typing import Any, Generic, TypeVar

import torch

from tileloom.ops._op import is_eager
from tileloom.tuning import of_operators

P = TypeVar("P")

MOST_PLANS = 4096


def layout_key(tensor: torch.Tensor | None) -> Hashable:
    """What a plan depends on in one tensor: all but its address, of which only the alignment.

    A tensor whose layout is not strided has no address, and PyTorch raises a RuntimeError.
    """
    if tensor is None:
        return None
    return (
        tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(), tensor.data_ptr() & 15,
    )  # fmt: skip


def plan_key(tensors: Sequence[torch.Tensor | None], *rest: Hashable) -> Hashable:
    """The key of a call: its tensors, and all else that a plan depends on.

    Returns:
        The key; None, for which there is never a plan, where what should be a tensor is none, or
        one without strides: the checks will say so.
    """
    try:
        return *map(layout_key, tensors), *rest
    except (AttributeError, RuntimeError):
        return None


def is_short(tensors: Sequence[Any]) -> bool:
    """Whether a call may go straight to its plan: `_op.is_eager`, and no gradient is asked for."""
    return (
        isinstance(tensors[0], torch.Tensor)
        and is_eager(tensors)
        and not (torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors))
    )


@functools.cache
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of one dimension or more."""
    sizes = [max(1, size) for size in shape[:0:-1]]
    return tuple(itertools.accumulate(sizes, operator.mul, initial=1))[::-1]


def new_cuda(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocate a contiguous tensor on the current GPU, by what Inductor's code calls.

    `Tensor.new_empty` goes through the dispatcher and takes three times as long.
    """
    allocate = torch._C._dynamo.guards._empty_strided_cuda  # pyright: ignore[reportAttributeAccessIssue]
    return allocate(shape, _strides(shape), dtype)


class Plans(Generic[P]):
    """A bounded table of plans; when it is full it starts anew. Safe from several threads."""

    def __init__(self, most: int = MOST_PLANS) -> None:
        self._found: dict[Hashable, P] = {}
        self._most = most
        of_operators.at_begin.append(self._found.clear)

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: Hashable) -> P | None:
        """Find the plan of a key, which may turn out not to be hashable."""
        try:
            return self._found.get(key)
        except TypeError:
            return None

    def put(self, key: Hashable, plan: P) -> P:
        """Keep a plan, and return it."""
        if len(self._found) >= self._most:
            self._found.clear()
        self._found[key] = plan
        return plan


def launcher(
    kernel: Any, num_warps: int, registers: int | None = None, overlaps: bool = False,
    ctas: int = 1,
) -> Any:  # fmt: skip
    """Return the one `tileloom.launch` launcher of a kernel with such options; see `Launch`."""
    from tileloom.launch.launcher import prepare

    key = (kernel, num_warps, registers, overlaps, ctas)
    found = _launchers.get(key)
    if found is None:
        options: dict[str, Any] = {} if registers is None else {"maxnreg": registers}
        if overlaps:
            options["launch_pdl"] = True
        if ctas > 1:
            options["num_ctas"] = ctas
        found = _launchers[key] = prepare(kernel, num_warps=num_warps, **options)
    return found


_launchers: dict[tuple[Any, int, int | None, bool, int], Any] = {}


class Launch:
    """A kernel, its grid and the arguments that a plan has fixed, ready to be launched.

    Its first tensors decide which are given; all later ones must be like them, in alignment as
    well, which is why a plan's key has it. `overlaps` lets it start before the kernel ahead of it
    in the stream has ended, for which it waits itself (`gdc_wait`; Hopper and later). With `ctas`
    each program is a cluster of so many CTAs.
    """

    __slots__ = ("_bound", "_fixed", "_given", "_grid", "_launcher")

    def __init__(
        self, kernel: Any, programs: int, num_warps: int, fixed: tuple[Any, ...],
        registers: int | None = None, overlaps: bool = False, ctas: int = 1,
    ) -> None:  # fmt: skip
        self._launcher = launcher(kernel, num_warps, registers, overlaps, ctas)
        self._grid = (programs,)
        self._fixed = fixed
        self._given: Any = None
        self._bound: Any = None

    def __call__(self, *varying: Any) -> None:
        """Launch where the first of `varying` lies; they are the kernel's first arguments."""
        device = varying[0].get_device()  # -1 is the CPU
        if device >= 0 and device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                self(*varying)
            return
        if self._bound is None:
            at = [i for i, v in enumerate(varying) if v is not None]
            # Of one index `itemgetter` gives the value itself, of a slice a tuple.
            self._given = (
                operator.itemgetter(*at) if at[1:] else operator.itemgetter(slice(at[0], at[0] + 1))
            )
            self._bound = self._launcher.bind(self._grid, *varying, *self._fixed)
        self._bound.launch(*self._given(varying))
