"""`tileloom::matmul_fwd` and `matmul_out`: schemas, fakes, and the gradient of the first."""

from __future__ import annotations

from typing import Any

import torch

from tileloom.ops import _op
from tileloom.ops.gemm.plans import output_shape, plan_of

Tensor = torch.Tensor

_NO_GRADIENT_INTO = (
    "matmul: out= is given and a gradient is asked for; a product written into a tensor has none. "
    "Try: torch.no_grad(), or leaving out= away."
)


def new_output(a: Tensor, b: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    """Allocate the output: contiguous, in a's dtype unless another is given."""
    return a.new_empty(output_shape(a, b), dtype=a.dtype if out_dtype is None else out_dtype)


def _forward(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    out_dtype: torch.dtype | None,
    config: str,
) -> Tensor:
    out = new_output(a, b, out_dtype)
    plan = plan_of(a, b, bias, residual, out, activation, config, is_given=False)
    return plan.run(a, b, bias, residual, out)


def _fake_forward(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    out_dtype: torch.dtype | None,
    config: str,
) -> Tensor:
    del bias, residual, activation, config
    return new_output(a, b, out_dtype)


def _into(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    activation: str,
    config: str,
) -> None:
    plan = plan_of(a, b, bias, residual, out, activation, config, is_given=True)
    plan.run(a, b, bias, residual, out)


def _fake_into(*args: object) -> None:
    del args


matmul_out = _op.register(
    "matmul_out(Tensor a, Tensor b, Tensor? bias, Tensor? residual, Tensor(a!) out, "
    "str activation, str config) -> ()",
    _into,
    _fake_into,
    no_gradient=_NO_GRADIENT_INTO,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    a, b, bias, residual, ctx.activation, ctx.out_dtype, ctx.config = inputs
    ctx.save_for_backward(a, b, bias if ctx.activation else None)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.residual_dtype = None if residual is None else residual.dtype


def _before_activation(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None, dout: Tensor) -> Tensor:
    """The gradient before the activation; what the activation was given is computed again."""
    if not ctx.activation:
        return dout
    z = matmul_fwd(a, b, bias, None, "", ctx.out_dtype, ctx.config)
    if ctx.activation == "relu":
        return dout * (z > 0)
    if ctx.activation == "silu":
        gate = torch.sigmoid(z)  # not aten's formula, which is not differentiable again
        return dout * gate * (1 + z * (1 - gate))
    kind = "tanh" if ctx.activation == "gelu_tanh" else "none"
    return torch.ops.aten.gelu_backward(dout, z, approximate=kind)


def _gradients(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    a, b, bias = ctx.saved_tensors  # once: torch.utils.checkpoint gives them no second time
    needs_a, needs_b, needs_bias, needs_residual = ctx.needs_input_grad[:4]
    da = db = dbias = dresidual = None
    if needs_a or needs_b or needs_bias:
        dz = _before_activation(ctx, a, b, bias, dout)
        narrow = dz.to(a.dtype)
        if needs_a:
            da = _unbatched(matmul_fwd(narrow, b.mT, None, None, "", a.dtype, ""), a)
        if needs_b:
            if b.dim() == 2 and a.dim() == 3:  # one product over all batches' rows
                flat = matmul_fwd(
                    a.flatten(0, 1).mT, narrow.flatten(0, 1), None, None, "", b.dtype, ""
                )
                db = flat
            else:
                db = _unbatched(matmul_fwd(a.mT, narrow, None, None, "", b.dtype, ""), b)
        if needs_bias:
            rows = tuple(range(dz.dim() - 1))
            dbias = dz.sum(rows, dtype=_wide(dz)).to(ctx.bias_dtype)
    if needs_residual:
        dresidual = dout.to(ctx.residual_dtype)
    return da, db, dbias, dresidual, None, None, None


def _wide(tensor: Tensor) -> torch.dtype:
    """The dtype that a sum of a tensor's elements is kept in."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _unbatched(gradient: Tensor, operand: Tensor) -> Tensor:
    """Sum over the batches that shared an operand."""
    if gradient.dim() > operand.dim():
        return gradient.sum(0, dtype=_wide(gradient)).to(operand.dtype)
    return gradient


matmul_fwd = _op.register(
    "matmul_fwd(Tensor a, Tensor b, Tensor? bias, Tensor? residual, str activation, "
    "ScalarType? out_dtype, str config) -> Tensor",
    _forward,
    _fake_forward,
    setup_context=_setup_context,
    backward=_gradients,
)
