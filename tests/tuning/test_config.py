"""Configs: values that compare by what they compile, and become JSON."""

from __future__ import annotations

import json
import pickle
import re

import numpy as np
import pytest
import torch
import triton

from tileloom.errors import OptionError
from tileloom.tuning import Config
from tileloom.tuning.config import distinct


def test_configs_are_equal_if_they_compile_the_same():
    config = Config({"XBLOCK": 8, "R0_BLOCK": 64}, num_warps=2, num_stages=1)
    assert config == Config({"R0_BLOCK": 64, "XBLOCK": 8}, num_warps=2, num_stages=1)
    assert hash(config) == hash(Config({"R0_BLOCK": 64, "XBLOCK": 8}, 2, 1, is_scalable=False))
    others = [
        config.with_kwargs(XBLOCK=16),
        config.without_kwargs("R0_BLOCK"),
        Config(config.kwargs, num_warps=4, num_stages=1),
        Config(config.kwargs, num_warps=2, num_stages=2),
        Config(config.kwargs, num_warps=2, num_stages=1, num_ctas=2),
        Config(config.kwargs, num_warps=2, num_stages=1, maxnreg=64),
    ]
    assert len({config, *others}) == 7
    assert distinct([config, others[0], config]) == [config, others[0]]


def test_a_config_does_not_change_with_the_dictionary_it_was_made_of():
    kwargs = {"XBLOCK": 8}
    config = Config(kwargs)
    kwargs["XBLOCK"] = 16
    assert config.kwargs == {"XBLOCK": 8}
    assert config.with_kwargs(YBLOCK=2).kwargs == {"XBLOCK": 8, "YBLOCK": 2}
    assert config.kwargs == {"XBLOCK": 8}


@pytest.mark.parametrize(
    "config",
    [
        Config({}, num_warps=1, num_stages=0),
        Config({"XBLOCK": 8, "EVEN": True}, num_warps=8, num_stages=2),
        Config({"XBLOCK": 8}, num_ctas=2, maxnreg=128),
    ],
    ids=str,
)
def test_a_config_survives_json_and_pickle(config):
    flat = json.loads(json.dumps(config.to_dict()))
    assert Config.from_dict(flat) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert ("maxnreg" in flat) == (config.maxnreg is not None)


def test_the_limit_of_a_block_is_tritons():
    from triton.language import TRITON_MAX_TENSOR_NUMEL as most

    for name in ("XBLOCK", "R0_BLOCK", "YBLOCK_1", "BLOCK", "BLOCK_M", "BLOCK_SIZE_K", "RBLOCK"):
        assert Config({name: most}).kwargs == {name: most}
        with pytest.raises(OptionError, match=f"sets {name} to {most + 1}, but a tensor"):
            Config({name: most + 1})
        with pytest.raises(OptionError, match=f"sets {name} to {2 * most}, but a tensor"):
            Config.from_dict({name: 2 * most, "num_warps": 4})
        with pytest.raises(OptionError, match=f"sets {name} to {2 * most}, but a tensor"):
            Config({}).with_kwargs(**{name: 2 * most})
    # What is no tile may be any number.
    other = {"BLOCKS": 2**30, "NUM_BLOCKS": 2**30, "BLOCK_STRIDE": 2**40, "XBLOCK_SUB": 2**30}
    assert Config(other).kwargs == other


def test_a_config_is_made_of_tritons_own():
    given = triton.Config({"BLOCK": 64}, num_warps=8, num_stages=2, maxnreg=96)
    assert Config.of(given) == Config({"BLOCK": 64}, 8, 2, maxnreg=96)
    assert Config.of(triton.Config({})) == Config({}), "the same defaults"
    assert Config.of({"BLOCK": 64, "num_warps": 8}) == Config({"BLOCK": 64}, num_warps=8)
    same = Config({"BLOCK": 64})
    assert Config.of(same) is same
    assert same.all_kwargs() == triton.Config({"BLOCK": 64}).all_kwargs()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: Config(3),
            "Config: kwargs is 3; it must be a dictionary from names of compile-time arguments to "
            "their values. Try: Config({'XBLOCK': 128}).",
        ),
        (
            lambda: Config({8: 128}),
            "Config: a compile-time argument is named 8; a name is a text. Try: "
            "Config({'XBLOCK': 128}).",
        ),
        (
            lambda: Config({"XBLOCK": torch.ones(2)}),
            "Config: XBLOCK is a tensor of torch.float32 and shape (2,); a compile-time "
            "argument is a Python number, a text, None, or another value that can be hashed. Try: "
            "Config({'XBLOCK': 128}).",
        ),
        (
            lambda: Config({"XBLOCK": np.int64(128)}),
            "Config: XBLOCK is np.int64(128); a compile-time argument is a Python number, a text, "
            "None, or another value that can be hashed. Try: Config({'XBLOCK': 128}).",
        ),
        (
            lambda: Config({"XBLOCK": 2**21, "EVEN": True}, num_warps=8),
            "Config: the config XBLOCK: 2097152, EVEN: True, num_warps: 8, num_stages: 3 sets "
            "XBLOCK to 2097152, but a tensor in a Triton kernel has at most 1048576 elements "
            "(TRITON_MAX_TENSOR_NUMEL). Try: XBLOCK=1024, and a loop in the kernel.",
        ),
        (
            lambda: Config.of(triton.Config({}, pre_hook=print)),
            "Config: pre_hook is given, but a config holds only constants and num_warps, "
            "num_stages, num_ctas, maxnreg. Try: leave pre_hook out.",
        ),
        (
            lambda: Config.of({"num_consumer_groups": 2}),
            "Config: num_consumer_groups is given, but a config holds only constants and "
            "num_warps, num_stages, num_ctas, maxnreg. Try: leave num_consumer_groups out.",
        ),
        (
            lambda: Config.of(64),
            "Config: a config is a int; it must be a tileloom.tuning.Config, a dict or a "
            "triton.Config. Try: Config({'XBLOCK': 128}, num_warps=4).",
        ),
        (
            lambda: Config({}, num_warps=3),
            "Config: num_warps is 3; a program has 1, 2, 4, 8, 16 or 32 warps. Try: num_warps=4.",
        ),
        (
            lambda: Config({}, num_stages=-1),
            "Config: num_stages is -1; it must be an integer of at least 0. Try: "
            "Config({...}, num_stages=1).",
        ),
    ],
)
def test_wrong_configs_are_refused(make, text):
    with pytest.raises(OptionError, match=f"^{re.escape(text)}$"):
        make()
