"""L2 policies: the words that ptxas builds, the names that are taken, and the refusals."""

from __future__ import annotations

import doctest
import enum
import re
import subprocess
from pathlib import Path

import pytest

from tileloom.cpasync import EVICT_FIRST, EVICT_LAST, EVICT_NORMAL, cache_policy, eviction
from tileloom.cpasync.eviction import policy_word
from tileloom.errors import OptionError

PTX = """
.version 8.7
.target {arch}
.address_size 64
.visible .entry k(.param .u64 out) {{
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [out];
    createpolicy.fractional.L2::evict_{primary}{secondary}.b64 %rd2, {fraction};
    st.global.u64 [%rd1], %rd2;
    ret;
}}
"""
UMOV = re.compile(r"UMOV (UR\d+), (0x[0-9a-f]+|URZ)")
SHIFT = re.compile(r"USHF\.R\.U32(?:\.HI)? (UR\d+), (UR\w+), 0x4, ")
EITHER = re.compile(r"ULOP3\.LUT (UR\d+), (UR\d+), 0xf, (UR\d+), 0xf8")
LEFT = re.compile(r"USHF\.L\.U32 (UR\d+), (UR\d+), 0x14, ")


def assembled(arch, primary, fraction, secondary, folder):
    """The word that ptxas composes for `createpolicy`, read from its constants in the SASS."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    second = "" if secondary == "unchanged" else f".L2::evict_{secondary}"
    text = PTX.format(arch=arch, primary=primary, secondary=second, fraction=fraction)
    (folder / "k.ptx").write_text(text)
    ptxas = tools / ("ptxas" if arch == "sm_90a" else "ptxas-blackwell")
    subprocess.run([ptxas, "-arch", arch, "k.ptx", "-o", "k.cubin"], cwd=folder, check=True)
    dump = [tools / "cuobjdump", "-sass", "k.cubin"]
    sass = subprocess.run(dump, cwd=folder, check=True, capture_output=True, text=True).stdout
    values = {"URZ": 0}
    for line in sass.splitlines():
        if match := UMOV.search(line):
            values[match[1]] = 0 if match[2] == "URZ" else int(match[2], 16)
        elif match := SHIFT.search(line):
            values[match[1]] = values[match[2]] >> 4
        elif match := EITHER.search(line):  # 0xf8: a | (b & c)
            values[match[1]] = values[match[2]] | values[match[3]] & 0xF
        elif match := LEFT.search(line):
            return (values[match[2]] << 20) << 32
    raise AssertionError(f"the SASS composes the word in another way:\n{sass}")


@pytest.mark.parametrize(
    ("arch", "primary", "fraction", "secondary"),
    [
        ("sm_90a", "unchanged", 1.0, "unchanged"),
        ("sm_90a", "first", 1.0, "unchanged"),
        ("sm_90a", "last", 1.0, "unchanged"),
        ("sm_90a", "normal", 1.0, "unchanged"),
        ("sm_90a", "last", 0.5, "first"),
        ("sm_90a", "normal", 0.0625, "first"),
        ("sm_100a", "first", 1.0, "unchanged"),
        ("sm_100a", "normal", 0.5, "first"),
    ],
)
def test_words_are_those_of_createpolicy(arch, primary, fraction, secondary, tmp_path):
    word = assembled(arch, primary, fraction, secondary, tmp_path)
    assert cache_policy(primary, fraction, secondary) == word


def test_the_words_of_cutlass():
    assert cache_policy("first") == EVICT_FIRST == 0x12F0000000000000
    assert cache_policy("last") == EVICT_LAST == 0x14F0000000000000
    assert cache_policy("unchanged", 1 / 16) == EVICT_NORMAL == 0x1000000000000000


class EvictKind(enum.Enum):
    FIRST = 1
    NOALLOCATE = 4


@pytest.mark.parametrize(
    ("given", "word"),
    [
        (None, None),
        ("normal", EVICT_NORMAL),
        ("evict_first", EVICT_FIRST),
        ("EVICT_LAST", EVICT_LAST),
        (EvictKind.FIRST, EVICT_FIRST),
        (EVICT_LAST, EVICT_LAST),
        (cache_policy("last", 0.25, "first"), 0x1530000000000000),
    ],
)
def test_accepted(given, word):
    assert policy_word("tma_load", given) == word


def test_run_time_word_is_passed_on():
    given = object()
    assert policy_word("tma_load", given) is given


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            "no_allocate",
            "tma_load: eviction_kind is 'no_allocate', a policy that bulk copies do not have; "
            "accepted are 'normal', 'first', 'last', a word of cache_policy() and None. "
            "Try: eviction_kind=None.",
        ),
        (
            EvictKind.NOALLOCATE,
            "tma_load: eviction_kind is 'NOALLOCATE', a policy that bulk copies do not have; "
            "accepted are 'normal', 'first', 'last', a word of cache_policy() and None. "
            "Try: eviction_kind=None.",
        ),
        (
            1,
            "tma_load: eviction_kind is 1, no word of an L2 policy. Try: eviction_kind='first', "
            "or a word of cache_policy().",
        ),
    ],
)
def test_refused(given, text):
    with pytest.raises(OptionError) as caught:
        policy_word("tma_load", given)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ("soon",),
            "cache_policy: primary is 'soon'; accepted are 'first', 'last', 'normal', "
            "'unchanged'. Try: primary='first'.",
        ),
        (
            ("first", 1.0, "last"),
            "cache_policy: secondary is 'last'; accepted are 'first', 'unchanged'. "
            "Try: secondary='first'.",
        ),
        (
            ("first", 0.3),
            "cache_policy: fraction is 0.3; accepted are the multiples of 1/16 from 1/16 to 1. "
            "Try: fraction=0.3125.",
        ),
        (
            ("first", 0),
            "cache_policy: fraction is 0; accepted are the multiples of 1/16 from 1/16 to 1. "
            "Try: fraction=0.0625.",
        ),
    ],
)
def test_refused_policies(arguments, text):
    with pytest.raises(OptionError) as caught:
        cache_policy(*arguments)
    assert str(caught.value) == text


def test_example_of_the_docstring():
    result = doctest.testmod(eviction)
    assert result.attempted == 1
    assert result.failed == 0
