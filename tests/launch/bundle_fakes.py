"""A driver, tensors and compiled kernels that are not there: up to the launch without a GPU."""

import contextlib
import ctypes
import hashlib
import struct
from types import SimpleNamespace

from tileloom.launch import driver
from tileloom.launch.bundle import load_bundle
from tileloom.launch.bundle_descriptor import TensorDescriptor
from tileloom.launch.bundle_format import Parameter, Variant, write_bundle

_P = ctypes.c_void_p
_I = ctypes.c_int


class FakeCuda:
    """What `driver.library()` gives: real C functions that call back here and note what they get.

    `launches` has for each launch the function's handle, grid, threads, shared bytes, stream,
    attributes and a reader of its parameters; `loaded` the binaries; `maps` what was encoded.
    """

    def __init__(self, capability=90, version=13000):
        self.numbers = {75: capability // 10, 76: capability % 10}
        self.version = version
        self.loaded = []
        self.wanted_shared = []
        self.launches = []
        self.maps = []
        self.status = {}
        for name, kinds in _PROTOTYPES.items():
            call = getattr(self, f"_{name}")
            guarded = self._guarded(name, call)
            setattr(self, name, ctypes.CFUNCTYPE(_I, *kinds)(guarded))

    def _guarded(self, name, call):
        def run(*arguments):
            if self.status.get(name):
                return self.status[name]
            return call(*arguments) or 0

        return run

    def cuGetErrorString(self, status, text):
        text._obj.value = f"number {status}".encode()

    def _cuInit(self, flags):
        pass

    def _cuDeviceGet(self, device, number):
        ctypes.c_int.from_address(device).value = number

    def _cuDevicePrimaryCtxRetain(self, context, device):
        ctypes.c_uint64.from_address(context).value = 0x77 + device

    def _cuCtxSetCurrent(self, context):
        pass

    def _cuDeviceGetAttribute(self, number, attribute, device):
        ctypes.c_int.from_address(number).value = self.numbers[attribute]

    def _cuDriverGetVersion(self, number):
        ctypes.c_int.from_address(number).value = self.version

    def _cuModuleLoadData(self, module, image):
        self.loaded.append(ctypes.string_at(image, 4))
        ctypes.c_uint64.from_address(module).value = len(self.loaded)

    def _cuModuleGetFunction(self, function, module, name):
        ctypes.c_uint64.from_address(function).value = 1000 + module
        self.entry = ctypes.string_at(name).decode()

    def _cuFuncSetAttribute(self, function, attribute, value):
        self.wanted_shared.append((attribute, value))

    def _cuFuncGetAttribute(self, number, attribute, function):
        ctypes.c_int.from_address(number).value = 1024

    def _cuLaunchKernelEx(self, config, function, parameters, extra):
        x, y, z, tx, ty, tz, shared, stream, _, attributes = struct.unpack(
            "<7I4xQQI", ctypes.string_at(config, 52)
        )
        assert (ty, tz, extra) == (1, 1, None)
        self.launches.append(
            SimpleNamespace(
                function=function,
                grid=(x, y, z),
                threads=tx,
                shared=shared,
                stream=stream,
                attributes=attributes,
                # Read now: the block is written again by the next launch.
                parameters=self._read(parameters),
            )
        )

    sizes = ()

    def _read(self, parameters):
        pointers = (ctypes.c_uint64 * len(self.sizes)).from_address(parameters)
        return [ctypes.string_at(at, size) for at, size in zip(pointers, self.sizes)]

    def _cuTensorMapEncodeTiled(self, room, kind, rank, address, *rest):
        sizes, steps, tile, ones, interleave, swizzle, promotion, padding = rest

        def read(at, kind, n):
            return tuple((kind * n).from_address(at))

        assert room % 64 == 0
        self.maps.append(
            {
                "type": kind,
                "address": address,
                "shape": read(sizes, ctypes.c_uint64, rank),
                "strides": read(steps, ctypes.c_uint64, rank - 1),
                "box": read(tile, ctypes.c_uint32, rank),
                "ones": read(ones, ctypes.c_uint32, rank),
                "modes": (interleave, swizzle, promotion, padding),
            }
        )
        ctypes.memset(room, len(self.maps), 128)


_PROTOTYPES = {
    "cuInit": (_I,),
    "cuDeviceGet": (_P, _I),
    "cuDevicePrimaryCtxRetain": (_P, _I),
    "cuCtxSetCurrent": (_P,),
    "cuDeviceGetAttribute": (_P, _I, _I),
    "cuDriverGetVersion": (_P,),
    "cuModuleLoadData": (_P, _P),
    "cuModuleGetFunction": (_P, _P, _P),
    "cuFuncSetAttribute": (_P, _I, _I),
    "cuFuncGetAttribute": (_P, _I, _P),
    "cuLaunchKernelEx": (_P, _P, _P, _P),
    "cuTensorMapEncodeTiled": (_P, _I, _I, _P, _P, _P, _P, _P, _I, _I, _I, _I),
}


def install(monkeypatch, fake, streams=lambda index: 0x5EA):
    """Put a fake in place of the driver's library and of PyTorch's idea of the current device."""
    import torch

    driver.cuda_version.cache_clear()
    monkeypatch.setattr(driver, "library", lambda: fake)
    monkeypatch.setattr(driver, "_contexts", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    # It is there where PyTorch was built for GPUs.
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", streams, raising=False)
    return fake


class FakeTensor:
    """As much of a tensor on a GPU as a launch looks at."""

    def __init__(self, dtype, address=0x7F0000001000, device="cuda:0"):
        import torch

        self.dtype = getattr(torch, dtype)
        self.device = torch.device(device)
        self._address = address

    def data_ptr(self):
        return self._address


BINARIES = [b"\x7fELF" + bytes(range(40)), b"\x7fELF" + bytes(20)]


def variant(name="add[a]", binary=0, **changes):
    values = {
        "name": name,
        "function": "kernels:add_kernel",
        "source": "5" * 64,
        "key": hashlib.sha256(name.encode()).hexdigest(),
        "arch": "sm_90",
        "target": "sm_90a",
        "ptx_version": "8.7",
        "toolkit": "12.8",
        "triton": "3.7.1",
        "parameters": (
            Parameter("x", "*fp32", True),
            Parameter("n", "i32"),
            Parameter("BLOCK", "constexpr", optional=True, value=64),
        ),
        "options": {"num_warps": 4, "num_stages": 3},
        "entry": "add_kernel",
        "threads": 128,
        "num_ctas": 1,
        "shared_bytes": 0,
        "registers": 24,
        "cooperative": False,
        "pdl": False,
        "scratch_bytes": 0,
        "binary": binary,
    }
    return Variant(**{**values, **changes})


VARIANTS = [variant(), variant("add[b]", 1), variant("add[c]", 0)]


def pointers(*addresses):
    return [struct.pack("<Q", address) for address in addresses]


def descriptor(rows, columns, box, **more):
    base = FakeTensor("bfloat16", 0x7F0000AB0000)
    return TensorDescriptor(base, [rows, columns], [columns, 1], box, **more)


def handmade(tmp_path, *variants):
    write_bundle(tmp_path / "b", variants, BINARIES, tileloom="0.1.0")
    return load_bundle(tmp_path / "b")
