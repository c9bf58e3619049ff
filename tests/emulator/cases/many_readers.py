"""Programs read a table and count themselves; another one waits for all, then overwrites both."""

import torch
import triton
import triton.language as tl


@triton.jit
def many_readers(table_ptr, out_ptr, count_ptr, done_ptr, READERS: tl.constexpr, N: tl.constexpr):
    pid = tl.program_id(0)
    at = tl.arange(0, N)
    if pid < READERS:
        tl.store(out_ptr + pid * N + at, tl.load(table_ptr + at))
        tl.atomic_add(count_ptr, pid, sem="relaxed")
        tl.atomic_add(done_ptr + pid, 1, sem="release")
    else:
        for reader in range(READERS):
            while tl.atomic_add(done_ptr + reader, 0, sem="acquire") == 0:
                pass
        tl.store(table_ptr + at, at.to(tl.float32))
        tl.store(out_ptr + pid * N, tl.load(count_ptr))


def main(readers=4, n=64):
    table, count = torch.ones(n), torch.zeros(1, dtype=torch.int32)
    out, done = torch.zeros(readers * n + 1), torch.zeros(readers, dtype=torch.int32)
    many_readers[(readers + 1,)](table, out, count, done, readers, n)
    expected = torch.cat([torch.ones(readers * n), torch.tensor([readers * (readers - 1) / 2.0])])
    return torch.cat([table, out]), torch.cat([torch.arange(float(n)), expected])
