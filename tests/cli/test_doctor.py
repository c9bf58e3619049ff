"""`tileloom doctor` reports and never raises, whatever is missing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tileloom import knobs
from tileloom.cli import doctor
from tileloom.cli.main import main
from tileloom.launch import compat
from tileloom.target import CPU, H100, Target

_SRC = Path(__file__).parents[2] / "src"
_GPU = Target("cuda", H100.capability, H100.sms, H100.smem, H100.name)


def _by_area(findings):
    areas = {}
    for finding in findings:
        areas.setdefault(finding.area, []).append(finding)
    return areas


def test_the_report_on_this_machine(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TILELOOM_CACHE_DIR", str(tmp_path / "a" / "b"))
    status = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    areas = {f["area"] for f in report["findings"]}
    assert {"tileloom", "python", "torch", "triton", "gpu", "cache", "settings"} <= areas
    assert {"attention: gluon_sm90", "attention: triton", "attention: reference"} <= areas
    assert report["ok"] is (status == 0)
    assert not (tmp_path / "a").exists()


def test_the_table_shows_every_finding(capsys):
    main(["doctor"])
    out = capsys.readouterr().out
    for finding in doctor.examine():
        if finding.area != "cache":  # its free space changes
            assert finding.text[:60] in out


def test_with_the_standard_library_alone():
    code = (
        f"import sys; sys.path.insert(0, {str(_SRC)!r})\n"
        "from tileloom.cli.main import main; sys.exit(main(['doctor']))"
    )
    command = [sys.executable, "-S", "-c", code]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.stderr == ""
    assert done.returncode == 1
    lines = {line[6:30].strip(): line for line in done.stdout.splitlines()}
    assert lines["torch"].startswith("fault")
    assert "is not installed. Try: pip install 'torch>=2.11'" in lines["torch"]
    assert "No module named 'torch'" in lines["operators"]
    assert lines["python"].startswith("ok")
    assert lines["settings"].startswith("ok")


def test_every_operator_is_asked():
    assert set(doctor.BACKENDS) == set(doctor.operators())


def test_backends_on_the_cpu_and_on_hopper(monkeypatch):
    on_cpu = doctor.attention_backends(CPU)
    assert on_cpu["reference"] == ()
    assert all(on_cpu[name] for name in ("triton", "gluon_sm90"))
    assert set(doctor.attention_backends(_GPU).values()) == {()}
    monkeypatch.setattr(doctor, "gpu_targets", lambda: [_GPU])
    areas = _by_area(doctor.check_operators())
    assert areas["attention: gluon_sm90"][0].text == f"runs on {H100.name}"
    (gpu,) = doctor.check_gpu()
    assert (gpu.status, gpu.text[: len(H100.name)]) == ("ok", H100.name)
    assert "sm_90, 132 SMs, 227 KiB" in gpu.text


@pytest.mark.parametrize(
    ("driver", "cuda", "status", "said"),
    [
        (None, None, "note", "no NVIDIA driver is loaded"),
        ("580.95.05", None, "fault", "is built without CUDA"),
        ("580.95.05", "13.0", "fault", "driver 580.95.05 is loaded, but torch sees no GPU"),
    ],
)
def test_why_there_is_no_gpu(monkeypatch, driver, cuda, status, said):
    monkeypatch.setattr(doctor, "_driver", lambda: driver)
    monkeypatch.setattr(doctor, "gpu_targets", list)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    (finding,) = doctor.check_gpu()
    assert finding.status == status
    assert said in finding.text


@pytest.mark.parametrize(
    ("version", "status", "said"),
    [
        ((3, 5, 1), "fault", "a version that is not tested"),
        ((3, 6, 0), "ok", "3.6.0"),
        ((3, 7, 0), "ok", "3.7.0"),
        ((3, 7, 1), "ok", "3.7.1"),
        ((3, 9, 0), "ok", "3.9.0"),
        ((3, 10, 0), "note", "a version that is not tested"),
    ],
)
def test_versions_and_faults_of_triton(monkeypatch, version, status, said):
    monkeypatch.setattr(compat, "triton_version", lambda: version)
    first, *rest = doctor.check_triton()
    assert first.status == status
    assert said in first.text
    has_no_fence = any("no proxy fence between cp.async and wgmma" in f.text for f in rest)
    assert has_no_fence is (version < (3, 7, 1))
    assert compat.has_wgmma_proxy_fence(version) is not has_no_fence


def test_a_triton_without_its_tools(monkeypatch):
    monkeypatch.setattr(compat, "tool", lambda name, folder: folder / "nowhere" / name)
    faults = [f.text for f in doctor.check_triton() if f.status == "fault"]
    assert len(faults) == 4
    assert faults[0].endswith("nowhere/ptxas cannot be run")


def test_unknown_and_unreadable_variables(monkeypatch, capsys):
    monkeypatch.setenv("TILELOOM_CACHEDIR", "/tmp")
    monkeypatch.setenv("TILELOOM_DISPATCH_WARN", "perhaps")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "TILELOOM_CACHEDIR is set, and nothing reads it" in out
    assert "did you mean TILELOOM_CACHE_DIR?" in out
    assert "TILELOOM_DISPATCH_WARN='perhaps' cannot be read" in out


def test_a_cache_folder_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    with knobs.scope({"cache.dir": tmp_path / "file" / "cache"}):
        (finding,) = doctor.check_cache()
    assert (finding.status, finding.text) == ("fault", f"{tmp_path}/file is not a folder")
    with knobs.scope({"cache.dir": tmp_path / "cache"}):
        assert doctor.check_cache()[0].status == "ok"
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        (finding,) = doctor.check_cache()
    assert finding.text == f"{tmp_path}/cache: {tmp_path} cannot be written"


def test_a_check_that_fails_is_a_finding(monkeypatch):
    def check_weather():
        raise RuntimeError("no window\nmore")

    monkeypatch.setattr(doctor, "CHECKS", (check_weather, doctor.check_python))
    first, *rest = doctor.examine()
    assert first == doctor.Finding(
        "weather", "fault", "cannot be looked at: RuntimeError: no window"
    )
    assert [f.area for f in rest] == ["tileloom", "python"]


def test_an_extra_that_is_missing_is_no_fault(monkeypatch):
    monkeypatch.setattr(doctor, "EXTRAS", {"moon": ("no_such_module", "moon-kit")})
    finding = doctor.check_extras()[-1]
    assert (finding.area, finding.status) == ("extra: moon", "note")
    assert finding.remedy == "pip install moon-kit"
