"""Launching from a bundle up to the driver's call, without a GPU: which kernel, which bytes."""

import struct
import threading
from contextlib import nullcontext

import pytest
from tests.launch.bundle_fakes import (
    BINARIES,
    VARIANTS,
    FakeCuda,
    FakeTensor,
    descriptor,
    handmade,
    install,
    pointers,
    variant,
)
from tests.launch.bundle_samples import SCALARS

from tileloom.errors import BundleError, LaunchError, OptionError
from tileloom.launch.aot import compile_aot
from tileloom.launch.bundle import least_driver, load_bundle, reason_against
from tileloom.launch.bundle_format import write_bundle
from tileloom.launch.bundle_parameters import fields_of, ptx_fields, types_of


@pytest.fixture
def cuda(monkeypatch):
    return install(monkeypatch, FakeCuda())


@pytest.fixture
def bundle(small_bundle):
    return load_bundle(small_bundle)


def launched(cuda, variant, launch):
    """Launch, and return what the driver was given; parameters by the sizes that the PTX has."""
    cuda.sizes = [size for _, size in fields_of(types_of(variant.parameters))]
    launch()
    return cuda.launches[-1]


def test_a_launch(cuda, bundle):
    kernel = bundle.kernel("add[fp32]")
    x, y, out = (FakeTensor("float32", 0x7F0000000000 + 256 * i) for i in range(3))
    seen = launched(cuda, kernel.variants[0], lambda: kernel[(7, 2)](x, y, out, 7001, BLOCK=1024))
    assert (seen.grid, seen.threads, seen.shared, seen.stream) == ((7, 2, 1), 128, 0, 0x5EA)
    assert seen.attributes == 0
    addresses = pointers(x.data_ptr(), y.data_ptr(), out.data_ptr())
    assert seen.parameters == [*addresses, struct.pack("<i", 7001), *pointers(0, 0)]
    assert cuda.loaded == [b"\x7fELF"]
    assert cuda.entry == "add_kernel"


def test_a_kernel_is_loaded_once(cuda, bundle):
    kernel = bundle.kernel("add[fp32]")
    x = FakeTensor("float32")
    for n in range(5):
        launched(cuda, kernel.variants[0], lambda n=n: kernel[(1,)](x, x, x, n))
    launched(cuda, kernel.variants[0], lambda: bundle.kernel("add")[(1,)](x, x, x, 9))
    assert len(cuda.loaded) == 1
    assert [struct.unpack("<i", s.parameters[3])[0] for s in cuda.launches] == [0, 1, 2, 3, 4, 9]


def test_threads_load_a_kernel_once_and_keep_their_arguments_apart(cuda, bundle):
    kernel = bundle.kernel("add[fp32]")
    x = FakeTensor("float32")
    cuda.sizes = [size for _, size in fields_of(types_of(kernel.variants[0].parameters))]
    start = threading.Barrier(8)

    def work(number):
        start.wait()
        for i in range(50):
            kernel[(number + 1,)](x, x, x, 1000 * number + i)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cuda.loaded) == 1
    found = {(s.grid[0] - 1, struct.unpack("<i", s.parameters[3])[0]) for s in cuda.launches}
    assert found == {(number, 1000 * number + i) for number in range(8) for i in range(50)}


def test_every_kind_of_number_has_the_bytes_that_the_kernel_reads(cuda, bundle):
    kernel = bundle.kernel("scalars")
    out = FakeTensor("float64")
    given = {
        "a": True, "b": -3, "c": 250, "d": -30000, "e": -(2**31), "f": 2**32 - 1, "g": -(2**63),
        "h": 2**64 - 1, "i": 0.1, "j": 0.1, "k": 3.14159,
    }  # fmt: skip
    assert given.keys() == SCALARS.keys()
    seen = launched(
        cuda,
        kernel.variants[0],
        lambda: kernel[(1,)](out, **given, absent=None, one=1, MODE="twelve"),
    )
    codes = dict(zip(SCALARS, "?bBhiIqQfd"))
    wanted = [struct.pack(f"<{codes[n]}", given[n]) for n in codes]
    bfloat16 = struct.pack("<f", 3.14159)[2:]
    assert seen.parameters == [*pointers(out.data_ptr()), *wanted, bfloat16, *pointers(0, 0)]


def test_a_number_beyond_float32_becomes_infinite_as_in_c(cuda, bundle):
    kernel = bundle.kernel("scalars")
    given = dict.fromkeys(SCALARS, 1) | {"a": False, "i": -1e300, "j": 1e300, "k": float("nan")}
    seen = launched(
        cuda,
        kernel.variants[0],
        lambda: kernel[(1,)](FakeTensor("float64"), **given, absent=None, one=1),
    )
    assert struct.unpack("<f", seen.parameters[9]) == (float("-inf"),)
    assert struct.unpack("<d", seen.parameters[10]) == (1e300,)
    assert struct.unpack("<f", b"\0\0" + seen.parameters[11])[0] != 0  # a NaN stays one


def test_the_sizes_are_those_of_the_compiled_text(small_bundle):
    """The other tests read the driver's memory by these sizes: they come from the compiler."""
    from tests.launch.bundle_samples import MANY
    from tests.launch.samples import WGMMA

    found = {v.name: v for v in load_bundle(small_bundle).variants()}
    for spec in (MANY, WGMMA):
        ptx = compile_aot(spec, "sm_90").ptx
        fields = fields_of(types_of(found[spec.name].parameters))
        assert fields == ptx_fields(ptx)
        assert len(fields) > 10


def test_a_descriptor_is_encoded_at_the_launch(cuda, bundle):
    kernel = bundle.kernel("wgmma")
    a, b = descriptor(64, 512, [64, 64]), descriptor(128, 512, (128, 64), padding="nan")
    out = FakeTensor("float32")
    seen = launched(
        cuda,
        kernel.variants[0],
        lambda: kernel[(1,)](a, b, out, 8, N=128, NUM_STAGES=3, SERIAL=False),
    )
    first, second = cuda.maps
    assert first == {
        "type": 9,  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
        "address": 0x7F0000AB0000,
        "shape": (512, 64),  # the innermost dimension first
        "strides": (1024,),  # bytes
        "box": (64, 64),
        "ones": (1, 1),
        "modes": (0, 3, 2, 0),  # no interleave, 128 bytes of swizzle, L2 promotion 128, zeros
    }
    assert (second["box"], second["modes"]) == ((64, 128), (0, 3, 2, 1))
    sizes = [struct.pack("<i", n) for n in (64, 512)], [struct.pack("<q", n) for n in (512, 1)]
    assert seen.parameters[:5] == [b"\1" * 128, *sizes[0], *sizes[1]]
    assert seen.parameters[5] == b"\2" * 128
    assert seen.parameters[-3:] == [struct.pack("<i", 8), *pointers(0, 0)]
    assert seen.shared == 73752
    assert cuda.wanted_shared == [(8, 73752)]  # MAX_DYNAMIC_SHARED_SIZE_BYTES


def test_scratch_memory_is_given_for_each_block(cuda, bundle, monkeypatch):
    import torch

    asked = []

    def empty(size, dtype, device):
        asked.append((size, dtype, str(device)))
        return FakeTensor("uint8", 0x7F00CAFE0000)

    monkeypatch.setattr(torch, "empty", empty)
    kernel = bundle.kernel("scratch")
    x = FakeTensor("float32")
    seen = launched(cuda, kernel.variants[0], lambda: kernel[(3, 2)](x, x))
    assert asked == [(6 * 128, torch.uint8, "cuda:0")]
    assert seen.parameters == pointers(x.data_ptr(), x.data_ptr(), 0x7F00CAFE0000, 0)


def test_an_address_may_stand_for_a_tensor(cuda, bundle):
    kernel = bundle.kernel("add[fp32]")
    seen = launched(cuda, kernel.variants[0], lambda: kernel[(1,)](4096, 4096, 8192, 1))
    assert seen.parameters[:3] == pointers(4096, 4096, 8192)


def test_the_grid_may_be_a_function_of_all_arguments(cuda, bundle):
    kernel = bundle.kernel("add[fp32]")
    x = FakeTensor("float32")
    kernel[lambda meta: (-(-meta["n"] // meta["BLOCK"]),)](x, x, x, 5000)
    assert cuda.launches[0].grid == (5, 1, 1)


def test_a_grid_out_of_range_is_refused(cuda, bundle):
    kernel = bundle.kernel("add[fp32]")
    x = FakeTensor("float32")
    with pytest.raises(OptionError, match="has 0 blocks along x"):
        kernel[(0,)](x, x, x, 5000)
    assert (cuda.launches, cuda.loaded) == ([], [])
    with pytest.raises(OptionError, match="the grid of 'add"):
        kernel[(1, 70000)](x, x, x, 5000)
    with pytest.raises(OptionError, match=r"n is 1\.5, it takes an integer"):
        kernel[(0,)](x, x, x, 1.5)


def test_a_launch_goes_to_the_gpu_of_its_tensors(cuda, bundle, monkeypatch):
    import torch

    asked = []
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 100 + index)
    monkeypatch.setattr(torch.cuda, "device", lambda index: asked.append(index) or nullcontext())
    kernel = bundle.kernel("add[fp32]")
    for device in ("cuda:0", "cuda:1", "cuda:1", "cuda:0"):
        x = FakeTensor("float32", device=device)
        kernel[(1,)](x, x, x, 1)
    assert [seen.stream for seen in cuda.launches] == [100, 101, 101, 100]
    assert len({seen.function for seen in cuda.launches}) == len(cuda.loaded) == 2
    assert asked == [1, 1]


def test_clusters_and_attributes_reach_the_driver(cuda, tmp_path):
    clustered = variant("k", parameters=(), num_ctas=2, cooperative=True, pdl=True)
    handmade(tmp_path, clustered).kernel("k")[(3, 5)]()
    (seen,) = cuda.launches
    assert seen.grid == (6, 5, 1)
    assert seen.attributes != 0


def test_names(bundle):
    with pytest.raises(
        BundleError, match=r"there is no kernel 'adb' in '.*'\. Did you mean 'add'\?"
    ):
        bundle.kernel("adb")
    with pytest.raises(
        BundleError, match=r"no kernel 'zz' in .* Kernels: add, scalars, scratch, w"
    ):
        bundle.kernel("zz")
    assert repr(bundle).endswith("small.bundle' of 7 kernels>")
    assert repr(bundle.kernel("add")).startswith("<kernel add of <bundle ")


def test_a_key_finds_its_variant(bundle):
    for made in bundle.variants():
        assert bundle.find(made.key) == made
    assert bundle.find("0" * 64) is None


@pytest.mark.parametrize(
    ("arch", "target", "toolkit", "capability", "version", "said"),
    [
        ("sm_90", "sm_90a", "12.8", 90, 12000, ""),
        ("sm_90", "sm_90a", "13.4", 90, 13000, ""),
        ("sm_80", "sm_80", "12.8", 80, 12080, ""),
        ("sm_80", "sm_80", "12.8", 89, 12080, ""),
        ("sm_90", "sm_90a", "12.8", 80, 12080, "it is built for sm_90a, the GPU is an sm_80"),
        ("sm_90", "sm_90a", "12.8", 100, 13000, "it is built for sm_90a, the GPU is an sm_100"),
        ("sm_80", "sm_80", "12.8", 90, 13000, "it is built for sm_80, the GPU is an sm_90"),
        ("sm_80", "sm_80", "12.8", 75, 13000, "it is built for sm_80, the GPU is an sm_75"),
        ("sm_100", "sm_100a", "12.9", 103, 13000, "built for sm_100a, the GPU is an sm_103"),
        (
            "sm_90", "sm_90a", "13.4", 90, 12080,
            "it needs a driver for CUDA 13.0 or later, the driver here is for CUDA 12.8",
        ),
        (
            "sm_100", "sm_100a", "12.9", 100, 12040,
            "it needs a driver for CUDA 12.8 or later, the driver here is for CUDA 12.4",
        ),
    ],
)  # fmt: skip
def test_where_a_binary_runs(arch, target, toolkit, capability, version, said):
    made = variant(arch=arch, target=target, toolkit=toolkit)
    why = reason_against(made, capability, version)
    assert said in why
    assert bool(said) == bool(why)
    assert least_driver(made) >= int(toolkit[:2]) * 1000


@pytest.mark.parametrize(
    ("fake", "said"),
    [
        (
            {"capability": 100},
            "cannot run on device 0: it is built for sm_90a, the GPU is an sm_100; it is built for "
            "sm_80, the GPU is an sm_100. Try: a bundle that is built for this machine.",
        ),
        (
            {"version": 11080},
            "cannot run on device 0: it needs a driver for CUDA 12.0 or later, the driver here is "
            "for CUDA 11.8; it is built for sm_80, the GPU is an sm_90. Try: a bundle",
        ),
    ],
)
def test_another_machine_is_refused_with_both_versions_named(monkeypatch, small_bundle, fake, said):
    cuda = install(monkeypatch, FakeCuda(**fake))
    x = FakeTensor("float32")
    with pytest.raises(BundleError) as caught:
        load_bundle(small_bundle).kernel("add")[(1,)](x, x, x, 1)
    assert said in str(caught.value)
    assert cuda.loaded == []


def test_a_card_of_sm_80_takes_the_kernels_built_for_it(monkeypatch, small_bundle):
    cuda = install(monkeypatch, FakeCuda(capability=86))
    bundle, x = load_bundle(small_bundle), FakeTensor("float32")
    bundle.kernel("add")[(1,)](x, x, x, 1)
    assert len(cuda.launches) == 1
    with pytest.raises(BundleError, match="it is built for sm_90a, the GPU is an sm_86"):
        bundle.load(bundle.kernel("wgmma").variants[0], 0)


def test_what_the_driver_refuses_is_told_in_its_words(cuda, bundle):
    x = FakeTensor("float32")
    cuda.status["cuModuleLoadData"] = 209
    with pytest.raises(LaunchError, match="loading kernel 'add_kernel' onto device 0 failed: CUDA"):
        bundle.kernel("add[fp32]")[(1,)](x, x, x, 1)
    cuda.status.clear()
    bundle.kernel("add[fp32]")[(1,)](x, x, x, 1)
    assert len(cuda.launches) == 1


def test_a_damaged_binary_is_said_and_nothing_is_loaded(cuda, tmp_path):
    write_bundle(tmp_path / "b", VARIANTS, BINARIES, tileloom="0.1.0")
    data = bytearray((tmp_path / "b").read_bytes())
    data[-1] ^= 1  # in the second binary
    (tmp_path / "b").write_bytes(data)
    bundle, x = load_bundle(tmp_path / "b"), FakeTensor("float32")
    with pytest.raises(BundleError, match=r"is damaged: the binary of 'add\[b\]' is not what was"):
        bundle.kernel("add[b]")[(1,)](x, 1)
    assert cuda.loaded == []
    bundle.kernel("add[a]")[(1,)](x, 1)
    assert len(cuda.loaded) == 1
