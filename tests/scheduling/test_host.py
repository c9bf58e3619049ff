"""The schedule itself, over thousands of random problems: cover, order, ends."""

import itertools
import random

import pytest
from tests.scheduling.cases import random_params, works_of

from tileloom import errors
from tileloom.scheduling import (
    AsyncInputScheduler,
    DynamicPersistentScheduler,
    StaticPersistentScheduler,
    TileSchedulerParams,
    decode,
)

of = TileSchedulerParams.to_underlying_arguments


def _random(count, **options):
    generator = random.Random(1)
    return [random_params(generator, **options) for _ in range(count)]


def test_every_element_of_c_is_covered_exactly_once():
    for params in _random(1500):
        seen = set()
        for work in works_of(params, 1, 0):
            assert 0 < work.rows <= params.block_m
            assert work.row % params.block_m == 0
            cells = {(row, work.n_idx, work.l_idx) for row in range(work.row, work.row + work.rows)}
            assert not cells & seen
            seen |= cells
        assert len(seen) == params.m * params.tiles_n * params.l


def test_chunks_come_as_a_ring_from_the_pivot():
    for params in _random(500):
        chunks = [chunk for chunk, _ in itertools.groupby(w.chunk for w in works_of(params, 1, 0))]
        if params.l == 1:
            ring = [(params.chunk_pivot + s) % params.chunks for s in range(params.chunks)]
            assert chunks == [chunk for chunk in ring if params.tiles_m_of(chunk)]


@pytest.mark.parametrize("grid", [1, 2, 3, 7, 66, 132, 264])
def test_programs_of_any_grid_share_the_tiles_out(grid):
    for params in _random(60):
        parts = [works_of(params, grid, cta) for cta in range(grid)]
        assert sorted(w.linear for part in parts for w in part) == list(
            range(params.blocks_per_problem)
        )


def test_looking_ahead_changes_nothing_and_waits_for_nothing():
    for params in _random(300):
        asked = []
        scheduler = AsyncInputScheduler(params, 3, 1, asked.append)
        work = scheduler.initial_work_tile_info()
        while work.is_valid_tile:
            is_last = scheduler.is_last_tile()
            assert scheduler.get_current_work() == work
            scheduler.wait_signal(work)
            scheduler.advance_to_next_work()
            following = scheduler.get_current_work()
            assert is_last is (not following.is_valid_tile)
            work = following
        seen, wanted = -1, []
        for w in works_of(params, 3, 1):
            wanted += [chunk for chunk in params.chunks_of(w.row) if chunk != seen]
            seen = w.chunk
        assert asked == wanted


def test_a_tile_waits_for_the_chunks_of_its_rows_and_comes_with_the_last_of_them():
    for params in _random(1000):
        works, place = works_of(params, 1, 0), {c: s for s, c in enumerate(params.order)}
        if params.l > 1:
            continue
        for w in works:
            rows = range(w.row, w.row + w.rows)
            held = {c for c in range(params.chunks) for r in rows
                    if params.chunk_offsets[c] <= r < params.chunk_offsets[c + 1]}  # fmt: skip
            assert set(params.chunks_of(w.row)) == held
            assert place[w.chunk] >= max(place[c] for c in held)
        # No padding: as many tiles as if A came whole.
        assert len(works) == -(-params.m // params.block_m) * params.tiles_n


def test_an_invalid_tile_never_waits():
    params = of(0, 8, 8, block=(8, 8, 8), chunk_offsets=(0, 0, 0))
    scheduler = AsyncInputScheduler(params, 4, 3, lambda chunk: pytest.fail(f"waits for {chunk}"))
    work = scheduler.initial_work_tile_info()
    assert not work.is_valid_tile
    scheduler.wait_signal(work)
    assert scheduler.get_work_k_tile_count(work) == 0


def test_the_linear_index_is_the_inverse_of_the_tile():
    for params in _random(300):
        scheduler = AsyncInputScheduler(params, 1, 0)
        for w in works_of(params, 1, 0):
            assert w.linear == scheduler.get_linear_idx_from_m_and_n(
                w.m_idx, w.n_idx, w.l_idx, w.chunk
            )


def test_fetching_is_advancing_and_reading():
    for params in _random(100):
        one, two = (StaticPersistentScheduler(_whole(params), 5, 2) for _ in range(2))
        for _ in range(4):
            two.advance_to_next_work()
            assert one.fetch_next_work() == two.get_current_work()
        one.advance_to_next_work(3)
        for _ in range(3):
            two.advance_to_next_work()
        assert one.get_current_work() == two.get_current_work()


def _whole(params):
    return of(params.m, params.n, params.k, params.l,
              block=(params.block_m, params.block_n, params.block_k))  # fmt: skip


def test_a_counter_deals_each_tile_once_whoever_is_free():
    generator = random.Random(2)
    for params in _random(200):
        grid = generator.choice([1, 3, 8])
        tickets = itertools.count(grid)
        programs = [DynamicPersistentScheduler(params, grid, c, tickets) for c in range(grid)]
        works = [program.initial_work_tile_info() for program in programs]
        seen = []
        while any(work.is_valid_tile for work in works):
            cta = generator.choice([c for c, work in enumerate(works) if work.is_valid_tile])
            seen.append(works[cta].linear)
            works[cta] = programs[cta].fetch_next_work()
        assert sorted(seen) == list(range(params.blocks_per_problem))


def test_a_group_stays_inside_its_chunk_and_keeps_columns_together():
    params = of(8 * 128, 4 * 256, 64, block=(128, 256, 64), raster_order="along_n",
                max_swizzle_size=2, chunk_offsets=(0, 512, 1024), chunk_pivot=1)  # fmt: skip
    works = works_of(params, 1, 0)
    assert [(w.chunk, w.m_idx, w.n_idx) for w in works[:6]] == [
        (1, 0, 0), (1, 1, 0), (1, 0, 1), (1, 1, 1), (1, 0, 2), (1, 1, 2)
    ]  # fmt: skip


def test_the_heuristic_is_cutlass_s_where_a_arrives_whole():
    assert of(128, 4096, 64, block=(128, 256, 64)).raster_order == "along_m"
    assert of(4096, 256, 64, block=(128, 256, 64)).raster_order == "along_n"
    assert of(128, 4096, 64, block=(128, 256, 64), chunk_offsets=(0, 64, 128)).raster_order == (
        "along_n"
    )


@pytest.mark.parametrize("m", [768, 2304, 640, 1, 127, 129])
@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
def test_no_signal_index_is_out_of_range_where_the_original_hangs(m, chunks):
    """B1: the original waits for flags of padding tiles, past the end of the array."""
    offsets = tuple(m * c // chunks for c in range(chunks + 1))
    for pivot in range(chunks):
        params = of(m, 512, 64, block=(128, 256, 64), chunk_offsets=offsets, chunk_pivot=pivot)
        for cta in range(132):
            assert all(0 <= w.chunk < chunks for w in works_of(params, 132, cta))


def test_flag_epochs_compare_modulo_two_to_the_32():
    for epoch in (1, 2**31 - 1, 2**31, 2**32 - 1, 0):
        for ahead, is_there in ((0, True), (1, True), (2**31 - 1, True), (-1, False), (-5, False)):
            assert decode.is_signalled((epoch + ahead) % 2**32, epoch) is is_there


def test_the_grid_leaves_multiprocessors_to_those_who_bring_the_input():
    params = of(4096, 4096, 64, block=(128, 256, 64))
    assert StaticPersistentScheduler.get_grid_shape(params, 132) == 132
    assert StaticPersistentScheduler.get_grid_shape(params, 132, reserved_sms=2) == 130
    assert StaticPersistentScheduler.get_grid_shape(of(1, 1, 1, block=(1, 1, 1)), 132) == 1
    assert StaticPersistentScheduler.get_grid_shape(of(0, 1, 1, block=(1, 1, 1)), 132) == 1


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        (dict(m=-1), errors.ShapeError, "m is -1; a size is a whole number of 0 or more"),
        (dict(block=(0, 1, 1)), errors.OptionError, "block is (0, 1, 1); it must be"),
        (dict(max_swizzle_size=0), errors.OptionError, "max_swizzle_size is 0; it must be a whole"),
        (dict(max_swizzle_size=1.5), errors.OptionError, "max_swizzle_size is 1.5; it must be a w"),
        (dict(m=8.0), errors.ShapeError, "m is 8.0; a size is a whole number of 0 or more"),
        (dict(k=None), errors.ShapeError, "k is None; a size is a whole number of 0 or more"),
        (dict(block=8), errors.OptionError, "block is 8; it must be (rows, columns, k-step), each"),
        (
            dict(block=(8, 8)),
            errors.OptionError,
            "block is (8, 8); it must be (rows, columns, k-st",
        ),
        (dict(block=(8, 8, 1.5)), errors.OptionError, "block is (8, 8, 1.5); it must be (rows, co"),
        (dict(chunk_offsets=8), errors.ShapeError, "chunk_offsets is 8; it must be a sequence"),
        (dict(chunk_offsets=(0, 2.5, 8)), errors.ShapeError, "(0, 2.5, 8); it must be whole numbe"),
        (dict(chunk_pivot=0.5), errors.OptionError, "chunk_pivot is 0.5; it must be in 0 .. 0"),
        (
            dict(swizzle=8),
            errors.UnknownOptionError,
            "there is no argument 'swizzle'; arguments: m",
        ),
        (dict(raster_order="n"), errors.OptionError, "raster_order is 'n'; it must be"),
        (dict(chunk_offsets=(0, 5)), errors.ShapeError, "must begin with 0 and end with M = 8"),
        (dict(chunk_offsets=(8,)), errors.ShapeError, "must begin with 0 and end with M = 8"),
        (dict(chunk_offsets=(0, 5, 4, 8)), errors.ShapeError, "falls from 5 to 4 at entry 2"),
        (dict(chunk_pivot=1), errors.OptionError, "chunk_pivot is 1; it must be in 0 .. 0"),
        (dict(chunk_pivot=-1), errors.OptionError, "chunk_pivot is -1; it must be in 0 .. 0"),
    ],
)
def test_bad_arguments_are_refused_in_one_sentence(options, kind, text):
    given = dict(m=8, n=8, k=8, block=(8, 8, 8)) | options
    with pytest.raises(kind) as caught:
        of(**given)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_scheduler_says_what_it_cannot():
    chunked = of(8, 8, 8, block=(8, 8, 8), chunk_offsets=(0, 4, 8))
    with pytest.raises(errors.OptionError, match="A comes in 2 chunks, and it does not wait"):
        StaticPersistentScheduler(chunked, 1, 0)
    batched = of(8, 8, 8, 2, block=(8, 8, 8), chunk_offsets=(0, 4, 8))
    assert AsyncInputScheduler.can_implement(batched) == (
        "A has 2 batches, and chunks are rows of one matrix",
    )
    huge = of(2**20, 2**20, 8, block=(16, 16, 8))
    assert "32 bits count them" in StaticPersistentScheduler.can_implement(huge)[0]
    wide = of(64, 64, 8, block=(8, 8, 8), max_swizzle_size=2**28)
    assert StaticPersistentScheduler.can_implement(wide) == (
        "a group of the raster has 2147483648 tiles, and 32 bits count them",
    )
    with pytest.raises(errors.OptionError, match=r"cta is 4; it must be in 0 \.\. grid - 1 = 3"):
        StaticPersistentScheduler(of(8, 8, 8, block=(8, 8, 8)), 4, 4)


ONE = of(8, 8, 8, block=(8, 8, 8))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: StaticPersistentScheduler(None, 1, 0), "params is a NoneType; it must be a TileS"),
        (lambda: StaticPersistentScheduler(ONE, 0, 0), "grid is 0; it must be a whole number of 1"),
        (lambda: StaticPersistentScheduler(ONE, 2, 0.5), "cta is 0.5; it must be in 0 .. grid - 1"),
        (lambda: scheduler().get_current_work_for_linear_idx(-1), "the linear index is -1; it"),
        (lambda: scheduler().advance_to_next_work(-1), "advance_count is -1; it must be a whole"),
        (lambda: scheduler().get_linear_idx_from_m_and_n(1, 0), "there is no tile m_idx 1, n_idx "
         "0, l_idx 0 of chunk 0; the tiles of a chunk are 1 x 1, in 1 batches"),
        (lambda: scheduler().get_linear_idx_from_m_and_n(0, 0, 0, 1), "chunks are in 0 .. 0"),
    ],
)  # fmt: skip
def test_a_scheduler_refuses_what_there_is_not(call, text):
    with pytest.raises(errors.OptionError) as caught:
        call()
    assert str(caught.value).startswith("scheduling: ")
    assert text in str(caught.value)


def scheduler():
    return StaticPersistentScheduler(ONE, 1, 0)
