"""Descriptors in each of their forms: in an atom, a `TensorMap`, a table in global memory."""

from __future__ import annotations

import importlib

import pytest

from tests.cpasync.test_cute_errors import printed
from tests.cpasync.test_probes import compiled
from tileloom import cpasync
from tileloom.errors import OptionError


@pytest.fixture(scope="module")
def forms(kernels):
    return importlib.import_module("tests.cpasync.descriptor_kernels")


def use(a):
    cpasync.prefetch_tma_descriptor(a.desc)
    cpasync.tma_load(a.desc, a.mbar, a.smem, (8, 0), eviction_kind=None)
    cpasync.tma_store(a.desc, a.smem, (0, 8))
    cpasync.tma_reduce(a.desc, a.smem, (0, 0))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("form", ["atom", "map", "table", "pointer"])
def test_descriptor_of_every_form(forms, kernels, form, arch):
    _, ptx = compiled(getattr(forms, f"with_{form}"), *forms.arguments(form), use, arch=arch)
    where = "gmem"  # the first parameter: the descriptor itself, or a pointer to it
    tensor = "cp.async.bulk.tensor.2d"
    assert kernels.instructions(ptx, "prefetch.", "cp.") == [
        f"prefetch.tensormap [{where}];",
        f"{tensor}.shared::cta.global.tile.mbarrier::complete_tx::bytes "
        f"[smem], [{where}, {{8, 0}}], [mbar];",
        f"{tensor}.global.shared::cta.tile.bulk_group [{where}, {{0, 8}}], [smem];",
        f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group "
        f"[{where}, {{0, 0}}], [smem];",
    ]


def test_pointer_to_the_descriptor_of_an_atom(forms):
    found = []

    def body(a):
        pointer = cpasync.extract_tensormap_ptr(a.desc)
        found.append((pointer.alignment, pointer.memspace.name, pointer.dtype.width))

    compiled(forms.with_atom, *forms.arguments("atom"), body)
    assert found == [(64, "generic", 64)]


def test_pointer_into_global_memory_with_one_coordinate_in_a_tuple(forms, kernels):
    def body(a):
        cpasync.tma_store(a.desc, a.smem, (5,))

    _, ptx = compiled(forms.with_pointer, *forms.arguments("pointer"), body)
    [line] = kernels.instructions(ptx, "cp.")
    assert line.endswith(".1d.global.shared::cta.tile.bulk_group [gmem, {5}], [smem];")


def test_table_of_descriptors_one_of_which_is_unaligned(forms):
    def body(a):
        cpasync.prefetch_tma_descriptor(a.desc + 4)

    with pytest.raises(OptionError) as caught:
        compiled(forms.with_pointer, *forms.arguments("pointer"), body)
    assert str(caught.value) == (
        "prefetch_tma_descriptor: tma_desc is 32 bytes past an aligned address, no multiple of 64. "
        "Try: an offset of a multiple of 64 bytes."
    )


def test_atom_without_a_descriptor(forms):
    def body(a):
        cpasync.extract_tensormap_ptr(a.desc)

    with pytest.raises(OptionError) as caught:
        compiled(forms.with_plain_atom, body)
    assert str(caught.value) == (
        "extract_tensormap_ptr: tma_atom is of type CopyAtom; accepted are copy atoms of TMA. "
        "Try: cute.nvgpu.cpasync.make_tiled_tma_atom."
    )


REFUSED = {
    "load-within-16-bytes": (
        lambda a: cpasync.tma_load(a.desc, a.mbar, a.smem, (4, 0)),
        "tma_load: the innermost coordinate is 4 = 8 bytes; accepted are multiples of 16 bytes. "
        "Try: a multiple of 8.",
    ),
    "store-within-16-bytes": (
        lambda a: cpasync.tma_store(a.desc, a.smem, (-4, 0)),
        "tma_store: the innermost coordinate is -4 = -8 bytes; accepted are multiples of 16 bytes. "
        "Try: a multiple of 8.",
    ),
    "store-before-the-tensor": (
        lambda a: cpasync.tma_store(a.desc, a.smem, (8, -1)),
        "tma_store: crd has the coordinate -1; only loads may begin before the tensor. Try: 0, and "
        "a smaller box.",
    ),
    "reduce-before-the-tensor": (
        lambda a: cpasync.tma_reduce(a.desc, a.smem, (-8, 0)),
        "tma_reduce: crd has the coordinate -8; only loads may begin before the tensor. Try: 0, "
        "and a smaller box.",
    ),
    "reduce-bits-of-float16": (
        lambda a: cpasync.tma_reduce(a.desc, a.smem, (0, 0), op="and"),
        "tma_reduce: op is 'and' and the descriptor's elements are Float16; accepted are Int32, "
        "Uint32, Int64, Uint64. Try: a descriptor of another element type.",
    ),
}


@pytest.mark.parametrize("form", ["atom", "map"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_descriptor_of_float16_does_not_take(forms, name, form):
    body, said = REFUSED[name]
    with pytest.raises(OptionError) as caught:
        compiled(getattr(forms, f"with_{form}"), *forms.arguments(form), body)
    assert str(caught.value) == said


def test_coordinates_that_only_the_running_kernel_knows(forms):
    """Asserted in the debug mode: columns of 8 elements, and no store before the tensor."""
    from cutlass import cute

    def body(a):
        at = cute.arch.thread_idx()[0] - 5
        cpasync.tma_load(a.desc, a.mbar, a.smem, (at, at))
        cpasync.tma_store(a.desc, a.smem, (0, at))

    arguments = forms.arguments("map")
    texts = printed(compiled(forms.with_map, *arguments, body, options="--enable-assertions")[1])
    assert texts == {
        "tma_load: the innermost coordinate is not a multiple of 16 bytes",
        "tma_store: a coordinate is below 0",
    }
    assert printed(compiled(forms.with_map, *arguments, body)[1]) == set()


def test_what_is_not_known_of_a_table_is_taken(forms):
    def body(a):
        cpasync.tma_load(a.desc, a.mbar, a.smem, (4, -1))
        cpasync.tma_reduce(a.desc, a.smem, (4, 0), op="and")

    compiled(forms.with_table, *forms.arguments("table"), body)
