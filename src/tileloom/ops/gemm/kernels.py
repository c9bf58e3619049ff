"""Every shipped config of the GEMM kernels, as something that compiles with no GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from tileloom.launch.aot import KernelSpec
from tileloom.launch.layout import Layout
from tileloom.ops.gemm.config import SWAP_TILES, TILES, GluonSm90Config, TritonConfig
from tileloom.ops.gemm.config_matvec import MatvecConfig, overlaps
from tileloom.ops.gemm.problem import MatmulProblem
from tileloom.ops.gemm.rule import triton_rule
from tileloom.target import SMEM_BYTES, Target

PROVED_32BIT: Mapping[str, str] = {
    "matmul_kernel": "columns of the bias are below N and a tile, and N is held under 2^31 - 512 "
    "by `reasons_against`, which holds the chunks under a fifth of that: a table has 5 integers "
    "for each; rows are multiplied with 64 bits, and the TMA unit takes coordinates, below the "
    "same sizes",
}
"""Kernel name -> proof, for each that adds a 32-bit offset to a pointer."""

_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def shipped() -> tuple[KernelSpec, ...]:
    """Return a spec for every tile of both kernels that a rule can give, in different forms."""
    return (*_triton_specs(), *_matvec_specs(), *_gluon_specs())


def _problem(*, a_flips: bool, b_flips: bool) -> MatmulProblem:
    rows, columns = Layout((0, 4096, 1), True), Layout((0, 1, 4096), True)
    return MatmulProblem(
        *(4096, 4096, 4096, 1), dtype=torch.bfloat16, out_dtype=torch.bfloat16,
        a=columns if a_flips else rows, b=columns if b_flips else rows, out=rows,
    )  # fmt: skip


def _triton_specs() -> tuple[KernelSpec, ...]:
    linear = _problem(a_flips=False, b_flips=True)
    ragged = Layout((0, 4099, 1), True)
    scattered = Layout((0, 8192, 2), True)
    plain = {
        "linear": linear,
        "nn": _problem(a_flips=False, b_flips=False),
        "tt": _problem(a_flips=True, b_flips=True),
        "small": replace(linear, m=64),
    }
    fused = {
        "linear-fused": linear,
        # What the Hopper kernel refuses: rows at odd places, and no contiguous dimension at all.
        "ragged-fused": replace(linear, k=4099, a=ragged, b=ragged, n=4099, out=ragged),
        "scattered-fused": replace(linear, a=scattered, b=scattered, out=scattered),
    }
    wide = {"dtype": torch.float32, "out_dtype": torch.float32}
    problems = {
        **plain,
        **{name: _fused(problem) for name, problem in fused.items()},
        "linear-fp32": replace(linear, **wide),
        "linear-fused-fp32": _fused(replace(linear, **wide)),
    }
    specs: list[KernelSpec] = []
    for form, problem in problems.items():
        archs: dict[TritonConfig, list[str]] = {}
        for capability in SMEM_BYTES:
            target = Target("cuda", capability, 1, SMEM_BYTES[capability], "any")
            archs.setdefault(triton_rule(problem, target), []).append(target.arch)
        specs += [
            _triton_spec(form, problem, config, tuple(names)) for config, names in archs.items()
        ]
    return tuple(specs)


def _fused(problem: MatmulProblem) -> MatmulProblem:
    """The problem with all that may follow a product."""
    return replace(problem, bias_dtype=problem.dtype, activation="gelu", residual=problem.out,
                   residual_dtype=problem.out_dtype)  # fmt: skip


def _triton_spec(
    form: str, problem: MatmulProblem, config: TritonConfig, archs: tuple[str, ...]
) -> KernelSpec:
    from tileloom.ops.gemm import kernel_triton as kernel
    from tileloom.ops.gemm.launch_triton import arguments

    dtype = _SHORT[problem.dtype]
    pointers = ("a_ptr", "b_ptr", "bias_ptr", "residual_ptr", "out_ptr")
    signature = {
        **dict.fromkeys(pointers, f"*{dtype}"),
        "one": "fp32",
        **dict.fromkeys(kernel.INT32_ARGUMENTS, "i32"),
        **dict.fromkeys(kernel.INT64_ARGUMENTS, "i64"),
    }
    _, constexprs = arguments(problem, config)
    if problem.bias_dtype is None:
        constexprs["bias_ptr"] = None
    if problem.residual is None:
        constexprs["residual_ptr"] = None
    signature |= dict.fromkeys(constexprs, "constexpr")
    tiles = f"{config.block_m}x{config.block_n}x{config.block_k}-w{config.num_warps}"
    return KernelSpec(
        name=f"matmul_triton[{form}-{tiles}]",
        function="tileloom.ops.gemm.kernel_triton:matmul_portable_kernel",
        gluon=False,
        signature=signature,
        constexprs=constexprs,
        archs=archs,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aligned=tuple(n for n, kind in signature.items() if kind.startswith("*")),
    )


def _matvec_specs() -> tuple[KernelSpec, ...]:
    linear = replace(_problem(a_flips=False, b_flips=True), m=1)
    odd = Layout((0, 4099, 1), True)
    ragged = replace(linear, k=4099, a=odd, b=Layout((0, 1, 4099), True), n=4099, out=odd)
    earlier, *later = (Target("cuda", c, 1, room, "any") for c, room in SMEM_BYTES.items())
    wide = {"dtype": torch.float32, "out_dtype": torch.float32}
    half, small = MatvecConfig(4, 1024, 2), MatvecConfig(2, 1024, 2)
    forms = {
        "linear": (linear, MatvecConfig()),
        "fused": (_fused(linear), MatvecConfig()),
        "half": (linear, half),
        "short": (replace(linear, k=1000), small),
        "ragged": (ragged, small),
        "ragged-fused": (_fused(ragged), small),
        "fp32": (replace(linear, **wide), half),
    }
    specs = [_matvec_spec(form, *given, later) for form, given in forms.items()]
    return (*specs, _matvec_spec("before-hopper", linear, MatvecConfig(), [earlier]))


def _matvec_spec(
    form: str, problem: MatmulProblem, config: MatvecConfig, targets: list[Target]
) -> KernelSpec:
    from tileloom.ops.gemm import kernel_triton_matvec as kernel
    from tileloom.ops.gemm.launch_triton_matvec import arguments

    dtype = _SHORT[problem.dtype]
    pointers = ("a_ptr", "b_ptr", "bias_ptr", "residual_ptr", "out_ptr")
    _, constexprs = arguments(problem, config, targets[0])
    if problem.bias_dtype is None:
        constexprs["bias_ptr"] = None
    if problem.residual is None:
        constexprs["residual_ptr"] = None
    signature = {
        **dict.fromkeys(pointers, f"*{dtype}"),
        **dict.fromkeys(kernel.INT32_ARGUMENTS, "i32"),
        **dict.fromkeys(kernel.INT64_ARGUMENTS, "i64"),
        **dict.fromkeys(constexprs, "constexpr"),
    }
    return KernelSpec(
        name=f"matmul_matvec[{form}-{config.block_n}x{config.block_k}-w{config.num_warps}]",
        function="tileloom.ops.gemm.kernel_triton_matvec:matvec_kernel",
        gluon=False,
        signature=signature,
        constexprs=constexprs,
        archs=tuple(target.arch for target in targets),
        num_warps=config.num_warps,
        aligned=tuple(n for n, kind in signature.items() if kind.startswith("*")),
        options={"launch_pdl": True} if overlaps(targets[0]) else {},
    )


def _gluon_specs() -> tuple[KernelSpec, ...]:
    linear = _problem(a_flips=False, b_flips=True)
    fused = _fused(linear)
    specs: list[KernelSpec] = []
    for tile in TILES:
        config = GluonSm90Config(*tile)
        all_of_it = fused
        if tile == (128, 320):  # beside a residual there is room for two stages: no rule takes it
            all_of_it = replace(fused, residual=None, residual_dtype=None)
        specs += [_gluon_spec("linear", linear, config), _gluon_spec("fused", all_of_it, config)]
    wide = GluonSm90Config()
    flips = ((False, False), (True, False), (True, True))
    for a_flips, b_flips in flips:
        name = ("t" if a_flips else "n") + ("t" if b_flips else "n")
        specs.append(_gluon_spec(name, _problem(a_flips=a_flips, b_flips=b_flips), wide))
    specs.append(_gluon_spec("fp32", replace(linear, out_dtype=torch.float32), wide))
    specs.append(_gluon_spec("chunks", replace(linear, chunks=8), wide))
    dealt = replace(wide, scheduler="dynamic")
    specs.append(_gluon_spec("chunks-dynamic", replace(linear, chunks=8), dealt))
    specs.append(_gluon_spec("dynamic", linear, replace(dealt, swizzle_size=12)))
    specs.append(_gluon_spec("dynamic-fused", fused, replace(dealt, swizzle_size=12)))
    for tile in SWAP_TILES:
        group, depth = (8, 128) if tile[1] <= 64 or tile[0] == 64 else (4, 64)
        config = GluonSm90Config(*tile, swizzle_size=group, block_k=depth, swap_ab=True)
        dealt = replace(config, scheduler="dynamic")
        configs = {"swap": config}
        if tile in ((64, 16), (64, 32), (64, 64), (128, 64), (128, 128)):
            configs["swap-dynamic"] = dealt
        for form, config in configs.items():
            specs += _gluon_pair(form, replace(linear, m=tile[1]), config)
            if tile[1] > 32:
                specs += _gluon_pair(form + "-edge", replace(linear, m=tile[1] - 40), config)
    for tile in ((128, 256), (192, 128), (128, 128), (64, 256), (64, 128), (64, 64), (64, 80)):
        specs += _gluon_pair("edge", replace(linear, m=360), GluonSm90Config(*tile))
    specs += _gluon_pair("edge", replace(linear, m=40), GluonSm90Config(64, 48, block_k=128))
    specs.append(_gluon_spec("edge", replace(linear, m=400), GluonSm90Config(128, 320)))
    for tile in ((64, 128), (128, 128)):
        config = GluonSm90Config(*tile, splits=3)
        specs += [_gluon_spec("split", linear, config), _gluon_spec("split-fused", fused, config)]
    return tuple(specs)


def _gluon_pair(
    form: str, problem: MatmulProblem, config: GluonSm90Config
) -> tuple[KernelSpec, KernelSpec]:
    """A product alone, and with all that may follow it."""
    return (
        _gluon_spec(form, problem, config), _gluon_spec(form + "-fused", _fused(problem), config),
    )  # fmt: skip


def _gluon_spec(form: str, problem: MatmulProblem, config: GluonSm90Config) -> KernelSpec:
    from tileloom.ops.gemm import launch_gluon_sm90 as launch

    dtype, out = _SHORT[problem.dtype], _SHORT[problem.out_dtype]
    is_chunked = problem.chunks > 0
    params = launch.params_of(problem, config)
    constexprs = launch.constants(problem, config, params, chunked=is_chunked)
    box = launch.boxes(problem, config)
    box["residual_desc"] = box["out_desc"]
    signature = dict.fromkeys(("table", "status", "claim", "counter"), "*i32")
    signature |= {"out_ptr": f"*{out}", "bias_ptr": f"*{dtype}", "flags": "*u32"}
    signature["partials"] = "*fp32"
    layouts: dict[str, dict[str, int]] = {}
    for name, (rows, columns) in box.items():
        kind = dtype if name in ("a_desc", "b_desc", "tail_desc", "edge_desc") else out
        signature[name] = f"tensordesc<{kind}[1, {rows}, {columns}],{{layout}}>"
        itemsize = 2 if kind != "fp32" else 4
        layouts[name] = launch.layout_arguments(columns, itemsize)
    signature |= dict.fromkeys(("epoch", "timeout_us"), "i64")
    signature |= dict.fromkeys(
        ("m", "n", "k_steps", "tiles_n", "total", "rows", "chunks", "pivot"), "i32",
    )  # fmt: skip
    absent = {
        "tail_desc": config.tail == 0,
        "edge_desc": config.edge_rows(problem) == 0,
        "residual_desc": problem.residual is None,
        "bias_ptr": problem.bias_dtype is None,
        "table": True,
        "flags": not is_chunked,
        "status": not is_chunked,
        "claim": not is_chunked,
        "counter": config.scheduler != "dynamic" and config.splits == 1,
        "partials": config.splits == 1,
    }
    constexprs |= {name: None for name, is_absent in absent.items() if is_absent}
    for name, is_absent in absent.items():
        if is_absent:
            layouts.pop(name, None)
    signature |= dict.fromkeys(constexprs, "constexpr")
    return KernelSpec(
        name=f"matmul_gluon_sm90[{config.block_m}x{config.block_n}-{form}]",
        function="tileloom.ops.gemm.kernel_gluon_sm90:matmul_kernel",
        gluon=True,
        signature=signature,
        constexprs=constexprs,
        archs=("sm_90",),
        layouts=layouts,
        aligned=tuple(n for n, kind in signature.items() if kind.startswith("*")),
        threads=128 * (config.consumers + 1),
        options={"launch_pdl": True},
    )
