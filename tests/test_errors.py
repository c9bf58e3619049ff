from __future__ import annotations

import importlib
import inspect

import pytest

import tileloom
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


WRONG_KEYWORDS = [
    ("tileloom.tuning", "Config", "num_warp", "num_warps"),
    ("tileloom.tuning", "configs", "fact", "facts"),
    ("tileloom.tuning", "cached_autotune", "config", "configs"),
    ("tileloom.emulator", "run", "schedul", "schedule"),
    ("tileloom.launch", "compile_aot", "cachedir", "cache_dir"),
    ("tileloom.launch", "build_bundle", "spec", None),
    ("tileloom.launch", "load_bundle", "file", None),
    ("tileloom.masks", "causal", "anchr", "anchor"),
    ("tileloom.masks", "window", "lft", "left"),
    ("tileloom.masks", "key_lengths", "length", "lengths"),
    ("tileloom.masks", "dense", "mask", None),
    ("tileloom.testing", "assert_accurate", "baselin", "baseline"),
    ("tileloom.scheduling", "simulate", "schedular", None),
]


@pytest.mark.parametrize(("module", "name", "given", "near"), WRONG_KEYWORDS)
def test_an_unknown_keyword_is_told_with_those_that_there_are(module, name, given, near):
    place = tileloom.masks if module == "tileloom.masks" else importlib.import_module(module)
    function = getattr(place, name)
    known = ", ".join(inspect.signature(function).parameters)
    with pytest.raises(errors.UnknownOptionError) as caught:
        function(**{given: 1})
    text = str(caught.value)
    assert text.startswith(f"{name}: there is no argument '{given}'; arguments: {known}. Try: ")
    if near is not None:
        assert text.endswith(f" Try: {near}=.")


def test_methods_say_their_class():
    from tileloom.cpasync import TensorMap

    with pytest.raises(errors.UnknownOptionError) as caught:
        TensorMap.tiled(swizle="128B")
    assert str(caught.value) == (
        "TensorMap.tiled: there is no argument 'swizle'; arguments: tensor, box, swizzle, "
        "interleave, fill, element_strides, l2_promotion, tf32. Try: swizzle=."
    )


@pytest.mark.parametrize(
    ("given", "named", "shown"),
    [(("rms_norm",), {}, "'rms_norm'"), ((), {"only": "softmax"}, "only='softmax'")],
)
def test_tuning_of_operators_takes_no_names(given, named, shown):
    with pytest.raises(errors.ArgumentError) as caught:
        tileloom.tuning.operators(*given, **named)
    assert str(caught.value) == (
        f"tuning: operators is given {shown}; it takes no arguments, and tunes every operator "
        "that is called inside the block. Try: with tuning.operators():"
    )
