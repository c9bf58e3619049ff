"""Which test covers which reported input, and which fault of PyTorch's asynchronous-input GEMM.

`INPUTS` are the inputs of gemm_anchors.md (T..; of T9, T10, T11, T16 and T17 what one GPU shows),
`FAULTS` those of seed_async_input_gemm.md (B..) that issue 6 names. What stands here exists.
"""

from __future__ import annotations

import pytest
from tests.proofs import missing

GPU, ASYNC = "ops/gemm/test_gpu.py", "ops/gemm/test_async_gpu.py"
HOST, EMULATOR = "scheduling/test_host.py", "ops/gemm/test_emulator.py"

INPUTS = {
    "T1": (
        f"{GPU}::test_every_tile_and_transpose",
        f"{ASYNC}::test_chunks_brought_by_a_copy_stream_equal_the_plain_product",
        f"{EMULATOR}::test_chunks_that_arrive_while_the_kernel_runs",
    ),
    "T2": (
        f"{ASYNC}::test_the_seeds_operator_where_the_original_hangs_or_refuses",
        f"{HOST}::test_no_signal_index_is_out_of_range_where_the_original_hangs",
    ),
    "T9": (
        f"{GPU}::test_a_graph_replays",
        f"{ASYNC}::test_a_graph_that_sets_its_flags_back_replays",
    ),
    "T10": (
        f"{ASYNC}::test_a_missing_chunk_ends_in_time_and_the_context_lives",
        f"{ASYNC}::test_a_chunk_that_is_late_but_in_time",
        f"{EMULATOR}::test_a_chunk_that_never_comes_ends_the_kernel_and_is_said_once",
        f"{EMULATOR}::test_the_next_call_of_an_operator_says_it_too",
    ),
    "T11": (
        f"{ASYNC}::test_rows_that_are_there_are_done_while_others_are_missing",
        f"{ASYNC}::test_chunks_brought_by_a_copy_stream_equal_the_plain_product",
        f"{ASYNC}::test_a_chunk_that_is_late_but_in_time",
    ),
    "T16": (f"{ASYNC}::test_the_time_counts_from_when_the_kernel_begins",),
    "T17": (
        f"{ASYNC}::test_an_environment_in_which_later_copies_cannot_start",
        "ops/gemm/test_errors.py::test_nothing_waits_for_ever_for_a_copy_that_cannot_start",
    ),
    "T21": (
        "scheduling/test_exhaustive.py::"
        "test_every_grid_is_covered_once_and_a_column_of_a_group_stays_together",
        "scheduling/test_device.py::"
        "test_static_and_async_schedules_on_the_emulator_equal_the_hosts",
        "scheduling/test_device.py::test_schedules_on_a_gpu_equal_the_hosts",
    ),
}
FAULTS = {
    "B1": INPUTS["T2"],
    "B2": (
        f"{HOST}::test_chunks_come_as_a_ring_from_the_pivot",
        f"{HOST}::test_every_element_of_c_is_covered_exactly_once",
    ),
    "B3": (f"{HOST}::test_a_group_stays_inside_its_chunk_and_keeps_columns_together",),
    "B4": (  # a named barrier past the last: a helper's ids are checked as the kernel compiles
        "cpasync/test_gluon_wrong.py::test_what_is_wrong_is_said_with_the_line",
        "emulator/test_small_faults.py::test_a_named_barrier_of_the_compilers_own",
    ),
    "B5": (f"{ASYNC}::test_the_first_calls_of_a_process_launch_nothing_behind_themselves",),
    "B6": (
        "ops/gemm/test_api.py::test_the_seeds_schema_takes_what_the_original_refuses",
        f"{ASYNC}::test_the_seeds_operator_where_the_original_hangs_or_refuses",
    ),
    "B7": (
        f"{ASYNC}::test_a_kernel_that_was_launched_before_brings_the_rows",
        f"{HOST}::test_the_grid_leaves_multiprocessors_to_those_who_bring_the_input",
    ),
}


@pytest.mark.parametrize("name", [*INPUTS, *FAULTS])
def test_what_is_said_to_cover_it_exists(name):
    assert missing((INPUTS | FAULTS)[name]) == []


def test_every_input_and_fault_of_the_issue_is_covered():
    assert set(INPUTS) == {f"T{n}" for n in (1, 2, 9, 10, 11, 16, 17, 21)}
    assert set(FAULTS) == {f"B{n}" for n in range(1, 8)}
