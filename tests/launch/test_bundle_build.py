"""Building: what is refused, what is written, and that the same input gives the same bytes."""

import dataclasses
import importlib
import re
import sys
from pathlib import Path

import pytest
from tests.launch import bundle_samples, kernel_samples, samples, shipped
from tests.launch.versions import OTHERS, triton_folder

from tileloom.errors import BundleError, CompileError, OptionError
from tileloom.launch import bundle_build, compat
from tileloom.launch.aot import CompileFailure, compile_aot
from tileloom.launch.bundle import load_bundle
from tileloom.launch.bundle_build import build_bundle, bundle_results
from tileloom.launch.bundle_key import kernel_key
from tileloom.launch.bundle_parameters import fields_of, ptx_fields, types_of
from tileloom.launch.bundle_specs import Signature, specs_of
from tileloom.launch.specialize import parameters_of

_PAIR = [(bundle_samples.ADD, "sm_90")]


def test_what_a_bundle_says_of_its_kernels(small_bundle):
    found = {(v.name, v.arch): v for v in load_bundle(small_bundle).variants()}
    assert list(found) == [(spec.name, arch) for spec, arch in bundle_samples.SMALL]
    add = found["add[fp32]", "sm_90"]
    assert (add.entry, add.target, add.threads, add.shared_bytes) == (
        "add_kernel",
        "sm_90a",
        128,
        0,
    )
    assert [p.aligned for p in add.parameters] == [True, True, True, False, False]
    assert [p.optional for p in add.parameters] == [False, False, False, False, True]
    assert add.constants == {"BLOCK": 1024}
    assert add.options == {"num_warps": 4, "num_stages": 3}
    assert found["add[fp32]", "sm_80"].target == "sm_80"
    scalars = found["scalars", "sm_90"]
    assert scalars.constants == {"absent": None, "one": 1, "MODE": "twelve"}
    assert [p.name for p in scalars.parameters if p.optional] == ["MODE"]
    wgmma = found["wgmma", "sm_90"]
    assert wgmma.shared_bytes == 3 * (64 * 64 + 128 * 64) * 2 + 3 * 8
    assert wgmma.parameters[1].descriptor == {
        "swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [128, 64], "fp4_padded": False
    }  # fmt: skip
    assert found["scratch", "sm_90"].scratch_bytes == 128


def test_the_same_kernels_give_the_same_bytes(small_bundle, tmp_path):
    build_bundle(tmp_path / "again.bundle", bundle_samples.SMALL, workers=1)
    assert (tmp_path / "again.bundle").read_bytes() == small_bundle.read_bytes()


@pytest.mark.full
@pytest.mark.parametrize("version", OTHERS)
def test_other_versions_of_triton_make_bundles_with_the_same_keys(small_bundle, tmp_path, version):
    if (folder := triton_folder(version)) is None:
        pytest.skip(f"Triton {version} is not in .triton-versions")
    made = build_bundle(tmp_path / "b", bundle_samples.SMALL, workers=2, triton_path=folder)
    own = load_bundle(small_bundle).variants()
    assert {v.triton for v in made} == {version}
    assert [v.key for v in made] == [v.key for v in own]
    assert [v.parameters for v in made] == [v.parameters for v in own]


def test_a_key_changes_with_all_that_a_kernel_is_compiled_from():
    base = {
        "function": "m:k", "source": "s", "arch": "sm_90", "types": {"x": "*fp32", "n": "i32"},
        "constants": {"B": 1}, "aligned": ["x"], "options": {},
    }  # fmt: skip
    changes = [
        {},
        {"function": "m:l"},
        {"source": "t"},
        {"arch": "sm_80"},
        {"types": {"x": "*fp16", "n": "i32"}},
        {"types": {"x": "*fp32", "n": "i64"}},
        {"constants": {"B": 2}},
        {"constants": {"B": True}},
        {"constants": {"B": 1.0}},
        {"constants": {"B": "1"}},
        {"constants": {"B": None}},
        {"aligned": []},
        {"aligned": ["x", "n"]},
        {"options": {"num_warps": 8}},
        {"options": {"num_stages": 2}},
        {"options": {"maxnreg": 128}},
    ]
    keys = [kernel_key(**{**base, **change}) for change in changes]
    assert len(set(keys)) == len(changes)


def test_a_key_does_not_change_with_how_it_is_written():
    def key(types, constants, aligned, options):
        return kernel_key(
            "m:k", "s", "sm_90", types=types, constants=constants, aligned=aligned, options=options
        )

    one = key({"x": "*fp32", "d": "tensordesc<bf16[64, 64]>"}, {"A": 1, "B": 2}, ["x", "d"], {})
    defaults = {"num_warps": 4, "num_stages": 3, "num_ctas": 1, "maxnreg": None, "debug": False}
    two = key(
        {"d": "tensordesc<bf16[64,64]>", "x": "*fp32"}, {"B": 2, "A": 1}, ("d", "x"), defaults
    )
    assert one == two


def test_nothing_is_written_if_a_kernel_does_not_compile(tmp_path):
    with pytest.raises(CompileError, match="kernel 'wrong' failed for sm_90 in the front end"):
        build_bundle(tmp_path / "b", [*_PAIR, (samples.WRONG, "sm_90")])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "pairs", "said"),
    [
        ("b", [], "bundle: there is no kernel to build. Try: name at least one."),
        (
            "b",
            [(bundle_samples.ADD, "sm_90"), (bundle_samples.ADD, "sm_90a")],
            "bundle: given twice: add[fp32] for sm_90. Try: name each once.",
        ),
        ("no/b", _PAIR, "it must name a file in a folder that exists. Try: make the folder"),
        (".", _PAIR, "which is a folder; it must name a file. Try: "),
    ],
)
def test_wrong_builds_are_refused_before_anything_is_compiled(tmp_path, name, pairs, said):
    with pytest.raises(OptionError) as caught:
        build_bundle(tmp_path / name, pairs)
    assert said in str(caught.value)


def test_a_failure_alone_is_told(tmp_path):
    with pytest.raises(CompileError, match="it broke"):
        bundle_results(
            tmp_path / "b", [bundle_samples.ADD], [CompileFailure("a", "sm_90", "it broke")]
        )


@pytest.fixture(scope="module")
def compiled():
    return compile_aot(bundle_samples.ADD, "sm_90")


def _changed(compiled, **facts):
    return dataclasses.replace(compiled, launch=dataclasses.replace(compiled.launch, **facts))


@pytest.mark.parametrize(
    ("spec", "facts", "said"),
    [
        (
            bundle_samples.ADD,
            {"signature": {"x": "*fp32", "n": "i32"}},
            "reads its parameters at [(0, 8), (8, 8), (16, 8), (24, 4), (32, 8), (40, 8)]; "
            "tileloom would put them at [(0, 8), (8, 4), (16, 8), (24, 8)]. Try: another Triton",
        ),
        (bundle_samples.ADD, {"profile_bytes": 8}, "was compiled for Triton's profiler"),
        (
            bundle_samples.ADD,
            {"signature": {"x": "tensordesc<fp32[64, 64]>"}},
            "x of kernel 'add[fp32]' is a descriptor, and sm_90 has no tensor maps.",
        ),
        (
            bundle_samples.ADD,
            {"signature": {"x": "tensordesc<fp32[8]>"}, "descriptors": ({"is_im2col": True},)},
            "x of kernel 'add[fp32]' is an im2col descriptor; a bundle carries tiled ones.",
        ),
        (
            dataclasses.replace(bundle_samples.ADD, constexprs={"BLOCK": (1, 2)}),
            {},
            "BLOCK of kernel 'add[fp32]' is a tuple; a bundle holds None, bool, int, float, str",
        ),
    ],
)
def test_kernels_that_cannot_be_bundled(tmp_path, compiled, spec, facts, said):
    with pytest.raises(BundleError) as caught:
        bundle_results(tmp_path / "b", [spec], [_changed(compiled, **facts)])
    assert said in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_ptx_parameters_are_laid_out_as_the_assembler_does():
    ptx = """.visible .entry k_1(
        .param .u64 .ptr .global .align 1 k_1_param_0,
        .param .u8 k_1_param_1,
        .param .align 64 .b8 k_1_param_2[128],
        .param .f32 k_1_param_3,
        .param .align 2 .b8 k_1_param_4[2]
    )
    .reqntid 128"""
    assert ptx_fields(ptx) == [(0, 8), (8, 1), (64, 128), (192, 4), (196, 2)]
    assert ptx_fields("nothing") == []


@pytest.mark.timeout(2400)  # alone it bears the whole pass over the shipped kernels
def test_every_shipped_kernel_has_the_layout_that_is_expected(shipped_results):
    """`bundle_results` would refuse any other; this compiles nothing that other tests do not."""
    for result in shipped_results("own").values():
        descriptors = iter(result.launch.descriptors)
        if any(k.startswith("tensordesc") for k in result.launch.signature.values()) and not next(
            descriptors, None
        ):
            continue  # an architecture without tensor maps
        parameters = [
            bundle_build.Parameter(name, kind) for name, kind in result.launch.signature.items()
        ]
        assert fields_of(types_of(parameters)) == ptx_fields(result.ptx), result.name


@pytest.mark.parametrize("spec", shipped.SPECS.values(), ids=lambda spec: spec.name)
def test_what_ships_is_what_a_launch_asks_for(spec):
    """Else an operator would not find its kernel in a bundle of the shipped ones."""
    module, _, name = spec.function.partition(":")
    kernel = getattr(importlib.import_module(module), name)
    for parameter in parameters_of(kernel):
        kind = spec.signature[parameter.name]
        if parameter.is_constexpr or kind == "constexpr":
            continue
        assert parameter.kind in ("", kind)
        if kind.startswith("*"):
            assert parameter.name in spec.aligned or parameter.name == "bias"
        elif kind.startswith(("i", "u")):
            # Specialised for some values, it would be another kernel for each.
            assert not (parameter.specialize and parameter.align)
            assert parameter.kind or kind == "i32"


def test_specs_of_a_users_kernel(tmp_path):
    from tests.launch.bundle_kernels import add_kernel

    types = {**dict.fromkeys(("x", "y", "out"), "*fp32:16"), "n": "i32"}
    signatures = [
        Signature(types, {"BLOCK": 256}, num_warps=2),
        Signature({**types, "x": "*fp16"}, {"BLOCK": 512}, name="half", options={"maxnreg": 64}),
    ]
    first, second = specs_of(add_kernel, signatures, ["sm_90a", "sm_90", "80"])
    assert first.name == "add_kernel[0]"
    assert second.name == "add_kernel[half]"
    assert first.function == "tests.launch.bundle_kernels:add_kernel"
    assert first.archs == ("sm_90", "sm_80")
    assert first.signature == {
        **dict.fromkeys(("x", "y", "out"), "*fp32"),
        "n": "i32",
        "BLOCK": "constexpr",
    }
    assert (first.aligned, second.aligned) == (("x", "y", "out"), ("y", "out"))
    made = build_bundle(tmp_path / "b", [(first, "sm_90"), (second, "sm_90")])
    assert made[0].threads == 64
    assert made[1].options == {"maxnreg": 64, "num_warps": 4, "num_stages": 3}


@pytest.mark.parametrize(
    ("name", "said"), [("maxnrag", "mean maxnreg?"), ("q", "Try: one of num_")]
)
def test_an_option_that_triton_would_ignore_is_refused(name, said):
    spec = dataclasses.replace(bundle_samples.ADD, options={name: 64})
    with pytest.raises(CompileError) as caught:
        compile_aot(spec, "sm_90")
    assert f"kernel 'add[fp32]' has the option {name}, which Triton does not" in str(caught.value)
    assert said in str(caught.value)


def test_specs_of_a_gluon_kernel_are_those_written_by_hand():
    layout = {"swizzle_byte_width": 128, "element_bitwidth": 16, "rank": 2}
    types = {"a_desc": "tensordesc<bf16[64, 64]>", "b_desc": "tensordesc<bf16[128, 64]>"}
    (spec,) = specs_of(
        kernel_samples.wgmma_kernel,
        [
            Signature(
                {**types, "out": "*fp32", "steps": "i32"},
                {"N": 128, "NUM_STAGES": 3, "SERIAL": False},
                layouts={"a_desc": layout, "b_desc": layout},
            )
        ],
        ["sm_90"],
    )
    assert spec == dataclasses.replace(samples.WGMMA, name="wgmma_kernel[0]")


def _local():
    import triton

    @triton.jit
    def inside(x):
        pass

    return inside


_TYPES = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}


@pytest.mark.parametrize(
    ("signatures", "said"),
    [
        ([Signature({"x": "*fp32"}, {"BLOCK": 8})], "differ in n, out, y; the parameters are x, y"),
        ([Signature(_TYPES, {"BLOCK": 8, "n": 1})], "differ in n; the parameters are"),
        ([Signature(_TYPES, {"BLOKC": 8})], "differ in BLOCK, BLOKC; the parameters are"),
        ([Signature(_TYPES, {"BLOCK": 8}, layouts={"z": {}})], "layouts names z, which is no"),
        (
            [Signature(_TYPES, {"BLOCK": 8}, name="a")] * 2,
            "two signatures of add_kernel have one name; the names are add_kernel[a], add_kern",
        ),
    ],
)
def test_signatures_that_do_not_fit(signatures, said):
    from tests.launch.bundle_kernels import add_kernel

    with pytest.raises(OptionError) as caught:
        specs_of(add_kernel, signatures, ["sm_90"])
    assert said in str(caught.value)


def test_kernels_that_no_other_process_can_import():
    with pytest.raises(
        OptionError, match="cannot be imported by another process, where it is comp"
    ):
        specs_of(_local(), [], ["sm_90"])
    with pytest.raises(OptionError, match="kernel is a function; it must be a function made by"):
        specs_of(_local, [], ["sm_90"])


_SOURCE = """
import triton
import triton.language as tl
import helpers_of_{name}

LIMIT = tl.constexpr({limit})
UNUSED = {unused}

@triton.jit
def helper(x):
    return x {operator} 1

@triton.jit
def kernel(x, y):
    tl.store(y, tl.sum(helper(tl.load(x)) + LIMIT + helpers_of_{name}.deep(1), 0))
"""
_DEEP = "import triton\n\n@triton.jit\ndef deep(x):\n    return x + {added}\n"


def _hash(tmp_path, monkeypatch, *, limit=1, unused=1, operator="+", added=1):
    """The hash of a kernel in a file of its own, always under the same name."""
    folder = tmp_path / f"{limit}{unused}{operator}{added}"
    folder.mkdir()
    name = "some_kernels"
    text = _SOURCE.format(name=name, limit=limit, unused=unused, operator=operator)
    (folder / f"{name}.py").write_text(text)
    (folder / f"helpers_of_{name}.py").write_text(_DEEP.format(added=added))
    with monkeypatch.context() as patch:
        patch.syspath_prepend(folder)
        try:
            return compat.source_hash(importlib.import_module(name).kernel)
        finally:
            for module in (name, f"helpers_of_{name}"):
                sys.modules.pop(module, None)


def test_the_source_of_a_kernel_is_all_that_it_calls_and_names(tmp_path, monkeypatch):
    base = _hash(tmp_path, monkeypatch)
    changes = [{"limit": 2}, {"operator": "*"}, {"added": 2}]
    others = [_hash(tmp_path, monkeypatch, **change) for change in changes]
    assert len({base, *others}) == 4
    assert _hash(tmp_path, monkeypatch, unused=2) == base


def test_the_example_of_the_documentation(tmp_path, monkeypatch):
    from tests.launch import bundle_kernels

    page = Path(__file__).parents[2] / "docs" / "bundles.md"
    blocks = re.findall(r"```py\n(.*?)```", page.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "my_package", bundle_kernels)
    monkeypatch.setitem(sys.modules, "my_package.kernels", bundle_kernels)
    names = {}
    exec(blocks[0], names)
    exec(blocks[1].partition("kernel[")[0], names)
    (made,) = names["kernel"].variants
    assert [p.aligned for p in made.parameters] == [True, True, True, False, False]
    assert (made.name, made.arch, made.constants) == ("add_kernel[0]", "sm_90", {"BLOCK": 1024})
