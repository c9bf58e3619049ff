"""A mailbox in shared memory: one partition tells the others a number, such as the next tile.

It has two slots, so that a letter can be written while the one before is still read. `mail` holds
them, as `[2, n]` integers: a letter is its number n times. Slot i has two barriers, `full` of one
arrival and `empty` of one by each thread that reads. Both sides count the letters, from 0.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tileloom.device.barriers import arrive_each_thread


@gluon.jit
def send(mail, full, empty, count, number):
    """Write letter `count` as soon as its slot has been read, from a partition of one warp."""
    slot = count & 1
    mbarrier.wait(empty.index(slot), ((count >> 1) & 1) ^ 1)
    SIZE: gl.constexpr = mail.type.shape[1]
    letter = gl.full([SIZE], number, mail.dtype, gl.BlockedLayout([1], [32], [1], [0]))
    mail.index(slot).store(letter)
    mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def receive(mail, full, empty, count, WARPS: gl.constexpr = 4):
    """Wait for letter `count` and return its number, in a partition of WARPS warps.

    Where a letter is the number 32 times, once a lane, the maximum over them tells the compiler
    that all lanes have the same: what follows from it stays in uniform registers.
    """
    slot = count & 1
    mbarrier.wait(full.index(slot), (count >> 1) & 1)
    number = gl.max(mail.index(slot).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)
    arrive_each_thread(empty.index(slot))
    return number
