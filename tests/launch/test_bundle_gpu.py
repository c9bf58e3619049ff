"""A bundle on a real GPU, in processes in which Triton cannot be imported.

`TILELOOM_TEST_BUNDLE` names a bundle that was built elsewhere, on a machine without a GPU and with
another Triton; without it, one is built here. It is built by

    tileloom bundle build FILE --from tests.launch.bundle_samples:for_gpu
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.launch.bundle_samples import for_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

_ROOT = Path(__file__).parents[2]
_ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT / "src"), str(_ROOT)])}


def python(*arguments, **more):
    done = subprocess.run(
        [sys.executable, *arguments],
        env=_ENVIRONMENT | more,
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    if given := os.environ.get("TILELOOM_TEST_BUNDLE"):
        return Path(given).resolve()
    path = tmp_path_factory.mktemp("bundle") / "gpu.bundle"
    build = ["-m", "tileloom", "bundle", "build", str(path)]
    python(*build, "--from", "tests.launch.bundle_samples:for_gpu")
    return path


@pytest.mark.parametrize("what", ["add", "scalars", "scratch", "attention", "graph"])
def test_kernels_of_a_bundle_without_triton(bundle, what):
    python("-m", "tests.launch.bundle_child", str(bundle), what)


def test_verify_loads_all_that_is_for_this_gpu(bundle):
    out = python("-m", "tileloom", "bundle", "verify", str(bundle))
    count = len(for_gpu())
    assert f"ok: {count} of {count} kernels are what was written" in out
    assert "note: older for sm_80 is not for this GPU" in out
    assert f"ok: {count - 1} kernels load on this GPU" in out


@pytest.mark.parametrize("what", ["rms_norm", "softmax", "attention"])
def test_operators_find_their_kernels_in_it(bundle, what):
    """Compiling is forbidden in that process, which prints how long the first calls took."""
    used = {"TILELOOM_BUNDLE": str(bundle), "TILELOOM_JIT": "forbid"}
    print(python("-m", "tests.launch.bundle_ops_child", what, **used))


@pytest.mark.parametrize("what", ["attention", "training"])
def test_a_program_recorded_in_one_process_compiles_nothing_in_the_next(tmp_path, what):
    path = str(tmp_path / "recorded.bundle")
    print(python("-m", "tests.launch.bundle_ops_child", what, path))
    used = {"TILELOOM_BUNDLE": path, "TILELOOM_JIT": "forbid"}
    print(python("-m", "tests.launch.bundle_ops_child", what, **used))
