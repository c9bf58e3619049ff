"""Bodies of CuTe DSL kernels compiled to PTX with no GPU, and the PTX read back."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_ptr


@dataclass(frozen=True)
class Arguments:
    """What a body has at hand: memory of each kind and a run-time integer."""

    smem: Any  # 4 KiB of float32, aligned to 1024 bytes
    mbar: Any  # four mbarriers
    gmem: Any  # float32, aligned to 1024 bytes
    desc: Any  # generic, aligned to 64 bytes
    n: Any  # int32


@cute.kernel
def _kernel(gmem: cute.Pointer, desc: cute.Pointer, n: cutlass.Int32, body: cutlass.Constexpr):
    smem = cute.arch.alloc_smem(cutlass.Float32, 1024, alignment=1024)
    mbar = cute.arch.alloc_smem(cutlass.Int64, 4, alignment=8)
    body(Arguments(smem, mbar, gmem, desc, n))


@cute.jit
def _launch(gmem: cute.Pointer, desc: cute.Pointer, n: cutlass.Int32, body: cutlass.Constexpr):
    _kernel(gmem, desc, n, body).launch(grid=(1, 1, 1), block=(128, 1, 1))


@cute.jit
def launch_of(kernel: cutlass.Constexpr, source: cute.Pointer, count: cutlass.Int32):
    """Launch a kernel of a pointer and a number."""
    kernel(source, count).launch(grid=(1, 1, 1), block=(128, 1, 1))


def module_of(body, arch: str, options: str = "") -> str:
    """Compile a kernel with this body: the PTX of its module."""
    gmem = make_ptr(cutlass.Float32, 1 << 20, cute.AddressSpace.gmem, assumed_align=1024)
    desc = make_ptr(cutlass.Uint64, 1 << 20, cute.AddressSpace.generic, assumed_align=64)
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch {arch} --keep-ptx --dump-dir {folder} {options}"
        compiled = cute.compile(_launch, gmem, desc, cutlass.Int32(0), body, options=options)
        text = compiled.__ptx__
    assert f".target {arch}\n" in text
    return text


def ptx_of(body, arch: str, options: str = "") -> str:
    """Compile a kernel with this body; its PTX, from the opening brace on."""
    text = module_of(body, arch, options)
    return text[text.index("\n{\n") :]


_REGISTER = re.compile(r"%[a-z]+\d+")
_LINE = re.compile(r"^(?:@!?%p\d+ )?([\w.:]+)(?:\s+(.*))?;$")
_PARAMETERS = ("gmem", "desc", "n", *(f"parameter{i}" for i in range(3, 10)))
_SAME = ("mov.", "cvt.", "cvta.", "ld.param.")


def instructions(ptx: str, *prefixes: str) -> list[str]:
    """The instructions of these families, each register replaced by what computes it.

    Kernel parameters read ``gmem``, ``desc`` and ``n``; shared memory ``smem`` and ``mbar``.
    """
    values: dict[str, str] = {}
    found = []
    sizes = re.findall(r"\.shared \.align (\d+) \.b8 (\w+)\[", ptx)
    names = {name: "smem" if align == "1024" else "mbar" for align, name in sizes}

    def resolved(text):
        for name, short in names.items():
            text = text.replace(name, short)
        text = re.sub(r"\[?\w+_param_(\d)\]?", lambda m: _PARAMETERS[int(m[1])], text)
        return _REGISTER.sub(lambda m: values.get(m[0], m[0]), text)

    for line in ptx.splitlines():
        match = _LINE.match(line.strip())
        if match is None:
            continue
        operation, operands = match[1], (match[2] or "").replace("\t", "")
        if operation.startswith(prefixes):
            found.append(f"{operation} {resolved(operands)}".strip() + ";")
            continue
        target, _, rest = operands.partition(", ")
        value = resolved(rest)
        if not operation.startswith(_SAME):
            value = f"{operation.split('.')[0]}({value})"
        values[target] = value
    return found
