"""The child's side of `tileloom.launch.workers`: one job in, one answer out."""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import threading
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tileloom.errors import TileloomError
from tileloom.launch import compat
from tileloom.launch.aot import compile_aot


def _die_with_parent(pipe: int) -> None:
    """Kill this process and the tools it started as soon as the parent's end of the pipe closes.

    A parent that is killed cannot clean up, and a hung assembler would outlive it for ever.
    """
    poll = select.poll()
    poll.register(pipe, 0)  # of no event but the hang-up, which is always told
    poll.poll()
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main(settings: dict[str, Any]) -> None:
    """Answer jobs until the parent closes the pipe.

    Args:
        settings: ``pipe``, the number of the open file to talk over, and ``cache_dir``.
    """
    # The number itself stays open until the process ends, so that the parent, which takes a closed
    # pipe for a death, then finds the exit status. No tool that is started here inherits it.
    os.set_inheritable(settings["pipe"], False)
    threading.Thread(target=_die_with_parent, args=(settings["pipe"],), daemon=True).start()
    pipe = Connection(os.dup(settings["pipe"]))
    warnings.simplefilter("ignore")
    compat.triton_version()  # import it now, before any job's time runs
    pipe.send_bytes(pickle.dumps("ready"))
    while True:
        try:
            spec, arch = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        except Exception:
            answer: object = "compile: the job cannot be read.\n" + traceback.format_exc()
        else:
            try:
                answer = compile_aot(spec, arch, cache_dir=Path(settings["cache_dir"]))
            except TileloomError as error:
                answer = str(error)
            except Exception:
                answer = (
                    f"compile: kernel '{spec.name}' for {arch} met an error in tileloom itself.\n"
                    + traceback.format_exc()
                )
        sys.stdout.flush()
        sys.stderr.flush()
        pipe.send_bytes(pickle.dumps(answer))
