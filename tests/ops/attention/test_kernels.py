"""What the portable kernel compiles to, with no GPU: what its budget test does not look at."""

from __future__ import annotations

import re

import pytest

from tileloom.launch.aot import compile_in_workers
from tileloom.ops.attention.kernels import PROVED_32BIT, shipped

_PORTABLE = [spec for spec in shipped() if spec.name.startswith("attention_fwd_triton")]


@pytest.mark.timeout(900)
def test_float32_products_are_ieee_on_every_architecture():
    """Never TF32, which Triton 3.7.1 takes on sm_100 by itself for 64 rows and more."""
    specs = [s for s in _PORTABLE if re.search(r"\[d(64|512)-.*fp32", s.name)]
    specs += [s for s in shipped() if re.match(r"attention_(dkv|dq)_triton\[d64-.*fp32", s.name)]
    pairs = [(spec, arch) for spec in specs for arch in spec.archs if arch != "sm_80"]
    assert {arch for _, arch in pairs} == {"sm_90", "sm_100"}
    for result in compile_in_workers(pairs, timeout_s=400):
        assert result.error is None, result.error
        assert "tf32" not in result.ptx, f"{result.name} on {result.arch}"
        assert "fma.rn.f32" in result.ptx


def test_every_architecture_ships_every_form():
    by_form: dict[str, set[str]] = {}
    for spec in _PORTABLE:
        form = re.sub(r"-\d+x\d+-w\d+-s\d+\]$", "]", spec.name)
        by_form.setdefault(form, set()).update(spec.archs)
    assert all(archs == {"sm_80", "sm_90", "sm_100"} for archs in by_form.values())
    assert len(by_form) > 10


def test_no_portable_kernel_claims_a_32_bit_offset():
    assert not any("triton" in name for name in PROVED_32BIT)
