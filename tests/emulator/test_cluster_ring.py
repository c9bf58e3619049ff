"""Numbers that the warps of a cluster send a turn ahead, as `tileloom.device.cluster` says."""

from __future__ import annotations

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileloom import emulator
from tileloom.device.cluster import cluster_ring, cluster_send, cluster_take, warp_layout


@gluon.jit
def walks(
    x_ptr, out_ptr, turns, ahead, CTAS: gl.constexpr, WARPS: gl.constexpr, SIZE: gl.constexpr
):  # fmt: skip
    """`x` is `[turns, 2, CTAS, WARPS]`; out what each turn gives to each warp."""
    of: gl.constexpr = gl.SliceLayout(2, warp_layout(WARPS, CTAS, 1))
    cta = gl.expand_dims(gl.arange(0, CTAS, layout=gl.SliceLayout(1, of)), 1)
    at = cta * WARPS + gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(0, of)), 0)
    every: gl.constexpr = CTAS * WARPS
    ring = cluster_ring(2, CTAS, WARPS)
    for t in range(turns + ahead):
        if t < turns:
            first = x_ptr + 2 * t * every + at
            cluster_send(ring, t, (gl.load(first), gl.load(first + every)), CTAS, WARPS)
        if t >= ahead:
            found = cluster_take(ring, t - ahead, at.to(gl.float32), 2, SIZE, CTAS, WARPS)
            gl.store(out_ptr + 2 * (t - ahead) * every + at, found[0])
            gl.store(out_ptr + (2 * (t - ahead) + 1) * every + at, found[1])


def run_of(turns, ahead, ctas, warps, size, collect=False):
    x = torch.rand(turns, 2, ctas * warps)
    out = torch.zeros(turns, 2, ctas * warps)
    with emulator.run(collect=collect) as run:
        walks[(1,)](x, out, turns, ahead, ctas, warps, size, num_ctas=ctas, num_warps=warps)
    return run, x.double(), out.double()


@pytest.mark.parametrize("size", [0, 64])
@pytest.mark.parametrize(("ctas", "warps"), [(2, 16), (8, 8), (2, 8)])
def test_all_warps_get_what_all_have_sent(ctas, warps, size):
    """More turns than the ring has boxes; fewer warps than lanes as well."""
    run, x, out = run_of(6, 1, ctas, warps, size)
    assert run.reports == []
    a, b = x[:, 0], x[:, 1]
    wanted = [a.sum(1), b.sum(1)]
    if size:
        centre = a.mean(1, keepdim=True)
        wanted = [centre[:, 0], (b + size * (a - centre) ** 2).sum(1)]
    expected = torch.stack(wanted, 1)[:, :, None].expand_as(out)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_nobody_may_be_two_turns_ahead():
    run, _, _ = run_of(4, 2, 8, 4, 0, collect=True)
    assert run.errors[0].kind == "race"
    assert "turn 2 is sent while [0, 1] were not taken" in run.errors[0].text()


@gluon.jit
def takes(out_ptr, CTAS: gl.constexpr, WARPS: gl.constexpr):
    ring = cluster_ring(1, CTAS, WARPS)
    of: gl.constexpr = gl.SliceLayout(2, warp_layout(WARPS, CTAS, 1))
    like = gl.full([CTAS, WARPS], 0, gl.float32, of)
    (found,) = cluster_take(ring, 0, like, 1, 0, CTAS, WARPS)
    gl.store(out_ptr + gl.full([CTAS, WARPS], 0, gl.int32, of), found)


def test_what_nobody_sends_is_waited_for_for_ever():
    with emulator.run(collect=True) as run:
        takes[(1,)](torch.zeros(1), 8, 4, num_ctas=8)
    assert run.errors[0].kind == "deadlock"
    assert "nobody has sent numbers in turn 0" in run.errors[0].text()
