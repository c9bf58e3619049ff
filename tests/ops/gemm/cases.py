"""Products for the tests: inputs, the float64 answer, and the plain formula to be judged by."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tileloom.ops.gemm import matmul_reference
from tileloom.testing import assert_accurate


@dataclass(frozen=True)
class MatmulCase:
    """Sizes and options of one product; `a_flips` and `b_flips`: it lies by columns."""

    m: int
    n: int
    k: int
    l: int = 0  # noqa: E741
    dtype: torch.dtype = torch.bfloat16
    a_flips: bool = False
    b_flips: bool = True
    has_bias: bool = False
    has_residual: bool = False
    activation: str | None = None
    out_dtype: torch.dtype | None = None

    def inputs(self, device: str = "cpu", seed: int = 0):
        """Random operands and options."""
        generator = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(*shape, generator=generator).to(self.dtype).to(device)

        batches = (self.l,) if self.l else ()
        a = (
            random(*batches, self.k, self.m).mT
            if self.a_flips
            else random(*batches, self.m, self.k)
        )
        b = (
            random(*batches, self.n, self.k).mT
            if self.b_flips
            else random(*batches, self.k, self.n)
        )
        options = {"activation": self.activation, "out_dtype": self.out_dtype}
        if self.has_bias:
            options["bias"] = random(self.n)
        if self.has_residual:
            residual = random(*batches, self.m, self.n)
            options["residual"] = residual.to(self.out_dtype or self.dtype)
        return a, b, options


def wide(tensor):
    """A tensor in float64; None stays."""
    return tensor.double() if isinstance(tensor, torch.Tensor) else tensor


def check(out, a, b, options):
    """Judge a product by the accuracy rule."""
    names = ("bias", "activation", "residual")
    given = {name: options.get(name) for name in names}
    right = matmul_reference(a.double(), b.double(), **{n: wide(v) for n, v in given.items()})
    if out.dtype.itemsize <= a.dtype.itemsize:
        plain = torch.matmul(a, b)
    elif a.is_cuda:  # the tensor cores' own sum, not rounded
        plain = torch.mm(a, b, out_dtype=out.dtype)
    else:
        plain = torch.matmul(a.to(out.dtype), b.to(out.dtype))
    given = {n: v.to(out.dtype) if isinstance(v, torch.Tensor) else v for n, v in given.items()}
    x = plain.to(out.dtype)
    if given["bias"] is not None:
        x = x + given["bias"]
    x = _activate(x, given["activation"])
    if given["residual"] is not None:
        x = x + given["residual"]
    assert_accurate(out, right, x)


def _activate(x, name):
    kinds = {
        None: lambda x: x,
        "relu": torch.relu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "silu": torch.nn.functional.silu,
    }
    return kinds[name](x)
