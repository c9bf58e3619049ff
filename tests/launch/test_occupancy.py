"""Blocks per SM, against values worked out by hand from the architecture's limits."""

import pytest

from tileloom.errors import OptionError
from tileloom.launch.occupancy import LIMITS, blocks_per_sm, limits_of, normal_arch
from tileloom.target import SMEM_BYTES


@pytest.mark.parametrize(
    ("arch", "registers", "threads", "shared_bytes", "blocks"),
    [
        ("sm_90", 32, 1024, 0, 2),  # 2048 threads
        ("sm_90", 16, 32, 0, 32),  # 32 blocks
        ("sm_90", 64, 128, 0, 8),  # 65536 / (64 * 32) = 32 warps
        ("sm_90", 65, 128, 0, 7),  # 65 counts as 72: 28 warps
        ("sm_90", 255, 128, 0, 2),  # 255 counts as 256: 8 warps
        ("sm_90", 168, 384, 0, 1),  # 12 warps of 5376 registers: the H100 kernels' entry
        ("sm_90", 176, 384, 0, 0),  # 11 warps fit, in fours 8
        ("sm_90", 24, 128, 227 * 1024, 1),
        ("sm_90", 24, 128, 227 * 1024 + 1, 0),
        ("sm_90", 24, 128, 113 * 1024, 2),  # (113 + 1) * 2 = 228
        ("sm_90", 24, 128, 113 * 1024 + 1, 1),
        ("sm_80", 24, 128, 81 * 1024, 2),  # (81 + 1) * 2 = 164
        ("sm_80", 24, 128, 163 * 1024, 1),
        ("sm_80", 24, 128, 164 * 1024, 0),
        ("sm_100", 24, 2048, 0, 0),  # a block has at most 1024 threads
    ],
)
def test_blocks_per_sm(arch, registers, threads, shared_bytes, blocks):
    limits = LIMITS[arch]
    assert blocks == blocks_per_sm(
        limits, registers=registers, threads=threads, shared_bytes=shared_bytes
    )


def test_a_block_may_have_what_dispatch_says():
    allowed = {divmod(x.capability, 10): x.shared_bytes_block for x in LIMITS.values()}
    assert allowed == SMEM_BYTES


@pytest.mark.parametrize("name", ["sm_90", "sm_90a", "90", "90a", "SM90", " sm90a "])
def test_names_of_an_architecture(name):
    assert normal_arch(name) == "sm_90"
    assert limits_of(name).capability == 90


@pytest.mark.parametrize("name", ["", "hopper", "sm_70", "sm_90b", "gfx942"])
def test_unknown_architectures_are_refused(name):
    with pytest.raises(OptionError, match=r"arch is .*tileloom compiles for .*Try: sm_90"):
        normal_arch(name)
