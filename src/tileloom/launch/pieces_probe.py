"""The small kernel of the launcher's self-test: it writes down every kind of argument."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["small", "large"])
def probe(out, source, small, large, number, truth, skipped: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    block = tl.program_id(0) * 100 + tl.program_id(1) * 10 + tl.program_id(2)
    row = out + (tl.program_id(0) * 2 + tl.program_id(1)) * BLOCK
    values = tl.load(source + lanes) * 3
    values += tl.where(lanes == 0, small.to(tl.int64), 0)
    values += tl.where(lanes == 1, large.to(tl.int64), 0)
    values += tl.where(lanes == 2, (number * 1024).to(tl.int64), 0)
    values += tl.where(lanes == 3, truth.to(tl.int64), 0)
    values += tl.where(lanes == 4, block.to(tl.int64), 0)
    tl.store(row + lanes, values)
