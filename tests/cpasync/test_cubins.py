"""Binaries of the examples and probes: their parameters, and that files keep them whole."""

from __future__ import annotations

import importlib
import struct

import pytest
import torch

from tests.cpasync import examples, gpu_cubins
from tests.cpasync.test_probes import BOXES, COPIES, REDUCTIONS, SWIZZLES
from tests.launch import fake_cuda
from tileloom.cpasync.cubin import Cubin, compile_cubin
from tileloom.errors import OptionError

SAMPLE = (
    "axpby-4-ca",
    "copy-8x512-4-full",
    "gemm-bfloat16",
    "split_k-float16",
    "probe-copy-8-keep",
    "probe-box-3d-s64b",
    "probe-reduce-Uint64-xor",
    "probe-wait",
    "probe-numbers",
    "probe-im2col-4",
    "probe-bulk-fraction",
    "probe-multicast-box-4-some",
)


@pytest.mark.parametrize("name", SAMPLE)
def test_parameters_fit_and_files_keep_all(kernels, name, tmp_path):
    binary = gpu_cubins.made(name)
    with fake_cuda.installed():  # refuses types that do not fit the parameters
        binary.cubin.launcher(binary.types, grid=(1,), shared_bytes=0, device=0)
    if binary.boxes:
        assert len(binary.boxes) == binary.types.count("nvTmaDesc")
    binary.save(tmp_path / "kernel.json")
    assert examples.load("cubins").Binary.load(tmp_path / "kernel.json") == binary


def test_every_gpu_test_has_its_kernel(kernels):
    names = set(gpu_cubins.PROBES)
    assert names == {
        *(f"probe-copy-{size}-{how}" for size, how in COPIES),
        *(f"probe-box-{name}-{swizzle}" for name in BOXES for swizzle in SWIZZLES),
        *(f"probe-reduce-{dtype}-{op}" for dtype, op in REDUCTIONS),
        *(f"probe-im2col-{rank}" for rank in (3, 4, 5)),
        *(f"probe-bulk-{policy}" for policy in gpu_cubins.POLICIES),
        *(f"probe-multicast-{k}-{name}" for name in gpu_cubins.MASKS for k in ("box", "bulk")),
        *(f"probe-remote-{blocks}" for blocks in (2, 4, 8)),
        *(f"probe-im2col-store-{op}" for op in (None, "add")),
        *(f"probe-form-{form}" for form in ("atom", "pointer", "tensor")),
        *(f"probe-raw-{rank}" for rank in range(1, 6)),
        "probe-checked",
        "probe-numbers",
        "probe-arrivals",
        "probe-wait",
    }


class Launches:
    """Takes the place of the driver: notes grids and arguments."""

    def __init__(self, monkeypatch, sms):
        self.seen = []
        cubins = examples.load("cubins")
        monkeypatch.setattr(cubins, "sms", lambda: sms)
        monkeypatch.setattr(cubins.Binary, "prepare", self.note)

    def note(self, blocks, matrices, *arguments):
        self.seen.append((blocks, len(matrices), arguments))


def test_grids_and_numbers_of_the_launches(kernels, monkeypatch):
    """As `launch` of each example has them: tiles of 128 x 256 x 64, boxes of 32 x 256."""
    cubins, launches = examples.load("cubins"), Launches(monkeypatch, sms=4)
    x = torch.zeros(5000)
    for blocks in (None, 3):
        cubins.prepare_axpby(cubins.Binary(None, ()), 2.0, x, -0.5, x, x, blocks)
    matrix = torch.zeros(100, 600)
    stages = 5 * (32 * 256 * 4 + 8)
    copy = cubins.Binary(None, (), stages, boxes=((32, 256), (32, 256)))
    for blocks in (None, 7, 99):
        cubins.prepare_copy(copy, matrix, matrix, blocks)
    gemm = cubins.Binary(None, (), boxes=((128, 64), (256, 64), (64, 32)))
    a, b, c = torch.zeros(300, 200), torch.zeros(520, 200), torch.zeros(300, 520)
    cubins.prepare_gemm(gemm, a, b, c, 2)
    added, copied, multiplied = launches.seen[:2], launches.seen[2:-1], launches.seen[-1]
    assert [(blocks, numbers[3:]) for blocks, _, numbers in added] == [
        (2, (5000, 2.0, -0.5)), (3, (5000, 2.0, -0.5)),
    ]  # fmt: skip
    assert copied == [(blocks, 2, (3, 12)) for blocks in (3, 7, 12)]
    assert multiplied == (4, 3, (3, 3, 4, 2))
    assert cubins.parts(128, 256, 4096) == 4
    assert cubins.parts(128, 256, 600) == 1
    assert cubins.parts(4096, 4096, 4096) == 1


BLOCK = "; it takes a constant number of threads along x. Try: .launch(block=(128, 1, 1), ...)."


@pytest.mark.filterwarnings("ignore:Dynamic variable in block size")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none", "the function launches 0 kernels; one is compiled at a time. Try: a function for "
         "each kernel."),
        ("two", "the function launches 2 kernels; one is compiled at a time. Try: a function for "
         "each kernel."),
        ("square", f"the kernel's block is 32 x 4 x 1{BLOCK}"),
        ("of_any_size", f"the kernel's block is known only at the launch{BLOCK}"),
    ],
)  # fmt: skip
def test_functions_that_make_no_binary(kernels, name, said):
    import cutlass

    made = importlib.import_module("tests.cpasync.launch_kernels")
    probes = importlib.import_module("tests.cpasync.probes")
    arguments = probes.memory(cutlass.Float32), cutlass.Int32(32)
    with pytest.raises(OptionError) as caught:
        compile_cubin(getattr(made, name), *arguments, arch="sm_90a")
    assert str(caught.value) == f"compile_cubin: {said}"


@pytest.mark.parametrize("arch", ["sm_99", "", "90", None])
def test_an_architecture_that_there_is_not(kernels, arch):
    with pytest.raises(OptionError) as caught:
        compile_cubin(lambda: None, arch=arch)
    text = str(caught.value)
    assert text.startswith(f"compile_cubin: arch is {arch!r}; the CuTe DSL knows sm_80, ")
    assert text.endswith(". Try: arch='sm_90a'.")
    assert " sm_90a," in text


PLAIN = Cubin("copy_kernel", "sm_90a", b"\x7fELF", "", (8,), 128)


@pytest.mark.parametrize(
    ("cluster", "whole"), [((2,), (2, 1, 1)), ((1, 4), (1, 4, 1)), ((2, 2, 2), (2, 2, 2))]
)
def test_clusters_reach_the_driver(cluster, whole):
    """CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION is 4; the grid counts blocks."""
    with fake_cuda.installed() as fake:
        launch = PLAIN.launcher(
            ["*fp16"], grid=(4, 8, 2), shared_bytes=0, device=0, cluster=cluster, pdl=True
        )
        launch(0, 64)
        record = fake.last()
    size = 72
    found = [record.attributes[at : at + size] for at in range(0, len(record.attributes), size)]
    said = {each[0]: struct.unpack_from("<3I", each, 8) for each in found}
    assert said[4] == whole
    assert 6 in said
    assert record.grid == (4, 8, 2)


def test_one_block_is_no_cluster():
    with fake_cuda.installed() as fake:
        PLAIN.launcher(["*fp16"], grid=(3,), shared_bytes=0, device=0)(0, 64)
        assert not fake.last().attributes


@pytest.mark.parametrize("cluster", [(), (2, 0), (4, 4), (1, 1, 1, 1), "ab", 2])
def test_clusters_that_are_none(cluster):
    with fake_cuda.installed(), pytest.raises(OptionError) as caught:
        PLAIN.launcher(["*fp16"], grid=(16,), shared_bytes=0, device=0, cluster=cluster)
    assert str(caught.value) == (
        f"launch: the cluster of kernel 'copy_kernel' is {cluster!r}; it takes one to three "
        "integers of at least 1, whose product is at most 8. Try: (2, 1, 1)."
    )


def test_a_grid_that_clusters_do_not_fill():
    with fake_cuda.installed(), pytest.raises(OptionError) as caught:
        PLAIN.launcher(["*fp16"], grid=(8, 3), shared_bytes=0, device=0, cluster=(2, 2))
    assert str(caught.value) == (
        "launch: the grid of kernel 'copy_kernel' is (8, 3, 1), which clusters of (2, 2, 1) blocks "
        "do not fill. Try: (8, 4, 1)."
    )
