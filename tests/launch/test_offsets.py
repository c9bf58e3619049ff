"""No kernel that ships adds an unproved 32-bit offset to a pointer; and the check's own tests.

An operator lists what it has proved in its `kernels.py`: `PROVED_32BIT`, the kernel function's name
to the proof. Offsets whose range follows from the code (inside a tile) need no entry.
"""

import importlib
import importlib.util

import pytest
from tests.launch import shipped
from tests.launch.offsets import ANY, range_of, unbounded_offsets
from tests.launch.versions import triton_folder

from tileloom.launch.aot import KernelSpec, compile_in_workers

OWN = shipped.pairs(shipped.OWN, full=False)
# What the quick pass compiles only on the Triton of GPU machines is judged by its code there.
ELSEWHERE = [pair for pair in shipped.pairs("3.6.0", full=False) if pair not in OWN]
QUICK = [(shipped.OWN, *pair) for pair in OWN] + [("3.6.0", *pair) for pair in ELSEWHERE]


def _proofs():
    """The proofs of every operator, by kernel function."""
    found = {}
    for module in {s.function.partition(":")[0].rpartition(".")[0] for s, _ in OWN}:
        kernels = importlib.import_module(f"{module}.kernels")
        found.update(getattr(kernels, "PROVED_32BIT", {}))
    return found


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("version", "spec", "arch"), QUICK, ids=lambda v: v if isinstance(v, str) else v.name
)
def test_shipped_kernels_have_no_unproved_offset(shipped_results, version, spec, arch):
    if version != shipped.OWN and triton_folder(version) is None:
        pytest.skip(f"Triton {version} is not in .triton-versions; `make test` installs it")
    _check(shipped_results(version)[spec.name, arch], spec)


@pytest.mark.full
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("spec", "arch"),
    [pair for pair in shipped.pairs(shipped.OWN, full=True) if pair not in OWN],
    ids=lambda v: v if isinstance(v, str) else v.name,
)
def test_nor_have_those_of_the_full_pass(shipped_results, spec, arch):
    _check(shipped_results(shipped.OWN, full=True)[spec.name, arch], spec)


def _check(result, spec):
    assert result.error is None, result.error
    found = unbounded_offsets(result.ttgir if spec.gluon else result.ttir)
    if spec.function.partition(":")[2] not in _proofs():
        assert not found, "\n".join(map(str, found))


def test_every_proof_is_of_a_kernel_that_ships():
    names = {spec.function.partition(":")[2] for spec, _ in OWN}
    proofs = _proofs()
    assert set(proofs) <= names
    assert all(len(proof.split()) >= 5 for proof in proofs.values())


def _planted(name, gluon, block):
    return KernelSpec(
        name=name,
        function=f"tests.launch.offset_kernels:{name}",
        gluon=gluon,
        signature={"x": "*fp32", "stride": "i32", "BLOCK": "constexpr"},
        constexprs={"BLOCK": block},
        archs=("sm_90",),
    )


@pytest.fixture(scope="module")
def planted():
    specs = [
        _planted("overflowing_kernel", False, 128),
        _planted("tile_kernel", False, 32),
        _planted("overflowing_gluon_kernel", True, 128),
    ]
    results = compile_in_workers([(spec, "sm_90") for spec in specs], workers=1, timeout_s=250)
    assert [r.error for r in results] == [None] * 3
    return {result.name: result for result in results}


@pytest.mark.parametrize("stage", ["ttir", "ttgir"])
@pytest.mark.parametrize(
    ("name", "marker"),
    [
        ("overflowing_kernel", "# overflows: program times stride"),
        ("overflowing_gluon_kernel", "# overflows: in Gluon"),
    ],
)
def test_planted_overflow_is_found(planted, name, marker, stage):
    text = getattr(planted[name], stage)
    if not text:
        assert (name, stage) == ("overflowing_gluon_kernel", "ttir")
        return
    found = unbounded_offsets(text)
    assert len(found) == 1, found
    assert found[0].function == name
    assert found[0].place.endswith(f"offset_kernels.py:{_line_of(marker)}")
    assert f"{name} adds the 32-bit offset %" in str(found[0])


def _line_of(marker):
    path = importlib.util.find_spec("tests.launch.offset_kernels").origin
    with open(path) as file:
        return next(n for n, line in enumerate(file, 1) if marker in line)


@pytest.mark.parametrize("stage", ["ttir", "ttgir"])
def test_offsets_inside_a_tile_pass(planted, stage):
    text = getattr(planted["tile_kernel"], stage)
    assert text.count("tt.addptr") >= 3
    assert "xi32" in text
    assert unbounded_offsets(text) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("arith.constant 7 : i32", (7, 7)),
        ("arith.constant dense<-7> : tensor<4xi32>", (-7, -7)),
        ("tt.make_range {end = 64 : i32, start = 0 : i32} : tensor<64xi32>", (0, 63)),
        ("arith.addi %r, %c : tensor<64xi32>", (100, 163)),
        ("arith.subi %c, %r : tensor<64xi32>", (37, 100)),
        ("arith.muli %r, %c : tensor<64xi32>", (0, 6300)),
        ("arith.maxsi %r, %c : i32", (100, 100)),
        ("arith.minsi %r, %c : i32", (0, 63)),
        ("arith.minsi %n, %c : i32", ANY),
        ("arith.remsi %r, %c : i32", (0, 99)),
        ("arith.remsi %n, %c : i32", (-99, 99)),
        ("arith.andi %n, %c : i32", (0, 100)),
        ("arith.muli %n, %c : i32", ANY),
        ("arith.addi %n, %c : i32", ANY),
        ("arith.muli %big, %c : i32", ANY),
        ("tt.load %p : !tt.ptr<i32>", ANY),
    ],
)
def test_ranges(text, expected):
    definitions = {
        "%r": "tt.make_range {end = 64 : i32, start = 0 : i32} : tensor<64xi32>",
        "%c": "arith.constant 100 : i32",
        "%big": "arith.constant 100000000 : i32",
        "%x": text,
    }
    assert range_of("%x", definitions) == expected


def test_unreadable_text_is_an_error_not_a_pass():
    with pytest.raises(ValueError, match="the text has no"):
        unbounded_offsets("module {}")
    with pytest.raises(ValueError, match="an addptr of f cannot be read"):
        unbounded_offsets("tt.func public @f() {\n %1 = tt.addptr %0, %o\n}")
