"""TileLang kernels compiled on our copies and on its own, where it and the CuTe DSL are at hand."""

from __future__ import annotations

import importlib
import re

import pytest

from tests.cpasync import tilelang_client
from tests.cpasync.conftest import find_cute
from tileloom import cpasync
from tileloom.cpasync import tilelang

SAVED = tilelang_client.saved()
each = pytest.mark.parametrize("name", SAVED)
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(600),
    # TileLang 0.1.15 imports what moved in the DSL 4.8, and unrolls loops that the DSL thinks long.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def client():
    if not find_cute():
        pytest.skip("the CuTe DSL is not installed; make test puts it into .cute-dsl")
    if not tilelang_client.find_tilelang():
        pytest.skip("TileLang is not installed; docs/cpasync_tilelang.md says how")
    return tilelang_client


def test_ours_are_all_that_tilelangs_module_of_copies_has(client):
    theirs = importlib.import_module("tilelang.contrib.cutedsl.cpasync")
    utils = importlib.import_module("tilelang.contrib.cutedsl.utils")
    constants = {"BYTES_PER_TENSORMAP", "BYTES_PER_POINTER"}
    assert set(theirs.__all__) | constants == tilelang.OURS
    assert all(getattr(utils, name) == getattr(tilelang, name) for name in constants)


@each
def test_tilelang_still_generates_what_was_saved(name, client):
    assert client.generate(name) == SAVED[name]


@pytest.mark.parametrize(
    ("name", "copy"),
    [
        (
            "vector",
            r"cp\.async\.bulk\.tensor\.1d\.global\.shared::cta\S* \[%rd\d+, \{%r\d+\}\]",
        ),
        ("evict_first", r"cp\.async\.bulk\.tensor\.2d\.global\.shared::cta\S*\.L2::cache_hint "),
    ],
)
def test_kernels_that_only_ours_take(name, copy, client):
    """A tensor store with one coordinate, and one with an L2 policy."""
    made = SAVED[name]
    assert re.search(copy, made.kernel.compile(tilelang_client.GPU).ptx)
    with pytest.raises(Exception, match=re.escape(client.REFUSED_BY_THEIRS[name])):
        made.kernel.compile(tilelang_client.GPU, namespace=client.NAMESPACES["theirs"])


@pytest.mark.parametrize("name", sorted(SAVED.keys() - tilelang_client.REFUSED_BY_THEIRS))
def test_the_kernel_compiles_on_ours_as_on_its_own(name, client):
    """The same text of PTX but for the tails, where ours fill with zeros and theirs branch."""
    made = SAVED[name]
    ours = made.kernel.compile(tilelang_client.GPU)
    theirs = made.kernel.compile(tilelang_client.GPU, namespace=client.NAMESPACES["theirs"])
    kinds = made.kernel.parameters.values()
    assert ours.parameter_bytes == tuple(128 if k == "nvTmaDesc" else 8 for k in kinds)
    assert ours.threads == made.kernel.threads
    assert ours.code.startswith(b"\x7fELF")
    assert ours.ptx == client.saved_ptx()[name]["ours"]
    if name != "tails":
        assert ours.ptx == theirs.ptx
        return
    copies = r"cp\.async\.ca\.shared\.global \[[^\]]*\], \[[^\]]*\], 8(, %r\d+)?;"
    found = {whose.ptx: [m[1] for m in re.finditer(copies, whose.ptx)] for whose in (ours, theirs)}
    assert len(found[ours.ptx]) == len(found[theirs.ptx]) >= 16
    assert all(found[ours.ptx])
    assert not any(found[theirs.ptx])


def test_the_kernel_really_runs_on_ours(client, monkeypatch):
    class Called(Exception):
        pass

    def stand_in(*arguments, **named):
        raise Called

    monkeypatch.setitem(cpasync.__dict__, "tma_store", stand_in)
    kernel = SAVED["copy"].kernel
    kernel.compile(namespace=client.NAMESPACES["theirs"])
    with pytest.raises(Called):
        kernel.compile()
