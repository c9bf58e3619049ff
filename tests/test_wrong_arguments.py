"""Arguments of the wrong kind get a sentence from every public function beside the operators."""

from __future__ import annotations

import pytest
import torch

from tileloom import emulator, launch, testing, tuning
from tileloom.errors import OptionError

X = torch.ones(4)
SPEC = {"name": "k", "gluon": False, "archs": ("sm_90",)}


def run(**options):
    with emulator.run(**options):
        pass


WRONG = [
    (lambda: launch.load_bundle(None), OptionError, "bundle: path is a NoneType; it must be the"),
    (lambda: launch.use_bundle(7), OptionError, "bundle: path is a int; it must be the name"),
    (lambda: launch.build_bundle(1.5, []), OptionError, "bundle: path is a float; it must be"),
    (lambda: launch.build_bundle("x", [1]), OptionError, "bundle: pairs is [1]; it must be a list"),
    (lambda: launch.build_bundle("x", "ab"), OptionError, "bundle: pairs is 'ab'; it must be a"),
    (lambda: launch.KernelSpec(function=1, signature={}, constexprs={}, **SPEC), OptionError,
     "KernelSpec: function is 1; it must name a module and a function."),
    (lambda: launch.KernelSpec(function="kernel", signature={}, constexprs={}, **SPEC), OptionError,
     "KernelSpec: function is 'kernel'; it must name a module"),
    (lambda: launch.KernelSpec(function="m:k", signature=[1], constexprs={}, **SPEC), OptionError,
     "KernelSpec: signature is [1]; it must be a dictionary"),
    (lambda: launch.KernelSpec(function="m:k", signature={}, constexprs=None, **SPEC), OptionError,
     "KernelSpec: constexprs is None; it must be a dictionary"),
    (lambda: run(seed="x"), OptionError, "emulator: seed is 'x'; it must be a whole"),
    (lambda: run(seed=[1]), OptionError, "emulator: seed is [1]; it must be a whole"),
    (lambda: testing.assert_accurate([1.0], X.double(), X), testing.CaseError,
     "actual is a list; it must be a torch.Tensor. Try: torch.as_tensor(actual)."),
    (lambda: testing.assert_accurate(X, X.double(), None), testing.CaseError,
     "baseline is a NoneType; it must be a torch.Tensor."),
    (lambda: tuning.configs(["x"], {"x": 64}), OptionError, "configs: kind is ['x']; it must be"),
    (lambda: tuning.configs("pointwise", {"x": 64}, 3), OptionError,
     "configs: facts is a int; it must be a tileloom.tuning.Facts."),
    (lambda: tuning.pointwise(sizes={"x": "n"}, hint=[1]), OptionError,
     "tuning: hint of pointwise is [1]; it must be None or one of 'square'."),
    (lambda: tuning.Config.from_dict(3), OptionError,
     "Config: a flat config is a int; it must be a dictionary."),
    (lambda: tuning.Store("winners"), OptionError,
     "Store: folder is 'winners'; it must be a pathlib.Path"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "said"), WRONG, ids=[said[:60] for *_, said in WRONG])
def test_a_wrong_kind_is_told(call, kind, said):
    with pytest.raises(kind) as caught:
        call()
    assert said in str(caught.value)
