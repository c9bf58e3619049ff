"""What a config's formula says of shared memory, its kernels take."""

import math
import re

import pytest
from tests.launch import shipped
from tests.launch.versions import triton_folder

from tileloom.ops.attention.config_backward import decode_backward

BACKWARD = sorted(name for name in shipped.SPECS if name.startswith("attention_bwd_gluon"))
VERSION = "3.6.0"  # which the quick pass compiles them all on
BYTES = {"u8": 1, "fp16": 2, "bf16": 2, "fp32": 4}


def tile_bytes(kind):
    """Bytes of the tile of a descriptor's type, 0 for a pointer's or none."""
    match = re.match(r"tensordesc<(\w+)\[(.*)\],", kind)
    return BYTES[match[1]] * math.prod(map(int, match[2].split(","))) if match else 0


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", BACKWARD)
def test_attention_backward(shipped_results, name):
    """The formula is an upper bound, over by no more than it allows for barriers and alignment."""
    if triton_folder(VERSION) is None:
        pytest.skip(f"Triton {VERSION} is not in .triton-versions; `make test` installs it")
    found = re.findall(r"\[d(\d+)(?:x(\d+))?-.*-(\d+)x(\d+)\]", name)[0]
    head_dim, head_dim_v, rows, stages = (int(n or found[0]) for n in found)
    form = f"{int('ordered' in name)},0,{int('persistent' in name)}"
    config = decode_backward(f"gluon_sm90:{rows},{stages},{form}")
    spec = shipped.SPECS[name]
    halves = 1 if max(head_dim, head_dim_v) > 128 else 2  # of the 128 keys of a block
    # Two kernels have neither scores in shared memory nor dropout, and no parameters for them.
    tiles = [tile_bytes(spec.signature.get(tensor, "constexpr")) for tensor in ("bias", "mask")]
    is_192 = spec.function.endswith("_192_kernel")
    assert ("bias" in spec.signature) is not (is_192 or spec.function.endswith("_narrow_kernel"))
    scores = halves * sum(tiles)
    is_packed = spec.constexprs.get("cu_q", "") is not None
    least = config.smem_bytes(head_dim, head_dim_v, is_packed=is_packed, is_192=is_192)
    least += scores * spec.constexprs.get("SCORE_STAGES", 0)
    drops = spec.constexprs.get("DROPOUT", 0) > 0
    most = least + (config.dropout_bytes(head_dim, head_dim_v) if drops else 0)
    taken = shipped_results(VERSION)[name, "sm_90"].shared_bytes
    assert least - 1024 <= taken <= most
