from __future__ import annotations

import functools
import importlib
import inspect

import numpy as np
import pytest
import torch

import tileloom
from tests.house import ROOT
from tileloom import cpasync, emulator, errors, launch, masks, tuning
from tileloom.integrations import torch_sdpa

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


@pytest.mark.parametrize("name", BUILTIN)
def test_a_row_of_the_page_says_so(name):
    rows = (ROOT / "docs" / "errors.md").read_text().splitlines()
    assert any(row.startswith(f"| `{name}` | `{BUILTIN[name].__name__}` | ") for row in rows)


ELSEWHERE = {
    "tileloom.knobs.KnobError": ValueError,
    "tileloom.log.LoggerError": ValueError,
    "tileloom.testing.AccuracyError": AssertionError,
    "tileloom.testing.CanaryError": AssertionError,
    "tileloom.testing.CaseError": ValueError,
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_row_of_the_page_names_what_is_no_error_of_ours(name):
    module, _, last = name.rpartition(".")
    kind = getattr(importlib.import_module(module), last)
    assert issubclass(kind, ELSEWHERE[name])
    assert not issubclass(kind, errors.TileloomError)
    rows = (ROOT / "docs" / "errors.md").read_text().splitlines()
    assert any(row.startswith(f"| `{name}` | `{ELSEWHERE[name].__name__}` | ") for row in rows)


def test_the_emulators_launch_error_is_one():
    from tileloom import emulator

    assert issubclass(emulator.LaunchError, errors.LaunchError)
    with (
        pytest.raises(errors.OptionError, match="arch='sm_91' is not known"),
        emulator.run(arch="sm_91"),
    ):
        pass


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


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: torch_sdpa.register(True),
         "register: 1 argument is given by position; it takes none there, and by keyword float32. "
         "Try: float32=True."),
        (lambda: masks.window(1, 2, 3),
         "window: 3 arguments are given by position; it takes 2 there, and by keyword anchor. Try: "
         "anchor=3."),
        (lambda: emulator.run("sm_90a"),
         "run: 1 argument is given by position; it takes none there, and by keyword arch, "
         "schedule, level, seed, collect, ignore, timeline, sms, max_steps, "
         "read_before_write_fence, costs. Try: arch='sm_90a'."),
        (lambda: tuning.Config({}, *[4] * 99),
         "Config: 100 arguments are given by position; it takes 6 there. Try: fewer."),
        (lambda: cpasync.TensorMap.tiled(1, 2, "128B"),
         "TensorMap.tiled: 3 arguments are given by position; it takes 2 there, and by keyword "
         "swizzle, interleave, fill, element_strides, l2_promotion, tf32. Try: swizzle='128B'."),
    ],
)  # fmt: skip
def test_too_many_arguments_by_position(call, said):
    with pytest.raises(errors.ArgumentError) as caught:
        call()
    assert str(caught.value) == said


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


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.5, "1.5"),
        ("mean", "'mean'"),
        (None, "None"),
        (torch.float16, "torch.float16"),
        (torch.zeros(3, 4), "a tensor of torch.float32 and shape (3, 4)"),
        (torch.tensor(3, device="meta"), "a tensor of torch.int64 and shape ()"),
        (torch.nn.Parameter(torch.zeros(2)), "a tensor of torch.float32 and shape (2,)"),
        (np.zeros((2, 2)), "a ndarray of float64 and shape (2, 2)"),
        (np.float32(0.5), "np.float32(0.5)"),
        ((torch.zeros(1),), "(a tensor of torch.float32 and shape (1,),)"),
        ([1, {"a": torch.zeros(9)}], "[1, {'a': a tensor of torch.float32 and shape (9,)}]"),
        ((), "()"),
        ("x" * 500, f"'{'x' * 76}..."),
        (list(range(10**6)), f"[{', '.join(map(str, range(90)))}"[:77] + "..."),
        (10**5000, "a int of too many digits to print"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else type(value).__name__,
)
def test_values_are_told_in_brief(value, text):
    assert errors.shown_value(value) == text


def test_what_cannot_be_looked_at_is_told_by_its_type():
    class Stranger:
        def __repr__(self):
            raise KeyError

    inside_itself = []
    inside_itself.append(inside_itself)
    assert errors.shown_value(Stranger()) == "a Stranger"
    assert errors.shown_value(inside_itself) == "a list"


Q, X, LABELS = torch.randn(1, 2, 8, 16), torch.randn(4, 16), torch.tensor([1, 2, 3, 0])
PACKED = (*[Q[0].transpose(0, 1)] * 3, *[torch.tensor([0, 8], dtype=torch.int32)] * 2, 8, 8)
CALLS = [
    functools.partial(tileloom.attention, Q, Q, Q),
    functools.partial(tileloom.attention_varlen, *PACKED),
    functools.partial(tileloom.rms_norm, X, X[0]),
    functools.partial(tileloom.layer_norm, X, X[0]),
    functools.partial(tileloom.softmax, X),
    functools.partial(tileloom.cross_entropy, X, LABELS),
    functools.partial(tileloom.swiglu, X, X),
    functools.partial(tileloom.matmul, X, X.T),
    functools.partial(tuning.Config, {"XBLOCK": 64}),
    functools.partial(tuning.pointwise, {"x": "n"}),
    functools.partial(tuning.reduction, {"x": "n", "r": "m"}),
    functools.partial(launch.prepare, max),
    functools.partial(masks.causal),
    functools.partial(masks.window, 1, 1),
]
ODD = {
    "tensor": torch.randn(40, 3),
    "number": torch.tensor(3),
    "array": np.ones((40, 3)),
    "list": [torch.randn(40, 3)],
    "nan": float("nan"),
    "huge": 10**40,
    "bytes": b"mean",
    "object": object(),
}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.func.__qualname__)
def test_whatever_an_option_is_given_is_taken_or_told_in_brief(call):
    """A tensor's numbers are in no sentence, and nothing asks a tensor whether it is true."""
    parameters = list(inspect.signature(call.func).parameters.values())[len(call.args) :]
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    assert named
    refused = 0
    for name in named:
        for kind, value in ODD.items():
            try:
                call(**{name: value})
            except errors.TileloomError as error:
                text = str(error)
                refused += 1
                assert "tensor([" not in text, (name, kind)
                assert "array([" not in text, (name, kind)
                assert len(text) < 900, (name, kind)
    assert refused
