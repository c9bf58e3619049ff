"""Which arguments a bundled kernel takes, which variant it then is, and what is said otherwise."""

import random
import struct
from types import SimpleNamespace

import pytest
from tests.launch.bundle_fakes import (
    FakeCuda,
    FakeTensor,
    descriptor,
    handmade,
    install,
    pointers,
    variant,
)

from tileloom.errors import BundleError, DeviceError, OptionError
from tileloom.launch.bundle import load_bundle
from tileloom.launch.bundle_arguments import choose
from tileloom.launch.bundle_descriptor import TensorDescriptor
from tileloom.launch.bundle_format import Parameter


@pytest.fixture
def cuda(monkeypatch):
    return install(monkeypatch, FakeCuda())


@pytest.fixture
def bundle(small_bundle):
    return load_bundle(small_bundle)


def test_a_descriptor_of_another_block_dtype_or_layout_is_refused(cuda, bundle):
    kernel = bundle.kernel("wgmma")
    good = descriptor(64, 512, [64, 64])
    with_layout = SimpleNamespace(**vars(good), layout=SimpleNamespace())
    other = {
        "has blocks of [32, 64], it takes [64, 64]": descriptor(64, 512, [32, 64]),
        "has elements of type fp16, it takes bf16": TensorDescriptor(
            FakeTensor("float16"), [64, 64], [64, 1], [64, 64]
        ),
        "is a FakeTensor, it takes a TMA descriptor": FakeTensor("bfloat16"),
        "has the layout namespace(), it takes NVMMASharedLayout(": with_layout,
    }
    for said, a in other.items():
        with pytest.raises(OptionError) as caught:
            kernel[(1,)](a, good, FakeTensor("float32"), 8)
        assert f"a_desc {said}" in str(caught.value)
        assert "b_desc has blocks of [64, 64], it takes [128, 64]" in str(caught.value)


def test_the_most_specialised_variant_that_fits_is_taken(cuda, bundle):
    kernel = bundle.kernel("add")
    assert [v.name for v in kernel.variants] == [
        "add[fp32]", "add[fp16]", "add[fp32]", "add[fp32-any]"
    ]  # fmt: skip
    loaded = []
    read = bundle._file.binary
    bundle._file.binary = lambda v: loaded.append((v.name, v.arch)) or read(v)
    even, odd, half = FakeTensor("float32"), FakeTensor("float32", 4), FakeTensor("float16")
    for x in (even, odd, half):
        kernel[(1,)](x, x, x, 3)
    assert loaded == [("add[fp32]", "sm_90"), ("add[fp32-any]", "sm_90"), ("add[fp16]", "sm_90")]


@pytest.mark.parametrize(
    ("arguments", "named", "said"),
    [
        (
            (0, 0, 0, 1, 1024, 4),
            {},
            "bundle: 6 arguments are given, add[fp32](x, y, out, n, BLOCK) takes 5. Try: name "
            "compile options when the bundle is built, not at the launch.",
        ),
        ((0, 0, 0), {}, "bundle: n of add[fp32](x, y, out, n, BLOCK) is not given. Try: give"),
        ((0,), {"n": 1}, "bundle: y, out of add[fp32](x, y, out, n, BLOCK) are not given."),
        ((0, 0, 0, 1), {"n": 1}, "bundle: n is given twice to add[fp32]("),
        ((0, 0, 0, 1), {"BLOKC": 1}, "has no parameter BLOKC. Did you mean BLOCK?"),
        ((0, 0, 0, 1), {"num_warps": 4}, "has no parameter num_warps. Try: the names above."),
        (
            (0, 0, 0, 1),
            {"BLOCK": 64},
            "bundle: kernel 'add[fp32]' does not take these arguments: BLOCK is 64, it takes 1024. "
            "Try: other arguments, or a bundle that is built for these.",
        ),
        ((0, 0, 0, 1), {"BLOCK": 1024.0}, "BLOCK is 1024.0, it takes 1024"),
        ((0, 0, 4, 1), {}, "out begins at an address that 16 does not divide, it takes only"),
        ((0, 0, None, 1), {}, "out is None, it takes a tensor"),
        ((0, -16, 0, 1), {}, "y is -16, it takes an address"),
        ((0, 0, 2**64, 1), {}, "out is 18446744073709551616, it takes an address"),
        ((0, 0, [0], 1), {}, "out is a list, it takes a tensor"),
        ((0, 0, 0, 2**31), {}, "n is 2147483648, it takes an integer from -2147483648 to 214748"),
        ((0, 0, 0, True), {}, "n is True, it takes an integer"),
        ((0, 0, 0, "x" * 99), {}, f"n is '{'x' * 37}...', it takes an integer"),
    ],
)
def test_arguments_that_do_not_fit(cuda, bundle, arguments, named, said):
    with pytest.raises(OptionError) as caught:
        bundle.kernel("add[fp32]")[(1,)](*arguments, **named)
    assert said in str(caught.value)
    assert cuda.loaded == []


def test_a_wrong_dtype_is_said_for_each_variant_the_nearest_first(cuda, bundle):
    x, wrong = FakeTensor("float32", 4), FakeTensor("float64")
    with pytest.raises(OptionError) as caught:
        bundle.kernel("add")[(1,)](x, x, wrong, 1)
    lines = str(caught.value).splitlines()
    assert lines[0] == "bundle: no variant of kernel 'add' takes these arguments:"
    assert lines[1] == "- add[fp32-any]: out has elements of type fp64, it takes fp32"
    assert lines[2].startswith("- add[fp32]: x begins at an address that 16 does not divide, ")
    assert lines[3].startswith("- add[fp16]: x has elements of type fp32, it takes fp16; ")
    assert lines[-1] == "Try: other arguments, or a bundle that is built for these."


def test_tensors_elsewhere_are_refused(cuda, bundle):
    kernel = bundle.kernel("add[fp32]")
    here, there = FakeTensor("float32"), FakeTensor("float32", device="cuda:1")
    with pytest.raises(DeviceError) as caught:
        kernel[(1,)](here, here, FakeTensor("float32", device="cpu"), 1)
    assert str(caught.value) == (
        "bundle: out of kernel 'add[fp32]' is on the device cpu; a bundled kernel takes tensors on "
        "a GPU. Try: out.to(a GPU)."
    )
    with pytest.raises(DeviceError, match=r"x and out of kernel 'add\[fp32\]' are on cuda:0 and c"):
        kernel[(1,)](here, here, there, 1)


def test_a_constant_may_be_left_out_only_where_it_is_one(cuda, tmp_path):
    def with_mode(name, mode):
        mode = Parameter("MODE", "constexpr", optional=True, value=mode)
        return variant(name, parameters=(Parameter("n", "i32"), mode))

    bundle = handmade(tmp_path, with_mode("k[a]", True), with_mode("k[b]", False))
    bundle.kernel("k")[(1,)](5, MODE=False)
    with pytest.raises(OptionError, match=r"these arguments with MODE as False or True\. Try"):
        bundle.kernel("k")[(1,)](5)
    bundle.kernel("k[a]")[(1,)](5)
    assert len(cuda.launches) == 2


def test_a_number_that_one_variant_knows_must_still_be_given(cuda, tmp_path):
    one = variant("k[1]", parameters=(Parameter("n", "constexpr", value=1),))
    any_ = variant("k[n]", 1, parameters=(Parameter("n", "i32"),))
    kernel = handmade(tmp_path, any_, one).kernel("k")
    assert [v.name for v in kernel.variants] == ["k[1]", "k[n]"]
    with pytest.raises(OptionError, match="n of k"):
        kernel[(1,)]()
    cuda.sizes = [8, 8]
    kernel[(1,)](1)
    assert cuda.launches[-1].parameters == pointers(0, 0)
    cuda.sizes = [4, 8, 8]
    kernel[(1,)](2)
    assert cuda.launches[-1].parameters == [struct.pack("<i", 2), *pointers(0, 0)]


def test_kernels_of_different_functions_are_no_variants_of_one(tmp_path):
    bundle = handmade(tmp_path, variant("k[a]"), variant("k[b]", 1, function="kernels:other"))
    with pytest.raises(BundleError) as caught:
        bundle.kernel("k")
    assert str(caught.value) == (
        f"bundle: 'k' in '{tmp_path / 'b'}' are kernels of different functions, "
        "kernels:add_kernel, kernels:other. Try: one of k[a], k[b]."
    )
    assert bundle.kernel("k[b]").variants[0].function == "kernels:other"


def test_half_precision_numbers(cuda, tmp_path):
    kernel = handmade(tmp_path, variant("k", parameters=(Parameter("h", "fp16"),))).kernel("k")
    cuda.sizes = [2, 8, 8]
    for given, arrives in ((0.1, 0.0999755859375), (65519.9, 65504.0), (-1e9, float("-inf"))):
        kernel[(1,)](given)
        assert struct.unpack("<e", cuda.launches[-1].parameters[0]) == (arrives,)
    with pytest.raises(OptionError, match="h is 'x', it takes a number"):
        kernel[(1,)]("x")
    with pytest.raises(OptionError, match="it takes a number"):
        kernel[(1,)](10**400)


def test_multiples_of_16_and_truths(cuda, tmp_path):
    parameters = (Parameter("n", "i64", aligned=True), Parameter("t", "i1"), Parameter("f", "fp64"))
    kernel = handmade(tmp_path, variant("k", parameters=parameters)).kernel("k")
    kernel[(1,)](-32, False, 3)
    with pytest.raises(OptionError) as caught:
        kernel[(1,)](17, 1, True)
    for said in (
        "n is 17, it takes multiples of 16",
        "t is 1, it takes T",
        "f is True, it takes a",
    ):
        assert said in str(caught.value)


def test_a_type_of_tritons_is_known_by_its_name(cuda, tmp_path):
    import triton.language as tl

    kind = Parameter("KIND", "constexpr", optional=True, value=str(tl.float16))
    kernel = handmade(tmp_path, variant("k", parameters=(kind,))).kernel("k")
    kernel[(1,)](tl.float16)
    with pytest.raises(OptionError, match="KIND is a dtype, it takes 'fp16'"):
        kernel[(1,)](tl.float32)


def test_a_remembered_choice_is_the_one_that_would_be_made(cuda, bundle, tmp_path):
    """Calls at random, mostly of forms that came before, against variants that differ in all."""

    def form(name, number, dtype="*fp32", aligned=False, n="i32", n_aligned=False, mode=1):
        n = Parameter("n", n, n_aligned) if n != "1" else Parameter("n", "constexpr", value=1)
        mode = Parameter("MODE", "constexpr", optional=True, value=mode)
        parameters = (Parameter("x", dtype, aligned), n, Parameter("f", "fp32"), mode)
        return variant(f"k[{name}]", number, parameters=parameters)

    variants = [
        form("plain", 0),
        form("aligned", 0, aligned=True),
        form("half", 1, "*fp16"),
        form("sixteen", 0, n_aligned=True),
        form("one", 1, n="1"),
        form("long", 1, n="i64"),
        form("long sixteen", 0, n="i64", n_aligned=True),
        form("true", 0, mode=True),
        form("byte", 0, "*u8", n="u8"),
    ]
    kernel = handmade(tmp_path, *variants).kernel("k")

    def afresh(call):
        return choose("k", kernel._for_device(0), call)

    def outcome(pick, *arguments):
        try:
            return pick(*arguments).name
        except OptionError as error:
            return str(error)

    rng = random.Random(0)
    numbers = [
        0,
        1,
        2,
        15,
        16,
        32,
        255,
        256,
        -1,
        -16,
        -17,
        2**31 - 1,
        2**31,
        2**40 + 1,
        -(2**31),
        2**63,
        True,
        1.0,
    ]
    tensors = [FakeTensor(d, a) for d in ("float32", "float16", "uint8") for a in (4096, 4100)]
    outcomes = set()
    for _ in range(3000):
        call = {
            "x": rng.choice([*tensors, 4096, 4100]),
            "n": rng.choice(numbers),
            "f": rng.choice([1, 0.5, True, "x"]),
        }
        if rng.random() < 0.7:
            call["MODE"] = rng.choice([1, True, 1.0, "1", [1]])
        results = [outcome(kernel._choose, 0, call), outcome(afresh, call)]
        assert results[0] == results[1], call
        outcomes.add(results[0])
    assert {v.name for v in variants} <= outcomes


def test_forms_are_forgotten_in_the_end(cuda, tmp_path, monkeypatch):
    monkeypatch.setattr("tileloom.launch.bundle._FORMS", 5)
    kernel = handmade(tmp_path, variant("k", parameters=(Parameter("n", "i64"),))).kernel("k")
    for bits in range(60):
        kernel[(1,)](1 << bits)
        assert len(kernel._chosen) <= 5
    assert len(cuda.launches) == 60
