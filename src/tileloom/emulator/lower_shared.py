"""Lowerings of shared memory: allocations, views of them, loads and stores through registers."""

from __future__ import annotations

from typing import Any

import numpy as np

from tileloom.emulator import dtypes
from tileloom.emulator.cluster import owners, spread_of
from tileloom.emulator.global_access import apply_lanes
from tileloom.emulator.ir import Loc, Op
from tileloom.emulator.layouts import physical_offsets
from tileloom.emulator.lower import STEP, OutOfViewError, Program, Run, lowers
from tileloom.emulator.machine import Frame, Partition
from tileloom.emulator.memory import Family, Geometry, SharedBuffer, View
from tileloom.emulator.report import Access, UnsupportedKernelError
from tileloom.emulator.vocabulary import variable_of


class BadView:
    """A view outside of its buffer; only its use is an error, as it may be speculative."""

    def __init__(self, partition: Partition, message: str, loc: Loc) -> None:
        self.partition = partition
        self.message = message
        self.loc = loc


def view_of(f: Frame, slot: int) -> View:
    """Return a shared view operand, reporting one that lies outside of its buffer."""
    view = f[slot]
    if view.__class__ is BadView:
        view.partition.report("out-of-bounds", view.message, view.loc, "index")
        raise OutOfViewError(view.message)
    return view


def check_written(partition: Partition, view: View, what: str, loc: Loc) -> None:
    """Report a read of elements that nobody wrote."""
    if view.init.all():
        return
    missing = int(view.init.size - np.count_nonzero(view.init))
    partition.report(
        "uninitialized",
        f"{what} reads shared buffer {view.name}, of which {missing} of {view.init.size} elements "
        "were never written",
        loc, what,
        other=Access(view.buffer.loc, "allocation", partition.title, partition.cta.program),
        hint="store or copy into it first, and wait for whoever does; or read a smaller slice",
    )  # fmt: skip


@lowers("ttg.local_alloc", kind=STEP, attrs=["alignment", "padded_shape"], words=r"")
def _local_alloc(op: Op, program: Program) -> Run:
    (d,) = op.results
    ty = op.type
    source = op.operands[0] if op.operands else None
    geometry = Geometry(ty.shape)
    name = variable_of(op.loc, "smem")
    pieces = spread_of(ty, program.module).pieces
    ctas = program.module.num_ctas
    offset = op.int_attr("allocation.offset", -1)
    key = id(op)

    def run(f: Frame) -> None:
        partition: Partition = f[0]
        cta = partition.cta
        buffer = cta.buffers.get(key)
        if buffer is None or offset < 0:
            buffer = SharedBuffer(name, ty.elem, geometry, op.loc, ctas, pieces)
            buffer.start = offset
            if offset >= 0:
                _find_aliases(buffer, list(cta.buffers.values()))
            cta.buffers[key] = buffer
        else:
            buffer.poison()
        view = View(buffer, buffer.data, buffer.init, "")
        if source is not None:
            store(partition, view, f[source], op.loc)
        f[d] = view

    return run


def _find_aliases(buffer: SharedBuffer, others: list[SharedBuffer]) -> None:
    end = buffer.start + buffer.nbytes
    for other in others:
        if other.start >= 0 and other.start < end and buffer.start < other.start + other.nbytes:
            buffer.aliases.append(other)
            other.aliases.append(buffer)


def store(partition: Partition, view: View, value: Any, loc: Loc) -> None:
    """Write a register tensor to shared memory."""
    values = np.asarray(value)
    for one in partition.team:
        partition.cta.launch.shared.access(view, one, "local store", loc, write=True)
    view.write(values if values.shape == view.data.shape else values.reshape(view.data.shape))


def load(partition: Partition, view: View, loc: Loc) -> np.ndarray:
    """Read shared memory into a register tensor."""
    for one in partition.team:
        partition.cta.launch.shared.access(view, one, "local load", loc, write=False)
    check_written(partition, view, "local load", loc)
    return view.data.copy()


@lowers("ttg.local_store", kind=STEP, words=r"")
def _local_store(op: Op, program: Program) -> Run:
    value, target = op.operands

    def run(f: Frame) -> None:
        store(f[0], view_of(f, target), f[value], op.loc)

    return run


@lowers("ttg.local_load", kind=STEP, attrs=["ttg.amdg.syncedViaAsyncWait"], words=r"token")
def _local_load(op: Op, program: Program) -> Run:
    source = op.operands[0]
    (d,) = op.results

    def run(f: Frame) -> None:
        f[d] = load(f[0], view_of(f, source), op.loc)

    return run


@lowers("ttg.local_dealloc", kind=STEP, words=r"")
def _local_dealloc(op: Op, program: Program) -> Run:
    return lambda f: None


@lowers("ttg.memdesc_index", words=r"\d+")
def _index(op: Op, program: Program) -> Run:
    source = op.operands[0]
    (d,) = op.results
    slot = op.operands[1] if len(op.operands) > 1 else None
    fixed = int(op.words[0]) if slot is None else 0

    def run(f: Frame) -> None:
        view = f[source]
        if view.__class__ is BadView:
            f[d] = view
            return
        i = fixed if slot is None else f[slot]
        count = view.data.shape[0]
        if 0 <= i < count:
            f[d] = view.index(i)
        else:
            message = f"index {i} lies outside of shared buffer {view.name} with {count} slots"
            f[d] = BadView(f[0], message, op.loc)

    return run


def _derive(view: Any, transform: Any, label: str) -> Any:
    if view.__class__ is BadView:
        return view
    key = label
    found = view._sub.get(key)
    if found is None:
        found = View(view.buffer, transform(view.data), transform(view.init), view.label + label)
        view._sub[key] = found
    return found


@lowers("ttg.memdesc_trans", attrs=["order"], words=r"")
def _trans(op: Op, program: Program) -> Run:
    (a,), (d,) = op.operands, op.results
    order = op.list_attr("order")
    label = f".permute({order})"

    def run(f: Frame) -> None:
        f[d] = _derive(f[a], lambda x: x.transpose(order), label)

    return run


@lowers("ttg.memdesc_subslice", words=r"-?\d+")
def _subslice(op: Op, program: Program) -> Run:
    a, (d,) = op.operands[0], op.results
    shape = op.type.shape
    starts = [int(w) for w in op.words]
    box = tuple(slice(s, s + n) for s, n in zip(starts, shape))
    label = "[" + ", ".join(f"{s.start}:{s.stop}" for s in box) + "]"

    def cut(x: np.ndarray) -> np.ndarray:
        out = x[box]
        if out.shape != shape:
            raise UnsupportedKernelError(f"slice {label} lies outside of shape {x.shape}", op.loc)
        return out

    def run(f: Frame) -> None:
        f[d] = _derive(f[a], cut, label)

    return run


@lowers("ttg.memdesc_reshape", words=r"")
def _reshape(op: Op, program: Program) -> Run:
    (a,), (d,) = op.operands, op.results
    shape = op.type.shape
    label = f".reshape({list(shape)})"

    def reshape(x: np.ndarray) -> np.ndarray:
        out = np.reshape(x, shape)
        if not np.may_share_memory(out, x):
            raise UnsupportedKernelError(
                f"a reshape to {list(shape)} of a permuted or sliced shared buffer", op.loc
            )
        return out

    def run(f: Frame) -> None:
        source = f[a]
        if source.__class__ is not BadView and len(shape) == len(source.data.shape) - 1:
            f[d] = _derive(source, reshape, "" if source.data.shape[0] == 1 else label)
        else:
            f[d] = _derive(source, reshape, label)

    return run


@lowers("ttg.memdesc_reinterpret", words=r"")
def _reinterpret(op: Op, program: Program) -> Run:
    (a,), (d,) = op.operands, op.results
    ty = op.type
    source = op.operand_types()[0]
    offsets = physical_offsets(ty, program.module)
    outer = physical_offsets(source, program.module)
    size = dtypes.size_of(ty.elem)
    if program.module.num_ctas > 1:
        raise UnsupportedKernelError("a reinterpret of shared memory in a cluster", op.loc)
    geometry = Geometry(ty.shape)
    label = f"._reinterpret({ty.elem}, {list(ty.shape)})"

    def run(f: Frame) -> None:
        view = view_of(f, a)
        whole = view.buffer
        start = view.key[0] * dtypes.size_of(whole.elem)
        over = start + geometry.size * size - whole.nbytes
        if over > 0:
            message = (
                f"a reinterpret of {view.name} as {ty.elem} of shape {list(ty.shape)} runs {over} "
                "bytes past the end of its allocation"
            )
            f[d] = BadView(f[0], message, op.loc)
            return
        if not view.data.flags.c_contiguous or view.key[0] % outer.size:
            raise UnsupportedKernelError(f"a reinterpret of {view.name}, a part of a slot", op.loc)
        key = hash((id(op), id(whole), start))
        made = f[0].cta.buffers.get(key)
        if made is None or made.family is not whole.family:
            made = SharedBuffer(view.name + label, ty.elem, geometry, op.loc)
            made.offsets = offsets
            _same_bytes(whole, outer, start, made)
            f[0].cta.buffers[key] = made
        f[d] = View(made, made.data, made.init, "")

    return run


def _same_bytes(whole: SharedBuffer, slot: np.ndarray, start: int, made: SharedBuffer) -> None:
    """Put a buffer into the family of those that are the bytes of an allocation."""
    if whole.family is None:
        slots = np.arange(whole.geometry.size // slot.size) * slot.size
        whole.offsets = (slots[:, None] + slot.reshape(-1)).reshape(whole.geometry.shape)
        Family(whole)
    assert whole.family is not None, "it was made above"
    whole.family.add(made, whole.start - whole.family.members[0].start + start)


def _along(index: Any, axis: int, shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Return the coordinates of each lane: its own, but for the axis, where an index says."""
    at = list(np.indices(shape))
    at[axis] = np.broadcast_to(np.asarray(index).astype(np.int64), shape)
    return tuple(at)


def _check_index(
    partition: Partition, view: View, index: np.ndarray, axis: int, loc: Loc, what: str
) -> bool:
    size = view.data.shape[axis]
    if index.size and not 0 <= int(index.min()) <= int(index.max()) < size:
        partition.report(
            "out-of-bounds", f"{what}: indices from {int(index.min())} to {int(index.max())} lie "
            f"outside of shared buffer {view.name} with size {size}", loc, what,
        )  # fmt: skip
        return False
    return True


@lowers("ttg.local_scatter", kind=STEP, attrs=["axis"], words=r"")
def _local_scatter(op: Op, program: Program) -> Run:
    target, *two = op.operands
    # The index stands in brackets behind the buffer.
    index, value = two
    axis = op.int_attr("axis")

    def run(f: Frame) -> None:
        partition: Partition = f[0]
        view = view_of(f, target)
        for one in partition.team:
            partition.cta.launch.shared.access(view, one, "local scatter", op.loc, write=True)
        values, where = np.broadcast_arrays(np.asarray(f[value]), np.asarray(f[index]))
        at = _along(where, axis, where.shape)
        if not _check_index(partition, view, at[axis], axis, op.loc, "local scatter"):
            return
        view.data[at] = values
        view.init[at] = True
        if not np.array_equal(view.data[at], values, equal_nan=dtypes.is_float(view.buffer.elem)):
            partition.report(
                "race", f"lanes of one local scatter write different values to the same element of "
                f"shared buffer {view.name}", op.loc, "local scatter",
                hint="the value that stays is arbitrary: give each element one writer",
            )  # fmt: skip

    return run


@lowers("ttg.local_atomic_scatter_rmw", kind=STEP, attrs=["axis"],
        words=r"f?add|and|or|xor|u?max|u?min|exch")  # fmt: skip
def _local_atomic(op: Op, program: Program) -> Run:
    target, index, value, *rest = op.operands
    (d,) = op.results
    axis = op.int_attr("axis")
    operation = op.words[0]
    what = "local atomic"

    def run(f: Frame) -> None:
        partition: Partition = f[0]
        view = view_of(f, target)
        elem = view.buffer.elem
        for one in partition.team:
            partition.cta.launch.shared.access(view, one, what, op.loc, write=True, atomic=True)
        values, where = np.broadcast_arrays(np.asarray(f[value]), np.asarray(f[index]))
        lanes = np.broadcast_to(np.asarray(f[rest[0]], np.bool_) if rest else True, where.shape)
        at = tuple(i[lanes] for i in _along(where, axis, where.shape))
        out = np.zeros(where.shape, dtypes.numpy_type(elem))
        f[d] = out
        if not _check_index(partition, view, at[axis], axis, op.loc, what):
            return
        if not view.init[at].all():
            check_written(partition, view, what, op.loc)
        words = dtypes.to_bits(view.data, elem).reshape(-1).copy()
        flat = np.ravel_multi_index(at, view.data.shape)
        out[lanes] = apply_lanes(words, flat, values[lanes], operation, elem, None, where, lanes)
        view.data[...] = dtypes.from_bits(words, elem).reshape(view.data.shape)

    return run


@lowers("ttg.local_gather", kind=STEP, attrs=["axis"], words=r"")
def _local_gather(op: Op, program: Program) -> Run:
    source, index = op.operands[:2]
    (d,) = op.results
    axis = op.int_attr("axis")
    there, here = (spread_of(ty, program.module) for ty in op.operand_types()[:2])

    def run(f: Frame) -> None:
        partition: Partition = f[0]
        view = view_of(f, source)
        places = np.asarray(f[index]).astype(np.int64)
        touched = owners(places, view.data.shape, axis, here, there)
        for one in partition.team:
            for rank in touched[one.rank]:
                partition.cta.launch.shared.access(
                    view, one, "local load", op.loc, write=False, rank=rank
                )
        check_written(partition, view, "local load", op.loc)
        f[d] = np.take_along_axis(view.data, places, axis)

    return run
