"""The compile pass over the shipped kernels, once for a whole test run."""

import functools

import pytest
from tests.launch import bundle_samples

from tileloom.launch.bundle_build import build_bundle


@pytest.fixture(scope="session")
def shipped_results(request, tmp_path_factory):
    """A function: `shipped_results(version)` gives the results by (name, arch)."""
    # Here, so that a mistake in an operator's list of kernels fails only the tests that need it.
    from tests.launch import shipped

    base = tmp_path_factory.getbasetemp()
    # Under xdist each process has a folder of its own, in one folder for the run.
    shared = base.parent if hasattr(request.config, "workerinput") else base
    kept = getattr(request.config, "cache", None)
    cache = kept.mkdir("triton") if kept is not None else shared / "triton"

    @functools.cache
    def results(version, full=False):
        return shipped.compile_once(version, full=full, shared=shared, cache=cache)

    return results


@pytest.fixture(scope="session")
def small_bundle(tmp_path_factory):
    """The bundle of `bundle_samples.SMALL`, which takes a few seconds to build."""
    path = tmp_path_factory.mktemp("bundle") / "small.bundle"
    build_bundle(path, bundle_samples.SMALL, workers=2)
    return path
