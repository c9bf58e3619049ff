"""The names of `tileloom.tuning`: all there, and none loaded before it is asked for."""

from __future__ import annotations

import subprocess
import sys

from tileloom import tuning

LAZY = """
import sys
from tileloom import tuning
heavy = {"torch", "triton"} & set(sys.modules)
assert not heavy, heavy
from tileloom.tuning import Config, Facts, configs, triton_config, Grid2D
configs("reduction", {"x": 8, "r0_": 64}, Facts())
heavy = {"torch", "triton"} & set(sys.modules)
assert not heavy, heavy
"""


def test_every_public_name_is_there():
    assert dir(tuning) == sorted(tuning.__all__) == sorted(tuning._PUBLIC)
    for name in tuning.__all__:
        assert getattr(tuning, name).__name__ == name


def test_lists_and_grids_load_neither_triton_nor_torch():
    subprocess.run([sys.executable, "-c", LAZY], check=True)
