"""dQ of the Hopper backward added up in a fixed order: deterministic gradients.

A block of keys adds to a query block only after the next higher block of keys has: each counts the
steps whose dQ it has added in a word of its own, and reads that of the block above it. A program
draws its turn from a counter, and turns go from the highest keys down: whoever it waits for has
begun before it, and the highest waits for nobody, so that no order in which the GPU starts blocks
can end in a deadlock.

Under a causal mask higher blocks have fewer steps and begin later in the rows: each follows the one
above it without a pause. Turns go round several heads, two blocks of a multiprocessor's worth, so
that a block that has just begun finds the one above it some steps ahead: a simulation of the 18
benchmarked shapes loses 0 to 6 % to waiting.

The producer warp does it: it waits for the turn and counts the steps, while the consumers compute.
Where the consumers add dQ themselves (`.._bwd_wide.py`) it gives them their turns one step ahead.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tileloom.device.fences import fence_proxy_async
from tileloom.device.memory import load_acquire, store_release
from tileloom.device.tma import tma_reduce_add, tma_store_wait
from tileloom.ops.attention.pieces_gluon_sm90_bwd import queries_of


@gluon.jit
def program_in_turn(
    progress, key_blocks, heads_a_round, PACKED: gl.constexpr, ORDERED: gl.constexpr
):
    """Give the program of `keys_of_program` that this one is: its turn, which it draws if ORDERED.

    Turns go round `heads_a_round` key heads, block by block: from the last keys, or in no order of
    dQ from the first, which under a causal mask have most to do, so that the short ones come last.

    Word 0 of `progress` counts the turns, word `1 + program` the steps of a program; all begin
    at 0.
    """
    heads = gl.num_programs(0) // key_blocks
    turn = gl.program_id(0)
    if ORDERED:
        turn = gl.atomic_add(progress, 1, sem="relaxed")
    # Those of packed sequences are numbered from their ends anyway.
    return program_of_turn(turn, heads, key_blocks, heads_a_round, ORDERED and not PACKED)


@gluon.jit
def program_of_turn(turn, heads, key_blocks, heads_a_round, FROM_LAST: gl.constexpr):
    """The program of a turn; FROM_LAST: the last keys have the first."""
    round = turn // (heads_a_round * key_blocks)
    first = round * heads_a_round
    width = gl.minimum(heads - first, heads_a_round)
    turn -= first * key_blocks
    block = turn // width
    head = first + turn - block * width
    if FROM_LAST:
        block = key_blocks - 1 - block
    return head * key_blocks + block


@gluon.jit
def order_of(
    progress, program, key, last, len_q, len_k, lo, hi, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """A program's word of progress, that of the block above it, and the rows that this one has."""
    start, stop = queries_of(
        key + BLOCK_N, last, len_q, lo, hi, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    # Nobody is above the last keys; a block of a packed sequence that has no keys waits for nobody.
    stop = gl.where((key + BLOCK_N < len_k) & (key > -BLOCK_N), stop, start)
    mine = progress + (1 + program.to(gl.int64))
    above = mine + (-1 if PACKED else 1)
    return mine, above, start, stop


@gluon.jit
def wait_for_turn(order, step, start, stop, seen, BLOCK_M: gl.constexpr):
    """Wait until the block above has added to the query block of a step; returns its progress."""
    _, above, start_above, stop_above = order
    a_head = (stop - start) // BLOCK_M
    head = step // a_head
    row = start + (step - head * a_head) * BLOCK_M
    if (row >= start_above) & (row < stop_above):
        wanted = head * ((stop_above - start_above) // BLOCK_M) + (row - start_above) // BLOCK_M
        while seen <= wanted:
            seen = load_acquire(above)
    return seen


@gluon.jit
def _count(order, step, steps):
    """Say that a step is done; with the last one, that nobody need wait for this block again."""
    FOREVER: gl.constexpr = 1 << 30
    store_release(order[0], gl.where(step + 1 == steps, FOREVER, step + 1))


@gluon.jit
def add_in_turn(
    order, step, steps, start, stop, line, padded_q, seen, dq_desc, dq_smem, dq_full, dq_empty,
    BLOCK_M: gl.constexpr, D: gl.constexpr, before=0,
):  # fmt: skip
    """Add dQ of a step, which the consumers have left in shared memory, when its turn has come.

    `before` counts the steps of other blocks of keys that went through the same shared memory.
    """
    a_head = (stop - start) // BLOCK_M
    head = step // a_head
    line += head * padded_q + (step - head * a_head) * BLOCK_M
    PIECE: gl.constexpr = BLOCK_M * D // 256
    seen = wait_for_turn(order, step, start, stop, seen, BLOCK_M)
    fence_proxy_async("global")
    for w in gl.static_range(2):
        mbarrier.wait(dq_full.index(w), (before + step) & 1)
        tma_reduce_add(dq_desc, [line * (D // 64) // 2 + w * PIECE, 0], dq_smem.index(w))
    tma.store_wait(0)
    mbarrier.arrive(dq_empty, count=1)
    tma_store_wait(0, read=False)
    _count(order, step, steps)
    return seen


@gluon.jit
def give_turn(order, step, steps, start, stop, seen, turn, BLOCK_M: gl.constexpr):
    """Let the consumers add dQ of a step, if there is one, when its turn has come."""
    if step < steps:
        seen = wait_for_turn(order, step, start, stop, seen, BLOCK_M)
        mbarrier.arrive(turn.index(step & 1), count=1)
    return seen


@gluon.jit
def count_in_turn(order, step, steps, start, stop, seen, turn, added, BLOCK_M: gl.constexpr):
    """Count a step whose dQ the consumers have added, and give them the turn of that after next."""
    mbarrier.wait(added.index(step & 1), (step >> 1) & 1)
    _count(order, step, steps)
    return give_turn(order, step + 2, steps, start, stop, seen, turn, BLOCK_M)
