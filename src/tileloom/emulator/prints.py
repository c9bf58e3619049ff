"""What a checked file prints: its first run's, and of the others only what differs.

A file is run once for each setting, and mostly prints the same each time. So its process writes to
a pipe, with a mark where a run begins and where it ends; what it prints in its first run, or
between runs, is passed on at once. The marks travel in the pipe itself, since nothing else says
where in the text a run begins.
"""

from __future__ import annotations

import codecs
import difflib
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType

from tileloom.emulator.findings import Setting

_LIMIT = 1 << 20  # bytes of a run that are kept, its last
_LINES = 2000  # of two texts, beyond which they are not compared line by line
_PATIENCE_S = 2.0  # for processes that the file started and left behind, which hold the pipe


@dataclass(frozen=True)
class Turn:
    """Said where a run of the file begins, and where it has ended: whether it failed.

    The first begins a second time behind the file's import, whose text is that of no run.
    """

    has_failed: bool | None = None


def mark(turn: Turn, nonce: str) -> None:
    """Write a mark to the pipe, which stdout and stderr of this process are."""
    sys.stdout.flush()
    sys.stderr.flush()
    word = {None: "begin", False: "end", True: "failed"}[turn.has_failed]
    os.write(1, f"\x1e{nonce} {word}\x1e".encode())


def to_stderr(text: str) -> None:
    """Show a text on stderr."""
    sys.stderr.write(text)
    sys.stderr.flush()


class Prints:
    """Reads what a file prints in another process and shows it, in a `with` block.

    Attributes:
        nonce: What makes the marks different from what a file may print.
        pipe: Where the process writes to; close it here when the process has it.
    """

    def __init__(self, ways: Sequence[Setting], show: Callable[[str], None] | None) -> None:
        """Make the pipe.

        Args:
            ways: How the file is run, in order.
            show: Shows a text; None shows nothing.
        """
        self.nonce = os.urandom(8).hex()
        self._reading, writing = os.pipe()
        self.pipe = Connection(writing, readable=False)
        self._show = show
        self._runs = _Runs(ways, self._say)
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Prints:
        """Begin to read."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        """Wait for the rest of the text: the process has ended."""
        self.pipe.close()
        self._thread.join(_PATIENCE_S)

    def _say(self, text: str) -> None:
        if self._show is not None and text:
            try:
                self._show(text)
            except (OSError, ValueError):  # nobody reads any more; the file must not wait for it
                self._show = None

    def _read(self) -> None:
        marks = re.compile(rb"\x1e" + self.nonce.encode() + rb" (begin|end|failed)\x1e")
        held = b""
        while chunk := os.read(self._reading, 1 << 16):
            *whole, held = marks.split(held + chunk)
            for text, word in zip(whole[::2], whole[1::2], strict=True):
                self._runs.take(text)
                self._runs.turn(word.decode())
            at = held.rfind(b"\x1e")  # may be half a mark
            at = at if at >= 0 and len(held) - at < 64 else len(held)
            self._runs.take(held[:at])
            held = held[at:]
        self._runs.take(held)
        self._runs.end()
        os.close(self._reading)


class _Runs:
    """Decides what to show of a text that consists of runs."""

    def __init__(self, ways: Sequence[Setting], say: Callable[[str], None]) -> None:
        self._ways = ways
        self._say = say
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._number = -1
        self._is_inside = False
        self._kept = bytearray()
        self._first = b""
        self._seen: set[bytes] = set()
        self._seen_failing: set[bytes] = set()

    def take(self, text: bytes) -> None:
        """Pass on a text, or keep it until its run has ended."""
        if self._is_inside:
            self._kept += text
            del self._kept[:-_LIMIT]
        if not self._is_inside or self._number == 0:
            self._say(self._decoder.decode(text))

    def turn(self, word: str) -> None:
        """Begin a run, or end it."""
        if word != "begin":
            return self.end(has_failed=word == "failed")
        if not self._is_inside:
            self._number += 1
            self._is_inside = True
        if self._number == 0:
            self._kept.clear()
        return None

    def end(self, *, has_failed: bool = True) -> None:
        """End a run: show it if it is no first one, and like none before."""
        if not self._is_inside:
            return
        text = bytes(self._kept)
        self._kept.clear()
        self._is_inside = False
        if self._number == 0:
            self._first = text
        else:
            way = self._ways[self._number].text()
            if has_failed and text not in self._seen_failing:
                self._say(f"[{way}: this run failed, and printed]\n{_shown(text)}" if text else "")
            elif not has_failed and text not in self._seen:
                self._say(f"[{way}: differs from the first run]\n{_differences(self._first, text)}")
        (self._seen_failing if has_failed else self._seen).add(text)


def _shown(text: bytes) -> str:
    shown = text.decode(errors="replace")
    return shown if shown.endswith("\n") or not shown else f"{shown}\n"


def _differences(first: bytes, text: bytes) -> str:
    """Return the lines that are missing (-) and new (+), or the whole if it is long."""
    old, new = _shown(first).splitlines(), _shown(text).splitlines()
    if max(len(old), len(new)) > _LINES:
        return _shown(text)
    lines = list(difflib.unified_diff(old, new, n=0, lineterm=""))[2:]
    return "".join(f"{line}\n" for line in lines if not line.startswith("@@"))
