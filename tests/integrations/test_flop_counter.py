"""PyTorch's counter of operations counts tileloom's operators as it counts PyTorch's own."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import pad
from torch.utils.flop_counter import FlopCounterMode

import tileloom
from tileloom.integrations.flop_counter import formulas


def _counted(work):
    with FlopCounterMode(display=False, custom_mapping=formulas()) as counter:
        work()
    return counter.get_total_flops()


@pytest.mark.parametrize("shapes", [((5, 7), (7, 3)), ((2, 5, 7), (7, 3)), ((2, 5, 7), (2, 7, 3))])
def test_a_product_and_its_gradients(shapes):
    a, b = (torch.randn(shape, requires_grad=True) for shape in shapes)
    bias = torch.randn(3, requires_grad=True)

    def ours():
        tileloom.matmul(a, b, bias=bias, activation="gelu").sum().backward()

    def theirs():
        torch.nn.functional.gelu(a @ b + bias).sum().backward()

    forward = 2 * (2 if len(shapes[0]) == 3 else 1) * 5 * 7 * 3
    assert _counted(lambda: tileloom.matmul(a, b)) == forward
    # The backward computes the product once more, for the activation.
    assert _counted(ours) == _counted(theirs) + forward == 4 * forward


def test_products_whose_rows_are_arriving_and_given_outputs():
    a, b, flags = torch.randn(8, 6), torch.randn(6, 5), torch.ones(2, dtype=torch.uint32)
    assert _counted(lambda: tileloom.async_input_matmul(a, b, flags)) == 2 * 8 * 6 * 5
    assert _counted(lambda: torch.ops.tileloom.async_input_mm(a, b, flags, 1)) == 2 * 8 * 6 * 5
    assert _counted(lambda: tileloom.matmul(a, b, out=torch.empty(8, 5))) == 2 * 8 * 6 * 5
    assert _counted(lambda: tileloom.matmul(a[:0], b)) == 0
    assert _counted(lambda: tileloom.matmul(torch.randn(0, 3, 6), b)) == 0


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_counts_as_pytorchs(is_causal):
    q, k, v = (torch.randn(2, 4, n, d, requires_grad=True) for n, d in ((6, 8), (9, 8), (9, 8)))

    def theirs():  # as a product of matrices: PyTorch's own operator on a CPU is not counted
        p = (q @ k.mT).softmax(-1)
        (p @ v).sum().backward()

    def ours():
        tileloom.attention(q, k, v, is_causal=is_causal).sum().backward()

    scores = 2 * 2 * 4 * 6 * 9 * 8
    assert _counted(theirs) == 6 * scores
    assert _counted(ours) == 7 * scores  # the backward computes the scores again


def test_grouped_heads_and_other_head_dims():
    q, k, v = torch.randn(1, 6, 4, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 16)
    assert _counted(lambda: tileloom.attention(q, k, v)) == 2 * 6 * 4 * 5 * (8 + 16)


def test_packed_sequences_count_by_their_lengths():
    lengths = torch.tensor([3, 0, 7])
    offsets = pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    q, k, v = (torch.randn(10, 4, 8, requires_grad=True) for _ in range(3))

    def ours():
        tileloom.attention_varlen(q, k, v, offsets, offsets, 7, 7).sum().backward()

    assert _counted(ours) == 7 * 2 * 4 * (9 + 49) * 8
    mode = FakeTensorMode()
    given = [mode.from_tensor(t) for t in (q.detach(), k.detach(), v.detach(), offsets)]
    with mode:
        bound = _counted(lambda: tileloom.attention_varlen(*given[:3], given[3], given[3], 7, 7))
    assert bound == 2 * 2 * 4 * 3 * 49 * 8


def test_what_pytorch_counts_by_itself_stays():
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    assert _counted(lambda: (a @ b, tileloom.rms_norm(a), tileloom.softmax(a))) == 2 * 3 * 4 * 5
