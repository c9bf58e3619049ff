"""Clusters: how layouts spread over CTAs, routed arrivals, global memory, what is refused."""

from __future__ import annotations

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tests.emulator import corpus, support
from tests.emulator.cases.names import named_barrier_sync, store_wait_all
from tests.emulator.test_irtext import run_line
from tileloom import emulator
from tileloom.emulator import dialect
from tileloom.emulator.cluster import spread_of
from tileloom.emulator.ir import Module, parse_type

ALIASES = {
    "rows": "#ttg.blocked<{sizePerThread = [1, 8], order = [1, 0], CGALayout = [[1, 0]]}>",
    "grid": "#ttg.nvidia_mma<{versionMajor = 3, CGALayout = [[1, 0], [0, 1]], instrShape = [16]}>",
    "copies": "#ttg.nvmma_shared<{swizzlingByteWidth = 64, CGALayout = [[0, 0]]}>",
    "linear": "#ttg.linear<{register = [[0, 1]], lane = [], warp = [], block = [[32, 0]]}>",
}
FIRST, SECOND, ALL = slice(0, 32), slice(32, 64), slice(0, 16)


@pytest.mark.parametrize(
    ("text", "parts", "leads"),
    [
        ("tensor<64x16xf32, #rows>", [(FIRST, ALL), (SECOND, ALL)], (0, 1)),
        ("tensor<64x16xf32, #linear>", [(FIRST, ALL), (SECOND, ALL)], (0, 1)),
        ("tensor<64xf32, #ttg.slice<{dim = 1, parent = #rows}>>", [(FIRST,), (SECOND,)], (0, 1)),
        ("tensor<16xf32, #ttg.slice<{dim = 0, parent = #rows}>>", [(ALL,), (ALL,)], (0, 0)),
        ("tensor<64x16xf32, #ttg.dot_op<{opIdx = 1, parent = #rows, kWidth = 2}>>",
         [(slice(0, 64), ALL)] * 2, (0, 0)),
        ("!ttg.memdesc<64x16xf16, #copies, #smem>", [(slice(0, 64), ALL)] * 2, (0, 0)),
        ("!ttg.memdesc<3x64x16xf16, #rows, #smem>",
         [(slice(None), FIRST, ALL), (slice(None), SECOND, ALL)], (0, 1)),
        ("f32", [(), ()], (0, 0)),
    ],
)  # fmt: skip
def test_spread_of_a_layout_over_two_ctas(text, parts, leads):
    spread = spread_of(parse_type(text), Module({"ttg.num-ctas": "2 : i32"}, {}, ALIASES))
    assert list(spread.parts) == parts
    assert spread.leads == leads
    assert spread.pieces == len(set(leads))


def test_spread_over_four_ctas_and_over_one():
    ty = parse_type("tensor<64x32xf32, #grid>")
    spread = spread_of(ty, Module({"ttg.num-ctas": "4 : i32"}, {}, ALIASES))
    assert spread.parts[1] == (SECOND, slice(0, 16))
    assert spread.parts[2] == (FIRST, slice(16, 32))
    assert spread.group(3) == [3]
    assert spread_of(ty, Module({}, {}, {})).leads == (0,)
    with pytest.raises(emulator.UnsupportedKernelError, match="another number of CTAs than 2"):
        spread_of(ty, Module({"ttg.num-ctas": "2 : i32"}, {}, ALIASES))


def test_gather_and_scatter_are_blackwells():
    for name in ("ttng.async_tma_gather", "ttng.async_tma_scatter", "tt.descriptor_gather"):
        with pytest.raises(
            emulator.UnsupportedKernelError, match="Hopper's TMA neither gathers nor scatters rows"
        ):
            run_line(f"{name} %x : !tt.ptr<f32>")


if not hasattr(hopper, "cluster"):  # Triton 3.6
    pytest.skip("Gluon has clusters from Triton 3.7 on", allow_module_level=True)

from tests.emulator.cases.names import cluster_barrier  # noqa: E402


def text_of(name, folder):
    module = support.planted(next(b for b in corpus.BUGS if b.id == name), folder)
    with emulator.run(collect=True) as run:
        module.main()
    return run.errors[0].text()


def test_reports_name_the_ctas(tmp_path):
    lines = text_of("cluster_specialised-no-wait-for-the-row", tmp_path).splitlines()
    assert lines[0].startswith("[race] shared buffer a_s[0] of CTA 2 is ")
    assert "by partition 'load_tiles, CTA 0', program (0, 0, 0)" in lines[1]
    if corpus.MENDED:
        return
    lines = text_of("cluster_gemm-no-barrier-after-init", tmp_path).splitlines()
    assert "mbarrier.init by partition 'main, CTA 1'" in lines[2]
    assert lines[3] == "    hint cluster.barrier() after the last mbarrier.init"


@gluon.jit
def exchange(x_ptr, mid_ptr, out_ptr, MEET: gl.constexpr):
    """Each CTA writes its half of `mid` and reads all of it."""
    halves: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0], cga_layout=[[1]])
    copies: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0], cga_layout=[[0]])
    gl.store(mid_ptr + gl.arange(0, 256, halves), gl.load(x_ptr + gl.arange(0, 256, halves)))
    if MEET:
        cluster_barrier()
    at = gl.arange(0, 256, copies)
    gl.store(out_ptr + at, gl.load(mid_ptr + at) + 1)


def test_ctas_race_on_global_memory_unless_they_meet():
    x, mid, out = torch.arange(256.0), torch.zeros(256), torch.zeros(256)
    with emulator.run() as run:
        exchange[(1,)](x, mid, out, True, num_ctas=2)
    assert run.reports == []
    assert torch.equal(out, x + 1)
    with pytest.raises(emulator.RaceError) as caught, emulator.run():
        exchange[(1,)](x, mid, out, False, num_ctas=2)
    assert "gl.load(mid_ptr + at)" in str(caught.value)
    assert "global tensor 'mid_ptr' is read by a load" in str(caught.value)


@gluon.jit
def atomic_count(out_ptr):
    gl.atomic_add(out_ptr, 1)


def test_an_atomic_is_done_once_for_the_cluster():
    out = torch.zeros(1, dtype=torch.int32)
    with emulator.run():
        atomic_count[(3,)](out, num_ctas=2)
    assert out.item() == 3


@gluon.jit
def meet_by_name():
    named_barrier_sync(8, 128)


@gluon.jit
def store_by_ptx(out_ptr):
    gl.inline_asm_elementwise(
        "st.global.b32 [$1], 1; mov.u32 $0, 0;", "=r,l", [out_ptr.to(gl.int64)], gl.int32, False, 1
    )


@gluon.jit
def wait_by_ptx():
    store_wait_all()


def test_ptx_that_each_cta_would_run_is_refused():
    with pytest.raises(emulator.UnsupportedKernelError, match="in a cluster"), emulator.run():
        meet_by_name[(1,)](num_ctas=2)
    with pytest.raises(emulator.UnsupportedKernelError, match="in a cluster"), emulator.run():
        store_by_ptx[(1,)](torch.zeros(1, dtype=torch.int32), num_ctas=2)
    with emulator.run():
        wait_by_ptx[(1,)](num_ctas=2)


if dialect.VERSION >= (3, 9):

    @gluon.jit
    def one_arrives_for_all(out_ptr, FROM: gl.constexpr, EXPECTED: gl.constexpr):
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0], cga_layout=[[1]])
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0], cga_layout=[[1]])
        buf = gl.allocate_shared_memory(gl.float32, [256], flat)
        bar = mbarrier.allocate_mbarrier()
        mbarrier.init(bar, count=1)
        fence_async_shared(cluster=True)
        hopper.cluster.barrier(relaxed=True)
        at = gl.arange(0, 256, layout)
        gl.store(out_ptr + at, at.to(gl.float32))
        mbarrier.arrive(bar, from_cta=FROM)
        mbarrier.wait(bar, 0)
        mbarrier.expect(bar, EXPECTED)
        hopper.async_store(buf, gl.load(out_ptr + 255 - at), bar)
        mbarrier.wait(bar, 1)
        gl.store(out_ptr + 256 + at, buf.load(layout))

    def test_arrivals_are_routed_and_stores_to_the_cluster_signal_each_cta():
        out = torch.zeros(512)
        with emulator.run(collect=True) as run:
            one_arrives_for_all[(1,)](out, 0, 512, num_ctas=2)
        # CTA 1 has seen what CTA 0 wrote, but not the other way round.
        assert [r.kind for r in run.errors] == ["race"]
        assert "main, CTA 0" in run.errors[0].at.text()
        assert "main, CTA 1" in run.errors[0].other.text()
        assert torch.equal(out[256:], 255 - torch.arange(256.0))

    def test_a_store_to_the_cluster_must_be_expected_in_full():
        with emulator.run(collect=True) as run:
            one_arrives_for_all[(1,)](torch.zeros(512), 0, 256, num_ctas=2)
        assert run.errors[-1].kind == "deadlock"
        assert "256 bytes more than expected" in run.errors[-1].text()
