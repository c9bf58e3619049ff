"""`tileloom bundle`: build, show, verify; texts, JSON and exit statuses."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.launch import bundle_samples, samples
from tests.launch.bundle_fakes import BINARIES, VARIANTS, FakeCuda, install, variant

from tileloom.cli import inspect
from tileloom.cli.main import main
from tileloom.launch.aot import CompileFailure
from tileloom.launch.bundle import load_bundle
from tileloom.launch.bundle_format import write_bundle

_FROM = ["--from", "tests.cli.test_bundle:specs"]


def specs():
    return [bundle_samples.ADD, bundle_samples.MANY, samples.WRONG]


def broken_specs():
    return {}["no such key"]


_BROKEN_LINE = broken_specs.__code__.co_firstlineno + 1


@pytest.fixture
def path(tmp_path):
    write_bundle(tmp_path / "k", VARIANTS, BINARIES, tileloom="0.1.0")
    return tmp_path / "k"


def test_build_show_and_verify_kernels_of_ones_own(tmp_path, capsys):
    path = str(tmp_path / "own.bundle")
    assert main(["bundle", "build", path, "add", "scalars", "--arch", "sm_90a", *_FROM]) == 0
    assert capsys.readouterr().out.startswith(f"{path}: 2 kernels, 0.0")
    assert main(["bundle", "show", path]) == 0
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == f"{path}, built by tileloom 0.1.0"
    assert rows[1] == "kernel for threads regs shared size Triton CUDA driver config"
    assert rows[2].startswith("add[fp32] sm_90a 128 ")
    assert rows[2].endswith("3.7.1 12.8 >= 12.0 BLOCK=1024, num_stages=3, num_warps=4")
    assert rows[3].startswith("scalars sm_90a 128 ")
    assert main(["bundle", "verify", path]) == 0
    assert "ok: 2 of 2 kernels are what was written" in capsys.readouterr().out


def test_build_takes_the_packages_kernels_by_name(tmp_path, monkeypatch, capsys):
    asked = []

    def compile_now(pairs, **options):
        asked.extend(
            (spec.name, arch, options["workers"], options["timeout_s"]) for spec, arch in pairs
        )
        return [CompileFailure(spec.name, arch, f"no {spec.name}") for spec, arch in pairs]

    monkeypatch.setattr("tileloom.launch.bundle_build.compile_in_workers", compile_now)
    arguments = ["attention_fwd_gluon_sm90[d64-*]", "--workers", "3", "--timeout", "9"]
    assert main(["bundle", "build", str(tmp_path / "b"), *arguments]) == 1
    names = [
        name for name in inspect.shipped_specs() if name.startswith("attention_fwd_gluon_sm90[d64-")
    ]
    assert asked == [(name, "sm_90", 3, 9.0) for name in names]
    err = capsys.readouterr().err
    assert all(f"no {name}" in err for name in names)
    assert not (tmp_path / "b").exists()


def test_build_as_json(tmp_path, capsys):
    path = tmp_path / "b"
    assert main(["bundle", "build", str(path), "add", "--arch", "sm_80", "--json", *_FROM]) == 0
    (made,) = load_bundle(path).variants()
    assert json.loads(capsys.readouterr().out) == {
        "path": str(path),
        "bytes": path.stat().st_size,
        "kernels": [{"name": "add[fp32]", "arch": "sm_80", "key": made.key}],
    }


def test_a_kernel_that_does_not_compile_gives_status_1_and_no_file(tmp_path, capsys):
    assert main(["bundle", "build", str(tmp_path / "b"), "wrong", "--arch", "90", *_FROM]) == 1
    assert "kernel 'wrong' failed for sm_90 in the front end" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ad", *_FROM], "bundle: there is no kernel 'ad'. Did you mean 'add'?"),
        (["add", "--arch", "sm_70", *_FROM], "arch is 'sm_70'; tileloom compiles for sm_80"),
        (
            ["wrong[x]", "--arch", "sm_70", *_FROM],
            "bundle: there is no kernel 'wrong[x]'. Did you m",
        ),
        (["--triton", "/nowhere", *_FROM], "bundle: --triton is /nowhere; it must be a folder"),
        (["--workers", "0", *_FROM], "workers is 0; it must be at least 1"),
        (
            ["--from", "no.such:thing"],
            "--from is 'no.such:thing', which cannot be imported (No mod",
        ),
        (
            ["--from", "tests.cli.test_bundle:nobody"],
            "has no attribute 'nobody'). Try: MODULE:NAME",
        ),
        (["--from", "tests.cli.test_bundle:_FROM"], "a list; it must be a list of KernelSpec. Try"),
        (
            ["--from", "tests.cli.test_bundle"],
            "bundle: --from is 'tests.cli.test_bundle', which has no :NAME. Try: --from "
            "tests.cli.test_bundle:SPECS, with the list's own name.\n",
        ),
        (
            ["--from", "tests.launch.kernel_samples:wrong_kernel"],
            "bundle: --from is 'tests.launch.kernel_samples:wrong_kernel', which is a kernel; it "
            "must be a list of KernelSpec, or a function that returns one. Try: SPECS = "
            "tileloom.launch.specs_of(wrong_kernel, signatures, archs) there, and --from "
            "tests.launch.kernel_samples:SPECS.\n",
        ),
        (
            ["--from", "tests.cli.test_bundle:broken_specs"],
            "bundle: --from is 'tests.cli.test_bundle:broken_specs', a function that raises "
            f"KeyError: 'no such key', test_bundle.py, line {_BROKEN_LINE}. Try: call "
            "broken_specs() in Python.\n",
        ),
        (["--from", ":x"], "which cannot be imported (Empty module name)"),
    ],
)
def test_wrong_builds_get_status_2(tmp_path, capsys, arguments, said):
    assert main(["bundle", "build", str(tmp_path / "b"), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_module_that_raises_gets_status_2(tmp_path, monkeypatch, capsys):
    (tmp_path / "raises_at_once.py").write_text("limit = 3\nSPECS = [1 / (limit - 3)]\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["bundle", "build", str(tmp_path / "b"), "--from", "raises_at_once:SPECS"]) == 2
    assert capsys.readouterr().err == (
        "tileloom: bundle: --from is 'raises_at_once:SPECS', which cannot be imported "
        "(ZeroDivisionError: division by zero, raises_at_once.py, line 2). Try: MODULE:NAME, as in "
        "my_package.kernels:SPECS.\n"
    )


@pytest.mark.parametrize("names", [[], ["attention_fwd_gluon_sm90[d64-*]"]])
def test_build_of_everything_says_so_first(tmp_path, monkeypatch, capsys, names):
    counts = []
    monkeypatch.setattr(
        "tileloom.launch.bundle_build.build_bundle",
        lambda path, pairs, **options: counts.append(len(pairs)) or path.write_text("") or [],
    )
    assert main(["bundle", "build", str(tmp_path / "b"), *names]) == 0
    first = capsys.readouterr().err.splitlines()[0]
    said = (
        f"bundle: no KERNEL is named, so all {counts[0]} of the package are built, which takes "
        "many minutes. Try: names, or --list."
    )
    assert first.startswith("compiling ") if names else first == said


def test_a_path_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    assert main(["bundle", "build", str(tmp_path / "no" / "b"), *_FROM]) == 2
    assert "it must name a file in a folder that exists" in capsys.readouterr().err

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tileloom.launch.bundle_build.write_bundle", full)
    assert main(["bundle", "build", str(tmp_path / "b"), "add", "--arch", "80", *_FROM]) == 1
    assert "b' cannot be written: No space left on device." in capsys.readouterr().err


def test_no_action_and_a_wrong_one_get_status_2(capsys):
    for arguments in ([], ["bild"]):
        with pytest.raises(SystemExit) as caught:
            main(["bundle", *arguments])
        assert caught.value.code == 2
    assert "invalid choice: 'bild'" in capsys.readouterr().err


def test_show_as_json(path, capsys):
    assert main(["bundle", "show", "--json", str(path)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["tileloom"] == "0.1.0"
    assert [k["name"] for k in shown["kernels"]] == [v.name for v in VARIANTS]
    first = shown["kernels"][0]
    assert first["parameters"] == {"x": "*fp32:16", "n": "i32", "BLOCK": 64}
    assert (first["bytes"], first["least_driver"]) == (len(BINARIES[0]), 12000)
    assert first["key"] == VARIANTS[0].key


@pytest.mark.parametrize("action", ["show", "verify"])
def test_what_is_no_bundle_gets_status_1(action, tmp_path, capsys):
    (tmp_path / "b").write_text("hello")
    assert main(["bundle", action, str(tmp_path / "b")]) == 1
    shown = capsys.readouterr()
    assert "is no bundle: it does not begin with" in (shown.out + shown.err).replace("\n", " ")


@pytest.mark.parametrize("action", ["show", "verify"])
def test_a_path_of_no_file_gets_status_2(action, tmp_path, capsys):
    for path in (tmp_path, tmp_path / "nofile"):
        assert main(["bundle", action, str(path)]) == 2
        assert f"tileloom: bundle: there is no file '{path}'. Try: " in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_show_of_a_damaged_binary_gets_status_1(options, path, capsys):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert main(["bundle", "show", *options, str(path)]) == 1
    shown = capsys.readouterr()
    assert "add[b]" in shown.out
    assert shown.err == (
        f"tileloom: bundle: '{path}' is damaged: the binary of 'add[b]' is not what was written. "
        "Try: build it again with `tileloom bundle build`.\n"
    )


def test_texts_that_look_like_markup_are_shown_as_they_are(tmp_path, capsys):
    odd = replace(VARIANTS[0], triton="[/red]", target="[bold]", name="add[/a]")
    write_bundle(tmp_path / "odd", [odd], BINARIES[:1], tileloom="[0]")
    for options in ([], ["--json"]):
        assert main(["bundle", "show", *options, str(tmp_path / "odd")]) == 0
        shown = capsys.readouterr().out
        assert all(text in shown for text in ("[/red]", "[bold]", "add[/a]", "[0]"))
    assert main(["bundle", "verify", str(tmp_path / "odd")]) in (0, 1)


def test_show_of_a_file_cut_short_gets_status_1(path, capsys):
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["bundle", "show", str(path)]) == 1
    assert "is damaged: it has" in capsys.readouterr().err


def verified(path, capsys):
    status = main(["bundle", "verify", "--json", str(path)])
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is (status == 0)
    return status, [(f["status"], f["text"]) for f in said["findings"]]


def test_verify_names_what_is_damaged_and_goes_on(path, capsys):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    status, found = verified(path, capsys)
    assert status == 1
    assert found[0] == ("ok", "2 of 3 kernels are what was written")
    assert found[1][0] == "fault"
    assert "the binary of 'add[b]' is not what was written" in found[1][1]


def test_verify_without_a_gpu(path, capsys, monkeypatch):
    monkeypatch.setattr("tileloom.launch.driver._LIBRARY", "libnothing.so")
    from tileloom.launch import driver

    driver.library.cache_clear()
    status, found = verified(path, capsys)
    driver.library.cache_clear()
    assert status == 0
    assert found[1] == ("ok", "built by tileloom 0.1.0, Triton 3.7.1, CUDA 12.8")
    assert found[2][0] == "note"
    assert "not loaded onto a GPU: launch: libnothing.so cannot be loaded" in found[2][1]


def test_verify_loads_what_is_for_this_gpu(tmp_path, capsys, monkeypatch):
    cuda = install(monkeypatch, FakeCuda(version=12040))
    other = variant("other", 1, arch="sm_80", target="sm_80")
    write_bundle(tmp_path / "b", [VARIANTS[0], other], BINARIES, tileloom="0.1.0")
    status, found = verified(tmp_path / "b", capsys)
    assert status == 0
    assert found[2:] == [
        ("note", "other for sm_80 is not for this GPU: it is built for sm_80, the GPU is an sm_90"),
        ("ok", "1 kernels load on this GPU, an sm_90 with CUDA 12.4"),
    ]
    cuda.status["cuModuleLoadData"] = 209
    status, found = verified(tmp_path / "b", capsys)
    assert status == 1
    assert "loading kernel 'add_kernel' onto device 0 failed: CUDA error 209" in found[2][1]
    assert found[4] == ("fault", "0 kernels load on this GPU, an sm_90 with CUDA 12.4")


def test_verify_of_a_bundle_for_other_machines_is_a_fault(path, capsys, monkeypatch):
    install(monkeypatch, FakeCuda(capability=80))
    status, found = verified(path, capsys)
    assert (status, found[-1][0]) == (1, "fault")


def test_show_loads_neither_torch_nor_triton(path):
    code = (
        "import sys; from tileloom.cli.main import main; "
        f"assert main(['bundle', 'verify', {str(path)!r}]) == 0; "
        f"assert main(['bundle', 'show', {str(path)!r}]) == 0; "
        "sys.exit(bool({'torch', 'triton'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    environment = {"PYTHONPATH": str(root / "src"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.DEVNULL)
    assert done.returncode == 0


def test_help_names_the_actions(capsys):
    with pytest.raises(SystemExit):
        main(["bundle", "--help"])
    out = capsys.readouterr().out
    assert all(name in out for name in ("build", "show", "verify"))
