"""`tileloom doctor`: what works on this machine, what does not, and why.

Each check stands alone and reports instead of raising, so that the command also answers where
torch, Triton or a GPU is missing. It reads and asks; it creates no folder, compiles nothing and
puts nothing on the GPU.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import pkgutil
import platform
import re
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tileloom
from tileloom import knobs, log
from tileloom.cli import console

if TYPE_CHECKING:
    from tileloom.target import Target

Status = Literal["ok", "note", "fault"]

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
EXTRAS = {
    "report": ("matplotlib", "matplotlib"),
    "hf": ("transformers", "transformers"),
    "cute": ("cutlass", "nvidia-cutlass-dsl"),
}


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        area: What was looked at, such as ``"triton"``.
        status: ``"ok"``; ``"note"`` for what is absent but not needed, or worth knowing;
            ``"fault"`` for what should work and does not.
        text: What was found.
        remedy: What to do about it; may be empty.
    """

    area: str
    status: Status
    text: str
    remedy: str = ""


def add_parser(subparsers: Any) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "doctor",
        help="what works on this machine, and why not",
        description=(
            "Look at Python, torch, Triton, the GPU, each backend of each operator, the cache "
            "folder, TILELOOM_* variables and optional extras. Exit status 1 if something that "
            "should work does not; having no GPU is no fault."
        ),
    )
    parser.add_argument("--json", action="store_true", help="write JSON instead of text")


def _version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version.partition("+")[0])[:3])


def check_python() -> list[Finding]:
    """Look at the interpreter and at tileloom itself."""
    version = sys.version_info[:3]
    text = f"{'.'.join(map(str, version))} on {platform.system()} {platform.machine()}"
    where = Path(tileloom.__file__ or ".").parent
    found = [Finding("tileloom", "ok", f"{tileloom.__version__} in {where}")]
    if version < OLDEST_PYTHON:
        return [*found, Finding("python", "fault", text, "install Python 3.11 or later")]
    return [*found, Finding("python", "ok", text)]


def check_torch() -> list[Finding]:
    """Look at torch's version and what it was built for."""
    if importlib.util.find_spec("torch") is None:
        return [Finding("torch", "fault", "is not installed", "pip install 'torch>=2.11'")]
    import torch

    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    text = f"{torch.__version__}, {built}"
    if _numbers(torch.__version__)[:2] < OLDEST_TORCH:
        return [Finding("torch", "fault", text, "pip install 'torch>=2.11'")]
    return [Finding("torch", "ok", text)]


def check_triton() -> list[Finding]:
    """Look at Triton's version, its known faults and the tools that it brings."""
    from tileloom.launch import compat

    found = importlib.util.find_spec("triton")
    if found is None or not found.origin:
        if sys.platform != "linux":
            return [Finding("triton", "note", "is not installed: it exists for Linux only")]
        return [Finding("triton", "fault", "is not installed", "pip install 'triton>=3.6'")]
    version = compat.triton_version()
    text = f"{'.'.join(map(str, version))} in {Path(found.origin).parent}"
    findings = [Finding("triton", "ok", text)]
    if not compat.is_supported(version):
        first, last = (".".join(map(str, v)) for v in compat.SUPPORTED)
        status: Status = "fault" if version[:2] < compat.SUPPORTED[0] else "note"
        remedy = f"install a Triton from {first} to {last}"
        findings = [Finding("triton", status, f"{text}, a version that is not tested", remedy)]
    findings += [Finding("triton", "note", fault) for fault in compat.known_faults(version)]
    for name in ("ptxas", "ptxas-blackwell", "nvdisasm", "cuobjdump"):
        path = compat.tool(name, Path(found.origin).parent)
        if not os.access(path, os.X_OK):
            remedy = "install Triton again"
            findings.append(Finding("triton", "fault", f"{path} cannot be run", remedy))
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        text = "no C compiler is on the path; Triton needs one when it first launches a kernel"
        findings.append(Finding("triton", "note", text, "install gcc"))
    return findings


def _driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return match.group(1) if match else "of unknown version"


def gpu_targets() -> list[Target]:
    """Return the properties of every GPU that torch can use; empty without one."""
    import torch

    from tileloom.target import target_of_device

    kind = torch.accelerator.current_accelerator()
    if kind is None or not torch.cuda.is_available():
        return []
    count = torch.cuda.device_count()
    return [target_of_device(torch.device(kind.type, index)) for index in range(count)]


def check_gpu() -> list[Finding]:
    """Look for GPUs, and say why there is none."""
    import torch

    driver = _driver()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        targets = gpu_targets()
    if targets:
        return [
            Finding(
                "gpu",
                "ok",
                f"{t.name}, {t.arch}, {t.sms} SMs, {t.smem // 1024} KiB of shared memory a block, "
                f"driver {driver or 'not visible'}",
            )
            for t in targets
        ]
    if driver is None:
        return [Finding("gpu", "note", "no NVIDIA driver is loaded: operators run in plain torch")]
    if torch.version.cuda is None:
        text = f"driver {driver} is loaded, but torch {torch.__version__} is built without CUDA"
        return [Finding("gpu", "fault", text, "install a torch that is built for CUDA")]
    why = f": {said[-1].message}" if said else ""
    text = f"driver {driver} is loaded, but torch sees no GPU{why}"
    return [Finding("gpu", "fault", text, "look at nvidia-smi and at CUDA_VISIBLE_DEVICES")]


def attention_backends(target: Target) -> dict[str, tuple[str, ...]]:
    """Ask every backend of attention about a plain problem: bf16, head dim 64, no mask.

    Args:
        target: The hardware.

    Returns:
        For each backend the reasons why it refuses.
    """
    import torch

    from tileloom.ops.attention.config import GluonSm90Config, ReferenceConfig, TritonConfig
    from tileloom.ops.attention.masks import Band
    from tileloom.ops.attention.problem import AttentionProblem, Layout

    layout = Layout((4 * 128 * 64, 128 * 64, 64, 1), True)
    problem = AttentionProblem(
        batch=1,
        heads_q=4,
        heads_kv=4,
        len_q=128,
        len_k=128,
        head_dim=64,
        head_dim_v=64,
        dtype=torch.bfloat16,
        scale=1 / math.sqrt(64),
        q=layout,
        k=layout,
        v=layout,
        band=Band(),
    )
    configs = (GluonSm90Config(), TritonConfig(), ReferenceConfig())
    return {c.backend: c.reasons_against(problem, target) for c in configs}


def rowwise_backends(target: Target) -> dict[str, tuple[str, ...]]:
    """Ask the backends of the row-wise operators about a small problem of softmax.

    Args:
        target: The hardware.

    Returns:
        For each backend the reasons why it refuses.
    """
    import torch

    from tileloom.ops.rowwise.config import ReferenceConfig
    from tileloom.ops.rowwise.softmax.config import softmax_rule
    from tileloom.ops.rowwise.softmax.problem import forward_problem

    problem = forward_problem(torch.empty(128, 1024, dtype=torch.bfloat16), None)
    configs = (softmax_rule(problem, target), ReferenceConfig())
    return {c.backend: c.reasons_against(problem, target) for c in configs}


def gemm_backends(target: Target) -> dict[str, tuple[str, ...]]:
    """Ask the backends of the matrix product about a square one of 1024 in bf16.

    Args:
        target: The hardware.

    Returns:
        For each backend the reasons why it refuses.
    """
    import torch

    from tileloom.launch.layout import Layout
    from tileloom.ops.gemm.config import ReferenceConfig
    from tileloom.ops.gemm.problem import MatmulProblem
    from tileloom.ops.gemm.rule import gluon_rule, triton_rule

    rows = Layout((1024 * 1024, 1024, 1), True)
    problem = MatmulProblem(
        *(1024, 1024, 1024, 1), dtype=torch.bfloat16, out_dtype=torch.bfloat16, a=rows, b=rows,
        out=rows,
    )  # fmt: skip
    sms = max(target.sms, 1)
    configs = (gluon_rule(problem, sms), triton_rule(problem, target), ReferenceConfig())
    return {c.backend: c.reasons_against(problem, target) for c in configs}


BACKENDS: dict[str, Callable[[Target], dict[str, tuple[str, ...]]]] = {
    "attention": attention_backends,
    "gemm": gemm_backends,
    "rowwise": rowwise_backends,
}
"""For each operator a function that asks its backends; a test holds it complete."""


def operators() -> list[str]:
    """Return the names of the operators' packages."""
    import tileloom.ops

    return [p.name for p in pkgutil.iter_modules(tileloom.ops.__path__) if p.ispkg]


def check_operators() -> list[Finding]:
    """Ask each backend of each operator whether it runs here, on the first GPU or on the CPU."""
    from tileloom.target import CPU

    targets = gpu_targets()
    target = targets[0] if targets else CPU
    findings: list[Finding] = []
    for name in operators():
        for backend, reasons in BACKENDS[name](target).items():
            text = "; ".join(reasons) or f"runs on {target.name}"
            status: Status = "note" if reasons else "ok"
            findings.append(Finding(f"{name}: {backend}", status, text))
    return findings


def check_cache() -> list[Finding]:
    """Look whether the cache folder can be written, without making it."""
    folder = Path(knobs.get("cache.dir")).absolute()
    there = next(p for p in (folder, *folder.parents) if p.exists())
    remedy = "set TILELOOM_CACHE_DIR to a folder that you may write"
    if not there.is_dir():
        return [Finding("cache", "fault", f"{there} is not a folder", remedy)]
    if not os.access(there, os.W_OK | os.X_OK):
        return [Finding("cache", "fault", f"{folder}: {there} cannot be written", remedy)]
    free = shutil.disk_usage(there).free / 2**30
    made = "" if folder.exists() else ", made when first needed"
    if free < 1:
        text = f"{folder} has {free:.2f} GiB free"
        return [Finding("cache", "note", text, "free some space")]
    return [Finding("cache", "ok", f"{folder}, {free:.0f} GiB free{made}")]


def check_settings() -> list[Finding]:
    """Look for variables that cannot be read, and for `TILELOOM_*` ones that nothing reads."""
    findings: list[Finding] = []
    for name in knobs.KNOBS:
        try:
            knobs.get(name)
        except knobs.KnobError as error:
            findings.append(Finding("settings", "fault", str(error)))
    try:
        log.configure(knobs.get("log.levels"))
    except log.LoggerError as error:
        findings.append(Finding("settings", "fault", str(error)))
    for variable, near in knobs.unknown_variables().items():
        text = f"{variable} is set, and nothing reads it"
        remedy = f"did you mean {near}?" if near else f"unset {variable}"
        findings.append(Finding("settings", "fault", text, remedy))
    return findings or [Finding("settings", "ok", f"{len(knobs.KNOBS)} knobs, all readable")]


def check_extras() -> list[Finding]:
    """Look at required libraries and optional extras."""
    findings: list[Finding] = []
    for module in ("numpy", "threadpoolctl", "rich"):
        if importlib.util.find_spec(module) is None:
            findings.append(
                Finding("libraries", "fault", f"{module} is not installed", f"pip install {module}")
            )
        else:
            findings.append(Finding("libraries", "ok", f"{module} {_version_of(module)}"))
    for extra, (module, distribution) in EXTRAS.items():
        if importlib.util.find_spec(module) is None:
            text = f"{distribution} is not installed"
            findings.append(Finding(f"extra: {extra}", "note", text, f"pip install {distribution}"))
        else:
            text = f"{distribution} {_version_of(distribution)}"
            findings.append(Finding(f"extra: {extra}", "ok", text))
    return findings


CHECKS: tuple[Callable[[], list[Finding]], ...] = (
    check_python,
    check_torch,
    check_triton,
    check_gpu,
    check_operators,
    check_cache,
    check_settings,
    check_extras,
)


def examine() -> list[Finding]:
    """Run every check. One that raises becomes a finding itself."""
    findings: list[Finding] = []
    for check in CHECKS:
        area = check.__name__.removeprefix("check_")
        try:
            findings += check()
        except Exception as error:
            lines = str(error).splitlines() or [""]
            text = f"cannot be looked at: {type(error).__name__}: {lines[0]}"
            findings.append(Finding(area, "fault", text))
    return findings


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        args: What the parser made of the command line.

    Returns:
        0, or 1 if something that should work does not.
    """
    findings = examine()
    is_well = all(f.status != "fault" for f in findings)
    if args.json:
        print(json.dumps({"ok": is_well, "findings": [asdict(f) for f in findings]}, indent=2))
    elif importlib.util.find_spec("rich") is None:
        for f in findings:
            print(f"{f.status:6}{f.area:24}{f.text}{'. Try: ' + f.remedy if f.remedy else ''}")
    else:
        _print(findings)
    return int(not is_well)


def _print(findings: list[Finding]) -> None:
    from rich.markup import escape
    from rich.table import Table

    colours = {"ok": "green", "note": "yellow", "fault": "red"}
    table = Table(show_header=False, box=None, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    before = None
    for f in findings:
        text = escape(f.text) + (f"\n[dim]Try: {escape(f.remedy)}[/]" if f.remedy else "")
        area = "" if f.area == before else escape(f.area)
        table.add_row(f"[{colours[f.status]}]{f.status}[/]", area, text)
        before = f.area
    console().print(table)
