"""Schedules against the clock, and the protocol of flags against every order of events."""

import itertools
import math
import random
from collections import Counter

import pytest
from tests.scheduling.cases import random_params

from tileloom import errors
from tileloom.scheduling import TileSchedulerParams, decode, simulate

of = TileSchedulerParams.to_underlying_arguments


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 5])
def test_every_order_of_arrivals_ends_and_no_tile_starts_early(chunks, is_dynamic):
    offsets = tuple(192 * c for c in range(chunks + 1))
    for pivot in range(chunks):
        params = of(192 * chunks, 512, 64, block=(128, 256, 64), chunk_offsets=offsets,
                    chunk_pivot=pivot)  # fmt: skip
        for order in itertools.permutations(range(chunks)):
            arrivals = [3.0 * place for place in order]
            played = simulate(params, 4, arrivals=arrivals, is_dynamic=is_dynamic)
            assert not played.stuck
            assert len(played.spans) == params.blocks_per_problem
            for span in played.spans:
                last = max(arrivals[chunk] for chunk in params.chunks_of(span.work.row))
                assert span.start == max(span.taken, last)
            assert played.waited <= 4 * max(arrivals)
            assert played.makespan <= max(arrivals) + params.blocks_per_problem


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_random_problems_end(is_dynamic):
    generator = random.Random(3)
    for _ in range(200):
        params = random_params(generator, most_tiles=120)
        arrivals = [generator.uniform(0, 9) for _ in range(params.chunks)]
        played = simulate(params, generator.choice([1, 4, 9]), arrivals=arrivals,
                          is_dynamic=is_dynamic)  # fmt: skip
        counts = Counter(span.work.linear for span in played.spans)
        assert counts == Counter(range(params.blocks_per_problem))


def test_in_ring_order_nobody_waits_for_what_is_there():
    params = of(4 * 256, 512, 64, block=(128, 256, 64), chunk_offsets=(0, 256, 512, 768, 1024),
                chunk_pivot=2)  # fmt: skip
    played = simulate(params, 4, arrivals=[2.0, 3.0, 0.0, 1.0])
    assert played.waited == 0
    assert played.makespan == 4


def test_a_chunk_that_never_comes_names_who_is_stuck():
    params = of(512, 256, 64, block=(128, 256, 64), chunk_offsets=(0, 256, 512))
    played = simulate(params, 4, arrivals=[0.0, math.inf])
    assert played.stuck == ((2, 1), (3, 1))
    assert math.isinf(played.makespan)
    assert {span.work.chunk for span in played.spans} == {0}


def test_a_counter_evens_out_tiles_of_unequal_length():
    params = of(12 * 128, 256, 64, block=(128, 256, 64))
    cost = {work: 6.0 if work % 3 == 0 else 1.0 for work in range(12)}
    static = simulate(params, 3, tile_seconds=lambda work: cost[work.linear])
    dynamic = simulate(params, 3, tile_seconds=lambda work: cost[work.linear], is_dynamic=True)
    assert static.makespan == 24
    assert dynamic.makespan < 14


def test_bad_arguments_are_refused():
    params = of(8, 8, 8, block=(8, 8, 8))
    with pytest.raises(errors.OptionError, match="arrivals has 2 entries; it must have one for"):
        simulate(params, 1, arrivals=[0, 0])
    for options, text in (
        (dict(grid=0), "grid is 0; it must be a whole number of 1 or more"),
        (dict(grid=1.5), "grid is 1.5; it must be a whole number of 1 or more"),
        (dict(params=None), "params is a NoneType; it must be a TileSchedulerParams"),
        (dict(arrivals=3), "arrivals is 3; it must have one for each of the 1 chunks"),
        (dict(arrivals=[math.nan]), "an entry of arrivals is nan; it must be a number of seconds"),
        (dict(arrivals=[-1]), "an entry of arrivals is -1; it must be a number of seconds, 0 or"),
        (dict(tile_seconds=-1), "tile_seconds is -1; it must be a number of seconds, 0 or more"),
        (dict(tile_seconds=math.inf), "tile_seconds is inf; it must be a number of seconds, 0 or"),
        (dict(tile_seconds=lambda work: None), "tile_seconds of a tile is None; it must be a numb"),
    ):
        with pytest.raises(errors.OptionError) as caught:
            simulate(**(dict(params=params, grid=1) | options))
        assert str(caught.value).startswith(f"simulate: {text}")


def _next_states(state, calls, wraps_at):
    """Two ranks, a producer and a consumer of one buffer, with a flag of `wraps_at` values.

    The producer writes call c's data once the consumer has handed back call c - 1 (`reused`), then
    raises the flag to c; the consumer takes the data when the flag has reached c.
    """
    written, flag, taken, reused, data = state
    half = wraps_at // 2
    if written < calls and reused >= written and written == flag:
        yield (written + 1, flag, taken, reused, written + 1)  # write the data
    if flag < written:
        yield (written, written, taken, reused, data)  # raise the flag
    wanted = taken + 1
    if wanted <= calls and (flag % wraps_at - wanted % wraps_at) % wraps_at < half:
        assert data == wanted, f"call {wanted} read the data of call {data}"
        yield (written, flag, wanted, reused, data)  # consume
    if reused < taken:
        yield (written, flag, taken, taken, data)  # hand the buffer back


@pytest.mark.parametrize("start", [0, 5])
def test_epochs_are_safe_in_every_interleaving_and_across_the_wrap(start):
    calls = start + 8  # a flag of 3 bits wraps within them
    first = (start, start, start, start, start)
    open_states, seen = [first], {first}
    while open_states:
        for following in _next_states(open_states.pop(), calls, wraps_at=8):
            if following not in seen:
                seen.add(following)
                open_states.append(following)
    assert (calls, calls, calls, calls, calls) in seen
    ends = [s for s in seen if not list(_next_states(s, calls, wraps_at=8))]
    assert ends == [(calls, calls, calls, calls, calls)]  # nothing else gets stuck


def test_without_handing_back_the_model_finds_the_overwrite():
    """The model has teeth: a producer that does not wait for reuse is caught."""
    state = (2, 1, 0, 0, 2)  # the data of call 2 was written before call 1 was consumed
    with pytest.raises(AssertionError, match="call 1 read the data of call 2"):
        list(_next_states(state, 3, wraps_at=8))


def test_the_model_s_comparison_is_the_kernel_s():
    for epoch in range(0, 2**32, 2**28 - 3):
        for ahead in (0, 1, 77, 2**31 - 1, 2**31, 2**32 - 1):
            flag = (epoch + ahead) % 2**32
            assert decode.is_signalled(flag, epoch) is (ahead < 2**31)
