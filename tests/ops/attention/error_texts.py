"""Wrong calls of `tileloom.attention`, each with the name of its text in `error_texts.txt`.

PYTHONPATH=src python -m tests.ops.attention.error_texts > tests/ops/attention/error_texts.txt
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

import tileloom
from tileloom import masks
from tileloom.ops.attention.config import GluonSm90Config, TritonConfig
from tileloom.ops.attention.config_backward import Tile, TritonBackwardConfig

SAME = (2, 2, 3, 8)


def _call(*shapes: Any, change: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Call with zeros of the given shapes (all SAME if none is given), changed by `change`."""
    tensors = [torch.zeros(shape) for shape in shapes or (SAME,) * 3]
    return tileloom.attention(*(change(*tensors) if change else tensors), **options)


def _gradient(*, create_graph: bool = False, **options: Any) -> Any:
    """Ask for the gradient of q."""
    q = torch.zeros(SAME, requires_grad=True)
    out = tileloom.attention(q, q, q, **options)
    return torch.autograd.grad(out.sum(), q, create_graph=create_graph)


def _operator(seed: torch.Tensor | None) -> Any:
    """Call the operator itself, with dropout."""
    q, offset = torch.zeros(SAME), torch.tensor(0)
    extras = (*(None,) * 7, 0.25, 0.1, seed, offset, "", "")
    return torch.ops.tileloom.attention_fwd(q, q, q, *extras)


def _all(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda *tensors: [t.to(dtype) for t in tensors]


CALLS: Mapping[str, Callable[[], Any]] = {
    "v is no tensor": lambda: _call(change=lambda q, k, v: (q, k, [1.0])),
    "q has three dimensions": lambda: _call((2, 3, 8), SAME, SAME),
    "integers": lambda: _call(change=_all(torch.int32)),
    "float8": lambda: _call(change=_all(torch.float8_e4m3fn)),
    "k of another dtype": lambda: _call(change=lambda q, k, v: (q, k.half(), v)),
    "v on another device": lambda: _call(change=lambda q, k, v: (q, k, v.to("meta"))),
    "k of another batch": lambda: _call(SAME, (1, 2, 3, 8), SAME),
    "k and v of different heads": lambda: _call((1, 4, 3, 8), (1, 2, 3, 8), (1, 4, 3, 8)),
    "heads that do not divide": lambda: _call((1, 16, 3, 8), (1, 6, 3, 8), (1, 6, 3, 8)),
    "k and v of different lengths": lambda: _call(SAME, (2, 2, 5, 8), (2, 2, 4, 8)),
    "k of another head dim": lambda: _call(SAME, (2, 2, 3, 16), SAME),
    "mask is a text": lambda: _call(mask="causal"),
    "mask of numbers": lambda: _call(mask=torch.zeros(3, 3)),
    "mask of another shape": lambda: _call(mask=torch.ones(2, 3, 5, dtype=torch.bool)),
    "mask of integers": lambda: _call(mask=torch.ones(3, 3, dtype=torch.uint8)),
    "mask without the heads": lambda: _call(
        (4, 2, 3, 8), (4, 2, 5, 8), (4, 2, 5, 8), mask=torch.ones(4, 3, 5).bool()
    ),
    "mask of more keys": lambda: _call(
        SAME, (2, 2, 5, 8), (2, 2, 5, 8), mask=torch.ones(3, 6).bool()
    ),
    "mask of other queries, keys and sequences": lambda: _call(mask=torch.ones(3, 2, 4, 5).bool()),
    "mask of queries alone": lambda: _call(
        SAME, (2, 2, 5, 8), (2, 2, 5, 8), mask=torch.ones(3).bool()
    ),
    "mask on another device": lambda: _call(mask=torch.ones(3, 3, dtype=torch.bool, device="meta")),
    "bias of bools": lambda: _call(bias=torch.ones(3, 3, dtype=torch.bool)),
    "bias of integers": lambda: _call(bias=torch.ones(3, 3, dtype=torch.int32)),
    "bias of five dimensions": lambda: _call(bias=torch.zeros(1, 2, 2, 3, 3)),
    "lengths for another batch": lambda: _call(mask=masks.key_lengths(torch.tensor([1, 2, 3]))),
    "an option of another library": lambda: _call(attn_mask=None),
    "an option misspelt": lambda: _call(is_casual=True),
    "an option that nobody has": lambda: _call(zzz=1),
    "dropout of everything": lambda: _call(dropout_p=1.0),
    "dropout is nan": lambda: _call(dropout_p=math.nan),
    "dropout is a text": lambda: _call(dropout_p="0.1"),
    "dropout is True": lambda: _call(dropout_p=True),
    "dropout without a seed": lambda: _operator(seed=None),
    "dropout with a seed of floats": lambda: _operator(seed=torch.tensor(1.0)),
    "scores": lambda: _call(scores="alibi"),
    "scale is nan": lambda: _call(scale=math.nan),
    "scale is a tensor": lambda: _call(scale=torch.tensor(0.5)),
    "config is a text": lambda: _call(config="triton"),
    "portable config on the cpu": lambda: _call(config=TritonConfig(48, 64, 4, 1)),
    "hopper config on the cpu": lambda: _call(config=GluonSm90Config()),
    "backward config is a forward's": lambda: _call(backward_config=TritonConfig()),
    "portable backward on the cpu": lambda: _gradient(
        backward_config=TritonBackwardConfig(Tile(8, 64), Tile(64, 64, 3))
    ),
    "a gradient of a gradient": lambda: _gradient(create_graph=True),
}


def text_of(name: str) -> str:
    """Error class and text that a call raises."""
    try:
        CALLS[name]()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def render() -> str:
    """The whole page."""
    return "\n".join(f"## {name}\n{text_of(name)}\n" for name in CALLS)


if __name__ == "__main__":
    print(render(), end="")
