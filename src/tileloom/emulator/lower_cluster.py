"""Lowering of the inline assembly of `tileloom.device.cluster`: numbers that CTAs show each other.

PTX that each CTA of a cluster would run on its own is not played in general; these four texts are
known as a whole, and any other wording of them is refused. What is judged is their order: a cluster
that posts before all CTAs have begun, collects what was not posted, or writes a box that others may
still be reading.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from tileloom.emulator import cluster

if TYPE_CHECKING:
    from tileloom.emulator.ir import Op
    from tileloom.emulator.lower import Run
    from tileloom.emulator.machine import Cta, Frame, Partition


@dataclass
class Boxes:
    """What the CTAs of a cluster have shown each other.

    Attributes:
        has_begun: Whether all CTAs are known to have begun.
        open: The box that was posted and not yet collected, and its numbers; else None.
        last: The box of the last post.
    """

    has_begun: bool = False
    open: tuple[int, list[Any]] | None = None
    last: int = -1


_of_clusters: WeakKeyDictionary[Cta, Boxes] = WeakKeyDictionary()


def _boxes(partition: Partition) -> Boxes:
    return _of_clusters.setdefault(partition.cta, Boxes())


def _fault(partition: Partition, op: Op, message: str, hint: str) -> None:
    partition.report("race", message, op.loc, "an exchange of the cluster", hint=hint)


_ARRIVE = "barrier.cluster.arrive.relaxed.aligned; mov.u32 $0, 0;"
_WAIT = "barrier.cluster.wait.aligned; mov.u32 $0, 0;"
_POST = """{{ // cluster_post {kinds} {ctas}
.reg .pred p; .reg .b32 a, r, t, q; .shared .align 16 .b8 boxes[{both}];
mov.u32 r, boxes; mad.lo.u32 $0, $1, {size}, r;
mov.u32 a, %cluster_ctarank; mad.lo.u32 r, a, {own}, $0;
mov.u32 t, %tid.x; setp.lt.u32 p, t, {ctas}; @p mapa.shared::cluster.u32 q, r, t;
{stores}
barrier.cluster.arrive.aligned; }}"""


def _post_text(kinds: int, ctas: int) -> str:
    stores = (f"@p st.shared::cluster.b32 [q+{4 * k}], ${2 + k};" for k in range(kinds))
    size = 4 * kinds * ctas
    return _POST.format(
        kinds=kinds, ctas=ctas, both=2 * size, size=size, own=4 * kinds, stores="\n".join(stores)
    )


def _collect_text(kinds: int, ctas: int) -> str:
    count, wide = kinds * ctas, min(kinds * ctas, 4)
    lines = [f"// cluster_collect {kinds} {ctas}", "barrier.cluster.wait.aligned;"]
    for at in range(0, count, wide):
        to = ", ".join(f"${n}" for n in range(at, at + wide))
        lines.append(f"ld.shared.v{wide}.b32 {{{to}}}, [${count}+{4 * at}];")
    return "\n".join(lines)


def lower(op: Op, text: str) -> Run | None:
    """Lower one of the texts; None if it is another one."""
    if text == _ARRIVE:
        return lambda f: cluster.arrive_all(f[0], relaxed=True)
    if text == _WAIT:
        return lambda f: _begin(f[0])
    found = re.match(r"(?:{ )?// cluster_(post|collect) (\d+) (\d+)\n", text)
    if found is None:
        return None
    kinds, ctas = int(found[2]), int(found[3])
    if found[1] == "post" and text == _post_text(kinds, ctas):
        return lambda f: _post(f, op)
    if found[1] == "collect" and text == _collect_text(kinds, ctas):
        return lambda f: _collect(f, op, kinds, ctas)
    return None


def _begin(partition: Partition) -> None:
    cluster.wait_all(partition)
    _boxes(partition).has_begun = True


def _post(f: Frame, op: Op) -> None:
    partition: Partition = f[0]
    boxes, (turn, *values) = _boxes(partition), (f[slot] for slot in op.operands)
    box = int(np.asarray(turn).reshape(-1)[0])
    if not boxes.has_begun:
        _fault(partition, op, "a cluster_post writes into a CTA that may not have begun",
               "cluster_wait() before the first cluster_post")  # fmt: skip
    if boxes.open is not None or box == boxes.last:
        _fault(partition, op, f"a cluster_post writes box {box}, which other CTAs may be reading",
               "turn = 1 - turn after each cluster_collect")  # fmt: skip
    boxes.open, boxes.last = (box, [np.array(v) for v in values]), box
    cluster.arrive_all(partition)
    f[op.results[0]] = np.full_like(np.asarray(turn), box)


def _collect(f: Frame, op: Op, kinds: int, ctas: int) -> None:
    partition: Partition = f[0]
    boxes = _boxes(partition)
    cluster.wait_all(partition)
    box = int(np.asarray(f[op.operands[0]]).reshape(-1)[0])
    if boxes.open is None or boxes.open[0] != box:
        _fault(partition, op, f"a cluster_collect reads box {box}, into which nothing was posted",
               "one cluster_collect for each cluster_post")  # fmt: skip
        boxes.open = box, [np.full(ctas, np.nan, np.float32)] * kinds
    shown, boxes.open = boxes.open[1], None
    for n, slot in enumerate(op.results):
        f[slot] = np.full_like(shown[n % kinds], shown[n % kinds].reshape(-1)[n // kinds])
