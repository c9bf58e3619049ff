"""A bundle file is read whole or refused: every byte, every length, nonsense with right sums."""

import hashlib
import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.launch.bundle_fakes import BINARIES, VARIANTS

from tileloom.errors import BundleError
from tileloom.launch.bundle import load_bundle
from tileloom.launch.bundle_format import read_bundle, write_bundle

REBUILD = "Try: build it again with `tileloom bundle build`."


@pytest.fixture
def path(tmp_path):
    write_bundle(tmp_path / "k.bundle", VARIANTS, BINARIES, tileloom="0.1.0")
    return tmp_path / "k.bundle"


def test_what_is_written_is_read(path):
    file = read_bundle(path)
    assert [file.variant(i) for i in range(3)] == VARIANTS
    assert [file.binary(v) for v in VARIANTS] == [BINARIES[0], BINARIES[1], BINARIES[0]]
    assert file.tileloom == "0.1.0"
    assert (file.variant(0).family, file.variant(0).constants) == ("add", {"BLOCK": 64})


def test_the_same_input_gives_the_same_bytes(path, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    other = tmp_path / "elsewhere" / "other name"
    write_bundle(other, VARIANTS, BINARIES, tileloom="0.1.0")
    assert other.read_bytes() == path.read_bytes()
    assert oct(other.stat().st_mode & 0o777) == oct(0o666 & ~_umask())


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def damaged(path, data):
    path.write_bytes(data)
    with pytest.raises(BundleError) as caught:
        read_bundle(path)
    return str(caught.value)


def test_every_flipped_byte_is_found(path):
    """In the manifest when it is opened; in a binary when that is read, and only that."""
    data = path.read_bytes()
    end = len(data) - sum(map(len, BINARIES))
    with path.open("r+b", buffering=0) as raw:
        for at, byte in enumerate(data):
            os.pwrite(raw.fileno(), bytes([byte ^ (1 << at % 8)]), at)
            if at < end:
                with pytest.raises(BundleError, match=r"is damaged|is no bundle|has format"):
                    read_bundle(path)
            else:
                file = read_bundle(path)
                hit = 0 if at < end + len(BINARIES[0]) else 1
                with pytest.raises(BundleError, match="is not what was written"):
                    file.binary(VARIANTS[hit])
                assert file.binary(VARIANTS[1 - hit]) == BINARIES[1 - hit]
            os.pwrite(raw.fileno(), bytes([byte]), at)
    assert path.read_bytes() == data


def test_every_cut_and_any_addition_is_found(path):
    data = path.read_bytes()
    for length in reversed(range(len(data))):
        os.truncate(path, length)
        with pytest.raises(BundleError, match=r"is damaged|is no bundle"):
            read_bundle(path)
    assert damaged(path, data + b"\0") == (
        f"bundle: '{path}' is damaged: it has {len(data) + 1} bytes, its manifest says "
        f"{len(data)}. {REBUILD}"
    )


def with_manifest(change):
    """A file whose sums are right and whose manifest was changed by someone."""
    manifest = {
        "tileloom": "0.1.0",
        "kernels": [json.loads(json.dumps(_plain(v))) for v in VARIANTS],
        "binaries": [[len(b), hashlib.sha256(b).hexdigest()] for b in BINARIES],
    }
    made = change(manifest)
    text = (
        made if isinstance(made, bytes) else json.dumps(manifest if made is None else made).encode()
    )
    return sealed(text) + b"".join(BINARIES)


def sealed(text):
    return f"tileloom bundle 1 {len(text)} {hashlib.sha256(text).hexdigest()}\n".encode() + text


def _plain(v):
    return {
        **{k: x for k, x in vars(v).items() if k != "parameters"},
        "parameters": [vars(p) for p in v.parameters],
    }


def test_a_manifest_of_ones_own_is_read(path):
    path.write_bytes(with_manifest(lambda m: None))
    assert read_bundle(path).variant(2) == VARIANTS[2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: b"{", "Expecting property name"),
        (lambda m: b"\xff\xfe", "decode"),
        (lambda m: b"[" * 100_000, "recursion"),
        (lambda m: b'{"tileloom": NaN}', "NaN is no number of JSON"),
        (lambda m: b"[]", "list indices"),
        (lambda m: b"null", "not subscriptable"),
        (lambda m: m.pop("kernels") and None, "kernels"),
        (lambda m: m.update(binaries=[[-1, "x"]]), "a binary of -1 bytes"),
        (lambda m: m.update(binaries=[[1e3, "x"]]), "a binary of 1000.0 bytes"),
        (lambda m: m.update(binaries=7), "not iterable"),
        (lambda m: m["kernels"][1].pop("name") and None, "name"),
        (lambda m: m["kernels"][1].update(key=5), "a kernel has no name"),
        (lambda m: m.update(kernels=["x"]), "string indices"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(path, change, said):
    text = damaged(path, with_manifest(change))
    assert text.startswith(f"bundle: '{path}' is damaged: something in its manifest cannot be read")
    assert said in text
    assert text.endswith(REBUILD)


def test_sizes_that_nobody_has_are_refused_before_anything_is_read(path):
    huge = with_manifest(lambda m: m.update(binaries=[[2**62, "x"], [2**62, "x"]]))
    assert "its manifest says 92233720368547" in damaged(path, huge)
    assert damaged(path, b"tileloom bundle 1 999999999 " + b"0" * 64 + b"\n") == (
        f"bundle: '{path}' is damaged: it claims a manifest of 999999999 bytes; at most 67108864 "
        f"are read. {REBUILD}"
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"threads": "128"}, "its threads is '128'"),
        ({"threads": True}, "its threads is True"),
        ({"threads": 100}, "it has 100 threads"),
        ({"threads": 2048}, "it has 2048 threads"),
        ({"scratch_bytes": -1}, "a number of it is out of range"),
        ({"toolkit": "x"}, "its toolkit is 'x'"),
        ({"toolkit": ""}, "its toolkit is ''"),
        ({"arch": "90"}, "its arch is '90'"),
        ({"num_ctas": 0}, "a number of it is out of range"),
        ({"shared_bytes": -1}, "a number of it is out of range"),
        ({"binary": 2}, "it names binary 2, there is none"),
        ({"binary": -1}, "it names binary -1, there is none"),
        ({"parameters": 5}, "not iterable"),
        ({"parameters": ["x"]}, "a parameter has other fields than name, type"),
        ({"parameters": [{"name": "x"}]}, "a parameter has other fields than name, type"),
        ({"more": 1}, "a variant has other fields than name, function"),
        ({"options": []}, "its options is []"),
    ],
)
def test_a_kernel_that_makes_no_sense_is_refused_and_the_others_are_not(path, change, said):
    path.write_bytes(with_manifest(lambda m: m["kernels"][1].update(change)))
    file = read_bundle(path)
    assert file.variant(0) == VARIANTS[0]
    with pytest.raises(BundleError) as caught:
        file.variant(1)
    text = str(caught.value)
    assert text.startswith(f"bundle: '{path}' is damaged: kernel number 1 in its manifest cannot")
    assert said in text


@pytest.mark.parametrize(
    "encoding",
    [
        {"swizzle": 3},
        {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [], "fp4_padded": False},
        {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": ["1"], "fp4_padded": False},
        {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1], "fp4_padded": 0},
    ],
)
def test_a_descriptor_that_makes_no_sense_is_refused(path, encoding):
    path.write_bytes(
        with_manifest(lambda m: m["kernels"][0]["parameters"][0].update(descriptor=encoding))
    )
    with pytest.raises(BundleError, match="descriptor of x"):
        read_bundle(path).variant(0)


def test_another_format_is_refused_with_both_named(path):
    assert damaged(path, b"tileloom bundle 2 and all else is new\n") == (
        f"bundle: '{path}' has format 2, this tileloom reads format 1. Try: build it again, or use "
        "the tileloom that built it."
    )


def test_what_is_no_bundle(path, tmp_path):
    no_bundle = (
        f"bundle: '{path}' is no bundle: it does not begin with 'tileloom bundle'. Try: the path "
        "of a file that `tileloom bundle build` wrote."
    )
    assert damaged(path, b"") == no_bundle
    assert damaged(path, pickle.dumps({"kernels": []})) == no_bundle
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../manifest.json", "{}")
    assert damaged(path, path.read_bytes()) == no_bundle
    with pytest.raises(BundleError, match=r"cannot be read: Is a directory\. Try: the path of a"):
        read_bundle(tmp_path)
    with pytest.raises(BundleError, match=r"cannot be opened: No such file or directory\. Try: "):
        load_bundle(tmp_path / "missing")


def test_no_open_file_is_left(path):
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(5):
        read_bundle(path)
        damaged(path.with_name("bad"), b"tileloom bundle 1 5\n")
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_file_put_in_its_place_changes_nothing_for_who_has_it_open(path):
    file = read_bundle(path)
    write_bundle(path, VARIANTS[:1], [b"other"], tileloom="0.1.0")
    assert file.binary(VARIANTS[1]) == BINARIES[1]
    assert len(read_bundle(path).raw) == 1


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(path, monkeypatch):
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_bundle(path, VARIANTS[:1], [b"other"], tileloom="0.1.0")
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


_WRITER = """
import sys
from pathlib import Path
from tests.launch.bundle_fakes import VARIANTS
from tileloom.launch.bundle_format import write_bundle
path, mark = Path(sys.argv[1]), sys.argv[2].encode()
for i in range(150):
    write_bundle(path, VARIANTS, [mark * (100 + i), mark * 50], tileloom="0.1.0")
"""


def test_two_processes_may_write_at_once(path):
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    writers = [
        subprocess.Popen([sys.executable, "-c", _WRITER, str(path), mark], env=environment)
        for mark in "ab"
    ]
    seen = set()
    try:
        while any(w.poll() is None for w in writers):
            file = read_bundle(path)
            first, second = file.binary(VARIANTS[0]), file.binary(VARIANTS[1])
            assert first == BINARIES[0] or first[:1] == second[:1]  # of one writer, both
            seen.add(first[:1])
    finally:
        for w in writers:
            w.kill()
            w.wait()
    assert [w.returncode for w in writers] == [0, 0]
    assert {b"a", b"b"} <= seen
    assert [p.name for p in path.parent.iterdir()] == [path.name]
