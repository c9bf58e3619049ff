"""`tileloom bundle`: build files of compiled kernels with no GPU, show and verify them."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tileloom.cli import console, inspect
from tileloom.errors import BundleError, LaunchError, OptionError, TileloomError

if TYPE_CHECKING:
    from rich.table import Table

    from tileloom.launch.aot import KernelSpec
    from tileloom.launch.bundle import Bundle
    from tileloom.launch.bundle_format import Variant


def add_parser(subparsers: Any) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "bundle",
        help="build, show and verify files of compiled kernels",
        description=(
            "A bundle is a file of compiled kernels, which launch without a compiler and without "
            "Triton; see docs/bundles.md."
        ),
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    build = actions.add_parser(
        "build",
        help="compile kernels with no GPU and write them into a bundle",
        description="Compile kernels in child processes, with no GPU, and write a bundle.",
    )
    build.add_argument("path", type=Path, metavar="FILE", help="the bundle to write")
    build.add_argument(
        "kernel",
        nargs="*",
        default=[],
        metavar="KERNEL",
        help=inspect.KERNEL_HELP,
    )
    build.add_argument(
        "--from",
        dest="source",
        metavar="MODULE:NAME",
        help="take kernels from a list of KernelSpec, or a function that returns one, "
        "instead of the package's own",
    )
    build.add_argument(
        "--arch",
        action="append",
        metavar="ARCH",
        help="only this architecture, such as sm_90 (the same as sm_90a); may be repeated",
    )
    build.add_argument(
        "--triton",
        type=Path,
        metavar="PATH",
        help="folder with another Triton (from pip install --target) to compile with",
    )
    build.add_argument("--list", action="store_true", help=inspect.LIST_HELP)
    build.add_argument("--workers", type=int, metavar="N", help=inspect.WORKERS_HELP)
    build.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help=inspect.TIMEOUT_HELP
    )
    show = actions.add_parser("show", help="list what a bundle holds")
    verify = actions.add_parser(
        "verify",
        help="check every byte of a bundle, and whether its kernels load on this machine",
        description=(
            "Check every checksum and every kernel's description, and load the kernels that are "
            "built for this machine's GPU onto it. Exit status 1 if anything is wrong, or if there "
            "is a GPU and no kernel is for it."
        ),
    )
    for action in (show, verify):
        action.add_argument("path", type=Path, metavar="FILE", help="the bundle")
    for action in (build, show, verify):
        action.add_argument("--json", action="store_true", help="write JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        args: What the parser made of the command line.

    Returns:
        0; 1 if the bundle is not as it should be.

    Raises:
        OptionError: If a name, an architecture or a path fits nothing.
        BundleError: If a kernel does not compile, or the bundle cannot be read.
    """
    if args.action != "build" and not args.path.is_file():
        raise OptionError(
            f"bundle: there is no file '{args.path}'. Try: the path of a file that `tileloom "
            "bundle build` wrote."
        )
    return {"build": _build, "show": _show, "verify": _verify}[args.action](args)


def specs_from(source: str) -> dict[str, KernelSpec]:
    """Import kernels of the user's own.

    Args:
        source: ``"module:name"`` of a list of `KernelSpec`, or of a function that returns one. The
            current folder is searched too.

    Returns:
        The specs by name.

    Raises:
        OptionError: If there is no such module or name, it is something else (such as a kernel),
            or the module or the function raises.
    """
    from tileloom.launch.aot import KernelSpec

    module, _, name = source.partition(":")
    if module and not name:
        raise OptionError(
            f"bundle: --from is '{source}', which has no :NAME. Try: --from {module}:SPECS, with "
            "the list's own name."
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), name)
    except TileloomError:
        raise
    except Exception as error:  # whatever the user's module raises
        raise OptionError(
            f"bundle: --from is '{source}', which cannot be imported ({_told(error)}). Try: "
            "MODULE:NAME, as in my_package.kernels:SPECS."
        ) from error
    if hasattr(found, "run") and hasattr(found, "__getitem__"):
        raise OptionError(
            f"bundle: --from is '{source}', which is a kernel; it must be a list of KernelSpec, or "
            "a function that returns one. Try: SPECS = tileloom.launch.specs_of("
            f"{name}, signatures, archs) there, and --from {module}:SPECS."
        )
    try:
        specs = found() if callable(found) else found
    except TileloomError:
        raise
    except Exception as error:  # whatever the user's function raises
        raise OptionError(
            f"bundle: --from is '{source}', a function that raises {_told(error)}. Try: call "
            f"{name}() in Python."
        ) from error
    if not isinstance(specs, Sequence) or not all(isinstance(s, KernelSpec) for s in specs):
        raise OptionError(
            f"bundle: --from is '{source}', a {type(specs).__name__}; it must be a list of "
            "KernelSpec. Try: tileloom.launch.specs_of(kernel, signatures, archs)."
        )
    return {spec.name: spec for spec in specs}


def _told(error: Exception) -> str:
    """What an exception says, with its type where that says more."""
    if isinstance(error, ImportError | AttributeError) or str(error) == "Empty module name":
        return str(error)
    text = " ".join(str(error).split())
    where = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(where.filename).name}, line {where.lineno}"
    return f"{type(error).__name__}{': ' if text else ''}{text}, {place}"


def _build(args: argparse.Namespace) -> int:
    from tileloom.launch.bundle_build import build_bundle

    try:
        specs = inspect.shipped_specs() if args.source is None else specs_from(args.source)
        pairs = inspect.pairs_of(inspect.select(specs, args.kernel, "bundle"), args.arch, "bundle")
        inspect.check_triton(args.triton, "bundle")
        if args.list:
            return inspect.print_names(pairs)
        if args.source is None and not args.kernel:
            print(
                f"bundle: no KERNEL is named, so all {len(pairs)} of the package are built, which "
                "takes many minutes. Try: names, or --list.",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        with inspect.progress(len(pairs)) as on_result:
            variants = build_bundle(
                args.path,
                pairs,
                workers=args.workers,
                timeout_s=args.timeout,
                triton_path=args.triton,
                on_result=on_result,
            )
    except OSError as error:
        raise BundleError(f"bundle: '{args.path}' cannot be written: {error.strerror}.") from None
    size = args.path.stat().st_size
    if args.json:
        kernels = [{"name": v.name, "arch": v.arch, "key": v.key} for v in variants]
        print(json.dumps({"path": str(args.path), "bytes": size, "kernels": kernels}, indent=2))
    else:
        count = f"{len(variants)} kernel{'s' if len(variants) > 1 else ''}"
        print(f"{args.path}: {count}, {size / 2**20:.2f} MiB")
    return 0


def as_json(bundle: Bundle) -> dict[str, Any]:
    """Turn what a bundle holds into plain data.

    Args:
        bundle: The bundle.

    Returns:
        ``tileloom``, the version that built it, and ``kernels``, a dictionary for each.
    """
    return {"tileloom": bundle.tileloom, "kernels": [_row(bundle, v) for v in bundle.variants()]}


def _row(bundle: Bundle, variant: Variant) -> dict[str, Any]:
    from tileloom.launch.bundle import least_driver

    needs = {
        p.name: p.value if p.type == "constexpr" else p.type + (":16" if p.aligned else "")
        for p in variant.parameters
    }
    return {
        "name": variant.name,
        "function": variant.function,
        "arch": variant.arch,
        "target": variant.target,
        "key": variant.key,
        "source": variant.source,
        "parameters": needs,
        "options": dict(variant.options),
        "threads": variant.threads,
        "registers": variant.registers,
        "shared_bytes": variant.shared_bytes,
        "bytes": bundle.size(variant),
        "triton": variant.triton,
        "toolkit": variant.toolkit,
        "ptx": variant.ptx_version,
        "least_driver": least_driver(variant),
    }


def table(bundle: Bundle) -> Table:
    """Lay out what a bundle holds as a table for the terminal.

    Args:
        bundle: The bundle.

    Returns:
        One row for each compiled variant.
    """
    from rich.markup import escape
    from rich.table import Table

    from tileloom.launch.bundle import least_driver

    variants = bundle.variants()
    made = Table(
        title=escape(f"{bundle.path}, built by tileloom {bundle.tileloom}"),
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
        header_style="bold underline",
    )
    made.add_column("kernel", overflow="fold", min_width=24)
    made.add_column("for", no_wrap=True)
    for name in ("threads", "regs", "shared", "size", "Triton", "CUDA", "driver"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("config", overflow="fold")
    for v in variants:
        least = least_driver(v)
        config = {p.name: p.value for p in v.parameters if p.optional} | dict(v.options)
        made.add_row(
            escape(v.name),
            escape(v.target),
            str(v.threads),
            str(v.registers),
            f"{v.shared_bytes / 1024:.1f} KiB",
            f"{bundle.size(v) / 1024:.1f} KiB",
            escape(v.triton),
            v.toolkit,
            f">= {least // 1000}.{least % 1000 // 10}",
            escape(", ".join(f"{name}={value}" for name, value in config.items())),
        )
    return made


def _show(args: argparse.Namespace) -> int:
    from tileloom.launch.bundle import load_bundle

    bundle = load_bundle(args.path)
    if args.json:
        print(json.dumps(as_json(bundle), indent=2))
    else:
        console().print(table(bundle))
    damaged = _damaged(bundle)
    for text in damaged:
        print(f"tileloom: {text}", file=sys.stderr)
    return int(bool(damaged))


def _damaged(bundle: Bundle) -> list[str]:
    """What is said of each binary that is not what was written."""
    found: list[str] = []
    for variant in bundle.variants():
        try:
            bundle.binary(variant)
        except BundleError as error:
            found.append(str(error))
    return found


def findings(path: Path) -> list[tuple[str, str]]:
    """Check a bundle: every byte, every description, and what runs on this machine.

    Args:
        path: The file.

    Returns:
        Pairs of ``"ok"``, ``"note"`` or ``"fault"`` and a text.
    """
    from tileloom.launch.bundle import load_bundle

    try:
        bundle = load_bundle(path)
    except BundleError as error:
        return [("fault", str(error))]
    found: list[tuple[str, str]] = []
    good: list[Variant] = []
    for number in range(len(bundle)):
        try:
            variant = bundle.variant(number)
            bundle.binary(variant)
            good.append(variant)
        except BundleError as error:
            found.append(("fault", str(error)))
    found.insert(0, ("ok", f"{len(good)} of {len(bundle)} kernels are what was written"))
    versions = sorted({(v.triton, v.toolkit) for v in good})
    if versions:
        text = "; ".join(f"Triton {triton}, CUDA {cuda}" for triton, cuda in versions)
        found.append(("ok", f"built by tileloom {bundle.tileloom}, {text}"))
    return found + _on_this_machine(bundle, good)


def _on_this_machine(bundle: Bundle, variants: Sequence[Variant]) -> list[tuple[str, str]]:
    from tileloom.launch import driver
    from tileloom.launch.bundle import reason_against

    try:
        capability, version = driver.capability(0), driver.cuda_version()
    except LaunchError as error:
        return [("note", f"not loaded onto a GPU: {error}")]
    found: list[tuple[str, str]] = []
    loaded = 0
    for variant in variants:
        if why := reason_against(variant, capability, version):
            found.append(("note", f"{variant.name} for {variant.arch} is not for this GPU: {why}"))
            continue
        try:
            bundle.load(variant, 0)
            loaded += 1
        except TileloomError as error:
            found.append(("fault", str(error)))
    status = "ok" if loaded else "fault"
    return [
        *found,
        (status, f"{loaded} kernels load on this GPU, an sm_{capability} with CUDA "
                 f"{version // 1000}.{version % 1000 // 10}"),
    ]  # fmt: skip


def _verify(args: argparse.Namespace) -> int:
    found = findings(args.path)
    bad = any(status == "fault" for status, _ in found)
    if args.json:
        rows = [{"status": status, "text": text} for status, text in found]
        print(json.dumps({"path": str(args.path), "ok": not bad, "findings": rows}, indent=2))
        return int(bad)
    from rich.markup import escape

    colours = {"ok": "green", "note": "yellow", "fault": "red"}
    shown = console()
    for status, text in found:
        shown.print(f"[{colours[status]}]{status}[/]: {escape(text)}")
    return int(bad)
