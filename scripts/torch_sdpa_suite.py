"""Run PyTorch's own tests of memory-efficient attention with tileloom in its place.

    python scripts/torch_sdpa_suite.py FILE [-k EXPRESSION] [--every N] [-n WORKERS] [--seconds N]
        [--json FILE]

FILE is test/test_transformers.py of a PyTorch that fits the installed one; it needs the package
expecttest, and a GPU. Its tests of memory-efficient attention are run by pytest, with
`tileloom.integrations.torch_sdpa` registered; what fails beside other processes, which take memory,
is run again alone, and what fails then as PyTorch is. A test that fails only with tileloom is a
failure of ours, unless it pins a fault of PyTorch's kernel (`PINNED`). Exit status 1 if there is
one. The file is also the pytest plugin that registers and selects.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

TESTS = (
    "test_mem_efficient_attention_vs_math_ref_grads",
    "test_mem_efficient_attention_attn_mask_vs_math_ref_grads",
    "test_mem_efficient_attention_mask_variants",
    "test_mem_efficient_attetntion_mask_variants",  # PyTorch's spelling, in some versions
    "test_mem_eff_",
    "test_scaled_dot_product_attention_fused_kernels_packed",
    "test_sdp_mem_efficient_grad_against_math",
    "test_fused_attention_vs_math_ref_grads_cudagraph",
    "test_fused_attention_different_dk_dv",
    "test_fused_kernels_seq_len_1_inputs",
    "test_fused_kernels_nested_broadcasting",
    "test_fused_backwards_throws_determinism_warning",
    "test_fused_sdp_choice",
    "test_sdp_choice_with_determinism",
    "test_fully_masked_out_rows",
    "test_causal_variants",
    "test_is_causal_equals_upper_left",
    "test_sdpa_backward_with_gradient",
)
"""What the names of the tests begin with that go through the two operators, or choose them."""

PINNED = {
    r"throws_determinism_warning.*warn_only_True": (
        "asks for the warning that the backward is not deterministic; tileloom's is, wherever "
        "deterministic algorithms are asked for"
    ),
}
"""Tests that pin a fault or a limit of PyTorch's kernel: what the name has, and which."""

_STAND_IN = """
def __getattr__(name):  # test_transformers.py imports helpers from here that it does not use
    return lambda *args, **kwargs: None
"""


@dataclass(frozen=True)
class Row:
    """One test: its outcome with tileloom, the first line of what went wrong, and without it."""

    test: str
    outcome: str
    detail: str = ""
    without: str = ""

    @property
    def verdict(self) -> str:
        """One of passed, skipped, failed, pinned, and fails without tileloom."""
        if self.outcome != "failed":
            return self.outcome
        if self.without == "failed":
            return "fails without tileloom"
        return "pinned" if pinned(self.test) else "failed"


def pinned(test: str) -> str | None:
    """Return which fault of PyTorch's kernel a test pins, None if none."""
    return next((why for part, why in PINNED.items() if re.search(part, test)), None)


def pytest_addoption(parser: Any) -> None:
    """Add the plugin's options."""
    parser.addoption("--with-tileloom", action="store_true")
    parser.addoption("--every", type=int, default=1)
    parser.addoption("--counts", default="")
    parser.addoption("--names", default="", help="a file with the names of the tests to run")


def pytest_configure(config: Any) -> None:
    """Register for the whole run, and let PyTorch make the parameters of our tests only."""
    common: Any = importlib.import_module("torch.testing._internal.common_device_type")
    whole = common.instantiate_device_type_tests

    def only_ours(generic: Any, *args: Any, **kwargs: Any) -> None:
        for name in [name for name in vars(generic) if name.startswith("test_")]:
            if not name.startswith(TESTS):
                delattr(generic, name)
        whole(generic, *args, **kwargs)

    common.instantiate_device_type_tests = only_ours
    if config.getoption("--with-tileloom"):
        from tileloom.integrations import torch_sdpa

        torch_sdpa.register(float32=True)


_FORM = re.compile(r"head_dim_\d+|is_causal_\w+?_|dropout_p_\d+_\d+|b?float\d+$")


def _form(name: str) -> list[str]:
    """What kernels a test of many parameters needs: its name without sizes."""
    return [name.partition("_batch_size")[0], *reversed(_FORM.findall(name))]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keep the tests that are meant, each N-th of those with many parameters.

    Those that need the same kernels come together, so that few processes compile the same ones.
    """
    every, names = config.getoption("--every"), config.getoption("--names")
    if names:
        wanted = set(Path(names).read_text().split())
        items[:] = [item for item in items if item.name in wanted]
        return
    seen: collections.Counter[str] = collections.Counter()
    kept = []
    for item in items:
        name = next((test for test in TESTS if item.name.startswith(test)), None)
        if name is None or "cuda" not in item.name:
            continue
        if seen[name] % every == 0:
            kept.append(item)
        seen[name] += 1
    items[:] = sorted(kept, key=lambda item: _form(item.name))


def pytest_sessionfinish(session: Any) -> None:
    """Write down what tileloom computed, and what it refused."""
    folder = session.config.getoption("--counts")
    if not folder or not session.config.getoption("--with-tileloom"):
        return
    from tileloom.integrations import torch_sdpa

    calls = torch_sdpa.calls()
    counts = {"forward": calls.forward, "backward": calls.backward, "refused": dict(calls.refused)}
    Path(folder, f"{os.getpid()}.json").write_text(json.dumps(counts))


def outcomes(report: Path) -> dict[str, tuple[str, str]]:
    """Read pytest's XML: for each test its outcome, and the first line of what went wrong."""
    found = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        outcome, detail = "passed", ""
        for part in case:
            if part.tag in ("failure", "error", "skipped"):
                outcome = "skipped" if part.tag == "skipped" else "failed"
                detail = (part.get("message") or "").strip().split("\n")[0]
        found[str(case.get("name"))] = (outcome, detail)
    return found


def _failed(found: dict[str, tuple[str, str]]) -> list[str]:
    return [test for test, (outcome, _) in found.items() if outcome == "failed"]


def summary(rows: Iterable[Row]) -> str:
    """Say how many tests of each name came to what, and each that does not pass."""
    table: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    lines = []
    for row in rows:
        name = next((test for test in TESTS if row.test.startswith(test)), row.test)
        table[name][row.verdict] += 1
        if row.outcome == "failed":
            why = pinned(row.test) if row.verdict == "pinned" else row.detail
            lines.append(f"{row.verdict}: {row.test}\n    {why}")
    counts = [
        f"{name}: {', '.join(f'{n} {verdict}' for verdict, n in sorted(found.items()))}"
        for name, found in sorted(table.items())
    ]
    return "\n".join([*counts, *lines])


def run(
    arguments: argparse.Namespace,
    folder: Path,
    names: Iterable[str] = (),
    with_tileloom: bool = True,
) -> Path:
    """Run the tests, or those of the names one after the other; returns pytest's XML."""
    (folder / "test_cpp_extensions_open_device_registration.py").write_text(_STAND_IN)
    (folder / "pytest.ini").write_text("[pytest]\n")  # not that of a project around the file
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "pytest", str(arguments.file), "-q", "-p", Path(__file__).stem),
        *(
            "-p",
            "no:cacheprovider",
            "-p",
            "no:benchmark",
            "-W",
            "ignore",
            "--no-header",
            "--tb=line",
            f"--junitxml={report}",
        ),
        *("--every", str(arguments.every), "-c", str(folder / "pytest.ini")),
    ]
    if arguments.k:
        command += ["-k", arguments.k]
    if names:
        (folder / "names").write_text("\n".join(names))
        command += ["--names", str(folder / "names")]
    elif arguments.n:
        command += ["-n", str(arguments.n), "--dist", "worksteal"]
    if with_tileloom:
        command += ["--with-tileloom", "--counts", str(folder)]
    paths = [str(Path(__file__).parent.absolute()), str(folder), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(command, cwd=folder, env=environment)
    try:
        process.wait(arguments.seconds)
    except subprocess.TimeoutExpired:
        print(f"stopped after {arguments.seconds} s; what did not run until then is left out")
        process.send_signal(signal.SIGINT)  # pytest writes its report
        process.wait(30)
    return report


def counted(folder: Path) -> dict[str, Any]:
    """Add up what the processes of a run wrote down."""
    total: dict[str, Any] = {"forward": 0, "backward": 0, "refused": collections.Counter()}
    for path in folder.glob("*.json"):
        counts = json.loads(path.read_text())
        total["forward"] += counts["forward"]
        total["backward"] += counts["backward"]
        total["refused"].update(counts["refused"])
    return {**total, "refused": dict(total["refused"])}


def write(path: Path | None, rows: Iterable[Row], counts: dict[str, Any]) -> None:
    """Write rows and counts to a file, if one is asked for."""
    if path:
        text = json.dumps({**counts, "rows": [asdict(row) for row in rows]}, indent=1)
        path.write_text(text + "\n")


def main(given: list[str] | None = None) -> int:
    """Run both, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path, help="test_transformers.py")
    parser.add_argument("-k", default="", help="pytest's expression for names of tests")
    parser.add_argument("--every", type=int, default=1, help="run each N-th of a name's tests")
    parser.add_argument("-n", type=int, default=0, help="processes")
    parser.add_argument("--seconds", type=float, help="time of a run")
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args(given)
    arguments.file = arguments.file.absolute()
    if not arguments.file.is_file():
        parser.error(f"{arguments.file} is no file; it has to be PyTorch's test_transformers.py")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours = outcomes(run(arguments, folder))
        write(arguments.json, [Row(test, *found) for test, found in ours.items()], counted(folder))
        if arguments.n and (failed := _failed(ours)):
            ours |= outcomes(run(arguments, folder, failed))
        counts, failed = counted(folder), _failed(ours)
        theirs = outcomes(run(arguments, folder, failed, with_tileloom=False)) if failed else {}
    rows = [Row(test, *found, theirs.get(test, ("",))[0]) for test, found in sorted(ours.items())]
    print(summary(rows))
    print(f"tileloom computed {counts['forward']} forwards, {counts['backward']} backwards")
    for reason, number in counts["refused"].items():
        print(f"PyTorch's own kernel got {number}: {reason}")
    write(arguments.json, rows, counts)
    return int(any(row.verdict == "failed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
