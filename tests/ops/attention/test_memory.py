"""What a backward allocates besides the gradients is what its docstring says, to the byte.

Every tensor that is made while it runs is written down, on the emulator; on the GPU, the peak of
the allocator is read.
"""

from __future__ import annotations

import math

import pytest
import torch
from tests.ops.attention import cases, gradients
from tests.ops.attention.cases import BF16, FP32, AttentionCase
from torch.utils._python_dispatch import TorchDispatchMode

import tileloom
from tileloom import emulator, masks
from tileloom.ops.attention import backward
from tileloom.ops.attention.config import GluonSm90Config, TritonConfig
from tileloom.ops.attention.config_backward import (
    TritonBackwardConfig,
    choose_backward,
    triton_backward_rule,
)
from tileloom.ops.attention.config_backward_sm90 import GluonSm90BackwardConfig
from tileloom.ops.attention.reference import attention_reference
from tileloom.target import target_of

_EXAMPLES = 16
"""Bytes that a first call takes for examples of its workspace."""


class Allocations(TorchDispatchMode):
    """Collects the bytes of each storage that an operator makes anew."""

    def __init__(self):
        super().__init__()
        self.sizes: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []  # no address comes twice

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in given:
                    self.sizes.setdefault(storage.data_ptr(), storage.nbytes())
                    self._kept.append(tensor)
        return result

    def total(self):
        return sum(self.sizes.values())


def gluon_bytes(case, config):
    """The formula of `launch_gluon_sm90_bwd`, from the sizes of a case."""
    batch, heads_q, heads_kv, len_q, len_k, head_dim, _ = case.sizes
    width = 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256
    rows = 64 if width == 256 else config.block_m
    blocks = batch * heads_kv * math.ceil(len_k / (64 if width == 256 else 128))
    turns = 4 * (blocks + 1) if config.ordered else 0
    return 4 * batch * heads_q * math.ceil(len_q / rows) * rows * (width + 2) + turns


def triton_bytes(case, has_bias):
    """The formula of `launch_triton_bwd`, for a bias that does not broadcast."""
    batch, heads_q, _, len_q, *_ = case.sizes
    is_twice = has_bias or case.dtype == FP32
    return 4 * batch * heads_q * len_q * (2 if is_twice else 1)


def allocated(case, config, *, sms=2, is_causal=False, change=lambda dout: dout):
    """Bytes of all that a backward allocates but its gradients."""
    inputs = case.inputs()
    given = gradients.upstream(inputs, with_lse=False)
    dout = change(given.dout)
    q, k, v, bias = inputs.q, inputs.k, inputs.v, inputs.options.get("bias")
    out, lse = attention_reference(q, k, v, bias=bias, is_causal=is_causal, return_lse=True)
    with emulator.run(sms=sms), Allocations() as made:
        results = backward._backward(
            dout, None, q, k, v, out, lse, None, bias, None,
            None, 0 if is_causal else None, None, None, q.shape[3] ** -0.5, 0.0, None, None,
            True, True, bias is not None, config.encode(),
        )  # fmt: skip
    return made.total() - sum(t.untyped_storage().nbytes() for t in results)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        ((3, 2, 1, 70, 130, 64, 64), GluonSm90BackwardConfig(128, 2)),
        ((7, 2, 1, 70, 130, 64, 64), GluonSm90BackwardConfig(64, 2)),
        ((1, 2, 2, 150, 150, 128, 128), GluonSm90BackwardConfig()),
        ((1, 2, 1, 70, 70, 160, 160), GluonSm90BackwardConfig()),
        ((3, 2, 1, 70, 130, 64, 64), GluonSm90BackwardConfig(128, 2, ordered=True)),
    ],
)
def test_the_hopper_backward(sizes, config, is_causal):
    case = AttentionCase("memory", sizes, BF16)
    expected = gluon_bytes(case, config)
    assert allocated(case, config, is_causal=is_causal) == expected + _EXAMPLES


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("bias", [None, cases.added((2, 4, 70, 90))])
def test_the_portable_backward(dtype, bias):
    case = AttentionCase("memory", (2, 4, 2, 70, 90, 32, 32), dtype, bias=bias)
    expected = triton_bytes(case, bias is not None)
    assert allocated(case, TritonBackwardConfig()) == expected + _EXAMPLES


@pytest.mark.parametrize("config", [GluonSm90BackwardConfig(), TritonBackwardConfig()])
def test_a_gradient_whose_last_dimension_has_a_stride_is_copied_once(config):
    case = AttentionCase("memory", (1, 2, 1, 70, 70, 64, 64), BF16)
    strided = allocated(case, config, change=lambda t: t.mT.contiguous().mT)
    assert strided == allocated(case, config) + 2 * 70 * 64 * 2


@pytest.mark.parametrize("shape", [(1, 1, 70, 96), (2, 2, 1, 96)])
@pytest.mark.parametrize("config", [GluonSm90BackwardConfig(), TritonBackwardConfig()])
def test_the_gradient_of_a_bias_that_broadcasts_takes_at_most_8_mib_more(config, shape):
    case = AttentionCase("memory", (2, 2, 1, 70, 96, 64, 64), BF16, bias=cases.added(shape))
    rows = gluon_bytes(case, config) if config.backend == "gluon_sm90" else triton_bytes(case, True)
    assert rows <= allocated(case, config) <= rows + 8 * 2**20


@pytest.mark.parametrize("config", [GluonSm90Config(2, 128, 2), TritonConfig(64, 64, 4)])
def test_a_forward_allocates_its_outputs_and_lengths_that_are_not_contiguous(config):
    q, k, v = (torch.randn(2, 2, 70, 64).to(BF16) for _ in range(3))
    lengths = torch.tensor([70, 0, 9, 0])
    outputs = 2 * 2 * 70 * (64 * 2 + 4)
    for given, copied in ((lengths[:2], 0), (lengths[::2], 2 * 8)):
        with emulator.run(sms=2), Allocations() as made:
            tileloom.attention(q, k, v, mask=masks.key_lengths(given), config=config)
        assert outputs <= made.total() <= outputs + copied + _EXAMPLES


@pytest.mark.parametrize("head_dim", [64, pytest.param(160, marks=pytest.mark.full)])
def test_the_hopper_backward_of_packed_sequences_has_the_rows_that_it_says(head_dim):
    ends = torch.tensor([0, 3, 3, 80, 150], dtype=torch.int32)
    q, k, v = (torch.randn(150, 2, head_dim).to(BF16) for _ in range(3))
    given = [t.requires_grad_() for t in (q, k, v)]
    config = GluonSm90BackwardConfig()
    with emulator.run(sms=2):
        out = tileloom.attention_varlen(*given, ends, ends, 77, 77, backward_config=config)
        with Allocations() as made:
            results = torch.autograd.grad(out, given, torch.ones_like(out))
    width = 64 if head_dim == 64 else 256
    used = made.total() - sum(t.untyped_storage().nbytes() for t in results)
    assert used <= 4 * 2 * (150 + 128 * 4) * (width + 2) + 150 * 2 * head_dim * 2 + 1024


# On a GPU


def _peak(case, config):
    """Bytes at the peak of a backward above those before it, and of its gradients."""
    inputs = case.inputs("cuda")
    leaves = [t.requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    if inputs.options.get("bias") is not None:
        leaves.append(inputs.options["bias"].requires_grad_())
    out = tileloom.attention(*leaves[:3], **inputs.options, backward_config=config)
    dout = torch.randn_like(out)
    results = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    size = sum(t.nbytes for t in results)
    del results
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(out, leaves, dout)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, size


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "gluon_sm90"])
@pytest.mark.parametrize(
    "sizes",
    [(1, 4, 4, 16384, 16384, 64, 64), (8, 16, 4, 1000, 1000, 128, 128),
     (2, 8, 8, 2048, 2048, 256, 256)],
)  # fmt: skip
def test_the_peak_is_the_formulas(backend, sizes):
    case = AttentionCase("memory", sizes, BF16)
    inputs = case.inputs("cuda")
    problem, target = cases.problem_of(inputs), target_of(inputs.q)
    choice = choose_backward(problem, target)
    if backend == "gluon_sm90":
        if choice.backend != backend:
            pytest.skip("; ".join(choice.refused[backend]))
        expected = gluon_bytes(case, choice.config)
        used, size = _peak(case, choice.config)
    else:
        expected = triton_bytes(case, has_bias=False)
        used, size = _peak(case, triton_backward_rule(problem, target))
    assert size + expected <= used <= size + expected + 7 * 2**20  # its granularity
