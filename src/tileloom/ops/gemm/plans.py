"""From the arguments of a product to its launch; what was decided is kept as a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tileloom.errors import ShapeError
from tileloom.ops import _op
from tileloom.ops._op import Choice
from tileloom.ops._plans import Plans, new_cuda, plan_key
from tileloom.ops.gemm import checks
from tileloom.ops.gemm.config import GluonSm90Config, MatvecConfig, TritonConfig, decode
from tileloom.ops.gemm.problem import MatmulProblem
from tileloom.ops.gemm.reference import matmul_reference
from tileloom.ops.gemm.rule import choose
from tileloom.target import Target, target_of

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Plan:
    """What was decided for calls like one.

    Attributes:
        choice: The decision.
        slower_than: The backend that would be more than 20 % faster, if it refused.
        shape: Of the output.
        dtype: Of the output.
        launch: `launch(a, b, bias, residual, out)`, tensors as the caller has them: a kernel takes
            their addresses, all else is bound.
    """

    choice: Choice
    slower_than: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    launch: Callable[..., None]

    def call(self, a: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """`run` into a new output, for CUDA tensors and a call that nobody watches."""
        if self.slower_than is not None or torch._C._cuda_getDevice() != a.get_device():
            out = a.new_empty(self.shape, dtype=self.dtype)
            return self.run(a, b, bias, residual, out)
        out = new_cuda(self.shape, self.dtype)
        self.launch(a, b, bias, residual, out)
        return out

    def run(
        self, a: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor
    ) -> Tensor:
        """Write `out` and return it; tensors have the public shapes, and `out` lies as planned."""
        if self.slower_than is not None or _op.is_watched():
            _op.announce(self.choice, slower_than=self.slower_than)
        if out.is_cuda and torch._C._cuda_getDevice() != out.get_device():
            with torch.cuda.device(out.device):
                self.launch(a, b, bias, residual, out)
        else:
            self.launch(a, b, bias, residual, out)
        return out


plans: Plans[Plan] = Plans()


def output_shape(a: Tensor, b: Tensor) -> tuple[int, ...]:
    """The shape of the product: `[M, N]`, or `[L, M, N]` if an operand has batches."""
    matrix = (a.shape[-2], b.shape[-1])
    if a.dim() == 2 and b.dim() == 2:
        return matrix
    return (a.shape[0] if a.dim() == 3 else b.shape[0], *matrix)


def as_batches(
    a: Tensor, b: Tensor, residual: Tensor | None, out: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """The operands with three dimensions each; batches that share b are rows of one matrix."""
    if out.dim() == 2:
        flat = None if residual is None else residual.unsqueeze(0)
        return a.unsqueeze(0), b.unsqueeze(0), flat, out.unsqueeze(0)
    if b.dim() == 2 and all(map(_is_one_matrix, filter(_is_tensor, (a, residual, out)))):
        flat = None if residual is None else residual.flatten(0, 1).unsqueeze(0)
        return a.flatten(0, 1).unsqueeze(0), b.unsqueeze(0), flat, out.flatten(0, 1).unsqueeze(0)
    batches = out.shape[0]
    a = a if a.dim() == 3 else a.unsqueeze(0).expand(batches, -1, -1)
    b = b if b.dim() == 3 else b.unsqueeze(0).expand(batches, -1, -1)
    return a, b, residual, out


def _is_tensor(tensor: Tensor | None) -> bool:
    return tensor is not None


def _is_one_matrix(tensor: Tensor | None) -> bool:
    """Whether the batches follow each other as the rows do."""
    if tensor is None or tensor.shape[0] == 1:
        return True
    return tensor.stride(0) == tensor.stride(1) * tensor.shape[1]


def outpaced_by(choice: Choice, problem: MatmulProblem, target: Target) -> str | None:
    """Name the backend that would be more than 20 % faster, had it not refused; else None."""
    is_half = problem.dtype in (torch.float16, torch.bfloat16)
    if "gluon_sm90" in choice.refused and target.capability == (9, 0) and is_half and problem.k:
        return "gluon_sm90"
    return None


def key_of(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
    out_dtype: torch.dtype,
    activation: str,
    config: str,
) -> Any:
    """Return everything that a plan is made from; `out` is None where it was not given."""
    return plan_key((a, b, bias, residual, out), out_dtype, activation, config)


def plan_of(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    activation: str,
    config: str,
    *,
    is_given: bool,
) -> Plan:
    """Decide how a call runs, or find what was decided.

    Args:
        a: `[M, K]` or `[L, M, K]`; all tensors are checked.
        b: `[K, N]` or `[L, K, N]`.
        bias: `[N]` or None.
        residual: Of the output's shape, or None.
        out: The output.
        activation: Its name, or "".
        config: The config's text; "" chooses.
        is_given: Whether the caller gave `out`; if not, its layout follows from the rest.
    """
    key = key_of(a, b, bias, residual, out if is_given else None, out.dtype, activation, config)
    found = plans.get(key) if a.is_cuda else None
    if found is not None:
        return found
    check_registered("matmul", a, b, bias, residual, activation)
    if is_given:
        checks.check_out("matmul", out, a, b, bias, residual, output_shape(a, b))
    parts = as_batches(a, b, residual, out)
    problem = MatmulProblem.of(parts[0], parts[1], parts[3], bias, parts[2], activation)
    target = target_of(a)
    choice = choose(problem, target, decode(config))
    launch = _bind(choice, problem, parts[0], parts[1], bias, parts[2], parts[3])
    slower_than = outpaced_by(choice, problem, target)
    plan = Plan(choice, slower_than, tuple(out.shape), out.dtype, launch)
    return plans.put(key, plan) if a.is_cuda else plan


def check_registered(
    op: str, a: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str
) -> None:
    """Check again, once for each plan, for those who call the registered operator itself."""
    checks.check_operands(op, a, b)
    checks.check_options(op, activation or None, None, None)
    checks.check_extras(op, a, bias, residual, output_shape(a, b))
    if bias is not None and not bias.is_contiguous():
        raise ShapeError(
            f"{op}: bias has a stride of {bias.stride(0)}; the registered operator takes "
            "contiguous ones. Try: bias.contiguous()."
        )


def _bind(
    choice: Choice,
    problem: MatmulProblem,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
) -> Callable[..., None]:
    """Import the kernel of a backend, which loads Triton, only when it runs."""
    config: Any = choice.config
    is_empty = 0 in (problem.m, problem.n, problem.l)
    if is_empty:
        return _nothing
    tensors = (a, b, bias, residual, out)
    with _op.device_guard(out):
        if isinstance(config, GluonSm90Config):
            from tileloom.ops.gemm.launch_gluon_sm90 import bind_matmul

            return bind_matmul(problem, config, *tensors)
        if isinstance(config, TritonConfig):
            from tileloom.ops.gemm import launch_triton

            return launch_triton.bind_matmul(problem, config, *tensors)

        if isinstance(config, MatvecConfig):
            from tileloom.ops.gemm import launch_triton_matvec

            return launch_triton_matvec.bind_matmul(problem, config, *tensors)

    def launch(
        a: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor
    ) -> None:
        a, b, residual, out = as_batches(a, b, residual, out)
        with torch.autocast(a.device.type, enabled=False):
            out.copy_(
                matmul_reference(
                    a, b, bias=bias, activation=problem.activation or None,  # pyright: ignore[reportArgumentType]
                    residual=residual, out_dtype=out.dtype,
                )
            )  # fmt: skip

    return launch


def _nothing(*tensors: Tensor | None) -> None:
    """Write an output without elements."""
