"""Sums over the warps of a cluster: what `tileloom.device.cluster` promises."""

from __future__ import annotations

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileloom import emulator
from tileloom.device.cluster import (
    cluster_begin,
    cluster_moments,
    cluster_softmax,
    cluster_sums,
    warp_layout,
)


@gluon.jit
def joins(
    x_ptr, out_ptr, CTAS: gl.constexpr, WARPS: gl.constexpr, BOXES: gl.constexpr,
    COUNT: gl.constexpr,
):  # fmt: skip
    """`x` is `[2, CTAS, WARPS]`; out what each exchange gives to each warp."""
    of: gl.constexpr = gl.SliceLayout(2, warp_layout(WARPS, CTAS, 1))
    cta = gl.expand_dims(gl.arange(0, CTAS, layout=gl.SliceLayout(1, of)), 1)
    at = cta * WARPS + gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(0, of)), 0)
    box = 0
    for _ in gl.static_range(BOXES):
        box = cluster_begin(COUNT, CTAS, WARPS)
    a = gl.load(x_ptr + at)
    b = gl.load(x_ptr + (CTAS * WARPS) + at)
    found = cluster_sums(box, (a, b), CTAS, WARPS)
    found = found + cluster_moments(box, (a, b), 64, CTAS, WARPS)
    found = found + cluster_softmax(box, a, b, CTAS, WARPS)
    for k in gl.static_range(6):
        gl.store(out_ptr + k * (CTAS * WARPS) + at, found[k])


@pytest.mark.parametrize(("ctas", "warps"), [(2, 16), (8, 4), (8, 8)])
def test_all_warps_get_what_all_have(ctas, warps):
    x = torch.rand(2, ctas * warps)
    out = torch.zeros(6, ctas * warps)
    with emulator.run() as run:
        joins[(1,)](x, out, ctas, warps, 3, 2, num_ctas=ctas, num_warps=warps)
    assert run.reports == []
    a, b = x.double()
    peak = a.max()
    expected = [
        *(a.sum(), b.sum(), a.mean(), (b + 64 * (a - a.mean()) ** 2).sum()),
        *(peak, (b * (a - peak).exp()).sum()),
    ]
    wanted = torch.stack(expected)[:, None].expand(6, ctas * warps)
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("boxes", "count"), [(2, 2), (3, 1)])
def test_an_exchange_needs_a_box_of_its_own_and_of_its_size(boxes, count):
    with emulator.run(collect=True) as run:
        joins[(1,)](torch.zeros(2, 32), torch.zeros(6, 32), 8, 4, boxes, count, num_ctas=8)
    assert run.errors[0].kind == "race"
    assert "no box of 2 numbers of 8 x 4 warps waits for them" in run.errors[0].text()
