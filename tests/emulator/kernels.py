"""Portable kernels that the emulator's tests compare with torch."""

import triton
import triton.language as tl


@triton.jit
def binary(x_ptr, y_ptr, out_ptr, n, OP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    x = tl.load(x_ptr + at, mask=mask, other=1)
    y = tl.load(y_ptr + at, mask=mask, other=1)
    if OP == "add":
        z = x + y
    elif OP == "sub":
        z = x - y
    elif OP == "mul":
        z = x * y
    elif OP == "div":
        z = x / y
    elif OP == "floordiv":
        z = x // y
    elif OP == "mod":
        z = x % y
    elif OP == "max":
        z = tl.maximum(x, y)
    elif OP == "min":
        z = tl.minimum(x, y)
    elif OP == "and":
        z = x & y
    elif OP == "xor":
        z = x ^ y
    elif OP == "shl":
        z = x << (y & 7)
    elif OP == "shr":
        z = x >> (y & 7)
    elif OP == "lt":
        z = x < y
    elif OP == "ne":
        z = x != y
    tl.store(out_ptr + at, z, mask=mask)


@triton.jit
def unary(x_ptr, out_ptr, n, OP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=1)
    if OP == "exp":
        z = tl.exp(x)
    elif OP == "exp2":
        z = tl.exp2(x)
    elif OP == "log":
        z = tl.log(x)
    elif OP == "log2":
        z = tl.log2(x)
    elif OP == "sqrt":
        z = tl.sqrt(x)
    elif OP == "rsqrt":
        z = tl.rsqrt(x)
    elif OP == "sin":
        z = tl.sin(x)
    elif OP == "cos":
        z = tl.cos(x)
    elif OP == "abs":
        z = tl.abs(x)
    elif OP == "neg":
        z = -x
    elif OP == "floor":
        z = tl.floor(x)
    elif OP == "ceil":
        z = tl.ceil(x)
    elif OP == "erf":
        z = tl.erf(x)
    elif OP == "sigmoid":
        z = tl.sigmoid(x)
    elif OP == "copy":
        z = x
    tl.store(out_ptr + at, z, mask=at < n)


@triton.jit
def cast(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def _pick_larger(a, i, b, j):
    better = (a > b) | ((a == b) & (i < j))
    return tl.where(better, a, b), tl.where(better, i, j)


@triton.jit
def reductions(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    rows = tl.arange(0, M)
    x = tl.load(x_ptr + rows[:, None] * N + tl.arange(0, N)[None, :])
    index = tl.broadcast_to(tl.arange(0, N)[None, :], M, N)
    _, where = tl.reduce((x, index), 1, _pick_larger)
    tl.store(out_ptr + rows, tl.sum(x, 1))
    tl.store(out_ptr + M + rows, tl.max(x, 1))
    tl.store(out_ptr + 2 * M + rows, tl.min(x, 1))
    tl.store(out_ptr + 3 * M + rows, where.to(tl.float32))
    tl.store(out_ptr + 4 * M + rows, tl.argmax(x, 1).to(tl.float32))
    tl.store(out_ptr + 5 * M + rows, tl.argmin(x, 1).to(tl.float32))


@triton.jit
def _affine(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


@triton.jit
def scans(x_ptr, y_ptr, sum_ptr, rev_ptr, prod_ptr, aff_ptr, M: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + at)
    y = tl.load(y_ptr + at)
    tl.store(sum_ptr + at, tl.cumsum(x, 1))
    tl.store(rev_ptr + at, tl.cumsum(x, 1, reverse=True))
    tl.store(prod_ptr + at, tl.cumprod(y, 0))
    _, b = tl.associative_scan((y, x), 1, _affine)
    tl.store(aff_ptr + at, b)


@triton.jit
def shapes(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    pairs = tl.reshape(x, (N // 2, 2))
    even, odd = tl.split(pairs)
    back = tl.interleave(odd, even)
    turned = tl.trans(tl.reshape(back, (N // 4, 4)))
    flat = tl.reshape(turned, (N,))
    tl.store(out_ptr + at, tl.flip(flat, 0))


@triton.jit
def gather_and_count(x_ptr, i_ptr, out_ptr, hist_ptr, N: tl.constexpr, BINS: tl.constexpr):
    at = tl.arange(0, N)
    index = tl.load(i_ptr + at)
    tl.store(out_ptr + at, tl.gather(tl.load(x_ptr + at), index, 0))
    tl.store(hist_ptr + tl.arange(0, BINS), tl.histogram(index, BINS))


@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, M, N, K, PRECISION: tl.constexpr,
           BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        rk = k + tl.arange(0, BK)
        a_in = (rm[:, None] < M) & (rk[None, :] < K)
        b_in = (rk[:, None] < K) & (rn[None, :] < N)
        a = tl.load(a_ptr + rm[:, None] * K + rk[None, :], mask=a_in, other=0.0)
        b = tl.load(b_ptr + rk[:, None] * N + rn[None, :], mask=b_in, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    inside = (rm[:, None] < M) & (rn[None, :] < N)
    out = c_ptr + rm[:, None] * N + rn[None, :]
    tl.store(out, acc.to(c_ptr.dtype.element_ty), mask=inside)


@triton.jit
def matmul_by_descriptors(
    a_desc, b_desc, c_desc, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    row = tl.program_id(0) * BM
    col = tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(a_desc.load([row, k]), b_desc.load([k, col]), acc)
    c_desc.store([row, col], acc.to(tl.bfloat16))


@triton.jit
def attention(
    q_ptr, k_ptr, v_ptr, o_ptr, L, scale, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr
):
    head = tl.program_id(1)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    base = head * L * D
    q = tl.load(q_ptr + base + rows[:, None] * D + d[None, :], mask=rows[:, None] < L, other=0.0)
    m = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for start in range(0, L, BN):
        cols = start + tl.arange(0, BN)
        k = tl.load(
            k_ptr + base + cols[:, None] * D + d[None, :], mask=cols[:, None] < L, other=0.0
        )
        v = tl.load(
            v_ptr + base + cols[:, None] * D + d[None, :], mask=cols[:, None] < L, other=0.0
        )
        s = tl.dot(q, tl.trans(k)) * scale
        s = tl.where(cols[None, :] < L, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v)
        m = m_new
    out = o_ptr + base + rows[:, None] * D + d[None, :]
    tl.store(out, (acc / total[:, None]).to(o_ptr.dtype.element_ty), mask=rows[:, None] < L)


@triton.jit
def atomics(x_ptr, sum_ptr, max_ptr, bits_ptr, old_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0)
    tl.atomic_add(sum_ptr + at % 8, x, mask=at < n)
    tl.atomic_max(max_ptr, tl.max(x, 0))
    tl.atomic_or(bits_ptr, 1 << tl.program_id(0))
    old = tl.atomic_xchg(old_ptr, tl.program_id(0) + 1)
    tl.device_assert(old >= 0, "the slot is never negative")


@triton.jit
def locked_add(lock_ptr, value_ptr, BLOCK: tl.constexpr):
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    at = tl.arange(0, BLOCK)
    tl.store(value_ptr + at, tl.load(value_ptr + at) + 1)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0)


@triton.jit
def random_numbers(out_ptr, seed, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.rand(seed, at))


@triton.jit
def _halve(x, flag):
    if flag:
        return x // 2
    return x * 3 + 1


@triton.jit
def collatz(x_ptr, out_ptr):
    pid = tl.program_id(0)
    x = tl.load(x_ptr + pid)
    steps = 0
    while x != 1:
        x = _halve(x, x % 2 == 0)
        steps += 1
    tl.store(out_ptr + pid, steps)


@triton.jit(noinline=True)
def _square_plus(x, y):
    return x * x + y


@triton.jit
def calls(x_ptr, out_ptr):
    pid = tl.program_id(0)
    x = tl.load(x_ptr + pid)
    tl.store(out_ptr + pid, _square_plus(x, 2.0) + _square_plus(x, x))
