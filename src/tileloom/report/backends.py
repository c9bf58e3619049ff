"""The dispatch decisions of a run, in rows: what was computed, by which backend, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from tileloom.ops._op import Choice
from tileloom.ops.attention.config import choose
from tileloom.ops.attention.problem import AttentionProblem
from tileloom.report.findings import BackendRow
from tileloom.target import H100

_SOURCES = {
    "explicit": "the caller asked for this config",
    "table": "the shipped table of tuned configs names it",
    "tuned": "the user's own tuned configs name it",
    "rule": "the first backend that takes the call",
}


def backend_rows(choices: Sequence[Choice]) -> list[BackendRow]:
    """Sum up decisions that agree in everything but sizes.

    Args:
        choices: What `record_choices` collected, attention only.

    Returns:
        Rows in the order of first appearance.
    """
    groups: dict[tuple[object, ...], list[Choice]] = {}
    for choice in choices:
        p: AttentionProblem = choice.problem
        same = (choice.backend, choice.source, tuple(choice.refused.items()), p.dtype, p.head_dim)
        extras = (p.has_key_lengths, p.has_mask, p.has_bias, p.band.is_unbounded)
        groups.setdefault((*same, *extras), []).append(choice)
    return [_row(group) for group in groups.values()]


def _row(group: Sequence[Choice]) -> BackendRow:
    first = group[0]
    why = [_SOURCES.get(first.source, first.source)]
    if first.backend == "reference" and not first.refused:
        why = ["the tensors are on the CPU, where the formula itself runs in plain PyTorch"]
    why += [f"{name} refused: {'; '.join(reasons)}" for name, reasons in first.refused.items()]
    return BackendRow(
        calls=len(group),
        problem=_problem([choice.problem for choice in group]),
        backend=first.backend,
        why=tuple(why),
        elsewhere="" if first.backend != "reference" else _on_h100(first.problem),
    )


def _on_h100(problem: AttentionProblem) -> str:
    choice = choose(dataclasses.replace(problem, dtype=torch.float16), H100)
    reasons = [f"{name}: {'; '.join(why)}" for name, why in choice.refused.items()]
    return choice.backend + (f" ({', '.join(reasons)})" if reasons else "")


def _problem(problems: Sequence[AttentionProblem]) -> str:
    def span(values: Sequence[int]) -> str:
        low, high = min(values), max(values)
        return str(low) if low == high else f"{low} to {high}"

    p = problems[0]
    heads = f"{p.heads_q} heads" if p.heads_q == p.heads_kv else f"{p.heads_q}/{p.heads_kv} heads"
    masked = [
        text
        for text, there in (
            ("key lengths", p.has_key_lengths),
            ("a bool mask", p.has_mask),
            ("a bias", p.has_bias),
            ("a diagonal band", not p.band.is_unbounded),
        )
        if there
    ]
    return (
        f"{str(p.dtype).removeprefix('torch.')}, batch {span([x.batch for x in problems])}, "
        f"{heads} of {p.head_dim}, {span([x.len_q for x in problems])} queries, "
        f"{span([x.len_k for x in problems])} keys, {' and '.join(masked) or 'no mask'}"
    )
