"""The Hopper GEMM's consumer that begins a tile before the one ahead of it is stored.

    tensor cores: ... last steps of tile t |        | first step of tile t + 1 | next steps ...
    threads:                               | rounds | stores tile t            | issue steps

Sums in float32 are rounded to the output's 16 bits in registers, half as many; then the registers
of the sums are free for the next tile, whose first step is issued before anything is stored.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from tileloom.device.grids import gdc_wait
from tileloom.device.mail import receive, send
from tileloom.ops.gemm.pieces_gluon_sm90 import store_tile
from tileloom.ops.gemm.pieces_multiply_sm90 import begin, hand_back, multiply, zeros


@gluon.jit
def send_signalled(scheduler, signals, seen, late, count):
    """Draw the next tile and mail it with whether its rows are there, or nobody waits any more."""
    linear = scheduler.draw()
    work = scheduler.order.get_current_work_for_linear_idx(linear)
    is_there = late >= 0
    if work.is_valid_tile & (late < 0):
        is_there = signals.is_signalled(work, seen)
    letter = linear * 2 + is_there.to(gl.int32)
    send(scheduler.mail, scheduler.mail_full, scheduler.mail_empty, count, letter)
    return work, gl.where(is_there & (late < 0), work.chunk, seen), is_there


@gluon.jit
def receive_signalled(scheduler, count):
    """What `send_signalled` has mailed: the tile, and whether its rows are there."""
    letter = receive(scheduler.mail, scheduler.mail_full, scheduler.mail_empty, count)
    work = scheduler.order.get_current_work_for_linear_idx(letter >> 1)
    return work, (letter & 1) != 0


@gluon.jit
def consumer_early(
    WG: gl.constexpr, scheduler, out_desc, a_smem, b_smem, c_smem, full, empty, k_steps,
    WM: gl.constexpr, WN: gl.constexpr, A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr,
    SPLIT_N: gl.constexpr, CONSUMERS: gl.constexpr, BUFFERS: gl.constexpr, SWAP_AB: gl.constexpr,
    CHUNKED: gl.constexpr,
):  # fmt: skip
    """The consumer of a plain product whose tiles a counter deals.

    Rows that are not there yet may not keep a finished tile from being stored: with CHUNKED a
    letter also says whether they were when the producer came to them. If not, what is issued into
    the sums is the last slot again, for nothing, and the tile begins at its first step.
    """
    BLOCK_N: gl.constexpr = CONSUMERS * WN if SPLIT_N else WN
    acc = zeros(WM, WN)
    stage = 0
    phase = 0
    count = 0  # tiles done
    work = scheduler.initial_work_tile_info()
    gdc_wait()
    begun = 1
    if work.is_valid_tile:
        mbarrier.wait(full.index(stage), phase)
        acc = begin(acc, a_smem, b_smem, stage, WG, A_TRANSPOSED, B_TRANSPOSED, SPLIT_N,
                    CONSUMERS)  # fmt: skip
        there = work.is_valid_tile
        while there:
            row = work.row + (0 if SPLIT_N else WG * WM)
            col = work.n_idx * BLOCK_N + (WG * WN if SPLIT_N else 0)
            batch = work.l_idx
            acc, _tail, before, stage, phase = multiply(
                acc, acc, a_smem, b_smem, b_smem, full, empty, k_steps, stage, phase, WG,
                A_TRANSPOSED, B_TRANSPOSED, SPLIT_N, CONSUMERS, 0, begun, CHUNKED,
            )  # fmt: skip
            rounded = acc.to(c_smem.dtype)
            if CHUNKED:
                work, is_there = receive_signalled(scheduler, count)
                begins = work.is_valid_tile & is_there
                begun = begins.to(gl.int32)
                if begins:
                    hand_back(empty.index(before), 0)
            else:
                work = scheduler.receive_next_work(count)
                begins = work.is_valid_tile
            there = work.is_valid_tile
            count += 1
            if begins:
                mbarrier.wait(full.index(stage), phase)
            # Behind the last tile of all, too: its own last slot again, for nothing.
            slot = gl.where(begins, stage, before)
            acc = begin(acc, a_smem, b_smem, slot, WG, A_TRANSPOSED, B_TRANSPOSED, SPLIT_N,
                        CONSUMERS)  # fmt: skip
            store_tile(rounded, 0, out_desc, full, c_smem, full, 0, batch, row, col, WG, BUFFERS,
                       "", False, False, SWAP_AB)  # fmt: skip
            if CHUNKED:
                acc = warpgroup_mma_wait(0, deps=(acc,))  # a store takes longer than a step
                if not begins:
                    hand_back(empty.index(before), 0)
        acc = warpgroup_mma_wait(0, deps=(acc,))
    tma.store_wait(0)
