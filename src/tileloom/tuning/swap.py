"""Changes the imports of a module written by `torch.compile`, so that it is tuned by tileloom.

    python -m tileloom.tuning.swap module.py > swapped.py

Only imports change, those inside the source strings given to async compile included: a kernel's
decorators, hints and helpers then come from here. Everything else stays as it is. The module is
text until its owner runs it: nothing of it is executed.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tileloom.errors import OptionError
from tileloom.tuning import generated, hints

_RUNTIME = "torch._inductor.runtime"
_HEURISTICS = f"{_RUNTIME}.triton_heuristics"
_HINTS = f"{_RUNTIME}.hints"

_IMPORT = re.compile(
    rf"^(?P<indent>[ \t]*)(?:from (?P<module>{re.escape(_RUNTIME)}[.\w]*) import (?P<names>[^\n#]*)"
    rf"|import (?P<whole>{re.escape(_RUNTIME)}[.\w]*)(?: as (?P<alias>\w+))?[ \t]*$)",
    re.MULTILINE,
)


def swapped(source: str) -> str:
    """Return a generated module's source with its imports changed.

    Args:
        source: The module's text.

    Returns:
        The text, of as many lines, which imports tileloom where it imported Inductor's heuristics.

    Raises:
        OptionError: If the module does not import them, or asks for a name that is not there.
    """
    found = 0

    def change(match: re.Match[str]) -> str:
        nonlocal found
        line = source.count("\n", 0, match.start()) + 1
        new = _changed(match, line)
        found += new != match[0]
        return new

    text = _IMPORT.sub(change, source)
    if not found:
        raise OptionError(
            f"swap: the module imports nothing of {_HEURISTICS}; it must be one that torch.compile "
            "wrote. Try: the output_code.py that TORCH_COMPILE_DEBUG=1 leaves."
        )
    ast.parse(text)
    return text


def _changed(match: re.Match[str], line: int) -> str:
    indent = match["indent"]
    if match["whole"]:
        target = {_HEURISTICS: generated.__name__, _HINTS: hints.__name__}.get(match["whole"])
        if target is None:
            return match[0]
        if not match["alias"]:
            raise OptionError(
                f"swap: line {line} imports {match['whole']} under its whole name, which its uses "
                "repeat. Try: `import ... as triton_heuristics`, and that name where it is used."
            )
        return f"{indent}import {target} as {match['alias']}"
    module, names = match["module"], [n.strip() for n in match["names"].strip("() ").split(",")]
    names = [name for name in names if name]
    if module == _HEURISTICS:
        _check(names, dir(generated), line)
        return f"{indent}from {generated.__name__} import {', '.join(names)}"
    if module == _HINTS:
        _check(names, dir(hints), line)
        return f"{indent}from {hints.__name__} import {', '.join(names)}"
    if module != _RUNTIME:
        return match[0]
    ours = {"triton_heuristics": generated.__name__, "hints": hints.__name__}
    lines: list[str] = []
    rest: list[str] = []
    for name in names:
        imported, _, alias = name.partition(" as ")
        target = ours.get(imported)
        if target is None:
            rest.append(name)
        else:
            lines.append(f"import {target} as {alias or imported}")
    if rest:
        lines.insert(0, f"from {module} import {', '.join(rest)}")
    return indent + "; ".join(lines)


def _check(names: Sequence[str], known: Sequence[str], line: int) -> None:
    missing = [name for name in (n.partition(" as ")[0] for n in names) if name not in known]
    if missing:
        raise OptionError(
            f"swap: line {line} imports {', '.join(missing)}, which tileloom does not have. "
            "Try: a module of torch 2.11 to 2.13, written without the C++ wrapper."
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Read a module, and write it with its imports changed."""
    parser = argparse.ArgumentParser(
        prog="python -m tileloom.tuning.swap",
        description="Change the imports of a module written by torch.compile; run nothing of it.",
    )
    parser.add_argument("module", type=Path, help="the module, such as output_code.py")
    parser.add_argument("-o", "--output", type=Path, help="where to write it; default: stdout")
    given = parser.parse_args(arguments)
    try:
        text = swapped(given.module.read_text())
    except OSError as error:
        parser.error(f"{given.module} cannot be read: {error.strerror}")
    except (OptionError, SyntaxError) as error:
        parser.error(str(error))
    if given.output is None:
        sys.stdout.write(text)
    else:
        given.output.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
