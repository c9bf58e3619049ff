"""The decorators of generated code: what they hand to the autotuner, and what they refuse."""

from __future__ import annotations

import re

import pytest
from tests.tuning.test_combo import H100, LARGE, ROWS, meta_of

from tileloom.errors import OptionError
from tileloom.tuning import Config, Facts, ReductionHint, TileHint, configs, generated
from tileloom.tuning.combo import combo_plan
from tileloom.tuning.hints import HeuristicType

META = {"device": H100, "signature": {"in_ptr0": "*fp32", "xnumel": "i32"}}


@pytest.fixture
def handed(monkeypatch):
    """What `cached_autotune` is given."""
    given = {}

    def autotune(size_hints, listed, **named):
        given.update(named, size_hints=size_hints, configs=listed)
        return "decorator"

    monkeypatch.setattr(generated, "cached_autotune", autotune)
    return given


@pytest.mark.parametrize(
    ("name", "sizes", "hint", "kind"),
    [
        ("pointwise", {"x": 1 << 20}, {}, "POINTWISE"),
        ("reduction", {"x": 64, "r0_": 4096}, {"reduction_hint": ReductionHint.INNER}, "REDUCTION"),
        (
            "persistent_reduction",
            {"x": 65536, "r0_": 256},
            {"reduction_hint": ReductionHint.INNER},
            "PERSISTENT_REDUCTION",
        ),
        (
            "cooperative_reduction",
            {"x": 1, "r0_": 65536},
            {"reduction_hint": ReductionHint.INNER},
            "REDUCTION",
        ),
        ("split_scan", {"x": 1, "r0_": 65536}, {"reduction_hint": False}, "SPLIT_SCAN"),
    ],
)
def test_a_decorator_hands_on_the_list_of_its_kind(handed, name, sizes, hint, kind):
    decorate = getattr(generated, name)
    made = decorate(size_hints=sizes, filename="f.py", triton_meta=META, inductor_meta={}, **hint)
    assert made == "decorator"
    facts = Facts(reduction_hint=hint.get("reduction_hint") or ReductionHint.DEFAULT)
    assert handed["configs"] == configs(name, sizes, facts)
    assert handed["heuristic_type"] is HeuristicType[kind]
    assert handed["size_hints"] == sizes
    assert handed["filename"] == "f.py"
    listed = decorate(sizes, triton_meta=META, return_configs=True, **hint)
    assert listed == handed["configs"]


def test_facts_are_read_from_what_generated_code_states(handed):
    stated = {
        "num_load": 4, "num_reduction": 2, "max_autotune_pointwise": True, "autotune_hints": set(),
        "has_loadstore_with_contiguous_rdim": False, "force_filter_reduction_configs": True,
        "tma_min_block_sizes": {"XBLOCK": 8}, "autotune_pointwise": False, "RSPLIT_SIZE": 64,
        "min_xblock": None, "mix_order_reduction_allow_multi_stages": False, "no_x_dim": None,
    }  # fmt: skip
    signature = {"ks0": "i64", "ks1": "i64", "xnumel": "i32"}
    facts = Facts.of(stated, {**META, "signature": signature})
    assert facts == Facts(
        num_load=4, num_reduction=2, max_autotune=True, contiguous_r=False, deterministic=True,
        tma_min_block_sizes={"XBLOCK": 8}, autotune_pointwise=False, rsplit_size=64,
        multi_stages=False, num_dynamic=2, multi_processor_count=132, major=9,
    )  # fmt: skip
    assert Facts.of(None, None) == Facts()


def test_members_of_pytorchs_own_hints_are_taken_by_name(handed):
    class Theirs:
        name = "SQUARE"

    generated.pointwise({"x": 64, "y": 64}, META, tile_hint=Theirs(), filename="f")
    square = configs("pointwise", {"x": 64, "y": 64}, Facts(tile_hint=TileHint.SQUARE))
    assert handed["configs"] == square
    text = "ReductionHint: the hint is 'ROWS'; it must be one of INNER, OUTER, OUTER_TINY, DEFAULT."
    with pytest.raises(OptionError, match=f"^{re.escape(text)} Try: ReductionHint.INNER.$"):
        generated.reduction({"x": 64, "r0_": 64}, "ROWS", META)


def test_a_kernel_without_x_has_one_row_a_program(handed):
    sizes = {"x": 4096, "r0_": 4096}
    generated.split_scan(sizes, False, META, "f.py", {"no_x_dim": True})
    assert handed["size_hints"] == {"x": 1, "r0_": 4096}
    assert {config.kwargs["XBLOCK"] for config in handed["configs"]} == {1}
    assert sizes["x"] == 4096, "what was given stays as it is"


def test_one_config_kinds(handed):
    generated.template(num_stages=3, num_warps=8, triton_meta=META)
    assert (handed["configs"], handed["size_hints"]) == ([Config({}, 8, 3)], None)
    generated.fixed_config({"XBLOCK": 64, "num_warps": 2, "num_stages": 1}, None, META)
    assert handed["configs"] == [Config({"XBLOCK": 64}, 2, 1)]
    assert handed["heuristic_type"] is HeuristicType.FIXED
    generated.foreach(META, inductor_meta={})
    assert handed["configs"] == [Config({}, 8, 1)]
    assert handed["heuristic_type"] is HeuristicType.TEMPLATE


def test_a_users_configs(handed):
    generated.user_autotune([], META, custom_kernel=True)
    assert handed["configs"] == [Config({})], "a kernel without triton.autotune"
    assert handed["custom_kernel"] is True
    flat = {"BLOCK": 64, "num_warps": 2, "num_stages": 1, "maxnreg": 64}
    generated.user_autotune([flat], META)
    assert handed["configs"] == [Config({"BLOCK": 64}, 2, 1, maxnreg=64)]
    assert generated.config_to_dict(generated.config_from_dict(flat)) == flat


def test_a_combo_kernel_starts_from_its_plan(handed):
    inductor, triton = meta_of(ROWS, LARGE)
    generated.pointwise({"x": 1}, triton, inductor_meta=inductor, min_elem_per_thread=4)
    (base,) = handed["configs"]
    assert base.kwargs == {"XBLOCK_0": 1, "XBLOCK_1": 1024}
    assert handed["size_hints"] is None
    assert handed["search"].__self__ == combo_plan(handed["inductor_meta"], triton)
    meta = handed["inductor_meta"]
    assert meta["combo_coordesc_field_order"] == ["XBLOCK_1", "XBLOCK_0"]
    assert meta["combo_coordesc_field_limits"] == {"XBLOCK_1": 4096, "XBLOCK_0": 512}
    assert meta["min_elem_per_thread"] == 4


WRONG = {
    "no filename": (
        lambda: generated.pointwise({"x": 1 << 20}, META),
        "pointwise: filename is None, but there are 2 configs to choose from, and the winner is "
        "kept by the module's file. Try: filename=__file__.",
    ),
    "no filename for a user's list": (
        lambda: generated.user_autotune([{"B": 1}, {"B": 2}], META, filename=""),
        "user_autotune: filename is '', but there are 2 configs to choose from, and the winner is "
        "kept by the module's file. Try: filename=__file__.",
    ),
    "a size that is no power of two": (
        lambda: generated.reduction({"x": 64, "r0_": 100}, False, META, "f"),
        "reduction: the size hint of r0_ is 100; a size hint is a power of two. Try: "
        "size_hints={..., 'r0_': 128}, the size rounded up.",
    ),
    "warp specialisation": (
        lambda: generated.template(3, 8, META, num_consumer_groups=2),
        "Config: num_consumer_groups is given, but a config holds only constants and num_warps, "
        "num_stages, num_ctas, maxnreg. Try: leave num_consumer_groups out.",
    ),
}


@pytest.mark.parametrize(("make", "text"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_gets_a_sentence(handed, make, text):
    with pytest.raises(OptionError, match=f"^{re.escape(text)}$"):
        make()
    assert not handed


def test_a_name_that_the_original_has_and_tileloom_does_not():
    with pytest.raises(AttributeError, match="has no attribute 'grid_combo_kernels'"):
        generated.grid_combo_kernels  # noqa: B018
