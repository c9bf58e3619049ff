"""From the arguments of a normalisation to its launches; what was decided is kept as a plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from tileloom.launch.clusters import clusters_at_once
from tileloom.ops._op import Choice
from tileloom.ops._plans import Launch, Plans, layout_key, plan_key
from tileloom.ops.rowwise.checks import check_alike, check_norm, check_vector
from tileloom.ops.rowwise.config import (
    FIRST_WORD,
    Tile,
    TritonConfig,
    decode,
    groups_of,
    parts_of,
)
from tileloom.ops.rowwise.norm import arguments
from tileloom.ops.rowwise.norm.config import choose
from tileloom.ops.rowwise.norm.problem import NormProblem
from tileloom.ops.rowwise.norm.reference import norm_backward_reference, norm_reference
from tileloom.ops.rowwise.rows import rows_of
from tileloom.ops.rowwise.tuned import tuned
from tileloom.target import Target, target_of

Tensor = torch.Tensor
Results = tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What was decided for calls like one: the choice, and the function that runs them."""

    choice: Choice
    run: Callable[..., Results]


forward_plans: Plans[Plan] = Plans()
_backward_plans: Plans[Plan] = Plans()


def forward_key(
    op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    eps: float, config: Hashable, saves: bool,
) -> Hashable:  # fmt: skip
    """What `plans.plan_key` would give, without its loop: this is most of a call's own time.

    `saves` says that mean and rstd are wanted.
    """
    try:
        return (
            op, x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 15,
            None if weight is None else (
                weight.shape, weight.stride(), weight.dtype, weight.get_device(),
                weight.data_ptr() & 15,
            ),
            None if bias is None else layout_key(bias),
            None if residual is None else layout_key(residual),
            eps, config, saves,
        )  # fmt: skip
    except (AttributeError, RuntimeError):
        return None


def _stride(vector: Tensor | None) -> int:
    return 1 if vector is None or vector.shape[0] < 2 else vector.stride(0)


def forward_plan(
    op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    eps: float, config: str, *, saves: bool,
) -> Plan:  # fmt: skip
    """Decide how a forward call runs.

    Args:
        op: ``"rms_norm"`` or ``"layer_norm"``.
        x: `[..., n]`, checked, and so are the other tensors.
        weight: `[n]` or None.
        bias: `[n]` or None.
        residual: x's shape and dtype, or None.
        eps: Added to the mean square.
        config: The config's text; "" chooses.
        saves: Whether mean and rstd are wanted.

    Returns:
        The plan. `run(x, weight, bias, residual)` gives out, stream, mean and rstd; None where
        there is no residual, for rms norm's mean, and where nothing is saved.
    """
    check_norm(op, x, weight, bias, residual)
    is_centred = op == "layer_norm"
    out = torch.empty_like(x)
    strides = (x.stride(), None if residual is None else residual.stride(), out.stride())
    is_dense = _stride(weight) == _stride(bias) == 1
    problem = NormProblem(
        rows=rows_of(x.shape, strides, x.dtype.itemsize, dense=is_dense),
        dtype=x.dtype,
        is_centred=is_centred,
        has_weight=weight is not None,
        has_bias=bias is not None,
        has_residual=residual is not None,
        is_backward=False,
        weight_bytes=max(0 if v is None else v.element_size() for v in (weight, bias)),
        is_aligned=all(t is None or t.data_ptr() % 16 == 0 for t in (x, weight, bias)),
    )
    target = target_of(x)

    def decide(text: str) -> Callable[..., Results]:
        return forward_plan(op, x, weight, bias, residual, eps, text, saves=saves).run

    choice = choose(op, problem, target, decode(op, config))
    choice = tuned(choice, "forward", decide, (x, weight, bias, residual))
    if problem.is_empty or not isinstance(choice.config, TritonConfig):
        return Plan(choice, _reference_forward(eps, is_centred, saves))
    tile = choice.config.forward
    assert tile is not None
    vectors = (None, None)
    if problem.rows.vector == 0:
        vectors = (_stride(weight), _stride(bias))
    if tile.ctas > 1 and tile.ring:
        most = clusters_at_once(tile.ctas, target, x.get_device(), per_sm=tile.per_sm)
        return Plan(choice, _walk_forward(problem, tile, eps, saves, most))
    if tile.ctas > 1:
        return Plan(choice, _cluster_forward(problem, tile, eps, saves))
    if tile.block < problem.rows.width:
        return Plan(choice, _split_forward(problem, tile, vectors, eps, saves, target))
    return Plan(choice, _whole_forward(problem, tile, vectors, eps, saves))


def _reference_forward(eps: float, is_centred: bool, saves: bool) -> Callable[..., Results]:
    def run(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
    ) -> Results:
        with torch.autocast(x.device.type, enabled=False):
            out, stream, mean, rstd = norm_reference(
                x, weight, bias, residual, eps, is_centred=is_centred
            )
        return (
            torch.empty_like(x).copy_(out),
            None if residual is None else torch.empty_like(x).copy_(stream),
            mean if saves and is_centred else None,
            rstd if saves else None,
        )

    return run


def _outputs(problem: NormProblem, x: Tensor, saves: bool) -> Results:
    """Allocate out, stream, mean and rstd as far as they are wanted."""
    out = torch.empty_like(x)
    stream = torch.empty_like(x) if problem.has_residual else None
    if not saves:
        return out, stream, None, None
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    return out, stream, torch.empty_like(rstd) if problem.is_centred else None, rstd


def _whole_forward(
    problem: NormProblem, tile: Tile, vectors: tuple[int | None, int | None], eps: float,
    saves: bool,
) -> Callable[..., Results]:  # fmt: skip
    """Rows that fit a program: one launch."""
    from tileloom.ops.rowwise.norm.kernel_triton_fwd import norm_fwd_kernel

    programs, fixed = arguments.forward(problem, tile, vectors, eps)
    launch = Launch(norm_fwd_kernel, programs, tile.num_warps, fixed)
    return _launch_forward(problem, launch, saves)


def _cluster_forward(
    problem: NormProblem, tile: Tile, eps: float, saves: bool
) -> Callable[..., Results]:
    """Rows that a cluster takes: one launch."""
    from tileloom.ops.rowwise.norm.kernel_gluon_sm90_fwd import norm_fwd_cluster_kernel

    clusters, fixed = arguments.forward_cluster(problem, tile, eps)
    launch = Launch(
        norm_fwd_cluster_kernel, clusters, tile.num_warps, fixed, tile.register_bound,
        ctas=tile.ctas,
    )  # fmt: skip
    return _launch_forward(problem, launch, saves)


def _walk_forward(
    problem: NormProblem, tile: Tile, eps: float, saves: bool, most: int
) -> Callable[..., Results]:
    """Rows that clusters walk over, so many at a time: one launch."""
    from tileloom.ops.rowwise.norm.kernel_gluon_sm90_fwd_walk import norm_fwd_walk_kernel

    clusters, fixed = arguments.forward_walk(problem, tile, eps, most)
    launch = Launch(
        norm_fwd_walk_kernel, clusters, tile.num_warps, fixed, tile.register_bound, ctas=tile.ctas
    )

    def run(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
    ) -> Results:
        del residual
        out, stream, mean, rstd = _outputs(problem, x, saves)
        launch(x, weight, bias, out, mean, rstd)
        return out, stream, mean, rstd

    return run


def _launch_forward(problem: NormProblem, launch: Launch, saves: bool) -> Callable[..., Results]:
    """One launch that needs nothing but the tensors of the call."""

    def run(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
    ) -> Results:
        out, stream, mean, rstd = results = _outputs(problem, x, saves)
        launch(x, residual, weight, bias, out, stream, mean, rstd)
        return results

    def run_plainly(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
    ) -> Results:
        out = torch.empty_like(x)
        launch(x, residual, weight, bias, out, None, None, None)
        return out, None, None, None

    return run if saves or problem.has_residual else run_plainly


def _words(problem: NormProblem, tile: Tile, groups: int) -> int:
    """How many words the programs of shared rows meet at: a ticket, and one for each sum."""
    kinds = 2 if problem.is_centred else 1
    turns = -(-problem.rows.count // groups)
    return FIRST_WORD + groups * turns * parts_of(problem.rows.width, tile) * kinds


def _split_forward(
    problem: NormProblem, tile: Tile, vectors: tuple[int | None, int | None], eps: float,
    saves: bool, target: Target,
) -> Callable[..., Results]:  # fmt: skip
    """Rows that programs share: one launch."""
    from tileloom.ops.rowwise.norm.kernel_triton_split import norm_fwd_split_kernel

    programs, fixed = arguments.forward_split(problem, tile, vectors, eps, target.sms)
    launch = Launch(norm_fwd_split_kernel, programs, tile.num_warps, fixed, tile.registers)
    count = _words(problem, tile, groups_of(problem.rows, tile, target.sms))

    def run(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
    ) -> Results:
        out, stream, mean, rstd = results = _outputs(problem, x, saves)
        words = torch.full((count,), -1, dtype=torch.int32, device=x.device)
        launch(x, residual, weight, bias, out, stream, mean, rstd, words)
        return results

    return run


def backward_plan(
    op: str, grad: Tensor, stream_grad: Tensor | None, h: Tensor, weight: Tensor | None,
    bias: Tensor | None, mean: Tensor | None, rstd: Tensor, config: str,
    *, needs_weight: bool, needs_bias: bool,
) -> Plan:  # fmt: skip
    """Decide how a backward call runs, or find what was decided.

    Args:
        op: ``"rms_norm"`` or ``"layer_norm"``.
        grad: Gradient of the output, `[..., n]`.
        stream_grad: Gradient of the stream, or None.
        h: What was normalised: x or the stream, `[..., n]`.
        weight: `[n]` or None.
        bias: `[n]` or None; only its dtype matters.
        mean: `[...]`, or None for rms norm.
        rstd: `[...]`.
        config: The config's text; "" chooses.
        needs_weight: Whether the weight's gradient is wanted.
        needs_bias: Whether the bias's gradient is wanted.

    Returns:
        The plan. `run(grad, stream_grad, h, weight, bias, mean, rstd)` gives the gradients of h,
        weight and bias; None where one is not wanted.
    """
    dtype = None if bias is None else bias.dtype
    key = plan_key(
        (grad, stream_grad, h, weight, mean, rstd), op, dtype, config, needs_weight, needs_bias
    )
    found = _backward_plans.get(key) if h.is_cuda else None
    if found is not None:
        return found
    check_vector(op, "weight", weight, h)
    for name, tensor in (("grad", grad), ("stream_grad", stream_grad)):
        if tensor is not None:
            check_alike(op, name, tensor, h, "h")
    strides = (
        grad.stride(),
        None if stream_grad is None else stream_grad.stride(),
        h.stride(),
        torch.empty_like(h).stride(),
    )
    problem = NormProblem(
        rows=rows_of(h.shape, strides, h.dtype.itemsize, dense=_stride(weight) == 1),
        dtype=h.dtype,
        is_centred=op == "layer_norm",
        has_weight=needs_weight,
        has_bias=needs_bias,
        has_residual=stream_grad is not None,
        is_backward=True,
        weight_bytes=0 if weight is None else weight.element_size(),
        is_aligned=all(t is None or t.data_ptr() % 16 == 0 for t in (grad, stream_grad, h, weight)),
    )
    target = target_of(h)
    tensors = (grad, stream_grad, h, weight, bias, mean, rstd)

    def decide(text: str) -> Callable[..., Results]:
        return backward_plan(
            op, *tensors, text, needs_weight=needs_weight, needs_bias=needs_bias
        ).run

    choice = choose(op, problem, target, decode(op, config))
    choice = tuned(choice, "backward", decide, tensors)
    if problem.is_empty or not isinstance(choice.config, TritonConfig):
        plan = Plan(choice, _reference_backward(problem))
    else:
        tile = choice.config.backward
        assert tile is not None
        weight_d = _stride(weight) if problem.rows.vector == 0 else None
        if tile.ring and tile.ctas > 1:
            most = clusters_at_once(tile.ctas, target, h.get_device(), per_sm=tile.per_sm)
            make = functools.partial(_walk_backward, most=most)
        elif tile.ring:
            make = _ring_backward
        elif tile.block < problem.rows.width:
            make = _split_backward
        elif tile.split and (problem.has_weight or problem.has_bias):
            make = _few_backward
        else:
            make = _whole_backward
        plan = Plan(choice, make(problem, tile, weight_d, target))
    return _backward_plans.put(key, plan) if h.is_cuda else plan


def _reference_backward(problem: NormProblem) -> Callable[..., Results]:
    def run(
        grad: Tensor, stream_grad: Tensor | None, h: Tensor, weight: Tensor | None,
        bias: Tensor | None, mean: Tensor | None, rstd: Tensor,
    ) -> Results:  # fmt: skip
        with torch.autocast(h.device.type, enabled=False):
            dh, dweight, dbias = norm_backward_reference(grad, stream_grad, h, weight, mean, rstd)
        return (
            torch.empty_like(h).copy_(dh),
            dweight.to(weight.dtype) if problem.has_weight and weight is not None else None,
            dbias.to(bias.dtype) if problem.has_bias and bias is not None else None,
        )

    return run


def _wanted(
    problem: NormProblem, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Allocate dweight and dbias as far as they are wanted."""
    width = problem.rows.width
    return (
        weight.new_empty(width) if problem.has_weight and weight is not None else None,
        bias.new_empty(width) if problem.has_bias and bias is not None else None,
    )


def _vectors(
    problem: NormProblem, programs: int, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Allocate the workspace of the shares, dweight and dbias, as far as they are wanted."""
    kinds = problem.has_weight + problem.has_bias
    some = weight if weight is not None else bias
    partial = None
    if some is not None and kinds:
        partial = some.new_empty((programs, kinds, problem.rows.width), dtype=torch.float32)
    return partial, *_wanted(problem, weight, bias)


def _sum_shares(
    problem: NormProblem, programs: int, target: Target, *, halves: bool = False
) -> Launch:
    from tileloom.ops.rowwise.norm.kernel_triton_bwd import norm_vectors_kernel

    count, fixed = arguments.vectors(problem, programs, target, halves=halves)
    overlaps = arguments.overlaps(target)
    return Launch(norm_vectors_kernel, count, 8, fixed, overlaps=overlaps)


def _few_backward(
    problem: NormProblem, tile: Tile, weight_d: int | None, target: Target
) -> Callable[..., Results]:
    """Few rows: one launch."""
    from tileloom.ops.rowwise.norm.kernel_triton_bwd_few import norm_bwd_few_kernel

    del target
    programs, fixed = arguments.backward_few(problem, tile, weight_d)
    launch = Launch(norm_bwd_few_kernel, programs, tile.num_warps, fixed)

    def run(
        grad: Tensor, stream_grad: Tensor | None, h: Tensor, weight: Tensor | None,
        bias: Tensor | None, mean: Tensor | None, rstd: Tensor,
    ) -> Results:  # fmt: skip
        dh = torch.empty_like(h)
        dweight, dbias = _wanted(problem, weight, bias)
        launch(grad, stream_grad, h, weight, mean, rstd, dh, dweight, dbias)
        return dh, dweight, dbias

    return run


def _whole_backward(
    problem: NormProblem, tile: Tile, weight_d: int | None, target: Target
) -> Callable[..., Results]:
    """Rows that fit a program: one launch, and one to add up the shares of dweight and dbias."""
    from tileloom.ops.rowwise.norm.kernel_triton_bwd import norm_bwd_kernel

    programs, fixed = arguments.backward(problem, tile, weight_d, target)
    launch = Launch(norm_bwd_kernel, programs, tile.num_warps, fixed)
    return _walk(problem, programs, launch, target)


def _ring_backward(
    problem: NormProblem, tile: Tile, weight_d: int | None, target: Target
) -> Callable[..., Results]:
    """Rows that come through a ring of shared memory: the same two launches."""
    from tileloom.ops.rowwise.norm.kernel_gluon_sm90_bwd import norm_bwd_ring_kernel

    del weight_d
    programs, fixed = arguments.backward_ring(problem, tile, target)
    launch = Launch(norm_bwd_ring_kernel, programs, tile.num_warps, fixed, tile.register_bound)
    return _walk(problem, programs, launch, target)


def _walk_backward(
    problem: NormProblem, tile: Tile, weight_d: int | None, target: Target, *, most: int
) -> Callable[..., Results]:
    """Rows that clusters walk over, so many at a time: the same two launches."""
    from tileloom.ops.rowwise.norm.kernel_gluon_sm90_bwd_walk import norm_bwd_walk_kernel

    del weight_d
    clusters, fixed = arguments.backward_walk(problem, tile, most, target)
    launch = Launch(
        norm_bwd_walk_kernel, clusters, tile.num_warps, fixed, tile.register_bound, ctas=tile.ctas
    )

    def without_stream(grad: Tensor, stream_grad: None, *others: Tensor | None) -> None:
        del stream_grad
        launch(grad, *others)

    return _walk(problem, clusters, without_stream, target, halves=True)


def _walk(
    problem: NormProblem, programs: int, launch: Callable[..., None], target: Target,
    *, halves: bool = False,
) -> Callable[..., Results]:  # fmt: skip
    """Run programs that each walk over whole rows, then add up their shares."""
    sum_shares = _sum_shares(problem, programs, target, halves=halves)

    def run(
        grad: Tensor, stream_grad: Tensor | None, h: Tensor, weight: Tensor | None,
        bias: Tensor | None, mean: Tensor | None, rstd: Tensor,
    ) -> Results:  # fmt: skip
        dh = torch.empty_like(h)
        partial, dweight, dbias = _vectors(problem, programs, weight, bias)
        launch(grad, stream_grad, h, weight, mean, rstd, dh, partial)
        if partial is not None:
            sum_shares(partial, dweight, dbias)
        return dh, dweight, dbias

    return run


def _split_backward(
    problem: NormProblem, tile: Tile, weight_d: int | None, target: Target
) -> Callable[..., Results]:
    """Rows that programs share: one launch, and one to add up the shares of dweight and dbias."""
    from tileloom.ops.rowwise.norm.kernel_triton_split import norm_bwd_split_kernel

    programs, fixed = arguments.backward_split(problem, tile, weight_d, target)
    launch = Launch(norm_bwd_split_kernel, programs, tile.num_warps, fixed, tile.registers)
    groups = groups_of(problem.rows, tile, target.sms)
    count = _words(problem, tile, groups)
    sum_shares = _sum_shares(problem, groups, target)

    def run(
        grad: Tensor, stream_grad: Tensor | None, h: Tensor, weight: Tensor | None,
        bias: Tensor | None, mean: Tensor | None, rstd: Tensor,
    ) -> Results:  # fmt: skip
        dh = torch.empty_like(h)
        partial, dweight, dbias = _vectors(problem, groups, weight, bias)
        words = torch.full((count,), -1, dtype=torch.int32, device=h.device)
        launch(grad, stream_grad, h, weight, mean, rstd, dh, partial, words)
        if partial is not None:
            sum_shares(partial, dweight, dbias)
        return dh, dweight, dbias

    return run
