"""Dropout's random numbers: Philox against known answers, the host's model, the device's code."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy
import pytest
import torch
from tests.ops.attention import philox_kernels

from tileloom import emulator
from tileloom.ops.attention.philox import threshold_of
from tileloom.ops.attention.reference import philox_4x32
from tileloom.testing import dropout_mask, dropout_uniforms

sys.path.append(str(Path(__file__).parents[3] / "scripts"))

# Of Random123's kat_vectors: counter, key, result.
KNOWN = (
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
)  # fmt: skip


def _words(text):
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize("known", KNOWN)
@pytest.mark.parametrize("kind", [int, lambda n: torch.tensor([n])], ids=["int", "tensor"])
def test_known_answers(known, kind):
    counter, key, result = (_words(text) for text in known)
    found = philox_4x32(tuple(map(kind, counter)), tuple(map(kind, key)))
    assert tuple(int(word) for word in found) == result


def _plain(seed: int, index: int) -> numpy.float32:
    """One uniform, by Python's own integers."""
    index %= 2**64
    counter = (index // 4 % 2**32, index // 4 >> 32, 0, 0)
    word = philox_4x32(counter, (seed % 2**32, seed % 2**64 >> 32))[index % 4]
    return numpy.float32(word) * numpy.float32(2.0**-32) + numpy.float32(2.0**-33)


SEEDS = (0, 1234, -1, 2**63 - 1, 2**63 + 12345)
OFFSETS = (0, 4, 7, 2**34 - 3, 2**40 + 1)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("offset", OFFSETS)
def test_the_layout_of_uniforms(seed, offset):
    size = (2, 3, 5, 7)
    found = dropout_uniforms(seed, offset, size)
    for b, h, i, j in ((0, 0, 0, 0), (0, 1, 2, 3), (1, 0, 4, 6), (1, 2, 4, 6)):
        index = offset + ((b * 3 + h) * 5 + i) * 7 + j
        assert found[b, h, i, j].item() == _plain(seed, index)


def test_seed_and_offset_may_be_tensors():
    size = (1, 2, 9, 5)
    state = (torch.tensor(-7), torch.tensor(11))
    assert torch.equal(dropout_uniforms(*state, size), dropout_uniforms(-7, 11, size))


def test_the_mask_keeps_the_share_it_should():
    kept = dropout_mask(0.3, seed=5, offset=0, size=(1, 4, 257, 256))
    share = kept.double().mean().item()
    assert abs(share - 0.7) < 3 * (0.21 / kept.numel()) ** 0.5


@pytest.mark.parametrize("p", [0.1, 0.22, 0.5, 1e-9, 2.0**-33, 2.0**-32, 0.999, 1 - 2.0**-24])
def test_the_threshold_says_what_the_uniform_says(p):
    least = threshold_of(p)
    assert 0 <= least < 2**32
    for word in (least - 1, least, 0, 2**32 - 1):
        uniform = numpy.float32(max(word, 0)) * numpy.float32(2.0**-32) + numpy.float32(2.0**-33)
        assert (uniform > numpy.float32(p)) == (word >= least) or word < 0


@pytest.mark.parametrize("doubles", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("high", "first"), [(0, 0), (0x3FFFFFFF, 2**32 - 256), (77, 2**31 - 100)])
def test_hoppers_words_are_the_hosts(seed, high, first, doubles):
    """Upper halves of products by the FP64 unit, and rounds that are one for all."""
    quick, plain = (torch.zeros(4, 256, dtype=torch.int32) for _ in range(2))
    with emulator.run(arch="sm_90a") as run:
        seed = (seed + 2**63) % 2**64 - 2**63
        philox_kernels.both_words[(1,)](quick, plain, first, high, seed, N=256, DOUBLES=doubles)
    assert [r.text() for r in run.reports if r.severity != "info"] == []
    counter = (torch.arange(first, first + 256), *(torch.tensor([n]) for n in (high, 0, 0)))
    key = tuple(torch.tensor([word]) for word in (seed % 2**32, seed % 2**64 >> 32))
    right = torch.stack([word.expand(256) for word in philox_4x32(counter, key)])
    assert torch.equal(quick.long() % 2**32, right)
    assert torch.equal(plain, quick)


@pytest.mark.parametrize(
    ("first", "count", "high", "turns"),
    [
        (0, 2**34 - 1, 0, False),
        (2**34 - 4, 3, 0, False),
        (2**34 - 4, 4, 0, True),
        (-4, 4, 0x3FFFFFFF, True),
        (2**63 - 8, 7, 2**29 - 1, False),
    ],
)
def test_where_the_high_word_turns(first, count, high, turns):
    found = torch.zeros(2, dtype=torch.int64)
    with emulator.run():
        philox_kernels.high_words[(1,)](found[:1], found[1:], first, count)
    assert found.tolist() == [high, int(turns)]


def test_what_the_script_takes_the_time_of_are_the_decisions():
    """Words of `pieces_dropout_sm90`, of 64 rows and 256 keys, the last block tripled first."""
    from pieces_decisions import decisions

    seed, out = 2**40 + 77, torch.zeros(2, 64, 4, dtype=torch.int32)
    with emulator.run(arch="sm_90a"):
        decisions[(2,)](out, seed, threshold_of(0.1), 256, 2, num_warps=4)
    kept = dropout_mask(0.1, seed=seed, offset=0, size=(2, 1, 64, 256))
    kept = kept.view(2, 64, 2, 16, 4, 2).long()  # block, a, q, e
    a, e = torch.arange(16).view(16, 1, 1), torch.arange(2)
    words = (kept << (16 * (a % 2) + 2 * (a // 2) + e)).sum((3, 5))
    right = (words[:, :, 1] * 3 % 2**32) ^ words[:, :, 0]
    assert torch.equal(out.long() % 2**32, right)


def _on_device(seed, offset, size, row, column, *, keys_first, by_pointer):
    """The block `[16, 32]` at row, column of every head."""
    batch, heads, len_q, len_k = size
    out = torch.zeros(batch * heads, 16, 32, dtype=torch.int8)
    at = [torch.tensor(seed), torch.tensor(offset)] if by_pointer else [None, None]
    numbers = (0, 0) if by_pointer else (seed, offset)
    with emulator.run() as run:
        philox_kernels.portable[(batch * heads,)](
            out, *at, *numbers, threshold_of(0.4), heads, len_q, len_k, row, column,
            M=16, N=32, KEYS_FIRST=keys_first,
        )  # fmt: skip
    assert [r.text() for r in run.reports if r.severity != "info"] == []
    return out.bool().view(batch, heads, 16, 32)


@pytest.mark.parametrize("keys_first", [False, True])
@pytest.mark.parametrize(
    ("seed", "offset", "len_k"), [(3, 8, 64), (-5, 8, 61), (2**62, 5, 64), (7, 2**34 - 17, 63)]
)
def test_the_portable_code_decides_as_the_host(seed, offset, len_k, keys_first):
    size = (2, 2, 20, len_k)
    found = _on_device(seed, offset, size, 3, 28, keys_first=keys_first, by_pointer=len_k == 61)
    right = dropout_mask(0.4, seed=seed, offset=offset, size=size)
    assert torch.equal(found, right[:, :, 3:19, 28:60])


def _quads(*, keys_first):
    """Layouts in which no two lanes make the same call; see `pieces_philox`."""
    from triton.experimental.gluon import language as gl

    if keys_first:
        registers, lanes = [[2, 0], [0, 1], [0, 32]], [[0, 2], [0, 4], [0, 8], [0, 16], [1, 0]]
        return gl.DistributedLinearLayout(registers, lanes, [[4, 0], [8, 0]], [], [16, 64])
    registers, lanes = [[8, 0], [0, 4], [0, 8]], [[0, 2], [0, 1], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, 16])


@pytest.mark.parametrize("keys_first", [False, True])
@pytest.mark.parametrize(("offset", "len_k"), [(4, 64), (9, 61)])
def test_gluon_code_decides_as_the_host_in_an_accumulator(offset, len_k, keys_first):
    from triton.experimental.gluon import language as gl

    kernels = philox_kernels
    kernel = kernels.in_transposed_accumulator if keys_first else kernels.in_accumulator
    accumulator = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, 64, 16])
    out = torch.zeros(64, 64, dtype=torch.int8)
    with emulator.run(arch="sm_90a") as run:
        kernel[(1,)](
            out, 77, offset, threshold_of(0.4), 64, len_k, LAYOUT=accumulator,
            QUADS=_quads(keys_first=keys_first), N=64,
            ALIGNED=offset % 4 == 0 and len_k % 4 == 0, num_warps=4,
        )  # fmt: skip
    assert [r.text() for r in run.reports if r.severity != "info"] == []
    right = dropout_mask(0.4, seed=77, offset=offset, size=(1, 1, 64, len_k))[0, 0]
    out = out.mT if keys_first else out
    assert torch.equal(out[:, : right.shape[1]].bool(), right)
