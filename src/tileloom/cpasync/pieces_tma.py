"""TMA: tensor and bulk copies between global and shared memory (sm_90 and later).

A tensor copy moves a box that a descriptor tells of; a bulk copy moves a count of bytes. One thread
issues either. Loads complete on an mbarrier, stores and reductions in groups of the thread.
"""

from __future__ import annotations

import cutlass
from cutlass import cute
from cutlass._mlir.dialects import cute as cute_ir
from cutlass._mlir.dialects import cute_nvgpu as nvgpu_ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.experimental import primitives as prims

from tileloom.cpasync.eviction import policy_word
from tileloom.cpasync.pieces_checks import (
    assert_at_run_time,
    check_bulk_size,
    known_int,
    pointer_of,
    require_cta_pairs,
    require_tma,
)
from tileloom.errors import OptionError

# PTX asks for these of a descriptor, of the shared memory of tensor copies, of both sides of bulk
# copies, and of an mbarrier.
_DESCRIPTOR_ALIGNMENT = 64
_BOX_ALIGNMENT = 128
_BULK_ALIGNMENT = 16
_BARRIER_ALIGNMENT = 8
_INTEGERS = ("Int32", "Uint32", "Int64", "Uint64")
_HALVES = ("Float16", "BFloat16")
# What each operation combines; anything else is an illegal instruction (measured on an H200). So
# are sums and bits of int64, inc and dec of int32, but the DSL's types do not tell the sign.
REDUCTIONS = {
    "add": (*_INTEGERS, *_HALVES, "Float32", "Float64"),
    "min": (*_INTEGERS, *_HALVES),
    "max": (*_INTEGERS, *_HALVES),
    "inc": _INTEGERS[:2],
    "dec": _INTEGERS[:2],
    "and": _INTEGERS,
    "or": _INTEGERS,
    "xor": _INTEGERS,
}


@dsl_user_op
def extract_tensormap_ptr(tma_atom, *, loc=None, ip=None):
    """Give the address of the descriptor inside a TMA copy atom.

    Args:
        tma_atom: A `CopyAtom` made by ``cute.nvgpu.cpasync.make_tiled_tma_atom``.
        loc: Source location, of the DSL's own making.
        ip: Insertion point, of the DSL's own making.

    Returns:
        A generic pointer to 64-bit words, aligned to 64 bytes.

    Raises:
        OptionError: If it is no copy atom with a descriptor.
    """
    trait = getattr(tma_atom, "_trait", None)
    if not isinstance(tma_atom, cute.CopyAtom) or "tma" not in str(trait.value.type):
        raise OptionError(
            f"extract_tensormap_ptr: tma_atom is of type {type(tma_atom).__name__}; accepted are "
            "copy atoms of TMA. Try: cute.nvgpu.cpasync.make_tiled_tma_atom."
        )
    made = nvgpu_ir.atom_make_exec_tma(trait.value, loc=loc, ip=ip)
    kind = cute_ir.PtrType.get(cutlass.Uint64.mlir_type, cute_ir.AddressSpace.generic, 64)
    return nvgpu_ir.get_tma_desc_addr(kind, made, loc=loc, ip=ip)


def _descriptor(function, given, loc, ip):
    """The generic pointer to a descriptor: of an atom, a `TensorMap`, a table or itself."""
    if isinstance(given, cute.CopyAtom):
        return extract_tensormap_ptr(given, loc=loc, ip=ip)
    if hasattr(given, "get_ptr"):
        return given.get_ptr(loc=loc, ip=ip)
    if not isinstance(given, cute.Tensor | cute.Pointer | cutlass.Pointer):
        raise OptionError(
            f"{function}: tma_desc is of type {type(given).__name__}; accepted are a TMA copy "
            "atom, a TensorMap of the DSL, a tensor of descriptors or a pointer to one. Try: "
            "cutlass.GridConstant[TensorMap] as the kernel's parameter."
        )
    pointer = pointer_of(function, "tma_desc", given, "descriptor", _DESCRIPTOR_ALIGNMENT)
    if _lies_in(pointer, "gmem"):
        address = pointer.llvm_ptr if isinstance(pointer, cute.Pointer) else pointer.ir_value()
        pointer = llvm.addrspacecast(llvm.PointerType.get(), address, loc=loc, ip=ip)
    return pointer


def _lies_in(given, *spaces):
    """Whether an argument is a pointer into one of these memories."""
    is_pointer = isinstance(given, cute.Pointer | cutlass.Pointer)
    return is_pointer and given.memspace.name in spaces


def _element(given):
    """The element type that a descriptor tells, or None.

    A kernel that another generator wrote may be traced with any descriptor, which tells bytes.
    """
    if isinstance(given, cute.CopyAtom):
        dtype = given.value_type
    else:
        dtype = given.dtype if hasattr(given, "get_ptr") else None
    return dtype if dtype is not None and dtype.width > 8 else None


def _coordinates(function, crd, im2col, tma_desc, writes=False):
    crd = tuple(crd) if isinstance(crd, tuple | list) else (crd,)
    fewest = 3 if im2col else 1
    if not fewest <= len(crd) <= 5:
        mode = "im2col mode" if im2col else "a tensor copy"
        raise OptionError(
            f"{function}: crd has {len(crd)} coordinates; accepted in {mode} are {fewest} to 5, "
            "the innermost first. Try: one for each dimension of the descriptor."
        )
    dtype = _element(tma_desc)
    for i, each in enumerate(crd):
        unit = 1 if i or dtype is None else 128 // dtype.width
        known = known_int(each)
        if known is None:
            number = cutlass.Int32(each)
            if unit > 1:
                text = f"{function}: the innermost coordinate is not a multiple of 16 bytes"
                assert_at_run_time(number % unit == 0, text)
            if writes:
                assert_at_run_time(number >= 0, f"{function}: a coordinate is below 0")
        elif known % unit:
            raise OptionError(
                f"{function}: the innermost coordinate is {known} = {known * dtype.width // 8} "
                f"bytes; accepted are multiples of 16 bytes. Try: a multiple of {unit}."
            )
        elif writes and known < 0:
            raise OptionError(
                f"{function}: crd has the coordinate {known}; only loads may begin before the "
                "tensor. Try: 0, and a smaller box."
            )
    return [cutlass.Int32(c) for c in crd]


def _im2col_offsets(function, offsets, rank):
    offsets = tuple(offsets)
    if len(offsets) != rank - 2:
        raise OptionError(
            f"{function}: im2col_offsets has {len(offsets)} numbers for {rank} coordinates; "
            f"accepted is one for each of the {rank - 2} spatial dimensions. Try: two coordinates "
            "more than offsets."
        )
    return [cutlass.Int16(o) for o in offsets]


def _multicast(function, mask):
    if mask is None:
        return None
    known = known_int(mask)
    if known is not None and not 0 < known < 1 << 16:
        raise OptionError(
            f"{function}: multicast_mask is {known}; accepted are 1 to 65535, a bit for each block "
            "of the cluster. Try: 0b11 for both blocks of a cluster of two."
        )
    return cutlass.Int16(mask)


class _Barrier:
    """An mbarrier as the DSL's function for pairs of blocks wants it: with `data_ptr`."""

    def __init__(self, pointer):
        self._pointer = pointer

    def data_ptr(self):
        return cutlass.Pointer(self._pointer, dtype=cutlass.Uint64, space=cutlass.AddressSpace.smem)

    def ir_value(self, *, loc=None, ip=None):
        return self.data_ptr()


@dsl_user_op
def tma_load(
    tma_desc,
    mbar,
    smem_ptr,
    crd,
    use_2cta=False,
    im2col_offsets=None,
    *,
    multicast_mask=None,
    eviction_kind="normal",
    loc=None,
    ip=None,
):
    """Load a box of a tensor into shared memory; its bytes complete on an mbarrier.

    Expect the bytes on the barrier first (`arrive_and_expect_tx`): the whole box, also where it
    reaches past the tensor, where zeros (or the descriptor's fill) are written.

    The older form ``tma_load(smem_ptr, gmem_ptr, mbar, size)``, told by a first pointer into shared
    memory, is `bulk_load`.

    Args:
        tma_desc: The descriptor: a TMA copy atom, a `TensorMap` of the DSL, a tensor of
            descriptors (its first) or a pointer to one.
        mbar: Pointer to the mbarrier in shared memory.
        smem_ptr: Pointer to or tensor in shared memory, at a multiple of 128 bytes.
        crd: 1 to 5 coordinates in elements, the innermost first, which is a multiple of 16 bytes;
            one may come without a tuple.
        use_2cta: Complete on the barrier of the pair's even block (sm_100a, sm_110a).
        im2col_offsets: For an im2col descriptor: one offset for each spatial dimension, the
            innermost first.
        multicast_mask: A bit for each block of the cluster that receives the box at the same
            offset of its shared memory, and its bytes on its own barrier there.
        eviction_kind: L2 policy: ``"normal"``, ``"first"``, ``"last"``, a word of `cache_policy`,
            or None for no hint in the instruction.
        loc: Source location, of the DSL's own making.
        ip: Insertion point, of the DSL's own making.

    Raises:
        OptionError: If a coordinate count, mask, policy, memory or known address is none of these.
        UnsupportedError: If the kernel is compiled for an architecture without TMA, or without
            pairs of blocks.

    PTX:
        ``cp.async.bulk.tensor.{1..5}d.shared::cta.global.{tile,im2col}
        .mbarrier::complete_tx::bytes.L2::cache_hint [smem], [desc, {crd}], [mbar], policy;``, with
        ``shared::cluster`` and ``.multicast::cluster`` or ``.cta_group::2`` where asked for.

    Source: `tilelang.contrib.cutedsl.cpasync`; multicast and policies are ours.
    """
    name = "tma_load"
    if not isinstance(crd, tuple | list) and _lies_in(tma_desc, "smem", "dsmem"):
        bulk_load(tma_desc, mbar, crd, smem_ptr, multicast_mask=multicast_mask, loc=loc, ip=ip)
        return
    require_tma(name)
    policy = policy_word(name, eviction_kind)
    mask = _multicast(name, multicast_mask)
    im2col = im2col_offsets is not None
    crd = _coordinates(name, crd, im2col, tma_desc)
    offsets = _im2col_offsets(name, im2col_offsets, len(crd)) if im2col else []
    common = {"l2_cache_hint": policy, "mode": "im2col" if im2col else None, "loc": loc, "ip": ip}
    descriptor = _descriptor(name, tma_desc, loc, ip)
    dst = pointer_of(name, "smem_ptr", smem_ptr, "smem", _BOX_ALIGNMENT)
    barrier = pointer_of(name, "mbar", mbar, "barrier", _BARRIER_ALIGNMENT)
    if not use_2cta and mask is None:
        prims.cp_async_bulk_tensor_shared_cta_global(
            dst, descriptor, crd, barrier, offsets, **common
        )
        return
    group = None
    if use_2cta:
        require_cta_pairs(name)
        group, barrier = prims.CTAGroup.CTA_2, _Barrier(barrier)
    prims.cp_async_bulk_tensor_shared_cluster_global(
        dst, descriptor, crd, barrier, offsets, multicast_mask=mask, group=group, **common
    )


@dsl_user_op
def bulk_load(dst, src, size, mbar, *, multicast_mask=None, eviction_kind=None, loc=None, ip=None):
    """Load `size` bytes from global into shared memory; they complete on an mbarrier.

    Args:
        dst: Pointer to or tensor in shared memory, at a multiple of 16 bytes.
        src: Pointer to or tensor in global memory, at a multiple of 16 bytes.
        size: A positive multiple of 16 bytes; a constant or a run-time integer.
        mbar: Pointer to the mbarrier in shared memory.
        multicast_mask: As in `tma_load`.
        eviction_kind: As in `tma_load`.
        loc: Source location, of the DSL's own making.
        ip: Insertion point, of the DSL's own making.

    Raises:
        OptionError: If a size, mask, policy, memory or known address is none of these.
        UnsupportedError: If the kernel is compiled for an architecture without TMA.

    PTX:
        ``cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [dst], [src], size,
        [mbar];``
    """
    name = "bulk_load"
    require_tma(name)
    check_bulk_size(name, "size", size)
    prims.cp_async_bulk_shared_cluster_global(
        pointer_of(name, "dst", dst, "smem", _BULK_ALIGNMENT),
        pointer_of(name, "src", src, "gmem", _BULK_ALIGNMENT),
        pointer_of(name, "mbar", mbar, "barrier", _BARRIER_ALIGNMENT),
        cutlass.Int32(size),
        multicast_mask=_multicast(name, multicast_mask),
        l2_cache_hint=policy_word(name, eviction_kind),
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def tma_store(tma_desc, smem_ptr, crd, *, im2col=False, eviction_kind=None, loc=None, ip=None):
    """Store a box from shared memory into a tensor; what reaches past the tensor is left out.

    Fence what ordinary instructions wrote there first (`fence_proxy_async`), then commit with
    `tma_store_arrive` and wait with `tma_store_wait`.

    One coordinate is a coordinate, with a tuple or without. Only where `tma_desc` is a pointer into
    global memory and `crd` no tuple, it is a byte count, and this is `bulk_store`.

    Args:
        tma_desc: The descriptor, as in `tma_load`.
        smem_ptr: Pointer to or tensor in shared memory, at a multiple of 128 bytes.
        crd: 1 to 5 coordinates in elements, none below 0, the innermost first, which is a multiple
            of 16 bytes.
        im2col: Whether the descriptor is of the im2col kind.
        eviction_kind: As in `tma_load`; None, no hint.
        loc: Source location, of the DSL's own making.
        ip: Insertion point, of the DSL's own making.

    Raises:
        OptionError: If a coordinate count, policy, memory or known address is none of these.
        UnsupportedError: If the kernel is compiled for an architecture without TMA.

    PTX:
        ``cp.async.bulk.tensor.{1..5}d.global.shared::cta.tile.bulk_group [desc, {crd}], [smem];``

    Source: `tilelang.contrib.cutedsl.cpasync`, which takes one bare coordinate for a byte count,
    and has no policies although its generator writes them.
    """
    name = "tma_store"
    if not isinstance(crd, tuple | list) and _lies_in(tma_desc, "gmem"):
        bulk_store(tma_desc, smem_ptr, crd, eviction_kind=eviction_kind, loc=loc, ip=ip)
        return
    require_tma(name)
    policy = policy_word(name, eviction_kind)
    crd = _coordinates(name, crd, im2col, tma_desc, writes=True)
    prims.cp_async_bulk_tensor_global_shared_cta(
        _descriptor(name, tma_desc, loc, ip),
        pointer_of(name, "smem_ptr", smem_ptr, "smem", _BOX_ALIGNMENT),
        crd,
        l2_cache_hint=policy,
        mode=prims.TMAStoreMode.IM2COL if im2col else prims.TMAStoreMode.TILE,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def bulk_store(dst, src, size, *, eviction_kind=None, loc=None, ip=None):
    """Store `size` bytes from shared into global memory; they complete in the thread's group.

    Args:
        dst: Pointer to or tensor in global memory, at a multiple of 16 bytes.
        src: Pointer to or tensor in shared memory, at a multiple of 16 bytes.
        size: A positive multiple of 16 bytes; a constant or a run-time integer.
        eviction_kind: As in `tma_load`; None, no hint.
        loc: Source location, of the DSL's own making.
        ip: Insertion point, of the DSL's own making.

    Raises:
        OptionError: If a size, policy, memory or known address is none of these.
        UnsupportedError: If the kernel is compiled for an architecture without TMA.

    PTX:
        ``cp.async.bulk.global.shared::cta.bulk_group [dst], [src], size;``
    """
    name = "bulk_store"
    require_tma(name)
    check_bulk_size(name, "size", size)
    prims.cp_async_bulk_global_shared_cta(
        pointer_of(name, "dst", dst, "gmem", _BULK_ALIGNMENT),
        pointer_of(name, "src", src, "smem", _BULK_ALIGNMENT),
        cutlass.Int32(size),
        l2_cache_hint=policy_word(name, eviction_kind),
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def tma_reduce(
    tma_desc, smem_ptr, crd, *, op="add", im2col=False, eviction_kind=None, loc=None, ip=None
):
    """Combine a box of shared memory with a tensor, element by element and atomically.

    Fence, commit and wait as for `tma_store`. The order of the blocks' additions is not fixed, so
    sums of floating-point numbers may differ in their last bits from run to run.

    Args:
        tma_desc: The descriptor, as in `tma_load`; its element type is what is combined: add takes
            float16, bfloat16, float32, float64, int32, uint32 and uint64; min and max float16,
            bfloat16 and integers of 32 and 64 bits; inc and dec uint32; the rest int32, uint32 and
            uint64.
        smem_ptr: Pointer to or tensor in shared memory, at a multiple of 128 bytes.
        crd: As in `tma_store`.
        op: ``"add"``, ``"min"``, ``"max"``, ``"inc"``, ``"dec"``, ``"and"``, ``"or"``, ``"xor"``.
        im2col: Whether the descriptor is of the im2col kind.
        eviction_kind: As in `tma_load`; None, no hint.
        loc: Source location, of the DSL's own making.
        ip: Insertion point, of the DSL's own making.

    Raises:
        OptionError: If an operation, coordinate count, policy, memory or known address is none of
            these.
        UnsupportedError: If the kernel is compiled for an architecture without TMA.

    PTX:
        ``cp.reduce.async.bulk.tensor.{1..5}d.global.shared::cta.add.tile.bulk_group [desc, {crd}],
        [smem];``

    Source: `tilelang.contrib.cutedsl.cpasync`, which has the addition only.
    """
    name = "tma_reduce"
    require_tma(name)
    if op not in REDUCTIONS:
        raise OptionError(
            f"{name}: op is {op!r}; accepted are {', '.join(map(repr, REDUCTIONS))}. Try: 'add'."
        )
    dtype = _element(tma_desc)
    if dtype is not None and dtype.__name__ not in REDUCTIONS[op]:
        raise OptionError(
            f"{name}: op is {op!r} and the descriptor's elements are {dtype.__name__}; accepted "
            f"are {', '.join(REDUCTIONS[op])}. Try: a descriptor of another element type."
        )
    policy = policy_word(name, eviction_kind)
    crd = _coordinates(name, crd, im2col, tma_desc, writes=True)
    prims.cp_async_bulk_tensor_reduce(
        _descriptor(name, tma_desc, loc, ip),
        pointer_of(name, "smem_ptr", smem_ptr, "smem", _BOX_ALIGNMENT),
        prims.TMARedux(op),
        crd,
        l2_cache_hint=policy,
        mode=prims.TMAStoreMode.IM2COL if im2col else prims.TMAStoreMode.TILE,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def tma_store_arrive(*, loc=None, ip=None):
    """Put this thread's stores and reductions into a group (``cp.async.bulk.commit_group``)."""
    require_tma("tma_store_arrive")
    prims.cp_async_bulk_commit_group(loc=loc, ip=ip)


@dsl_user_op
def tma_store_wait(count, *, read=None, loc=None, ip=None):
    """Wait until at most `count` of this thread's latest groups of stores are pending.

    Args:
        count: A constant of at least 0.
        read: True waits only until shared memory has been read, so that it may be written again;
            None or False until the thread sees the data in global memory. The end of the kernel
            waits for the rest.
        loc: Source location, of the DSL's own making.
        ip: Insertion point, of the DSL's own making.

    Raises:
        OptionError: If `count` is negative or known only at run time.
        UnsupportedError: If the kernel is compiled for an architecture without TMA.

    PTX:
        ``cp.async.bulk.wait_group{.read} count;``
    """
    require_tma("tma_store_wait")
    known = known_int(count)
    if known is None or known < 0:
        given = "known only to the running kernel" if known is None else known
        raise OptionError(
            f"tma_store_wait: count is {given}; accepted are constants of at least 0. Try: 0, "
            "which waits for all groups."
        )
    prims.cp_async_bulk_wait_group(known, read=True if read else None, loc=loc, ip=ip)


@dsl_user_op
def prefetch_tma_descriptor(tma_desc, *, loc=None, ip=None):
    """Fetch a descriptor ahead of its first use (``prefetch.tensormap [desc];``).

    Args:
        tma_desc: The descriptor, as in `tma_load`.
        loc: Source location, of the DSL's own making.
        ip: Insertion point, of the DSL's own making.

    Raises:
        OptionError: If it is no descriptor.
        UnsupportedError: If the kernel is compiled for an architecture without TMA.
    """
    name = "prefetch_tma_descriptor"
    require_tma(name)
    prims.prefetch_tensormap(_descriptor(name, tma_desc, loc, ip), loc=loc, ip=ip)
