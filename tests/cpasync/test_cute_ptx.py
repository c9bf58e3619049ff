"""Every function compiled with no GPU: the instruction, its operands, and the DSL's own PTX."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tileloom import cpasync
from tileloom.errors import UnsupportedError

FAMILIES = ("cp.", "mbarrier.", "fence.", "prefetch.", "mapa.")
AMPERE, HOPPER, BLACKWELL = ("sm_80", "sm_90a", "sm_100a"), ("sm_90a", "sm_100a"), ("sm_100a",)

TENSOR = "cp.async.bulk.tensor"
REDUCE = "cp.reduce.async.bulk.tensor"
LOAD = "shared::cta.global.tile.mbarrier::complete_tx::bytes"
CLUSTER = "shared::cluster.global.tile.mbarrier::complete_tx::bytes"
STORE = "global.shared::cta.tile.bulk_group"
WAIT = "try_wait.parity.acquire.cta.shared::cta.b64"
HINT = ".L2::cache_hint"
NORMAL, FIRST, LAST = 0x1000000000000000, 0x12F0000000000000, 0x14F0000000000000
# The even block of a pair: the address without bit 24, and without those that alignment clears.
EVEN = f"and(mbar, {0xFEFFFFF8 - (1 << 32)})"


@dataclass(frozen=True)
class Case:
    """A call, the architectures that have it, what it must become, and the same by the DSL."""

    call: Callable[[Any], Any]
    archs: tuple[str, ...]
    expected: list[str]
    direct: Callable[[Any, Any], Any]


def zero_filled(prims, a):
    import cutlass

    size = cutlass.select_(a.n < 3, cutlass.Int32(16), cutlass.Int32(0))
    prims.cp_async_shared_global(a.smem, a.gmem, 16, "cg", cp_size=size)


def remote_arrive(prims, a):
    prims.mbarrier_arrive(prims.mapa(a.mbar, a.n))


COPY = "cp.async.{}.shared.global [smem], [gmem], {};"
CASES = {
    "gs-16": Case(
        lambda a: cpasync.cp_async_gs(16, a.smem, a.gmem),
        AMPERE,
        [COPY.format("cg", "16")],
        lambda p, a: p.cp_async_shared_global(a.smem, a.gmem, 16, "cg"),
    ),
    "gs-8": Case(
        lambda a: cpasync.cp_async_gs(8, a.smem, a.gmem),
        AMPERE,
        [COPY.format("ca", "8")],
        lambda p, a: p.cp_async_shared_global(a.smem, a.gmem, 8, "ca"),
    ),
    "gs-4-offset": Case(
        lambda a: cpasync.cp_async_gs(4, a.smem + 3, a.gmem + 1),
        AMPERE,
        ["cp.async.ca.shared.global [smem+12], [gmem+4], 4;"],
        lambda p, a: p.cp_async_shared_global(a.smem + 3, a.gmem + 1, 4, "ca"),
    ),
    "conditional": Case(
        lambda a: cpasync.cp_async_gs_conditional(16, a.smem, a.gmem, a.n < 3),
        AMPERE,
        [COPY.format("cg", "16, selp(16, 0, setp(n, 3))")],
        zero_filled,
    ),
    "conditional-true": Case(
        lambda a: cpasync.cp_async_gs_conditional(8, a.smem, a.gmem, True),
        AMPERE,
        [COPY.format("ca", "8")],
        lambda p, a: p.cp_async_shared_global(a.smem, a.gmem, 8, "ca"),
    ),
    "conditional-false": Case(
        lambda a: cpasync.cp_async_gs_conditional(4, a.smem, a.gmem, False),
        AMPERE,
        [COPY.format("ca", "4, 0")],
        lambda p, a: p.cp_async_shared_global(a.smem, a.gmem, 4, "ca", cp_size=0),
    ),
    "raw-src-size-0": Case(
        lambda a: cpasync.cp_async_shared_global(a.smem, a.gmem, 16, "cg", src_size=0),
        AMPERE,
        [COPY.format("cg", "16, 0")],
        lambda p, a: p.cp_async_shared_global(a.smem, a.gmem, 16, "cg", cp_size=0),
    ),
    "raw-src-size-runtime": Case(
        lambda a: cpasync.cp_async_shared_global(a.smem, a.gmem, 16, "ca", src_size=a.n),
        AMPERE,
        [COPY.format("ca", "16, n")],
        lambda p, a: p.cp_async_shared_global(a.smem, a.gmem, 16, "ca", cp_size=a.n),
    ),
    "commit-wait": Case(
        lambda a: (cpasync.cp_async_commit(), cpasync.cp_async_wait(2)),
        AMPERE,
        ["cp.async.commit_group;", "cp.async.wait_group 2;"],
        lambda p, a: (p.cp_async_commit_group(), p.cp_async_wait_group(2)),
    ),
    "load-1d-bare": Case(
        lambda a: cpasync.tma_load(a.desc, a.mbar, a.smem, a.n),
        HOPPER,
        [f"{TENSOR}.1d.{LOAD}{HINT} [smem], [desc, {{n}}], [mbar], {NORMAL};"],
        lambda p, a: p.cp_async_bulk_tensor_shared_cta_global(
            a.smem, a.desc, [a.n], a.mbar, l2_cache_hint=NORMAL
        ),
    ),
    "load-5d-no-hint": Case(
        lambda a: cpasync.tma_load(
            a.desc, a.mbar + 1, a.smem, (a.n, 1, 2, 3, 4), eviction_kind=None
        ),
        HOPPER,
        [f"{TENSOR}.5d.{LOAD} [smem], [desc, {{n, 1, 2, 3, 4}}], [mbar+8];"],
        lambda p, a: p.cp_async_bulk_tensor_shared_cta_global(
            a.smem, a.desc, [a.n, 1, 2, 3, 4], a.mbar + 1
        ),
    ),
    "load-last": Case(
        lambda a: cpasync.tma_load(a.desc, a.mbar, a.smem, (a.n, 0), eviction_kind="evict_last"),
        HOPPER,
        [f"{TENSOR}.2d.{LOAD}{HINT} [smem], [desc, {{n, 0}}], [mbar], {LAST};"],
        lambda p, a: p.cp_async_bulk_tensor_shared_cta_global(
            a.smem, a.desc, [a.n, 0], a.mbar, l2_cache_hint=LAST
        ),
    ),
    "load-multicast": Case(
        lambda a: cpasync.tma_load(
            a.desc, a.mbar, a.smem, (a.n, 0), multicast_mask=3, eviction_kind="first"
        ),
        HOPPER,
        [
            f"{TENSOR}.2d.{CLUSTER}.multicast::cluster{HINT} [smem], [desc, {{n, 0}}], [mbar], 3, "
            f"{FIRST};"
        ],
        lambda p, a: p.cp_async_bulk_tensor_shared_cluster_global(
            a.smem, a.desc, [a.n, 0], a.mbar, [], multicast_mask=3, l2_cache_hint=FIRST
        ),
    ),
    "load-multicast-runtime": Case(
        lambda a: cpasync.tma_load(
            a.desc, a.mbar, a.smem, (0, 0), multicast_mask=a.n, eviction_kind=None
        ),
        HOPPER,
        [f"{TENSOR}.2d.{CLUSTER}.multicast::cluster [smem], [desc, {{0, 0}}], [mbar], n;"],
        lambda p, a: p.cp_async_bulk_tensor_shared_cluster_global(
            a.smem, a.desc, [0, 0], a.mbar, [], multicast_mask=a.n
        ),
    ),
    "load-im2col": Case(
        lambda a: cpasync.tma_load(a.desc, a.mbar, a.smem, (a.n, 0, 1, 2), im2col_offsets=(1, a.n)),
        HOPPER,
        [
            f"{TENSOR}.4d.{LOAD.replace('tile', 'im2col')}{HINT} [smem], [desc, {{n, 0, 1, 2}}], "
            f"[mbar], {{1, n}}, {NORMAL};"
        ],
        lambda p, a: p.cp_async_bulk_tensor_shared_cta_global(
            a.smem, a.desc, [a.n, 0, 1, 2], a.mbar, [1, a.n], l2_cache_hint=NORMAL, mode="im2col"
        ),
    ),
    "load-pair": Case(
        lambda a: cpasync.tma_load(a.desc, a.mbar, a.smem, (a.n, 0), use_2cta=True),
        BLACKWELL,
        [f"{TENSOR}.2d.{CLUSTER}{HINT}.cta_group::2 [smem], [desc, {{n, 0}}], [{EVEN}], {NORMAL};"],
        lambda p, a: p.cp_async_bulk_tensor_shared_cluster_global(
            a.smem, a.desc, [a.n, 0], barriers(a.mbar), [], l2_cache_hint=NORMAL, group="cta_2"
        ),
    ),
    "load-pair-multicast-im2col": Case(
        lambda a: cpasync.tma_load(
            a.desc, a.mbar, a.smem, (a.n, 0, 0), True, (5,), multicast_mask=3, eviction_kind=None
        ),
        BLACKWELL,
        [
            f"{TENSOR}.3d.{CLUSTER.replace('tile', 'im2col')}.multicast::cluster.cta_group::2 "
            f"[smem], [desc, {{n, 0, 0}}], [{EVEN}], {{5}}, 3;"
        ],
        lambda p, a: p.cp_async_bulk_tensor_shared_cluster_global(
            a.smem, a.desc, [a.n, 0, 0], barriers(a.mbar), [5], mode="im2col", multicast_mask=3,
            group="cta_2",
        ),
    ),
    "load-bytes": Case(
        lambda a: cpasync.tma_load(a.smem, a.gmem, a.mbar, 1024),
        HOPPER,
        [f"cp.async.bulk.{CLUSTER.replace('.tile', '')} [smem], [gmem], 1024, [mbar];"],
        lambda p, a: p.cp_async_bulk_shared_cluster_global(a.smem, a.gmem, a.mbar, 1024),
    ),
    "bulk-load": Case(
        lambda a: cpasync.bulk_load(
            a.smem, a.gmem, a.n, a.mbar, multicast_mask=3, eviction_kind="last"
        ),
        HOPPER,
        [
            f"cp.async.bulk.{CLUSTER.replace('.tile', '')}.multicast::cluster{HINT} "
            f"[smem], [gmem], n, [mbar], 3, {LAST};"
        ],
        lambda p, a: p.cp_async_bulk_shared_cluster_global(
            a.smem, a.gmem, a.mbar, a.n, multicast_mask=short(3), l2_cache_hint=LAST
        ),
    ),
    "store-1d-bare": Case(
        lambda a: cpasync.tma_store(a.desc, a.smem, a.n),
        HOPPER,
        [f"{TENSOR}.1d.{STORE} [desc, {{n}}], [smem];"],
        lambda p, a: p.cp_async_bulk_tensor_global_shared_cta(a.desc, a.smem, [a.n], mode="tile"),
    ),
    "store-5d-first": Case(
        lambda a: cpasync.tma_store(a.desc, a.smem, (a.n, 1, 2, 3, 4), eviction_kind="first"),
        HOPPER,
        [f"{TENSOR}.5d.{STORE}{HINT} [desc, {{n, 1, 2, 3, 4}}], [smem], {FIRST};"],
        lambda p, a: p.cp_async_bulk_tensor_global_shared_cta(
            a.desc, a.smem, [a.n, 1, 2, 3, 4], l2_cache_hint=FIRST
        ),
    ),
    "store-im2col": Case(
        lambda a: cpasync.tma_store(a.desc, a.smem, (a.n, 1, 2), im2col=True),
        HOPPER,
        [f"{TENSOR}.3d.{STORE.replace('tile', 'im2col_no_offs')} [desc, {{n, 1, 2}}], [smem];"],
        lambda p, a: p.cp_async_bulk_tensor_global_shared_cta(
            a.desc, a.smem, [a.n, 1, 2], mode="im2col"
        ),
    ),
    "store-bytes": Case(
        lambda a: cpasync.tma_store(a.gmem, a.smem, 64),
        HOPPER,
        ["cp.async.bulk.global.shared::cta.bulk_group [gmem], [smem], 64;"],
        lambda p, a: p.cp_async_bulk_global_shared_cta(a.gmem, a.smem, 64),
    ),
    "bulk-store": Case(
        lambda a: cpasync.bulk_store(a.gmem, a.smem, a.n, eviction_kind="first"),
        HOPPER,
        [f"cp.async.bulk.global.shared::cta.bulk_group{HINT} [gmem], [smem], n, {FIRST};"],
        lambda p, a: p.cp_async_bulk_global_shared_cta(a.gmem, a.smem, a.n, l2_cache_hint=FIRST),
    ),
    "reduce-1d-bare": Case(
        lambda a: cpasync.tma_reduce(a.desc, a.smem, a.n),
        HOPPER,
        [f"{REDUCE}.1d.global.shared::cta.add.tile.bulk_group [desc, {{n}}], [smem];"],
        lambda p, a: p.cp_async_bulk_tensor_reduce(a.desc, a.smem, "add", [a.n]),
    ),
    "reduce-im2col-last": Case(
        lambda a: cpasync.tma_reduce(
            a.desc, a.smem, (a.n, 0, 0), op="max", im2col=True, eviction_kind=LAST
        ),
        HOPPER,
        [
            f"{REDUCE}.3d.global.shared::cta.max.im2col_no_offs.bulk_group{HINT} "
            f"[desc, {{n, 0, 0}}], [smem], {LAST};"
        ],
        lambda p, a: p.cp_async_bulk_tensor_reduce(
            a.desc, a.smem, "max", [a.n, 0, 0], mode="im2col", l2_cache_hint=LAST
        ),
    ),
    "store-groups": Case(
        lambda a: (
            cpasync.tma_store_arrive(),
            cpasync.tma_store_wait(1),
            cpasync.tma_store_wait(0, read=True),
        ),
        HOPPER,
        [
            "cp.async.bulk.commit_group;",
            "cp.async.bulk.wait_group 1;",
            "cp.async.bulk.wait_group.read 0;",
        ],
        lambda p, a: (
            p.cp_async_bulk_commit_group(),
            p.cp_async_bulk_wait_group(1),
            p.cp_async_bulk_wait_group(0, read=True),
        ),
    ),
    "prefetch": Case(
        lambda a: cpasync.prefetch_tma_descriptor(a.desc),
        HOPPER,
        ["prefetch.tensormap [desc];"],
        lambda p, a: p.prefetch_tensormap(a.desc),
    ),
    "init": Case(
        lambda a: (cpasync.mbarrier_init(a.mbar, 1), cpasync.mbarrier_init(a.mbar + 1, a.n)),
        AMPERE,
        ["mbarrier.init.shared.b64 [mbar], 1;", "mbarrier.init.shared.b64 [mbar+8], n;"],
        lambda p, a: (p.mbarrier_init(a.mbar, 1), p.mbarrier_init(a.mbar + 1, a.n)),
    ),
    "expect": Case(
        lambda a: cpasync.mbarrier_expect_tx(a.mbar, a.n),
        HOPPER,
        ["mbarrier.expect_tx.relaxed.cta.shared.b64 [mbar], n;"],
        lambda p, a: p.mbarrier_expect_tx(a.mbar, a.n),
    ),
    "arrive-expect": Case(
        lambda a: cpasync.arrive_and_expect_tx(a.mbar, 128),
        HOPPER,
        ["mbarrier.arrive.expect_tx.shared.b64 %rd1, [mbar], 128;"],
        lambda p, a: p.mbarrier_arrive_expect_tx(a.mbar, 128),
    ),
    "arrive": Case(
        lambda a: cpasync.mbarrier_arrive(a.mbar),
        AMPERE,
        ["mbarrier.arrive.shared.b64 %rd1, [mbar];"],
        lambda p, a: p.mbarrier_arrive(a.mbar),
    ),
    "arrive-remote": Case(
        lambda a: cpasync.mbarrier_arrive(a.mbar, a.n),
        HOPPER,
        [
            "mapa.shared::cluster.u32 %r3, mbar, n;",
            "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r3];",
        ],
        remote_arrive,
    ),
    "cp-async-arrive": Case(
        lambda a: cpasync.mbarrier_cp_async_arrive(a.mbar),
        AMPERE,
        ["cp.async.mbarrier.arrive.shared.b64 [mbar];"],
        lambda p, a: p.cp_async_mbarrier_arrive(a.mbar),
    ),
    "cp-async-arrive-noinc": Case(
        lambda a: cpasync.mbarrier_cp_async_arrive_noinc(a.mbar),
        AMPERE,
        ["cp.async.mbarrier.arrive.noinc.shared.b64 [mbar];"],
        lambda p, a: p.cp_async_mbarrier_arrive(a.mbar, noinc=True),
    ),
    "fences": Case(
        lambda a: (cpasync.fence_proxy_async(), cpasync.fence_barrier_init()),
        HOPPER,
        ["fence.proxy.async.shared::cta;", "fence.mbarrier_init.release.cluster;"],
        lambda p, a: (
            p.fence_proxy("async_shared", space=p.SharedSpace.shared_cta),
            p.fence_mbarrier_init(),
        ),
    ),
}  # fmt: skip


def barriers(pointer):
    """An mbarrier as an array, which the DSL's function for pairs of blocks asks for."""
    import cutlass

    return cutlass.Array(
        pointer.to_llvm_ptr(), dtype=cutlass.Uint64, addrspace=cutlass.AddressSpace.smem
    )


def short(mask):
    import cutlass

    return cutlass.Int16(mask)


@pytest.mark.parametrize(
    ("name", "arch"), [(name, arch) for name, case in CASES.items() for arch in case.archs]
)
def test_instruction_and_operands(kernels, name, arch):
    ptx = kernels.ptx_of(CASES[name].call, arch)
    assert kernels.instructions(ptx, *FAMILIES) == CASES[name].expected


@pytest.mark.full
@pytest.mark.parametrize("arch", ["sm_90", "sm_100f", "sm_103a", "sm_120a"])
@pytest.mark.parametrize("name", CASES)
def test_further_architectures(kernels, name, arch):
    case = CASES[name]
    if case.archs == BLACKWELL and arch in ("sm_90", "sm_120a"):
        with pytest.raises(UnsupportedError, match="which has no pairs of CTAs"):
            kernels.ptx_of(case.call, arch)
        return
    assert kernels.instructions(kernels.ptx_of(case.call, arch), *FAMILIES) == case.expected


@pytest.mark.parametrize("name", CASES)
def test_same_ptx_as_the_dsl_called_directly(kernels, name):
    from cutlass.experimental import primitives

    case = CASES[name]
    arch = case.archs[-1]
    direct = kernels.ptx_of(lambda a: case.direct(primitives, a), arch)
    ours = kernels.ptx_of(lambda a: case.call(a), arch)
    assert kernels.instructions(direct, *FAMILIES) != []
    assert ours == direct


@pytest.mark.parametrize("op", ["add", "min", "max", "inc", "dec", "and", "or", "xor"])
def test_every_reduction(kernels, op):
    ptx = kernels.ptx_of(lambda a: cpasync.tma_reduce(a.desc, a.smem, (a.n, 0), op=op), "sm_90a")
    expected = f"{REDUCE}.2d.global.shared::cta.{op}.tile.bulk_group"
    assert kernels.instructions(ptx, "cp.") == [f"{expected} [desc, {{n, 0}}], [smem];"]


@pytest.mark.parametrize("arch", HOPPER)
def test_wait_is_a_loop_around_try_wait(kernels, arch):
    ptx = kernels.ptx_of(lambda a: cpasync.mbarrier_wait(a.mbar, a.n), arch)
    loop = re.search(r"^(\$L\w+):\n(.*?)bra \s*\1;$", ptx, re.MULTILINE | re.DOTALL)
    assert loop is not None, "no branch back"
    body = [line.split()[0] for line in loop[2].splitlines()]
    # The last word is the guard of the branch: back while the wait is not done.
    assert body[-3:] == [f"mbarrier.{WAIT}", "not.pred", "@%p2"]
    assert set(body[:-3]) <= {"mov.b32"}
    assert "not.pred \t%p2, %p1;" in loop[2]
    expected = f"mbarrier.{WAIT} %p1, [mbar], n, 10000000;"
    assert kernels.instructions(ptx, "mbarrier.") == [expected]


def test_wait_with_another_time(kernels):
    ptx = kernels.ptx_of(lambda a: cpasync.mbarrier_wait(a.mbar, 1, 500), "sm_90a")
    assert ", [mbar], 1, 500;" in kernels.instructions(ptx, "mbarrier.")[0]


@pytest.mark.parametrize("arch", HOPPER)
def test_wait_for_the_whole_cluster(kernels, arch):
    ptx = kernels.ptx_of(lambda a: cpasync.mbarrier_wait(a.mbar, a.n, scope="cluster"), arch)
    expected = WAIT.replace("acquire.cta", "acquire.cluster")
    assert kernels.instructions(ptx, "mbarrier.") == [
        f"mbarrier.{expected} %p1, [mbar], n, 10000000;"
    ]


@pytest.mark.parametrize("arch", AMPERE)
def test_copy_without_zero_fill_is_behind_a_branch(kernels, arch):
    def body(a):
        cpasync.cp_async_gs_conditional(16, a.smem, a.gmem, a.n < 3, zero_fill=False)

    ptx = kernels.ptx_of(body, arch)
    lines = [line.strip() for line in ptx.splitlines() if line.strip()]
    [copy] = [i for i, line in enumerate(lines) if line.startswith("cp.async")]
    assert lines[copy].endswith(", 16;")
    target = lines[copy - 1].split()[-1].rstrip(";")
    assert " bra " in lines[copy - 1].replace("\t", " ")
    assert lines[copy + 1] == f"{target}:"


def test_copy_without_zero_fill_and_a_constant_condition(kernels):
    def body(a):
        cpasync.cp_async_gs_conditional(16, a.smem, a.gmem, False, zero_fill=False)
        cpasync.cp_async_gs_conditional(8, a.smem, a.gmem, True, zero_fill=False)

    ptx = kernels.ptx_of(body, "sm_80")
    assert kernels.instructions(ptx, "cp.") == [COPY.format("ca", "8")]


def test_generated_policy_of_a_store(kernels):
    """TileLang's generator writes `eviction_kind=nvvm.EvictKind.FIRST`, which its file refuses."""
    from cutlass._mlir.dialects import nvvm

    def body(a):
        cpasync.tma_store(a.desc, a.smem, (a.n, 0), eviction_kind=nvvm.EvictKind.FIRST)

    [store] = kernels.instructions(kernels.ptx_of(body, "sm_90a"), "cp.")
    assert store.endswith(f"[desc, {{n, 0}}], [smem], {FIRST};")


def test_policy_of_the_running_kernel(kernels):
    import cutlass

    def body(a):
        word = cutlass.Int64(a.n)
        cpasync.tma_load(a.desc, a.mbar, a.smem, (a.n, 0), eviction_kind=word)

    [load] = kernels.instructions(kernels.ptx_of(body, "sm_90a"), "cp.")
    assert load.endswith("[smem], [desc, {n, 0}], [mbar], n;")
