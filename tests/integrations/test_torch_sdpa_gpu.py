"""The drop-in on a GPU: against the specification, and against PyTorch's own kernels."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from tests.integrations import torch_sdpa_spec as spec
from tests.integrations.torch_sdpa_cases import (
    BF16,
    BOTTOM,
    CAUSAL,
    DENSE,
    FP16,
    FP32,
    PACKED,
    SdpaCase,
    arguments,
    backward_arguments,
    seeded,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from tileloom.integrations import torch_sdpa
from tileloom.ops import record_choices
from tileloom.testing import assert_accurate, poisoned_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("exact_products", "same_numbers"),
    # A problem that no kernel of Hopper takes is what some of these cases are about.
    pytest.mark.filterwarnings("ignore::tileloom.ops._op.PerformanceWarning"),
    pytest.mark.filterwarnings("ignore:.*does not pass window_size on:UserWarning"),
]
FORWARD = torch.ops.aten._efficient_attention_forward
BACKWARD = torch.ops.aten._efficient_attention_backward
FORWARD_NAME = "_efficient_attention_forward"


@pytest.fixture(scope="module")
def exact_products():
    """References and baselines in full precision."""
    matmul = torch.backends.cuda.matmul
    names = (
        "allow_tf32",
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
    )
    before = {name: getattr(matmul, name) for name in names}
    for name in names:
        setattr(matmul, name, False)
    yield
    for name, value in before.items():
        setattr(matmul, name, value)


@pytest.fixture
def same_numbers():
    torch.manual_seed(0)


@contextlib.contextmanager
def ours(*, forward=1, backward=0):
    """Register, and see that exactly so many calls were tileloom's and none PyTorch's."""
    before = torch_sdpa.calls()
    with torch_sdpa.register(float32=True):
        yield
    after = torch_sdpa.calls()
    assert dict(after.refused) == dict(before.refused)
    assert after.forward - before.forward == forward
    assert after.backward - before.backward == backward


def both(case, tensors, upstream=None):
    """A forward and a backward of the operators as they are registered now."""
    packing = case.packing("cuda")
    upstream = case.upstream("cuda") if upstream is None else upstream
    positional, rest = arguments(tensors, **packing, **case.options)
    results = FORWARD(*positional, **rest)
    positional, rest = backward_arguments(upstream, tensors, results, **packing, **case.options)
    return results, BACKWARD(*positional, **rest)


def originals(case, tensors):
    """The same by PyTorch's own kernels; None for strides that these do not take."""
    try:
        return both(case, tensors)
    except RuntimeError as error:
        if any(text in str(error) for text in ("aligned", "multiple of", "no kernel found")):
            return None, None
        raise


LARGE = [
    SdpaCase("d64", (2, 300, 200, 4, 64, 64), BF16, layout="bhmk"),
    SdpaCase("d64-causal", (2, 300, 200, 4, 64, 64), BF16, options=CAUSAL),
    SdpaCase("d128-causal", (1, 257, 320, 3, 128, 128), FP16, options=BOTTOM),
    SdpaCase("M1-d128", (1, 200, 137, 2, 128, 128), BF16, options=BOTTOM),
    SdpaCase("M2-d64", (1, 256, 128, 2, 64, 64), BF16, options=BOTTOM | {"window_size": 32}),
    SdpaCase("M7", (1, 300, 100, 2, 64, 192), BF16, options=BOTTOM),
    SdpaCase("d96", (2, 200, 200, 3, 96, 96), FP16, layout="packed"),
    SdpaCase("d256", (1, 130, 260, 2, 256, 256), BF16, options=CAUSAL),
    SdpaCase("odd-dim", (1, 130, 60, 2, 20, 20), FP16),
    SdpaCase("d512", (1, 70, 60, 1, 512, 512), FP16),
    SdpaCase("fp32", (1, 200, 130, 2, 64, 64), FP32, layout="bhmk", options=CAUSAL),
    SdpaCase("bias", (2, 200, 136, 3, 64, 64), BF16, bias="full"),
    SdpaCase("bias-odd", (2, 200, 133, 3, 64, 64), FP16, bias="expanded", options=CAUSAL),
    SdpaCase("bias-fp32", (1, 100, 133, 2, 32, 32), FP32, bias="sliced"),
    SdpaCase("bias-hides", (2, 129, 66, 2, 128, 128), BF16, bias="hides"),
    SdpaCase("dropout", (2, 200, 130, 3, 64, 64), BF16, options={"dropout_p": 0.2}),
    SdpaCase("dropout-odd", (2, 77, 133, 3, 32, 32), FP16, options=CAUSAL | {"dropout_p": 0.5}),
]
CASES = [*DENSE, *PACKED, *LARGE]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_kernels_follow_the_specification_in_pytorchs_layouts(case):
    tensors = case.tensors("cuda")
    torch.manual_seed(1)
    theirs, their_grads = originals(case, tensors)
    state = torch.cuda.get_rng_state()
    torch.manual_seed(1)
    with ours(backward=1), poisoned_memory():
        results, grads = both(case, tensors)
        torch.cuda.synchronize()
    options = seeded(case, results)
    spec.check_forward(results, tensors, **options)
    spec.check_gradients(grads, case.upstream("cuda"), tensors, **options)
    if theirs is None:
        return
    if not case.lengths:  # fault M3: another count of random numbers
        assert torch.equal(torch.cuda.get_rng_state(), state)
    for mine, own in zip((*results[:4], *grads), (*theirs[:4], *their_grads)):
        assert (mine is None) == (own is None)
        if mine is not None:
            assert (mine.shape, mine.dtype, mine.device) == (own.shape, own.dtype, own.device)
            assert mine.stride() == own.stride()
    assert results[4:] == theirs[4:]
    if case.options.get("dropout_p"):
        assert torch.equal(torch.stack(results[2:4]), torch.stack(theirs[2:4]))


@pytest.mark.parametrize("kept", [0.9, 0.5])
@pytest.mark.parametrize(("rows", "columns"), [(70, 64), (33, 61)])
def test_dropout_keeps_what_pytorchs_kernel_keeps_to_the_bit(rows, columns, kept):
    """Alike scores and one-hot values: each output is the mask, times a constant."""
    heads, batch = 3, 2
    query = torch.zeros((batch, rows, heads, 64), dtype=FP16, device="cuda")
    key = torch.zeros((batch, columns, heads, 64), dtype=FP16, device="cuda")
    value = torch.eye(columns, 64, dtype=FP16, device="cuda")[None, :, None]
    value = value.expand(batch, columns, heads, 64).contiguous()
    positional, _ = arguments((query, key, value), dropout_p=1 - kept)
    torch.manual_seed(7)
    torch.rand(5, device="cuda")  # the offset is not a multiple of 4 times the scores
    state = torch.cuda.get_rng_state()
    theirs = FORWARD(*positional)
    torch.cuda.set_rng_state(state)
    with ours():
        mine = FORWARD(*positional)
    assert torch.equal(mine[0] != 0, theirs[0] != 0)
    assert torch.equal(torch.stack(mine[2:4]), torch.stack(theirs[2:4]))
    share = float((mine[0][..., :columns] != 0).double().mean())
    assert abs(share - kept) < 0.03


def sdpa(query, key, value, **options):
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value, **options)


def leaves_of(case):
    return tuple(t.detach().clone().requires_grad_() for t in case.tensors("cuda"))


def judge(case, out, leaves, grads):
    """Judge what SDPA gave, `[B, H, M, Kv]`, and the gradients of `[B, M, H, K]`."""
    tensors = tuple(t.detach() for t in leaves)
    reference = spec.forward(*tensors, **case.options)[0]
    baseline = spec.forward(*tensors, dtype=case.dtype, **case.options)[0]
    assert_accurate(out.detach().transpose(1, 2).contiguous(), reference, baseline)
    spec.check_gradients(grads, case.upstream("cuda"), tensors, **case.options)


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
@pytest.mark.parametrize("layout", ["bmhk", "bhmk"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_scaled_dot_product_attention_goes_through_it(is_causal, layout, dtype):
    options = CAUSAL if is_causal else {}
    case = SdpaCase("sdpa", (2, 200, 200, 4, 64, 64), dtype, layout=layout, options=options)
    leaves = leaves_of(case)
    with ours(backward=1):
        out = sdpa(*(t.transpose(1, 2) for t in leaves), is_causal=is_causal)
        grads = torch.autograd.grad(out, leaves, case.upstream("cuda").transpose(1, 2))
    assert out.transpose(1, 2).is_contiguous()
    judge(case, out, leaves, grads)


@pytest.mark.parametrize("upstream", ["rows", "all", "heads first"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_gradient_of_the_output_may_have_any_strides(dtype, upstream):
    case = SdpaCase("strides", (2, 200, 130, 3, 64, 64), dtype)
    leaves = leaves_of(case)
    given = case.upstream("cuda")
    if upstream == "heads first":
        given = given.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        given = (given[:, :1] if upstream == "rows" else given[:1, :1, :1, :1]).expand(given.shape)
    with ours(backward=1):
        out = sdpa(*(t.transpose(1, 2) for t in leaves))
        grads = torch.autograd.grad(out, leaves, given.transpose(1, 2))
    spec.check_gradients(grads, given, tuple(t.detach() for t in leaves))


@pytest.mark.parametrize("is_causal", [False, True])
def test_jagged_tensors_go_through_it(is_causal):
    case = next(case for case in PACKED if case.name == "packed-causal")
    leaves = leaves_of(case)
    offsets = case.packing("cuda")["cu_seqlens_q"].long()

    def nested(tensor):
        jagged = torch.nested.nested_tensor_from_jagged(tensor[0], offsets, max_seqlen=33)
        return jagged.transpose(1, 2)

    with ours(backward=1):
        out = sdpa(*map(nested, leaves), is_causal=is_causal).transpose(1, 2).values()
        grads = torch.autograd.grad(out, leaves, case.upstream("cuda")[0])
    options = case.packing("cuda") | (CAUSAL if is_causal else {})
    tensors = tuple(t.detach() for t in leaves)
    reference, baseline = (
        spec.forward(*tensors, dtype=d, **options)[0] for d in (torch.float64, case.dtype)
    )
    assert_accurate(out.detach()[None].contiguous(), reference, baseline)
    spec.check_gradients(grads, case.upstream("cuda"), tensors, **options)


@pytest.mark.parametrize("shape", [(33,), (40, 33), (1, 4, 40, 33), (2, 1, 1, 33)], ids=str)
def test_an_additive_mask_of_any_shape_gets_its_gradient(shape):
    case = SdpaCase("mask", (2, 40, 33, 4, 64, 64), BF16)
    leaves = leaves_of(case)
    mask = torch.randn(shape, dtype=BF16, device="cuda", requires_grad=True)
    with ours(backward=1):
        out = sdpa(*(t.transpose(1, 2) for t in leaves), attn_mask=mask)
        *grads, own = torch.autograd.grad(
            out, (*leaves, mask), case.upstream("cuda").transpose(1, 2)
        )
    whole = mask.detach().expand(2, 4, 40, 33)
    tensors = (*(t.detach() for t in leaves), whole)
    spec.check_gradients(grads, case.upstream("cuda"), tensors)
    reference, baseline = (
        spec.gradients(case.upstream("cuda"), tensors, dtype)[3].sum_to_size(shape)
        for dtype in (torch.float64, BF16)
    )
    assert_accurate(own, reference, baseline, name="mask")


def test_a_bool_mask_hides_keys():
    case = SdpaCase("bool", (2, 40, 33, 4, 64, 64), BF16)
    tensors = case.tensors("cuda")
    mask = torch.rand((2, 1, 40, 33), device="cuda") < 0.6
    mask[:, :, 5] = False
    with ours():
        out = sdpa(*(t.transpose(1, 2) for t in tensors), attn_mask=mask)
    bias = torch.zeros(mask.shape, dtype=BF16, device="cuda").masked_fill(~mask, -torch.inf)
    whole = (*tensors, bias.expand(2, 4, 40, 33))
    reference, baseline = (spec.forward(*whole, dtype=d)[0] for d in (torch.float64, BF16))
    assert_accurate(out.transpose(1, 2).contiguous(), reference, baseline)
    assert not bool(out[:, :, 5].any())


def test_the_lower_right_causal_bias_is_right_where_pytorchs_is_not():
    """Fault M1: with more queries than keys PyTorch's kernel shows hidden keys."""
    case = SdpaCase("M1", (1, 200, 137, 2, 32, 32), BF16, options=BOTTOM)
    leaves = leaves_of(case)
    positional, rest = arguments(leaves, **case.options)
    with ours(backward=1):
        out = FORWARD(*positional, **rest)[0]
        grads = torch.autograd.grad(out, leaves, case.upstream("cuda"))
    judge(case, out.transpose(1, 2), leaves, grads)
    theirs = FORWARD(*positional, **rest)[0].detach()
    assert float((theirs - out).detach().abs().max()) > 0.1


def test_more_sequences_than_a_grid_has_rows_get_the_gradient_of_their_bias():
    """Fault M4; judged on the first and the last sequences."""
    case = SdpaCase("M4", (66000, 9, 17, 2, 16, 16), BF16, bias="full")
    tensors = case.tensors("cuda")
    with ours(backward=1):
        results, grads = both(case, tensors)
    out = results[0]
    for part in (slice(0, 3), slice(65534, 65537), slice(65997, 66000)):
        cut = tuple(t[part] for t in tensors)
        reference, baseline = (spec.forward(*cut, dtype=d)[0] for d in (torch.float64, BF16))
        assert_accurate(out.detach()[part].contiguous(), reference, baseline)
        spec.check_gradients([g[part] for g in grads], case.upstream("cuda")[part], cut)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("has_mask", [False, True])
def test_a_compiled_training_step_goes_through_it(has_mask, dynamic):
    def step(query, key, value, mask):
        out = sdpa(query, key, value, attn_mask=mask, is_causal=mask is None)
        return (out.float() ** 2).sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    for rows in (96, 128):
        case = SdpaCase("compile", (2, rows, rows, 2, 64, 64), BF16, layout="bhmk")
        mask = torch.randn((rows, rows), dtype=BF16, device="cuda") if has_mask else None
        given = [t.transpose(1, 2).detach().requires_grad_() for t in case.tensors("cuda")]
        with ours(forward=2, backward=2):
            want = torch.autograd.grad(step(*given, mask), given)
            grads = torch.autograd.grad(compiled(*given, mask), given)
        for mine, eager in zip(grads, want):
            # The same kernels on the same numbers; only dq is added up in no fixed order.
            assert float((mine - eager).abs().max()) <= 2e-2 * float(eager.abs().max())


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_a_captured_graph_replays_it_with_new_random_numbers(dropout_p):
    case = SdpaCase("graph", (2, 128, 96, 2, 64, 64), BF16, options={"dropout_p": dropout_p})
    tensors, upstream = case.tensors("cuda"), case.upstream("cuda")
    with torch_sdpa.register():
        both(case, tensors)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with ours(backward=1), torch.cuda.graph(graph):
        results, grads = both(case, tensors, upstream)
    assert all(t.is_cuda for t in results[:4])
    seeds = []
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        options = seeded(case, results)
        spec.check_forward(results, tensors, **options)
        spec.check_gradients(grads, case.upstream("cuda"), tensors, **options)
        seeds.append((int(results[2]), int(results[3])))
    assert (seeds[0] != seeds[1]) == bool(dropout_p)


def test_the_hopper_kernels_run_where_they_take_the_problem():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    case = SdpaCase("d64", (2, 300, 200, 4, 64, 64), BF16, layout="bhmk")
    with ours(backward=1), record_choices() as choices:
        both(case, case.tensors("cuda"))
    assert [choice.backend for choice in choices] == ["gluon_sm90", "gluon_sm90"]


def test_deterministic_algorithms_give_the_same_bits():
    case = SdpaCase("fixed", (1, 1000, 1000, 4, 64, 64), BF16)
    tensors = case.tensors("cuda")
    torch.use_deterministic_algorithms(True)
    try:
        with ours(forward=5, backward=5):
            runs = [both(case, tensors)[1] for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run[:3], runs[0][:3]))


def test_head_dims_that_are_too_large_go_to_pytorchs_kernel():
    case = SdpaCase("d520", (1, 40, 40, 1, 520, 520), FP16)
    tensors = case.tensors("cuda")
    positional, rest = arguments(tensors)
    want = FORWARD(*positional, **rest)[0]
    name = f"{FORWARD_NAME}: head dims 520 and 520 exceed 512"
    before = torch_sdpa.calls()
    with torch_sdpa.register():
        for _ in range(2):
            assert torch.equal(FORWARD(*positional, **rest)[0], want)
    after = torch_sdpa.calls()
    assert after.refused[name] == before.refused.get(name, 0) + 2
    assert after.forward == before.forward


def test_a_malformed_call_gets_pytorchs_own_words():
    query, key, value = SdpaCase("bad", (1, 40, 40, 2, 64, 64), FP16).tensors("cuda")
    positional, _ = arguments((query, key[:, :30], value))
    with pytest.raises(RuntimeError) as theirs:
        FORWARD(*positional)
    with torch_sdpa.register(), pytest.raises(RuntimeError) as mine:
        FORWARD(*positional)
    assert str(mine.value).splitlines()[0] == str(theirs.value).splitlines()[0]


def test_pytorch_has_its_own_kernels_again_afterwards():
    case = SdpaCase("again", (1, 200, 137, 2, 64, 64), BF16, options=BOTTOM)
    tensors = case.tensors("cuda")
    positional, rest = arguments(tensors, **case.options)
    want = FORWARD(*positional, **rest)
    with ours():
        mine = FORWARD(*positional, **rest)
    assert not torch.equal(mine[0], want[0])
    again = FORWARD(*positional, **rest)
    assert all(torch.equal(a, b) for a, b in zip(again[:2], want[:2]))


def test_a_kernel_takes_the_others_log_sum_exp_and_seed():
    """A registration may begin or end between forward and backward."""
    options = {"dropout_p": 0.2, "custom_mask_type": 1}
    case = SdpaCase("mixed", (2, 200, 130, 3, 64, 64), BF16, options=options)
    tensors = case.tensors("cuda")
    positional, rest = arguments(tensors, **case.options)
    for first, second in ((True, False), (False, True)):
        with torch_sdpa.register() if first else contextlib.nullcontext():
            results = FORWARD(*positional, **rest)
        given, others = backward_arguments(case.upstream("cuda"), tensors, results, **case.options)
        with torch_sdpa.register() if second else contextlib.nullcontext():
            grads = BACKWARD(*given, **others)
        spec.check_gradients(grads, case.upstream("cuda"), tensors, **seeded(case, results))
