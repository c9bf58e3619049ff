"""The two commands' set-up: what it says where it cannot succeed, in a folder with a space."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
needs_make = pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")


@pytest.fixture
def clone(tmp_path):
    folder = tmp_path / "a clone"
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    (folder / "src" / "tileloom").mkdir(parents=True)
    shutil.copy(ROOT / "src" / "tileloom" / "__init__.py", folder / "src" / "tileloom")
    return folder


def make(folder, *arguments, **environment):
    return subprocess.run(
        ["make", *arguments],
        cwd=folder,
        env={**os.environ, "MAKEFLAGS": "", **environment},
        text=True,
        capture_output=True,
        timeout=120,
    )


def fake_python(folder: Path, version: str) -> Path:
    path = folder / "old python"
    path.write_text(f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)
    return path


@needs_make
@pytest.mark.parametrize("version", ["3.10", "2.7"])
def test_python_too_old(clone, version):
    python = fake_python(clone, version)
    done = make(clone, "demo", f"PYTHON={python}")
    assert done.returncode != 0
    assert f"tileloom needs Python 3.11 or newer; found: {python} ({version})." in done.stderr
    assert "Try: install one" in done.stderr
    assert not (clone / ".venv").exists()


@needs_make
def test_no_python_at_all(clone):
    done = make(clone, "test", "PYTHON=/nowhere/python3")
    assert done.returncode != 0
    assert "found: none (looked for /nowhere/python3)." in done.stderr


@needs_make
def test_index_out_of_reach(clone):
    done = make(
        clone,
        "demo",
        # Port 9 of this machine: nobody listens there, and nothing leaves the machine.
        PIP_INDEX_URL="http://127.0.0.1:9/simple",
        PIP_CONFIG_FILE=os.devnull,
        PIP_FIND_LINKS="",
        PIP_EXTRA_INDEX_URL="",
        PIP_RETRIES="0",
        PIP_NO_CACHE_DIR="1",
    )
    assert done.returncode != 0
    assert "setup: 1/3 making .venv" in done.stdout
    assert "setup: the package index cannot be reached, so tileloom could not" in done.stderr
    assert "Try: connect to a network" in done.stderr
    # Not taken for complete by the next call.
    assert not (clone / ".venv" / ".complete").exists()


@needs_make
def test_help_is_the_default(clone):
    done = make(clone)
    assert done.returncode == 0
    for target in ("make demo", "make test", "make test-all", "make check"):
        assert target in done.stdout


@needs_make
def test_a_moved_folder_is_set_up_again(clone):
    stamp = clone / ".venv" / ".complete"
    stamp.parent.mkdir()
    stamp.write_text(f"{clone}\n")
    assert "setup.sh venv" not in make(clone, "--dry-run", "demo").stdout
    assert stamp.exists()
    moved = clone.with_name("moved to")
    clone.rename(moved)
    assert "setup.sh venv" in make(moved, "--dry-run", "demo").stdout


def test_constraints_are_exact_and_hold_what_pyproject_asks_for():
    import tomllib

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert pins["torch"] == "2.13.0"
    assert pins["triton"] == "3.7.1"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [
        *project["dependencies"],
        *extras["dev"],
        *extras["hf"],
        *extras["report"],
        *extras["cute"],
    ]
    names = {a.split(";")[0].split(">")[0].split("=")[0].strip().lower() for a in asked}
    assert names <= {name.lower() for name in pins}


@pytest.mark.parametrize("status", [0, 2, 5])
def test_ci_runs_the_readmes_command_and_passes_its_status_on(clone, status):
    shutil.copytree(ROOT / ".ci", clone / ".ci")
    fake = clone / "bin" / "make"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\necho "$PWD: make $*"\nexit {status}\n')
    fake.chmod(0o755)
    done = subprocess.run(
        ["bash", str(clone / ".ci" / "run")],
        cwd="/",
        env={**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}"},
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == status
    assert done.stdout == f"{clone}: make test\n"


@needs_make
@pytest.mark.parametrize("status", [1, 5])
def test_failed_tests_and_no_tests_at_all_fail_the_command(clone, status):
    """With everything in place and a pytest that ends so: 1 is failures, 5 is no tests."""
    (clone / ".venv" / "bin").mkdir(parents=True)
    python = clone / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\necho "$*"\nexit {status}\n')
    python.chmod(0o755)
    (clone / ".venv" / ".complete").write_text(f"{clone}\n")
    for version in ("3.6.0", "3.9.0"):
        (clone / ".triton-versions" / version / "triton").mkdir(parents=True)
        (clone / ".triton-versions" / version / "triton" / "__init__.py").touch()
    (clone / ".cute-dsl").mkdir()
    (clone / ".cute-dsl" / ".complete").touch()
    done = make(clone, "test")
    assert done.returncode != 0
    assert "-m pytest -n " in done.stdout
    assert "setup:" not in done.stdout
