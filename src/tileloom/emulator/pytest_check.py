"""Running a pytest file inside a check; pytest must be installed."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path

import pytest

from tileloom.emulator.report import LaunchError, NoTestError
from tileloom.emulator.session import Run

_NO_TEST = (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED)

Take = Callable[[str], None]
"""Called with a test's name when it has ended."""


class _Tests:
    """A pytest plugin that says when a test has ended.

    It takes the place of `pytest_plugin`, for a file that uses that one: the check has chosen the
    schedule and level already, so the fixture gives the check's run, and the marker says nothing.
    """

    def __init__(self, session: Run, take: Take) -> None:
        self.session = session
        self.take = take

    @pytest.fixture
    def emulated(self) -> Run:
        """The run that the test is in."""
        return self.session

    def pytest_configure(self, config: pytest.Config) -> None:
        """Make the marker known."""
        config.addinivalue_line("markers", "emulate: how pytest alone would run the test")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Hear of a test's end from pytest."""
        self.take(nodeid.partition("::")[2])  # the next test's run has no reports, as under pytest


def run_pytest(path: Path, case: str | None, session: Run, take: Take) -> None:
    """Run a pytest file, or one test of it, up to the first test that fails.

    Args:
        path: The file.
        case: The test's node id without the file, None for all.
        session: The run that the tests' kernels are in.
        take: Called with a test's node id when it has ended.

    Raises:
        NoTestError: If there is no such test, or no test at all.
        LaunchError: If pytest could not run it for another reason.
        AssertionError: If a test failed.
    """
    captured = io.StringIO()
    target = f"{path}::{case}" if case else str(path)
    # Imported afresh: a copy of a file that was damaged has the file's own name.
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--import-mode=importlib"]
    options += ["-p", "no:tileloom.emulator.pytest_plugin"]
    with contextlib.redirect_stdout(captured), contextlib.redirect_stderr(captured):
        status = pytest.main([target, *options], plugins=[_Tests(session, take)])
    if status not in (0, 1):
        kind = NoTestError if status in _NO_TEST else LaunchError
        raise kind(f"emulator: pytest could not run {target}:\n{captured.getvalue()[-2000:]}")
    if status == 1:
        raise AssertionError(captured.getvalue()[-4000:])
