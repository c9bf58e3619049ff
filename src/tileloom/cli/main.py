"""Parse the command line and run one subcommand.

A subcommand `name` is the module `tileloom.cli.<name>` with `add_parser(subparsers) -> None` and
`run(args) -> int`. Only the one that is asked for is imported, so `tileloom --help` loads neither
torch nor Triton.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import io
import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from tileloom import __version__, knobs, log
from tileloom.errors import (
    ArgumentError,
    ConfigError,
    OptionError,
    ShapeError,
    TileloomError,
    UnknownOptionError,
)

WRONG_ARGUMENT = (
    OptionError, UnknownOptionError, ArgumentError, ConfigError, ShapeError, knobs.KnobError,
    log.LoggerError,
)  # fmt: skip
"""Errors that say that the command line, or a setting, is wrong: nothing was found yet."""

COMMANDS = {
    "demo": "run the main job on real text: embeddings, a search, a report",
    "doctor": "what works on this machine, and why not",
    "inspect": "compile the kernels with no GPU and show what they cost",
    "bundle": "build, show and verify files of compiled kernels",
    "cache": "list, show, verify, clear and export the winners of tuned kernels",
    "bench": "time an operator beside its peers",
    "explain": "print and draw which block works on which tile of a matrix product",
    "check": "run a kernel in the emulator and look for races",
}


_STATUS = (
    "Exit status: 0 if all is well, 1 if a fault was found or something failed, 2 for a wrong "
    "argument or setting."
)


class Parser(argparse.ArgumentParser):
    """A parser that tells of an unknown argument itself: it knows the command's own options.

    Parsers of commands and of their actions are of this class, too.
    """

    def __init__(self, *, epilog: str = _STATUS, example: str = "", **options: Any) -> None:
        super().__init__(epilog=epilog, **options)
        self.example = example

    def error(self, message: str) -> NoReturn:
        """Tell of a wrong argument, and of an example where one is missing; end the process."""
        is_missing = message.startswith("the following arguments are required")
        super().error(f"{message}. Try: {self.example}" if is_missing and self.example else message)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]: it has overloads
        self, args: Any = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse; end the process with status 2 where something is left over."""
        found, left = super().parse_known_args(args, namespace)
        if left:
            unknown = next((text for text in left if text.startswith("-")), left[0])
            self.error(self._unknown(unknown.partition("=")[0]))
        return found, left

    def _unknown(self, text: str) -> str:
        if not text.startswith("-"):
            hint = " Try: all arguments before the options." if "..." in self.format_usage() else ""
            return f"there is no place for an argument '{text}'.{hint}"
        known = re.findall(r"(?<![\w-])--?[a-z][\w-]*", self.format_usage())
        near = difflib.get_close_matches(text, known, n=1)
        hint = f"Did you mean '{near[0]}'?" if near else f"Options: {', '.join(known)}."
        return f"there is no option '{text}'. {hint}"


def _is_there(command: str) -> bool:
    return importlib.util.find_spec(f"tileloom.cli.{command}") is not None


def _parser(command: str | None) -> argparse.ArgumentParser:
    """Build the parser: the chosen command with all its options, the others as names only."""
    parser = Parser(
        prog="tileloom",
        description="GPU kernels for PyTorch on NVIDIA Hopper, and the tools around them.",
        epilog=f"`tileloom COMMAND --help` shows a command's options. {_STATUS}",
    )
    parser.add_argument("--version", action="version", version=f"tileloom {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, text in COMMANDS.items():
        if name == command:
            importlib.import_module(f"tileloom.cli.{name}").add_parser(subparsers)
        elif _is_there(name):
            subparsers.add_parser(name, help=text)
    return parser


def _complain(text: object) -> None:
    print(f"tileloom: {text}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `tileloom`.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit status: 0 if all is well, 1 after an error or where the command found a fault, 2
        for a wrong argument or setting (`WRONG_ARGUMENT`), 130 after Ctrl-C, 141 when the reader
        of a pipe went away.
    """
    for stream in (sys.stdout, sys.stderr):
        # A file's name need not be UTF-8, and a stream need not take every letter.
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = next((a for a in arguments if not a.startswith("-")), None)
    if command is not None and not (command in COMMANDS and _is_there(command)):
        known = [name for name in COMMANDS if _is_there(name)]
        near = difflib.get_close_matches(command, known, n=1)
        hint = f"Did you mean '{near[0]}'?" if near else f"Commands: {', '.join(known)}."
        _complain(f"there is no command '{command}'. {hint}")
        return 2
    try:
        return _run(command, arguments)
    except (TileloomError, knobs.KnobError, log.LoggerError) as error:
        _complain(error)
        return 2 if isinstance(error, WRONG_ARGUMENT) else 1
    except KeyboardInterrupt:
        _complain("interrupted")
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # What is still buffered can go nowhere; without this the interpreter fails again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _run(command: str | None, arguments: list[str]) -> int:
    parser = _parser(command)
    args = parser.parse_args(arguments)
    if command is None:
        parser.print_help()
        status = 0
    else:
        if command != "doctor":  # which lists wrong settings itself
            log.configure(knobs.get("log.levels"))
        status = int(importlib.import_module(f"tileloom.cli.{command}").run(args))
    sys.stdout.flush()
    return status
