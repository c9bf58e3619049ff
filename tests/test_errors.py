from __future__ import annotations

import inspect

import pytest

from tileloom import errors

BUILTIN = {
    "ShapeError": ValueError,
    "DtypeError": TypeError,
    "DeviceError": ValueError,
    "OptionError": ValueError,
    "UnknownOptionError": TypeError,
    "UnsupportedError": NotImplementedError,
    "ConfigError": ValueError,
    "GradientError": NotImplementedError,
    "CompileError": RuntimeError,
    "LaunchError": RuntimeError,
    "SignalTimeoutError": TimeoutError,
    "ArgumentError": TypeError,
    "BundleError": ValueError,
}


@pytest.mark.parametrize("name", BUILTIN)
def test_caught_as_the_builtin_and_as_ours(name):
    kind = getattr(errors, name)
    with pytest.raises(BUILTIN[name], match="a sentence"):
        raise kind("a sentence")
    assert issubclass(kind, errors.TileloomError)


def test_every_class_is_listed_above():
    found = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.TileloomError)
    }
    assert found == {*BUILTIN, "TileloomError"}


def test_bullet_list():
    reasons = {"gluon_sm90": ("head dim 96", "dtype fp32"), "triton": ("no GPU",)}
    assert errors.bullet_list(reasons) == "- gluon_sm90: head dim 96; dtype fp32\n- triton: no GPU"
