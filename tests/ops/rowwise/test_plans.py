"""The table of plans: what a key depends on, how large the table grows."""

from __future__ import annotations

import torch

from tileloom.ops.rowwise.plans import Plans, is_short, layout_key, plan_key


def test_a_key_tells_apart_what_a_plan_depends_on():
    x = torch.empty(4, 6)
    others = [torch.empty(6, 4), x.half(), x.t().contiguous().t(), x.to("meta"), x[:, :5]]
    others += [x[:1, :1].expand(4, 6), x.to_sparse()]
    keys = {layout_key(t) for t in (x, None, *others)}
    assert len(keys) == 9
    assert layout_key(torch.empty(4, 6)) == layout_key(x)


def test_what_is_no_tensor_has_no_plan():
    x = torch.zeros(3)
    plans: Plans[int] = Plans()
    for wrong in ([1.0], "x"):
        key = plan_key((x, wrong), 1.0)  # pyright: ignore[reportArgumentType]
        assert key is None
        assert plans.get(key) is None
    assert plans.get(plan_key((x,), [1.0])) is None  # pyright: ignore[reportArgumentType]


def test_the_table_is_bounded():
    plans: Plans[int] = Plans(most=100)
    for n in range(10_000):
        assert plans.put((n,), n) == n
        assert plans.get((n,)) == n
    assert len(plans) <= 100


def test_calls_on_the_cpu_do_not_go_short():
    assert not is_short((torch.ones(2), None))
    assert not is_short(([1.0],))
