"""Small products for each shipped form of the GEMM kernels, for the emulator; `CASES` for mutants.

    tileloom check tests/ops/gemm/emulated.py --sms 2 [--mutate --kernels KERNEL_FILE]

Sizes leave odd remainders, a program takes several tiles, and k takes twice the ring plus one
steps.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import torch
from tests.ops.gemm.cases import MatmulCase, check

from tileloom import errors
from tileloom.emulator import capture
from tileloom.ops import record_choices
from tileloom.ops.gemm import async_input_matmul, check_signals, matmul
from tileloom.ops.gemm.config import (
    SWAP_TILES,
    TILES,
    GluonSm90Config,
    MatvecConfig,
    TritonConfig,
)
from tileloom.testing import poisoned_memory

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
    with record_choices() as choices, poisoned_memory():
        out = matmul(a, b, config=config, **options)
    assert [choice.backend for choice in choices] == ["gluon_sm90"]
    check(out, a, b, options)


def run_portable(case: MatmulCase, config: TritonConfig | MatvecConfig):
    """One product by a portable kernel."""
    a, b, options = case.inputs()
    with poisoned_memory():
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


def run_arriving(offsets, order, options=None, config=None):
    """`run_async` inside a run of the emulator that is there already."""
    run_async(capture.current(), offsets, 2, order, options, config)


def run_arrived(offsets, options, config):
    """A product whose chunks are all there: tiles that end inside a box race with no writer."""
    case = MatmulCase(offsets[-1], 136, 200, **options)
    a, b, given = case.inputs()
    flags = torch.full((len(offsets) - 1,), 7, dtype=torch.int32)
    out = async_input_matmul(
        a, b, flags.view(torch.uint32), chunk_offsets=offsets, epoch=7, config=config, **given
    )
    check(out, a, b, given)


def run_several_bs(run, config):
    """Two products of one a, whose chunks come while the first of them waits."""
    a, b, _ = MatmulCase(200, 136, 200).inputs()
    bs = [b, MatmulCase(200, 72, 200).inputs(seed=1)[1]]
    here, flags = torch.full_like(a, float("nan")), torch.full((2,), 6, dtype=torch.int32)
    for chunk, rows in ((1, slice(70, 200)), (0, slice(0, 70))):
        run.host_write(here[rows], a[rows])
        run.host_write(flags[chunk : chunk + 1], 7)
    given = dict(chunk_offsets=(0, 70, 200), epoch=7, activation="relu", config=config)
    outs = async_input_matmul(here, bs, flags.view(torch.uint32), **given)
    for out, one in zip(outs, bs, strict=True):
        check(out, a, one, {"activation": "relu"})


def run_late(config):
    """A chunk that never comes ends the kernel; the host is told which, and what it held."""
    a, b, _ = MatmulCase(300, 136, 200).inputs()
    flags = torch.tensor([9, 9, 8, 9], dtype=torch.int32).view(torch.uint32)
    offsets = (0, 70, 71, 200, 300)
    async_input_matmul(
        a, b, flags, chunk_offsets=offsets, epoch=9, timeout_s=1e-5, config=config
    )  # fmt: skip
    said = ""
    try:
        check_signals()
    except errors.SignalTimeoutError as error:
        said = str(error)
    assert re.search(r"chunk 2 .* its flag is 8, and 9", said)


def small(block_m, block_n, **more):
    """A config with a short ring."""
    return GluonSm90Config(block_m, block_n, stages=2, **more)


FEW = MatmulCase(37, 264, 328)
SWAPPED = {
    "swap-fused": (replace(FUSED, m=37), small(64, 16, swap_ab=True)),
    "swap-nn": (replace(FORMS["nn"], m=24), small(128, 16, swap_ab=True)),
    "swap-tt": (replace(FORMS["tt"], m=24), small(64, 32, swap_ab=True)),
    "swap-batches": (FORMS["batches"], small(128, 64, swap_ab=True)),
    "swap-fp32-out": (replace(FORMS["fp32-out"], m=5), small(128, 16, swap_ab=True)),
    "swap-one-row": (replace(FORMS["fp16-relu"], m=1), small(64, 16, swap_ab=True)),
    "swap-split": (
        replace(FUSED, m=13, k=456),
        small(64, 16, splits=3, swap_ab=True),
    ),
    "swap-dynamic": (MatmulCase(40, 304, 136), small(64, 16, scheduler="dynamic", swap_ab=True)),
    "swap-dynamic-wide": (
        MatmulCase(60, 600, 136),
        small(128, 64, scheduler="dynamic", swap_ab=True),
    ),
}
EDGES = {
    # Tiles of all rows and of a few; a program begins with either.
    "edge": (MatmulCase(72, 264, 328), small(64, 64)),
    "edge-fused": (replace(FUSED, m=150, k=328), small(128, 128)),
    "edge-batches": (replace(FORMS["batches"], m=136, k=328), small(64, 128)),
    "edge-split": (replace(FUSED, m=72, k=456), small(64, 128, splits=2)),
    "edge-deep": (MatmulCase(70, 136, 840), small(64, 80, block_k=128)),
    # A warpgroup with all rows and one with a few; with a few and without any.
    "edge-swap": (MatmulCase(85, 264, 648), small(64, 128, block_k=128, swap_ab=True)),
    "edge-swap-none": (replace(FUSED, m=20, k=328), small(64, 128, swap_ab=True)),
    "edge-swap-tiles": (MatmulCase(140, 264, 328), small(128, 128, swap_ab=True)),
    "edge-swap-dynamic": (
        MatmulCase(100, 600, 328),
        small(128, 128, scheduler="dynamic", swap_ab=True),
    ),
}
# Without such tiles, a slot is filled by one box.
WHOLE = {
    "whole": (replace(WIDE, m=256), small(128, 128)),
    "whole-fused": (replace(FUSED, m=128, k=328), small(64, 128)),
    "whole-deep": (MatmulCase(64, 136, 648), small(64, 80, block_k=128)),
    "whole-swap": (MatmulCase(64, 264, 328), small(64, 64, swap_ab=True)),
    "whole-split": (replace(FUSED, m=128, n=120), small(64, 128, splits=2)),
}

# With splits an odd number of tiles: the parts of one are then of several programs.
CALLS = {
    **{f"{m}x{n}": partial(run_hopper, WIDE, small(m, n)) for m, n in TILES},
    **{name: partial(run_hopper, case, small(128, 128)) for name, case in FORMS.items()},
    # Tiles of one step: the ring is deeper than the mailbox.
    "dynamic-short": partial(
        run_hopper,
        MatmulCase(300, 264, 40),
        GluonSm90Config(128, 128, stages=4, scheduler="dynamic"),
    ),
    "dynamic-fused": partial(
        run_hopper, replace(FUSED, n=264), small(64, 128, scheduler="dynamic")
    ),
    "swap-dynamic-fused": partial(
        run_hopper, replace(FUSED, m=300), small(128, 256, scheduler="dynamic", swap_ab=True)
    ),
    "dynamic": partial(run_hopper, WIDE, small(128, 128, scheduler="dynamic")),
    "split": partial(run_hopper, MatmulCase(300, 120, 456), small(128, 128, splits=3)),
    "split-fused": partial(run_hopper, replace(FUSED, m=136, n=120), small(64, 128, splits=2)),
    "deep": partial(run_hopper, MatmulCase(72, 136, 1000), small(64, 64, block_k=256)),
    "deep-nn": partial(run_hopper, FORMS["tt"], small(128, 128, block_k=128)),
    "fused-64": partial(run_hopper, FUSED, small(64, 128)),
    **{f"swap-{m}x{n}": partial(run_hopper, FEW, small(m, n, swap_ab=True)) for m, n in SWAP_TILES},
    **{name: partial(run_hopper, *call) for name, call in (SWAPPED | EDGES | WHOLE).items()},
}

ARRIVING = {"has_residual": True, "has_bias": True}
# What `tileloom check` runs: every path of the Hopper kernel that synchronises.
CASES = {
    **{
        name: CALLS[name]
        for name in (
            "64x128",
            "192x128",
            "128x320",
            "64x80",
            "fused",
            "fused-64",
            "dynamic",
            "dynamic-short",
            "split",
            "split-fused",
            "swap-fused",
            "swap-split",
            "edge",
            "edge-fused",
            "edge-swap",
            "edge-swap-none",
            "edge-swap-dynamic",
            "whole",
            "whole-fused",
            "whole-deep",
        )
    },
    "arriving": partial(run_arriving, (0, 128, 256, 384, 512), (3, 0, 2, 1), None, small(128, 128)),
    "arriving-fused": partial(
        run_arriving, (0, 128, 256, 384), (1, 2, 0), ARRIVING, small(64, 128)
    ),
    "edges": partial(run_arrived, (0, 70, 71, 200, 300), {}, small(128, 128)),
    "edges-fused": partial(run_arrived, (0, 70, 71, 200, 300), ARRIVING, small(64, 128)),
    "arriving-dynamic": partial(
        run_arriving,
        (0, 128, 256, 384, 512),
        (3, 0, 2, 1),
        None,
        small(128, 128, scheduler="dynamic"),
    ),
    "edges-dynamic": partial(
        run_arrived, (0, 70, 71, 200, 300), {}, small(128, 128, scheduler="dynamic")
    ),
    "late": partial(run_late, small(128, 128)),
    "late-dynamic": partial(run_late, small(128, 128, scheduler="dynamic")),
}
