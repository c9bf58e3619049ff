"""Calls of the two operators that the CPU's and the GPU's tests share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@dataclass(frozen=True)
class SdpaCase:
    """One call: sizes `(B, M, N, H, K, Kv)`, packed sequences as lengths, and options."""

    name: str
    sizes: tuple[int, int, int, int, int, int]
    dtype: torch.dtype = FP16
    bias: str = ""
    layout: str = "bmhk"
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name}-{'x'.join(map(str, self.sizes))}-{dtype}"

    def tensors(self, device: torch.device | str = "cpu") -> tuple[torch.Tensor, ...]:
        """Query, key, value and, if there is one, bias: the same numbers on every machine."""
        b, m, n, h, k, kv = self.sizes
        generator = torch.Generator().manual_seed(3)

        def draw(*shape: int) -> torch.Tensor:
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            return drawn.to(self.dtype).to(device)

        if self.layout == "bhmk":
            made = [draw(b, h, m, k), draw(b, h, n, k), draw(b, h, n, kv)]
            tensors = [t.transpose(1, 2) for t in made]
        elif self.layout == "packed":
            tensors = list(draw(b, m, 3, h, k).unbind(2))
        else:
            tensors = [draw(b, m, h, k), draw(b, n, h, k), draw(b, n, h, kv)]
        if self.bias == "full":
            tensors.append(draw(b, h, m, n))
        elif self.bias == "expanded":
            tensors.append(draw(1, 1, m, n).expand(b, h, m, n))
        elif self.bias == "sliced":
            tensors.append(draw(b, h, m, -(-n // 16) * 16)[..., :n])
        elif self.bias == "hides":
            bias = draw(b, h, m, n)
            bias[:, :, ::3] = -torch.inf
            bias[..., 1:3] = -torch.inf
            tensors.append(bias)
        return tuple(tensors)

    def packing(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """What says where the sequences lie; nothing for a dense batch."""
        if self.lengths is None:
            return {}
        starts = [torch.tensor([0, *part]).cumsum(0).int().to(device) for part in self.lengths]
        longest = [max(part) for part in self.lengths]
        return {
            "cu_seqlens_q": starts[0],
            "cu_seqlens_k": starts[1],
            "max_seqlen_q": longest[0],
            "max_seqlen_k": longest[1],
        }

    def upstream(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """The gradient of the output."""
        b, m, _, h, _, kv = self.sizes
        generator = torch.Generator().manual_seed(5)
        drawn = torch.randn((b, m, h, kv), generator=generator, dtype=torch.float64)
        return drawn.to(self.dtype).to(device)


def seeded(case: SdpaCase, results: Any) -> dict[str, Any]:
    """The options of a case, and where its random numbers came from."""
    options = case.packing(results[0].device) | case.options
    if not case.options.get("dropout_p"):
        return options
    return options | {"seed": int(results[2]), "offset": int(results[3])}


def arguments(tensors: tuple[torch.Tensor, ...], **options: Any) -> tuple[list[Any], dict]:
    """The forward's positional and keyword arguments, of the tensors and of options by name."""
    bias = tensors[3] if len(tensors) > 3 else None
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    packing = [options.pop(name, None) for name in names]
    options = dict(options)
    positional = [
        *tensors[:3], bias, *packing, options.pop("dropout_p", 0.0),
        options.pop("custom_mask_type", 0), options.pop("compute_log_sumexp", True),
    ]  # fmt: skip
    return positional, options


def backward_arguments(
    grad_out: torch.Tensor, tensors: tuple[torch.Tensor, ...], results: Any, **options: Any
) -> tuple[list[Any], dict]:
    """The backward's arguments, after a forward that gave `results`."""
    (_, _, _, bias, cu_q, cu_k, _, _, dropout_p, mask_type, _), rest = arguments(tensors, **options)
    out, lse, seed, offset, max_q, max_k = results
    positional = [
        grad_out, *tensors[:3], bias, out, cu_q, cu_k, max_q, max_k, lse, dropout_p, seed, offset,
        mask_type, bias is not None,
    ]  # fmt: skip
    return positional, rest


CAUSAL, BOTTOM = {"custom_mask_type": 1}, {"custom_mask_type": 2}
DENSE = [
    SdpaCase("plain", (2, 40, 33, 3, 16, 16)),
    SdpaCase("one-row", (2, 1, 40, 2, 32, 32)),
    SdpaCase("whole", (1, 64, 64, 2, 32, 32), BF16),
    SdpaCase("float32", (1, 37, 70, 2, 24, 40), FP32),
    SdpaCase("value-wider", (1, 33, 20, 2, 16, 48)),
    SdpaCase("scale", (1, 33, 20, 2, 16, 16), options={"scale": 0.7}),
    SdpaCase("negative-scale", (1, 33, 20, 2, 16, 16), options={"scale": -0.3}),
    SdpaCase("sdpa-layout", (2, 40, 33, 3, 16, 16), layout="bhmk"),
    SdpaCase("qkv-packed", (2, 40, 40, 3, 16, 16), layout="packed"),
    SdpaCase("top-left", (2, 50, 33, 2, 16, 16), options=CAUSAL),
    SdpaCase("top-left-long", (2, 33, 50, 2, 16, 16), options=CAUSAL),
    SdpaCase("bottom-right", (2, 33, 50, 2, 16, 16), options=BOTTOM),
    SdpaCase("M1", (1, 100, 90, 2, 32, 32), BF16, options=BOTTOM),
    SdpaCase("window", (1, 50, 40, 2, 16, 16), options=CAUSAL | {"window_size": 7}),
    SdpaCase("M2", (1, 70, 50, 2, 16, 16), options=BOTTOM | {"window_size": 7}),
    SdpaCase("M2-long", (1, 50, 70, 2, 16, 16), options=BOTTOM | {"window_size": 7}),
    SdpaCase("window-past-the-keys", (1, 60, 20, 2, 16, 16), options=CAUSAL | {"window_size": 3}),
    SdpaCase("no-window", (1, 30, 30, 2, 16, 16), options=CAUSAL | {"window_size": 0}),
    SdpaCase("bias", (2, 40, 33, 2, 16, 16), bias="full"),
    SdpaCase("bias-expanded", (2, 40, 33, 2, 16, 16), BF16, bias="expanded"),
    SdpaCase("bias-sliced", (2, 40, 33, 2, 16, 16), bias="sliced"),
    SdpaCase("bias-hides", (2, 40, 33, 2, 16, 16), bias="hides"),
    SdpaCase("dropout", (2, 40, 33, 2, 16, 16), options={"dropout_p": 0.3}),
    SdpaCase("dropout-causal", (2, 40, 33, 2, 16, 16), BF16, options=CAUSAL | {"dropout_p": 0.5}),
    SdpaCase("dropout-bias", (2, 40, 33, 2, 16, 16), FP32, bias="full", options={"dropout_p": 0.1}),
    SdpaCase("bias-causal", (2, 40, 48, 2, 16, 16), FP32, bias="full", options=CAUSAL),
]
_LENGTHS = (5, 0, 33, 40), (7, 9, 0, 50)
_ALIKE = (20, 33, 1), (20, 33, 1)
PACKED = [
    SdpaCase("packed", (1, 78, 66, 2, 16, 16), lengths=_LENGTHS),
    SdpaCase("packed-causal", (1, 54, 54, 2, 32, 32), BF16, lengths=_ALIKE, options=CAUSAL),
    SdpaCase("packed-bottom", (1, 78, 66, 3, 16, 24), lengths=_LENGTHS, options=BOTTOM),
    SdpaCase(
        "packed-window", (1, 78, 66, 2, 16, 16), lengths=_LENGTHS,
        options=BOTTOM | {"window_size": 6},
    ),
    SdpaCase("packed-float32", (1, 54, 54, 2, 16, 16), FP32, lengths=_ALIKE),
    SdpaCase("packed-qkv", (1, 54, 54, 2, 16, 16), layout="packed", lengths=_ALIKE),
    SdpaCase("M3", (1, 78, 66, 3, 16, 16), lengths=_LENGTHS, options={"dropout_p": 0.3}),
    SdpaCase("one-sequence", (1, 40, 30, 2, 16, 16), lengths=((40,), (30,))),
]  # fmt: skip
