"""Launchers take their kernels from a bundle, or refuse to compile: all up to the driver's call."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.launch.versions import OTHERS, triton_folder

_ROOT = Path(__file__).parents[2]
_NAMES = (
    "no_bundle_and_no_compiler",
    "a_kernel_of_the_bundle_is_launched",
    "it_is_given_what_a_compiled_one_is_given",
    "alignment_chooses_the_kernel",
    "what_is_not_there_is_compiled_where_that_is_allowed",
    "descriptors",
    "scratch_memory",
    "hooks_want_tritons_own_path",
    "the_plain_tier_is_tritons_own_path",
    "another_source_is_another_kernel",
    "the_bundle_of_the_environment",
    "using_a_bundle_makes_launchers_look_again",
    "what_a_program_launches_can_be_recorded_and_bundled",
    "a_recording_of_nothing_warns",
    "a_damaged_bundle_is_said",
    "the_key_of_a_launch_is_the_key_of_a_spec",
)


@pytest.fixture(scope="module")
def outcomes(small_bundle, tmp_path_factory):
    """A function from a version of Triton to what happened in a process with it."""
    known = {}

    def run(version):
        folder = tmp_path_factory.mktemp("fake")
        path = [str(_ROOT / "src"), str(_ROOT)]
        if version != "own":
            if triton_folder(version) is None:
                pytest.skip(f"Triton {version} is not in .triton-versions")
            path.insert(0, str(triton_folder(version)))
        done = subprocess.run(
            [sys.executable, "-m", "tests.launch.bundle_use_child", small_bundle, folder],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def of(version):
        if version not in known:
            known[version] = run(version)
        return known[version]

    return of


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize(
    "version", ["own", *(pytest.param(version, marks=pytest.mark.full) for version in OTHERS)]
)
def test_with_a_fake_driver(outcomes, version, name):
    found = outcomes(version)
    assert set(found) == set(_NAMES)
    assert found[name] == "", found[name]
