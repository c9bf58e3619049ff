"""What the emulator's tests share: importing a case, whole or with a planted bug."""

from __future__ import annotations

import importlib.util
import linecache
from pathlib import Path

import torch

CASES = Path(__file__).parent / "cases"
_count = 0


def load_text(name, text, folder):
    """Import a case's text as a module of its own."""
    global _count
    _count += 1
    path = Path(folder) / f"{name}_{_count}.py"
    path.write_text(text)
    linecache.checkcache(str(path))
    spec = importlib.util.spec_from_file_location(f"planted_{name}_{_count}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_case(name):
    return importlib.import_module(f"tests.emulator.cases.{name}")


def planted(bug, folder):
    text = (CASES / f"{bug.case}.py").read_text()
    assert text.count(bug.old) >= 1, f"{bug.id}: the text to replace is not in the case"
    return load_text(bug.case, text.replace(bug.old, bug.new), folder)


def close(result, expected):
    scale = expected.float().abs().max().item()
    return torch.allclose(result.float(), expected.float(), rtol=0.02, atol=0.01 * max(scale, 1.0))
