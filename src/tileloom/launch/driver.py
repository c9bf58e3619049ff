"""The CUDA driver with nothing in between: load a cubin, launch it.

Neither Triton nor torch is needed. The driver is called by ctypes: a launch is one
`struct.pack_into` and one call of `cuLaunchKernelEx` with four arguments that were converted
before. `cuda.bindings` and `cuLaunchKernel` convert eleven on every call, which costs more than
the rest (docs/launching.md has the numbers).

A launch lies in one block of memory, written by one thread at a time:

    CUlaunchConfig | values that vary | values that are fixed | addresses of all values

The driver copies the values before the call returns, so a block is free again after it. Each
launch keeps a list of free blocks; a second thread in the middle of the same launch takes another.

>>> function = load_cubin(cubin, "add_kernel", shared_bytes=0, device=0)  # doctest: +SKIP
>>> launch = packed_launch(  # doctest: +SKIP
...     function.handle, ["*fp32", "i32", "*i8", "*i8"], {1: 4096, 2: 0, 3: 0},
...     grid=(4, 1, 1), threads=128, name="add_kernel", device=0)
>>> launch(stream, tensor.data_ptr())  # doctest: +SKIP
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from tileloom.errors import ArgumentError, LaunchError, OptionError, shown_value

TENSOR_MAP = "nvTmaDesc"
"""The type of a parameter that is a CUtensorMap of 128 bytes, in Triton's words."""

_LIBRARY = "libcuda.so.1"
_CODES = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H",
    "u32": "I", "u64": "Q", "fp16": "e", "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip
_CONFIG_BYTES, _STREAM_AT = 56, 32  # of CUlaunchConfig, and of its hStream
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_MOST_GRID = (2**31 - 1, 65535, 65535)
_JOINT = 64  # how many combinations of tensor maps a launch keeps
_contexts: dict[int, int] = {}
_lock = threading.Lock()


@functools.cache
def library() -> ctypes.CDLL:
    """Load the driver's library.

    Raises:
        LaunchError: If this machine has none.
    """
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise LaunchError(
            f"launch: {_LIBRARY} cannot be loaded ({error}); launching needs NVIDIA's driver. "
            "Try: run on a machine with an NVIDIA GPU, or use the emulator (tileloom.emulator)."
        ) from None


def error_text(status: int) -> str:
    """Return the driver's own words for one of its error numbers."""
    text = ctypes.c_char_p()
    library().cuGetErrorString(status, ctypes.byref(text))
    return (text.value or b"unknown error").decode()


def check(status: int, what: str) -> None:
    """Raise a `LaunchError` in the driver's own words if it refused `what`."""
    if status:
        raise LaunchError(f"launch: {what} failed: CUDA error {status}, {error_text(status)}.")


def bind_context(device: int) -> None:
    """Make the primary context of a device the current one of this thread.

    A new thread has no context. Launches that meet this bind it and go on.

    Args:
        device: The device's number.

    Raises:
        LaunchError: If the driver refuses.
    """
    cuda = library()
    with _lock:
        if device not in _contexts:
            handle, context = ctypes.c_int(), ctypes.c_void_p()
            check(cuda.cuInit(0), "starting the driver")
            check(cuda.cuDeviceGet(ctypes.byref(handle), device), f"opening device {device}")
            status = cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
            check(status, f"opening the context of device {device}")
            _contexts[device] = context.value or 0
    check(cuda.cuCtxSetCurrent(ctypes.c_void_p(_contexts[device])), "binding the context")


def renew() -> None:
    """Forget, in a forked child, what only the parent has: contexts and threads with locks."""
    global _lock
    _lock = threading.Lock()
    _contexts.clear()


def capability(device: int) -> int:
    """Return a device's compute capability as one number, for example 90."""
    bind_context(device)
    numbers = [ctypes.c_int() for _ in range(2)]
    for number, attribute in zip(numbers, (75, 76)):  # COMPUTE_CAPABILITY_MAJOR, MINOR
        status = library().cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        check(status, f"asking device {device} for its compute capability")
    return numbers[0].value * 10 + numbers[1].value


@functools.cache
def cuda_version() -> int:
    """Return the CUDA version that the driver is for, as it counts: 12080 for 12.8."""
    number = ctypes.c_int()
    check(library().cuDriverGetVersion(ctypes.byref(number)), "asking the driver for its version")
    return number.value


@dataclass(frozen=True)
class Function:
    """A kernel in the memory of a device.

    Its module is never unloaded: a CUDA graph may still hold the kernel when nobody else does.

    Attributes:
        handle: The CUfunction.
        name: The kernel's name in the cubin.
        device: The device's number.
        registers: 32-bit registers of a thread.
        local_bytes: Local memory of a thread: spills and the stack.
        most_threads: Threads that a block may have.
    """

    handle: int
    name: str
    device: int
    registers: int
    local_bytes: int
    most_threads: int


def load_cubin(cubin: bytes, name: str, *, shared_bytes: int, device: int) -> Function:
    """Load a kernel onto a device.

    Args:
        cubin: The binary.
        name: The kernel's name in it.
        shared_bytes: Dynamic shared memory that launches will ask for.
        device: The device's number.

    Returns:
        The kernel, for the life of the process.

    Raises:
        LaunchError: If the binary is not for this device, holds no such kernel, or the device has
            less shared memory.
    """
    bind_context(device)
    cuda = library()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    status = cuda.cuModuleLoadData(ctypes.byref(module), cubin)
    check(status, f"loading kernel '{name}' onto device {device}")
    status = cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
    check(status, f"finding kernel '{name}' in its binary")
    if shared_bytes > 48 * 1024:  # beyond it only on request: MAX_DYNAMIC_SHARED_SIZE_BYTES
        status = cuda.cuFuncSetAttribute(function, 8, shared_bytes)
        check(status, f"giving kernel '{name}' {shared_bytes} bytes of shared memory")
    numbers = [ctypes.c_int() for _ in range(3)]
    for number, attribute in zip(numbers, (4, 3, 0)):  # NUM_REGS, LOCAL_SIZE, MAX_THREADS
        status = cuda.cuFuncGetAttribute(ctypes.byref(number), attribute, function)
        check(status, f"asking kernel '{name}' what it needs")
    registers, local_bytes, most_threads = (number.value for number in numbers)
    return Function(function.value or 0, name, device, registers, local_bytes, most_threads)


def normal_grid(grid: Sequence[int] | None, name: str) -> tuple[int, int, int]:
    """Check a grid and write it with three numbers.

    Args:
        grid: One to three numbers of blocks.
        name: The kernel's name, for the error.

    Raises:
        OptionError: If it is not one to three integers in the driver's range.
    """
    given: Any = grid
    try:
        sizes = [int(n.__index__()) for n in given]
    except (TypeError, AttributeError):
        sizes = []
    if not 1 <= len(sizes) <= 3:
        raise OptionError(
            f"launch: the grid of '{name}' is {shown_value(grid)}; it must be one to three "
            "integers. Try: (blocks,)."
        )
    whole = (*sizes, 1, 1)[:3]
    for axis, n, most in zip("xyz", whole, _MOST_GRID):
        if not 1 <= n <= most:
            remedy = "spread the blocks over x, which takes 2^31 - 1"
            if n < 1:
                remedy = "return before the launch where there is nothing to do"
            raise OptionError(
                f"launch: the grid of '{name}' is {tuple(sizes)}, which has {n} blocks along "
                f"{axis}; the driver takes 1 to {most}. Try: {remedy}."
            )
    return whole  # pyright: ignore[reportReturnType]


def slot_code(kind: str) -> str:
    """Return the `struct` code of a parameter's slot: 8 bytes, or 128 for a tensor map.

    Args:
        kind: Triton's type: ``"*fp16"``, ``"i32"``, ``"fp32"``, ``"nvTmaDesc"``.

    Raises:
        OptionError: If no such type can be packed.
    """
    if kind.startswith("*"):
        return "Q"
    if kind == TENSOR_MAP:
        return "128s"
    code = _CODES.get(kind)
    if code is None:
        raise OptionError(
            f"launch: a parameter of type {kind} cannot be packed; types: pointers, {TENSOR_MAP}, "
            f"{', '.join(_CODES)}. Try: pass it as fp32."
        )
    return code + "x" * (8 - struct.calcsize(code))


def _attributes(
    cluster: tuple[int, int, int], cooperative: bool, pdl: bool
) -> tuple[ctypes.Array[Any] | None, int]:
    """The launch attributes in the driver's form (CUlaunchAttribute, 72 bytes), and their number.

    They are those of Triton's own launcher, from 3.6 to 3.9.
    """
    found: list[bytes] = []
    if pdl:  # PROGRAMMATIC_STREAM_SERIALIZATION
        found.append(struct.pack("<i4xi60x", 6, 1))
    if cooperative:  # COOPERATIVE
        found.append(struct.pack("<i4xi60x", 2, 1))
    if cluster != (1, 1, 1):  # CLUSTER_DIMENSION, then its SCHEDULING_POLICY_PREFERENCE: spread
        found.append(struct.pack("<i4x3I52x", 4, *cluster))
        found.append(struct.pack("<i4xi60x", 5, 1))
    return (ctypes.create_string_buffer(b"".join(found)), len(found)) if found else (None, 0)


_SOURCE = """
def make(pack, run, recover, refuse, misfit, free, new, attributes, maps, single, result):
    def launch({parameters}):
        try:
            block = free.pop()
        except IndexError:
            block = new()
        memory, arguments = block
        try:
            pack(memory, {offset}, {packed})
        except OverflowError:
            pack(memory, {offset}, {converted})
        except misfit:
            refuse(stream, {values})
        status = run(*arguments)
        if status:
            recover(status, arguments)
        free.append(block)
        return result
    return launch
"""


class _Joint(dict[Any, bytes]):
    """Several tables as one: from the keys of all to their values, joined."""

    def __init__(self, tables: Sequence[Mapping[Any, bytes]]) -> None:
        super().__init__()
        self._tables = tables

    def __missing__(self, keys: Any) -> bytes:
        each = keys if len(self._tables) > 1 else (keys,)
        joined = b"".join([table[key] for table, key in zip(self._tables, each)])
        with _lock:
            if len(self) >= _JOINT:
                del self[next(iter(self))]
            self[keys] = joined
        return joined


def _single(number: float) -> float:
    """As C converts to float: beyond the largest number lies infinity."""
    return ctypes.c_float(number).value


@functools.lru_cache(maxsize=256)
def _maker(
    forms: str, attributes: int, geometry: tuple[int, int, int] | None
) -> Callable[..., Any]:
    """Compile the launch of some values: positional, no loop, one pack, one call.

    Args:
        forms: A letter for each value that varies: ``m`` the key of a tensor map, ``f`` a float of
            32 bits, ``v`` any other.
        attributes: Number of launch attributes.
        geometry: Threads, shared bytes and cluster size where the grid varies too.
    """
    values = [f"v{i}" for i in range(len(forms))]
    parameters, packed, offset = ["stream", *values], ["stream"], _STREAM_AT
    if attributes:
        packed += ["attributes", str(attributes)]
    if geometry is not None:
        parameters = ["x", "y", "z", *parameters]
        threads, shared_bytes, num_ctas = map(str, geometry)
        packed = [f"x * {num_ctas}", "y", "z", threads, "1", "1", shared_bytes, *packed]
        offset = 0
    keys = [value for form, value in zip(forms, values) if form == "m"]
    if keys:
        packed.append(f"maps[{', '.join(keys)}]")
    rest = [(form, value) for form, value in zip(forms, values) if form != "m"]
    plain = [value for _, value in rest]
    converted = [f"single({value})" if form == "f" else value for form, value in rest]
    text = _SOURCE.format(
        parameters=", ".join(parameters), offset=offset, packed=", ".join(packed + plain),
        values=", ".join(values), converted=", ".join(packed + converted),
    )  # fmt: skip
    scope: dict[str, Any] = {}
    exec(text, scope)
    return scope["make"]


def packed_launch(
    function: int,
    types: Sequence[str],
    fixed: Mapping[int, Any],
    *,
    grid: Sequence[int] | None,
    threads: int,
    name: str,
    device: int,
    shared_bytes: int = 0,
    num_ctas: int = 1,
    cluster: tuple[int, int, int] | None = None,
    cooperative: bool = False,
    pdl: bool = False,
    tables: Mapping[int, Mapping[Any, bytes]] | None = None,
    result: Any = None,
) -> Callable[..., Any]:
    """Prepare the launch of a kernel, so that repeating it costs one pack and one call.

    Args:
        function: The CUfunction; the caller keeps its module loaded.
        types: Type of every parameter of the binary in Triton's words. A kernel that Triton 3.6
            to 3.9 made ends in two scratch pointers, which are parameters like any other.
        fixed: Values of the parameters that are the same in each launch, by position.
        grid: Blocks along x, y and z; None if each launch says it.
        threads: Threads of a block.
        name: The kernel's name, for errors.
        device: The device that the function was loaded onto.
        shared_bytes: Dynamic shared memory of a block.
        num_ctas: Blocks of a cluster, along x; the grid counts clusters then.
        cluster: Blocks of a cluster along x, y and z instead; the grid counts blocks.
        cooperative: Whether all blocks must be resident together.
        pdl: Whether the kernel may start before the one ahead of it ends.
        tables: For tensor maps that vary, a table from the value given to its 128 bytes.
        result: What a launch returns.

    Returns:
        `launch(stream, *values)` with the values of the other parameters in their order: addresses
        and numbers as Python numbers, tensor maps as 128 bytes. With `grid=None` it is
        `launch(x, y, z, stream, *values)`. It may be called from any thread.

    Raises:
        OptionError: If a type cannot be packed.
    """
    tables = tables or {}
    shown = [i for i in range(len(types)) if i not in fixed]
    looked_up = [i for i in shown if i in tables]
    order = [*looked_up, *(i for i in shown if i not in tables)]
    codes = [slot_code(kind) for kind in types]
    attributes, count = _attributes(cluster or (num_ctas, 1, 1), cooperative, pdl)
    start = "<QQI4x" if count else "<Q16x"
    if grid is None:
        start = "<7I4x" + start[1:]
    maps = f"{128 * len(looked_up)}s" if looked_up else ""
    pack = struct.Struct(start + maps + "".join(codes[i] for i in order[len(looked_up) :]))
    where, end = _addresses(codes, order)
    template = bytearray(end + 8 * len(types))
    x, y, z = grid or (1, 1, 1)
    struct.pack_into("<7I", template, 0, x * num_ctas, y, z, threads, 1, 1, shared_bytes)
    for i, value in fixed.items():
        _store(template, where[i], types[i], codes[i], value)
    cuda = library()

    def new() -> tuple[Any, tuple[Any, ...]]:
        memory = (ctypes.c_char * len(template)).from_buffer_copy(template)
        base = ctypes.addressof(memory)
        struct.pack_into(f"<{len(types)}Q", memory, end, *(base + at for at in where))
        pointer = ctypes.c_void_p.from_param
        converted = (pointer(base), pointer(function), pointer(base + end), pointer(None))
        return memory, converted

    def recover(status: int, arguments: tuple[Any, ...]) -> None:
        if status == _NO_CONTEXT:
            bind_context(device)
            status = cuda.cuLaunchKernelEx(*arguments)
        check(status, f"launching '{name}'")

    geometry = None if grid is not None else (threads, shared_bytes, num_ctas)
    address = ctypes.addressof(attributes) if attributes is not None else 0
    forms = ["m" if i in tables else "f" if codes[i][0] == "f" else "v" for i in shown]
    make = _maker("".join(forms), count, geometry)
    joint = _Joint([tables[i] for i in looked_up])
    launch = make(
        pack.pack_into,
        cuda.cuLaunchKernelEx,
        recover,
        functools.partial(_refuse, name, [types[i] for i in shown]),
        struct.error,
        [new()],
        new,
        address,
        joint,
        _single,
        result,
    )
    launch.__dict__["attributes"] = attributes  # alive as long as the launch that points to it
    return launch


def _refuse(name: str, types: Sequence[str], stream: Any, *values: Any) -> NoReturn:
    """Say which number does not fit the type that its parameter was compiled with."""
    if type(stream) is not int or not 0 <= stream < 2**64:
        raise ArgumentError(
            f"launch: the stream of '{name}' is {shown_value(stream)}; it must be a CUstream, an "
            "integer. Try: torch.cuda.current_stream().cuda_stream."
        )
    for place, (kind, value) in enumerate(zip(types, values), start=1):
        try:
            if kind != TENSOR_MAP:
                struct.pack("<" + slot_code(kind), value)
        except struct.error:
            raise ArgumentError(
                f"launch: number {place} of those that '{name}' is launched with is "
                f"{shown_value(value)}, which is no {kind}, as it was compiled for. Try: a kernel "
                "compiled for a wider type."
            ) from None
        except OverflowError:  # infinity, as C converts
            continue
    raise OptionError(
        f"launch: the grid of '{name}' is out of the driver's range, which is 1 to 2^31 - 1 along "
        "x and 1 to 65535 along y and z. Try: more work in each block."
    )


def _addresses(codes: Sequence[str], shown: Sequence[int]) -> tuple[list[int], int]:
    """Where each parameter's value lies in a block: those that vary first. And where they end."""
    where, at = [0] * len(codes), _CONFIG_BYTES
    rest = [i for i in range(len(codes)) if i not in set(shown)]
    for i in (*shown, *rest):
        where[i] = at
        at += struct.calcsize("<" + codes[i])
    return where, at


def _store(memory: bytearray, at: int, kind: str, code: str, value: Any) -> None:
    if kind in ("fp32", "f32"):
        value = _single(value)
    struct.pack_into("<" + code, memory, at, value)
