"""Wrong calls while a kernel is traced: one sentence each; and checks of the running kernel."""

from __future__ import annotations

import re

import pytest

from tileloom import cpasync
from tileloom.errors import OptionError, UnsupportedError


def unaligned(a):
    """A constant address, as a pointer into global memory."""
    import cutlass
    from cutlass import cute

    return cute.make_ptr(cutlass.Float32, 4100, cute.AddressSpace.gmem, assumed_align=4)


SIZES = "accepted are 4, 8 and 16 bytes, as a constant. Try: 16, and src_size for a shorter source."
MODIFIERS = (
    "accepted are 'ca' (L1 and L2) for 4, 8 and 16 bytes and 'cg' (L2 only) for 16. Try: 'ca'."
)
BULK = "accepted are positive multiples of 16 bytes. Try: {} bytes, and the rest by cp_async_gs."
BAD = {
    "size": (
        lambda a: cpasync.cp_async_gs(12, a.smem, a.gmem),
        f"cp_async_gs: size is 12; {SIZES}",
    ),
    "size-bool": (
        lambda a: cpasync.cp_async_gs(True, a.smem, a.gmem),
        f"cp_async_gs: size is True; {SIZES}",
    ),
    "size-runtime": (
        lambda a: cpasync.cp_async_gs_conditional(a.n, a.smem, a.gmem, True),
        f"cp_async_gs_conditional: size is known only to the running kernel; {SIZES}",
    ),
    "cp-size": (
        lambda a: cpasync.cp_async_shared_global(a.smem, a.gmem, 0, "ca"),
        f"cp_async_shared_global: cp_size is 0; {SIZES}",
    ),
    "src-size": (
        lambda a: cpasync.cp_async_shared_global(a.smem, a.gmem, 8, "ca", src_size=16),
        "cp_async_shared_global: src_size is 16; accepted are 0 to cp_size, here 8, bytes. "
        "Try: src_size=8.",
    ),
    "modifier-of-8": (
        lambda a: cpasync.cp_async_shared_global(a.smem, a.gmem, 8, "cg"),
        f"cp_async_shared_global: modifier is 'cg' for 8 bytes; {MODIFIERS}",
    ),
    "modifier": (
        lambda a: cpasync.cp_async_shared_global(a.smem, a.gmem, 16, "cs"),
        f"cp_async_shared_global: modifier is 'cs' for 16 bytes; {MODIFIERS}",
    ),
    "dst-unaligned": (
        lambda a: cpasync.cp_async_gs(16, a.smem + 1, a.gmem),
        "cp_async_gs: dst is 4 bytes past an aligned address, no multiple of 16. "
        "Try: an offset of a multiple of 16 bytes.",
    ),
    "src-unaligned-in-two-steps": (
        lambda a: cpasync.cp_async_gs(8, a.smem, (a.gmem + 4) + 1),
        "cp_async_gs: src is 20 bytes past an aligned address, no multiple of 8. "
        "Try: an offset of a multiple of 8 bytes.",
    ),
    "src-constant-address": (
        lambda a: cpasync.cp_async_gs_conditional(8, a.smem, unaligned(a), a.n < 1),
        "cp_async_gs_conditional: src is the address 4100, no multiple of 8. "
        "Try: an offset of a multiple of 8 bytes.",
    ),
    "wrong-memory": (
        lambda a: cpasync.cp_async_gs(16, a.gmem, a.smem),
        "cp_async_gs: dst lies in gmem; accepted is shared memory. "
        "Try: the pointers in the order of cp_async_gs's arguments.",
    ),
    "no-pointer": (
        lambda a: cpasync.cp_async_gs(16, a.smem, 4096),
        "cp_async_gs: src is of type int; accepted are pointers and tensors of the DSL. "
        "Try: tensor.iterator.",
    ),
    "wait": (
        lambda a: cpasync.cp_async_wait(-1),
        "cp_async_wait: n is -1; accepted are constants of at least 0. "
        "Try: 0, which waits for all groups.",
    ),
    "box-unaligned": (
        lambda a: cpasync.tma_load(a.desc, a.mbar, a.smem + 4, (0, 0)),
        "tma_load: smem_ptr is 16 bytes past an aligned address, no multiple of 128. "
        "Try: an offset of a multiple of 128 bytes.",
    ),
    "coordinates": (
        lambda a: cpasync.tma_load(a.desc, a.mbar, a.smem, (0,) * 6),
        "tma_load: crd has 6 coordinates; accepted in a tensor copy are 1 to 5, the innermost "
        "first. Try: one for each dimension of the descriptor.",
    ),
    "coordinates-im2col": (
        lambda a: cpasync.tma_store(a.desc, a.smem, (0, 0), im2col=True),
        "tma_store: crd has 2 coordinates; accepted in im2col mode are 3 to 5, the innermost "
        "first. Try: one for each dimension of the descriptor.",
    ),
    "offsets": (
        lambda a: cpasync.tma_load(a.desc, a.mbar, a.smem, (0, 0, 0, 0), False, (1,)),
        "tma_load: im2col_offsets has 1 numbers for 4 coordinates; accepted is one for each of "
        "the 2 spatial dimensions. Try: two coordinates more than offsets.",
    ),
    "mask": (
        lambda a: cpasync.tma_load(a.desc, a.mbar, a.smem, 0, multicast_mask=1 << 16),
        "tma_load: multicast_mask is 65536; accepted are 1 to 65535, a bit for each block of the "
        "cluster. Try: 0b11 for both blocks of a cluster of two.",
    ),
    "policy": (
        lambda a: cpasync.tma_store(a.desc, a.smem, 0, eviction_kind="no_allocate"),
        "tma_store: eviction_kind is 'no_allocate', a policy that bulk copies do not have; "
        "accepted are 'normal', 'first', 'last', a word of cache_policy() and None. "
        "Try: eviction_kind=None.",
    ),
    "descriptor": (
        lambda a: cpasync.prefetch_tma_descriptor(7),
        "prefetch_tma_descriptor: tma_desc is of type int; accepted are a TMA copy atom, a "
        "TensorMap of the DSL, a tensor of descriptors or a pointer to one. "
        "Try: cutlass.GridConstant[TensorMap] as the kernel's parameter.",
    ),
    "atom": (
        lambda a: cpasync.extract_tensormap_ptr(a.desc),
        "extract_tensormap_ptr: tma_atom is of type _Pointer; accepted are copy atoms of TMA. "
        "Try: cute.nvgpu.cpasync.make_tiled_tma_atom.",
    ),
    "bytes-load": (
        lambda a: cpasync.tma_load(a.smem, a.gmem, a.mbar, 100),
        f"bulk_load: size is 100; {BULK.format(96)}",
    ),
    "bytes-store": (
        lambda a: cpasync.tma_store(a.gmem, a.smem, 0),
        f"bulk_store: size is 0; {BULK.format(16)}",
    ),
    "bytes-unaligned": (
        lambda a: cpasync.bulk_store(unaligned(a), a.smem, 16),
        "bulk_store: dst is the address 4100, no multiple of 16. "
        "Try: an offset of a multiple of 16 bytes.",
    ),
    "reduction": (
        lambda a: cpasync.tma_reduce(a.desc, a.smem, 0, op="mul"),
        "tma_reduce: op is 'mul'; accepted are 'add', 'min', 'max', 'inc', 'dec', 'and', 'or', "
        "'xor'. Try: 'add'.",
    ),
    "store-wait": (
        lambda a: cpasync.tma_store_wait(a.n),
        "tma_store_wait: count is known only to the running kernel; accepted are constants of at "
        "least 0. Try: 0, which waits for all groups.",
    ),
    "arrivals": (
        lambda a: cpasync.mbarrier_init(a.mbar, 0),
        "mbarrier_init: arrive_count is 0; accepted are 1 to 1048575. "
        "Try: 1, or several phases.",
    ),
    "transactions": (
        lambda a: cpasync.arrive_and_expect_tx(a.mbar, 1 << 20),
        "arrive_and_expect_tx: tx_count is 1048576; accepted are 0 to 1048575. "
        "Try: 1048575, or several phases.",
    ),
    "barrier-elsewhere": (
        lambda a: cpasync.mbarrier_expect_tx(a.gmem, 16),
        "mbarrier_expect_tx: mbar_ptr lies in gmem; accepted is shared memory. "
        "Try: the pointers in the order of mbarrier_expect_tx's arguments.",
    ),
    "barrier-unaligned": (
        lambda a: cpasync.mbarrier_arrive(a.smem + 1),
        "mbarrier_arrive: mbar_ptr is 4 bytes past an aligned address, no multiple of 8. "
        "Try: an offset of a multiple of 8 bytes.",
    ),
    "rank": (
        lambda a: cpasync.mbarrier_arrive(a.mbar, 16),
        "mbarrier_arrive: cta_id is 16; accepted are ranks in the cluster, 0 to 15. "
        "Try: None for this block.",
    ),
    "phase": (
        lambda a: cpasync.mbarrier_wait(a.mbar, 3),
        "mbarrier_wait: phase is 3; accepted are the parities 0 and 1. Try: 1.",
    ),
    "time": (
        lambda a: cpasync.mbarrier_wait(a.mbar, 0, -1),
        "mbarrier_wait: timeout_ns is -1; accepted are 0 to 2147483647. Try: 10_000_000.",
    ),
    "scope": (
        lambda a: cpasync.mbarrier_wait(a.mbar, 0, scope="gpu"),
        "mbarrier_wait: scope is 'gpu'; accepted are 'cta' and 'cluster'. Try: 'cta'.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_wrong_call(kernels, name):
    body, text = BAD[name]
    with pytest.raises(OptionError) as caught:
        kernels.ptx_of(body, "sm_90a")
    assert str(caught.value) == text


NEED_TMA = {
    "tma_load": lambda a: cpasync.tma_load(a.desc, a.mbar, a.smem, 0),
    "bulk_load": lambda a: cpasync.tma_load(a.smem, a.gmem, a.mbar, 16),
    "tma_store": lambda a: cpasync.tma_store(a.desc, a.smem, 0),
    "bulk_store": lambda a: cpasync.tma_store(a.gmem, a.smem, 16),
    "tma_reduce": lambda a: cpasync.tma_reduce(a.desc, a.smem, 0),
    "tma_store_arrive": lambda a: cpasync.tma_store_arrive(),
    "tma_store_wait": lambda a: cpasync.tma_store_wait(0),
    "prefetch_tma_descriptor": lambda a: cpasync.prefetch_tma_descriptor(a.desc),
    "mbarrier_expect_tx": lambda a: cpasync.mbarrier_expect_tx(a.mbar, 16),
    "arrive_and_expect_tx": lambda a: cpasync.arrive_and_expect_tx(a.mbar, 16),
    "mbarrier_arrive with cta_id": lambda a: cpasync.mbarrier_arrive(a.mbar, 0),
    "mbarrier_wait": lambda a: cpasync.mbarrier_wait(a.mbar, 0),
    "fence_proxy_async": lambda a: cpasync.fence_proxy_async(),
    "fence_barrier_init": lambda a: cpasync.fence_barrier_init(),
}


@pytest.mark.parametrize("name", NEED_TMA)
def test_architecture_without_tma(kernels, name):
    with pytest.raises(UnsupportedError) as caught:
        kernels.ptx_of(NEED_TMA[name], "sm_80")
    assert str(caught.value) == (
        f"{name}: compiled for sm_80, which has no TMA; it begins with sm_90. Try: cp_async_gs, "
        "or the option --gpu-arch sm_90a of cute.compile."
    )


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
def test_architecture_without_pairs_of_blocks(kernels, arch):
    with pytest.raises(UnsupportedError) as caught:
        kernels.ptx_of(lambda a: cpasync.tma_load(a.desc, a.mbar, a.smem, 0, True), arch)
    assert str(caught.value) == (
        f"tma_load: use_2cta is compiled for {arch}, which has no pairs of CTAs; sm_100a, sm_103a "
        "and sm_110a have. Try: multicast_mask, or use_2cta=False."
    )


def printed(ptx):
    """The texts of the kernel's assertions, which PTX holds as numbers before the entry."""
    return {
        text.rsplit("Assertion Error: ", 1)[1].rstrip("\0")
        for text in (
            bytes(int(n) for n in numbers.split(",")).decode()
            for numbers in re.findall(r"printfFormat_\d+\[\d+\] = \{([\d, ]+)\}", ptx)
        )
    }


ASSERTED = {
    "address": (
        lambda a: cpasync.cp_async_gs(16, a.smem, a.gmem + a.n),
        {"cp_async_gs: src is not a multiple of 16 bytes"},
    ),
    "both-addresses": (
        lambda a: cpasync.bulk_store(a.gmem + a.n, a.smem + a.n, 16),
        {
            "bulk_store: dst is not a multiple of 16 bytes",
            "bulk_store: src is not a multiple of 16 bytes",
        },
    ),
    "bulk-size": (
        lambda a: cpasync.bulk_store(a.gmem, a.smem, a.n),
        {"bulk_store: size is not a multiple of 16 bytes", "bulk_store: size is not positive"},
    ),
    "src-size": (
        lambda a: cpasync.cp_async_shared_global(a.smem, a.gmem, 16, "cg", src_size=a.n),
        {"cp_async_shared_global: src_size is not in 0 to 16"},
    ),
    "box-address": (
        lambda a: cpasync.tma_store(a.desc, a.smem + a.n, 0),
        {"tma_store: smem_ptr is not a multiple of 128 bytes"},
    ),
    "bytes": (
        lambda a: cpasync.arrive_and_expect_tx(a.mbar, a.n),
        {"arrive_and_expect_tx: tx_count is not in 0 to 1048575"},
    ),
    "phase": (
        lambda a: cpasync.mbarrier_wait(a.mbar, a.n),
        {"mbarrier_wait: phase is neither 0 nor 1"},
    ),
    "never-read": (
        lambda a: cpasync.cp_async_gs_conditional(16, a.smem, a.gmem + a.n, False),
        set(),
    ),
    "read-by-some": (
        lambda a: cpasync.cp_async_gs_conditional(16, a.smem, a.gmem + a.n, a.n < 9),
        {"cp_async_gs_conditional: src is not a multiple of 16 bytes"},
    ),
    "all-known": (lambda a: cpasync.cp_async_gs(16, a.smem + 4, a.gmem + 8), set()),
}


@pytest.mark.parametrize("name", ASSERTED)
def test_debug_mode_checks_what_only_the_running_kernel_knows(kernels, name):
    body, texts = ASSERTED[name]
    checked = kernels.module_of(body, "sm_90a", "--enable-assertions")
    assert printed(checked) == texts
    assert checked.count("trap;") == len(texts)
    plain = kernels.module_of(body, "sm_90a")
    assert printed(plain) == set()
    assert "trap;" not in plain
