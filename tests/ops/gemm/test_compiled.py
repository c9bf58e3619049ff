"""What the kernels' machine code must have that no emulator sees."""

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
    specs["chunks"] = next(s for s in shipped() if "-chunks]" in s.name)
    specs["split-fused"] = next(s for s in shipped() if "64x128-split-fused]" in s.name)
    results = compile_in_workers([(spec, "sm_90") for spec in specs.values()], timeout_s=250)
    return dict(zip(specs, results))


@pytest.mark.parametrize("form", FORMS)
def test_the_portable_product_moves_16_bytes_at_a_time(compiled, form):
    """Though no number of a call is compiled in."""
    assert compiled[form].error is None
    vectors, single = (
        re.findall(rf"\b(?:ld|st)\.global{kind}\b", compiled[form].ptx)
        for kind in (r"\.v4\.b32", r"\.b16")
    )
    # Of ragged rows no alignment is known.
    assert (vectors != [], single != []) == (form[:6] != "ragged", form[:6] == "ragged")


def test_the_word_of_a_late_chunk_is_written_behind_those_it_announces(compiled):
    """One lane stores what was awaited and found, all lanes release the chunk: they meet first."""
    assert compiled["chunks"].error is None
    lines = compiled["chunks"].ptx.splitlines()
    (release,) = (i for i, line in enumerate(lines) if "st.release.sys.global" in line)
    stores = [i for i, line in enumerate(lines[:release]) if "st.global.b32" in line]
    assert any("bar.warp.sync" in line for line in lines[stores[-1] : release])


@pytest.mark.parametrize(("form", "waits"), [("split-fused", 3), ("chunks", 3)])
def test_every_partition_waits_for_the_kernels_ahead(compiled, form, waits):
    """Two consumers, and the producer before it reads the clock for the chunks it waits for."""
    assert compiled[form].error is None
    ptx = compiled[form].ptx
    assert ptx.count("griddepcontrol.wait;") == waits
    assert ptx.count("griddepcontrol.launch_dependents;") == 1
    before = ptx[: ptx.index("griddepcontrol.wait;")]
    touched = r"\b(?:ld|st|atom|red)\.(?:\w+\.)*global|cp\.async\.bulk\.tensor|globaltimer"
    assert re.findall(touched, before) == []
    assert compiled[form].launch.pdl
