"""What a config's formula says of shared memory, its kernels take."""

import re

import pytest
from tests.launch import shipped

from tileloom.ops.attention.config_backward import decode_backward

BACKWARD = sorted(name for name in shipped.SPECS if name.startswith("attention_bwd_gluon"))


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", BACKWARD)
def test_attention_backward(shipped_results, name):
    """The formula is an upper bound, over by no more than it allows for barriers and alignment."""
    head_dim, rows, stages = map(int, re.findall(r"\[d(\d+).*-(\d+)x(\d+)\]", name)[0])
    config = decode_backward(f"gluon_sm90:{rows},{stages}")
    taken = shipped_results(shipped.OWN)[name, "sm_90"].shared_bytes
    assert config.smem_bytes(head_dim) - 1024 <= taken <= config.smem_bytes(head_dim)
