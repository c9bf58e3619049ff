"""Running a function in a process of its own: an abort, a crash or a hang there is an answer here.

A compiler that meets a layout it does not expect may abort the process it runs in, with no
exception to catch. So whoever plays files of others does it in a child.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection
from typing import Any

from tileloom.emulator.report import EmulatorError
from tileloom.errors import OptionError

# Imported once in the server that children are forked from, so that each starts at once.
_PRELOADED = ("tileloom.emulator.preload",)


class ChildDied(Exception):
    """The process ended before its function did; the message says how, as the end of a sentence."""


def _serve(
    pipe: Connection, prints: Connection | None, function: Callable[..., None], arguments: Any
) -> None:
    """Run in the child: send what the function says, then its end or its exception."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_die_with_parent, daemon=True).start()
    if prints is not None:
        os.dup2(prints.fileno(), 2)
        prints.close()  # nothing else keeps it open
    os.dup2(2, 1)  # what the file prints is no answer of ours
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # nobody flushes it after a death
    try:
        function(lambda answer: pipe.send(("answer", answer)), *arguments)
        pipe.send(("end", None))
    except (EmulatorError, OptionError) as error:
        pipe.send(("raise", error))
    except Exception:
        pipe.send(("fault", traceback.format_exc()))


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def answers(
    function: Callable[..., None], *arguments: Any, timeout_s: float,
    prints: Connection | None = None,
) -> Generator[Any]:  # fmt: skip
    """Iterate over what a function says in another process.

    The child reads no input. It is killed when the iteration is given up.

    Args:
        function: Called with another function, ``say(answer)``, and the arguments. All of them
            can be pickled.
        *arguments: What it gets.
        timeout_s: Seconds that may pass between two answers.
        prints: Where the child's stdout and stderr go, closed here; default: stderr.

    Yields:
        Its answers.

    Raises:
        ChildDied: If the process died or took too long.
        EmulatorError: What the function raised.
        OptionError: What the function raised.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    mine, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_serve, args=(theirs, prints, function, arguments))
    child.start()
    theirs.close()
    if prints is not None:
        prints.close()
    try:
        while True:
            if not mine.poll(timeout_s):
                raise ChildDied(f"took longer than {timeout_s:g} s and was killed")
            try:
                kind, answer = mine.recv()
            except EOFError:
                child.join()
                raise ChildDied(_death(child.exitcode or 0)) from None
            if kind == "end":
                return
            if kind == "raise":
                raise answer
            if kind == "fault":
                raise RuntimeError(f"the child of the emulator failed:\n{answer}")
            yield answer
    finally:
        child.kill()
        child.join()
        mine.close()


def _death(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"died of {signal.Signals(-status).name}"
    return f"ended with exit status {abs(status)}"
