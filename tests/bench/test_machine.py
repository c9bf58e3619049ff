import re
import subprocess
import time
from types import SimpleNamespace

import pytest
import torch

from tileloom.bench import machine
from tileloom.bench.machine import Watch, git_state

DEVICE = torch.device("cpu")

FAKE_SMI = """#!/bin/sh
case "$*" in
  *power.draw.instant*) {instant} ;;
esac
case "$*" in
  *--id=GPU-1234*) ;;
  *) echo "no such GPU: $*" >&2; exit 6 ;;
esac
case "$*" in
  *driver_version*) echo "580.1, 700.00, 1980" ;;
  *--loop-ms=100*) while true; do echo "1540, 695.5, 61"; sleep 0.02; done ;;
  *) echo "1000, 100, 50" ;;
esac
"""


@pytest.fixture
def properties(monkeypatch):
    found = SimpleNamespace(
        uuid="1234", name="a card", major=9, minor=0, multi_processor_count=132,
        total_memory=80, L2_cache_size=50,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    return found


@pytest.fixture
def smi(tmp_path, monkeypatch, properties):
    """Put an nvidia-smi of our own on the path; it knows GPU-1234 only."""

    def place(instant=":"):
        path = tmp_path / "nvidia-smi"
        path.write_text(FAKE_SMI.format(instant=instant))
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return place


@pytest.mark.parametrize("instant", [":", "echo 'Field is not valid'; exit 2"])
def test_watch_reads_clock_and_power_while_something_else_runs(smi, instant):
    smi(instant)
    watch = Watch(DEVICE)
    try:
        start = time.perf_counter()
        deadline = start + 20
        while watch.between(start, time.perf_counter()) is None and time.perf_counter() < deadline:
            time.sleep(0.05)
        state = watch.between(start, time.perf_counter())
    finally:
        process = watch._process
        watch.close()
    assert watch.reason is None
    assert state is not None
    assert (state.clock_mhz, state.power_w, state.temperature_c) == (1540.0, 695.5, 61.0)
    assert state.readings >= 1
    assert process is not None
    assert process.poll() is not None  # nothing is left running
    watch.close()  # a second time does nothing


def test_watch_says_why_it_sees_nothing(tmp_path, monkeypatch, properties, smi):
    monkeypatch.setenv("PATH", str(tmp_path))
    blind = Watch(DEVICE)
    assert blind.reason == "nvidia-smi is not on the path"
    assert blind.between(0, 1e12) is None
    blind.close()
    smi()
    properties.uuid = "another"
    assert Watch(DEVICE).reason == "nvidia-smi does not answer for this GPU"


def test_readings_count_where_they_were_taken(monkeypatch, tmp_path, properties):
    monkeypatch.setenv("PATH", str(tmp_path))
    watch = Watch(DEVICE)
    for at, line in enumerate(
        ["1900, 300, 40", "1500, 690, 60\r", "[N/A], 1, 2", "1600, 700, 62", "", "1980, 80, 45"]
    ):
        watch.take(line, float(at))
    state = watch.between(1.0, 4.0)
    assert state is not None
    assert state.as_dict() == {
        "clock_mhz": 1550.0, "clock_mhz_low": 1500.0, "power_w": 695.0, "temperature_c": 61.0,
        "readings": 2,
    }  # fmt: skip


def test_describe_machine(smi):
    smi()
    found = machine.describe_machine(DEVICE)
    assert found["card"] == "a card"
    assert found["l2_bytes"] == 50
    assert (found["driver"], found["power_limit_w"]) == ("580.1", "700.00")
    assert found["torch"] == torch.__version__
    assert re.match(r"\d", found["packages"]["triton"])


def test_describe_machine_without_nvidia_smi(tmp_path, monkeypatch, properties):
    monkeypatch.setenv("PATH", str(tmp_path))
    properties.L2_cache_size = 0
    found = machine.describe_machine(DEVICE)
    assert (found["driver"], found["max_clock_mhz"]) == (None, None)
    assert found["l2_bytes"] == 2**26


def test_a_mig_slice_keeps_its_name(properties):
    properties.uuid = "MIG-77"
    assert machine.gpu_id(DEVICE) == "MIG-77"
    properties.uuid = ""
    assert machine.gpu_id(torch.device("cpu")) == "0"


@pytest.fixture
def repository(tmp_path, monkeypatch):
    folder = tmp_path / "src" / "package"
    folder.mkdir(parents=True)
    file = folder / "machine.py"
    file.write_text("x = 1\n")

    def git(*args):
        done = subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *args],
            cwd=tmp_path, check=True, capture_output=True, text=True,
        )  # fmt: skip
        return done.stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    monkeypatch.setattr(machine, "__file__", str(file))
    return SimpleNamespace(head=git("rev-parse", "HEAD"), file=file, root=tmp_path)


def test_git_state(repository):
    assert git_state(None) == {"commit": repository.head, "dirty": False}
    (repository.root / "result.json").write_text("{}")
    assert git_state(None)["dirty"] is False  # only the code counts
    repository.file.write_text("x = 2\n")
    assert git_state(None) == {"commit": repository.head, "dirty": True}
    assert git_state(repository.head[:8]) == {"commit": repository.head, "dirty": True}
    assert git_state("0123abc") == {"commit": "0123abc", "dirty": None}


def test_a_new_file_makes_the_code_dirty(repository):
    (repository.file.parent / "new.py").write_text("")
    assert git_state(None)["dirty"] is True


def test_no_repository(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "machine.py"))
    assert git_state(None) == {"commit": None, "dirty": None}
    assert git_state("0123abc") == {"commit": "0123abc", "dirty": None}
