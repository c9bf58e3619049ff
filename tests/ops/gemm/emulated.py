"""Small products for each shipped form of the GEMM kernels, for the emulator; `CASES` for mutants.

    tileloom check tests/ops/gemm/emulated.py --sms 2 [--mutate --kernels KERNEL_FILE]

Sizes leave odd remainders, a program takes several tiles, and k takes twice the ring plus one
steps.
"""

from __future__ import annotations

from functools import partial

import torch
from tests.ops.gemm.cases import MatmulCase, check

from tileloom.ops import record_choices
from tileloom.ops.gemm import async_input_matmul, matmul
from tileloom.ops.gemm.config import TILES, GluonSm90Config, TritonConfig

SCHEDULES = (("late", 0), ("eager", 0), ("random", 0), ("random", 1))
SMS = 2
FP32 = torch.float32
WIDE = MatmulCase(300, 264, 328)
FUSED = MatmulCase(200, 136, 72, has_bias=True, has_residual=True, activation="gelu")
FORMS = {
    "nn": MatmulCase(200, 136, 200, a_flips=False, b_flips=False),
    "tn": MatmulCase(200, 136, 200, a_flips=True, b_flips=False),
    "tt": MatmulCase(200, 136, 200, a_flips=True, b_flips=True),
    "batches": MatmulCase(72, 136, 136, l=3, activation="silu"),
    "fused": FUSED,
    "fp16-relu": MatmulCase(72, 264, 136, dtype=torch.float16, activation="relu"),
    "fp32-out": MatmulCase(136, 136, 136, out_dtype=FP32, has_bias=True, activation="gelu_tanh"),
}


def run_hopper(case: MatmulCase, config: GluonSm90Config):
    """One product by the Hopper kernel; raises for a wrong value."""
    a, b, options = case.inputs()
    with record_choices() as choices:
        out = matmul(a, b, config=config, **options)
    assert [choice.backend for choice in choices] == ["gluon_sm90"]
    check(out, a, b, options)


def run_portable(case: MatmulCase, config: TritonConfig):
    """One product by the portable kernel."""
    a, b, options = case.inputs()
    out = matmul(a, b, config=config, **options)
    check(out, a, b, options)


def run_async(run, offsets, pivot, order, options=None, config=None):
    """A product whose chunks the host brings while the kernel runs, in `order`."""
    case = MatmulCase(offsets[-1], 136, 200, **(options or {}))
    a, b, given = case.inputs()
    chunks = len(offsets) - 1
    here = torch.full_like(a, float("nan"))
    flags = torch.full((chunks,), 6, dtype=torch.int32)
    for chunk in order:
        rows = slice(offsets[chunk], offsets[chunk + 1])
        if rows.start < rows.stop:
            run.host_write(here[rows], a[rows])
        run.host_write(flags[chunk : chunk + 1], 7)
    out = async_input_matmul(
        here, b, flags.view(torch.uint32), chunk_offsets=offsets, chunk_pivot=pivot, epoch=7,
        config=config, **given,
    )  # fmt: skip
    check(out, a, b, given)
    return out


def small(block_m, block_n, **more):
    """A config with a short ring."""
    return GluonSm90Config(block_m, block_n, stages=2, **more)


CASES = {
    **{f"{m}x{n}": partial(run_hopper, WIDE, small(m, n)) for m, n in TILES},
    **{name: partial(run_hopper, case, small(128, 128)) for name, case in FORMS.items()},
    "dynamic": partial(run_hopper, WIDE, small(128, 128, scheduler="dynamic")),
    "split": partial(run_hopper, MatmulCase(136, 136, 456), small(128, 128, splits=3)),
    "split-fused": partial(run_hopper, FUSED, small(64, 128, splits=2)),
    "deep": partial(run_hopper, MatmulCase(72, 136, 1000), small(64, 64, block_k=256)),
    "deep-nn": partial(run_hopper, FORMS["tt"], small(128, 128, block_k=128)),
    "fused-64": partial(run_hopper, FUSED, small(64, 128)),
}
