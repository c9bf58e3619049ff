"""Which backend computes the gradients, with which config, and why; no kernel is launched."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.ops.attention import cases
from tests.ops.attention.cases import BF16, FP16, FP32, AttentionCase

from tileloom.errors import ConfigError
from tileloom.launch import compat
from tileloom.ops.attention.config import ReferenceConfig
from tileloom.ops.attention.config_backward import (
    Tile,
    TritonBackwardConfig,
    choose_backward,
    decode_backward,
    triton_backward_rule,
)
from tileloom.ops.attention.config_backward_sm90 import GluonSm90BackwardConfig, dropout_mode
from tileloom.ops.attention.problem import Packed
from tileloom.target import CPU, H100, SMEM_BYTES, Target

A100 = Target("cuda", (8, 0), 108, SMEM_BYTES[8, 0], "NVIDIA A100-SXM4-80GB")
B200 = Target("cuda", (10, 0), 148, SMEM_BYTES[10, 0], "NVIDIA B200")
V100 = Target("cuda", (7, 0), 80, SMEM_BYTES[9, 0], "Tesla V100-SXM2-16GB")
_SIZES = (1, 2, 2, 64, 64, 64, 64)
_BIAS = {"bias": cases.added((64, 64))}
_MASK = {"mask": cases.visible((64, 64))}


def problem(*, sizes=_SIZES, dtype=BF16, **fields):
    return cases.problem_of(AttentionCase("dispatch", sizes, dtype, **fields).inputs())


@pytest.mark.parametrize(
    ("target", "fields", "backend"),
    [
        (CPU, {}, "reference"),
        (H100, _BIAS, "gluon_sm90"),
        (H100, _MASK, "gluon_sm90"),
        (H100, {"dtype": FP32}, "triton"),
        (H100, {"sizes": (1, 2, 2, 64, 64, 512, 40)}, "triton"),
        (H100, {"dtype": torch.float64}, "reference"),
        (H100, {"sizes": (1, 2, 2, 64, 64, 520, 8)}, "reference"),
        (A100, {}, "triton"),
        (B200, _MASK, "triton"),
        (V100, {}, "reference"),
    ],
)
def test_the_first_backend_that_can_runs(target, fields, backend):
    choice = choose_backward(problem(**fields), target)
    assert (choice.op, choice.backend, choice.source) == ("attention_bwd", backend, "rule")
    assert all(choice.refused.values())


_DROPOUT = {"dropout_p": 0.1}


@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        ({}, 0),
        (_DROPOUT, 2),
        (_DROPOUT | {"len_k": 62}, 1),
        (_DROPOUT | {"packed": Packed(64, 64)}, 1),
        (_DROPOUT | {"has_bias": True}, 2),
        (_DROPOUT | {"head_dim_v": 128}, 2),
        (_DROPOUT | {"head_dim_v": 128, "has_mask": True}, 1),
        (_DROPOUT | {"head_dim": 136}, 1),
    ],
)
def test_a_warpgroup_of_its_own_decides_about_dropout_where_it_was_faster(changes, mode):
    assert dropout_mode(replace(problem(), **changes)) == mode


@pytest.mark.parametrize("target", [A100, H100, B200], ids=lambda target: target.arch)
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
@pytest.mark.parametrize("fields", [{}, _BIAS, _MASK], ids=["plain", "bias", "mask"])
def test_the_rule_gives_a_portable_config_that_runs_for_every_head_dim(target, dtype, fields):
    for head_dim in (1, 8, 32, 33, 64, 72, 128, 200, 256, 257, 512):
        given = replace(problem(dtype=dtype, **fields), head_dim=head_dim, head_dim_v=head_dim)
        assert triton_backward_rule(given, target).reasons_against(given, target) == ()


def test_a_config_says_why_it_cannot():
    config = TritonBackwardConfig(Tile(8, 48, 3, 0), Tile(512, 16, 4, 1, 24))
    assert config.reasons_against(problem(dtype=torch.float64), V100) == (
        "it needs compute capability 8.0 or later, and Tesla V100-SXM2-16GB has 7.0",
        "dtype torch.float64 is not float16, bfloat16 or float32",
        "dkv.block_m is 8, not a power of two in 16..256",
        "dkv.block_n is 48, not a power of two in 16..256",
        "dkv.num_warps is 3, not a power of two in 1..32",
        "dkv.num_stages is 0, not at least 1",
        "dq.block_m is 512, not a power of two in 16..256",
        "dq.chunk_d is 24, not 0 or a power of two in 16..512",
    )


def test_a_pipeline_is_refused_where_it_reads_too_far_or_has_no_fence(monkeypatch):
    staged = TritonBackwardConfig(Tile(64, 64, 4, 2), Tile())
    assert staged.reasons_against(problem(), A100) == ()
    (reason,) = staged.reasons_against(problem(**_MASK), A100)
    assert reason.startswith("num_stages is above 1 with a mask or bias")
    monkeypatch.setattr(compat, "triton_version", lambda: (3, 6, 0))
    (reason,) = staged.reasons_against(problem(), H100)
    assert "no proxy fence" in reason


def test_large_float32_tiles_are_refused_on_sm_100():
    given = problem(dtype=FP32)
    reasons = TritonBackwardConfig(Tile(16, 64), Tile(64, 16)).reasons_against(given, B200)
    assert [reason.partition(" is ")[0] for reason in reasons] == ["dkv.block_n", "dq.block_m"]


def test_more_programs_than_a_grid_holds_are_refused():
    many = replace(problem(), batch=2**20, heads_q=2**12, heads_kv=2**12)
    assert TritonBackwardConfig().reasons_against(many, A100) == (
        "B * Hkv * ceil(Lk / dkv.block_n) is 4294967296, more than 2^31 - 1",
        "B * Hq * ceil(Lq / dq.block_m) is 4294967296, more than 2^31 - 1",
    )


@pytest.mark.parametrize(
    "config", [ReferenceConfig(), TritonBackwardConfig(Tile(16, 32, 8, 2, 64), Tile(128, 64))]
)
def test_a_config_survives_the_schema(config):
    assert decode_backward(config.encode()) == config


def test_nothing_forces_nothing():
    assert decode_backward("") is None


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("gluon_sm90:128", GluonSm90BackwardConfig(128)),
        ("gluon_sm90:64,3", GluonSm90BackwardConfig(64, 3)),
        ("gluon_sm90:64,2,1", GluonSm90BackwardConfig(64, 2, True)),
        ("gluon_sm90:64,2,0,1", GluonSm90BackwardConfig(64, 2, wide=True)),
        ("gluon_sm90:64,3,0,0,1", GluonSm90BackwardConfig(64, 3, persistent=True)),
    ],
)
def test_a_missing_end_of_a_text_is_the_defaults(text, config):
    assert decode_backward(text) == config


def test_an_explicit_config_is_taken_or_refused():
    config = TritonBackwardConfig()
    choice = choose_backward(problem(), A100, config)
    assert (choice.config, choice.source) == (config, "explicit")
    with pytest.raises(ConfigError, match=r"backward_config=.* cannot run this problem: it needs"):
        choose_backward(problem(), V100, config)
