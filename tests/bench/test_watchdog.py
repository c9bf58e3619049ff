import subprocess
import sys
import time
from pathlib import Path

import pytest

import tileloom
from tileloom.bench.watchdog import EXIT_CODE, Watchdog


def test_a_step_in_time_is_left_alone():
    told = []
    dog = Watchdog(0.6, on_expiry=told.append, every_s=0.02)
    with dog.running():
        for i in range(6):
            dog.step(f"step {i}")
            time.sleep(0.15)
    assert told == []


def test_a_step_that_takes_too_long_is_named_once():
    told = []
    dog = Watchdog(0.1, on_expiry=told.append, every_s=0.02)
    with dog.running():
        dog.step("d64-l1024: timing tileloom")
        time.sleep(0.6)
    assert len(told) == 1
    assert "this step: d64-l1024: timing tileloom." in told[0]
    assert "--step-limit" in told[0]


def test_errors_pass_and_end_the_watch():
    told = []
    dog = Watchdog(0.1, on_expiry=told.append, every_s=0.02)
    with pytest.raises(KeyError), dog.running():
        raise KeyError
    time.sleep(0.3)
    assert told == []


def test_the_process_ends_with_its_status_though_the_main_thread_hangs():
    code = (
        "import time\n"
        "from tileloom.bench.watchdog import Watchdog\n"
        "dog = Watchdog(0.2, every_s=0.02)\n"
        "with dog.running():\n"
        "    print('kept')\n"
        "    dog.step('the hanging one')\n"
        "    time.sleep(60)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False,
        env={"PYTHONPATH": str(Path(tileloom.__file__).parents[1])},
    )  # fmt: skip
    assert done.returncode == EXIT_CODE == 124
    assert done.stdout == "kept\n"
    assert "the hanging one" in done.stderr
