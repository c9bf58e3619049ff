"""The command line: lazy commands, exit statuses, one-line errors."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tileloom import __version__, knobs
from tileloom.cli import main as cli
from tileloom.errors import ArgumentError, BundleError, DeviceError, OptionError

_ROOT = Path(__file__).parents[2]
_SAMPLE = """
import sys, time
from tileloom.errors import ShapeError

def add_parser(subparsers):
    parser = subparsers.add_parser("bench")
    parser.add_argument("what", choices=["fail", "long", "wait", "three"])

def run(args):
    if args.what == "fail":
        raise ShapeError("bench: k has 6 heads, q has 16.")
    if args.what == "long":
        for _ in range(100000):
            print("x" * 100)
    if args.what == "wait":
        print("waiting", flush=True)
        time.sleep(60)
    return 3 if args.what == "three" else 0
"""


@pytest.fixture
def tree(tmp_path):
    """A process whose `tileloom.cli.bench` is a command made for these tests."""
    (tmp_path / "bench.py").write_text(_SAMPLE)
    boot = (
        "import sys, tileloom.cli; "
        f"tileloom.cli.__path__.insert(0, {str(tmp_path)!r}); "
        "from tileloom.cli.main import main; sys.exit(main())"
    )

    def start(*arguments, **options):
        environment = {**os.environ, "PYTHONPATH": str(_ROOT / "src")}
        return subprocess.Popen(
            [sys.executable, "-c", boot, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            **options,
        )

    return start


def _finish(process):
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.mark.parametrize("module", ["tileloom", "tileloom.cli"])
def test_version_from_the_module(module):
    environment = {**os.environ, "PYTHONPATH": str(_ROOT / "src")}
    command = [sys.executable, "-m", module, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"tileloom {__version__}\n")


def test_help_lists_the_commands_and_loads_nothing_heavy():
    code = (
        "import sys; from tileloom.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "heavy = {'torch', 'triton', 'rich', 'numpy', 'matplotlib', 'transformers'}\n"
        "loaded = heavy & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(_ROOT / "src")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    for name in ("inspect", "doctor"):
        assert name in done.stdout


def test_without_a_command_help_is_shown(capsys):
    assert cli.main([]) == 0
    assert "usage: tileloom" in capsys.readouterr().out


def test_only_commands_that_exist_are_offered(monkeypatch, capsys):
    monkeypatch.setitem(cli.COMMANDS, "weave", "a command that nobody wrote")
    assert cli.main([]) == 0
    assert "weave" not in capsys.readouterr().out
    assert cli.main(["weave"]) == 2


def test_an_unknown_command_gets_the_nearest_one(capsys):
    assert cli.main(["inspekt"]) == 2
    assert capsys.readouterr().err == (
        "tileloom: there is no command 'inspekt'. Did you mean 'inspect'?\n"
    )
    assert cli.main(["zzz"]) == 2
    assert "Commands: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "usage", "said"),
    [
        ("inspect --jsn", "inspect", "there is no option '--jsn'. Did you mean '--json'?"),
        (
            "check --foo x.py",
            "check",
            "there is no option '--foo'. Options: -h, --sch",
        ),
        (
            "bench rowwise --config x",
            "bench rowwise",
            "there is no option '--config'. ",
        ),
        (
            "bundle show b --arch=80",
            "bundle show",
            "there is no option '--arch'. Options: -h, ",
        ),
        ("doctor all", "doctor", "there is no place for an argument 'all'"),
        (
            "bundle build b --arch 90 k",
            "bundle build",
            "there is no place for an argument 'k'. Try: all arguments before the options.",
        ),
        ("bundle build", "bundle build", "the following arguments are required: FILE\n"),
        (
            "explain gemm",
            "explain gemm",
            "the following arguments are required: m, n, k. Try: tileloom explain gemm 4096 4096 "
            "4096\n",
        ),
        (
            "explain",
            "explain",
            "the following arguments are required: OPERATOR. Try: tileloom explain gemm 4096 4096 "
            "4096\n",
        ),
        (
            "cache",
            "cache",
            "the following arguments are required: ACTION. Try: tileloom cache ls\n",
        ),
        ("cache export", "cache export", "the following arguments are required: FILE\n"),
        ("--colour", "[-h]", "there is no option '--colour'. Options: -h, --version."),
    ],
)
def test_the_commands_own_parser_tells_of_a_wrong_argument(arguments, usage, said, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments.split())
    assert stop.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"usage: tileloom {usage}")
    assert f": error: {said}" in shown


@pytest.mark.parametrize("command", ["", "check", "bundle show", "bench gemm"])
def test_help_tells_the_exit_statuses(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([*command.split(), "--help"])
    assert "2 for a wrong argument or setting." in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (2, OptionError("arch is 'sm_1'.")),
        (2, knobs.KnobError("knobs: no such knob.")),
        (2, ArgumentError("tile is None.")),
        (1, BundleError("bundle: 'b' is damaged.")),
        (1, DeviceError("bench: there is no GPU.")),
    ],
)
def test_an_error_of_ours_is_one_line_and_a_wrong_argument_status_2(
    monkeypatch, capsys, status, error
):
    def fail(command, arguments):
        raise error

    monkeypatch.setattr(cli, "_run", fail)
    assert cli.main(["inspect"]) == status
    assert capsys.readouterr() == ("", f"tileloom: {error}\n")


def test_status_and_error_of_a_command(tree):
    assert _finish(tree("bench", "three")) == (3, "", "")
    assert _finish(tree("bench", "fail")) == (2, "", "tileloom: bench: k has 6 heads, q has 16.\n")


def test_a_reader_that_goes_away(tree):
    process = tree("bench", "long")
    assert process.stdout.readline().startswith("xxx")
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=60) == 141


def test_ctrl_c(tree):
    # A shell starts its background jobs with SIGINT ignored, and children inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = tree("bench", "wait")
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.stdout.readline() == "waiting\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert _finish(process) == (130, "", "tileloom: interrupted\n")
