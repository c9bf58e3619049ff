"""Which config and which schedule a product of bfloat16 matrices gets, to be looked at."""

from __future__ import annotations

import torch

from tileloom.launch.layout import Layout
from tileloom.ops.gemm.config import GluonSm90Config
from tileloom.ops.gemm.config_matvec import MatvecConfig, matvec_rule
from tileloom.ops.gemm.launch_gluon_sm90 import params_of
from tileloom.ops.gemm.problem import MatmulProblem
from tileloom.ops.gemm.rule import gluon_rule
from tileloom.scheduling import TileSchedulerParams
from tileloom.target import H100


def schedule_of(
    m: int,
    n: int,
    k: int,
    sms: int,
    *,
    config: GluonSm90Config | None = None,
    offsets: tuple[int, ...] | None = None,
    pivot: int = 0,
) -> tuple[GluonSm90Config, TileSchedulerParams]:
    """Return the config and the schedule of the Hopper kernel.

    Where the config exchanges the operands (`swap_ab`), the schedule is that of C transposed.

    Args:
        m: Rows of A.
        n: Columns of B.
        k: The summed dimension.
        sms: Multiprocessors of the card.
        config: What is taken; None: by the rule of `matmul`, or of `async_input_matmul` with
            `offsets`.
        offsets: First row of each chunk of A, and m; None: A is there, as for `matmul`.
        pivot: The chunk that is visited first.
    """
    problem = _problem(m, n, k, 0 if offsets is None else len(offsets) - 1)
    config = gluon_rule(problem, sms) if config is None else config
    if offsets is None:
        return config, params_of(problem, config)
    return config, params_of(problem, config, chunk_offsets=offsets, chunk_pivot=pivot)


def unscheduled(m: int, n: int, k: int) -> MatvecConfig | None:
    """Return the config by which `matmul` runs a product on Hopper without a schedule, or None."""
    return matvec_rule(_problem(m, n, k, 0), H100)


def _problem(m: int, n: int, k: int, chunks: int) -> MatmulProblem:
    rows, columns = Layout((0, k, 1), True), Layout((0, 1, k), True)
    return MatmulProblem(
        *(m, n, k, 1), dtype=torch.bfloat16, out_dtype=torch.bfloat16, a=rows, b=columns, out=rows,
        chunks=chunks,
    )  # fmt: skip
