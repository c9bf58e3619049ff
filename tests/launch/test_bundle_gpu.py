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

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

_ROOT = Path(__file__).parents[2]
_ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT / "src"), str(_ROOT)])}


def _python(*arguments, **more):
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
    _python(*build, "--from", "tests.launch.bundle_samples:for_gpu")
    return path


@pytest.mark.parametrize("what", ["add", "scalars", "scratch", "attention", "graph"])
def test_kernels_of_a_bundle_without_triton(bundle, what):
    _python("-m", "tests.launch.bundle_child", str(bundle), what)


def test_verify_loads_all_that_is_for_this_gpu(bundle):
    out = _python("-m", "tileloom", "bundle", "verify", str(bundle))
    assert "ok: 8 of 8 kernels are what was written" in out
    assert "note: older for sm_80 is not for this GPU" in out
    assert "ok: 7 kernels load on this GPU" in out
