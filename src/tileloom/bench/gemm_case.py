"""Matrix products to measure: sizes, inputs, the plain formula, FLOP, bytes, and what is asked."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch

from tileloom.errors import OptionError

Tensors = tuple[torch.Tensor, ...]
_F = torch.nn.functional
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": lambda x: x,
    "relu": torch.relu,
    "gelu": _F.gelu,
    "gelu_tanh": lambda x: _F.gelu(x, approximate="tanh"),
    "silu": _F.silu,
}
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_BEHIND = 256
"""Flags behind a case's own that are set too: the seed's padding tiles wait for those."""


@dataclass(frozen=True)
class GemmCase:
    """One product: `activation(a @ b + bias) + residual`, a `[m, k]`, b `[k, n]`.

    Attributes:
        name: Unique, for example ``"8b-qkv-m512"``.
        m: Rows of a.
        n: Columns of b.
        k: The summed dimension.
        bias: Whether a bias is added.
        activation: What follows it, ``""`` for nothing.
        residual: Whether a residual is added at the end.
        chunks: Chunks of a's rows whose flags are waited for, all of them set before; 0: none is.
        b_flips: Whether b lies by columns, as a layer's weight does.
        judged: Which time the bar is about: of the device, or of a call with the host.
        dtype_name: Dtype of everything but flags.
    """

    name: str
    m: int
    n: int
    k: int
    bias: bool = False
    activation: str = ""
    residual: bool = False
    chunks: int = 0
    b_flips: bool = True
    judged: Literal["device", "call"] = "device"
    dtype_name: str = "bfloat16"

    @property
    def direction(self) -> Literal["forward"]:
        """Gradients are products again: only the forward is timed."""
        return "forward"

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype itself."""
        return _DTYPES[self.dtype_name]

    @property
    def flops(self) -> float:
        """Count the product alone."""
        return 2.0 * self.m * self.n * self.k

    @property
    def bytes_moved(self) -> int:
        """Count each input once and the output once, in bytes."""
        products = self.m * self.k + self.k * self.n + self.m * self.n
        extras = self.n * self.bias + self.m * self.n * self.residual
        return (products + extras) * self.dtype.itemsize

    @property
    def is_fused(self) -> bool:
        """Whether anything follows the product."""
        return self.bias or self.residual or self.activation != ""

    @property
    def extras(self) -> tuple[str, ...]:
        """Names of the inputs behind a and b: bias, residual, chunk_signals."""
        given = {"bias": self.bias, "residual": self.residual, "chunk_signals": self.chunks > 0}
        return tuple(name for name, is_there in given.items() if is_there)

    @property
    def formula(self) -> Callable[..., torch.Tensor]:
        """Return the formula, every step in the dtype of its inputs, sums never in half."""

        def formula(a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            with _whole_sums():
                return self.eager(a, b, *rest)

        return formula

    @property
    def eager(self) -> Callable[..., torch.Tensor]:
        """Return what a user of PyTorch writes for it, with one call where PyTorch has one.

        It waits for no flag.
        """
        activate = _ACTIVATIONS[self.activation]
        if not self.is_fused:
            return (lambda a, b, flags: torch.mm(a, b)) if self.chunks else torch.mm
        if self.bias and self.residual:
            return lambda a, b, bias, r, *flags: activate(torch.addmm(bias, a, b)) + r
        if self.bias:
            return lambda a, b, bias, *flags: activate(torch.addmm(bias, a, b))
        if self.residual:
            return lambda a, b, r, *flags: activate(torch.mm(a, b)) + r
        return lambda a, b, *flags: activate(torch.mm(a, b))

    def inputs(self, device: torch.device, seed: int) -> Tensors:
        """Draw a and what is added from N(0, 1), b from N(0, 1 / k) as a layer's weights are."""
        generator = torch.Generator(device=device).manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            drawn = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
            return drawn.to(self.dtype)

        a = draw(self.m, self.k)
        b = draw(self.n, self.k).mul_(self.k**-0.5) if self.b_flips else draw(self.k, self.n)
        tensors = [a, b.mT if self.b_flips else b.mul_(self.k**-0.5)]
        if self.bias:
            tensors.append(draw(self.n))
        if self.residual:
            tensors.append(draw(self.m, self.n))
        if self.chunks:
            words = torch.ones(self.chunks + _BEHIND, dtype=torch.int32, device=device)
            tensors.append(words.view(torch.uint32)[: self.chunks])
        return tuple(tensors)


@contextlib.contextmanager
def _whole_sums() -> Generator[None]:
    """Keep cuBLAS from adding up parts of k in half precision, which its default allows."""
    flags: Any = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = {name: getattr(flags, name) for name in names}
    try:
        for name in names:
            setattr(flags, name, False)
        yield
    finally:
        for name, value in before.items():
            setattr(flags, name, value)


def load_gemm_cases(path: Path) -> tuple[GemmCase, ...]:
    """Read cases from JSON.

    Args:
        path: A file with ``{"cases": [...]}``, each with the fields of `GemmCase`.

    Raises:
        OptionError: If it cannot be read, a case is not well formed, or two have one name.
    """
    try:
        cases: list[GemmCase] = []
        for entry in cast("list[dict[str, Any]]", json.loads(path.read_text("utf-8"))["cases"]):
            case = GemmCase(**entry)
            if min(case.m, case.n, case.k) < 1 or case.chunks < 0:
                raise ValueError(f"a size below 1: {entry}")
            if case.activation not in _ACTIVATIONS or case.dtype_name not in _DTYPES:
                raise ValueError(f"no such activation or dtype: {entry}")
            if case.judged not in ("device", "call"):
                raise ValueError(f"no such time to judge: {entry}")
            if case.name in {other.name for other in cases}:
                raise ValueError(f"two cases of one name: {entry}")
            cases.append(case)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(
            f"bench: the cases file {path} cannot be read ({type(error).__name__}: {error}). Try: "
            "benchmarks/gemm_cases.json."
        ) from None
    return tuple(cases)
