"""The command `tileloom`: one module for each subcommand, loaded only when it is asked for."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

PIPED_COLUMNS = 200


def console(*, to_stderr: bool = False) -> Console:
    """Return a console for tables and colours.

    Into a file or a pipe it writes no colours, and lines of 200 columns, so that no table is cut
    to the width of a terminal that nobody looks at.

    Args:
        to_stderr: Write to stderr: for progress, which must not end up in a pipe.
    """
    from rich.console import Console

    stream = sys.stderr if to_stderr else sys.stdout
    width = None if stream.isatty() else PIPED_COLUMNS
    return Console(file=stream, width=width, highlight=False)
