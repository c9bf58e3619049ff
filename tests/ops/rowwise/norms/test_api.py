"""What both norms promise besides their values: errors, dispatch, autocast, compilers."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.ops.rowwise.norms import cases
from tests.ops.rowwise.norms.cases import FUNCTIONS, NormCase
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from tileloom import emulator
from tileloom.errors import (
    ConfigError,
    DeviceError,
    DtypeError,
    GradientError,
    OptionError,
    ShapeError,
    UnknownOptionError,
)
from tileloom.ops import record_choices
from tileloom.ops._op import PerformanceWarning
from tileloom.ops.rowwise.config import ReferenceConfig, Tile, TritonConfig
from tileloom.ops.rowwise.layer_norm import layer_norm
from tileloom.ops.rowwise.norm.config import choose, rule
from tileloom.ops.rowwise.norm.problem import NormProblem
from tileloom.ops.rowwise.rms_norm import rms_norm
from tileloom.ops.rowwise.rows import rows_of
from tileloom.target import H100, SMEM_BYTES, Target

A100 = Target("cuda", (8, 0), 108, SMEM_BYTES[8, 0], "NVIDIA A100-SXM4-80GB")
X = torch.zeros(2, 3, 8)
W = torch.zeros(8)
both = pytest.mark.parametrize("op", ["rms", "layer"])


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda f: f([1.0]), DtypeError,
         "x is a list; it must be a torch.Tensor. Try: torch.as_tensor(x)."),
        (lambda f: f(torch.tensor(1.0)), ShapeError,
         "x has no dimension; it must have shape [..., n]. Try: x.reshape(1)."),
        (lambda f: f(X.int()), DtypeError,
         "x has dtype torch.int32; supported: torch.float16, torch.bfloat16, torch.float32, "
         "torch.float64. Try: x.to(torch.bfloat16)."),
        (lambda f: f(X.to_sparse()), DtypeError,
         "x is a torch.sparse_coo tensor; supported: dense strided tensors. Try: x.to_dense()."),
        (lambda f: f(X, (8,)), DtypeError,
         "weight is a tuple; it must be a torch.Tensor or None. Try: leaving a normalized shape "
         "out: the last dimension is normalised."),
        (lambda f: f(X, W[:7]), ShapeError,
         "weight has shape (7,), x has rows of 8 elements; it must have shape (8,). Try: one entry "
         "for each element of a row."),
        (lambda f: f(X, W[None]), ShapeError,
         "weight has shape (1, 8), x has rows of 8 elements; it must have shape (8,). Try: "
         "weight.flatten()."),
        (lambda f: f(X, W.long()), DtypeError,
         "weight has dtype torch.int64; supported: torch.float16, torch.bfloat16, torch.float32, "
         "torch.float64. Try: weight.to(torch.bfloat16)."),
        (lambda f: f(X, W.to("meta")), DeviceError,
         "weight is on meta, x on cpu; they must be on the same device. Try: weight.to(x.device)."),
        (lambda f: f(X, residual=X[0]), ShapeError,
         "residual has shape (3, 8), x has (2, 3, 8); they must be the same. Try: "
         "residual.expand_as(x) where it broadcasts."),
        (lambda f: f(X, residual=X.double()), DtypeError,
         "residual has dtype torch.float64, x has torch.float32; they must be the same. Try: "
         "residual.to(x.dtype)."),
        (lambda f: f(X, residual=True), DtypeError,
         "residual is a bool; it must be a torch.Tensor. Try: torch.as_tensor(residual)."),
        *((lambda f, eps=eps: f(X, eps=eps), OptionError,
           f"eps is {eps!r}; it must be a finite Python number, not negative. Try: eps=1e-5.")
          for eps in (-1e-6, float("nan"), float("inf"), "small", True)),
        (lambda f: f(X, config="triton"), OptionError,
         "config is a str; it must be one of ReferenceConfig, TritonConfig, or None."),
        (lambda f: f(X, residul=None), UnknownOptionError,
         "there is no option 'residul'; options: eps, residual, config. Try: residual=."),
        (lambda f: f(X, normalized_shape=(8,)), UnknownOptionError,
         "there is no option 'normalized_shape'; options: eps, residual, config. Try: leaving it "
         "out: the last dimension is normalised."),
    ],
)  # fmt: skip
@both
def test_a_wrong_call_gets_a_sentence(op, call, error, text):
    with pytest.raises(error) as caught:
        call(FUNCTIONS[op][0])
    assert str(caught.value) == f"{op}_norm: {text}"


def test_a_wrong_bias_gets_a_sentence():
    with pytest.raises(ShapeError, match=r"layer_norm: bias has shape \(3,\), x has rows of 8"):
        layer_norm(X, W, W[:3])
    with pytest.raises(UnknownOptionError, match=r"rms_norm: .*Try: tileloom\.layer_norm"):
        rms_norm(X, bias=W)


@both
def test_a_config_that_cannot_run_says_why(op):
    function = FUNCTIONS[op][0]
    with pytest.raises(ConfigError, match=rf"(?s){op}_norm: config=.*are on the CPU"):
        function(X, config=TritonConfig())
    with emulator.run(), pytest.raises(ConfigError, match=r"forward\.block is 48, not a power"):
        function(X, config=TritonConfig(Tile(48)))
    narrow = TritonConfig(Tile(64))
    with emulator.run(sms=8), pytest.raises(ConfigError, match=r"so that 5 programs share a row"):
        function(torch.zeros(2, 300), config=narrow)
    deep = TritonConfig(backward=Tile(16384, 1, 32, 1, 8))
    with emulator.run(), pytest.raises(ConfigError, match=r"bytes of shared memory, and NVIDIA"):
        function(torch.zeros(2, 16384), torch.zeros(16384), config=deep)


def problem_of(
    width: int, dtype: torch.dtype, *, is_centred: bool = True, is_backward: bool = False
) -> NormProblem:
    rows = rows_of((3, width), [(width, 1)] * 4, dtype.itemsize)
    return NormProblem(rows, dtype, is_centred, True, is_centred, True, is_backward)


@pytest.mark.parametrize("target", [H100, A100], ids=lambda target: target.arch)
@pytest.mark.parametrize("width", [0, 1, 7, 100, 4096, 8192, 16384, 40000, 2**20])
def test_the_rule_gives_tiles_that_run_for_every_width(width, target):
    ways = itertools.product((cases.FP16, cases.BF16, cases.FP32), (False, True), (False, True))
    for dtype, is_centred, is_backward in ways:
        problem = problem_of(width, dtype, is_centred=is_centred, is_backward=is_backward)
        config = rule(problem, target)
        assert config.forward is not None
        assert config.backward is not None
        choice = choose("rms_norm", problem, target, None)
        assert (choice.backend, choice.refused) == ("triton", {})


@both
def test_what_the_kernels_refuse_goes_to_the_reference_with_a_warning(op):
    inputs = NormCase(op, (3, 4, 5, 6, 24)).inputs()
    inputs.tensors["x"] = inputs.tensors["x"].permute(3, 2, 1, 0, 4)
    inputs.grads[0] = inputs.grads[0].permute(3, 2, 1, 0, 4)
    with (
        emulator.run() as run,
        record_choices() as made,
        pytest.warns(PerformanceWarning, match=rf"{op}_norm: the reference .* into 4 groups"),
    ):
        results = cases.run(inputs)
    assert [choice.backend for choice in made] == ["reference"] * 2
    assert not run.launches
    cases.check(inputs, results)


@both
def test_float64_goes_to_the_reference_without_one(op):
    with emulator.run() as run, record_choices() as made:
        FUNCTIONS[op][0](X.double(), W)
    assert not run.launches
    assert "dtype torch.float64 is not" in made[0].refused["triton"][0]


@both
@pytest.mark.parametrize("dtype", [cases.BF16, cases.FP32])
def test_the_cpu_takes_the_reference(op, dtype):
    inputs = NormCase(op, (3, 4, 24), dtype, ("weight", "residual"), vectors=cases.FP32).inputs()
    with record_choices() as made:
        results = cases.run(inputs)
    assert [choice.backend for choice in made] == ["reference"] * 2
    cases.check(inputs, results)


@both
def test_a_second_gradient_is_refused(op):
    x = torch.randn(3, 7, requires_grad=True)
    out = FUNCTIONS[op][0](x)
    with pytest.raises(GradientError, match=f"{op}_norm: the gradient of its gradient"):
        torch.autograd.grad(out.square().sum(), x, create_graph=True)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", ["x", "weight", "residual"])
@both
def test_a_forward_mode_derivative_is_refused(op, name):
    given = {"x": torch.randn(3, 7), "weight": torch.randn(7), "residual": torch.randn(3, 7)}
    with forward_ad.dual_level():
        FUNCTIONS[op][0](**given)
        given[name] = forward_ad.make_dual(given[name], torch.ones_like(given[name]))
        with pytest.raises(GradientError, match=f"{op}_norm: a forward-mode derivative is asked"):
            FUNCTIONS[op][0](**given)


@both
def test_autocast_leaves_it_alone(op):
    function = FUNCTIONS[op][0]
    x, half = torch.randn(3, 70), torch.randn(3, 70).bfloat16()
    expected = function(x), function(half, torch.ones(70))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = function(x), function(half, torch.ones(70))
    for ours, theirs in zip(found, expected):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@both
def test_vmap_calls_it_once_for_each(op):
    function = FUNCTIONS[op][0]
    x = torch.randn(4, 3, 8)
    with record_choices() as made:
        found = torch.vmap(lambda t: function(t, W + 2))(x)
    assert len(made) == 4
    torch.testing.assert_close(found, function(x, W + 2))


@pytest.mark.parametrize(
    ("has", "layout"),
    [
        ((), "transposed"),
        (("weight", "bias", "residual"), "contiguous"),
        (("weight", "bias", "residual"), "last_strided"),
    ],
    ids=str,
)
@both
def test_opcheck(op, has, layout):
    inputs = NormCase(op, (2, 3, 4, 9), has=has, layouts=(layout, layout)).inputs()
    given = {name: t.requires_grad_() for name, t in inputs.tensors.items()}
    x, residual = given["x"], given.get("residual")
    vectors = [given.get(name) for name in ("weight", "bias")[: 1 if op == "rms" else 2]]
    ops = torch.ops.tileloom
    forward = getattr(ops, f"{op}_norm_fwd").default
    torch.library.opcheck(forward, (x, *vectors, residual, 1e-5, ""))
    with torch.no_grad():
        _, stream, *sums = forward(x, *vectors, residual, 1e-5, "")
    h = x if residual is None else stream
    grads = [inputs.grads[0], inputs.grads[1] if has else None]
    detached = [None if t is None else t.detach() for t in (h, *vectors)]
    needs = [bool(has)] * len(vectors)
    backward = getattr(ops, f"{op}_norm_bwd").default
    torch.library.opcheck(backward, (*grads, *detached, *sums, *needs, ""))


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "gapped", "expanded"])
@pytest.mark.parametrize("dtype", [cases.BF16, torch.float64])
@both
def test_a_fake_has_the_strides_of_the_real_result(op, dtype, layout):
    inputs = NormCase(op, (2, 3, 4, 9), dtype, ("residual",), (layout, layout)).inputs()
    x, residual = inputs.tensors["x"], inputs.tensors["residual"]
    real = FUNCTIONS[op][0](x, residual=residual)
    with FakeTensorMode() as mode:
        fake = FUNCTIONS[op][0](mode.from_tensor(x), residual=mode.from_tensor(residual))
    for ours, theirs in zip(fake, real):
        assert theirs.stride() == torch.empty_like(x).stride()
        assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())
        assert ours.dtype == theirs.dtype


def _block(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    out, stream = rms_norm(x * 2, weight, residual=residual)
    return layer_norm(out, weight, weight + 1, eps=1e-3) + stream


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_they_compile_to_one_graph_with_their_gradients(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(_block, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows, width in ((3, 9), (5, 12)) if dynamic else ((3, 9),):
        leaves = [
            torch.randn(shape, requires_grad=True)
            for shape in ((rows, width), (width,), (rows, width))
        ]
        results = []
        for function in (_block, compiled):
            out = function(*leaves)
            results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
        torch.testing.assert_close(results[0], results[1])


def test_they_export():
    class Model(torch.nn.Module):
        def forward(self, x, weight, residual):
            return _block(x, weight, residual)

    arguments = (torch.randn(3, 9), torch.randn(9), torch.randn(3, 9))
    program = torch.export.export(Model(), arguments)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    for op in ("rms", "layer"):
        assert f"tileloom.{op}_norm_fwd.default" in targets
    torch.testing.assert_close(program.module()(*arguments), _block(*arguments))


@both
def test_a_config_is_what_runs(op):
    config = ReferenceConfig()
    with emulator.run() as run, record_choices() as made:
        FUNCTIONS[op][0](X, config=config)
    assert not run.launches
    assert (made[0].source, made[0].config) == ("explicit", config)
    assert made[0].op == f"{op}_norm"
