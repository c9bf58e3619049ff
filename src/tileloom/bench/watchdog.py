"""Ends the process when a kernel hangs: device time is too dear to wait for one."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Generator

EXIT_CODE = 124


def end_process(text: str) -> None:
    """Print a text and end the process at once, whatever its other threads wait for.

    Args:
        text: Goes to stderr.
    """
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)


class Watchdog:
    """Waits for each step of a run to end in time; if one does not, it says which and exits.

    A thread of its own can do so, because waiting for a device releases the interpreter.
    """

    def __init__(
        self,
        limit_s: float,
        *,
        on_expiry: Callable[[str], None] = end_process,
        every_s: float = 0.5,
    ) -> None:
        """Make a watchdog; it watches from `running` on.

        Args:
            limit_s: The longest that one step may take, in seconds.
            on_expiry: Told which step it was; the default ends the process with status 124, as
                `timeout` does.
            every_s: How often it looks.
        """
        self._limit = limit_s
        self._on_expiry = on_expiry
        self._every = every_s
        self._what = ""
        self._since = 0.0
        self._over = threading.Event()

    @property
    def what(self) -> str:
        """The step that runs, or ran last."""
        return self._what

    def step(self, what: str) -> None:
        """Say what begins now; the step before has ended."""
        self._what, self._since = what, time.monotonic()

    def _watch(self) -> None:
        while not self._over.wait(self._every):
            if time.monotonic() - self._since > self._limit:
                self._on_expiry(
                    f"bench: no answer for {self._limit:g} s from this step: {self._what}. A "
                    "kernel may hang. The cells before it are kept. Try: --step-limit, if it is "
                    "only slow."
                )
                return

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """Watch inside a `with` block."""
        self._over.clear()
        self.step("start")
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()
