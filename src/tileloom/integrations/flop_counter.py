"""tileloom's operators in PyTorch's `FlopCounterMode`, which counts what it does not know as 0.

    from torch.utils.flop_counter import FlopCounterMode
    from tileloom.integrations import flop_counter

    with FlopCounterMode(custom_mapping=flop_counter.formulas()) as counter:
        model(x).sum().backward()
    counter.get_total_flops()

The rules are PyTorch's own: a multiply-add is two, products alone are counted, attention over all
pairs of queries and keys, whatever a mask hides, its backward with the scores computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import Any

import torch

_Formula = Callable[..., int]


def formulas() -> dict[Any, _Formula]:
    """Return the formula of each operator, for `FlopCounterMode(custom_mapping=...)`.

    Returns:
        Operator -> function of its arguments and `out_val`: products of matrices, also those whose
        rows are arriving, attention, packed attention, and both backwards. What a product adds or
        activates and the row-wise operators count nothing, as in PyTorch. The gradients of a
        product are products of tileloom or of PyTorch, and counted as such.

    Packed sequences are counted by their own lengths, which waits for the GPU; of tensors without
    data, as under `FakeTensorMode`, each counts as `max_q` by `max_k`.
    Source: `torch.utils.flop_counter`.
    """
    ops = torch.ops.tileloom
    found: dict[Any, _Formula] = {
        ops.matmul_fwd: _product,
        ops.matmul_out: _product,
        ops.async_input_matmul: _product,
        ops.async_input_mm: _product,
        ops.attention_fwd: _attention,
        ops.attention_bwd: _attention_backward,
        ops.attention_varlen_fwd: _packed,
        ops.attention_varlen_bwd: _packed_backward,
    }
    for formula in found.values():
        formula._get_raw = True  # pyright: ignore[reportFunctionMemberAccess]
    return found


def _product(a: torch.Tensor, b: torch.Tensor, *_args: Any, **_kwargs: Any) -> int:
    batch = max(chain(a.shape[:-2], b.shape[:-2], [1]))
    batch = 0 if 0 in (*a.shape[:-2], *b.shape[:-2]) else batch
    return 2 * batch * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _pairs(q: torch.Tensor, k: torch.Tensor) -> int:
    batch, heads, len_q, _ = q.shape
    return batch * heads * len_q * k.shape[2]


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_args: Any, **_kwargs: Any
) -> int:
    return 2 * _pairs(q, k) * (q.shape[-1] + v.shape[-1])


def _attention_backward(
    _dout: torch.Tensor, _dlse: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_args: Any,
    **_kwargs: Any,
) -> int:  # fmt: skip
    return 2 * _pairs(q, k) * (3 * q.shape[-1] + 2 * v.shape[-1])


def _lengths(offsets: torch.Tensor, longest: int) -> Iterator[int]:
    if offsets.is_meta or type(offsets).__name__ == "FakeTensor":
        return repeat(longest, offsets.numel() - 1)
    return iter(offsets.diff().tolist())


def _packed_pairs(
    q: torch.Tensor, offsets_q: torch.Tensor, offsets_k: torch.Tensor, max_q: int, max_k: int
) -> int:
    lengths = zip(_lengths(offsets_q, max_q), _lengths(offsets_k, max_k), strict=True)
    return q.shape[1] * sum(len_q * len_k for len_q, len_k in lengths)


def _packed(
    q: torch.Tensor, _k: torch.Tensor, v: torch.Tensor, offsets_q: torch.Tensor,
    offsets_k: torch.Tensor, max_q: int, max_k: int, *_args: Any, **_kwargs: Any,
) -> int:  # fmt: skip
    pairs = _packed_pairs(q, offsets_q, offsets_k, max_q, max_k)
    return 2 * pairs * (q.shape[-1] + v.shape[-1])


def _packed_backward(
    _dout: torch.Tensor, _dlse: Any, q: torch.Tensor, _k: torch.Tensor, v: torch.Tensor,
    _out: torch.Tensor, _lse: torch.Tensor, offsets_q: torch.Tensor, offsets_k: torch.Tensor,
    max_q: int, max_k: int, *_args: Any, **_kwargs: Any,
) -> int:  # fmt: skip
    pairs = _packed_pairs(q, offsets_q, offsets_k, max_q, max_k)
    return 2 * pairs * (3 * q.shape[-1] + 2 * v.shape[-1])
