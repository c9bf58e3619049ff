"""`tileloom cache`: ls, show, verify, clear, export; texts, JSON and exit statuses."""

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from tests.tuning.store_samples import CONFIGS, PLATFORM, PROBLEM, record

from tileloom import knobs
from tileloom.cli.main import main
from tileloom.tuning.store import Candidate, Store

OTHER = replace(PROBLEM, kernel="kernels:mul_kernel")


@pytest.fixture
def store(tmp_path):
    with knobs.scope({"cache.dir": tmp_path}):
        made = Store()
        how = {"date": "2026-11-28T10:00:00+00:00", "rounds": 9,
               "clock": {"low_mhz": 1500, "mhz": 1700, "high_mhz": 1980}}  # fmt: skip
        failed = Candidate({"XBLOCK": 8192, "num_warps": 4, "num_stages": 1}, reason="no room\nat")
        slow = Candidate(CONFIGS[1], 0.013, 1.3, "a first look found it 1.30 times as slow")
        own = Candidate(CONFIGS[0], 0.01, 1.0, "", 32, 0, 1024)
        made.save(record(measured=how, candidates=(own, slow, failed)))
        made.save(record(1, problem=OTHER, measured=how, found_by="descent"))
        yield made


def lines(capsys):
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_ls(store, capsys):
    assert main(["cache", "ls"]) == 0
    title, header, first, second = lines(capsys)
    assert title == f"{store.folder}, 2 files"
    assert header == "kernel winner GPU ms of found by Triton date"
    assert first == (
        "add_kernel XBLOCK=128, num_warps=4, num_stages=1 NVIDIA H100 80GB HBM3 0.0100 3 list "
        "3.7.1 2026-11-28"
    )
    assert second.startswith("mul_kernel XBLOCK=256")
    assert main(["cache", "ls", "mul*", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["folder"] == str(store.folder)
    (row,) = told["winners"]
    assert (row["kernel"], row["found_by"], row["winner"]) == ("mul_kernel", "descent", CONFIGS[1])
    assert row["driver"] == PLATFORM.driver


def test_ls_of_nothing(tmp_path, capsys):
    with knobs.scope({"cache.dir": tmp_path / "none"}):
        assert main(["cache", "ls"]) == 0
        assert lines(capsys) == [f"{tmp_path}/none/tuning/v1: no winners"]
        assert main(["cache", "verify"]) == 0
        assert lines(capsys) == ["ok: 0 files are what was written"]


def test_show(store, capsys):
    assert main(["cache", "show", "add_kernel"]) == 0
    told = lines(capsys)
    assert told[0] == f"{store.files()[0].stem}: kernels:add_kernel"
    assert told[1] == ("NVIDIA H100 80GB HBM3, driver 580.159.04, Triton 3.7.1, assembler 12.8")
    assert told[2] == (
        "sizes x=1024; measured 2026-11-28T10:00:00+00:00 in 9 rounds at 1700 MHz (1500 to 1980)"
    )
    assert told[3] == "config ms ratio regs spills shared"
    assert told[4] == (
        "XBLOCK=128, num_warps=4, num_stages=1 0.0100 1.000 32 0 1024 winner, by list"
    )
    assert told[5].endswith("0.0130 1.300 a first look found it 1.30 times as slow")
    assert told[6] == "XBLOCK=8192, num_warps=4, num_stages=1 no room"
    assert main(["cache", "show", "--json", store.files()[0].stem]) == 0
    (plain,) = json.loads(capsys.readouterr().out)
    assert plain["candidates"][2]["reason"] == "no room\nat"


def test_a_name_that_fits_nothing(store, capsys):
    assert main(["cache", "show", "add_kernal"]) == 2
    assert capsys.readouterr().err == (
        "tileloom: cache: there is no winner of a kernel 'add_kernal'. Did you mean 'add_kernel'?\n"
    )
    assert main(["cache", "clear", "zzz"]) == 2
    assert capsys.readouterr().err.endswith("'zzz'. Try: `tileloom cache ls`.\n")


def test_verify_finds_damage_and_what_is_left_over(store, capsys):
    assert main(["cache", "verify"]) == 0
    assert lines(capsys) == ["ok: 2 files are what was written"]
    damaged = store.files()[0]
    damaged.write_text(damaged.read_text().replace("kernels:", "sources:"))
    odd = record(problem=replace(PROBLEM, source="7" * 64))
    store.save(replace(odd, winner={"XBLOCK": 8}))
    half = store.folder / ".add_kernel-1.json.77-ab.new"
    half.write_text("{")
    os.utime(half, (0, 0))
    assert main(["cache", "verify"]) == 1
    first, *rest = lines(capsys)
    assert first == "fault: 2 of 3 files have a fault"
    assert f"fault: {damaged.name}: its checksum is another" in rest
    assert any(line.endswith("json: its winner is none of its candidates") for line in rest)
    assert f"note: {half.name} is left over; `tileloom cache clear --all` removes it" in rest
    assert main(["cache", "verify", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
    assert main(["cache", "ls"]) == 1
    assert f"'{damaged}' is damaged: its checksum is another." in capsys.readouterr().err
    assert damaged.exists()
    assert main(["cache", "clear", "--all"]) == 0
    assert lines(capsys) == [f"{store.folder}: 3 removed, 1 left over"]
    assert list(store.folder.iterdir()) == []


def test_texts_that_look_like_markup_are_printed_as_they_are(store, capsys):
    odd = {"MODE": "[/red]", "num_warps": 4, "num_stages": 1}
    known = (Candidate(odd, 0.01, 1.0, "[bold]"),)
    problem = replace(PROBLEM, kernel="kernels:[odd]")
    made = replace(record(problem=problem), winner=odd, candidates=known)
    store.save(made)
    assert main(["cache", "ls"]) == 0
    assert any("[odd] MODE=[/red], num_warps=4" in line for line in lines(capsys))
    assert main(["cache", "show"]) == 0
    assert any("MODE=[/red], num_warps=4" in line for line in lines(capsys))
    assert main(["cache", "verify"]) == 0


def test_a_clock_that_is_none_is_left_out(store, capsys):
    for clock in ([1], {"mhz": 5}, "fast"):
        store.save(record(measured={"clock": clock, "date": 7, "rounds": []}))
        assert main(["cache", "show", "add_kernel"]) == 0
        assert any("measured 7 in [] rounds" in line for line in lines(capsys))
        assert main(["cache", "ls"]) == 0


def test_clear_of_files_that_cannot_be_removed(store, capsys, monkeypatch):
    def fail(path, missing_ok=False):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(type(store.folder), "unlink", fail)
    assert main(["cache", "clear", "--all"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"tileloom: cache: '{store.folder}/add_kernel-")
    assert said.endswith(
        f"cannot be removed: Permission denied. Try: `ls -ld '{store.folder}'`, which shows whose "
        "folder it is.\n"
    )


@pytest.mark.parametrize("action", [["ls"], ["clear", "--all"]])
def test_a_folder_whose_name_is_not_utf_8(action, tmp_path):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe")
    environment = os.environ | {"TILELOOM_CACHE_DIR": folder, "PYTHONIOENCODING": "utf-8:strict"}
    command = [sys.executable, "-m", "tileloom", "cache", *action]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()
    assert b"no winners" in done.stdout or b"0 removed" in done.stdout


def test_clear(store, capsys):
    for arguments in ([], ["add_kernel", "--all"]):
        assert main(["cache", "clear", *arguments]) == 2
        assert capsys.readouterr().err == (
            "tileloom: cache: clear takes names of kernels, or --all for everything. Try: "
            "`tileloom cache ls` for the names.\n"
        )
    assert main(["cache", "clear", "add*"]) == 0
    assert lines(capsys) == [f"{store.folder}: 1 removed"]
    assert [path.name[:10] for path in store.files()] == ["mul_kernel"]


def test_export_of_nothing(tmp_path, capsys):
    with knobs.scope({"cache.dir": tmp_path}):
        assert main(["cache", "export", str(tmp_path / "b")]) == 2
    assert capsys.readouterr().err.startswith("tileloom: tuning: there is no winner to bundle. Try")
