"""The package without its extra: light, and with a sentence for what needs it."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib

import pytest

from tests.house import ROOT
from tileloom import cpasync

HEAVY = {"cutlass", "cuda", "numpy", "torch", "triton", "google"}


def run(code, *folders):
    path = ":".join([str(ROOT / "src"), *map(str, folders)])
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin"},
        text=True,
        capture_output=True,
        timeout=60,
    )


def test_import_loads_nothing_heavy():
    code = (
        "import sys\n"
        "from tileloom.cpasync import BYTES_PER_POINTER, BYTES_PER_TENSORMAP, cache_policy\n"
        "assert (BYTES_PER_TENSORMAP, BYTES_PER_POINTER) == (128, 8)\n"
        "print(sorted(sys.modules))"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
    loaded = {name.split(".")[0] for name in eval(done.stdout)}
    assert "tileloom" in loaded
    assert not HEAVY & loaded


# The environment of the test may have the DSL: these modules stand before it.
ABSENT = "import importlib.util\nimportlib.util.find_spec = lambda name, package=None: None\n"
USE = "from tileloom import cpasync\ntry:\n    cpasync.tma_load\n"
CATCH = "except cpasync.MissingCuteError as error:\n    assert isinstance(error, ImportError)\n"


def test_not_installed():
    done = run(f"{ABSENT}{USE}{CATCH}    print(error)")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "cpasync: tma_load is for kernels in CuTe DSL, and nvidia-cutlass-dsl is not installed. "
        "Try: pip install 'nvidia-cutlass-dsl>=4.7'.\n"
    )


@pytest.mark.parametrize(("line", "version"), [("__version__ = '4.3.4'", "4.3.4"), ("", "unknown")])
def test_too_old(tmp_path, line, version):
    (tmp_path / "cutlass").mkdir()
    (tmp_path / "cutlass" / "__init__.py").write_text(line)
    done = run(f"{USE}{CATCH}    print(error)", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "cpasync: tma_load needs nvidia-cutlass-dsl 4.7 or newer; the module 'cutlass' found is "
        f"version {version}. Try: pip install 'nvidia-cutlass-dsl>=4.7'.\n"
    )


def test_unknown_name():
    with pytest.raises(AttributeError, match=r"^module 'tileloom.cpasync' has no attribute 'x'$"):
        cpasync.x  # noqa: B018
    with pytest.raises(AttributeError) as caught:
        cpasync.tma_lood  # noqa: B018
    assert str(caught.value) == (
        "module 'tileloom.cpasync' has no attribute 'tma_lood'. Did you mean 'tma_load'?"
    )


def test_every_name_resolves(kernels):
    assert dir(cpasync) == sorted(cpasync.__all__)
    for name in cpasync.__all__:
        assert getattr(cpasync, name) is not None


def test_every_function_says_its_ptx_and_errors(kernels):
    for name in cpasync._CUTE:
        text = getattr(cpasync, name).__doc__
        assert text, name
        assert ("PTX:" in text) != ("``" in text.split("\n")[0]) or name == "extract_tensormap_ptr"


def test_extra_does_not_pull_tvm_ffi(kernels):
    """By the metadata of what is installed: the DSL, and what it requires in turn."""
    from importlib import metadata

    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extra["optional-dependencies"]["cute"] == ["nvidia-cutlass-dsl>=4.7"]
    seen, todo = set(), ["nvidia-cutlass-dsl"]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for requirement in metadata.requires(name) or []:
            always = not re.search(r"extra ==|python_version <|sys_platform == .win", requirement)
            todo += [re.split(r"[=<>!~;\s]", requirement)[0]] if always else []
    assert "apache-tvm-ffi" not in seen
    if metadata.version("nvidia-cutlass-dsl") == "4.8.1":
        others = {name for name in seen if not name.startswith("nvidia-cutlass-dsl")}
        known = {"cuda-bindings", "cuda-pathfinder", "protobuf", "typing-extensions"}
        assert others == known


def test_kernel_of_the_page(kernels, tmp_path, monkeypatch):
    """The DSL reads a kernel's source, so the example becomes a file."""
    import cutlass

    from tests.cpasync import probes, test_probes

    page = (ROOT / "docs" / "cpasync.md").read_text()
    (tmp_path / "page_example.py").write_text(page.split("```py\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    kernel = importlib.import_module("page_example").kernel
    arguments = kernel, probes.memory(cutlass.Float32), cutlass.Int32(1)
    _, ptx = test_probes.compiled(kernels.launch_of, *arguments, arch="sm_80")
    assert ptx.count("cp.async.cg.shared.global") == 1
