"""Planted bugs: for each, a change to a correct case, and what the emulator must say about it.

A bug is a piece of a case's text and what stands in its place. The report must have the right kind and
quote the right line: `line` is a part of the statement's text. For deadlocks any waiting line counts.
"""

# ruff: noqa: E501
from __future__ import annotations

from dataclasses import dataclass

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from tileloom.emulator.dialect import CLUSTER_MEETS_AFTER_INIT, VERSION


@dataclass(frozen=True)
class Bug:
    name: str
    case: str
    old: str
    new: str
    kind: str
    line: str
    level: str = "ttgir"
    severity: str = "error"

    @property
    def id(self):
        return f"{self.case}-{self.name}"


def _bugs(case, *rows):
    return [Bug(row[0], case, *row[1:]) for row in rows]


PIPELINED = _bugs(
    "pipelined_gemm",
    ("no-full-wait", "        mbarrier.wait(full.index(slot), (k // STAGES) & 1)\n", "",
     "race", "acc = warpgroup_mma(a_s"),
    ("wait-keeps-two", "warpgroup_mma_wait(0, deps=[acc])\n        if k", "warpgroup_mma_wait(2, deps=[acc])\n        if k",
     "race", "tma_load(a_desc"),
    ("wrong-phase", "(k // STAGES) & 1", "((k // STAGES) & 1) ^ 1", "race|deadlock", "slot"),
    ("phase-never-flips", "(k // STAGES) & 1)", "0)", "barrier", "mbarrier.wait(full"),
    ("expects-too-little", "a_desc.block_type.nbytes + b_desc.block_type.nbytes", "a_desc.block_type.nbytes",
     "race", "acc = warpgroup_mma(a_s"),
    ("expects-too-much", "a_desc.block_type.nbytes + b_desc.block_type.nbytes", "2 * a_desc.block_type.nbytes + b_desc.block_type.nbytes",
     "deadlock", "mbarrier.wait(full"),
    ("no-expect", "    mbarrier.expect(full.index(slot), a_desc.block_type.nbytes + b_desc.block_type.nbytes)\n", "",
     "deadlock", "mbarrier.wait(full"),
    ("no-load-of-b", "    tma_load(b_desc, [k * BK, col], full.index(slot), b_s.index(slot))\n", "",
     "deadlock", "mbarrier.wait(full"),
    ("count-two", "mbarrier.init(full.index(i), count=1)", "mbarrier.init(full.index(i), count=2)",
     "deadlock", "mbarrier.wait(full"),
    ("no-init", "        mbarrier.init(full.index(i), count=1)\n", "        mbarrier.init(full.index(i), count=1) if i > 0 else None\n",
     "barrier", "mbarrier.expect(full"),
    ("init-twice", "        mbarrier.init(full.index(i), count=1)\n",
     "        mbarrier.init(full.index(i), count=1)\n        mbarrier.init(full.index(i), count=1)\n",
     "barrier", "mbarrier.init(full"),
    ("no-store-fence", "    c_s.store(acc.to(dtype))\n    fence_async_shared()\n", "    c_s.store(acc.to(dtype))\n",
     "proxy", "tma_store(c_desc"),
    ("fence-before-store", "    c_s.store(acc.to(dtype))\n    fence_async_shared()\n",
     "    fence_async_shared()\n    c_s.store(acc.to(dtype))\n", "proxy", "tma_store(c_desc"),
    ("store-before-registers", "    c_s.store(acc.to(dtype))\n", "", "uninitialized", "tma_store(c_desc"),
    ("no-store-wait", "    tma.store_wait(0)\n", "", "exit", "tma_store(c_desc"),
    ("store-wait-keeps-one", "    tma.store_wait(0)\n", "    tma.store_wait(1)\n", "exit", "tma_store(c_desc"),
    ("slot-of-a-is-wrong", "full.index(slot), a_s.index(slot))", "full.index(slot), a_s.index((slot + 1) % STAGES))",
     "uninitialized", "acc = warpgroup_mma(a_s"),
    ("slot-out-of-range", "acc = warpgroup_mma(a_s.index(slot)", "acc = warpgroup_mma(a_s.index(slot + 1)",
     "race|out-of-bounds", "acc = warpgroup_mma(a_s"),
    ("fetches-one-too-far", "k + STAGES - 1, row, col", "k + STAGES, row, col", "deadlock", "mbarrier.wait(full"),
    ("invalidates-early", "    c_s.store(acc.to(dtype))\n",
     "    c_s.store(acc.to(dtype))\n    mbarrier.expect(full.index(0), 4096)\n    tma_load(a_desc, [row, 0], full.index(0), a_s.index(0))\n",
     "barrier", "mbarrier.invalidate(full"),
)  # fmt: skip

SPECIALISED = _bugs(
    "specialised_gemm",
    ("no-full-wait", "            mbarrier.wait(full.index(slot), phase)\n", "", "race|uninitialized", "acc = warpgroup_mma(a_s"),
    ("no-empty-wait", "            mbarrier.wait(empty.index(slot), phase ^ 1)\n", "", "race|barrier", "("),
    ("empty-phase", "mbarrier.wait(empty.index(slot), phase ^ 1)", "mbarrier.wait(empty.index(slot), phase)",
     "deadlock", "mbarrier.wait(empty"),
    ("full-phase", "mbarrier.wait(full.index(slot), phase)", "mbarrier.wait(full.index(slot), phase ^ 1)",
     "race|uninitialized", "acc = warpgroup_mma(a_s"),
    ("released-while-in-flight", "warpgroup_mma_wait(1, deps=[acc])", "warpgroup_mma_wait(2, deps=[acc])",
     "race", "tma_load(a_desc"),
    ("released-one-early", "empty.index((count - 1) % STAGES), count=1, pred=k > 0)", "empty.index(slot), count=1, pred=k > 0)",
     "deadlock", "mbarrier.wait("),
    ("last-slot-never-released", "        mbarrier.arrive(empty.index((count - 1) % STAGES), count=1)\n", "",
     "deadlock", "mbarrier.wait(empty"),
    ("released-twice", "        mbarrier.arrive(empty.index((count - 1) % STAGES), count=1)\n",
     "        mbarrier.arrive(empty.index((count - 1) % STAGES), count=2)\n", "barrier", "mbarrier.arrive(empty"),
    ("wrong-slot-released", "empty.index((count - 1) % STAGES), count=1)\n        tma", "empty.index(count % STAGES), count=1)\n        tma",
     "barrier", "mbarrier.wait(empty"),
    ("loads-one-too-many", "        for k in range(steps):\n            slot = count % STAGES\n            phase = (count // STAGES) & 1\n            mbarrier.wait(empty",
     "        for k in range(steps + (tile + gl.num_programs(0) >= tiles).to(gl.int32)):\n            slot = count % STAGES\n            phase = (count // STAGES) & 1\n            mbarrier.wait(empty",
     "exit", "tma_load("),
    ("no-last-wgmma-wait", "        acc = warpgroup_mma_wait(0, deps=[acc])\n", "", "pending", "c_s.store(acc"),
    ("epilogue-no-fence", "        fence_async_shared()\n        tma_store", "        tma_store", "proxy", "tma_store(c_desc"),
    ("epilogue-buffer-reused", "        tma.store_wait(0)\n        c_s", "        c_s", "race", "c_s.store(acc"),
    ("epilogue-wait-too-weak", "        tma.store_wait(0)\n        c_s", "        tma.store_wait(1)\n        c_s", "race", "c_s.store(acc"),
    ("exit-before-store", "    tma.store_wait(0)\n\n\n", "\n\n", "exit", "tma_store(c_desc"),
    ("empty-count-two", "mbarrier.init(empty.index(i), count=1)", "mbarrier.init(empty.index(i), count=2)",
     "deadlock", "mbarrier.wait(empty"),
    ("one-step-too-many", "        for k in range(steps):\n            slot = count % STAGES\n            phase = (count // STAGES) & 1\n            mbarrier.wait(full",
     "        for k in range(steps + 1):\n            slot = count % STAGES\n            phase = (count // STAGES) & 1\n            mbarrier.wait(full",
     "deadlock", "mbarrier.wait(full"),
    ("producer-writes-next-slot", "full.index(slot), a_s.index(slot))", "full.index(slot), a_s.index((slot + 1) % STAGES))",
     "race|uninitialized", "("),
    ("barrier-slot-mixed", "full.index(slot), b_s.index(slot))", "full.index((slot + 1) % STAGES), b_s.index(slot))",
     "race", "acc = warpgroup_mma(a_s"),
    ("stage-count-differs", "slot = count % STAGES\n            phase = (count // STAGES) & 1\n            mbarrier.wait(full",
     "slot = count % 2\n            phase = (count // 2) & 1\n            mbarrier.wait(full", "race", "tma_load("),
    ("store-to-wrong-tile", "tile % cols * BN], c_s)", "0], c_s)", "race", "tma_store(c_desc"),
)  # fmt: skip

COPIED = _bugs(
    "copied_gemm",
    ("no-wait-group", "        async_copy.wait_group(STAGES - 2)\n", "", "race", "acc = warpgroup_mma(a_s"),
    ("wait-keeps-one-more", "wait_group(STAGES - 2)", "wait_group(STAGES - 1)", "race", "acc = warpgroup_mma(a_s"),
    ("no-commit", "    async_copy.commit_group()\n", "", "race", "acc = warpgroup_mma(a_s"),
    ("no-fence", "        fence_async_shared()\n", "", "proxy", "acc = warpgroup_mma(a_s"),
    ("fence-before-wait", "        async_copy.wait_group(STAGES - 2)\n        fence_async_shared()\n",
     "        fence_async_shared()\n        async_copy.wait_group(STAGES - 2)\n", "proxy", "acc = warpgroup_mma(a_s"),
    ("overwrites-in-flight", "        acc = warpgroup_mma_wait(0, deps=[acc])\n        fetch",
     "        acc = warpgroup_mma_wait(2, deps=[acc])\n        fetch", "race", "copy(a_s"),
    ("row-mask-missing", "gl.expand_dims(am < M, 1) & gl.expand_dims(ak < K, 0)", "gl.expand_dims(am >= 0, 1) & gl.expand_dims(ak < K, 0)",
     "out-of-bounds", "copy(a_s"),
    ("column-mask-missing", "gl.expand_dims(bk < K, 1) & gl.expand_dims(bn < N, 0)", "gl.expand_dims(bk < K + 32, 1) & gl.expand_dims(bn < N, 0)",
     "out-of-bounds", "copy(b_s"),
    ("store-mask-missing", "gl.expand_dims(rows < M, 1) &", "gl.expand_dims(rows >= 0, 1) &", "out-of-bounds", "gl.store(at"),
    ("stores-overlap", "gl.expand_dims(rows, 1) * N", "gl.expand_dims(rows // 2, 1) * N", "race", "gl.store(at"),
)  # fmt: skip

NAMED = _bugs(
    "named_barriers",
    ("no-first-arrive", "    if WG == 1:\n        named_barrier_arrive(8, 256)\n", "", "deadlock", "bar.sync 8"),
    ("no-turn-passed", "        named_barrier_arrive(9 - WG, 256)  # tileloom: harmless(turns only order the issue)\n", "", "deadlock", "bar.sync"),
    ("same-barrier", "named_barrier_sync(8 + WG, 256)", "named_barrier_sync(8, 256)", "barrier", "inline_asm"),
    ("count-too-large", "named_barrier_sync(8 + WG, 256)", "named_barrier_sync(8 + WG, 384)", "barrier", "inline_asm"),
    ("count-too-small", "        named_barrier_sync(8 + WG, 256)", "        named_barrier_sync(8 + WG, 128)", "barrier", "inline_asm"),
    ("arrival-count-of-one", "mbarrier.init(k_empty.index(i), count=256)", "mbarrier.init(k_empty.index(i), count=2)",
     "barrier", "mbarrier_arrive"),
    ("half-the-count", "mbarrier.init(k_empty.index(i), count=256)", "mbarrier.init(k_empty.index(i), count=128)",
     "race|deadlock", "(k_"),
    ("released-before-wgmma-wait", "        s = warpgroup_mma_wait(0, deps=[s])\n        named_barrier_arrive(9 - WG, 256)  # tileloom: harmless(turns only order the issue)\n        arrive_each_thread(k_empty.index(slot))\n",
     "        arrive_each_thread(k_empty.index(slot))\n        s = warpgroup_mma_wait(0, deps=[s])\n        named_barrier_arrive(9 - WG, 256)  # tileloom: harmless(turns only order the issue)\n",
     "race", "tma_load(k_desc"),
    ("v-released-too-early", "        acc = warpgroup_mma_wait(0, deps=[acc])\n        arrive_each_thread(v_empty.index(slot))\n",
     "        arrive_each_thread(v_empty.index(slot))\n        acc = warpgroup_mma_wait(0, deps=[acc])\n", "race", "tma_load(v_desc"),
    ("no-q-wait", "    mbarrier.wait(q_full.index(WG), 0)\n", "", "race", "s = warpgroup_mma(q"),
    ("no-v-wait", "        mbarrier.wait(v_full.index(slot), phase)\n", "", "race", "acc = warpgroup_mma(p"),
    ("k-never-released", "        arrive_each_thread(k_empty.index(slot))\n", "", "deadlock", "mbarrier.wait(k_empty"),
    ("output-no-fence", "    fence_async_shared()\n    tma_store", "    tma_store", "proxy", "tma_store(o_desc"),
    ("both-store-to-one-tile", "128 + WG * 64, 0], q_s.index(WG))\n    tma", "128, 0], q_s.index(WG))\n    tma", "race", "tma_store(o_desc"),
    ("output-over-other-q", "q_s.index(WG).reshape([64, D]).store", "q_s.index(1 - WG).reshape([64, D]).store", "race", ".store(acc"),
    ("s-used-before-wait", "        s = warpgroup_mma_wait(0, deps=[s])\n        named", "        s = warpgroup_mma_wait(1, deps=[s])\n        named", "pending", "s * scale"),
    ("barrier-sixteen", "named_barrier_sync(8 + WG, 256)", "named_barrier_sync(16 + WG, 256)", "barrier", "inline_asm"),
)  # fmt: skip

EXCHANGE = _bugs(
    "shared_exchange",
    ("no-ready-wait", "        mbarrier.wait(ready.index(i % 2), (i // 2) & 1)\n", "", "race|uninitialized", "buf.index(i % 2).load"),
    ("no-free-wait", "        mbarrier.wait(free.index(i % 2), ((i // 2) & 1) ^ 1)\n", "", "barrier", "mbarrier.wait(ready"),
    ("freed-before-read", "        value = buf.index(i % 2).load(layout)\n        mbarrier.arrive(free.index(i % 2), count=1)\n",
     "        mbarrier.arrive(free.index(i % 2), count=1)\n        value = buf.index(i % 2).load(layout)\n", "race", "buf.index(i % 2)"),
    ("ready-before-written", "        buf.index(i % 2).store(gl.load(x_ptr + i * 128 + at) * 2)\n        mbarrier.arrive(ready.index(i % 2), count=1)\n",
     "        mbarrier.arrive(ready.index(i % 2), count=1)\n        buf.index(i % 2).store(gl.load(x_ptr + i * 128 + at) * 2)\n",
     "race|uninitialized", "buf.index(i % 2)"),
    ("never-freed", "        mbarrier.arrive(free.index(i % 2), count=1)\n", "", "deadlock", "mbarrier.wait(free"),
    ("never-ready", "        mbarrier.arrive(ready.index(i % 2), count=1)\n", "", "deadlock", "mbarrier.wait(ready"),
    ("wrong-slot-read", "buf.index(i % 2).load", "buf.index((i + 1) % 2).load", "race|uninitialized", "buf.index("),
    ("initialised-by-worker", "        mbarrier.init(free.index(i), count=1)\n", "        mbarrier.init(free.index(i), count=1) if i == 1 else None\n",
     "barrier", "mbarrier."),
    ("reads-past-x", "x_ptr + i * 128 + at) * 2", "x_ptr + (i + 1) * 128 + at) * 2", "out-of-bounds", "gl.load(x_ptr"),
    ("no-waits-at-all", "        mbarrier.wait(ready.index(i % 2), (i // 2) & 1)\n        value", "        value", "race|uninitialized", "buf.index("),
)  # fmt: skip

CHAIN = _bugs(
    "flag_chain",
    ("relaxed-load", "ld.acquire.gpu.global.b32", "ld.relaxed.gpu.global.b32", "race", "gl.load(x_ptr"),
    ("relaxed-store", "st.release.gpu.global.b32", "st.relaxed.gpu.global.b32", "race", "gl.load(x_ptr"),
    ("plain-load", "ld.acquire.gpu.global.b32", "ld.global.b32", "race", ""),
    ("cta-scope", "st.release.gpu.global.b32", "st.release.cta.global.b32", "race", "gl.load(x_ptr"),
    ("signal-before-store", "    gl.store(x_ptr + (pid + 1) * 128 + at, value + 1)\n    signal(flags + pid)\n",
     "    signal(flags + pid)\n    gl.store(x_ptr + (pid + 1) * 128 + at, value + 1)\n", "race", "x_ptr"),
    ("no-wait", "    if pid > 0:\n        wait_for(flags + pid - 1)\n", "", "race", "x_ptr"),
    ("no-signal", "    signal(flags + pid)\n", "", "deadlock", ""),
    ("writes-past-x", "x_ptr + (pid + 1) * 128 + at, value", "x_ptr + (pid + 2) * 128 + at, value", "out-of-bounds", "gl.store(x_ptr"),
    ("waits-for-itself", "wait_for(flags + pid - 1)", "wait_for(flags + pid)", "deadlock", ""),
)  # fmt: skip

SPLIT = _bugs(
    "split_sum",
    ("relaxed-ticket", 'sem="acq_rel"', 'sem="relaxed"', "race", "parts = tl.load"),
    ("release-only", 'sem="acq_rel"', 'sem="release"', "race", "parts = tl.load"),
    ("acquire-only", 'sem="acq_rel"', 'sem="acquire"', "race", "parts = tl.load"),
    ("cta-scope", 'scope="gpu"', 'scope="cta"', "race", "parts = tl.load"),
    ("not-the-last", "ticket == tl.num_programs(0) - 1", "ticket == 0", "race", "parts"),
    ("ticket-before-store", '    tl.store(parts_ptr + pid, total)\n    ticket = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")\n',
     '    ticket = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")\n    tl.store(parts_ptr + pid, total)\n', "race", "parts"),
    ("everyone-writes", "    if ticket == tl.num_programs(0) - 1:\n", "    if ticket >= 0:\n", "race", ""),
    ("no-mask", "mask=at < n, other=0.0), 0)", "), 0)", "out-of-bounds", "tl.load(x_ptr"),
    ("parts-no-mask", "mask=which < tl.num_programs(0), other=0.0)", ")", "out-of-bounds", "tl.load(parts_ptr"),
)  # fmt: skip

READERS = _bugs(
    "many_readers",
    ("first-reader-forgotten", "range(READERS)", "range(1, READERS)", "race", "tl.store(table_ptr"),
    ("second-reader-forgotten", "range(READERS)", "range(0, READERS, 2)", "race", "tl.store(table_ptr"),
    ("last-reader-forgotten", "range(READERS)", "range(READERS - 1)", "race", "tl.store(table_ptr"),
    ("count-of-first-reader", "range(READERS)", "range(1, READERS)", "race", "tl.load(count_ptr"),
    ("done-before-read", '        tl.store(out_ptr + pid * N + at, tl.load(table_ptr + at))\n        tl.atomic_add(count_ptr, pid, sem="relaxed")\n        tl.atomic_add(done_ptr + pid, 1, sem="release")\n',
     '        tl.atomic_add(done_ptr + pid, 1, sem="release")\n        tl.atomic_add(count_ptr, pid, sem="relaxed")\n        tl.store(out_ptr + pid * N + at, tl.load(table_ptr + at))\n', "race", "table_ptr"),
)  # fmt: skip

SUMS = _bugs(
    "tile_sums",
    ("relaxed-flags", 'sem="release"', 'sem="relaxed"', "race", "tl.load(sum_ptr"),
    ("relaxed-wait", 'sem="acquire"', 'sem="relaxed"', "race", "tl.load(sum_ptr"),
    ("flag-before-sum", '    tl.atomic_add(sum_ptr + at, tl.load(x_ptr + pid * N + at), sem="relaxed")\n    tl.atomic_add(flag_ptr + at, 1, sem="release")\n',
     '    tl.atomic_add(flag_ptr + at, 1, sem="release")\n    tl.atomic_add(sum_ptr + at, tl.load(x_ptr + pid * N + at), sem="relaxed")\n', "race", "sum_ptr"),
    ("a-plain-sum", 'tl.atomic_add(sum_ptr + at, tl.load(x_ptr + pid * N + at), sem="relaxed")', "tl.store(sum_ptr + at, tl.load(x_ptr + pid * N + at))", "race", "tl.store(sum_ptr"),
)  # fmt: skip

FLAGGED = _bugs(
    "flagged_tile",
    ("no-proxy-fence", "            fence_proxies()\n", "", "proxy", "tma_load(tile_desc"),
    ("fence-of-shared-memory", "            fence_proxies()\n", "            fence_async_shared()\n", "proxy", "tma_load(tile_desc"),
    ("fence-before-flag", "            wait_for(flags + tile)\n            fence_proxies()\n", "            fence_proxies()\n            wait_for(flags + tile)\n",
     "proxy", "tma_load(tile_desc"),
    ("no-flag", "            wait_for(flags + tile)\n", "", "race", "tile"),
    ("flag-before-tile", "            gl.store(tile_ptr + tile * 512 + at, (at + tile).to(gl.float32))\n            signal(flags + tile)\n",
     "            signal(flags + tile)\n            gl.store(tile_ptr + tile * 512 + at, (at + tile).to(gl.float32))\n", "race", "tile"),
)  # fmt: skip

SPLIT_ROWS = _bugs(
    "split_rows",
    ("threads-have-not-met", "    thread_barrier()\n", "", "race", "gl.load(parts_ptr"),
    ("relaxed-ticket", 'sem="acq_rel"', 'sem="relaxed"', "race", "gl.load(parts_ptr"),
)  # fmt: skip

REDUCED = _bugs(
    "reduced_tiles",
    ("no-fence", "        fence_async_shared()\n", "", "proxy", "reduce_add(sum_desc"),
    ("tile-overwritten", "        tma.store_wait(0)\n        tile", "        tile", "race", "tile.store(x + i)"),
    ("only-read-is-waited-for", "    store_wait_all()\n", "    tma.store_wait(0)\n", "race", "gl.load(sum_ptr"),
    ("not-waited-for", "    store_wait_all()\n", "", "race|exit", "reduce_"),
    ("relaxed-ticket", 'sem="acq_rel"', 'sem="relaxed"', "race", "gl.load(sum_ptr"),
    ("ticket-before-wait", '    store_wait_all()\n    ticket = gl.atomic_add(count_ptr, 1, sem="acq_rel")\n',
     '    ticket = gl.atomic_add(count_ptr, 1, sem="acq_rel")\n    store_wait_all()\n', "race", "gl.load(sum_ptr"),
    ("stores-do-not-add", "import reduce_add, reduce_max", "import tma_store as reduce_add, reduce_max", "race", "reduce_add(sum_desc"),
    ("a-plain-store", "    tma.store_wait(0)\n        tile", "    gl.store(sum_ptr + at, x)\n        tma.store_wait(0)\n        tile", "race|proxy", "gl.store(sum_ptr"),
)  # fmt: skip

REUSED = _bugs(
    "reused_bytes",
    ("no-full-wait", "        mbarrier.wait(full, tile & 1)\n", "", "race|uninitialized", "x_s.slice("),
    ("no-empty-wait", "        mbarrier.wait(empty, (tile & 1) ^ 1)\n", "", "race|barrier", "("),
    ("freed-before-store-wait", "        tma.store_wait(0)\n        mbarrier.arrive(empty, count=1)\n", "        mbarrier.arrive(empty, count=1)\n        tma.store_wait(0)\n",
     "race", "tma_load(x_desc"),
    ("no-fence", "        fence_async_shared()\n        tma_store", "        tma_store", "proxy", "tma_store(y_desc"),
    ("past-the-end", "[2, 16, 64]", "[4, 16, 64]", "out-of-bounds", "y_s = reinterpret"),
)  # fmt: skip

CLUSTER = _bugs(
    "cluster_gemm",
    ("no-barrier-after-init", "    fence_async_shared(cluster=True)\n    cluster_barrier()\n", "    fence_async_shared(cluster=True)\n", "barrier", "multicast=True"),
    ("no-empty-wait", "        mbarrier.wait(empty.index(slot), phase ^ 1)\n", "", "race", "multicast=True"),
    ("empty-for-each-cta", "two_ctas=True", "two_ctas=False", "race", "multicast=True"),
    ("empty-counts-each-cta-twice", "mbarrier.init(empty.index(i), count=1)", "mbarrier.init(empty.index(i), count=2)", "deadlock", "mbarrier.wait(empty"),
    ("expects-only-a", "a_desc.nbytes_per_cta + b_desc.nbytes_per_cta", "a_desc.nbytes_per_cta", "race", "acc = warpgroup_mma(a_s"),
    ("expects-both-halves-of-a", "a_desc.nbytes_per_cta + b_desc", "a_desc.block_type.nbytes + b_desc", "deadlock", "mbarrier.wait(full"),
    ("released-before-wgmma-wait", "        acc = warpgroup_mma_wait(0, deps=[acc])\n        mbarrier.arrive(empty.index(slot), count=1)\n",
     "        mbarrier.arrive(empty.index(slot), count=1)\n        acc = warpgroup_mma_wait(0, deps=[acc])\n", "race", "multicast=True"),
    ("never-released", "        mbarrier.arrive(empty.index(slot), count=1)\n", "", "deadlock", "mbarrier.wait(empty"),
    ("no-full-wait", "        mbarrier.wait(full.index(slot), phase)\n", "", "race", "acc = warpgroup_mma(a_s"),
    ("no-store-fence", "    fence_async_shared()\n", "", "proxy", "tma_store(c_desc"),
    ("no-store-wait", "    tma.store_wait(0)\n", "", "exit", "tma_store(c_desc"),
    ("stores-one-tile", "tma_store(c_desc, [row, col], c_s)", "tma_store(c_desc, [row, 0], c_s)", "race", "tma_store(c_desc"),
)  # fmt: skip

CLUSTER_ROLES = _bugs(
    "cluster_specialised",
    ("no-free-wait", "        mbarrier.wait(free.index(slot), phase)\n", "", "barrier", "mbarrier.expect(full"),
    ("no-wait-for-the-row", "        mbarrier.wait(free_a.index(slot), phase)\n", "", "race", "tma_load(a_desc"),
    ("no-wait-for-the-column", "        mbarrier.wait(free_b.index(slot), phase)\n", "", "race", "tma_load(b_desc"),
    ("rows-and-columns-swapped", "    free_a = gl.allocate_shared_memory(gl.int64, [STAGES, 2], ROWS)\n", "    free_a = gl.allocate_shared_memory(gl.int64, [STAGES, 2], COLS)\n",
     "race", "tma_load(a_desc"),
    ("row-not-released", "        mbarrier.arrive(free_a.index(slot), count=1)\n", "", "deadlock", "mbarrier.wait("),
    ("row-released-twice", "        mbarrier.arrive(free_a.index(slot), count=1)\n", "        mbarrier.arrive(free_a.index(slot), count=2)\n", "barrier|deadlock", "mbarrier."),
    ("column-released-early", "        acc = warpgroup_mma_wait(0, deps=[acc])\n        mbarrier.arrive(free.index(slot), count=1)\n        mbarrier.arrive(free_a.index(slot), count=1)\n        mbarrier.arrive(free_b.index(slot), count=1)\n",
     "        mbarrier.arrive(free_b.index(slot), count=1)\n        acc = warpgroup_mma_wait(0, deps=[acc])\n        mbarrier.arrive(free.index(slot), count=1)\n        mbarrier.arrive(free_a.index(slot), count=1)\n",
     "race", "tma_load(b_desc"),
    ("no-barrier-after-init", "    fence_async_shared(cluster=True)\n    cluster_barrier()\n", "    fence_async_shared(cluster=True)\n", "barrier", "mbarrier."),
    ("no-full-wait", "        mbarrier.wait(full.index(slot), (k // STAGES) & 1)\n", "", "race|uninitialized", "acc = warpgroup_mma(a_s"),
)  # fmt: skip

PTX_BARRIERS = _bugs(
    "ptx_mbarriers",
    ("no-ready-wait", "        wait(ready.index(i % 2), (i // 2) & 1)\n", "", "race|uninitialized", "buf.index(i % 2).load"),
    ("no-free-wait", "        test(free.index(i % 2), ((i // 2) & 1) ^ 1)\n", "", "race|barrier|deadlock", "(ready"),
    ("never-ready", "        arrive(ready.index(i % 2))\n", "", "deadlock", "wait(ready"),
    ("never-free", "        arrive(free.index(i % 2))\n", "", "deadlock", "test(free"),
    ("freed-before-read", "        value = buf.index(i % 2).load(layout)\n        arrive(free.index(i % 2))\n",
     "        arrive(free.index(i % 2))\n        value = buf.index(i % 2).load(layout)\n", "race", "buf.index(i % 2)"),
    ("counts-one-thread", "make(ready.index(i), 128)", "make(ready.index(i), 1)", "barrier", "arrive(ready"),
    ("every-thread-initialises", "@p mbarrier.init", "mbarrier.init", "barrier", "make(ready"),
)  # fmt: skip

COUNTS = _bugs(
    "shared_counts",
    ("a-plain-scatter", "table.atomic_scatter_add(gl.full([128], 1, gl.int32, LAYOUT), x, 0)\n\n\n@gluon.jit\ndef count_high",
     "table.scatter(gl.full([128], 1, gl.int32, LAYOUT), x, 0)\n\n\n@gluon.jit\ndef count_high", "race", "x, 0)"),
    ("read-beside-it", "    x = gl.load(x_ptr + 128 + gl.arange(0, 128, LAYOUT))\n", "    x = gl.load(x_ptr + 128 + gl.arange(0, 128, LAYOUT)) + gl.minimum(table.load(LAYOUT), 0)\n", "race", "table.load(LAYOUT)"),
    ("not-cleared", "    table.store(gl.full([128], 0, gl.int32, LAYOUT))\n", "", "uninitialized", "table.atomic_scatter_add"),
    ("past-the-table", "x, 0)", "x + 64, 0)", "out-of-bounds", "table.atomic_scatter_add"),
)  # fmt: skip

POLLED = _bugs(
    "polled_flags",
    ("relaxed-poll", "tl.atomic_poll(flags + pid - 1, 1)", 'tl.atomic_poll(flags + pid - 1, 1, sem="relaxed")', "race", "tl.load(x_ptr + pid"),
    ("relaxed-store", 'tl.atomic_store(flags + pid, 1, sem="release")', 'tl.atomic_store(flags + pid, 1, sem="relaxed")', "race", "tl.load(x_ptr + pid"),
    ("no-poll", "        tl.atomic_poll(flags + pid - 1, 1)\n", "        tl.debug_barrier()\n", "race", "x_ptr"),
    ("no-store", '    tl.atomic_store(flags + pid, 1, sem="release")\n', "", "deadlock", "tl.atomic_poll"),
    ("plain-store", 'tl.atomic_store(flags + pid, 1, sem="release")', "tl.store(flags + pid, 1)", "race", "flags"),
)  # fmt: skip

TICKS = _bugs(
    "ticks",
    ("no-tock-wait", "        mbarrier.wait(tock, (i & 1) ^ 1)\n", "", "barrier", "mbarrier.wait(tick"),
    ("every-other-tock", "        mbarrier.wait(tock, (i & 1) ^ 1)\n", "        if i % 2 == 1:\n            mbarrier.wait(tock, (i & 1) ^ 1)\n", "barrier", "mbarrier.wait(t"),
    ("answers-before-it-hears", "        mbarrier.wait(tick, i & 1)\n        gl.store(out_ptr + i, i + 1)\n        mbarrier.arrive(tock, count=1)\n",
     "        mbarrier.arrive(tock, count=1)\n        mbarrier.wait(tick, i & 1)\n        gl.store(out_ptr + i, i + 1)\n", "barrier", "mbarrier.wait(t"),
    ("one-round-ahead", "mbarrier.wait(tock, (i & 1) ^ 1)", "mbarrier.wait(tock, i & 1)", "deadlock", "mbarrier.wait(t"),
    ("parity-of-the-round-before", "mbarrier.wait(tick, i & 1)", "mbarrier.wait(tick, (i & 1) ^ 1)", "barrier", "mbarrier.wait(t"),
    ("tick-for-two", "mbarrier.arrive(tick, count=1)\n    m", "mbarrier.arrive(tick, count=1)\n        mbarrier.arrive(tick, count=1)\n    m", "barrier", "mbarrier.wait(tick"),
    ("nobody-waits-for-the-last", "    mbarrier.wait(last, 0)\n", "", "barrier", "mbarrier.arrive(last", "ttgir", "warning"),
    ("one-wait-out-of-reach", "    mbarrier.wait(last, 0)\n", "    if rounds > 100:\n        mbarrier.wait(last, 0)\n", "barrier", "mbarrier.arrive(last", "ttgir", "info"),
)  # fmt: skip

ARMED = _bugs(
    "armed_copies",
    ("issued-without-a-wait", "        mbarrier.wait(free, (i & 1) ^ 1)\n", "", "race|barrier", "("),
    ("announced-without-a-wait", "        mbarrier.wait(full, (i & 1) ^ 1)\n", "", "barrier", "mbarrier.expect(full"),
    ("freed-before-the-wait", "        mbarrier.wait(full, i & 1)\n        value = buf.load(layout)\n        fence_async_shared()\n        mbarrier.arrive(free, count=1)\n",
     "        fence_async_shared()\n        mbarrier.arrive(free, count=1)\n        mbarrier.wait(full, i & 1)\n        value = buf.load(layout)\n", "race|barrier", "("),
)  # fmt: skip

# Gluon has clusters from Triton 3.7 on; inline_asm, and atomics like these, from 3.9 on.
BUGS = [
    *PIPELINED,
    *SPECIALISED,
    *COPIED,
    *NAMED,
    *EXCHANGE,
    *CHAIN,
    *SPLIT,
    *SPLIT_ROWS,
    *READERS,
    *SUMS,
    *FLAGGED,
    *REDUCED,
    *REUSED,
    *TICKS,
    *ARMED,
    *([*CLUSTER, *CLUSTER_ROLES] if hasattr(hopper, "cluster") else ()),
    *([*PTX_BARRIERS, *COUNTS, *POLLED] if hasattr(gl, "inline_asm") else ()),
]
BUGS += _bugs(
    "flag_chain",
    ("threads-have-not-met", "    thread_barrier()", "    pass", "race", "gl.load(x_ptr"),
) + _bugs(
    "named_barriers",
    ("one-barrier-for-two-groups", "    q_s.index(WG).reshape([64, D]).store", "    named_barrier_sync(9, 128)\n    q_s.index(WG).reshape([64, D]).store",
     "barrier", "inline_asm"),
)  # fmt: skip
# Triton 3.9's compiler refuses a reinterpret that runs past the end.
BUGS = [b for b in BUGS if b.id != "reused_bytes-past-the-end" or VERSION < (3, 9)]
# No bugs where the compiler mends them.
MENDED = [b for b in BUGS if b.name == "no-barrier-after-init" and CLUSTER_MEETS_AFTER_INIT]
BUGS = [bug for bug in BUGS if bug not in MENDED]
CASES = sorted({bug.case for bug in BUGS})
