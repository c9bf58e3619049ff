"""Lowerings of pointers, global loads, stores, atomics, and descriptor accesses of plain Triton."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tileloom.emulator import dialect, dtypes, global_access
from tileloom.emulator.cluster import spread_of
from tileloom.emulator.happens_before import Record
from tileloom.emulator.ir import Loc, Op, parse_type
from tileloom.emulator.lower import STEP, Program, Run, lowers
from tileloom.emulator.machine import Frame, Partition, Wait
from tileloom.emulator.memory import Desc, Scratch
from tileloom.emulator.pointers import base_of
from tileloom.emulator.report import LaunchError, UnsupportedKernelError

_POINTEE = re.compile(r"!tt\.ptr<([^<>,]+)")
_CACHE_WORDS = r"evict_\w+|ca|cg|wb|cs|wt|cv"
_LOAD_ATTRS = ["cacheModifier", "evictionPolicy", "isVolatile", "boundaryCheck", "padding",
               "ttg.amdg.decomposed", "cache", "evict", "contiguity", "cachePolicy"]  # fmt: skip


def pointee(op: Op) -> str:
    """Return the element that the operation's pointers point to."""
    match = _POINTEE.search(op.signature)
    if match is None:
        raise UnsupportedKernelError(f"'{op.name}' without a pointer type", op.loc)
    return match.group(1)


def lanes(f: Frame, slot: int | None, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return a mask operand in the shape of the addresses."""
    if slot is None:
        return None
    mask = np.asarray(f[slot], np.bool_)
    return mask if mask.shape == shape else np.broadcast_to(mask, shape)


@lowers("tt.addptr", words=r"")
def _addptr(op: Op, program: Program) -> Run:
    a, b = op.operands
    (d,) = op.results
    ty = op.operand_types()[0]
    size = 8 if ty.pointee.startswith("!tt.ptr") else dtypes.size_of(ty.pointee)
    if ty.kind == "tensor":

        def run(f: Frame) -> None:
            f[d] = f[a] + f[b].astype(np.int64) * size
    else:

        def run(f: Frame) -> None:
            f[d] = f[a] + int(f[b]) * size

    return run


@lowers("tt.load", kind=STEP, attrs=_LOAD_ATTRS, words=_CACHE_WORDS)
def _load(op: Op, program: Program) -> Run:
    address, *rest = op.operands
    mask_slot = rest[0] if rest else None
    other_slot = rest[1] if len(rest) > 1 else None
    (d,) = op.results
    ty = op.operand_types()[0]
    elem = "ptr" if ty.pointee.startswith("!tt.ptr") else ty.pointee
    volatile = op.attrs.get("isVolatile") == "true"
    spread = spread_of(ty, program.module)
    what = "volatile load" if volatile else "load"

    def run(f: Frame) -> None:
        where = np.asarray(f[address])
        mask = lanes(f, mask_slot, where.shape)
        other = None if other_slot is None else f[other_slot]
        value = global_access.read(f[0], where, mask, other, elem, op.loc, what, volatile, spread)
        f[d] = value if where.ndim else dtypes.scalar(value, elem)

    return run


@lowers("tt.store", kind=STEP, attrs=_LOAD_ATTRS, words=_CACHE_WORDS)
def _store(op: Op, program: Program) -> Run:
    address, value, *rest = op.operands
    mask_slot = rest[0] if rest else None
    ty = op.operand_types()[0]
    elem = "ptr" if ty.pointee.startswith("!tt.ptr") else ty.pointee
    spread = spread_of(ty, program.module)

    def run(f: Frame) -> None:
        where = np.asarray(f[address])
        mask = lanes(f, mask_slot, where.shape)
        global_access.write(f[0], where, f[value], mask, elem, op.loc, spread=spread)

    return run


_ORDERS = r"relaxed|acquire|release|acq_rel|gpu|cta|sys|f?add|and|or|xor|u?max|u?min|exch"


def _who(program: Program, where: np.ndarray) -> str:
    """Which threads release: of a scalar the first, unless the compiler lets all meet before."""
    judged = program.is_gluon and program.level == "ttgir"
    judged = judged or (program.level == "machine" and not dialect.ATOMICS_MEET_BEFORE)
    return "first" if judged and where.ndim == 0 else "all"


@lowers("tt.atomic_rmw", kind=STEP, attrs=["allocation.size"], words=_ORDERS)
def _atomic_rmw(op: Op, program: Program) -> Run:
    operation, order, scope = op.words
    address, value, *rest = op.operands
    mask_slot = rest[0] if rest else None
    d = op.results[0] if op.results else None
    elem = pointee(op)

    def run(f: Frame) -> None:
        where = np.asarray(f[address])
        old = global_access.atomic(
            f[0],
            operation,
            order,
            scope,
            where,
            f[value],
            lanes(f, mask_slot, where.shape),
            elem,
            op.loc,
            who=_who(program, where),
        )
        if d is not None:
            f[d] = old if where.ndim else dtypes.scalar(old, elem)

    return run


@lowers("tt.atomic_cas", kind=STEP, attrs=["allocation.size"], words=_ORDERS)
def _atomic_cas(op: Op, program: Program) -> Run:
    order, scope = op.words
    address, compare, value = op.operands
    (d,) = op.results
    elem = pointee(op)

    def run(f: Frame) -> None:
        where = np.asarray(f[address])
        old = global_access.atomic(
            f[0], "exch", order, scope, where, f[value], None, elem, op.loc, compare=f[compare],
            who=_who(program, where),
        )  # fmt: skip
        f[d] = old if where.ndim else dtypes.scalar(old, elem)

    return run


# ---- atomic loads and stores, from Triton 3.9 on
@lowers("tt.atomic_load", kind=STEP, words=_ORDERS)
def _atomic_load(op: Op, program: Program) -> Run:
    order, scope = op.words
    address, *rest = op.operands
    mask_slot = rest[0] if rest else None
    (d,) = op.results
    elem = pointee(op)

    def run(f: Frame) -> None:
        where = np.asarray(f[address])
        mask = lanes(f, mask_slot, where.shape)
        value = global_access.atomic_load(f[0], order, scope, where, mask, elem, op.loc)
        f[d] = value if where.ndim else dtypes.scalar(value, elem)

    return run


@lowers("tt.atomic_store", kind=STEP, words=_ORDERS)
def _atomic_store(op: Op, program: Program) -> Run:
    order, scope = op.words
    address, value, *rest = op.operands
    mask_slot = rest[0] if rest else None
    elem = pointee(op)

    def run(f: Frame) -> None:
        where = np.asarray(f[address])
        mask = lanes(f, mask_slot, where.shape)
        global_access.atomic_store(
            f[0], order, scope, where, f[value], mask, elem, op.loc, who=_who(program, where)
        )

    return run


@lowers("tt.atomic_poll", kind=STEP, words=_ORDERS)
def _atomic_poll(op: Op, program: Program) -> Run:
    order, scope = op.words
    address, expected = op.operands
    (d,) = op.results
    elem = pointee(op)

    def run(f: Frame) -> Wait | None:
        where, wanted = np.asarray(f[address]), f[expected]

        def known() -> None:
            global_access.atomic_load(f[0], order, scope, where, None, elem, op.loc)
            f[d] = True

        def ready() -> bool:
            return bool(global_access.peek(f[0], where, elem, op.loc) == wanted)

        if ready():
            known()
            return None
        return Wait(ready, lambda: f"atomic_poll for {wanted}", op.loc, known)

    return run


# ---- descriptors
def check_descriptor(desc: Desc, address: int, what: str) -> None:
    """Refuse a descriptor that the hardware would refuse.

    A box wider than 256 is none: Triton's compiler cuts it into several.

    Args:
        desc: The descriptor.
        address: The real address of its base, for alignment.
        what: The argument's name.

    Raises:
        LaunchError: If base, strides, box or rank are ones that TMA does not take.
    """
    size = dtypes.size_of(desc.elem)
    rank = len(desc.shape)
    why = ""
    if not 1 <= rank <= 5:
        why = f"rank {rank}; TMA takes 1 to 5"
    elif address % 16:
        why = f"base address {address:#x}, which is not a multiple of 16 bytes"
    elif desc.strides[-1] != 1:
        why = f"an innermost stride of {desc.strides[-1]}; TMA takes 1"
    elif any(s * size % 16 for s in desc.strides[:-1]):
        bad = next(s for s in desc.strides[:-1] if s * size % 16)
        why = f"a stride of {bad} elements, {bad * size} bytes, which is not a multiple of 16 bytes"
    elif any(n <= 0 for n in desc.shape):
        why = f"shape {desc.shape}; every size must be at least 1"
    elif desc.block and desc.block[-1] * size < 16:
        why = f"a box whose rows have {desc.block[-1] * size} bytes; TMA takes at least 16"
    if why:
        raise LaunchError(
            f"emulator: tensor descriptor '{what}' has {why}. "
            "Try: copy the tensor into an aligned, contiguous one."
        )


def tma_read(
    partition: Partition, desc: Desc, at: list[int], loc: Loc, what: str, proxy: str = "async",
    key: int | None = None, part: tuple[slice, ...] | None = None,
) -> Record:  # fmt: skip
    """Check a read of a box, or of a part of it, for races and return its record."""
    _check_box(partition, desc, at, loc, what)
    inside = desc.window(at)[0] if part is None else desc.part(at, part)
    return partition.cta.launch.memory.access(
        desc.storage, lambda shadow: desc.shadow_of(shadow, inside), partition, what, loc,
        write=False, proxy=proxy, key=key,
    )  # fmt: skip


def tma_write(
    partition: Partition, desc: Desc, at: list[int], loc: Loc, what: str, proxy: str = "async",
    key: int | None = None, epoch: float = 0, atomic: bool = False,
    part: tuple[slice, ...] | None = None,
) -> None:  # fmt: skip
    """Check a write of a box, or of a part of it, for races."""
    _check_box(partition, desc, at, loc, what)
    if min(at) < 0:  # measured: an illegal instruction on an H100 and an H200
        partition.report(
            "out-of-bounds", f"{what}: box {list(desc.block)} at {at} of '{desc.name}' begins "
            "before 0, where TMA loads zeros but may not write", loc, what,
            hint="begin at 0, or write from registers",
        )  # fmt: skip
    inside = desc.window(at)[0] if part is None else desc.part(at, part)
    extra: dict[str, Any] = {} if key is None else {"key": key, "epoch": epoch}
    partition.cta.launch.memory.access(
        desc.storage, lambda shadow: desc.shadow_of(shadow, inside), partition, what, loc,
        write=True, proxy=proxy, atomic=atomic, **extra,
    )  # fmt: skip


def _check_box(partition: Partition, desc: Desc, at: list[int], loc: Loc, what: str) -> None:
    first = at[len(desc.shape) - 1] * dtypes.size_of(desc.elem)  # im2col: offsets follow
    if first % 16:  # measured: an illegal instruction on an H100 and an H200
        partition.report(
            "out-of-bounds", f"{what}: box {list(desc.block)} at {at} of '{desc.name}' begins "
            f"{first} bytes into the innermost dimension, and TMA begins at multiples of 16", loc,
            what, hint="begin at a multiple of 16 bytes, or load to registers",
        )  # fmt: skip
    if desc.outside(at):
        partition.report(
            "out-of-bounds",
            f"{what}: box {list(desc.block)} at {at} lies wholly outside of '{desc.name}' with "
            f"shape "
            f"{list(desc.shape)}",
            loc, what, severity="info", hint="nothing is moved; skip the tile",
        )  # fmt: skip


@lowers("tt.make_tensor_descriptor", words=r"", attrs=["padding"])
def _make_descriptor(op: Op, program: Program) -> Run:
    base, *rest = op.operands
    rank = op.groups[0]
    sizes, strides = rest[:rank], rest[rank : 2 * rank]
    (d,) = op.results
    text = op.signature
    found = re.search(
        r"!tt\.tensordesc<.*>$|<tensor<.*>>$|<\d+x.*>$",
        text.split(", ", 1)[-1] if ", " in text else text,
    )
    head = found.group(0) if found else text
    ty = parse_type(head if head.startswith("!") else "!tt.tensordesc" + head)
    nan = op.attrs.get("padding", "").startswith("2")

    def run(f: Frame) -> None:
        address = f[base]
        storage, first = base_of(f[0], address, op.loc)
        desc = Desc(
            storage, (address - first) // dtypes.size_of(ty.elem),
            [int(f[s]) for s in sizes], [int(f[s]) for s in strides], ty.shape, ty.elem, nan,
            storage.name,
        )  # fmt: skip
        check_descriptor(desc, address - first, storage.name)
        f[d] = desc

    return run


@lowers("tt.descriptor_load", kind=STEP, attrs=_LOAD_ATTRS, words=_CACHE_WORDS)
def _descriptor_load(op: Op, program: Program) -> Run:
    source, *at = op.operands
    (d,) = op.results
    shape = op.type.shape

    def run(f: Frame) -> None:
        desc, corner = f[source], [f[s] for s in at]
        tma_read(f[0], desc, corner, op.loc, "descriptor load", proxy="generic")
        f[d] = desc.read(corner).reshape(shape)

    return run


@lowers("tt.descriptor_store", kind=STEP, words=r"", attrs=["reduce_kind"])
def _descriptor_store(op: Op, program: Program) -> Run:
    target, *rest = op.operands
    count = op.groups[0]
    at, value = rest[:count], rest[count]

    def run(f: Frame) -> None:
        desc, corner = f[target], [f[s] for s in at]
        tma_write(f[0], desc, corner, op.loc, "descriptor store", proxy="generic")
        desc.write(corner, np.asarray(f[value]))
        f[0].cta.launch.changed()

    return run


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "min": np.fmin, "max": np.fmax, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}  # fmt: skip
REDUCE_WORDS = "|".join(_COMBINE)


def reduction(op: Op) -> Callable[[Any, Any], Any]:
    """Return how a TMA reduction combines memory with what comes.

    Args:
        op: The operation; its first word is the kind, its first type the descriptor's.

    Returns:
        A function of old and new values.

    Raises:
        UnsupportedKernelError: For an element that the hardware does not reduce so.
    """
    kind = op.words[0]
    ty = op.operand_types()[0]
    combine = _COMBINE[kind]
    floating = {"add": ("f16", "bf16", "f32"), "min": ("f16", "bf16"), "max": ("f16", "bf16")}
    if ty.elem not in ("i32", "i64", *floating.get(kind, ())):
        raise UnsupportedKernelError(
            f"a TMA reduction by '{kind}' of {ty.elem}; the hardware adds f16, bf16 and f32, takes "
            "the minimum and maximum of f16 and bf16, and does all with integers of 32 and 64 bits",
            op.loc,
        )
    if kind in ("min", "max") and re.search(r"xui\d", ty.text):
        elem = ty.elem
        return lambda old, new: combine(
            dtypes.unsigned(old, elem), dtypes.unsigned(new, elem)
        ).view(dtypes.numpy_type(elem))
    return combine


@lowers("tt.descriptor_reduce", kind=STEP, words=REDUCE_WORDS)
def _descriptor_reduce(op: Op, program: Program) -> Run:
    target, *rest = op.operands
    count = op.groups[0]
    at, value = rest[:count], rest[count]
    combine = reduction(op)

    def run(f: Frame) -> None:
        desc, corner = f[target], [f[s] for s in at]
        tma_write(f[0], desc, corner, op.loc, "descriptor reduce", proxy="generic", atomic=True)
        new = np.asarray(f[value]).reshape(desc.block)
        desc.write(corner, combine(desc.read(corner), new))
        f[0].cta.launch.changed()

    return run


@lowers("ttg.global_scratch_alloc", attrs=["alignment", "nbytes",
"ttg.global_scratch_memory_offset",
        "third_party_allocation", "backend", "shared_cluster_state", "sharedClusterState"],
        words=r"")  # fmt: skip
def _scratch(op: Op, program: Program) -> Run:
    (d,) = op.results

    def run(f: Frame) -> None:
        f[d] = Scratch(loc=op.loc)

    return run


@lowers("ttng.tensormap_create", attrs=["elem_type", "fill_mode", "interleave_layout",
"swizzle_mode"],
        words=r"")  # fmt: skip
def _tensormap_create(op: Op, program: Program) -> Run:
    scratch, base, *rest = op.operands
    boxes, sizes, strides, _ = op.groups[:4]
    size_slots = rest[boxes : boxes + sizes]
    stride_slots = rest[boxes + sizes : boxes + sizes + strides]
    elem = _POINTEE.findall(op.signature)[1]
    nan = op.int_attr("fill_mode", 0) == 1

    def run(f: Frame) -> None:
        address = f[base]
        size = dtypes.size_of(elem)
        storage, first = base_of(f[0], address, op.loc)
        shape = [int(f[s]) for s in size_slots][::-1]
        steps = [*[int(f[s]) // size for s in stride_slots][::-1], 1]
        desc = Desc(storage, (address - first) // size, shape, steps, (), elem, nan, storage.name)
        check_descriptor(desc, address - first, storage.name)
        f[scratch].desc = desc

    return run


@lowers("ttng.tensormap_fenceproxy_acquire", words=r"", kind=STEP)
def _tensormap_acquire(op: Op, program: Program) -> Run:
    return lambda f: None


@lowers("ttng.reinterpret_tensor_descriptor", words=r"")
def _reinterpret_descriptor(op: Op, program: Program) -> Run:
    (a,), (d,) = op.operands, op.results
    shape = op.type.shape

    def run(f: Frame) -> None:
        made = f[a].desc
        if made is None:
            raise UnsupportedKernelError("a descriptor that was not made on the device", op.loc)
        f[d] = Desc(made.storage, made.offset, made.shape, made.strides, shape, made.elem,
                    made.nan_fill, made.name)  # fmt: skip

    return run
