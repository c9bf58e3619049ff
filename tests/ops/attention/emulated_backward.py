"""A small call for each shipped form of the Hopper backward, for the emulator; `CASES` for mutants.

    tileloom check tests/ops/attention/emulated_backward.py --sms 2 [--mutate --kernels KERNEL_FILE]

Odd lengths, two query heads a key head, more steps than twice the depth of the pipeline; NaN in
keys that no query sees. With tiles of bias or mask one key of the first block is hidden from every
query, so that this block takes the path of poisoned keys and the others do not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from tests.ops.attention import cases, gradients
from tests.ops.attention.cases import BF16, FP16, FP32, AttentionCase
from tests.ops.attention.emulated import Call, head_dims

from tileloom import masks
from tileloom.launch.aot import KernelSpec
from tileloom.ops import record_choices
from tileloom.ops.attention.backward import attention_bwd
from tileloom.ops.attention.config import GluonSm90Config
from tileloom.ops.attention.config_backward_sm90 import GluonSm90BackwardConfig
from tileloom.ops.attention.kernels_backward_sm90 import gluon_backward_specs
from tileloom.ops.attention.launch_gluon_sm90_scores import KEYS, TILE, Scores
from tileloom.testing import poisoned_memory

SPECS = [
    s
    for s in gluon_backward_specs()
    if s.name.startswith("attention_bwd_gluon") and "packed" not in s.name
]
_STATE = (torch.tensor(5), torch.tensor(2**33 + 8))


def call_of(spec: KernelSpec) -> tuple[Call, GluonSm90BackwardConfig]:
    """The call for a spec, and the config that the spec was made from."""
    found = re.fullmatch(r"attention_bwd_gluon_sm90\[d.*-(\w+)-(\d+)x(\d+)\]", spec.name)
    assert found is not None
    dims, rows, stages = head_dims(spec), int(found[2]), int(found[3])
    keys = 64 if "_wide" in spec.function else 128
    c: dict[str, Any] = {"BIAS": 0, "MASK": 0, "DROPOUT": 0} | spec.constexprs
    is_ordered = spec.signature.get("progress", "constexpr") != "constexpr"
    is_persistent = spec.signature.get("counter") == "*i32"
    len_q, len_k = rows * stages + 7, 2 * keys + 37
    has_tiles = TILE in (c["BIAS"], c["MASK"])
    if has_tiles or c["DROPOUT"] == 2:
        len_k += 11  # rows of 16 bytes; whole calls of Philox
    shown = masks.window(None, None)
    if c["HAS_LEFT"]:
        shown = masks.window(len_k // 2, 9, anchor="bottom_right")
    elif c["HAS_RIGHT"]:
        shown = masks.causal("bottom_right")
    mask = cases.shown_by(shown)
    if c["HAS_LENGTHS"]:
        mask = cases.lengths(len_k, len_k // 3, 0, dtype=torch.int32, then=shown)
    batch = 3 if c["HAS_LENGTHS"] else 2 if c.get("SHARED") else 1
    dtype = FP16 if found[1] == "fp16" else BF16
    bias = None
    if c["BIAS"]:
        shape = (2, 1, len_k) if c["BIAS"] == KEYS else (batch, 2, len_q, len_k)
        bias = cases.added(shape, dtype=FP32 if "fp32" in spec.signature["bias"] else BF16)
    if c["MASK"]:
        mask = _with_tensor(mask, (2, len_q, len_k))
    case = AttentionCase(
        spec.name, (batch, 2, 1, len_q, len_k, *dims), dtype, mask=mask, bias=bias,
        options={"dropout_p": 0.3, "philox": _STATE} if c["DROPOUT"] else {},
        hide=slice(5, 6) if has_tiles else None,
    )  # fmt: skip
    config = GluonSm90BackwardConfig(rows, stages, is_ordered, persistent=is_persistent)
    return Call(spec.name, case, GluonSm90Config(), "sm_90a"), config


def _with_tensor(mask: cases.Extra, shape: tuple[int, ...]) -> cases.Extra:
    """The same mask, and a random bool tensor."""

    def make(case: AttentionCase, device: torch.device) -> masks.Mask:
        return mask(case, device) & cases.visible(shape)(case, device)

    return make


def modes_of(inputs: cases.Inputs, config: GluonSm90BackwardConfig) -> Scores:
    """The modes that the launch chooses for a call with all gradients."""
    mask, bias = inputs.options.get("mask"), inputs.options.get("bias")
    return Scores.of(
        cases.problem_of(inputs), config, mask and mask.visible, bias,
        None if bias is None else torch.empty_like(bias),
    )  # fmt: skip


def checked(inputs: cases.Inputs, config: GluonSm90BackwardConfig) -> None:
    """Run and judge the backward inside a run of the emulator that is there already."""
    given = gradients.upstream(inputs)
    clean = [t.clone() for t in (inputs.q, inputs.k, inputs.v)]
    with poisoned_memory(), record_choices() as made:
        results = gradients.of_operator(inputs, given, config.encode())
    assert [choice.config for choice in made] == [config]
    for tensor, copy in zip((inputs.q, inputs.k, inputs.v), clean):
        assert torch.equal(tensor.nan_to_num(7.0), copy.nan_to_num(7.0))
    gradients.check(inputs, given, results)


def _sum(numbers: torch.Tensor, order: Iterable[int]) -> torch.Tensor:
    total = torch.zeros_like(numbers[:, :, 0])
    for block in order:
        total += numbers[:, :, block]
    return total


def check_order(config: GluonSm90BackwardConfig, sizes: tuple[int, ...], device: str) -> None:
    """See from dQ's bits that blocks of keys have added to it in turn, the last keys first.

    One key of each block has a gradient: dS = 1 and a row of K that is, column by column, a small
    number or a large one, and each large one comes with both signs: in float32 nearly every other
    order has another sum. `sizes`: B, H, Lq, blocks, head dim.
    """
    batch, heads, len_q, blocks, dim = sizes
    width = 64 if dim > 128 else 128
    generator = torch.Generator().manual_seed(0)
    large = 2.0 ** torch.arange(24, 24 + blocks // 3)
    small = torch.arange(1.0, 1 + blocks - 2 * len(large))
    places = torch.rand(batch, heads, blocks, dim, generator=generator).argsort(2)
    numbers = torch.cat((large, -large, small))[places]
    k = torch.zeros(batch, heads, blocks * width, dim, dtype=BF16, device=device)
    v, q = torch.zeros_like(k), torch.zeros(batch, heads, len_q, dim, dtype=BF16, device=device)
    k[:, :, ::width] = numbers.to(k)
    v[:, :, ::width, 0] = 1.0
    dout, lse = torch.zeros_like(q), torch.zeros(batch, heads, len_q, device=device)
    dout[..., 0] = 1.0
    dq, *_ = attention_bwd(
        dout, None, q, k, v, torch.zeros_like(q), lse, None, None, None,
        None, None, None, 0, 1.0, 0.0, None, None, True, True, False, config.encode(),
    )  # fmt: skip
    last_first = [*reversed(range(blocks))]
    right = _sum(numbers, last_first)
    for other in (last_first[::-1], [*last_first[:-2], 0, 1], [*last_first[1:], blocks - 1]):
        assert not torch.equal(_sum(numbers, other), right)  # so that the bits do tell
    seen = dq[:, :, max(len_q - width, 0) :].cpu()  # rows that see a key of the last block
    assert torch.equal(seen, right[:, :, None].to(BF16).expand_as(seen))


def _run(spec: KernelSpec) -> None:
    call, config = call_of(spec)
    checked(call.inputs(), config)
    if config.ordered:
        _, _, _, _, _, dim, _ = call.case.sizes
        check_order(config, (1, 4, 64, 9, dim), "cpu")  # of one step each: soon out of turn


def cases_of(forms: Iterable[str]) -> dict[str, Callable[[], None]]:
    """What runs and judges each of some forms, inside a run of the emulator."""
    specs = {spec.name: spec for spec in SPECS}
    return {form: partial(_run, specs[f"attention_bwd_gluon_sm90[{form}]"]) for form in forms}


# What `tileloom check` runs: every path that synchronises, but for those of the narrow kernel.
CASES = cases_of((
    "d128-full-bf16-64x2", "d64-causal-bf16-128x2", "d256-window-lengths-bf16-64x2",
    "d64-dropout-bf16-64x2", "d128-window-lengths-bias-mask-bf16-64x2", "d64-bias-bf16-64x2",
    "d256-bias-bf16-64x2",
    "d256-causal-bias-of-keys-bf16-64x2", "d256-causal-bias-dropout-bf16-64x2",
    "d128-causal-ordered-bf16-64x2", "d256-causal-ordered-bf16-64x2",
))  # fmt: skip
