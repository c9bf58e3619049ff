"""A small call for each shipped attention kernel, for the emulator; and `CASES` for its mutants.

    tileloom check tests/ops/attention/emulated.py --sms 2 [--mutate --kernels KERNEL_FILE]

Lengths are odd unless the kernel wants even ones, a program takes several tiles, and the longest
tile takes twice the pipeline's depth plus one steps. Keys that no query sees hold NaN.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tests.ops.attention import cases
from tests.ops.attention.cases import BF16, FP16, FP32, AttentionCase
from tests.ops.attention.dropout import check, drawn_at

import tileloom
from tileloom import emulator, masks
from tileloom.launch.aot import KernelSpec
from tileloom.ops import record_choices
from tileloom.ops.attention.config import AttentionConfig, GluonSm90Config, TritonConfig
from tileloom.ops.attention.kernels import shipped
from tileloom.ops.attention.strides import is_shared
from tileloom.testing import poisoned_memory

SCHEDULES = (("late", 0), ("eager", 0), ("random", 0), ("random", 1))
SMS = 2
_ATTENTION = "tileloom.ops.attention"
_DTYPES = {"fp16": FP16, "bf16": BF16, "fp32": FP32}


@dataclass(frozen=True)
class Call:
    """What runs one kernel: a case, the config that takes it, and the architecture."""

    name: str
    case: AttentionCase
    config: AttentionConfig
    arch: str

    def inputs(self) -> cases.Inputs:
        """The case's inputs, NaN in the keys that no query sees."""
        inputs = self.case.inputs()
        batch, heads_q, heads_kv, len_q, len_k, _, _ = self.case.sizes
        mask = inputs.options.get("mask")
        if isinstance(mask, masks.Mask):
            shown = mask.materialize(batch, len_q, len_k).expand(batch, heads_q, len_q, len_k)
            seen = shown.reshape(batch, heads_kv, -1, len_k).any(2)
            inputs.k[~seen] = float("nan")
            inputs.v[~seen] = float("nan")
        return inputs


def play(
    inputs: cases.Inputs,
    config: AttentionConfig,
    level: str,
    schedules: Sequence[tuple[str, int]] = SCHEDULES,
    arch: str = "sm_90a",
) -> None:
    """Run a call under several schedules; raises for a report, a wrong value, or a stray write."""
    before = [t.clone() for t in (inputs.q, inputs.k, inputs.v)]
    p = inputs.options.get("dropout_p", 0.0)
    state = drawn_at(inputs) if p else None
    generator = torch.get_rng_state()
    for schedule, seed in schedules:
        with emulator.run(arch=arch, schedule=schedule, level=level, seed=seed, sms=SMS) as run:
            torch.set_rng_state(generator)
            out, lse = attention(inputs, config)
        for tensor, copy in zip((inputs.q, inputs.k, inputs.v), before):
            assert torch.equal(tensor.nan_to_num(7.0), copy.nan_to_num(7.0))
        try:
            check(inputs, out, lse, p, state)
        except AssertionError as error:
            error.add_note(f"under schedule {schedule!r}, seed {seed}, level {level!r}")
            raise
        assert bool(run.launches) == (out.numel() > 0 and inputs.k.shape[2] > 0)
        assert [r.text() for r in run.reports if r.severity != "info"] == []


def attention(inputs: cases.Inputs, config: AttentionConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in poisoned memory, by the config's backend and no other."""
    with record_choices() as made, poisoned_memory():
        out, lse = tileloom.attention(
            inputs.q, inputs.k, inputs.v, **inputs.options, return_lse=True, config=config
        )
    assert [choice.backend for choice in made] == [config.backend]
    return out, lse


def forward_specs() -> list[KernelSpec]:
    """The shipped forms of the forward's kernels, but for those of packed sequences."""
    names = (spec for spec in shipped() if spec.name.startswith("attention_fwd"))
    return [spec for spec in names if "packed" not in spec.name]


def gluon_calls() -> list[Call]:
    """A call for each shipped form of the Hopper kernel."""
    return [
        Call(spec.name, _gluon_case(spec), gluon_config(spec), "sm_90a")
        for spec in forward_specs()
        if spec.function == f"{_ATTENTION}.kernel_gluon_sm90_fwd:attention_fwd_kernel"
    ]


def triton_calls() -> list[Call]:
    """A call for each shipped form of the portable kernel on sm_80 and sm_90."""
    return [
        Call(f"{spec.name}-{arch}", _triton_case(spec), triton_config(spec), arch)
        for spec in forward_specs()
        if spec.function == f"{_ATTENTION}.kernel_triton:attention_fwd_kernel"
        for arch in spec.archs
        if arch in ("sm_80", "sm_90")
    ]


def _tile(spec: KernelSpec, name: str) -> tuple[str, list[int]]:
    """Dtype and shape of a descriptor's tile."""
    match = re.fullmatch(r"tensordesc<(\w+)\[(.*)\],.*>", spec.signature[name])
    assert match is not None
    return match[1], [int(n) for n in match[2].split(",")]


def head_dims(spec: KernelSpec) -> tuple[int, int]:
    """Columns of q and k, and of v, by a spec's name."""
    match = re.search(r"\[d(\d+)(?:x(\d+))?-", spec.name)
    assert match is not None
    return int(match[1]), int(match[2] or match[1])


def gluon_config(spec: KernelSpec) -> GluonSm90Config:
    """The config that a spec of the Hopper kernel was made from."""
    c: Any = spec.constexprs
    store = "tma" if c["STORE_TMA"] else "registers"
    block_n = _tile(spec, "k_desc")[1][2]
    rest = (c["REGISTERS"], c["PIN"], c["RIDE_STAGES"], c["TURNS"], c["HELD"], c["LAZY"])
    return GluonSm90Config(c["CONSUMERS"], block_n, c["STAGES"], store, *rest)


def triton_config(spec: KernelSpec) -> TritonConfig:
    """The config that a spec of the portable kernel was made from."""
    c: Any = spec.constexprs
    chunk = 0 if c["CHUNK_D"] == c["BLOCK_D"] else c["CHUNK_D"]
    return TritonConfig(c["BLOCK_M"], c["BLOCK_N"], spec.num_warps, spec.num_stages, chunk)


def _gluon_case(spec: KernelSpec) -> AttentionCase:
    config = gluon_config(spec)
    dtype, _ = _tile(spec, "k_desc")
    is_even, is_once = (bool(spec.constexprs[name]) for name in ("EVEN", "ONCE"))
    is_odd = not (is_even or is_once)
    tiles = 1 if spec.constexprs["HAS_LENGTHS"] else 2
    more = 64 if spec.constexprs["SPREAD"] else 0
    if config.consumers == 3 and is_odd:
        more -= 64  # with the 7 below, a warpgroup has few rows, but none has none
    len_k = config.block_n * 2 * config.stages + (config.block_n if is_even else 64)
    if is_odd:
        len_k -= 27
    return _case(
        spec, _DTYPES[dtype], head_dims(spec),
        len_q=tiles * config.block_m + more + (7 if is_odd else 0), len_k=len_k,
    )  # fmt: skip


def _triton_case(spec: KernelSpec) -> AttentionCase:
    c: Any = spec.constexprs
    dtype = _DTYPES[spec.signature["q"].removeprefix("*")]
    len_k = c["BLOCK_N"] * 2 * spec.num_stages + 13
    return _case(spec, dtype, (c["HEAD_DIM"], c["HEAD_DIM_V"]), len_q=c["BLOCK_M"] + 5, len_k=len_k)


def _case(
    spec: KernelSpec, dtype: torch.dtype, dims: tuple[int, int], *, len_q: int, len_k: int
) -> AttentionCase:
    c = spec.constexprs
    batch = 3 if c["HAS_LENGTHS"] else 2 if c.get("ORDER") == 2 else 1
    shown = masks.window(None, None)
    if c["HAS_LEFT"]:
        shown = masks.window(len_k // 2, 9, anchor="bottom_right")
    elif c["HAS_RIGHT"]:
        shown = masks.causal("bottom_right")
    mask = cases.shown_by(shown)
    if c["HAS_LENGTHS"]:
        mask = cases.lengths(len_k, len_k // 3, 0, dtype=torch.int32, then=shown)
    bias = None
    if mode := c.get("MASK_MODE"):
        mask = _with_tensor(mask, rows=1 if mode == 1 else len_q)
    if mode := c.get("BIAS_MODE"):
        kind = spec.signature.get("bias_ptr", "").removeprefix("*")
        bias = cases.added(
            (2, 1 if mode == 1 else len_q, len_k),
            dtype=_DTYPES.get(kind),
            layout=cases.rows_of_16_bytes if mode == 3 else "contiguous",
        )
    sizes = (batch, 2, 1, len_q, len_k, *dims)
    options = {"dropout_p": 0.1} if c.get("DROPOUT") else {}
    return AttentionCase(spec.name, sizes, dtype, mask=mask, bias=bias, options=options)


def _with_tensor(mask: cases.Extra, *, rows: int) -> cases.Extra:
    """The same mask and a bool tensor, whose rows start at multiples of 16 bytes."""

    def make(case: AttentionCase, device: torch.device) -> masks.Mask:
        _, heads, _, _, len_k, _, _ = case.sizes
        visible = cases.visible((heads, rows, len_k))(case, device)
        return mask(case, device) & cases.rows_of_16_bytes(visible)

    return make


def constants(call: Call) -> Iterator[tuple[str, object]]:
    """The compile-time parameters that the call's problem and config give its kernel."""
    from tileloom.ops.attention import launch_gluon_sm90_fwd, launch_triton_fwd

    inputs = call.case.inputs()
    problem: Any = cases.problem_of(inputs)
    config: Any = call.config
    if config.backend == "triton":
        yield from launch_triton_fwd.constants(problem, config).items()
        return
    mask, bias = inputs.options.get("mask"), inputs.options.get("bias")
    shared = is_shared(problem, mask and mask.visible, bias)
    yield from launch_gluon_sm90_fwd.constants(problem, config, is_shared=shared).items()


def _checked(call: Call) -> None:
    """Run and judge a call inside a run of the emulator that is there already."""
    inputs = call.inputs()
    cases.check(inputs, *attention(inputs, call.config))


# What `tileloom check` runs: every path of the Hopper kernel that synchronises.
_FORMS = (
    "d64-full-bf16", "d64-causal-lengths-bf16", "d128-window-lengths-bf16", "d256-ragged-bf16",
    "d256-window-lengths-bf16", "d64-bias-bf16",
    "d64x128-window-lengths-bf16",  # rings apart, handed back by mbarriers
)  # fmt: skip
_CALLS = {call.name: call for call in gluon_calls()}
CASES = {form: partial(_checked, _CALLS[f"attention_fwd_gluon_sm90[{form}]"]) for form in _FORMS}
# A riding mask that hides keys, which hold NaN, from all: every tile goes round twice.
_HIDDEN = AttentionCase(
    "hidden-nan", (1, 2, 2, 200, 272, 64, 64), hide=slice(33, 61),
    mask=cases.visible((1, 2, 200, 272)),
)  # fmt: skip
CASES["hidden-nan"] = partial(
    _checked, Call("hidden-nan", _HIDDEN, GluonSm90Config(2, 128, 2, ride_stages=2), "sm_90a")
)
