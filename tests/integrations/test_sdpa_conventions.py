"""PyTorch's conventions and ours, on the CPU: layouts, masks, log-sum-exp, gradients' storage."""

import math
import re

import pytest
import torch
from tests.integrations import torch_sdpa_spec as spec
from tests.integrations.torch_sdpa_cases import (
    BF16,
    DENSE,
    FP16,
    PACKED,
    SdpaCase,
    arguments,
    backward_arguments,
    seeded,
)

from tileloom.integrations import sdpa_conventions as conventions
from tileloom.integrations import sdpa_packed
from tileloom.integrations.sdpa_checks import Refused
from tileloom.integrations.torch_sdpa_kernels import backward, forward
from tileloom.ops.attention.masks import Mask

SMALL = SdpaCase("small", (1, 5, 6, 2, 8, 8))


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


def run_forward(case, tensors, **options):
    positional, rest = arguments(tensors, **case.packing(), **case.options, **options)
    return forward(*positional, **rest)


def run_backward(case, tensors, results, **options):
    positional, rest = backward_arguments(
        case.upstream(), tensors, results, **case.packing(), **case.options
    )
    return backward(*positional, **rest, **options)


@pytest.mark.parametrize("case", [*DENSE, *PACKED], ids=lambda case: case.id)
def test_a_forward_follows_the_specification(case):
    tensors = case.tensors()
    results = run_forward(case, tensors)
    spec.check_forward(results, tensors, **seeded(case, results))
    _, _, seed, offset, max_q, max_k = results
    assert (max_q, max_k) == tuple(map(max, case.lengths or [[n] for n in case.sizes[1:3]]))
    for state in (seed, offset):
        assert (state.dtype, state.shape, state.device.type) == (torch.int64, (), "cpu")


@pytest.mark.parametrize("case", [*DENSE, *PACKED], ids=lambda case: case.id)
def test_a_backward_follows_the_specification(case):
    tensors = case.tensors()
    outputs = run_forward(case, tensors)
    results = run_backward(case, tensors, outputs)
    spec.check_gradients(results, case.upstream(), tensors, **seeded(case, outputs))
    for gradient, tensor in zip(results, tensors):
        assert gradient.shape == tensor.shape
        assert gradient.dtype == tensor.dtype
    assert all(gradient.is_contiguous() for gradient in results[:3])
    assert (results[3] is None) == (not case.bias)


def test_the_log_sum_exp_is_empty_unless_it_is_asked_for():
    case = SdpaCase("small", (2, 5, 6, 3, 8, 8))
    lse = run_forward(case, case.tensors(), compute_log_sumexp=False)[1]
    assert lse.shape == (2, 3, 0)
    assert lse.dtype == torch.float32


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 64])
@pytest.mark.parametrize("may_see_nothing", [True, False])
def test_the_log_sum_exp_is_padded_with_infinity_and_rows_without_keys_hold_0(
    rows, may_see_nothing
):
    lse = torch.arange(1.0, 1 + 2 * 3 * rows).reshape(2, 3, rows)
    want = lse.clone()
    if may_see_nothing:
        lse[0, 1, 0] = -math.inf
        want[0, 1, 0] = 0.0
        lse[1, 1, 0] = want[1, 1, 0] = math.nan  # of a NaN among the inputs: it stays
    padded = conventions.padded_lse(lse, may_see_nothing=may_see_nothing)
    assert padded.shape == (2, 3, -(-rows // 32) * 32)
    assert padded.is_contiguous()
    assert torch.equal(padded[..., :rows].nan_to_num(-1.0), want.nan_to_num(-1.0))
    assert bool((padded[..., rows:] == math.inf).all())
    back = conventions.rows_of_lse(padded, rows)
    assert back.is_contiguous()
    assert torch.equal(back.nan_to_num(-1.0), want.nan_to_num(-1.0))


@pytest.mark.parametrize("rows", [5, 6])
@pytest.mark.parametrize("columns", [5, 8])
@pytest.mark.parametrize(
    ("mask_type", "window"),
    [(0, None), (0, 0), *((m, w) for m in (1, 2) for w in (None, 0, 1, 3))],
)
def test_masks_are_those_of_the_specification(mask_type, window, columns, rows):
    query, key = torch.empty(1, rows, 1, 8), torch.empty(1, columns, 1, 8)
    call = conventions.Call(
        query, key, key, None, None, None, None, None, 0.0, mask_type, None, window
    )
    shown = Mask(call.band).materialize(1, rows, columns)[0, 0]
    want = spec.visible(rows, columns, mask_type, window)
    assert torch.equal(shown, want)
    assert call.may_see_nothing or bool(want.any(1).all())


@pytest.mark.parametrize("longest", [4, 32, 33])
def test_the_log_sum_exp_of_packed_rows_is_laid_out_by_sequences_and_back(longest):
    starts = torch.tensor([0, 2, 2, 6, 7], dtype=torch.int32)
    lse = torch.arange(1.0, 1 + 2 * 9).reshape(2, 9)  # two rows past the last sequence
    lse[1, 3] = -math.inf
    padded = sdpa_packed.lse_of_sequences(lse, starts, longest)
    assert padded.shape == (4, 2, -(-longest // 32) * 32)
    assert padded.is_contiguous()
    want = torch.full_like(padded, math.inf)
    for s, (first, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:])):
        want[s, :, : end - first] = lse[:, first:end].nan_to_num(neginf=0.0)
    assert torch.equal(padded, want)
    back = sdpa_packed.lse_of_rows(padded, starts, 9)
    assert back.is_contiguous()
    assert torch.equal(back[:, :7], lse[:, :7].nan_to_num(neginf=0.0))


def test_packed_rows_may_be_none():
    starts = torch.tensor([0, 0, 0], dtype=torch.int32)
    padded = sdpa_packed.lse_of_sequences(torch.empty((3, 0)), starts, 5)
    assert torch.equal(padded, torch.full((2, 3, 32), math.inf))
    assert sdpa_packed.lse_of_rows(padded, starts, 0).shape == (3, 0)
    assert sdpa_packed.lse_of_rows(padded[:0], starts[:1], 4).shape == (3, 4)


def test_lengths_of_keys_leave_the_end_of_each_sequence_out():
    lengths = {"seqlen_k": torch.tensor([7, 2, 0, 13], dtype=torch.int32)}
    case = PACKED[0]
    tensors = case.tensors()
    results = run_forward(case, tensors, **lengths)
    spec.check_forward(results, tensors, **case.packing(), **lengths)


def test_without_a_longest_sequence_of_keys_it_is_all_keys():
    """Fault M8: PyTorch's kernel returns 0, which its own backward refuses."""
    case = PACKED[0]
    tensors = case.tensors()
    packing = case.packing() | {"max_seqlen_k": None}
    positional, _ = arguments(tensors, **packing)
    results = forward(*positional)
    assert results[4:] == (40, 66)
    spec.check_forward(results, tensors, **case.packing())
    positional, _ = backward_arguments(case.upstream(), tensors, results, **packing)
    spec.check_gradients(backward(*positional), case.upstream(), tensors, **case.packing())


def test_packed_gradients_share_one_tensor_if_they_are_asked_to():
    case = next(case for case in PACKED if case.layout == "packed")
    tensors = case.tensors()
    results = run_backward(case, tensors, run_forward(case, tensors), shared_storage_dqdkdv=True)
    spec.check_gradients(results[:3], case.upstream(), tensors, **case.packing())
    assert len({gradient.untyped_storage().data_ptr() for gradient in results[:3]}) == 1


def test_a_bias_gets_a_gradient_whose_rows_are_padded_to_16():
    case = SdpaCase("bias", (2, 5, 33, 3, 16, 16), bias="full")
    tensors = case.tensors()
    results = run_backward(case, tensors, run_forward(case, tensors))
    assert results[3].shape == (2, 3, 5, 33)
    assert results[3].stride() == (3 * 5 * 48, 5 * 48, 48, 1)


def test_a_bias_that_needs_no_gradient_gets_none():
    case = SdpaCase("bias", (2, 5, 33, 3, 16, 16), bias="full")
    tensors = case.tensors()
    positional, rest = backward_arguments(case.upstream(), tensors, run_forward(case, tensors))
    positional[-1] = False
    results = backward(*positional, **rest)
    assert results[3] is None
    spec.check_gradients(results[:3], case.upstream(), tensors)


def test_gradients_share_one_tensor_if_they_are_asked_to():
    case = SdpaCase("shared", (2, 40, 40, 3, 16, 16), layout="packed")
    tensors = case.tensors()
    results = run_backward(case, tensors, run_forward(case, tensors), shared_storage_dqdkdv=True)
    spec.check_gradients(results[:3], case.upstream(), tensors)
    storages = {gradient.untyped_storage().data_ptr() for gradient in results[:3]}
    assert len(storages) == 1
    for place, gradient in enumerate(results[:3]):
        assert gradient.stride() == (40 * 3 * 3 * 16, 3 * 3 * 16, 16, 1)
        assert gradient.storage_offset() == place * 3 * 16


def test_a_row_whose_log_sum_exp_is_0_is_not_one_that_sees_no_key():
    """One key of score 0: P = 1 and LSE = 0. Taken for an empty row it would lose its gradient."""
    case = SdpaCase("zero", (1, 3, 1, 1, 8, 8))
    query, key, value = case.tensors()
    tensors = (torch.zeros_like(query), key, value)
    results = run_forward(case, tensors)
    assert bool((results[1][..., :3] == 0).all())
    grads = run_backward(case, tensors, results)
    assert torch.allclose(grads[2].float(), case.upstream().float().sum(1, keepdim=True), atol=1e-2)


def test_without_a_gradient_of_the_output_there_are_none():
    tensors = SMALL.tensors()
    positional, _ = backward_arguments(SMALL.upstream(), tensors, run_forward(SMALL, tensors))
    assert backward(None, *positional[1:]) == (None, None, None, None)


@pytest.mark.parametrize(
    "sizes", [(0, 5, 6, 2, 8, 8), (2, 0, 6, 2, 8, 8), (2, 5, 0, 2, 8, 8), (2, 5, 6, 0, 8, 8)]
)
def test_an_empty_problem_gives_zeros(sizes):
    case = SdpaCase("empty", sizes, bias="full")
    tensors = case.tensors()
    results = run_forward(case, tensors)
    b, m, _, h, _, kv = sizes
    assert results[0].shape == (b, m, h, kv)
    assert not bool(results[0].any())
    assert results[1].shape == (b, h, -(-m // 32) * 32)
    assert not bool(results[1][..., :m].any())
    for gradient, tensor in zip(run_backward(case, tensors, results), tensors):
        assert gradient.shape == tensor.shape
        assert not bool(gradient.any())


def test_num_splits_key_changes_nothing():
    tensors = SMALL.tensors()
    results = run_forward(SMALL, tensors)
    plain = run_backward(SMALL, tensors, results)
    split = run_backward(SMALL, tensors, results, num_splits_key=3)
    assert all(torch.equal(a, b) for a, b in zip(plain[:3], split[:3]))


def _refused(change, **options):
    tensors = change(list(SMALL.tensors()))
    positional, rest = arguments(tuple(tensors), **options)
    with pytest.raises(Refused) as refused:
        forward(*positional, **rest)
    return str(refused.value)


def _keep(tensors):
    return tensors


def _query(change):
    return lambda tensors: [change(tensors[0]), *tensors[1:]]


def _starts(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


_FAULTS = [
    (_query(lambda t: t[0]), {}, "query has 3 dimensions, not 4"),
    (_query(lambda t: t.to(BF16)), {}, "key has dtype torch.float16, query torch.bfloat16"),
    (_query(lambda t: t.double()), {}, "query has dtype torch.float64, query torch.float64"),
    (_query(lambda t: t.expand(2, -1, -1, -1)), {}, "query, key and value differ in their batch"),
    (lambda t: [t[0], t[1][:, 1:], t[2]], {}, "key and value differ in their lengths"),
    (lambda t: [t[0][:, :, :1], *t[1:]], {}, "the heads of query, key and value do not fit"),
    (_query(lambda t: t[..., :4]), {}, "query and key differ in their head dim"),
    (_keep, {"custom_mask_type": 3}, "custom_mask_type is 3, not 0, 1 or 2"),
    (_keep, {"window_size": 4}, "window_size is 4 without a causal custom_mask_type"),
    (_keep, {"dropout_p": 1.0}, r"dropout_p is 1.0, not in \[0, 1\)"),
    (_keep, {"dropout_p": 1 - 2.0**-26}, r"dropout_p is 0.99999998\d*, not in \[0, 1\)"),
    (_keep, {"scale": math.nan}, "scale is nan"),
    (lambda t: [*t, t[0].new_empty(5, 6)], {}, r"bias has shape \(5, 6\), not \(1, 2, 5, 6\)"),
    (lambda t: [*t, torch.empty(1, 2, 5, 6)], {}, "bias has dtype torch.float32"),
    (_keep, {"cu_seqlens_q": _starts(0, 5)}, "only one of cu_seqlens_q and cu_seqlens_k"),
    (
        _keep,
        {"cu_seqlens_q": _starts(0, 5), "cu_seqlens_k": _starts(0, 6, dtype=torch.int64)},
        "cu_seqlens_k is not a contiguous int32 tensor of one dimension",
    ),
    (
        _keep,
        {"cu_seqlens_q": _starts(0, 5), "cu_seqlens_k": _starts(0, 3, 6)},
        "cu_seqlens_q and cu_seqlens_k differ in their sizes",
    ),
    (
        _keep,
        {"cu_seqlens_q": _starts(0, 5), "cu_seqlens_k": _starts(0, 6)},
        "max_seqlen_q is missing",
    ),
    (
        _keep,
        {
            "cu_seqlens_q": _starts(0, 5),
            "cu_seqlens_k": _starts(0, 6),
            "max_seqlen_q": 5,
            "seqlen_k": torch.tensor([3, 3], dtype=torch.int32),
        },
        "seqlen_k is not an int32 tensor on query's device with an entry for each sequence",
    ),
    (
        lambda tensors: [t.expand(2, -1, -1, -1) for t in tensors],
        {"cu_seqlens_q": _starts(0, 5), "cu_seqlens_k": _starts(0, 6), "max_seqlen_q": 5},
        "packed sequences in a batch of 2, not 1",
    ),
    (
        lambda t: [*t, torch.empty(1, 2, 5, 6, dtype=FP16)],
        {"cu_seqlens_q": _starts(0, 5), "cu_seqlens_k": _starts(0, 6), "max_seqlen_q": 5},
        "a bias with packed sequences",
    ),
]


def _backward_refused(change, **options):
    tensors = SMALL.tensors()
    positional, _ = backward_arguments(SMALL.upstream(), tensors, run_forward(SMALL, tensors))
    change(positional)
    with pytest.raises(Refused) as refused:
        backward(*positional, **options)
    return str(refused.value)


def _set(place, change):
    def run(positional):
        positional[place] = change(positional[place])

    return run


_BACKWARD_FAULTS = [
    (_set(0, lambda t: t[:, 1:]), {}, r"grad_out has shape \(1, 4, 2, 8\) and dtype torch.float16"),
    (_set(5, lambda t: t.float()), {}, r"out has shape \(1, 5, 2, 8\) and dtype torch.float32"),
    (_set(10, lambda t: t.half()), {}, "logsumexp is not a float32 tensor of three dimensions"),
    (_set(10, lambda t: t[..., :4]), {}, r"logsumexp has shape \(1, 2, 4\)"),
    (_set(15, lambda t: True), {}, "bias_requires_grad without a bias"),
    (
        _set(0, lambda t: t),
        {"shared_storage_dqdkdv": True},
        "shared_storage_dqdkdv for gradients of different shapes",
    ),
]


@pytest.mark.parametrize(
    ("change", "options", "text"), _BACKWARD_FAULTS, ids=[f[2] for f in _BACKWARD_FAULTS]
)
def test_a_backward_that_does_not_fit_its_forward_is_left_to_pytorch(change, options, text):
    assert re.match(text, _backward_refused(change, **options))


def test_splitting_keys_where_algorithms_are_deterministic_is_left_to_pytorch():
    torch.use_deterministic_algorithms(True)
    try:
        text = _backward_refused(lambda positional: None, num_splits_key=2)
    finally:
        torch.use_deterministic_algorithms(False)
    assert text == "num_splits_key is 2 where algorithms are deterministic"


@pytest.mark.parametrize(("change", "options", "text"), _FAULTS, ids=[f[2] for f in _FAULTS])
def test_what_pytorch_has_to_refuse_is_left_to_it(change, options, text):
    assert re.match(text, _refused(change, **options))
