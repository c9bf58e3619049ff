"""What every test has: one thread a worker, one seed, GPU tests skipped, a line to repeat it."""

from __future__ import annotations

import os
import shlex

import pytest
import torch

from tileloom.testing import AccuracyError

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU; PyTorch sees none here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def same_seed():
    """Dropout draws the same mask whichever tests ran before, alone or under xdist."""
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.excinfo is not None and call.excinfo.errisinstance(AccuracyError):
        report.sections.append(("repeat it with", f"pytest {shlex.quote(item.nodeid)}"))
    return report
