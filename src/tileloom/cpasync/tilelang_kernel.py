"""A kernel that TileLang generated for CuTe DSL, compiled and launched without its host wrapper.

TileLang wraps what it generates in a Python module that imports TVM, compiles a C++ launcher with
nvcc and calls it. Here the kernel's own text is enough: it is written out with its import changed
to `tileloom.cpasync.tilelang`, compiled, and launched by the driver.
"""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from tileloom.cpasync.cubin import Cubin, compile_cubin
from tileloom.cpasync.extra import require_cute
from tileloom.errors import OptionError

NAMESPACE = "tileloom.cpasync.tilelang"

_DTYPES = {
    "*i1": "Uint8", "*i8": "Int8", "*u8": "Uint8", "*i16": "Int16", "*u16": "Uint16",
    "*i32": "Int32", "*u32": "Uint32", "*i64": "Int64", "*fp16": "Float16", "*bf16": "BFloat16",
    "*fp32": "Float32", "*fp64": "Float64", "*fp8e4nv": "Float8E4M3FN", "*fp8e5": "Float8E5M2",
    "i32": "Int32", "i64": "Int64", "fp32": "Float32", "fp64": "Float64",
}  # fmt: skip
_MAP = "nvTmaDesc"
_HEAD = """\
import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as cuda
from cutlass._mlir.dialects import nvvm  # what a store with an L2 policy names
import {namespace} as tl

{source}

@cute.jit
def host({parameters}):
{lines}
  {name}({arguments}).launch(
    grid={grid}, block=[{threads}, 1, 1], smem={shared_bytes}, min_blocks_per_mp=1
  )
"""
# What it says is not read: the kernel's parameter is 128 bytes, whatever descriptor is given.
_ANY_MAP = (
    "cuda.create_tensor_map_tiled(global_address=cutlass.Int64(0), dtype=cutlass.Uint8, "
    "global_dims=[16], global_strides=[], box_dims=[16])"
)


@dataclass(frozen=True)
class GeneratedKernel:
    """What TileLang generated, and what its host code knows about the launch.

    Attributes:
        source: The text of the kernel: `CompiledArtifact.kernel_source`.
        name: Of its function.
        parameters: Name and type of each parameter in order: ``"*fp16"`` and so on for tensors,
            ``"nvTmaDesc"`` for TMA descriptors, ``"i32"``, ``"fp32"`` and so on for numbers.
        grid: Blocks along x, y and z.
        threads: Threads of a block.
        shared_bytes: Dynamic shared memory of a block.

    Raises:
        OptionError: If the text has no such kernel, or other parameters, or a type is not known.
    """

    source: str = field(repr=False)
    name: str
    parameters: Mapping[str, str]
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int

    def __post_init__(self) -> None:
        """Check that text and parameters fit each other."""
        found = re.search(rf"^def {re.escape(self.name)}\((.*?)\):", self.source, re.MULTILINE)
        names = [p.split(":")[0].strip() for p in found[1].split(",")] if found else []
        if names != list(self.parameters):
            has = f"def {self.name}({', '.join(names)})" if found else f"no function '{self.name}'"
            raise OptionError(
                f"GeneratedKernel: the source has {has}, and parameters is "
                f"{tuple(self.parameters)}. Try: the parameters of the kernel, in its order."
            )
        unknown = [kind for kind in self.parameters.values() if kind not in (*_DTYPES, _MAP)]
        if unknown:
            raise OptionError(
                f"GeneratedKernel: parameters has the type {unknown[0]!r}; known: {_MAP}, "
                f"{', '.join(_DTYPES)}. Try: *fp16 for a tensor of float16."
            )

    def module_text(self, namespace: str = NAMESPACE) -> str:
        """Return the module that is compiled: imports, the kernel, a function that launches it.

        Args:
            namespace: The module that the kernel knows as ``tl``.
        """
        parameters: list[str] = []
        lines: list[str] = []
        source = self.source
        for name, kind in self.parameters.items():
            if kind == _MAP:
                lines.append(f"  {name} = {_ANY_MAP}")
                source = re.sub(
                    rf"^(def {re.escape(self.name)}\(.*?\b{re.escape(name)})\b(?!:)",
                    r"\1: cutlass.GridConstant[cuda.TensorMap]", source, flags=re.MULTILINE,
                )  # fmt: skip
            elif kind.startswith("*"):  # kernels count elements from the first one
                parameters.append(f"{name}: cute.Pointer")
                lines.append(f"  {name} = cute.make_tensor({name}, (1 << 30,))")
            else:
                parameters.append(f"{name}: cutlass.{_DTYPES[kind]}")
        return _HEAD.format(
            namespace=namespace, source=source, parameters=", ".join(parameters),
            lines="\n".join(lines), name=self.name, arguments=", ".join(self.parameters),
            grid=list(self.grid), threads=self.threads, shared_bytes=self.shared_bytes,
        )  # fmt: skip

    def compile(self, arch: str = "sm_90a", *, namespace: str = NAMESPACE) -> Cubin:
        """Compile the kernel, with no GPU.

        Args:
            arch: For example ``"sm_90a"``, which TileLang's sm_90 means.
            namespace: The module that the kernel knows as ``tl``; TileLang's own for comparisons.

        Returns:
            The kernel; `Cubin.launcher` with `list(parameters.values())`, `grid` and `shared_bytes`
            launches it.

        Raises:
            MissingCuteError: If the extra ``cute`` is not installed.
            MissingTileLangError: If TileLang is not installed and the kernel uses more than copies.
        """
        require_cute("GeneratedKernel")
        import cutlass  # pyright: ignore[reportMissingImports]
        from cutlass import cute  # pyright: ignore[reportMissingImports]
        from cutlass.cute.runtime import make_ptr  # pyright: ignore[reportMissingImports]

        arguments: list[Any] = []
        for kind in self.parameters.values():
            if kind == _MAP:
                continue
            dtype: Any = getattr(cutlass, _DTYPES[kind])
            gmem = cute.AddressSpace.gmem
            is_tensor = kind.startswith("*")
            arguments.append(
                make_ptr(dtype, 1 << 20, gmem, assumed_align=16) if is_tensor else dtype(0)
            )
        with _imported(self.module_text(namespace), self.name) as module:
            return compile_cubin(module.host, *arguments, arch=arch)


@contextlib.contextmanager
def _imported(text: str, stem: str) -> Generator[Any]:
    """Import a text as a module from a file, while the DSL reads the source of what it compiles."""
    with tempfile.TemporaryDirectory(prefix="tileloom_tilelang_") as folder:
        path = Path(folder) / f"{stem}.py"
        path.write_text(text)
        module = ModuleType(path.parent.name)
        module.__file__ = str(path)
        sys.modules[module.__name__] = module
        try:
            exec(compile(text, str(path), "exec"), module.__dict__)
            yield module
        finally:
            del sys.modules[module.__name__]
