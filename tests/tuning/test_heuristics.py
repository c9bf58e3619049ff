"""The heuristics against Inductor's own results, the faults of the original put right."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from unittest import mock

import pytest
import torch

from tileloom.errors import OptionError, UnsupportedError
from tileloom.tuning import AutotuneHint, Config, Facts, ReductionHint, TileHint, configs
from tileloom.tuning.heuristics import (
    check_block,
    make_matmul_triton_config,
    match_target_block_product,
    triton_config,
    triton_config_reduction,
    triton_config_tiled_reduction,
)
from tileloom.tuning.heuristics_lists import foreach_configs
from tileloom.tuning.hints import HeuristicType, last_power_of_2, next_power_of_2

CASES = Path(__file__).parent / "cases" / "heuristic_configs.jsonl"
RENAMED = {"RSPLIT_SIZE": "rsplit_size", "persistent_reduction": "persistent"}

INNER, OUTER, TINY = ReductionHint.INNER, ReductionHint.OUTER, ReductionHint.OUTER_TINY


def cases():
    return [json.loads(line) for line in CASES.read_text().splitlines()]


def facts_of(kind, settings):
    facts = {}
    for name, value in settings.items():
        if name == "tile_hint":
            facts[name] = TileHint[value]
        elif name == "hint" and kind == "pointwise":
            facts["autotune_hints"] = (AutotuneHint[value],)
        elif name == "hint":
            facts["reduction_hint"] = ReductionHint[value]
        else:
            facts[RENAMED.get(name, name)] = value
    return Facts(**facts)


def plain(listed):
    return [[config.kwargs, config.num_warps, config.num_stages] for config in listed]


def fault_of(case):
    """The name of what the original does wrong in a case, or None."""
    kind, sizes, settings, expected = case
    if expected == "ZeroDivisionError":
        return "T9: tiling scores that are all 0 divide by zero"
    default = plain(configs(kind, sizes, facts_of(kind, {**settings, "max_autotune": False})))
    if settings.get("max_autotune") and any(config not in expected for config in default):
        return "T10: max-autotune does not try what runs without it"
    return None


def test_every_recorded_case_comes_out_as_the_original_did_or_its_fault_is_named():
    faults = {}
    for case in cases():
        kind, sizes, settings, expected = case
        made = plain(configs(kind, sizes, facts_of(kind, settings)))
        fault = fault_of(case)
        if fault is None:
            assert made == expected, case
        else:
            faults.setdefault(fault[:3].rstrip(":"), []).append((case, made))
    assert len(cases()) == 425
    assert {name: len(found) for name, found in faults.items()} == {"T9": 2, "T10": 3}
    for (kind, sizes, settings, _), made in faults["T9"]:
        equal = {**settings, "tiling_scores": dict.fromkeys(sizes, 1)}
        assert made == plain(configs(kind, sizes, facts_of(kind, equal))), "all 0 means equal"
    for (kind, sizes, settings, expected), made in faults["T10"]:
        default = configs(kind, sizes, facts_of(kind, {**settings, "max_autotune": False}))
        assert made == expected + plain(default)


@pytest.mark.parametrize("kind", ["pointwise", "reduction", "persistent_reduction"])
@pytest.mark.parametrize("hint", [INNER, OUTER, TINY, ReductionHint.DEFAULT])
@pytest.mark.parametrize("r", [16, 256, 1024, 4096])
def test_the_default_config_is_a_candidate_of_max_autotune(kind, hint, r):
    sizes = {"x": 65536} if kind == "pointwise" else {"x": 65536, "r0_": r}
    default = configs(kind, sizes, Facts(reduction_hint=hint, autotune_pointwise=False))
    tuned = configs(kind, sizes, Facts(reduction_hint=hint, max_autotune=True))
    assert set(default) <= set(tuned)


def test_max_autotune_counts_for_three_dimensions_too():
    sizes = {"x": 64, "y": 64, "z": 64}
    off = Facts(autotune_pointwise=False)
    assert len(configs("pointwise", sizes, off)) == 1
    asked = configs("pointwise", sizes, Facts(autotune_pointwise=False, max_autotune=True))
    assert len(asked) > 4
    assert asked == configs("pointwise", sizes, Facts())


def test_the_grid_limit_counts_programs_and_not_threads():
    """The original counts threads on CUDA too, and doubles XBLOCK from 2^31 threads on."""
    sizes = {"x": 2**26, "r0_": 1024}
    (config,) = configs("persistent_reduction", sizes, Facts(reduction_hint=INNER, rsplit_size=0))
    assert config == Config({"XBLOCK": 1}, 1, 1)
    many = triton_config_reduction({"x": 2**31, "r0_": 8192}, 1, 8192, num_warps=16)
    assert many.kwargs == {"XBLOCK": 2, "R0_BLOCK": 4096}, "2^31 programs are one too many"
    assert triton_config({"x": 2**33}, 1).kwargs == {"XBLOCK": 8}
    wide = triton_config({"x": 2, "y": 2**24}, 1, 1)
    assert 2**24 // wide.kwargs["YBLOCK"] <= 65535


def test_no_problem_gets_a_block_that_is_not_legal():
    rng = random.Random(7)
    for _ in range(400):
        kind = rng.choice(["pointwise", "reduction", "persistent_reduction", "split_scan"])
        sizes = {"x": 2 ** rng.randrange(0, 34)}
        if kind != "pointwise":
            sizes["r0_"] = 2 ** rng.randrange(0, 13)
        facts = Facts(
            reduction_hint=rng.choice(list(ReductionHint)),
            max_autotune=rng.random() < 0.5,
            num_load=rng.choice([0, 3, 12]),
            min_elem_per_thread=rng.choice([0, 8, 64]),
        )
        for config in configs(kind, sizes, facts):
            for name, block in config.kwargs.items():
                check_block(name, block)
            assert math.ceil(sizes["x"] / config.kwargs["XBLOCK"]) <= 2**31 - 1
            if sizes["x"] == 1:
                assert config.kwargs["XBLOCK"] == 1


def test_many_candidates_of_reductions_with_two_reduced_dimensions():
    # r = 64 over 32 x 32: the last dimension first.
    made = triton_config_reduction({"x": 4, "r0_": 32, "r1_": 32}, 1, 64)
    assert made.kwargs == {"XBLOCK": 1, "R0_BLOCK": 2, "R1_BLOCK": 32}
    made = configs("persistent_reduction", {"x": 64, "r0_": 32, "r1_": 8}, Facts())
    assert [config.kwargs for config in made] == [{"XBLOCK": 1}, {"XBLOCK": 8}]


def test_tiled_reduction():
    made = triton_config_tiled_reduction({"x": 256, "y": 8, "r0_": 64}, 16, 16, 16)
    assert made == Config({"XBLOCK": 16, "YBLOCK": 8, "R0_BLOCK": 16}, 8, 1)
    halved = triton_config_tiled_reduction(
        {"x": 256, "y": 64, "r0_": 64}, 64, 64, 4, register_intensive=True
    )
    assert halved.num_warps == 8


@pytest.mark.parametrize(
    ("scores", "target", "blocks"),
    [
        ({"x": 4, "y": 1, "r0_": 1}, 64, {"x": 16, "y": 2, "r0_": 2}),
        ({"x": 4, "y": 0, "r0_": 1}, 64, {"x": 16, "y": 1, "r0_": 4}),
        ({"x": 0, "y": 0, "r0_": 0}, 8, {"x": 2, "y": 2, "r0_": 2}),
        ({"x": 1, "y": 0}, 4096, {"x": 256, "y": 1}),
        ({"x": 1, "y": 1}, 2**40, {"x": 256, "y": 64}),
    ],
    ids=str,
)
def test_blocks_are_shared_out_by_scores(scores, target, blocks):
    sizes = {"x": 256, "y": 64, "r0_": 512}
    assert match_target_block_product(sizes, scores, target) == blocks


def test_rows_of_cooperative_reductions_are_shared_by_as_many_programs_as_can_run():
    """The original always starts 64, which wait for each other for ever on fewer SMs."""

    def split(rows, sms):
        facts = Facts(multi_processor_count=sms)
        made = configs("cooperative_reduction", {"x": rows, "r0_": 65536}, facts)
        return made[0].kwargs["RSPLIT"]

    assert [split(1, sms) for sms in (0, 132, 46, 8)] == [64, 64, 32, 8]
    assert [split(4, sms) for sms in (0, 132, 46, 8)] == [16, 32, 8, 2]
    (few,) = configs("cooperative_reduction", {"x": 1, "r0_": 16}, Facts(reduction_hint=INNER))
    assert few.kwargs == {"XBLOCK": 1, "R0_BLOCK": 1, "RSPLIT": 16}, "the original refuses it"


def test_blocks_of_mix_order_reductions_divide_their_rows_and_suit_tma():
    def blocks(**facts):
        sizes = {"x": 1024, "r0_": facts.pop("r", 256)}
        made = configs("persistent_reduction", sizes, Facts(reduction_hint=INNER, **facts))
        return {(c.kwargs["XBLOCK"], c.kwargs["NUM_STAGES"]) for c in made}

    assert blocks(rsplit_size=128) == {(4, 3)}
    assert blocks(rsplit_size=2) == {(2, 1)}
    assert blocks(rsplit_size=128, tma_min_block_sizes={"XBLOCK": 32}) == {(32, 1)}
    assert blocks(rsplit_size=128, multi_stages=False) == {(4, 1)}
    assert blocks(rsplit_size=128, r=16384) == {(4, 2)}


def test_whole_rows_are_not_halved_later():
    facts = Facts(reduction_hint=INNER, add_persistent_rblock=True, num_load=1)
    whole, looped = configs("reduction", {"x": 1, "r0_": 4096}, facts)
    assert (whole.kwargs["R0_BLOCK"], whole.is_scalable) == (4096, False)
    assert (looped.kwargs["R0_BLOCK"], looped.is_scalable) == (2048, True)
    facts = Facts(reduction_hint=INNER, add_persistent_rblock=True, num_load=9)
    assert len(configs("reduction", {"x": 1, "r0_": 4096}, facts)) == 1, "too much work for it"


def test_capability_10_takes_shorter_rows():
    facts = Facts(reduction_hint=INNER, major=10)
    assert configs("reduction", {"x": 1, "r0_": 4096}, facts)[0].kwargs["R0_BLOCK"] == 1024


def test_matrix_products():
    mm = configs("reduction", {"x": 512, "y": 512, "r0_": 512}, Facts(native_matmul=True))
    assert len(mm) == 19
    assert mm[0] == Config({"XBLOCK": 32, "YBLOCK": 32, "R0_BLOCK": 16}, 2, 1)
    sizes = {"z": 8, "x": 512, "y": 512, "r0_": 64}
    bmm = configs("persistent_reduction", sizes, Facts(native_matmul=True))
    assert bmm[0] == Config({"XBLOCK": 32, "YBLOCK": 32, "ZBLOCK": 1}, 2, 1)
    assert len(bmm) == len(set(bmm)) < 19
    deep = {"x": 512, "y": 512, "r0_": 4096}
    for config in configs("persistent_reduction", deep, Facts(native_matmul=True)):
        assert config.kwargs["XBLOCK"] * config.kwargs["YBLOCK"] * 4096 <= 2**20
        assert min(config.kwargs.values()) >= 16
    single = make_matmul_triton_config({"x": 16, "r": 32}, 4, 2)
    assert single.kwargs == {"XBLOCK": 16, "R0_BLOCK": 32}


def test_foreach_tunes_warps_alone():
    assert foreach_configs(Facts()) == [Config({}, 8, 1)]
    assert [c.num_warps for c in foreach_configs(Facts(max_autotune=True))] == [8, 1, 2, 4]


def test_powers_of_two():
    assert [next_power_of_2(n) for n in (0, 1, 3, 4, 1025)] == [1, 1, 4, 4, 2048]
    assert [last_power_of_2(n) for n in (0, 1, 3, 4, 132)] == [1, 1, 2, 4, 128]


WRONG = {
    "no power of two": (
        lambda: configs("pointwise", {"x": 1000}),
        "pointwise: the size hint of x is 1000; a size hint is a power of two. Try: "
        "size_hints={..., 'x': 1024}, the size rounded up.",
    ),
    "unknown dimension": (
        lambda: configs("reduction", {"x": 8, "r": 64}),
        "reduction: size_hints is {'x': 8, 'r': 64}; it must be a dictionary of sizes with the "
        "keys x, y, z, r0_, r1_. Try: size_hints={'x': 1024, 'r0_': 4096}.",
    ),
    "unknown kind": (
        lambda: configs("scan", {"x": 8}),
        "configs: kind is 'scan'; it must be one of pointwise, reduction, persistent_reduction, "
        "cooperative_reduction, split_scan. Try: configs('pointwise', {'x': 1024}).",
    ),
    "too long to hold": (
        lambda: configs("persistent_reduction", {"x": 8, "r0_": 2**17}),
        "size_hints: 131072 elements of a reduction are to be held at once, in blocks of at most "
        "65536 of r0_. Try: a reduction that loops over its row.",
    ),
    "too many programs": (
        lambda: configs("pointwise", {"x": 2**44}),
        f"size_hints: x is {2**44}, which with the largest XBLOCK, 4096, is more than 2147483647 "
        "programs. Try: launch the kernel over parts of x.",
    ),
    "no score": (
        lambda: configs("reduction", {"x": 8, "y": 8, "r0_": 8}, Facts(tiling_scores={"x": 1})),
        "tiling_scores: y, r0_ has no score, but x have. Try: give every dimension of size_hints "
        "one.",
    ),
    "a block too large": (
        lambda: check_block("YBLOCK", 2048),
        "YBLOCK is 2048; it must be a divisor of 1024. Try: YBLOCK=1.",
    ),
    "a block in a dimension of size 1": (
        lambda: check_block("XBLOCK", 2, 1),
        "XBLOCK is 2; it must be 1, because the dimension has size 1. Try: XBLOCK=1.",
    ),
}
UNSUPPORTED = {
    "pointwise": (
        lambda: configs("pointwise", {"x": 8, "r0_": 8}),
        "pointwise: size_hints has x, r0_; a pointwise kernel has x, x and y, or x, y and z. "
        "Try: a reduction, or fewer dimensions.",
    ),
    "reduction": (
        lambda: configs("reduction", {"x": 8}),
        "reduction: size_hints has x; a reduction has x and at least r0_, and may have y and r1_. "
        "Try: size_hints={'x': 1, 'r0_': 4096} for a single row.",
    ),
    "reduction of three shared dimensions": (
        lambda: configs("persistent_reduction", {"x": 8, "y": 8, "z": 8, "r0_": 8}),
        "persistent_reduction: size_hints has x, y, z, r0_; a reduction has x and at least r0_, "
        "and may have y and r1_. Try: size_hints={'x': 1, 'r0_': 4096} for a single row.",
    ),
    "cooperative": (
        lambda: configs("cooperative_reduction", {"x": 8, "y": 8, "r0_": 8}),
        "cooperative_reduction: size_hints has x, y, r0_; it must have x and r0_ alone. Try: "
        "reduction, or one reduced dimension.",
    ),
    "split scan": (
        lambda: configs("split_scan", {"x": 8, "r0_": 8, "r1_": 8}),
        "split_scan: size_hints has x, r0_, r1_; it must have x and one reduced dimension. Try: "
        "reduction, or one reduced dimension.",
    ),
    "matrix product": (
        lambda: configs("reduction", {"x": 8, "r0_": 8}, Facts(native_matmul=True)),
        "native_matmul: size_hints has x, r0_; a matrix product has x, y and r0_, a batched one "
        "also z. Try: a reduction without native_matmul.",
    ),
}


@pytest.mark.parametrize(
    ("make", "text", "error"),
    [
        *[pytest.param(*case, OptionError, id=name) for name, case in WRONG.items()],
        *[pytest.param(*case, UnsupportedError, id=name) for name, case in UNSUPPORTED.items()],
    ],
)
def test_wrong_sizes_get_a_sentence(make, text, error):
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        make()


@pytest.mark.full
def test_heuristic_types_are_those_of_inductor():
    from torch._inductor.runtime import hints as theirs

    ours = {"HeuristicType": HeuristicType, "ReductionHint": ReductionHint, "TileHint": TileHint}
    for name, kind in ours.items():
        names = {m.name: m.value for m in getattr(theirs, name)}
        assert {m.name: m.value for m in kind} == names


def _random_kernel(rng, theirs):
    """Arguments of one of Inductor's own functions, in whose rules 2.10 and 2.13 agree."""
    meta = {
        "num_load": rng.choice([0, 1, 3, 4, 8, 12]),
        "num_reduction": rng.choice([0, 1, 2]),
        "autotune_pointwise": rng.random() < 0.7,
        "deterministic": rng.random() < 0.1,
        "add_persistent_rblock": rng.random() < 0.1,
        "has_loadstore_with_contiguous_rdim": rng.random() < 0.9,
    }
    kind = rng.choice(["pointwise", "reduction", "persistent_reduction"])
    sizes = {"x": 2 ** rng.randrange(0, 25)}
    if kind == "pointwise":
        meta["max_autotune"] = rng.random() < 0.3
        if rng.random() < 0.5:
            sizes["y"] = 2 ** rng.randrange(0, 12)
        if rng.random() < 0.2:
            meta["autotune_hints"] = {theirs.AutotuneHint.ONE_ELEMENT_PER_THREAD}
        hint = rng.choice(list(theirs.TileHint))
        return kind, sizes, meta, {"tile_hint": hint}
    meta["max_autotune"] = kind == "reduction" and rng.random() < 0.3
    sizes["r0_"] = 2 ** rng.randrange(0, 13 if kind == "persistent_reduction" else 18)
    if rng.random() < 0.15:
        sizes["r1_"] = 2 ** rng.randrange(0, 4)
    return kind, sizes, meta, {"reduction_hint": rng.choice(list(theirs.ReductionHint))}


@pytest.mark.full
def test_lists_equal_those_of_the_installed_inductor():
    from torch._inductor.runtime import hints as theirs
    from torch._inductor.runtime import triton_heuristics as original

    device = theirs.DeviceProperties("cuda", 0, 132, 90, 9, 65536, 2048, 1024, 32)
    rng = random.Random(0)
    for _ in range(2000):
        kind, sizes, meta, hint = _random_kernel(rng, theirs)
        names = [f"ks{i}" for i in range(rng.choice([0, 0, 1, 2]))]
        triton_meta = {"device": device, "signature": dict.fromkeys([*names, "in_ptr0"], "i64")}
        with mock.patch.object(torch.cuda, "is_available", return_value=True):
            expected = original.unique_configs(
                getattr(original, kind)(
                    dict(sizes),
                    triton_meta=dict(triton_meta),
                    inductor_meta=dict(meta),
                    return_configs=True,
                    **hint,
                )
            )
        ((name, member),) = hint.items()
        ours = {"tile_hint": TileHint, "reduction_hint": ReductionHint}[name][member.name]
        made = configs(kind, sizes, Facts.of(meta, triton_meta, **{name: ours}))
        assert plain(made) == plain(expected), (kind, sizes, meta, hint)
