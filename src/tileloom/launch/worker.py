"""The child's side of `tileloom.launch.workers`: one job in, one answer out."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tileloom.errors import TileloomError
from tileloom.launch import compat
from tileloom.launch.aot import compile_aot


def main(settings: dict[str, Any]) -> None:
    """Answer jobs until the parent closes the pipe.

    Args:
        settings: ``pipe``, the number of the open file to talk over, and ``cache_dir``.
    """
    # The number itself stays open until the process ends, so that the parent, which takes a closed
    # pipe for a death, then finds the exit status. No tool that is started here inherits it.
    os.set_inheritable(settings["pipe"], False)
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
