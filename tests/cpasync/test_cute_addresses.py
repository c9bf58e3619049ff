"""What is known of an address while a kernel is traced: refused, passed, or left to run time."""

from __future__ import annotations

import pytest

from tileloom import cpasync
from tileloom.errors import OptionError


def recast(a):
    import cutlass
    from cutlass import cute

    return cute.recast_ptr(a.smem + 2, dtype=cutlass.Int8)


def view(a):
    from cutlass import cute

    return cute.make_tensor(a.smem + 5, cute.make_layout((4, 4)))


def llvm_pointer(a):
    import cutlass

    space = cutlass.AddressSpace.smem
    return cutlass.Pointer(a.smem, dtype=cutlass.Float32, space=space)


def array(a):
    import cutlass

    return cutlass.Array(cutlass.Float32, 64, space=cutlass.AddressSpace.smem)


def constant(a, address):
    import cutlass
    from cutlass import cute

    return cute.make_ptr(cutlass.Float16, address, cute.AddressSpace.smem, assumed_align=2)


# Of a destination of 16 bytes: how far it is from an aligned address, or None where unknown.
ADDRESSES = {
    "base": (lambda a: a.smem, 0),
    "steps": (lambda a: ((a.smem + 3) + 4) + 5, 48),
    "steps-off": (lambda a: ((a.smem + 3) + 4) + 6, 52),
    "back": (lambda a: (a.smem + 5) + -1, 16),
    "recast": (lambda a: recast(a) + 8, 16),
    "recast-off": (lambda a: recast(a) + 6, 14),
    "view-off": (view, 20),
    "llvm": (lambda a: llvm_pointer(a) + 4, 16),
    "llvm-off": (lambda a: llvm_pointer(a) + 1, 4),
    "constant": (lambda a: constant(a, 2048), 0),
    "constant-off": (lambda a: constant(a, 2048) + 4, 2056),
    "run-time": (lambda a: a.smem + a.n, None),
    "run-time-then-constant": (lambda a: (a.smem + a.n) + 1, None),
    "array": (array, None),
}


@pytest.mark.parametrize("name", ADDRESSES)
def test_what_is_known(kernels, name):
    make, offset = ADDRESSES[name]

    def body(a):
        cpasync.cp_async_gs(16, make(a), a.gmem)

    if offset is not None and offset % 16:
        where = "the address 2056" if offset > 2000 else f"{offset} bytes past an aligned address"
        with pytest.raises(OptionError) as caught:
            kernels.ptx_of(body, "sm_90a")
        assert str(caught.value).startswith(f"cp_async_gs: dst is {where}, no multiple of 16. ")
        return
    assert kernels.instructions(kernels.ptx_of(body, "sm_90a"), "cp.") != []
    checked = kernels.module_of(body, "sm_90a", "--enable-assertions")
    assert checked.count("trap;") == (offset is None)
