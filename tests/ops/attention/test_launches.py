"""What the driver is given by attention's bound launches is what Triton's own launches give it."""

from __future__ import annotations

import pytest
import torch
from tests.launch import fake_cuda

import tileloom
from tileloom import emulator, knobs, masks
from tileloom import target as targets
from tileloom.launch.launcher import prepared
from tileloom.ops.attention import launch_triton_bwd
from tileloom.ops.attention.config import GluonSm90Config, TritonConfig
from tileloom.ops.attention.problem import AttentionProblem

pytest.importorskip("triton")


class Pretend(torch.Tensor):
    """A CPU tensor that a launcher takes for one on the GPU: here nothing is read or written."""

    is_cuda = True

    def new_empty(self, *sizes, dtype=None, **options):
        """A workspace, the same one whenever it is asked for."""
        key = (sizes, dtype)
        if key not in _WORKSPACES:
            _WORKSPACES[key] = super().new_empty(*sizes, dtype=dtype, **options)
        return _WORKSPACES[key]


_WORKSPACES: dict = {}


def pretend(*shape, dtype=torch.float16):
    return torch.zeros(shape, dtype=dtype).as_subclass(Pretend)


@pytest.fixture(scope="module")
def cuda():
    with fake_cuda.installed() as fake:
        prepared.cache_clear()
        yield fake
        prepared.cache_clear()


@pytest.fixture
def counter(monkeypatch):
    from tileloom.ops.attention import launch_gluon_sm90_fwd as module

    zero = pretend(4, dtype=torch.int32)
    monkeypatch.setattr(module, "zero_counter", lambda like: zero)


def last_launch(cuda, bind, arguments, tensors, kernels):
    """Launch four times; what the driver saw of the last, of each of the kernels."""
    with targets.override(targets.H100):
        launch = bind(*arguments)
        for _ in range(4):
            launch(*tensors)
        launchers = [one for one in _launchers() if one._variants]
        for variant in (v for one in launchers for v in one._variants.values()):
            cuda.define(variant.compiled)
        launch(*tensors)
    return [cuda.last(back) for back in range(kernels, 0, -1)]


def _launchers():
    from tileloom.launch import watch
    from tileloom.launch.launcher import Launcher

    return [one for one in list(watch._everyone) if isinstance(one, Launcher)]


def both_ways(cuda, bind, config, tensors, mask, *, first=0, kernels=1):
    """Compare the launches of an operator whose q, k, v, ... begin with tensor `first`."""
    q, k, v = tensors[first : first + 3]
    visible, bias, lengths = tensors[-6:-3] if first == 0 else tensors[7:10]
    p = 0.1 if any(isinstance(each, tuple) for each in tensors) else 0.0
    problem = AttentionProblem.of(q, k, v, visible, bias, lengths, mask.band, 0.125, p)
    arguments = (problem, config, *tensors)
    ours = last_launch(cuda, bind, arguments, tensors, kernels)
    compiled = {v.compiled.function for one in _launchers() for v in one._variants.values()}
    prepared.cache_clear()
    with knobs.scope({"launch.tier": "plain"}):
        with targets.override(targets.H100):
            bind(*arguments)(*tensors)
        theirs = [cuda.last(back) for back in range(kernels, 0, -1)]
    prepared.cache_clear()
    assert {one.function for one in theirs} <= compiled
    assert len({one.function for one in ours}) == kernels
    assert all(len(one.values) > 60 for one in ours)
    assert ours == theirs


TMA, REGISTERS = (GluonSm90Config(2, 128, 2, store, 240) for store in ("tma", "registers"))
rare = pytest.mark.full


@pytest.mark.parametrize(
    ("config", "has_lengths"),
    [(TMA, True), *(pytest.param(*c, marks=rare) for c in [(TMA, False), (REGISTERS, True)])],
)
def test_the_hopper_kernel(cuda, counter, config, has_lengths):
    from tileloom.ops.attention.launch_gluon_sm90_fwd import bind_attention_fwd

    q, out = pretend(2, 4, 300, 64), pretend(2, 300, 4, 64).transpose(1, 2)
    k, v = pretend(2, 2, 500, 64), pretend(2, 2, 500, 64)
    lengths = pretend(2, dtype=torch.int32) if has_lengths else None
    lse = pretend(2, 4, 300, dtype=torch.float32)
    mask = masks.causal() if has_lengths else masks.window(None, None)
    tensors = (q, k, v, None, None, lengths, None, out, lse)
    both_ways(cuda, bind_attention_fwd, config, tensors, mask)


@pytest.mark.parametrize("has_extras", [True, pytest.param(False, marks=rare)])
def test_the_portable_kernel(cuda, has_extras):
    from tileloom.ops.attention.launch_triton_fwd import bind_attention_fwd

    q, k, v = (pretend(2, 2, 100, 64) for _ in range(3))
    out, lse = pretend(2, 2, 100, 64), pretend(2, 2, 100, dtype=torch.float32)
    visible = pretend(100, 100, dtype=torch.bool) if has_extras else None
    bias = pretend(2, 1, 100, 100, dtype=torch.float32) if has_extras else None
    lengths = pretend(2, dtype=torch.int64) if has_extras else None
    tensors = (q, k, v, visible, bias, lengths, None, out, lse)
    both_ways(cuda, bind_attention_fwd, TritonConfig(), tensors, masks.window(10, 0))


@pytest.mark.parametrize(
    ("dim", "has_lengths"),
    [(128, True), pytest.param(64, False, marks=rare), pytest.param(256, True, marks=rare)],
)
def test_the_hopper_backward(cuda, dim, has_lengths):
    from tileloom.ops.attention.config_backward_sm90 import GluonSm90BackwardConfig
    from tileloom.ops.attention.launch_gluon_sm90_bwd import bind_attention_bwd

    q, dq = (pretend(2, 4, 300, dim) for _ in range(2))
    out, dout = (pretend(2, 300, 4, dim).transpose(1, 2) for _ in range(2))
    k, v, dk, dv = (pretend(2, 2, 500, dim) for _ in range(4))
    lengths = pretend(2, dtype=torch.int32) if has_lengths else None
    lse, dlse = (pretend(2, 4, 300, dtype=torch.float32) for _ in range(2))
    tensors = (dout, dlse, q, k, v, out, lse, None, None, lengths, None, dq, dk, dv, None)
    mask = masks.causal() if has_lengths else masks.window(None, None)
    config = GluonSm90BackwardConfig()
    both_ways(cuda, bind_attention_bwd, config, tensors, mask, first=2, kernels=3)


@pytest.mark.parametrize("is_dropped", [True, pytest.param(False, marks=rare)])
def test_the_portable_backward(cuda, is_dropped):
    """Every kernel of it, its seventy arguments, the fifth launch as Triton's own."""
    from tileloom.ops.attention.config_backward import TritonBackwardConfig
    from tileloom.ops.attention.launch_triton_bwd import bind_attention_bwd

    q, out, dout, dq = (pretend(1, 2, 60, 40) for _ in range(4))
    k, v, dk, dv = (pretend(1, 1, 70, 40) for _ in range(4))
    lse, bias, dbias = pretend(1, 2, 60, dtype=torch.float32), *(pretend(1, 2, 60, 70),) * 2
    state = (torch.tensor(2**40), torch.tensor(8)) if is_dropped else None
    tensors = (dout, None, q, k, v, out, lse, None, bias, None, state, dq, dk, dv, dbias)
    mask, config = masks.window(10, 0), TritonBackwardConfig()
    both_ways(cuda, bind_attention_bwd, config, tensors, mask, first=2, kernels=4)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_batches_and_heads_are_folded_into_the_first_dimension_of_the_grid(arch):
    # Of which there may be 2^31 - 1; of the other two, 65,535.
    dtype = torch.float16
    leaves = [torch.randn(s).to(dtype).requires_grad_() for s in [(3, 2, 5, 16)] * 3 + [(5, 5)]]
    packed = [torch.randn(6, 2, 64).to(dtype).requires_grad_() for _ in range(3)]
    ends = torch.tensor([0, 2, 6], dtype=torch.int32)
    with emulator.run(arch=arch, sms=2) as run:
        out = tileloom.attention(*leaves[:3], bias=leaves[3])
        torch.autograd.grad(out, leaves, torch.ones_like(out))
        out = tileloom.attention_varlen(*packed, ends, ends, 4, 4)
        torch.autograd.grad(out, packed, torch.ones_like(out))
    assert len(run.launches) >= 6
    parts = {launch.grid[1] for launch in run.launches if launch.kernel == "attention_dbias_kernel"}
    others = {launch.grid[1:] for launch in run.launches if launch.grid[1] not in parts}
    assert len(parts) == 1
    assert others == {(1, 1)}
    assert launch_triton_bwd._SHARED_PROGRAMS <= 65_535  # at most so many parts of a shared bias
