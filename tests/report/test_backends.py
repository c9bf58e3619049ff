import dataclasses

import torch

from tileloom import attention, masks
from tileloom.ops._op import record_choices
from tileloom.ops.attention.config import ReferenceConfig, choose
from tileloom.report.backends import backend_rows
from tileloom.report.findings import BackendRow
from tileloom.target import H100


def calls():
    """Choices of five calls: two that differ in size, a bool mask, grouped heads, a config."""
    with record_choices() as choices:
        for batch, length in ((2, 24), (3, 40)):
            q, k, v = torch.randn(3, batch, 4, length, 32)
            attention(q, k, v, mask=masks.key_lengths(torch.full((batch,), 9)))
        q, k, v = torch.randn(3, 2, 4, 24, 32)
        attention(q, k, v, mask=torch.ones(24, 24, dtype=torch.bool), scale=-1.0)
        attention(q, k[:, :2], v[:, :2], is_causal=True)
        attention(q, k, v, config=ReferenceConfig())
    return choices


def test_calls_that_differ_in_size_only_share_a_row():
    cpu = "the tensors are on the CPU, where the formula itself runs in plain PyTorch"
    assert backend_rows(calls()) == [
        BackendRow(
            2,
            "float32, batch 2 to 3, 4 heads of 32, 24 to 40 queries, 24 to 40 keys, key lengths",
            "reference",
            (cpu,),
            "gluon_sm90",
        ),
        BackendRow(
            1,
            "float32, batch 2, 4 heads of 32, 24 queries, 24 keys, a bool mask",
            "reference",
            (cpu,),
            "triton (gluon_sm90: scale -1.0 is not positive)",
        ),
        BackendRow(
            1,
            "float32, batch 2, 4/2 heads of 32, 24 queries, 24 keys, a diagonal band",
            "reference",
            (cpu,),
            "gluon_sm90",
        ),
        BackendRow(
            1,
            "float32, batch 2, 4 heads of 32, 24 queries, 24 keys, no mask",
            "reference",
            (cpu,),
            "gluon_sm90",
        ),
    ]


def test_refusals_are_told_where_there_is_a_choice():
    problems = [choice.problem for choice in calls()[:3]]
    half = dataclasses.replace(problems[0], dtype=torch.float16)
    rows = backend_rows([choose(half, H100), choose(problems[1], H100), choose(problems[2], H100)])
    assert [(row.backend, row.elsewhere) for row in rows] == [
        ("gluon_sm90", ""),
        ("triton", ""),
        ("triton", ""),
    ]
    assert rows[0].why == ("the first backend that takes the call",)
    assert rows[1].why[1] == "gluon_sm90 refused: dtype torch.float32 is not float16 or bfloat16"
    assert rows[2].why[1].endswith("is not float16 or bfloat16; scale -1.0 is not positive")
