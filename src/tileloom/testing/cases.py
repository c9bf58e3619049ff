"""Test cases as frozen values, and the same numbers laid out in memory in awkward ways.

>>> from tileloom.testing import Case
>>> case = Case("gqa-odd", sizes={"B": 2, "Hq": 4, "Hkv": 2, "Lq": 257, "Lk": 511, "D": 64})
>>> case.id
'gqa-odd-B2-Hq4-Hkv2-Lq257-Lk511-D64-fp16-s0'
>>> tuple(case.tensor("k", "B Hkv Lk D", layout="transposed").stride())
(65408, 64, 128, 1)
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch

Layout = Literal[
    "contiguous", "transposed", "gapped", "unaligned", "expanded", "last_strided", "offset"
]

_SHORT = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


def _no_options() -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class Case:
    """One test case of an operator, with a stable id and inputs that depend on nothing else.

    Attributes:
        name: What the case is about, such as ``"gqa-causal-odd"``.
        sizes: Sizes by the letters of the shape legend (`B`, `Hq`, `Lk`, `D`, ...).
        dtype: Dtype of the inputs.
        options: The operator's keyword arguments, such as ``{"is_causal": True}``.
        seed: Seed of the inputs.
        input_scale: Standard deviation of the inputs.
    """

    name: str
    sizes: Mapping[str, int] = field(hash=False)
    dtype: torch.dtype = torch.float16
    options: Mapping[str, Any] = field(default_factory=_no_options, hash=False)
    seed: int = 0
    input_scale: float = 1.0

    def __post_init__(self) -> None:
        """Freeze the mappings too."""
        object.__setattr__(self, "sizes", MappingProxyType(dict(self.sizes)))
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))

    @property
    def id(self) -> str:
        """The case in one word, for pytest: name, sizes, dtype, input scale if not 1, seed."""
        sizes = "-".join(f"{letter}{size}" for letter, size in self.sizes.items())
        dtype = _SHORT.get(self.dtype, str(self.dtype).removeprefix("torch."))
        scale = "" if self.input_scale == 1 else f"-x{self.input_scale:g}"
        return f"{self.name}-{sizes}-{dtype}{scale}-s{self.seed}"

    def tensor(
        self,
        name: str,
        dims: str,
        *,
        layout: Layout = "contiguous",
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        """Make the input called `name`: normal values, the same on every device and in each layout.

        Args:
            name: Such as ``"q"``; inputs of different names are independent.
            dims: Letters of `sizes`, such as ``"B Hq Lq D"``; a number stands for itself.
            layout: How it lies in memory; see `laid_out`. An expanded tensor has equal heads.
            device: Where to put it; the values are drawn on the CPU.

        Returns:
            A tensor of that shape in the case's dtype.

        Raises:
            KeyError: If a letter is not in `sizes`.
        """
        shape = [int(d) if d.isdecimal() else self.sizes[d] for d in dims.split()]
        # Not hash(): that of a text differs from process to process.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + zlib.crc32(name.encode()))
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * self.input_scale
        return laid_out(values.to(self.dtype).to(device), layout)


def laid_out(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Copy a tensor into memory in a given way, keeping shape and (but for expanded) values.

    Args:
        tensor: Any tensor of at least two dimensions, `[..., L, D]`.
        layout: ``"contiguous"``; ``"transposed"``: dimension -3 lies inside -2, as a model that
            computes `[B, L, H, D]` hands it over (two dimensions: same as contiguous);
            ``"gapped"``: 8 elements of NaN after every last-dimension row; ``"unaligned"``: starts
            one element after an aligned address; ``"offset"``: starts 64 rows into a larger
            storage; ``"expanded"``: stride 0 along the dimension before the last two, which
            repeats its first entry; ``"last_strided"``: stride 2 in the last dimension.

    Returns:
        A view into new memory.

    Raises:
        ValueError: If the layout is unknown or needs more dimensions.
    """
    if layout not in get_args(Layout):
        raise ValueError(
            f"laid_out: layout is '{layout}'; it must be one of {', '.join(get_args(Layout))}."
        )
    if tensor.dim() < (3 if layout == "expanded" else 2):
        raise ValueError(
            f"laid_out: tensor has shape {tuple(tensor.shape)}; layout '{layout}' needs "
            f"{3 if layout == 'expanded' else 2} dimensions or more."
        )
    *outer, rows, columns = tensor.shape
    if layout == "transposed" and outer:
        return (
            tensor.transpose(-3, -2).clone(memory_format=torch.contiguous_format).transpose(-3, -2)
        )
    if layout == "expanded":
        return tensor.narrow(-3, 0, 1).clone().expand(tensor.shape)
    if layout == "gapped":
        return _poisoned(tensor, [*outer, rows, columns + 8])[..., :columns].copy_(tensor)
    if layout == "last_strided":
        return _poisoned(tensor, [*outer, rows, 2 * columns])[..., ::2].copy_(tensor)
    skip = {"unaligned": 1, "offset": 64 * columns}.get(layout, 0)
    flat = _poisoned(tensor, [tensor.numel() + skip])[skip:]
    return flat.view(tensor.shape).copy_(tensor)


def _poisoned(like: torch.Tensor, shape: list[int]) -> torch.Tensor:
    value = float("nan") if like.dtype.is_floating_point else 0
    return torch.full(shape, value, dtype=like.dtype, device=like.device)
