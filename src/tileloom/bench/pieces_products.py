"""Chains of instructions whose cost `scripts/time_philox.py` takes the time of."""

import triton
import triton.language as tl


@triton.jit
def chains(out, a, n, KIND: tl.constexpr):
    """Take 64 steps n times: by KIND multiply-adds, wide products, xors, low or upper halves."""
    i = tl.program_id(0) * tl.num_programs(0) + tl.arange(0, 256)
    x0 = (i + a).to(tl.uint32)
    x1, x2, x3 = x0 + 1, x0 + 2, x0 + 3
    f0 = x0.to(tl.float32)
    f1, f2, f3 = f0 + 1, f0 + 2, f0 + 3
    for _ in range(n):
        for _ in tl.static_range(16):
            if KIND == 0:
                f0, f1 = f0 * 1.0001 + 0.5, f1 * 1.0001 + 0.5
                f2, f3 = f2 * 1.0001 + 0.5, f3 * 1.0001 + 0.5
            if KIND == 1:
                p, q = x0.to(tl.uint64) * 0xD2511F53, x1.to(tl.uint64) * 0xCD9E8D57
                r, s = x2.to(tl.uint64) * 0xD2511F53, x3.to(tl.uint64) * 0xCD9E8D57
                x0 = (q >> 32).to(tl.uint32) ^ x1 ^ a
                x2 = (r >> 32).to(tl.uint32) ^ x3 ^ a
                x1 = q.to(tl.uint32)
                x3 = s.to(tl.uint32) ^ (p >> 32).to(tl.uint32) ^ p.to(tl.uint32)
                x3 = x3 ^ r.to(tl.uint32) ^ (s >> 32).to(tl.uint32)
            if KIND == 2:
                x0, x1, x2, x3 = x0 ^ x1 ^ a, (x1 & x2) ^ a, (x2 | x3) ^ a, (x3 ^ x0) & a
            if KIND == 3:
                x0, x1 = x0 * 0xD2511F53 + a, x1 * 0xCD9E8D57 + a
                x2, x3 = x2 * 0xD2511F53 + a, x3 * 0xCD9E8D57 + a
            if KIND == 4:
                x0, x1 = tl.umulhi(x0, 0xD2511F53), tl.umulhi(x1, 0xCD9E8D57)
                x2, x3 = tl.umulhi(x2, 0xD2511F53), tl.umulhi(x3, 0xCD9E8D57)
    total = x0 ^ x1 ^ x2 ^ x3 ^ (f0 + f1 + f2 + f3).to(tl.uint32)
    tl.store(out + tl.program_id(0) * 256 + tl.arange(0, 256), total)
