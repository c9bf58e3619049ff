"""Numbers that the CTAs of a cluster show each other: what `tileloom.device.cluster` promises."""

from __future__ import annotations

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileloom import emulator
from tileloom.device.cluster import (
    cluster_arrive,
    cluster_collect,
    cluster_post,
    cluster_wait,
    cta_bases,
)


@gluon.constexpr_function
def layout_of(ctas):
    return gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0], cta_bases(ctas, 2))


@gluon.jit
def shares(
    x_ptr, out_ptr, turns, CTAS: gl.constexpr, BEGINS: gl.constexpr, TURNS: gl.constexpr,
    COLLECTS: gl.constexpr,
):  # fmt: skip
    """`out[turn, i]` is `sum_j 10^j (x[turn, j] + 5 x[turn, j])` of all CTAs j, in each CTA i."""
    one: gl.constexpr = gl.SliceLayout(1, layout_of(CTAS))
    if BEGINS:
        cluster_arrive()
        cluster_wait()
    cta = gl.arange(0, CTAS, layout=one)
    turn = cta * 0
    for number in range(turns):
        x = gl.load(x_ptr + number * CTAS + cta)
        box = cluster_post((x, 5.0 * x), turn, CTAS)
        found = cluster_collect(box, 2, CTAS)
        if COLLECTS > 1:
            found = cluster_collect(box, 2, CTAS)
        total = 0.0 * x
        power = 1.0
        for j in gl.static_range(CTAS):
            total += power * (found[2 * j] + found[2 * j + 1])
            power = power * 10.0
        gl.store(out_ptr + number * CTAS + cta, total)
        if TURNS:
            turn = 1 - turn


@pytest.mark.parametrize("ctas", [2, 8])
def test_all_see_the_numbers_of_all(ctas):
    x = torch.arange(3.0 * ctas)
    out = torch.zeros(3 * ctas)
    with emulator.run() as run:
        shares[(1,)](x, out, 3, ctas, True, True, 1, num_ctas=ctas)
    assert run.reports == []
    powers = torch.tensor([10.0**j for j in range(ctas)])
    wanted = (6.0 * x.reshape(3, ctas) * powers).sum(1, keepdim=True).expand(3, ctas)
    torch.testing.assert_close(out.reshape(3, ctas), wanted)


@pytest.mark.parametrize(
    ("forms", "words"),
    [
        ((False, True, 1), "writes into a CTA that may not have begun"),
        ((True, False, 1), "writes box 0, which other CTAs may be reading"),
        ((True, True, 2), "reads box 0, into which nothing was posted"),
    ],
)
def test_an_exchange_out_of_order_is_a_race(forms, words):
    with emulator.run(collect=True) as run:
        shares[(1,)](torch.zeros(6), torch.zeros(6), 3, 2, *forms, num_ctas=2)
    assert run.errors[0].kind == "race"
    assert words in run.errors[0].text()
