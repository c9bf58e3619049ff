"""Kernels in CuTe DSL as binaries: compiled with no GPU, launched by the driver alone."""

from __future__ import annotations

import contextlib
import importlib
import math
import operator
import re
import struct
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tileloom.cpasync.extra import require_cute
from tileloom.cpasync.tensormap import TensorMap
from tileloom.errors import ArgumentError, OptionError
from tileloom.launch import driver
from tileloom.launch.bundle_parameters import ptx_fields

_ENTRY = re.compile(r"\.visible \.entry (\w+)\(")
_THREADS = re.compile(r"\.reqntid (\d+), (\d+), (\d+)")
_MOST_TOGETHER = 8  # what every GPU with clusters takes


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel.

    Attributes:
        name: Of the function in the binary.
        arch: What it was compiled for, for example ``"sm_90a"``.
        code: The binary.
        ptx: The text that it was assembled from.
        parameter_bytes: Size of each parameter of the binary.
        threads: Threads of a block.
    """

    name: str
    arch: str
    code: bytes = field(repr=False)
    ptx: str = field(repr=False)
    parameter_bytes: tuple[int, ...]
    threads: int

    def launcher(
        self,
        types: Sequence[str],
        *,
        grid: Sequence[int],
        shared_bytes: int,
        device: int,
        cluster: Sequence[int] = (1, 1, 1),
        cooperative: bool = False,
        pdl: bool = False,
    ) -> Callable[..., None]:
        """Load the kernel onto a device and prepare its launch.

        Args:
            types: The parameters in order: ``"*fp16"`` and so on for tensors, ``"nvTmaDesc"`` for
                TMA descriptors, ``"i32"``, ``"fp32"`` and so on for numbers.
            grid: Blocks along x, y and z.
            shared_bytes: Dynamic shared memory of a block.
            device: The device's number.
            cluster: Blocks of a cluster along x, y and z, 8 together at most.
            cooperative: Whether all blocks must be resident together, as a grid barrier wants.
            pdl: Whether the kernel may start before the one ahead of it ends.

        Returns:
            ``launch(stream, *arguments)``: the stream's handle, then for each parameter a tensor or
            an address, a `TensorMap` or its 128 bytes, or a number. Nothing is checked but how many
            there are; what lies behind an address must live until the kernel has run.

        Raises:
            OptionError: If the types do not fit the binary, the grid is none, or it does not
                consist of such clusters.
            LaunchError: If the device does not take the binary.
        """
        sizes = tuple(struct.calcsize("<" + driver.slot_code(kind).rstrip("x")) for kind in types)
        if sizes != self.parameter_bytes:
            raise OptionError(
                f"launch: kernel '{self.name[:60]}' has parameters of {self.parameter_bytes} "
                f"bytes, and types is {tuple(types)}, of {sizes}. Try: *fp16 or another pointer "
                "for 8 bytes, nvTmaDesc for 128, i32 or fp32 for 4."
            )
        function = driver.load_cubin(self.code, self.name, shared_bytes=shared_bytes, device=device)
        blocks = driver.normal_grid(grid, self.name)
        together = _normal_cluster(cluster, blocks, self.name)
        run = driver.packed_launch(
            function.handle, list(types), {}, grid=blocks, threads=self.threads, name=self.name,
            device=device, shared_bytes=shared_bytes, cluster=together, cooperative=cooperative,
            pdl=pdl,
        )  # fmt: skip
        count = len(types)

        def launch(stream: int, *arguments: Any) -> None:
            if len(arguments) != count:
                raise ArgumentError(
                    f"launch: kernel '{self.name[:60]}' has {count} parameters, {len(arguments)} "
                    "were given. Try: launch(stream, *arguments) in the kernel's order."
                )
            run(stream, *map(_value, arguments))

        return launch


def _normal_cluster(
    cluster: Sequence[int], grid: tuple[int, int, int], name: str
) -> tuple[int, int, int]:
    """Check a cluster and write it with three numbers."""
    try:
        sizes = tuple(map(operator.index, cluster))
    except TypeError:
        sizes = ()
    whole = (*sizes, 1, 1)[:3]
    if not 1 <= len(sizes) <= 3 or min(whole) < 1 or math.prod(whole) > _MOST_TOGETHER:
        raise OptionError(
            f"launch: the cluster of kernel '{name[:60]}' is {cluster!r}; it takes one to three "
            f"integers of at least 1, whose product is at most {_MOST_TOGETHER}. Try: (2, 1, 1)."
        )
    if any(blocks % size for blocks, size in zip(grid, whole)):
        raise OptionError(
            f"launch: the grid of kernel '{name[:60]}' is {grid}, which clusters of {whole} blocks "
            f"do not fill. Try: {tuple(-(-b // s) * s for b, s in zip(grid, whole))}."
        )
    return whole  # pyright: ignore[reportReturnType]


def _value(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    return argument.encoded if isinstance(argument, TensorMap) else argument


def compile_cubin(host: Any, *arguments: Any, arch: str, options: str = "") -> Cubin:
    """Compile the one kernel that a `cute.jit` function launches, with no GPU.

    Args:
        host: The function; it is traced, never run.
        arguments: What it is traced with, for example pointers of `cutlass.cute.runtime.make_ptr`.
        arch: One that the CuTe DSL knows, for example ``"sm_90a"``.
        options: More of `cute.compile`'s, for example ``"--enable-assertions"``.

    Returns:
        The kernel.

    Raises:
        MissingCuteError: If the extra ``cute`` is not installed.
        OptionError: If the CuTe DSL does not know the architecture, the function launches no
            kernel, or several, or the block is not a constant number of threads along x.
    """
    require_cute("compile_cubin")
    from cutlass import cute  # pyright: ignore[reportMissingImports]

    known = _architectures()
    if known and arch not in known:
        raise OptionError(
            f"compile_cubin: arch is {arch!r}; the CuTe DSL knows {', '.join(known)}. Try: "
            "arch='sm_90a'."
        )

    with tempfile.TemporaryDirectory(prefix="tileloom-cute-") as folder:
        options = f"--gpu-arch {arch} --keep-ptx --keep-cubin --dump-dir {folder} {options}"
        compiled: Any = cute.compile(host, *arguments, options=options)
        ptx, code = str(compiled.__ptx__), compiled.__cubin__
    names = _ENTRY.findall(ptx)
    if len(names) != 1:
        raise OptionError(
            f"compile_cubin: the function launches {len(names)} kernels; one is compiled at a "
            "time. Try: a function for each kernel."
        )
    sizes = tuple(size for _, size in ptx_fields(ptx))
    return Cubin(names[0], arch, bytes(code), ptx, sizes, _threads(ptx))


def _architectures() -> list[str]:
    """Names of what the installed CuTe DSL compiles for; none if it keeps them elsewhere."""
    for module in ("cutlass.base_dsl.enums", "cutlass.base_dsl.arch"):
        with contextlib.suppress(ImportError, AttributeError):
            return list(importlib.import_module(module).Arch.__members__)
    return []


def _threads(ptx: str) -> int:
    """Threads of a block, which lie along x and are known when the kernel is compiled."""
    found = _THREADS.search(ptx)
    if found is None or found.group(2, 3) != ("1", "1"):
        given = "known only at the launch" if found is None else " x ".join(found.groups())
        raise OptionError(
            f"compile_cubin: the kernel's block is {given}; it takes a constant number of threads "
            "along x. Try: .launch(block=(128, 1, 1), ...)."
        )
    return int(found[1])
