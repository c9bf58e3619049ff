from dataclasses import replace

import pytest
from tests.bench.fakes import SMALL, FakeTimer, contender, session

from tileloom.bench import AttentionCase, CellResult, Entry, run_cell
from tileloom.bench.bound import INSTRUCTIONS, bound_notes, bound_of
from tileloom.bench.machine import CardState
from tileloom.cli.bench_ours import kept_by_dropout

PLAIN = AttentionCase("d128", 4, 16, 16, 4096, 4096, 128, False)
CARD = CardState(1700.0, 1600.0, 650.0, 60.0, 9)


@pytest.mark.parametrize(
    ("feature", "plain_tflops", "copy_gb_s", "by"),
    [
        ({"bias": "heads"}, 600.0, 3000.0, "plain speed"),
        ({"bias": "full"}, 600.0, 1000.0, "bytes"),
        ({"dropout_p": 0.1}, 600.0, 3000.0, "instructions"),
        ({"is_causal": True, "window": 512}, 600.0, 3000.0, "plain speed"),
        ({"heads_kv": 2}, 600.0, 3000.0, "plain speed"),
    ],
)
def test_the_least_of_three_speeds(feature, plain_tflops, copy_gb_s, by):
    case = replace(PLAIN, **feature)
    bound = bound_of(case, plain_tflops, copy_gb_s, 1700.0, 132)
    plain, of_bias, of_dropout = INSTRUCTIONS["forward"]
    each = plain + of_bias * bool(case.bias) + of_dropout * bool(case.dropout_p)
    rate = 132 * 128 * 1.7e9
    seconds = {
        "plain speed": case.flops / (plain_tflops * 1e12),
        "bytes": case.bytes_moved / (copy_gb_s * 1e9),
        "instructions": case.scores * each / rate,
    }
    assert bound.by == by == max(seconds, key=seconds.get)
    assert bound.tflops == pytest.approx(case.flops / seconds[by] / 1e12)


def test_bytes_and_flops_of_features():
    whole = replace(PLAIN, bias="full")
    assert whole.bytes_moved - PLAIN.bytes_moved == 2 * 4 * 16 * 4096**2
    trained = replace(PLAIN, bias="heads", bias_gradient=True, direction="backward")
    plain = replace(PLAIN, direction="backward")
    assert trained.bytes_moved - plain.bytes_moved == 2 * 2 * 16 * 4096**2
    window = replace(PLAIN, is_causal=True, window=2)
    assert window.scores == 64 * (1 + 2 + 3 * 4094)


def test_notes_name_the_bound_and_the_seeds_kernel():
    case = replace(PLAIN, name="d128-dropout", dropout_p=0.1)

    def entry(name, tflops):
        return Entry(name, "peer", "ok", tflops=tflops)

    cells = [
        CellResult(PLAIN, [entry("us", 600.0)], 2, 5, CARD, 1.0),
        CellResult(case, [entry("us", 240.0), entry("efficient", 80.0)], 2, 5, CARD, 1.0),
        CellResult(replace(case, name="no plain one", head_dim=64), [], 2, 5, CARD, 1.0),
    ]
    bound = bound_of(case, 600.0, 3000.0, 1700.0, 132)
    assert bound_notes(cells, "us", 3000.0, 132) == [
        f"d128-dropout: bound {bound.tflops:.0f} TFLOP/s by instructions, us reaches "
        f"{240 / bound.tflops:.2f} of it, 3.0 times the seed's kernel"
    ]


def test_whose_dropout_mask_is_its_own_is_not_judged():
    timer, case = FakeTimer(), replace(SMALL, dropout_p=0.5)
    both = [contender("own", timer, 1.0, has_own_mask=True), contender("same", timer, 1.0)]
    own, same = run_cell(case, both, session(timer, kept=kept_by_dropout)).entries
    assert (own.status, own.about["judged"]) == ("ok", "no: its dropout mask is its own")
    assert same.status == "wrong"  # it drops nothing
