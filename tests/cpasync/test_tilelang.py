"""The drop-in for TileLang: its namespace on our copies, and its kernels through our own launch.

`generated.json` holds eight kernels that TileLang 0.1.15 generated for its CuTe DSL target, and
what its host code knew; test_tilelang_client.py compiles them where TileLang is at hand.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.machinery
import importlib.util
import re
import sys
import types

import pytest
import torch

from tests.cpasync import tilelang_client
from tests.cpasync.driver_model import Model
from tests.cpasync.test_tensormap import HOPPER
from tests.launch import fake_cuda
from tileloom import cpasync
from tileloom.cpasync import tensormap, tilelang
from tileloom.cpasync.cubin import Cubin
from tileloom.cpasync.tensormap import TensorMap
from tileloom.cpasync.tilelang_kernel import GeneratedKernel
from tileloom.errors import ArgumentError, OptionError
from tileloom.launch import driver

SAVED = tilelang_client.saved()
each = pytest.mark.parametrize("name", SAVED)
DTYPES = {6: torch.float16, 7: torch.float32}
SWIZZLES, PROMOTIONS = ("none", "32B", "64B", "128B"), ("none", "64B", "128B", "256B")


@pytest.fixture
def no_tilelang(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec",
        lambda name, *rest: None if name == "tilelang" else real(name, *rest),
    )  # fmt: skip


@pytest.fixture
def some_tilelang(monkeypatch):
    """A TileLang whose namespace holds two names of its own, and a copy function."""
    for name in ("tilelang", "tilelang.contrib", "tilelang.contrib.cutedsl"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    module.make_rmem_tensor, module.tma_load = "theirs", "theirs"
    return module


# ---- the namespace
def test_the_rest_is_tilelangs(some_tilelang):
    assert tilelang.make_rmem_tensor == "theirs"
    some_tilelang.make_rmem_tensor = "newer"
    assert tilelang.make_rmem_tensor == "newer"


@pytest.mark.parametrize("name", sorted(tilelang.OURS))
def test_copies_are_ours(name, some_tilelang, monkeypatch):
    setattr(some_tilelang, name, "theirs")
    monkeypatch.setitem(cpasync.__dict__, name, "ours")
    assert getattr(tilelang, name) == "ours"


def test_copies_need_no_tilelang(no_tilelang):
    assert tilelang.BYTES_PER_TENSORMAP == 128
    assert tilelang.BYTES_PER_POINTER == 8
    assert set(dir(tilelang)) == tilelang.OURS <= set(cpasync.__all__)


def test_without_tilelang_one_sentence(no_tilelang):
    with pytest.raises(ImportError) as caught:
        _ = tilelang.make_tensor_at_offset
    assert isinstance(caught.value, tilelang.MissingTileLangError)
    assert str(caught.value) == (
        "cpasync.tilelang: make_tensor_at_offset is TileLang's own, and TileLang is not installed; "
        "ours are the copies, mbarriers and fences. Try: pip install 'tilelang==0.1.15'."
    )


def test_a_name_that_neither_has(some_tilelang):
    with pytest.raises(AttributeError) as caught:
        _ = tilelang.tma_lood
    assert str(caught.value) == (
        "module 'tileloom.cpasync.tilelang' has no attribute 'tma_lood', and neither has "
        "tilelang.contrib.cutedsl"
    )
    assert not hasattr(tilelang, "__wrapped__")


# ---- a generated kernel
@each
def test_the_module_is_the_kernel_with_its_import_changed(name):
    kernel = SAVED[name].kernel
    text = kernel.module_text()
    assert "import tileloom.cpasync.tilelang as tl\n" in text
    assert "import tilelang" not in text
    tree = ast.parse(text)
    assert [n.name for n in tree.body if isinstance(n, ast.FunctionDef)] == [kernel.name, "host"]
    body = text.split("):\n", 1)[1].split("\n\n@cute.jit\n")[0]
    assert body.rstrip() == kernel.source.split("):\n", 1)[1].rstrip()
    for parameter, kind in kernel.parameters.items():
        annotated = f"{parameter}: cutlass.GridConstant[cuda.TensorMap]" in text
        assert annotated == (kind == "nvTmaDesc")
    assert f"grid={list(kernel.grid)}, block=[{kernel.threads}, 1, 1]" in text


def test_numbers_are_parameters_too():
    kernel = GeneratedKernel(
        "@cute.kernel\ndef k(A, n, s):\n  pass\n", "k", {"A": "*bf16", "n": "i32", "s": "fp32"},
        (1, 1, 1), 32, 0,
    )  # fmt: skip
    head = "def host(A: cute.Pointer, n: cutlass.Int32, s: cutlass.Float32):"
    assert head in kernel.module_text()


def test_the_kernels_use_our_copies():
    used = set()
    for made in SAVED.values():
        used |= set(re.findall(r"\btl\.(\w+)", made.kernel.source)) & tilelang.OURS
    assert used >= {
        "tma_load", "tma_store", "tma_reduce", "tma_store_arrive", "tma_store_wait",
        "prefetch_tma_descriptor", "cp_async_gs_conditional", "cp_async_commit", "cp_async_wait",
        "mbarrier_init", "mbarrier_expect_tx", "arrive_and_expect_tx", "mbarrier_arrive",
        "mbarrier_wait", "fence_barrier_init", "fence_proxy_async",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "main"}, "the source has no function 'main', and parameters is ('A', 'C_desc'). "
         "Try: the parameters of the kernel, in its order."),
        ({"parameters": {"A": "*fp16"}}, "the source has def copy_kernel(A, C_desc), and "
         "parameters is ('A',). Try: the parameters of the kernel, in its order."),
        ({"parameters": {"A": "half", "C_desc": "nvTmaDesc"}}, "parameters has the type 'half'; "
         "known: nvTmaDesc, *i1, *i8, *u8, *i16, *u16, *i32, *u32, *i64, *fp16, *bf16, *fp32, "
         "*fp64, *fp8e4nv, *fp8e5, i32, i64, fp32, fp64. Try: *fp16 for a tensor of float16."),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_text(changes, said):
    with pytest.raises(OptionError) as caught:
        dataclasses.replace(SAVED["copy"].kernel, **changes)
    assert str(caught.value) == f"GeneratedKernel: {said}"


# ---- its descriptors and its launch
def map_of(facts, tensor):
    """The descriptor that TileLang's host code asks for, made by `TensorMap`."""
    interleave, swizzle, promotion, fill = facts.modes
    assert interleave == fill == 0
    return TensorMap.tiled(
        tensor, facts.box[::-1], swizzle=SWIZZLES[swizzle], l2_promotion=PROMOTIONS[promotion],
        element_strides=facts.steps[::-1],
    )  # fmt: skip


def arguments_of(made):
    """Tensors of the right shapes, and descriptors of them where the kernel wants these."""
    by_name = {}
    for facts in made.maps.values():
        by_name[facts.tensor] = torch.zeros(facts.sizes[::-1], dtype=DTYPES[facts.kind])
    for parameter, kind in made.kernel.parameters.items():
        if kind != "nvTmaDesc":
            by_name[parameter] = torch.zeros(16)
    return [
        map_of(made.maps[p], by_name[made.maps[p].tensor]) if p in made.maps else by_name[p]
        for p in made.kernel.parameters
    ]


@pytest.fixture
def model(monkeypatch):
    found = Model()
    monkeypatch.setattr(tensormap, "target_of_device", lambda device: HOPPER)
    tensormap.cache_clear()
    yield found
    tensormap.cache_clear()


@each
def test_tensor_map_asks_the_driver_what_tilelang_asks(name, model, monkeypatch):
    monkeypatch.setattr(driver, "library", lambda: model)
    arguments_of(SAVED[name])
    asked = [call | {"modes": list(call["modes"])} for call in model.calls]
    expected = []
    for facts in SAVED[name].maps.values():
        expected.append(dataclasses.asdict(facts))
        expected[-1].pop("tensor")
    assert [{k: v for k, v in call.items() if k != "address"} for call in asked] == expected


@each
def test_our_launch_hands_over_grid_threads_and_parameters(name, model, monkeypatch):
    """On a driver that writes down what it is asked to launch; the binary is any."""
    made = SAVED[name]
    kernel = made.kernel
    kinds = list(kernel.parameters.values())
    sizes = tuple(128 if kind == "nvTmaDesc" else 8 for kind in kinds)
    cubin = Cubin(kernel.name, made.arch, b"\x7fELF", "", sizes, kernel.threads)
    with fake_cuda.installed() as fake:
        tensormap.cache_clear()
        loaded = []
        load = driver.load_cubin
        monkeypatch.setattr(
            driver, "load_cubin", lambda *a, **k: loaded.append(load(*a, **k)) or loaded[-1]
        )
        launch = cubin.launcher(kinds, grid=kernel.grid, shared_bytes=kernel.shared_bytes, device=0)
        fake.define_sizes(loaded[0].handle, sizes)
        arguments = arguments_of(made)
        launch(77, *arguments)
        record = fake.last()
    assert (record.grid, record.block) == (kernel.grid, (kernel.threads, 1, 1))
    assert (record.shared, record.stream) == (kernel.shared_bytes, 77)
    assert record.values == b"".join(
        a.encoded if isinstance(a, TensorMap) else a.data_ptr().to_bytes(8, "little")
        for a in arguments
    )
    tensormap.cache_clear()


@pytest.mark.parametrize(
    ("options", "attributes"),
    [({}, []), ({"cooperative": True}, [2]), ({"pdl": True}, [6]),
     ({"cooperative": True, "pdl": True}, [6, 2])],
)  # fmt: skip
def test_launch_attributes(options, attributes):
    """CU_LAUNCH_ATTRIBUTE_COOPERATIVE is 2, PROGRAMMATIC_STREAM_SERIALIZATION is 6."""
    cubin = Cubin("copy_kernel", "sm_90a", b"\x7fELF", "", (8,), 128)
    with fake_cuda.installed() as fake:
        cubin.launcher(["*fp16"], grid=(2,), shared_bytes=0, device=0, **options)(0, 64)
        record = fake.last()
    found = [record.attributes[at] for at in range(0, len(record.attributes), 72)]
    assert found == attributes
    assert record.grid == (2, 1, 1)


def test_wrong_arguments_of_a_launch():
    cubin = Cubin("copy_kernel", "sm_90a", b"\x7fELF", "", (8, 128), 128)
    with pytest.raises(OptionError) as caught:
        cubin.launcher(["nvTmaDesc", "i32"], grid=(1,), shared_bytes=0, device=0)
    assert str(caught.value) == (
        "launch: kernel 'copy_kernel' has parameters of (8, 128) bytes, and types is ('nvTmaDesc', "
        "'i32'), of (128, 4). Try: *fp16 or another pointer for 8 bytes, nvTmaDesc for 128, i32 or "
        "fp32 for 4."
    )
    with fake_cuda.installed():
        launch = cubin.launcher(["*fp16", "nvTmaDesc"], grid=(1,), shared_bytes=0, device=0)
        with pytest.raises(ArgumentError) as caught:
            launch(0, torch.zeros(1))
    assert str(caught.value) == (
        "launch: kernel 'copy_kernel' has 2 parameters, 1 were given. Try: launch(stream, "
        "*arguments) in the kernel's order."
    )
