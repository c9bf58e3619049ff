"""How tensors `[..., n]` of one shape are walked row by row, without a copy.

The leading dimensions are taken in their own order and merged where every tensor of the call lets
them: what is left is at most three groups, or the Triton kernels refuse with a reason. Row `r`
counts through the groups as `torch.Tensor.reshape(-1, n)` would, so that a vector with one entry a
row is contiguous.

`Rows` makes the kernels' arguments: strides that do not exist are None, which Triton drops, so that
the usual call has one stride a tensor. `pieces_triton.row_offsets` turns them into offsets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MOST_GROUPS = 3

Strides = tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """The rows of a call's tensors.

    Attributes:
        count: Number of rows.
        width: Elements of a row, n.
        sizes: Sizes of the groups, outermost first.
        strides: For each tensor the strides of the groups and, last, that of the row's elements,
            all in elements; None for a tensor that is not given.
        vector: The unit that strides and width come in for the kernels: 16 bytes in elements where
            every tensor's strides and n are multiples of it and rows are dense; 1 where rows are
            dense; 0 where some row has a stride of its own.
        loose: The same strides of tensors that are walked along but have a unit of their own, such
            as a mask or one number a row.
    """

    count: int
    width: int
    sizes: tuple[int, ...]
    strides: tuple[Strides | None, ...]
    vector: int
    loose: tuple[Strides | None, ...] = ()

    @property
    def groups(self) -> int:
        """How many groups the rows are counted by."""
        return len(self.sizes)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the Triton kernels cannot walk these rows; empty if they can."""
        if self.groups <= MOST_GROUPS:
            return ()
        return (
            f"the leading dimensions of its tensors merge into {self.groups} groups of common "
            f"strides, more than {MOST_GROUPS}",
        )

    @property
    def unit(self) -> int:
        """Elements that a stride of 1 in the kernels' arguments stands for."""
        return self.vector or 1

    @property
    def width_units(self) -> int:
        """The kernels' argument for n: `width / unit`."""
        return self.width // self.unit

    def size_arguments(self) -> tuple[int | None, int | None]:
        """The kernels' arguments `size_1, size_2`: sizes of the middle and the inner group."""
        padded = (None,) * (MOST_GROUPS - self.groups) + self.sizes
        middle, inner = padded[1:]
        return middle if self.groups > 2 else None, inner if self.groups > 1 else None

    def stride_arguments(self, tensor: int) -> tuple[int | None, ...]:
        """The kernels' arguments `t_0, t_1, t_2, t_d` of the tensor at this place of `strides`.

        Strides of the outer, middle and inner group and of the row's elements; None for a group
        that is not there, for dense rows, and for a tensor that is not given.
        """
        return self._padded(self.strides[tensor], self.vector)

    def loose_vector(self, tensor: int, wide: int) -> int:
        """The unit, as `vector`, of the tensor at this place of `loose`: `wide`, 1 or 0."""
        strides = self.loose[tensor]
        if strides is None or strides[-1] != 1:
            return 0
        return wide if all(n % wide == 0 for n in (self.width, *strides[:-1])) else 1

    def loose_arguments(self, tensor: int, vector: int) -> tuple[int | None, ...]:
        """The kernels' arguments `t_0, t_1, t_2, t_d` of a loose tensor in units of `vector`."""
        return self._padded(self.loose[tensor], vector)

    def _padded(self, strides: Strides | None, vector: int) -> tuple[int | None, ...]:
        if strides is None:
            return (None,) * (MOST_GROUPS + 1)
        *groups, last = strides
        padded = (None,) * (MOST_GROUPS - self.groups) + tuple(s // (vector or 1) for s in groups)
        return (*padded, last if vector == 0 else None)


def rows_of(
    shape: Sequence[int],
    strides: Sequence[Strides | None],
    itemsize: int,
    *,
    dense: bool = True,
    loose: Sequence[Strides | None] = (),
) -> Rows:
    """Merge the leading dimensions of tensors that have one shape.

    Args:
        shape: `[..., n]`, at least one dimension.
        strides: The strides of each tensor, None for one that is not given.
        itemsize: Bytes of an element, the smallest of the tensors' if they differ.
        dense: False where a further argument (a strided weight) takes away the unit stride.
        loose: The strides of tensors that are walked along but do not count for `vector`; for one
            number a row the last stride is 1.

    Returns:
        The rows. More than three groups are not refused here: see `Rows.reasons`.
    """
    *outer, width = shape
    every = (*strides, *loose)
    given = [s for s in every if s is not None]
    sizes: list[int] = []
    merged: list[list[int]] = [[] for _ in given]
    for axis, size in enumerate(outer):
        if size == 1:
            continue
        if sizes and all(m[-1] == s[axis] * size for m, s in zip(merged, given)):
            sizes[-1] *= size
            for m, s in zip(merged, given):
                m[-1] = s[axis]
        else:
            sizes.append(size)
            for m, s in zip(merged, given):
                m.append(s[axis])
    if not sizes:
        sizes, merged = [1], [[0] for _ in given]
    found = iter((*m, s[-1] if width > 1 else 1) for m, s in zip(merged, given))
    walked = tuple(None if s is None else next(found) for s in every)
    own, others = walked[: len(strides)], walked[len(strides) :]
    wide = max(1, 16 // itemsize)
    is_dense = dense and all(s[-1] == 1 for s in own if s is not None)
    is_wide = width % wide == 0 and all(n % wide == 0 for s in own if s for n in s[:-1])
    return Rows(
        count=math.prod(outer),
        width=width,
        sizes=tuple(sizes),
        strides=own,
        vector=(wide if is_wide else 1) if is_dense else 0,
        loose=others,
    )
