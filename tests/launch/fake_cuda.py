"""Triton's real CUDA driver and launchers on a machine without a GPU, over a fake libcuda.

The library is compiled from fake_cuda.c. Kernels are compiled for sm_90 in earnest; a launch is
written down: grid, block, shared memory, stream, attributes and the bytes of every parameter.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import os
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from tileloom import launch
from tileloom.launch import driver as ours
from tileloom.launch import tiers
from tileloom.launch.bundle_parameters import ptx_fields

_SOURCE = Path(__file__).with_name("fake_cuda.c")
_next = itertools.count(0x7F0000000000, 1 << 20)


@dataclass(frozen=True)
class Record:
    """One launch as the driver saw it."""

    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    stream: int
    function: int
    attributes: bytes
    values: bytes


class DeviceTensor:
    """What a launcher sees of a tensor on the GPU; an address without memory."""

    is_cuda = True
    device = torch.device("meta")

    def __init__(self, dtype=torch.float32, address=None, is_cuda=True):
        self.dtype = dtype
        self.address = next(_next) if address is None else address
        self.is_cuda = is_cuda

    def data_ptr(self):
        return self.address

    def is_pinned(self):
        return False


class Strided(DeviceTensor):
    """One with a shape, contiguous, for descriptors."""

    def __init__(self, dtype, shape):
        super().__init__(dtype)
        self.shape = shape

    def stride(self):
        return tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))


class FakeCuda:
    """The library, and Triton's driver over it; one a process."""

    def __init__(self, folder: Path):
        path = folder / "libcuda.so.1"
        command = ["gcc", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o"]
        subprocess.run([*command, str(path), str(_SOURCE)], check=True)
        os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
        # Loaded first, it is what later requests for libcuda.so.1 find.
        self.library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self.stream = 0
        self.device = 0
        ours.library.cache_clear()
        from triton.backends.nvidia import driver as nvidia
        from triton.runtime.driver import driver

        fake = self

        class Driver(nvidia.CudaDriver):
            def __init__(self):
                self.utils = nvidia.CudaUtils()
                self.launcher_cls = nvidia.CudaLauncher
                self.get_device_capability = lambda device=0: (9, 0)
                self.get_current_stream = lambda device: fake.stream
                self.get_current_device = lambda: fake.device
                self.set_current_device = lambda device: None

            def get_active_torch_device(self):
                return torch.device("cpu")

        ours.bind_context(0)
        self.driver = Driver()
        driver.set_active(self.driver)
        self.believe()

    def believe(self, *chosen):
        """Let the self-tests, which need a GPU, pass for some tiers; for all by default."""
        for tier in tiers.TIERS:
            tiers._verdicts[0, tier] = not chosen or tier in chosen

    def define(self, compiled):
        """Tell the library how large a kernel's parameters are, from its PTX."""
        sizes = [size for _, size in ptx_fields(compiled.asm["ptx"])]
        self.define_sizes(compiled.function, sizes)

    def define_sizes(self, function, sizes):
        """As `define`, of a kernel whose PTX is not at hand."""
        array = (ctypes.c_uint32 * len(sizes))(*sizes)
        self.library.fake_define(ctypes.c_uint64(function), len(sizes), array)

    def count(self, what="launches"):
        return ctypes.c_uint32.in_dll(self.library, f"fake_{what}").value

    def fail(self, status):
        ctypes.c_uint32.in_dll(self.library, "fake_status").value = status

    def last(self, back=1) -> Record:
        size = 8 * 4 + 16 + 4 * 72 + 8 + 4096
        start = ctypes.addressof(ctypes.c_char.in_dll(self.library, "fake_records"))
        raw = ctypes.string_at(start + (self.count() - back) % 4096 * size, size)
        *numbers, count = struct.unpack_from("<8I", raw)
        stream, function = struct.unpack_from("<2Q", raw, 32)
        used, _ = struct.unpack_from("<2I", raw, 48 + 288)
        return Record(
            tuple(numbers[:3]), tuple(numbers[3:6]), numbers[6], stream, function,
            raw[48 : 48 + 72 * count], raw[344 : 344 + used],
        )  # fmt: skip


@functools.cache
def _the_one() -> FakeCuda:
    # Triton's C code finds the driver's functions once: a second library would never be asked.
    return FakeCuda(Path(tempfile.mkdtemp(prefix="tileloom-fake-cuda-")))


@contextlib.contextmanager
def installed():
    """Triton's CUDA driver over the fake library, inside a `with` block; one for a process."""
    from triton.runtime.driver import driver

    before, path = driver._active, os.environ.get("TRITON_LIBCUDA_PATH")
    fake = _the_one()
    driver.set_active(fake.driver)
    fake.believe()
    try:
        yield fake
    finally:
        driver.set_active(before)
        os.environ.pop("TRITON_LIBCUDA_PATH", None)
        if path is not None:
            os.environ["TRITON_LIBCUDA_PATH"] = path
        tiers._verdicts.clear()


def tensors(count, dtype=torch.float32):
    return [DeviceTensor(dtype) for _ in range(count)]


class Both:
    """Launches a kernel by Triton and by us, and compares what the driver saw."""

    def __init__(self, cuda, kernel, **options):
        self.cuda, self.kernel, self.options = cuda, kernel, options
        self.launcher = launch.prepare(kernel, **options)
        self.defined = set()

    def __call__(self, grid, *args, **named):
        compiled = self.kernel[grid](*args, **named, **self.options)
        if compiled.function not in self.defined:
            self.cuda.define(compiled)
            self.defined.add(compiled.function)
            self.kernel[grid](*args, **named, **self.options)
        expected, before = self.cuda.last(), self.cuda.count()
        assert expected.values
        result = self.launcher[grid](*args, **named)
        assert self.cuda.count() == before + 1
        assert self.cuda.last() == expected
        assert result is compiled
        return expected


def warm(launcher, args, **named):
    for _ in range(4):
        launcher[(8,)](*args, **named)
    assert launcher._table
