"""Our specialisation of arguments equals Triton's own binder, for random arguments."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.launch.versions import OTHERS, triton_folder

from tileloom.launch.specialize import (
    _DTYPES,
    Parameter,
    Unsupported,
    exact,
    specialize,
    specializer,
)

triton_core = pytest.importorskip("triton._C.libtriton")
DTYPES = [getattr(torch, name.removeprefix("torch.")) for name in _DTYPES]


@dataclass
class Pointer:
    dtype: torch.dtype
    address: int

    def data_ptr(self):
        return self.address


@dataclass
class Descriptor:
    base: Pointer
    shape: list
    strides: list
    block_shape: list
    padding: str = "zero"


EDGES = [0, 1, 2, 15, 16, 17, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 16, 2**64 - 1]
INTEGERS = st.one_of(
    st.sampled_from([*EDGES, *(-e for e in EDGES if e <= 2**63)]),
    st.integers(-(2**63), 2**64 - 1),
    st.integers(-64, 64),
    st.integers(-(2**20), 2**20).map(lambda n: 16 * n),
)
POINTERS = st.builds(
    Pointer, st.sampled_from(DTYPES), st.one_of(st.integers(0, 64), st.integers(0, 2**63 - 1))
)
ARGUMENTS = st.one_of(INTEGERS, st.booleans(), st.floats(), st.none(), POINTERS)
PARAMETERS = st.builds(
    Parameter,
    name=st.just("p"),
    is_constexpr=st.just(False),
    is_const=st.booleans(),
    specialize=st.booleans(),
    align=st.booleans(),
    kind=st.just(""),
    default=st.none(),
)


def binder(parameter, value):
    from triton.backends.nvidia.compiler import CUDABackend

    return triton_core.native_specialize_impl(
        CUDABackend, value, parameter.is_const, parameter.specialize, parameter.align
    )


@settings(max_examples=400, deadline=None)
@given(PARAMETERS, ARGUMENTS)
def test_one_argument(parameter, value):
    assert specialize(parameter, value) == binder(parameter, value)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(DTYPES), st.lists(st.sampled_from([16, 32, 64, 256]), min_size=1, max_size=5)
)
def test_a_descriptor(dtype, block):
    pytest.importorskip("triton")
    from triton.tools.tensor_descriptor import TensorDescriptor

    made = object.__new__(TensorDescriptor)
    made.__dict__.update(base=Pointer(dtype, 16), shape=block, strides=block, block_shape=block,
                         padding="zero")  # fmt: skip
    parameter = Parameter("p", False, False, True, True, "", None)
    assert specialize(parameter, made) == binder(parameter, made)


def test_a_descriptor_of_gluon():
    from tests.launch.launch_kernels import gluon_descriptor

    tensor = torch.zeros(256, 64, dtype=torch.float16)
    parameter = Parameter("p", False, False, True, True, "", None)
    made = gluon_descriptor(tensor, [32, 64])
    assert specialize(parameter, made) == binder(parameter, made)


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 2**70])
def test_what_triton_refuses_is_left_to_it(value):
    parameter = Parameter("p", False, False, True, True, "", None)
    with pytest.raises(OverflowError):
        binder(parameter, value)
    with pytest.raises(Unsupported):
        specialize(parameter, value)


@settings(max_examples=150, deadline=None)
@given(
    st.tuples(
        POINTERS, POINTERS, INTEGERS, INTEGERS, st.floats(), st.booleans(),
        st.sampled_from([None, 3]), INTEGERS, st.sampled_from([16, 32, True]),
    )
)  # fmt: skip
def test_a_whole_kernel_with_annotations(arguments):
    """All parameters of a kernel, through the binder that Triton generates for it."""
    from tests.launch.launch_kernels import mixed
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    from tileloom.launch.specialize import parameters_of

    parameters = parameters_of(mixed)
    key = specializer(parameters)
    generated = create_function_from_signature(
        mixed.signature, mixed.params, make_backend(GPUTarget("cuda", 90, 32))
    )
    _, expected, _ = generated(*arguments)
    pairs, _ = key(arguments)
    assert list(pairs) == [tuple(pair) for pair in expected]


@pytest.mark.parametrize(
    "pair", [(1, True), (1, 1.0), (0.0, -0.0), (0, False), ("1", 1), (None, 0)]
)
def test_compile_time_values_that_are_equal_and_differ(pair):
    one, other = pair
    assert (exact(one), one) != (exact(other), other)


@pytest.mark.parametrize("value", [[1], (1, True), {1}, torch.zeros(1)])
def test_compile_time_values_that_equality_does_not_tell(value):
    with pytest.raises(Unsupported):
        exact(value)


@pytest.mark.full
@pytest.mark.parametrize("version", OTHERS)
def test_the_same_on_other_tritons(version):
    folder = triton_folder(version)
    if folder is None:
        pytest.skip(f"Triton {version} is not installed; `make setup` does")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider",
               "-W", "ignore", "-m", "not full", __file__]  # fmt: skip
    environment = {"PYTHONPATH": f"{folder}:src:."}
    import os

    done = subprocess.run(command, capture_output=True, text=True, timeout=240,
                          env=os.environ | environment, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
