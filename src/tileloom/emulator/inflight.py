"""What is under way: asynchronous operations, and the queues in which a partition's complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tileloom.emulator.ir import Loc

if TYPE_CHECKING:
    from tileloom.emulator.machine import Partition


class InFlight:
    """An asynchronous operation that was issued and has not completed.

    One that `outlives` its program may complete after it has ended: a write of global memory.
    """

    __slots__ = ("guard", "kind", "loc", "outlives", "partition", "queue", "run", "start")

    def __init__(
        self, kind: str, partition: Partition, run: Callable[[], None], loc: Loc,
        queue: tuple[str, int] | None, guard: Callable[[], bool] | None, start: int,
        outlives: bool,
    ) -> None:  # fmt: skip
        self.kind = kind
        self.partition = partition
        self.run = run
        self.loc = loc
        self.queue = queue
        self.guard = guard
        self.start = start
        self.outlives = outlives


class Queue:
    """A partition's operations of one kind that complete in order.

    A TMA store is done once it has read shared memory, and landed once it has written.
    """

    __slots__ = ("done", "issued", "key", "landed", "last")

    def __init__(self, key: int) -> None:
        self.key = key
        self.issued = 0
        self.done = 0
        self.landed = 0
        self.last: Loc | None = None
