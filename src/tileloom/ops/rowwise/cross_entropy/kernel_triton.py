"""Cross entropy forward and backward in portable Triton (sm_80 and later).

Mathematics, for a row z of V logits (z = c tanh(logits / c) with a soft cap c), smoothing s:

    m = max z,  l = log sum exp(z - m)                       kept for the gradient: m and l apart,
    loss = l + (1 - s) (m - z_label) + s (m - mean z)        since m + l has lost l where m is large
    dz = (exp((z - m) - l) - (1 - s) [label] - s / V) grad,  dlogits = dz (1 - tanh^2)

A row whose label is ignored gives 0, whatever it holds; one whose label is out of range gives NaN.

Tile picture. Forward: a row is walked by one program in blocks of BLOCK columns, `[LANES, VECTOR]`,
a thread's 16 bytes along the second dimension; maximum and sum are kept lane by lane
(`pieces_softmax`), and lanes meet once a row. Of a row that starts anywhere the first block and the
edges are asked for at once, with the label. Backward: a program takes BLOCK columns of one row, and
may write them over the logits. `cross_entropy_sum_kernel` is one program that adds the losses
of all rows in a fixed order.

Bytes moved: forward the logits once, backward the logits once and their gradient once.

Offsets are 64-bit outside a block: see `pieces_triton`.
"""

import triton
import triton.language as tl

from tileloom.ops.rowwise.pieces_softmax import (
    add_to_sum,
    bounds_of,
    edges_of,
    inside_bounds,
    join_lanes,
    lanes_of,
    load_block,
    store_block,
)
from tileloom.ops.rowwise.pieces_triton import row_offsets

# tanh(u) / u = 1 + t P(t), t = u^2, for |u| < 0.55: fitted at Chebyshev nodes, 1.2 ulp in float32.
_TANH_1 = tl.constexpr(-0.3333333134651184)
_TANH_2 = tl.constexpr(0.13333117961883545)
_TANH_3 = tl.constexpr(-0.053910065442323685)
_TANH_4 = tl.constexpr(0.021312743425369263)
_TANH_5 = tl.constexpr(-0.006615751888602972)

INT_ARGUMENTS_FORWARD = (
    *("count", "width", "size_1", "size_2", "logits_0", "logits_1", "logits_2", "logits_d"),
    *("labels_0", "labels_1", "labels_2", "ignore_index"),
)
INT_ARGUMENTS_BACKWARD = (
    *INT_ARGUMENTS_FORWARD,
    *("out_0", "out_1", "out_2", "out_d", "grad_0", "grad_1", "grad_2", "blocks"),
)
INT_ARGUMENTS_SUM = (
    *("count", "size_1", "size_2", "labels_0", "labels_1", "labels_2", "ignore_index"),
)
FLOAT_ARGUMENTS = ("soft_cap", "inverse_cap", "smoothing")


@triton.jit
def _tanh(u):
    """Give tanh and its slope in float32: a polynomial near 0, exponentials elsewhere.

    There the slope comes from 1 - tanh, not from 1 - tanh^2, which would cancel.
    """
    t = u * u
    p = _TANH_1 + t * (_TANH_2 + t * (_TANH_3 + t * (_TANH_4 + t * _TANH_5)))
    small = u + u * (t * p)
    rest = tl.div_rn(2.0, tl.exp(2.0 * tl.abs(u)) + 1.0)
    large = tl.where(u < 0.0, rest - 1.0, 1.0 - rest)
    is_small = tl.abs(u) < 0.55
    slope = tl.where(is_small, 1.0 - small * small, rest * (2.0 - rest))
    return tl.where(is_small, small, large), slope


@triton.jit
def _capped(loaded, seen, soft_cap, inverse_cap, CAPPED: tl.constexpr):
    """Give z, the capped logits, in float32, -inf where not `seen`, as what was loaded is there."""
    z = loaded.to(tl.float32)
    if CAPPED:
        bent, _ = _tanh(z * inverse_cap)
        z = soft_cap * bent
        if seen is not None:
            z = tl.where(seen, z, float("-inf"))
    return z


@triton.jit
def _capped_block(
    logits, start, inside, seen, logits_d, soft_cap, inverse_cap, VECTOR: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """Load a block of z."""
    loaded = load_block(logits, start, inside, seen, float("-inf"), logits_d, VECTOR)
    return _capped(loaded, seen, soft_cap, inverse_cap, CAPPED)


@triton.jit(do_not_specialize=INT_ARGUMENTS_FORWARD + FLOAT_ARGUMENTS)
def cross_entropy_fwd_kernel(
    logits, labels, losses, state, count, width, size_1, size_2,
    logits_0, logits_1, logits_2, logits_d, labels_0, labels_1, labels_2,
    ignore_index, soft_cap, inverse_cap, smoothing,
    GROUPS: tl.constexpr, VECTOR: tl.constexpr, CAPPED: tl.constexpr, SMOOTHED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    UNIT: tl.constexpr = VECTOR if VECTOR > 0 else 1
    n = width * UNIT
    row = tl.program_id(0).to(tl.int64)
    first = row_offsets(row, size_1, size_2, logits_0, logits_1, logits_2, GROUPS, VECTOR)
    LANE: tl.constexpr = (
        VECTOR if VECTOR != 1 else 128 // logits.dtype.element_ty.primitive_bitwidth
    )
    lead, head, tail, end = bounds_of(first, n, LANE, VECTOR)
    aligned = first
    if VECTOR == 1:
        aligned = tl.multiple_of(first - lead, LANE)
    begin = logits + aligned
    inside = lanes_of(BLOCK, LANE)
    if VECTOR == 1:
        # Asked for together with the label: of a row that is ignored they are read, but not used.
        seen = inside_bounds(0, inside, head, tail, LANE, VECTOR)
        block = load_block(begin, 0, inside, seen, float("-inf"), logits_d, VECTOR)
        columns, is_edge = edges_of(lead, head, tail, end, LANE)
        edges = load_block(begin, 0, columns, is_edge, float("-inf"), logits_d, VECTOR)
    label = tl.load(
        labels + row_offsets(row, size_1, size_2, labels_0, labels_1, labels_2, GROUPS, 1)
    ).to(tl.int64)
    is_ignored = label == ignore_index
    is_class = (label >= 0) & (label < n)
    at = tl.where(is_class, label, 0)
    if VECTOR == 0:
        at *= logits_d
    target = tl.load(logits + first + at, mask=is_class & ~is_ignored, other=float("nan")).to(
        tl.float32
    )
    if CAPPED:
        bent, _ = _tanh(target * inverse_cap)
        target = soft_cap * bent
    # Logits are averaged as distances from the label's, which lose nothing where all are large.
    anchor = tl.where(tl.abs(target) < float("inf"), target, 0.0)

    LANES: tl.constexpr = inside.shape[0]
    peak = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    mean = tl.zeros([LANES], tl.float32)
    share = 1.0 / n
    BEGUN: tl.constexpr = BLOCK if VECTOR == 1 else 0
    if VECTOR == 1:
        z = _capped(block, seen, soft_cap, inverse_cap, CAPPED)
        peak, total = add_to_sum(peak, total, z)
        if SMOOTHED:
            mean += tl.sum(tl.where(seen, (z - anchor) * share, 0.0), 1)
    tail = tl.where(is_ignored, 0, tail)
    full = tail // BLOCK * BLOCK
    for start in range(BEGUN, full, BLOCK):
        z = _capped_block(
            begin, start, inside, None, logits_d, soft_cap, inverse_cap, VECTOR, CAPPED
        )
        peak, total = add_to_sum(peak, total, z)
        if SMOOTHED:
            mean += tl.sum((z - anchor) * share, 1)
    for start in range(tl.maximum(full, BEGUN), tail, BLOCK):  # the rest, if there is one
        seen = inside_bounds(start, inside, head, tail, LANE, VECTOR)
        z = _capped_block(
            begin, start, inside, seen, logits_d, soft_cap, inverse_cap, VECTOR, CAPPED
        )
        peak, total = add_to_sum(peak, total, z)
        if SMOOTHED:
            mean += tl.sum(tl.where(seen, (z - anchor) * share, 0.0), 1)
    top, total_of_row = join_lanes(peak, total)
    mean_of_row = tl.sum(mean, 0)
    if VECTOR == 1:
        z = _capped(edges, is_edge, soft_cap, inverse_cap, CAPPED)
        top, total_of_row = add_to_sum(top, total_of_row, z)
        if SMOOTHED:
            mean_of_row += tl.sum(tl.where(is_edge, (z - anchor) * share, 0.0), 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    log_sum = tl.log(total_of_row)

    loss = log_sum + (1.0 - smoothing) * (top - target)
    if SMOOTHED:
        loss += smoothing * ((top - anchor) - mean_of_row)
    tl.store(losses + row, tl.where(is_ignored, 0.0, loss))
    tl.store(state + row, top)
    tl.store(state + tl.cast(count, tl.int64) + row, log_sum)


@triton.jit(do_not_specialize=INT_ARGUMENTS_SUM)
def cross_entropy_sum_kernel(
    losses, labels, loss, state, count, size_1, size_2, labels_0, labels_1, labels_2, ignore_index,
    GROUPS: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the sum or mean of all losses, and the number of rows that count in `state`."""
    total = tl.zeros([BLOCK], tl.float32)
    counted = tl.zeros([BLOCK], tl.int32)
    for start in range(0, tl.cast(count, tl.int64), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        seen = rows < count
        total += tl.load(losses + rows, mask=seen, other=0.0)
        at = row_offsets(rows, size_1, size_2, labels_0, labels_1, labels_2, GROUPS, 1)
        label = tl.load(labels + at, mask=seen, other=0).to(tl.int64)
        counted += (seen & (label != ignore_index)).to(tl.int32)
    result = tl.sum(total, 0)
    number = tl.sum(counted, 0).to(tl.float32)
    if MEAN:
        result = tl.div_rn(result, number)
    tl.store(loss, result)
    tl.store(state + 2 * tl.cast(count, tl.int64), number)


@triton.jit
def _store_gradient(
    logits, out, start, inside, seen, lead, n, label, is_ignored, top, log_sum, scale,
    logits_d, out_d, soft_cap, inverse_cap, smoothing,
    VECTOR: tl.constexpr, CAPPED: tl.constexpr, SMOOTHED: tl.constexpr,
):  # fmt: skip
    """Store the gradient of a block of a row whose first column is `lead`; seen None: all."""
    if seen is None:
        x = load_block(logits, start, inside, None, 0.0, logits_d, VECTOR)
    else:
        x = load_block(logits, start, inside, seen & (is_ignored == 0), 0.0, logits_d, VECTOR)
    z = x.to(tl.float32)
    if CAPPED:
        z, slope = _tanh(z * inverse_cap)
        z *= soft_cap
    p = tl.exp((z - top) - log_sum)
    share = tl.where(start + inside - lead == label, 1.0 - smoothing, 0.0)
    if SMOOTHED:
        share += smoothing / n
    d = (p - share) * scale
    if CAPPED:
        d *= slope
    d = tl.where(is_ignored, 0.0, d)
    store_block(out, start, inside, seen, d, out_d, VECTOR)


@triton.jit(do_not_specialize=INT_ARGUMENTS_BACKWARD + FLOAT_ARGUMENTS)
def cross_entropy_bwd_kernel(
    grad, logits, labels, state, out, count, width, size_1, size_2,
    logits_0, logits_1, logits_2, logits_d, out_0, out_1, out_2, out_d,
    labels_0, labels_1, labels_2, grad_0, grad_1, grad_2,
    blocks, ignore_index, soft_cap, inverse_cap, smoothing,
    GROUPS: tl.constexpr, VECTOR: tl.constexpr, CAPPED: tl.constexpr, SMOOTHED: tl.constexpr,
    MEAN: tl.constexpr, ALIKE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Take one block of a row; ALIKE: logits and out have the same strides.

    `out` may be `logits`: each element is read and written by one thread.
    """
    UNIT: tl.constexpr = VECTOR if VECTOR > 0 else 1
    n = width * UNIT
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    start = (program % blocks) * BLOCK
    label = tl.load(
        labels + row_offsets(row, size_1, size_2, labels_0, labels_1, labels_2, GROUPS, 1)
    ).to(tl.int64)
    scale = tl.load(grad + row_offsets(row, size_1, size_2, grad_0, grad_1, grad_2, GROUPS, 1))
    top = tl.load(state + row)
    log_sum = tl.load(state + tl.cast(count, tl.int64) + row)
    if MEAN:
        scale /= tl.load(state + 2 * tl.cast(count, tl.int64))
    is_ignored = label == ignore_index
    scale = tl.where((label >= 0) & (label < n), scale, float("nan"))
    LANE: tl.constexpr = (
        VECTOR if VECTOR != 1 else 128 // logits.dtype.element_ty.primitive_bitwidth
    )
    first = row_offsets(row, size_1, size_2, logits_0, logits_1, logits_2, GROUPS, VECTOR)
    lead, head, tail, end = bounds_of(first, n, LANE, VECTOR)
    to = row_offsets(row, size_1, size_2, out_0, out_1, out_2, GROUPS, VECTOR)
    if VECTOR == 1:
        first = tl.multiple_of(first - lead, LANE)
        to = tl.multiple_of(to - lead, LANE) if ALIKE else to - lead
        inside = lanes_of(BLOCK, LANE)
        seen = inside_bounds(start, inside, head, tail, LANE, VECTOR)
    else:
        inside = tl.arange(0, BLOCK)
        seen = start + inside < n
    logits += first
    out += to
    # Most blocks are whole, and their rows not ignored: loads without a mask are faster.
    if (start >= head) & (start + BLOCK <= tail) & (is_ignored == 0):
        _store_gradient(
            logits, out, start, inside, None, lead, n, label, is_ignored, top, log_sum, scale,
            logits_d, out_d, soft_cap, inverse_cap, smoothing, VECTOR, CAPPED, SMOOTHED,
        )  # fmt: skip
    else:
        _store_gradient(
            logits, out, start, inside, seen, lead, n, label, is_ignored, top, log_sum, scale,
            logits_d, out_d, soft_cap, inverse_cap, smoothing, VECTOR, CAPPED, SMOOTHED,
        )  # fmt: skip
    if VECTOR == 1:
        if start == 0:
            columns, is_edge = edges_of(lead, head, tail, end, LANE)
            _store_gradient(
                logits, out, 0, columns, is_edge, lead, n, label, is_ignored, top, log_sum, scale,
                logits_d, out_d, soft_cap, inverse_cap, smoothing, VECTOR, CAPPED, SMOOTHED,
            )  # fmt: skip
