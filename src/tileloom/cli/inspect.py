"""`tileloom inspect`: compile kernels with no GPU, and show what they cost and what they became."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import importlib.util
import json
import pkgutil
import re
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tileloom.cli import console
from tileloom.errors import OptionError

if TYPE_CHECKING:
    from rich.table import Table

    from tileloom.launch.aot import CompiledKernel, CompileResult, KernelSpec

OPERATORS = {
    "attention": ("attention", "attention_varlen"),
    "matmul": ("matmul", "async_input_matmul", "gemm"),
    "norm": ("rms_norm", "layer_norm"),
    "softmax": ("softmax",),
    "cross_entropy": ("cross_entropy",),
    "swiglu": ("swiglu",),
}
"""Operators by the beginning of their kernels' names; `gemm` is what `tileloom bench` says."""

TEXTS = ("ttir", "ttgir", "ptx", "sass")


SECONDS_BETWEEN_LINES = 30.0

KERNEL_HELP = (
    "a kernel's name, the part before its '[', an operator such as rms_norm, or a pattern with *; "
    "default: all, hundreds that take seconds each; --list says which"
)
LIST_HELP = "print the kernels' names and compile nothing"
WORKERS_HELP = "compiling processes; default: one for each core"
TIMEOUT_HELP = "seconds for one kernel; default: 120"


def add_parser(subparsers: Any) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "inspect",
        help="compile the kernels with no GPU and show what they cost",
        description=(
            "Compile kernels of the package for the architectures they ship for, in child "
            "processes, with no GPU, and show registers, spills, shared memory, occupancy and "
            "compile time. Exit status 1 if a kernel breaks its budget; see docs/inspect.md."
        ),
    )
    parser.add_argument(
        "kernel",
        nargs="*",
        default=[],
        metavar="KERNEL",
        help=KERNEL_HELP,
    )
    parser.add_argument(
        "--arch",
        action="append",
        metavar="ARCH",
        help="only this architecture, such as sm_90 (the same as sm_90a); may be repeated",
    )
    parser.add_argument(
        "--triton",
        type=Path,
        metavar="PATH",
        help="folder with another Triton (from pip install --target) to compile with",
    )
    parser.add_argument("--list", action="store_true", help=LIST_HELP)
    parser.add_argument("--json", action="store_true", help="write JSON instead of a table")
    for name in TEXTS:
        parser.add_argument(f"--{name}", action="store_true", help=f"write the kernel's {name}")
    parser.add_argument("--workers", type=int, metavar="N", help=WORKERS_HELP)
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help=TIMEOUT_HELP)


def shipped_specs() -> dict[str, KernelSpec]:
    """Collect every shipped config of every operator.

    Returns:
        Specs by name, in the order of the operators' packages.

    Raises:
        OptionError: If two specs have the same name.
    """
    import tileloom.ops

    specs: dict[str, KernelSpec] = {}
    for package in pkgutil.iter_modules(tileloom.ops.__path__, "tileloom.ops."):
        name = f"{package.name}.kernels"
        if not package.ispkg or importlib.util.find_spec(name) is None:
            continue
        for spec in importlib.import_module(name).shipped():
            if spec.name in specs:
                raise OptionError(f"inspect: two shipped kernels have the name '{spec.name}'.")
            specs[spec.name] = spec
    return specs


def family(name: str) -> str:
    """Return the part of a kernel's name before its ``[config]``."""
    return name.partition("[")[0]


def _names(name: str) -> tuple[str, ...]:
    """What a kernel may be asked for by: its name, the part before the bracket, its operators."""
    found = [ops for start, ops in OPERATORS.items() if name.startswith(f"{start}_")]
    return (name, family(name), *(op for ops in found for op in ops))


class NoSuchKernelError(OptionError):
    """A name on the command line fits no kernel."""


def select(
    specs: Mapping[str, KernelSpec], wanted: Sequence[str], command: str = "inspect"
) -> list[KernelSpec]:
    """Pick kernels by name, the part before the bracket, operator, or a pattern with ``*``.

    Args:
        specs: All kernels by name.
        wanted: What to pick; nothing picks all.
        command: Who asks, for the error.

    Returns:
        The specs, each once, in the order of `specs`.

    Raises:
        NoSuchKernelError: If one of `wanted` fits none; the text has the nearest name.
    """
    chosen: set[str] = set()
    for text in wanted:
        pattern = re.compile(".*".join(map(re.escape, text.split("*"))))
        fits = [n for n in specs if any(map(pattern.fullmatch, _names(n)))]
        if not fits:
            families = list(dict.fromkeys(map(family, specs)))
            known = dict.fromkeys(name for n in specs for name in _names(n))
            near = difflib.get_close_matches(text, [*families, *known], n=1)
            hint = f"Did you mean '{near[0]}'?" if near else f"Kernels: {', '.join(families)}."
            raise NoSuchKernelError(f"{command}: there is no kernel '{text}'. {hint}")
        chosen.update(fits)
    return [spec for name, spec in specs.items() if not wanted or name in chosen]


def pairs_of(
    specs: Sequence[KernelSpec], archs: Sequence[str] | None, command: str = "inspect"
) -> list[tuple[KernelSpec, str]]:
    """Pair kernels with the architectures they ship for.

    Args:
        specs: The kernels.
        archs: Keep only these; None keeps all.
        command: Who asks, for the error.

    Raises:
        OptionError: If an architecture is unknown, or none of the kernels ships for any of them.
    """
    from tileloom.launch.occupancy import normal_arch

    only = None if not archs else {normal_arch(arch) for arch in archs}
    pairs = [(s, a) for s in specs for a in s.archs if only is None or normal_arch(a) in only]
    if not pairs and only is not None:
        there = ", ".join(sorted({a for s in specs for a in s.archs})) or "nothing"
        raise OptionError(
            f"{command}: --arch is {', '.join(sorted(only))}; the kernels asked for ship for "
            f"{there}. Try: no --arch, which takes all of them."
        )
    return pairs


def table(pairs: Sequence[tuple[KernelSpec, str]], results: Sequence[CompileResult]) -> Table:
    """Lay out compile results as a table for the terminal; see `notes` for what is wrong.

    Args:
        pairs: Kernels and architectures, those of a kernel next to each other.
        results: What became of each pair.

    Returns:
        One row for each pair, under the name of its family.
    """
    from rich.markup import escape
    from rich.table import Table

    from tileloom.launch.budget import faults

    versions = sorted({r.triton for r in results if r.error is None})
    made = Table(
        title=f"compiled with Triton {', '.join(versions)}" if versions else None,
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
        header_style="bold underline",
    )
    made.add_column("kernel", overflow="fold", min_width=24)
    made.add_column("arch", no_wrap=True)
    for name in ("regs", "spills", "shared", "stages", "warps", "blocks", "compile"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("verdict", no_wrap=True)
    before = None
    for (spec, arch), result in zip(pairs, results, strict=True):
        base = family(spec.name)
        has_configs = base != spec.name
        if has_configs and (before is None or family(before) != base):
            made.add_row(f"[bold]{escape(base)}[/]")
        label = f"  {escape(spec.name[len(base) :])}" if has_configs else f"[bold]{base}[/]"
        made.add_row(
            "" if spec.name == before else label,
            arch if result.error is not None else result.arch,
            *(_cells(spec, result) if result.error is None else ["-"] * 7),
            _verdict(len(faults(spec, result)), len(_warnings(result))),
        )
        before = spec.name
    return made


def _verdict(faults: int, warnings: int) -> str:
    if faults:
        return f"[red]{faults} fault{'s' if faults > 1 else ''}[/]"
    if warnings:
        return f"[yellow]{warnings} warning{'s' if warnings > 1 else ''}[/]"
    return "[green]ok[/]"


def _warnings(result: CompileResult) -> tuple[str, ...]:
    from tileloom.launch.aot import serialises_wgmma

    if result.error is not None:
        return ()
    return tuple(text for text in result.ptxas_warnings if not serialises_wgmma(text))


def notes(
    pairs: Sequence[tuple[KernelSpec, str]], results: Sequence[CompileResult]
) -> list[tuple[str, str]]:
    """Say what is behind each verdict of `table` that is not ok.

    Args:
        pairs: Kernels and architectures.
        results: What became of each pair.

    Returns:
        Pairs of ``"fault"`` or ``"warning"`` and a text that names kernel and architecture.
    """
    from tileloom.launch.budget import faults

    lines: list[tuple[str, str]] = []
    for (spec, arch), result in zip(pairs, results, strict=True):
        where = "" if result.error is not None else f"{spec.name} {arch} "
        lines += [("fault", f"{where}{text}") for text in faults(spec, result)]
        lines += [("warning", f"{where}ptxas: {text}") for text in _warnings(result)]
    return lines


def _cells(spec: KernelSpec, kernel: CompiledKernel) -> list[str]:
    budget = f"/{spec.spill_budget}" if spec.spill_budget else ""
    return [
        str(kernel.registers),
        f"{kernel.spill_bytes}{budget} B",
        f"{kernel.shared_bytes / 1024:.1f} KiB",
        "-" if kernel.stages is None else str(kernel.stages),
        str(kernel.num_warps),
        str(kernel.occupancy),
        "cached" if kernel.cached else f"{kernel.compile_s:.2f} s",
    ]


def as_json(
    pairs: Sequence[tuple[KernelSpec, str]],
    results: Sequence[CompileResult],
    texts: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Turn compile results into plain data.

    Args:
        pairs: Kernels and architectures.
        results: What became of each pair.
        texts: Which of ``ttir``, ``ttgir``, ``ptx``, ``sass`` to carry along.

    Returns:
        One dictionary for each pair; every one has ``name``, ``arch``, ``faults`` and ``error``.
    """
    from tileloom.launch.budget import faults

    rows: list[dict[str, Any]] = []
    for (spec, _), result in zip(pairs, results, strict=True):
        row: dict[str, Any] = {"name": result.name, "arch": result.arch, "error": result.error}
        if result.error is None:
            row |= {
                "registers": result.registers,
                "spill_bytes": result.spill_bytes,
                "spill_budget": spec.spill_budget,
                "spill_reason": spec.spill_reason,
                "shared_bytes": result.shared_bytes,
                "stages": result.stages,
                "num_warps": result.num_warps,
                "threads": result.threads,
                "blocks_per_sm": result.occupancy,
                "compile_s": round(result.compile_s, 3),
                "cached": result.cached,
                "ptxas_warnings": list(result.ptxas_warnings),
                "triton": result.triton,
                **{name: getattr(result, name) for name in texts},
            }
        rows.append({**row, "faults": list(faults(spec, result))})
    return rows


def check_triton(folder: Path | None, command: str = "inspect") -> None:
    """Check the option ``--triton``.

    Args:
        folder: Its value.
        command: Who asks, for the error.

    Raises:
        OptionError: If no Triton lies there.
    """
    if folder is not None and not (folder / "triton").is_dir():
        raise OptionError(
            f"{command}: --triton is {folder}; it must be a folder that holds 'triton'. "
            "Try: make setup, which makes .triton-versions/3.6.0 and 3.9.0; or pip install "
            "--no-deps --target FOLDER triton==3.9.0, and pass FOLDER."
        )


def print_names(pairs: Sequence[tuple[KernelSpec, str]]) -> int:
    """Print each kernel's name once, and how many there are to stderr; return 0."""
    names = dict.fromkeys(spec.name for spec, _ in pairs)
    print("\n".join(names))
    print(f"{_count(len(names))}, {len(pairs)} with each architecture", file=sys.stderr)
    return 0


def _count(kernels: int) -> str:
    return f"{kernels} kernel{'' if kernels == 1 else 's'}"


@contextlib.contextmanager
def progress(total: int) -> Generator[Callable[[CompileResult], None]]:
    """Tell on stderr how many kernels are compiled, inside a `with` block.

    On a terminal it is a bar with the kernel that came last; elsewhere a line at the start, and one
    every 30 seconds.

    Args:
        total: How many there will be, each architecture counted.

    Yields:
        What to call with each result.
    """
    shown = console(to_stderr=True)
    if not shown.is_terminal:
        print(f"compiling {_count(total)}", file=sys.stderr, flush=True)
        yield _lines(total)
        return
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("compiling"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )  # fmt: skip
    with Progress(*columns, console=shown, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda result: bar.update(
            task, advance=1, description=escape(f"{result.name} {result.arch}")
        )


def _lines(total: int) -> Callable[[CompileResult], None]:
    done = 0
    started = told = time.monotonic()

    def tell(result: CompileResult) -> None:
        nonlocal done, told
        done += 1
        now = time.monotonic()
        if now - told >= SECONDS_BETWEEN_LINES:
            told = now
            text = f"{done} of {_count(total)} after {now - started:.0f} s"
            print(text, file=sys.stderr, flush=True)

    return tell


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        args: What the parser made of the command line.

    Returns:
        0; 1 if a kernel has a fault.

    Raises:
        OptionError: If a name or an architecture fits nothing.
    """
    from tileloom.launch.aot import compile_in_workers
    from tileloom.launch.budget import faults

    pairs = pairs_of(select(shipped_specs(), args.kernel), args.arch)
    check_triton(args.triton)
    if args.list:
        return print_names(pairs)
    with progress(len(pairs)) as on_result:
        results = compile_in_workers(
            pairs,
            workers=args.workers,
            timeout_s=args.timeout,
            triton_path=args.triton,
            on_result=on_result,
        )
    texts = [name for name in TEXTS if getattr(args, name)]
    if args.json:
        print(json.dumps({"kernels": as_json(pairs, results, texts)}, indent=2))
    elif texts:
        _print_texts(results, texts)
    else:
        _print_table(pairs, results)
    return int(any(faults(spec, result) for (spec, _), result in zip(pairs, results, strict=True)))


def _print_table(pairs: Sequence[tuple[KernelSpec, str]], results: Sequence[CompileResult]) -> None:
    from rich.markup import escape

    shown = console()
    shown.print(table(pairs, results))
    for kind, text in notes(pairs, results):
        shown.print(f"[{'red' if kind == 'fault' else 'yellow'}]{kind}[/]: {escape(text)}")


def _print_texts(results: Sequence[CompileResult], texts: Sequence[str]) -> None:
    for result in results:
        for name in texts:
            text = getattr(result, name) if result.error is None else ""
            if text:
                print(f"// {result.name} {result.arch} {name}\n{text.rstrip()}\n")
