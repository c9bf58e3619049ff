"""cp.async: each thread copies 4, 8 or 16 bytes from global to shared memory (sm_80 and later)."""

from __future__ import annotations

import cutlass
from cutlass import cute
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.experimental import primitives as prims

from tileloom.cpasync.pieces_checks import assert_at_run_time, known_int, pointer_of
from tileloom.errors import OptionError

_SIZES = (4, 8, 16)


def _check_size(function, argument, size):
    known = known_int(size)
    if known not in _SIZES or isinstance(size, bool):
        given = "known only to the running kernel" if known is None else known
        raise OptionError(
            f"{function}: {argument} is {given}; accepted are 4, 8 and 16 bytes, as a constant. "
            "Try: 16, and src_size for a shorter source."
        )
    return known


def _check_modifier(function, modifier, size):
    name = modifier if isinstance(modifier, str) else getattr(modifier, "name", repr(modifier))
    name = str(name).lower()
    if name not in ("ca", "cg") or (name == "cg" and size != 16):
        raise OptionError(
            f"{function}: modifier is {name!r} for {size} bytes; accepted are 'ca' (L1 and L2) for "
            "4, 8 and 16 bytes and 'cg' (L2 only) for 16. Try: 'ca'."
        )
    return prims.LoadCacheModifier(name)


def _check_src_size(function, src_size, size):
    known = known_int(src_size)
    if known is None:
        src_size = cutlass.Int32(src_size)
        assert_at_run_time(
            (src_size >= 0) & (src_size <= size), f"{function}: src_size is not in 0 to {size}"
        )
    elif not 0 <= known <= size:
        raise OptionError(
            f"{function}: src_size is {known}; accepted are 0 to cp_size, here {size}, bytes. "
            f"Try: src_size={min(max(known, 0), size)}."
        )
    return src_size if known is None else known


def _modifier(size):
    # 16 bytes bypass L1, as in TileLang's CUDA templates; PTX has no such form of 8 and 4.
    return "cg" if size == 16 else "ca"


def _pointers(function, dst, src, size, unread=False):
    return (
        pointer_of(function, "dst", dst, "smem", size),
        pointer_of(function, "src", src, "gmem", size, unless=unread),
    )


@dsl_user_op
def cp_async_shared_global(dst, src, cp_size, modifier, *, src_size=None, loc=None, ip=None):
    """Copy `cp_size` bytes to shared memory, reading `src_size` of them; the rest become zeros.

    Args:
        dst: Pointer to or tensor in shared memory, at a multiple of `cp_size` bytes.
        src: Pointer to or tensor in global memory, at a multiple of `cp_size` bytes. Nothing is
            read of it where `src_size` is 0, so it may then lie outside the tensor.
        cp_size: Bytes written: 4, 8 or 16, a constant.
        modifier: ``"ca"`` caches in L1 and L2, ``"cg"`` in L2 only (16 bytes only). The members of
            the DSL's enumerations are taken as well.
        src_size: Bytes read, 0 to `cp_size`; a constant or a run-time integer. None reads all.
        loc: Source location, of the DSL's own making.
        ip: Insertion point, of the DSL's own making.

    Raises:
        OptionError: If a size, the modifier or a known address is none of these.

    PTX:
        ``cp.async.{ca,cg}.shared.global [dst], [src], cp_size{, src_size};``

    Source: `tilelang.contrib.cutedsl.cpasync` (its first versions swapped the two sizes, and took
    `src_size=0` for None).
    """
    name = "cp_async_shared_global"
    size = _check_size(name, "cp_size", cp_size)
    modifier = _check_modifier(name, modifier, size)
    unread = False
    if src_size is not None:
        src_size = _check_src_size(name, src_size, size)
        unread = src_size == 0
    dst, src = _pointers(name, dst, src, size, unread)
    prims.cp_async_shared_global(dst, src, size, modifier, cp_size=src_size, loc=loc, ip=ip)


@dsl_user_op
def cp_async_gs(size, dst, src, *, loc=None, ip=None):
    """Copy `size` bytes from global to shared memory: 16 through L2 only, 8 and 4 through L1 too.

    Args:
        size: 4, 8 or 16 bytes, a constant.
        dst: Pointer to or tensor in shared memory, at a multiple of `size` bytes.
        src: Pointer to or tensor in global memory, at a multiple of `size` bytes.
        loc: Source location, of the DSL's own making.
        ip: Insertion point, of the DSL's own making.

    Raises:
        OptionError: If the size or a known address is none of these.

    PTX:
        ``cp.async.cg.shared.global [dst], [src], 16;``, or ``cp.async.ca`` with 8 or 4.

    Source: `tilelang.contrib.cutedsl.cpasync`.
    """
    size = _check_size("cp_async_gs", "size", size)
    dst, src = _pointers("cp_async_gs", dst, src, size)
    prims.cp_async_shared_global(dst, src, size, _modifier(size), loc=loc, ip=ip)


@cute.jit
def _copy_where(size: cutlass.Constexpr, dst, src, cond):
    if cond:
        prims.cp_async_shared_global(dst, src, size, _modifier(size))


def cp_async_gs_conditional(size, dst, src, cond, *, zero_fill=True):
    """Copy `size` bytes where `cond` holds; elsewhere write zeros, or nothing.

    Args:
        size: 4, 8 or 16 bytes, a constant.
        dst: Pointer to or tensor in shared memory, at a multiple of `size` bytes.
        src: Pointer to or tensor in global memory, at a multiple of `size` bytes. Where `cond` is
            false it is not read, and may lie outside the tensor.
        cond: A Python or a run-time boolean.
        zero_fill: What a false condition does: True writes zeros, as TileLang's CUDA target does;
            False writes nothing, so that what was in shared memory stays, as its CuTe DSL target
            does. With True no branch is taken.

    Raises:
        OptionError: If the size or a known address is none of these.

    PTX:
        ``cp.async.{cg,ca}.shared.global [dst], [src], size, src_size;`` with `src_size` selected
        from `size` and 0; with `zero_fill=False` the plain form behind a branch.

    Source: `tilelang.contrib.cutedsl.cpasync`, which has no `zero_fill` and leaves what was there.
    """
    name = "cp_async_gs_conditional"
    size = _check_size(name, "size", size)
    unread = not cond if isinstance(cond, bool) else cutlass.Boolean(cond) == False  # noqa: E712
    dst, src = _pointers(name, dst, src, size, unread)
    if not zero_fill:
        _copy_where(size, dst, src, cond)
        return
    if isinstance(cond, bool):
        src_size = None if cond else 0
    else:
        src_size = cutlass.select_(cutlass.Boolean(cond), cutlass.Int32(size), cutlass.Int32(0))
    prims.cp_async_shared_global(dst, src, size, _modifier(size), cp_size=src_size)


@dsl_user_op
def cp_async_commit(*, loc=None, ip=None):
    """Put this thread's copies since the last commit into a group (``cp.async.commit_group``)."""
    prims.cp_async_commit_group(loc=loc, ip=ip)


@dsl_user_op
def cp_async_wait(n, *, loc=None, ip=None):
    """Wait until at most `n` of this thread's latest groups are pending (``cp.async.wait_group``).

    It says nothing of other threads' copies: a barrier of the block must follow.

    Args:
        n: A constant of at least 0.
        loc: Source location, of the DSL's own making.
        ip: Insertion point, of the DSL's own making.

    Raises:
        OptionError: If `n` is negative or known only at run time.
    """
    known = known_int(n)
    if known is None or known < 0:
        given = "known only to the running kernel" if known is None else known
        raise OptionError(
            f"cp_async_wait: n is {given}; accepted are constants of at least 0. Try: 0, which "
            "waits for all groups."
        )
    prims.cp_async_wait_group(known, loc=loc, ip=ip)
