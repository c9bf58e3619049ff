"""What the examples share: compiling with or without a GPU, and reading the PTX."""

import tempfile

import torch

from tileloom.cpasync.extra import require_cute

require_cute("this example")

# isort: split
import cutlass  # noqa: E402
from cutlass import cute  # noqa: E402
from cutlass.cute.runtime import make_ptr  # noqa: E402

DTYPES = {
    torch.float16: cutlass.Float16,
    torch.bfloat16: cutlass.BFloat16,
    torch.float32: cutlass.Float32,
}


def has_hopper():
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def pointer(tensor):
    """A tensor's memory for a kernel, at a multiple of 16 bytes."""
    return make_ptr(DTYPES[tensor.dtype], tensor.data_ptr(), cute.AddressSpace.gmem, 16)


def example_pointer(dtype):
    """Stands for any pointer while a kernel is compiled without tensors."""
    return make_ptr(DTYPES[dtype], 1 << 20, cute.AddressSpace.gmem, 16)


def compile_kernel(function, *arguments, arch="sm_90a", options=""):
    """Compile a host function and the kernels that it launches; their PTX is kept."""
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch {arch} --keep-ptx --dump-dir {folder} {options}"
        compiled = cute.compile(function, *arguments, options=options)
        return compiled, compiled.__ptx__


def counts(ptx, *instructions):
    """How often each instruction stands in the PTX, as text."""
    lines = [line.strip() for line in ptx.splitlines()]
    lines = [line.split(" ", 1)[1] if line.startswith("@") else line for line in lines]
    found = {name: sum(line.startswith(name) for line in lines) for name in instructions}
    return ", ".join(f"{count} {name}" for name, count in found.items())
