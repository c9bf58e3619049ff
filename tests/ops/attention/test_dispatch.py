"""Which backend runs, which config, and what is said about it; no kernel is launched."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.ops.attention import cases
from tests.ops.attention.cases import BF16, FP16, FP32, AttentionCase

import tileloom
from tileloom import emulator, knobs, masks
from tileloom.errors import ConfigError, UnsupportedError
from tileloom.launch import compat
from tileloom.ops import Choice, _op, record_choices
from tileloom.ops.attention import config as configs
from tileloom.ops.attention.config import (
    GluonSm90Config,
    ReferenceConfig,
    TritonConfig,
    choose,
    decode,
    triton_rule,
)
from tileloom.ops.attention.problem import AttentionProblem
from tileloom.target import CPU, H100, SMEM_BYTES, Target

A100 = Target("cuda", (8, 0), 108, SMEM_BYTES[8, 0], "NVIDIA A100-SXM4-80GB")
B200 = Target("cuda", (10, 0), 148, SMEM_BYTES[10, 0], "NVIDIA B200")
# With more shared memory than it has, so that no config's own size shows up in the reasons.
V100 = Target("cuda", (7, 0), 80, SMEM_BYTES[9, 0], "Tesla V100-SXM2-16GB")
_SIZES = (1, 2, 2, 64, 64, 64, 64)


def problem(*, sizes=_SIZES, dtype=BF16, **fields) -> AttentionProblem:
    return cases.problem_of(AttentionCase("dispatch", sizes, dtype, **fields).inputs())


_BIAS = {"bias": cases.added((64, 64))}
_MASK = {"mask": cases.visible((64, 64))}
_WINDOW = {"mask": cases.shown_by(masks.window(3, 4))}
_CAUSAL = {"options": {"is_causal": True}}


@pytest.mark.parametrize(
    ("target", "fields", "backend"),
    [
        (CPU, {}, "reference"),
        (H100, {}, "gluon_sm90"),
        (H100, {"dtype": FP16, **_CAUSAL}, "gluon_sm90"),
        (H100, _WINDOW, "gluon_sm90"),
        (H100, {"sizes": (1, 4, 2, 65, 1, 72, 72)}, "gluon_sm90"),
        (H100, {"dtype": FP32}, "triton"),
        (H100, _BIAS, "gluon_sm90"),
        (H100, {"bias": cases.added((64, 64), dtype=torch.float64)}, "triton"),
        (H100, _MASK, "gluon_sm90"),
        (H100, {"sizes": (1, 2, 2, 64, 64, 512, 512)}, "triton"),
        (H100, {"sizes": (1, 2, 2, 64, 64, 20, 20)}, "triton"),
        (H100, {"sizes": (1, 2, 2, 64, 64, 64, 32)}, "gluon_sm90"),
        (H100, {"sizes": (1, 2, 2, 64, 64, 192, 128), **_CAUSAL}, "gluon_sm90"),
        (H100, {"sizes": (1, 2, 2, 64, 64, 64, 20)}, "triton"),
        (H100, {"layouts": ("last_strided",) * 3}, "triton"),
        (H100, {"layouts": ("contiguous", "unaligned", "contiguous")}, "triton"),
        (H100, {"options": {"scale": -1.0}}, "triton"),
        (H100, {"dtype": torch.float64}, "reference"),
        (H100, {"sizes": (1, 2, 2, 64, 64, 520, 8)}, "reference"),
        (A100, {}, "triton"),
        (B200, {}, "triton"),
        (V100, {}, "reference"),
    ],
)
def test_the_first_backend_that_can_runs(target, fields, backend):
    choice = choose(problem(**fields), target)
    assert (choice.backend, choice.source) == (backend, "rule")
    asked = {"cpu": ("reference",)}.get(target.kind, configs.BACKENDS)
    refused = asked[: asked.index(backend)]
    assert tuple(choice.refused) == refused
    assert all(choice.refused[name] for name in refused)


@pytest.mark.parametrize(
    ("config", "fields", "target", "reasons"),
    [
        (TritonConfig(), {}, V100,
         ("it needs compute capability 8.0 or later, and Tesla V100-SXM2-16GB has 7.0",)),
        (TritonConfig(), {"dtype": torch.float64}, H100,
         ("dtype torch.float64 is not float16, bfloat16 or float32",)),
        (TritonConfig(), {"sizes": (1, 2, 2, 64, 64, 520, 8)}, H100,
         ("head dims 520 and 8 exceed 512",)),
        (TritonConfig(96, 8, 3, 0, 24), {}, H100,
         ("block_m is 96, not a power of two in 16..256",
          "block_n is 8, not a power of two in 16..256",
          "num_warps is 3, not a power of two in 1..32",
          "chunk_d is 24, not 0 or a power of two in 16..512",
          "num_stages is 0, not at least 1")),
        (TritonConfig(64, 32, 4, 1), {"dtype": FP32}, B200,
         ("block_m is 64, and for sm_100 Triton compiles float32 products of 64 rows or more to "
          "TF32 (seen in the PTX of 3.7.1)",)),
        (TritonConfig(64, 32, 4, 2), {}, B200,
         ("num_stages is above 1, and Triton's cp.async pipeline into tcgen05.mma lacks a proxy "
          "fence (seen in the PTX of 3.6.0 and 3.7.1)",)),
        (TritonConfig(64, 32, 4, 3), {}, A100, ()),
        (TritonConfig(64, 32, 4, 3), {"dtype": FP32}, H100, ()),
        (GluonSm90Config(), {}, A100,
         ("it needs compute capability 9.0, and NVIDIA A100-SXM4-80GB has 8.0",)),
        (GluonSm90Config(), {"sizes": (1, 2, 2, 64, 64, 64, 128)}, H100,
         ("store is 'tma', which takes v as wide as q, and their head dims are 128 and 64",)),
        (GluonSm90Config(2, 32, 1, "registers"), {"sizes": (1, 2, 2, 64, 64, 264, 512)}, H100,
         ("head dim 264 is not a multiple of 8 in 8..256",
          "head dim 512 is not a multiple of 8 in 8..256")),
        (GluonSm90Config(), {"dtype": FP32}, H100,
         ("dtype torch.float32 is not float16 or bfloat16",)),
        (GluonSm90Config(), _MASK, H100, ()),
        (GluonSm90Config(stages=1), _BIAS, H100, ("stages is 1, and a bias or mask needs 2",)),
        (GluonSm90Config(ride_stages=-1), {"bias": cases.added((64, 64), dtype=torch.float64)},
         H100, ("ride_stages is -1, not at least 0", "bias has dtype torch.float64")),
        (GluonSm90Config(), {"options": {"scale": 0.0}}, H100, ("scale 0.0 is not positive",)),
        (GluonSm90Config(), {"layouts": ("contiguous", "unaligned", "contiguous")}, H100,
         ("k does not start at a multiple of 16 bytes",)),
        (ReferenceConfig(), {}, V100, ()),
    ],
)  # fmt: skip
def test_a_config_says_why_it_cannot(config, fields, target, reasons):
    assert config.reasons_against(problem(**fields), target) == reasons


@pytest.mark.parametrize(
    ("version", "is_refused"), [((3, 6, 0), True), ((3, 7, 0), True), ((3, 7, 1), False)]
)
def test_a_pipeline_into_wgmma_is_refused_before_triton_3_7_1(monkeypatch, version, is_refused):
    monkeypatch.setattr(compat, "triton_version", lambda: version)
    reasons = TritonConfig(64, 64, 4, 2).reasons_against(problem(), H100)
    expected = (
        f"num_stages is above 1, and Triton {'.'.join(map(str, version))} puts no proxy fence "
        "between cp.async and wgmma; 3.7.1 and later do",
    )
    assert reasons == (expected if is_refused else ())


def test_sizes_beyond_32_bits_are_refused():
    huge = replace(problem(), len_q=2**30, len_k=2**30)
    assert TritonConfig().reasons_against(huge, H100) == (
        "Lq + Lk is 2147483648, more than 2147483519",
    )
    many = replace(problem(), batch=2**20, heads_q=2**12, heads_kv=2**12)
    assert TritonConfig().reasons_against(many, H100) == (
        "B * Hq * ceil(Lq / block_m) is 4294967296, more than 2^31 - 1",
    )


@pytest.mark.parametrize("target", [A100, H100, B200], ids=lambda target: target.arch)
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
@pytest.mark.parametrize("fields", [{}, _BIAS, _MASK], ids=["plain", "bias", "mask"])
def test_the_rule_gives_a_portable_config_that_runs_for_every_head_dim(target, dtype, fields):
    for head_dim in (1, 8, 32, 33, 64, 72, 128, 200, 256, 257, 512):
        given = replace(problem(dtype=dtype, **fields), head_dim=head_dim, head_dim_v=head_dim)
        assert triton_rule(given, target).reasons_against(given, target) == ()


@pytest.mark.parametrize(
    "config",
    [
        ReferenceConfig(),
        TritonConfig(128, 32, 8, 3, 64),
        GluonSm90Config(3, 64, 3, "registers", 160, True, 2),
        GluonSm90Config(turns=False, held=64, lazy=True),
    ],
)
def test_a_config_survives_the_schema(config):
    assert decode(config.encode()) == config


def test_a_config_of_an_older_record_is_read():
    assert decode("gluon_sm90:3,128,4,tma,160,0") == GluonSm90Config(3, 128, 4, "tma", 160)
    assert decode("gluon_sm90:2,64,2,tma,240,1,2") == GluonSm90Config(2, 64, 2, "tma", 240, True, 2)


def test_an_explicit_config_is_taken_or_refused_with_its_reasons():
    choice = choose(problem(), H100, TritonConfig(64, 64, 4, 1))
    assert (choice.backend, choice.source) == ("triton", "explicit")
    with pytest.raises(ConfigError) as caught:
        choose(problem(options={"scale": -1.0}), H100, GluonSm90Config())
    assert str(caught.value) == (
        f"attention: config={GluonSm90Config()} cannot run this problem: scale -1.0 is not "
        "positive. Try: config=None, which chooses a backend that can."
    )


def test_a_problem_that_nobody_takes_lists_every_backends_reasons(monkeypatch):
    def refuse(self, problem, target):
        return ("it is switched off",)

    monkeypatch.setattr(ReferenceConfig, "reasons_against", refuse)
    with pytest.raises(UnsupportedError) as caught:
        choose(problem(dtype=torch.float64), V100)
    assert str(caught.value) == (
        "attention: no backend takes this problem.\n"
        "- gluon_sm90: it needs compute capability 9.0, and Tesla V100-SXM2-16GB has 7.0; dtype "
        "torch.float64 is not float16 or bfloat16\n"
        "- triton: it needs compute capability 8.0 or later, and Tesla V100-SXM2-16GB has 7.0; "
        "dtype torch.float64 is not float16, bfloat16 or float32\n"
        "- reference: it is switched off"
    )


def test_choices_are_recorded_and_logged(caplog):
    q = torch.randn(1, 2, 3, 8)
    with caplog.at_level(logging.INFO, "tileloom.dispatch"), record_choices() as outer:
        tileloom.attention(q, q, q)
        with record_choices() as inner:
            tileloom.attention(q, q, q, is_causal=True)
    assert [choice.backend for choice in outer] == ["reference", "reference"]
    assert inner == outer[1:]
    assert inner[0].problem.band.right_top == 0
    assert caplog.messages == ["attention: reference by rule: ReferenceConfig()"] * 2


def _slow_choice() -> Choice:
    return Choice(
        "attention",
        "triton",
        TritonConfig(),
        "rule",
        {"gluon_sm90": ("scale -1.0 is not positive",)},
    )


def test_a_slow_choice_warns_once_with_the_reason():
    _op._warn_once.cache_clear()
    text = (
        "attention: the triton backend runs where gluon_sm90 would be more than 20 % faster, "
        "because: scale -1.0 is not positive."
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            _op.announce(_slow_choice(), slower_than="gluon_sm90")
    assert [(w.category, str(w.message)) for w in caught] == [(_op.PerformanceWarning, text)]


_WIDE = (1, 1, 1, 3, 3, 520, 8)


@pytest.mark.parametrize(
    ("target", "fields", "slower_than"),
    [
        (H100, {"sizes": _WIDE}, "gluon_sm90"),
        (H100, {"sizes": _WIDE, "dtype": FP32}, "triton"),
        (A100, {"sizes": _WIDE}, "triton"),
        (V100, {}, "triton"),
        (A100, {}, None),
        (H100, {"dtype": FP32}, None),
        (H100, {"dtype": torch.float64}, None),
        (CPU, {"sizes": _WIDE}, None),
    ],
)
def test_a_reference_in_a_kernels_place_is_told(target, fields, slower_than):
    given = problem(**fields)
    assert configs.outpaced_by(choose(given, target), given, target) == slower_than


def test_head_dims_above_512_run_by_the_reference_with_a_warning():
    _op._warn_once.cache_clear()
    q = torch.ones(1, 1, 3, 520)
    text = "attention: the reference backend runs where triton.* 520 and 520 exceed 512"
    with emulator.run(arch="sm_80"), pytest.warns(_op.PerformanceWarning, match=text):
        assert torch.equal(tileloom.attention(q, q, q), q)


def test_the_warning_can_be_switched_off():
    _op._warn_once.cache_clear()
    with knobs.scope({"dispatch.warn": False}), warnings.catch_warnings():
        warnings.simplefilter("error")
        _op.announce(_slow_choice(), slower_than="gluon_sm90")


def test_no_kernel_spec_is_named_twice():
    from tileloom.ops.attention.kernels import shipped

    names = [spec.name for spec in shipped()]
    assert len(set(names)) == len(names) > 0
    assert Path(configs.__file__).with_name("kernel_triton.py").exists()
