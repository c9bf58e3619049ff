"""The compile contracts of Triton 3.6 to 3.9: what differs, in one place, and known faults.

Importing this module loads no Triton; each function imports what it needs. Checked without a GPU
on 3.6.0, 3.7.1 and 3.9.0:

==================================  ==========  ==========  ==========
what                                3.6.0       3.7.1       3.9.0
==================================  ==========  ==========  ==========
assembler for sm_90                 ptxas       ptxas       ptxas-blackwell
assembler for sm_100                ptxas-blackwell in all of them
`--regAllocOptLevel=2`              no          yes         yes
fused multiply-add unless asked     yes         yes         yes, with a warning
first stage of a Gluon kernel       ttgir       ttgir       glir
proxy fence cp.async to wgmma       **no**      yes         yes
==================================  ==========  ==========  ==========
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import re
import subprocess
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

SUPPORTED = ((3, 6), (3, 9))
"""The first and the last minor version of Triton that tileloom is tested on."""

_FAULTS: tuple[tuple[tuple[int, int, int], str], ...] = (
    (
        (3, 7, 1),
        "no proxy fence between cp.async and wgmma on sm_90: a portable kernel must not pipeline "
        "with cp.async into a wgmma there (tileloom's use TMA descriptors or one stage)",
    ),
    (
        (3, 7, 0),
        "no clusters and no multicast in Gluon; the first launch of each signature runs a C "
        "compiler",
    ),
)


def triton_version() -> tuple[int, int, int]:
    """Return the version of the Triton that this process imports.

    Returns:
        Major, minor and patch number.

    Raises:
        ImportError: If Triton is not installed.
    """
    import triton

    return parse_version(triton.__version__)


def parse_version(text: str) -> tuple[int, int, int]:
    """Read ``"3.7.1"`` or ``"3.7.1+git0"`` as three numbers; missing ones are 0."""
    numbers = [int(n) for n in re.findall(r"\d+", text.partition("+")[0])[:3]]
    major, minor, patch = (*numbers, 0, 0, 0)[:3]
    return major, minor, patch


def is_supported(version: tuple[int, int, int]) -> bool:
    """Say whether tileloom is tested on this minor version of Triton."""
    return SUPPORTED[0] <= version[:2] <= SUPPORTED[1]


def known_faults(version: tuple[int, int, int]) -> tuple[str, ...]:
    """List faults of a Triton version that tileloom's kernels have to work around.

    Args:
        version: As `triton_version` returns it.

    Returns:
        One sentence for each fault that this version still has.
    """
    return tuple(text for fixed_in, text in _FAULTS if version < fixed_in)


def has_wgmma_proxy_fence(version: tuple[int, int, int]) -> bool:
    """Say whether a cp.async pipeline into wgmma carries the fence it needs (from 3.7.1)."""
    return version >= (3, 7, 1)


def gpu_target(capability: int) -> Any:
    """Return Triton's target for a compute capability written as one number, such as 90.

    Triton adds the `a` of sm_90a and sm_100a itself, so the target never carries it.
    """
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", capability, 32)


def ast_source(
    function: Any,
    *,
    gluon: bool,
    signature: Mapping[str, str],
    constexprs: Mapping[str, object],
    aligned: tuple[str, ...] = (),
) -> Any:
    """Wrap a jitted function, its types and its constants for `triton.compile`.

    Args:
        function: The object that `triton.jit` or `gluon.jit` made.
        gluon: Whether it is a Gluon kernel.
        signature: Type of every parameter, as in `KernelSpec`.
        constexprs: Values of the parameters whose type is ``"constexpr"``.
        aligned: Parameters to specialise as divisible by 16.

    Returns:
        An `ASTSource` or `GluonASTSource`; parameters are in the order of the function.
    """
    if gluon:
        # From 3.9 on it is meant for this and exported; before, it lies in a private module.
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        from triton.compiler.compiler import ASTSource as Source
    order = list(function.arg_names)
    return Source(
        function,
        {name: signature[name] for name in order},
        constexprs={(order.index(name),): value for name, value in constexprs.items()},
        attrs={(order.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )


_WORD = re.compile(r"[A-Za-z_]\w*")


def source_hash(function: Any) -> str:
    """Hash a kernel's source: its own and that of every jitted function it calls.

    Triton's own key of a function counts Triton's library too, so that the same kernel has another
    on each version; this one is the same wherever the kernel's files are the same.

    Args:
        function: The object that `triton.jit` or `gluon.jit` made.

    Returns:
        A hexadecimal SHA-256 over the sources and the global constants that they name, without
        Triton's library.
    """
    from triton.runtime.jit import JITCallable

    texts: dict[str, str] = {}

    def visit(name: str, value: Any) -> None:
        if isinstance(value, JITCallable):
            key = f"{value.fn.__module__}.{value.fn.__qualname__}"
            if key.startswith("triton.") or key in texts:
                return
            texts[key] = value.src
            scope = value.fn.__globals__
            # Every word of the text and not the names in the bytecode, which Python's version may
            # change; one that is no name of a global, or of a function in a module, adds nothing.
            words = dict.fromkeys(_WORD.findall(value.src))
            modules = [scope[word] for word in words if isinstance(scope.get(word), ModuleType)]
            for word in words:
                visit(word, scope.get(word))
                for module in modules:
                    if isinstance(found := vars(module).get(word), JITCallable):
                        visit(word, found)
        elif type(value).__name__ == "constexpr":
            visit(name, value.value)
        elif isinstance(value, int | float | str | bool):
            texts.setdefault(f"{name}={value!r}", "")

    visit("", function)
    return hashlib.sha256("\0".join(f"{k}\0{texts[k]}" for k in sorted(texts)).encode()).hexdigest()


def assembler_version(capability: int) -> str:
    """Return the version of the assembler that Triton uses, as in ``"12.8"``, the CUDA toolkit's.

    Args:
        capability: For example 90.
    """
    from triton.backends.nvidia.compiler import get_ptxas

    return str(get_ptxas(capability).version)


def hash_triton() -> None:
    """Let Triton hash all of itself, for the names in its cache: once a process, 0.3 to 0.4 s."""
    from triton.runtime.cache import triton_key

    triton_key()


def compile_options(num_warps: int, num_stages: int) -> dict[str, object]:
    """Return Triton's compile options, the same code on every version.

    Fusing multiplications and additions is named because 3.9 warns where it is left out and 3.10
    will change the default.
    """
    return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}


def option_names(capability: int) -> list[str]:
    """Return the names of all compile options; Triton ignores any other without a word.

    Args:
        capability: For example 90.
    """
    from triton.compiler.compiler import make_backend

    backend: Any = make_backend(gpu_target(capability))
    # Fusing is named because 3.9 warns where it is left out.
    options = backend.parse_options({"enable_fp_fusion": True})
    return [field.name for field in dataclasses.fields(options)]


@contextlib.contextmanager
def compiler_settings(cache_dir: Path) -> Generator[io.StringIO]:
    """Give Triton a cache folder and make it print the assembler's log, inside a `with` block.

    Args:
        cache_dir: Folder for Triton's own cache.

    Yields:
        What Triton printed: `ptxas -v` of each kernel that was really compiled, nothing for one
        that came from the cache.
    """
    from triton import knobs

    printed = io.StringIO()
    with knobs.cache.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(printed):
        knobs.cache.dir = str(cache_dir)
        knobs.nvidia.dump_ptxas_log = True
        yield printed


def assemble_again(ptx: str, options: Mapping[str, object], capability: int) -> str:
    """Run Triton's own assembler step on a PTX text, for its log.

    Triton hides the log of a successful run and keeps nothing of it in its cache. Its own step is
    called, so that tool and flags are those of this version.

    Args:
        ptx: The text.
        options: The compile options that the text was made with.
        capability: For example 90.

    Returns:
        What the assembler wrote, warnings included.
    """
    from triton.compiler.compiler import make_backend

    backend: Any = make_backend(gpu_target(capability))
    with tempfile.TemporaryDirectory() as folder, compiler_settings(Path(folder)) as printed:
        backend.make_cubin(ptx, {}, backend.parse_options(dict(options)), capability)
    return printed.getvalue()


def tool(name: str, triton_folder: Path) -> Path:
    """Return one of the NVIDIA tools that every wheel of Triton 3.6 to 3.9 carries.

    Args:
        name: ``"nvdisasm"`` or ``"cuobjdump"``.
        triton_folder: The folder of the package `triton`.
    """
    return triton_folder / "backends" / "nvidia" / "bin" / name


def disassemble(cubin: bytes, triton_folder: Path) -> str:
    """Return the machine code (SASS) of a compiled kernel as text.

    Args:
        cubin: The binary.
        triton_folder: The folder of the package `triton`, whose nvdisasm is used.

    Raises:
        OSError: If the tool is missing.
        subprocess.CalledProcessError: If it cannot read the binary.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool("nvdisasm", triton_folder)), "--print-code", file.name]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=120
        ).stdout
