"""The portable product's machine code: 16 bytes at a time, with no number of a call compiled in."""

import re

import pytest

from tileloom.launch.aot import compile_in_workers
from tileloom.ops.gemm.kernels import shipped

FORMS = ("linear-128", "nn-128", "tt-128", "ragged-fused-128")


@pytest.fixture(scope="module")
def compiled():
    specs = {
        form: next(s for s in shipped() if s.name.startswith(f"matmul_triton[{form}"))
        for form in FORMS
    }
    results = compile_in_workers([(spec, "sm_90") for spec in specs.values()], timeout_s=250)
    return dict(zip(specs, results))


@pytest.mark.parametrize("form", FORMS)
def test_vectors(compiled, form):
    assert compiled[form].error is None
    vectors, single = (
        re.findall(rf"\b(?:ld|st)\.global{kind}\b", compiled[form].ptx)
        for kind in (r"\.v4\.b32", r"\.b16")
    )
    # Of ragged rows no alignment is known.
    assert (vectors != [], single != []) == (form[:6] != "ragged", form[:6] == "ragged")
