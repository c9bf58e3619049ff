"""Modules of the installed torch on a GPU, as they were written and with their imports changed.

Where there are none for this torch: ``python -m tests.tuning.make_modules`` makes them.
"""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from tests.tuning.make_modules import FOLDER, MODELS, VERSION, arguments
from torch.utils._pytree import tree_leaves

from tileloom import knobs
from tileloom.testing import assert_accurate
from tileloom.tuning import CachingAutotuner
from tileloom.tuning.swap import swapped

pytestmark = pytest.mark.gpu


def imported(text, path):
    """Run a module, as torch.compile does: its kernels are compiled in worker processes."""
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


# Modules of torch 2.11 whose original is less accurate than the rule allows: its one candidate for
# TMA adds up rows of 8192 elements by 4.
INACCURATE = {("torch_2.11", "tma_rows")}


def check_results(model, given, ours, theirs, *, judges_theirs=True):
    """Compare what two modules give with the model in float64, and baselines with it as it is."""
    found = None
    for _ in range(2):  # tuned, and then launched by the winner alone
        found = ours.call([value.clone() for value in given])
    original = theirs.call([value.clone() for value in given])
    exact = [value.double() if value.is_floating_point() else value for value in given]
    reference, baseline = tree_leaves(model.function(*exact)), tree_leaves(model.function(*given))
    assert len(found) == len(original) == len(reference)
    for own, their, exactly, plain in zip(found, original, reference, baseline):
        exactly, plain = exactly.reshape(own.shape), plain.reshape(own.shape)
        assert_accurate(own, exactly, plain)
        if judges_theirs:
            assert_accurate(their, exactly, plain, name="the original's")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_results(path, tmp_path):
    model = MODELS[path.stem]
    given = arguments(model, torch.device("cuda"))
    text = path.read_text()
    with knobs.scope({"cache.dir": tmp_path / "cache"}):
        ours = imported(swapped(text), tmp_path / f"swapped_{path.stem}.py")
        theirs = imported(text, tmp_path / f"plain_{path.stem}.py")
        kernels = [v for n, v in vars(ours).items() if n.startswith(("triton_", "scaled_kernel"))]
        assert kernels
        assert all(isinstance(kernel, CachingAutotuner) for kernel in kernels)
        judges = (VERSION, path.stem) not in INACCURATE
        check_results(model, given, ours, theirs, judges_theirs=judges)
