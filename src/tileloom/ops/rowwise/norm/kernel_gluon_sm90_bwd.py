"""Gradients of RMS and layer norm on Hopper: one program walks over rows that come through a ring.

Mathematics as in `kernel_triton_bwd.py`. Tile picture: program p of P takes the rows p, p + P,
p + 2P, ... A row lies in shared memory as CHUNKS pieces of BLOCK columns, and so do the STAGES - 1
rows after it, which `cp.async` is still bringing:

    ring    | row r | row r + P | row r + 2P |        turn r: first pass over the pieces: the sums
            | 0 1 2 3           |            |                second: dh, from what lies there still

Between the passes nothing of a row is held in registers, where the shares of dweight and dbias lie,
two numbers a column: that is what makes rows of 16384 fit one program, which shares them with none.

Who waits for whom: each thread for its own copies of row r (`wait_group`), then all threads for
each other (`thread_barrier`): row r is there for all, and nobody reads any more from the place into
which row r + (STAGES - 1) P is copied next. The sums meet by `gl.reduce`.

Bytes moved: g, e and h once, dh once; the workspace of the shares is written and read once.

Offsets are 64-bit outside a row: columns are below CHUNKS * BLOCK.
"""

# ruff: noqa: RUF005  (Triton knows no *tuple inside a tuple)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from tileloom.device.compat import thread_barrier
from tileloom.device.cp_async import cp_async
from tileloom.device.grids import gdc_launch_dependents

INTEGERS = ("count", "width_8", "g_8", "e_8", "h_8", "o_8")


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@gluon.jit
def _again(slot):
    """The same slot, by a number that the compiler does not know to be the same.

    Else it would keep what the first pass has loaded in registers, which are not there.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [slot], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _ring(kind: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr, BLOCK: gl.constexpr):
    """Allocate the places of a tensor's rows: for each piece `[STAGES, BLOCK]`."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring = ()
    for _ in gl.static_range(CHUNKS):
        ring = ring + (gl.allocate_shared_memory(kind, [STAGES, BLOCK], plain),)
    return ring


@gluon.jit
def _ask(ring, slot, tensor, row, count, stride_8, columns, width, BLOCK: gl.constexpr):
    """Copy a row into its place; zeros behind its end, and behind the last row."""
    begin = tensor + row.to(gl.int64) * (stride_8.to(gl.int64) * 8)
    for k in gl.static_range(len(ring)):
        at = columns + k * BLOCK
        cp_async(ring[k].index(slot), begin + at, mask=(at < width) & (row < count))


@gluon.jit
def _piece(ring, slot, k: gl.constexpr, layout: gl.constexpr):
    return ring[k].index(slot).load(layout).to(gl.float32)


@gluon.jit(do_not_specialize=INTEGERS)
def norm_bwd_ring_kernel(
    g, e, h, weight, mean, rstd, dh, partial, count, width_8, g_8, e_8, h_8, o_8,
    BLOCK: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    EVEN: gl.constexpr, DWEIGHT: gl.constexpr, DBIAS: gl.constexpr, OVERLAPS: gl.constexpr,
):  # fmt: skip
    """Absent tensors are None; strides come in units of 8 elements, and so does the width.

    DWEIGHT and DBIAS say which shares are wanted; `partial` is `[programs, DWEIGHT + DBIAS, n]`.
    EVEN says that the pieces are whole. OVERLAPS as in `norm_bwd_kernel`.
    """
    CENTRED: gl.constexpr = mean is not None
    layout: gl.constexpr = gl.BlockedLayout([BLOCK // (32 * WARPS)], [32], [WARPS], [0])
    width = width_8 * 8
    columns = gl.arange(0, BLOCK, layout=layout)
    h_ring = _ring(h.dtype.element_ty, CHUNKS, STAGES, BLOCK)
    g_ring = _ring(g.dtype.element_ty, CHUNKS, STAGES, BLOCK)
    if e is not None:
        e_ring = _ring(e.dtype.element_ty, CHUNKS, STAGES, BLOCK)
    first = gl.program_id(0)
    step = gl.num_programs(0)
    if weight is not None:  # with the first row's group
        w_ring = _ring(weight.dtype.element_ty, CHUNKS, 1, BLOCK)
        _ask(w_ring, 0, weight, 0 * first, 1, width_8, columns, width, BLOCK)
    for s in gl.static_range(STAGES - 1):
        row = first + s * step
        _ask(h_ring, s, h, row, count, h_8, columns, width, BLOCK)
        _ask(g_ring, s, g, row, count, g_8, columns, width, BLOCK)
        if e is not None:
            _ask(e_ring, s, e, row, count, e_8, columns, width, BLOCK)
        async_copy.commit_group()
    zero = gl.zeros([BLOCK], gl.float32, layout=layout)
    dweight = ()
    dbias = ()
    for _ in gl.static_range(CHUNKS):
        dweight = dweight + (zero,)
        dbias = dbias + (zero,)
    slot = 0
    next_scale = gl.load(rstd + first)
    next_centre = 0.0
    if CENTRED:
        next_centre = gl.load(mean + first)
    for row in range(first, count, step):
        async_copy.wait_group(STAGES - 2)
        thread_barrier()
        free = gl.where(slot == 0, STAGES - 1, slot - 1)
        ahead = row + (STAGES - 1) * step
        _ask(h_ring, free, h, ahead, count, h_8, columns, width, BLOCK)
        _ask(g_ring, free, g, ahead, count, g_8, columns, width, BLOCK)
        if e is not None:
            _ask(e_ring, free, e, ahead, count, e_8, columns, width, BLOCK)
        async_copy.commit_group()
        scale = next_scale
        centre = next_centre
        following = gl.minimum(row + step, count - 1)
        next_scale = gl.load(rstd + following)
        if CENTRED:
            next_centre = gl.load(mean + following)
        c_1 = zero
        c_2 = zero
        dweight_then = ()
        dbias_then = ()
        for k in gl.static_range(CHUNKS):  # behind the row's end g is 0, and so are all products
            away = _piece(h_ring, slot, k, layout)
            a = _piece(g_ring, slot, k, layout)
            if CENTRED:
                away -= centre
            both = a * away
            if DWEIGHT:
                dweight_then = dweight_then + (dweight[k] + both * scale,)
            if DBIAS:
                dbias_then = dbias_then + (dbias[k] + a,)
            if weight is not None:
                of_w = _piece(w_ring, 0, k, layout)
                both = both * of_w
                a = a * of_w
            c_1 += both
            if CENTRED:
                c_2 += a
        if DWEIGHT:
            dweight = dweight_then
        if DBIAS:
            dbias = dbias_then
        if CENTRED:
            sum_1, sum_2 = gl.reduce((c_1, c_2), 0, _add_both)
            flat = sum_2 / width * scale
        else:
            sum_1 = gl.reduce(c_1, 0, _add)
            flat = 0.0
        slope = sum_1 / width * scale * scale * scale
        there = _again(slot)
        out = dh + row.to(gl.int64) * (o_8.to(gl.int64) * 8)
        for k in gl.static_range(CHUNKS):
            away = _piece(h_ring, there, k, layout)
            y = _piece(g_ring, there, k, layout)
            if CENTRED:
                away -= centre
            if weight is not None:
                y = y * _piece(w_ring, _again(0 * slot), k, layout)
            y = y * scale - (away * slope + flat)
            if e is not None:
                y += _piece(e_ring, there, k, layout)
            at = columns + k * BLOCK
            mask = None if EVEN else at < width
            gl.store(out + at, y.to(dh.dtype.element_ty), mask=mask)
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    async_copy.wait_group(0)
    if DWEIGHT or DBIAS:
        if OVERLAPS:
            gdc_launch_dependents()
        share = partial + first.to(gl.int64) * ((DWEIGHT + DBIAS) * width)
        for k in gl.static_range(CHUNKS):
            at = columns + k * BLOCK
            if DWEIGHT:
                gl.store(share + at, dweight[k], mask=at < width)
            if DBIAS:
                gl.store(share + DWEIGHT * width + at, dbias[k], mask=at < width)
