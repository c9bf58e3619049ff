"""Which test covers which reported input, and which fault of PyTorch's memory-efficient attention.

`INPUTS` are the inputs of attention_anchors.md (A..), `FAULTS` those of seed_attention.md (M..)
that issue 5 names. What stands here exists.
"""

from __future__ import annotations

import pytest
from tests.proofs import missing

GPU, BACKWARD = "ops/attention/test_gpu.py", "ops/attention/test_gpu_backward.py"
DROPOUT, VARLEN = "ops/attention/test_gpu_dropout.py", "ops/attention/varlen"

INPUTS = {
    "A1": (
        "A1-columns-of-min",
        f"{GPU}::test_a1_columns_of_finfo_min_at_full_size",
        f"{BACKWARD}::test_a1_columns_of_finfo_min_at_full_size",
    ),
    "A2": ("A2-blind-rows",),
    "A4": ("A4-one-key",),
    "A5": ("A5-M1-more-rows-than-keys",),
    "A6": ("A6-unbounded-window",),
    "A8": (
        f"{GPU}::test_a8_bias_and_mask_beyond_two_to_the_32",
        f"{BACKWARD}::test_a8_gradient_of_a_bias_beyond_two_to_the_32",
        f"{DROPOUT}::test_a8_both_directions_have_the_mask_beyond_2_to_the_32_scores",
    ),
    "A9": (
        "A9-length-outermost",
        f"{GPU}::test_a9_offsets_beyond_two_to_the_31",
        f"{BACKWARD}::test_a9_offsets_beyond_two_to_the_31",
    ),
    "A11": ("ops/attention/test_backward_emulator.py::test_a11_each_gradient_comes_alone",),
    "A12": ("A12-bias-both", "A12-bias-heads", "A12-bias-rows", "A12-bias-expanded"),
    "A14": ("A14-empty-entries",),
    "A16": ("A16-empty",),
    "A17": (f"{BACKWARD}::test_a17_one_hundred_runs_give_the_same_bits",),
    "A18": (
        "ops/attention/test_dropout_emulator.py::test_forward_and_backward_have_the_hosts_mask",
        f"{DROPOUT}::test_the_mask_is_that_of_the_generator",
        f"{DROPOUT}::test_a18_every_size_of_tile_has_the_same_mask",
        f"{DROPOUT}::test_each_replay_of_a_graph_has_a_new_mask_and_the_backward_has_it_too",
    ),
    "A19": (
        f"{VARLEN}/test_compile.py::test_other_lengths_and_bounds_do_not_recompile",
        f"{VARLEN}/test_gpu.py::test_a_graph_replays_with_other_lengths_and_nothing_waits",
    ),
    "A22": ("A22-head-dim", "A22-real"),
    "A24": ("A24-cut-from-128", "A24-cut-from-64"),
}
FAULTS = {
    "M1": (f"{BACKWARD}::test_where_memory_efficient_attention_is_wrong", "M1"),
    "M2": (f"{BACKWARD}::test_where_memory_efficient_attention_is_wrong", "M2"),
    "M3": (f"{VARLEN}/test_varlen.py::test_dropout_is_that_of_the_padded_batch", "M3"),
    "M4": (
        f"{GPU}::test_more_heads_than_a_grid_dimension_holds",
        f"{BACKWARD}::test_where_memory_efficient_attention_is_wrong",
        f"{VARLEN}/test_gpu.py::test_more_than_65535_sequences",
        "M4",
    ),
    "M5": (f"{GPU}::test_m5_one_query_of_many_heads", "M5"),
    "M6": (f"{DROPOUT}::test_offsets_beyond_32_bits", *INPUTS["A8"], *INPUTS["A9"]),
    "M7": (f"{BACKWARD}::test_where_memory_efficient_attention_is_wrong", "M7"),
    "M8": (
        "integrations/test_sdpa_conventions.py::"
        "test_without_a_longest_sequence_of_keys_it_is_all_keys",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*INPUTS, *FAULTS])
def test_what_is_said_to_cover_it_exists(name):
    assert missing((INPUTS | FAULTS)[name], ("ops/attention", "integrations")) == []


def test_every_input_and_fault_of_the_issue_is_covered():
    inputs = (1, 2, 4, 5, 6, 8, 9, 11, 12, 14, 16, 17, 18, 19, 22, 24)
    assert set(INPUTS) == {f"A{n}" for n in inputs}
    assert set(FAULTS) == {f"M{n}" for n in range(1, 9)}
