"""Numbers that the CTAs of a cluster show each other, through distributed shared memory.

Gluon writes a cluster as one program, whose layouts spread a tensor over its CTAs (Triton's option
`num_ctas`). A tensor `[CTAS]` has an element in each CTA; a kernel makes one float32 number of its
part of a row, say, and shows it to all:

    cluster_arrive()                                  at the kernel's begin
    ...                                               the loads
    cluster_wait()                                    all CTAs have begun
    box = cluster_post((a, b), turn, CTAS)            a, b `[CTAS]`; turn is 0, 1, 0, 1, ...
    ...
    found = cluster_collect(box, 2, CTAS)             found[2 * j]: CTA j's a, the next its b

Each CTA has two boxes of CTAS x kinds words: a post writes the own numbers into one box of every
CTA. Nobody reads a box before all have written, which the cluster's barrier says, once a turn;
nobody writes it again before all have read, since the box is another one in the next turn, and all
have read this one when they arrive there. Triton 3.6 and 3.7 compile no reduction over CTAs.
Source: PTX ISA 8.x, `mapa`, `st.shared::cluster`, `barrier.cluster` (release and acquire unless
said); Hopper and later.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ARRIVE = gl.constexpr("barrier.cluster.arrive.relaxed.aligned; mov.u32 $0, 0;")
WAIT = gl.constexpr("barrier.cluster.wait.aligned; mov.u32 $0, 0;")


@gluon.constexpr_function
def post_text(kinds, ctas):
    """Return the PTX of `cluster_post`: $0 is the box's address, $1 the turn, then the numbers."""
    size = 4 * kinds * ctas
    stores = (f"@p st.shared::cluster.b32 [q+{4 * k}], ${2 + k};" for k in range(kinds))
    return "\n".join((
        f"{{ // cluster_post {kinds} {ctas}",
        f".reg .pred p; .reg .b32 a, r, t, q; .shared .align 16 .b8 boxes[{2 * size}];",
        f"mov.u32 r, boxes; mad.lo.u32 $0, $1, {size}, r;",
        f"mov.u32 a, %cluster_ctarank; mad.lo.u32 r, a, {4 * kinds}, $0;",
        f"mov.u32 t, %tid.x; setp.lt.u32 p, t, {ctas}; @p mapa.shared::cluster.u32 q, r, t;",
        *stores,
        "barrier.cluster.arrive.aligned; }",
    ))  # fmt: skip


@gluon.constexpr_function
def collect_text(kinds, ctas):
    """Return the PTX of `cluster_collect`: outputs for each CTA its numbers, then the address."""
    count = kinds * ctas
    lines = [f"// cluster_collect {kinds} {ctas}", "barrier.cluster.wait.aligned;"]
    wide = min(count, 4)
    for first in range(0, count, wide):
        to = ", ".join(f"${first + n}" for n in range(wide))
        lines.append(f"ld.shared.v{wide}.b32 {{{to}}}, [${count}+{4 * first}];")
    return "\n".join(lines)


@gluon.constexpr_function
def _post_constraints(kinds):
    return ",".join(["=&r", "r", *["f"] * kinds])


@gluon.constexpr_function
def _collect_constraints(kinds, ctas):
    return ",".join([*["=&f"] * (kinds * ctas), "r"])


@gluon.constexpr_function
def _float32s(count):
    return (gl.float32,) * count


@gluon.constexpr_function
def cta_bases(ctas, rank):
    """CGA bases of a layout whose first dimension counts the CTAs."""
    return [[1 << bit, *[0] * (rank - 1)] for bit in range(ctas.bit_length() - 1)]


@gluon.jit
def cluster_arrive():
    """Say that this CTA has begun; orders no memory. Once, before `cluster_wait`."""
    gl.inline_asm_elementwise(ARRIVE, "=r", [], gl.int32, False, 1)


@gluon.jit
def cluster_wait():
    """Wait until all CTAs of the cluster have begun, before the first `cluster_post`."""
    gl.inline_asm_elementwise(WAIT, "=r", [], gl.int32, False, 1)


@gluon.jit
def cluster_post(values, turn, CTAS: gl.constexpr):
    """Show each CTA's numbers to all, and arrive at the cluster's barrier.

    Args:
        values: Tuple of float32 `[CTAS]`, in a layout with one element a thread.
        turn: 0 and 1 in turns, int32 `[CTAS]` in the same layout.
        CTAS: CTAs of the cluster.

    Returns:
        The box, for `cluster_collect`, which must follow before anything else meets the cluster.
    """
    KINDS: gl.constexpr = len(values)
    return gl.inline_asm_elementwise(
        post_text(KINDS, CTAS), _post_constraints(KINDS), (turn,) + values, dtype=gl.int32,  # noqa: RUF005
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def cluster_collect(box, KINDS: gl.constexpr, CTAS: gl.constexpr):
    """Wait until all CTAs have posted, and read all numbers.

    Returns:
        Tuple of float32 `[CTAS]`: at `j * KINDS + k` what CTA j posted k-th, in each element.
    """
    return gl.inline_asm_elementwise(
        collect_text(KINDS, CTAS), _collect_constraints(KINDS, CTAS), (box,),
        dtype=_float32s(KINDS * CTAS), is_pure=False, pack=1,
    )  # fmt: skip
