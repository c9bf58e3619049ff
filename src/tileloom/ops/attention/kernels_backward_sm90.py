"""Every shipped config of the Hopper backward, as something that compiles with no GPU."""

from __future__ import annotations

from collections.abc import Mapping

from tileloom.launch.aot import KernelSpec
from tileloom.ops.attention.config_backward_sm90 import GluonSm90BackwardConfig, tile_width

_FORMS: Mapping[str, tuple[bool, bool, bool]] = {  # key lengths, left bound, right bound
    "full": (False, False, False),
    "causal": (False, False, True),
    "lengths": (True, False, False),
    "window-lengths": (True, True, True),
    "packed": (False, False, False),
    "packed-causal": (False, False, True),
}
_PACKED = ("packed", "packed-causal")
_SHAPES = (
    ("bf16", 64, GluonSm90BackwardConfig(128, 2), ("full", "causal", "window-lengths", *_PACKED)),
    ("bf16", 128, GluonSm90BackwardConfig(64, 2), tuple(_FORMS)),
    ("fp16", 128, GluonSm90BackwardConfig(64, 2), ("causal",)),
    ("bf16", 256, GluonSm90BackwardConfig(64, 2), ("full", "causal", "window-lengths", *_PACKED)),
)

_ON_H100 = "H100, Triton 3.6.0, 2026-11-28, 16k tokens, hidden 2048, TFLOP/s at 16k beside cuDNN: "
_SPILLS: Mapping[str, tuple[int, str]] = {
    "64-128": (260, _ON_H100 + "537 (491) full, 494 (460) causal; with no spills (64 rows) 462."),
    "64-128-packed-causal": (320, "What is stored lies in the stores of dK and dV at the end."),
    "128-64": (280, _ON_H100 + "657 (598) full, 595 (580) causal."),
    "256-64": (360, _ON_H100 + "459 (374) full, 450 (400) causal."),
}
"""`head dim-query block` -> bytes allowed on any Triton, and the measurement."""


def gluon_backward_specs() -> tuple[KernelSpec, ...]:
    """Return a spec for every form of the main kernels, and for what runs before and after them."""
    main = [
        _main(dtype, head_dim, config, form)
        for dtype, head_dim, config, forms in _SHAPES
        for form in forms
    ]
    ends = [end for width in (64, 128, 256) for end in (_before("bf16", width), _after(width))]
    return (*main, *ends, _before("bf16", 128, True), _after(128, True))


def _main(dtype: str, head_dim: int, config: GluonSm90BackwardConfig, form: str) -> KernelSpec:
    from tileloom.ops.attention import kernel_gluon_sm90_bwd as kernel

    width, rows = tile_width(head_dim), config.block_m
    is_wide = width == 256
    lengths, left, right = _FORMS[form]
    tiles = {"q_desc": rows, "k_desc": 64, "v_desc": 64, "do_desc": rows, "dk_desc": 64}
    tiles["dv_desc"] = 64
    signature = {
        name: f"tensordesc<{dtype}[1, 1, {n}, {width}],{{layout}}>" for name, n in tiles.items()
    }
    layouts: dict[str, dict[str, int]] = {n: kernel.tile_arguments() for n in tiles}
    for name in ("lse_desc", "delta_desc"):
        signature[name] = f"tensordesc<fp32[{rows}],{{layout}}>"
        layouts[name] = kernel.flat_arguments(1)
    if is_wide:
        signature["buffer_ptr"] = "*fp32"
    else:
        signature["dq_desc"] = f"tensordesc<fp32[{rows * width // 256}, 128],{{layout}}>"
        layouts["dq_desc"] = kernel.flat_arguments(2)
    signature |= {"lengths_ptr": "*i32", "scale": "fp32"}
    signature |= dict.fromkeys(kernel.INT32_ARGUMENTS, "i32")
    constexprs: dict[str, object] = {
        "STAGES": config.stages,
        "HAS_LENGTHS": lengths,
        "HAS_LEFT": left,
        "HAS_RIGHT": right,
    }
    if not lengths:
        constexprs["lengths_ptr"] = None
    names = {"cu_q": "*i32", "cu_k": "*i32", "dk_ptr": f"*{dtype}", "dv_ptr": f"*{dtype}"}
    signature |= names
    if form not in _PACKED:
        constexprs |= dict.fromkeys(names)
    signature |= dict.fromkeys(constexprs, "constexpr")
    spills, reason = _SPILLS.get(f"{width}-{rows}-{form}", _SPILLS.get(f"{width}-{rows}", (0, "")))
    name, module = ("attention_bwd", "kernel_gluon_sm90_bwd")
    if is_wide:
        name, module = f"{name}_wide", f"{module}_wide"
    return KernelSpec(
        name=f"attention_bwd_gluon_sm90[d{head_dim}-{form}-{dtype}-{rows}x{config.stages}]",
        function=f"tileloom.ops.attention.{module}:{name}_kernel",
        gluon=True,
        signature=signature,
        constexprs=constexprs,
        archs=("sm_90",),
        layouts=layouts,
        aligned=tuple(n for n, kind in signature.items() if kind.startswith("*")),
        spill_budget=spills,
        spill_reason=reason,
    )


_ENDS = "tileloom.ops.attention.kernel_triton_bwd_ends"


def _before(dtype: str, width: int, is_packed: bool = False) -> KernelSpec:
    from tileloom.ops.attention import kernel_triton_bwd_ends as ends

    pointers = {"out_ptr": dtype, "dout_ptr": dtype, "lse_ptr": "fp32", "dlse_ptr": "fp32"}
    pointers |= dict.fromkeys(("statistic_ptr", "delta_ptr", "buffer_ptr"), "fp32")
    signature = {name: f"*{kind}" for name, kind in pointers.items()} | {"scale": "fp32"}
    signature |= {"cu_q": "*i32"}
    signature |= dict.fromkeys(ends.INT32_ARGUMENTS, "i32")
    signature |= dict.fromkeys(ends.INT64_BEFORE, "i64")
    constexprs: dict[str, object] = {"HAS_DLSE": True, "D": width, "ROWS": 16, "BLOCK": 64}
    constexprs |= {} if is_packed else {"cu_q": None}
    return KernelSpec(
        name=f"attention_bwd_before[d{width}{'-packed' if is_packed else ''}-{dtype}]",
        function=f"{_ENDS}:attention_bwd_before_kernel",
        gluon=False,
        signature=signature | dict.fromkeys(constexprs, "constexpr"),
        constexprs=constexprs,
        archs=("sm_90",),
        aligned=tuple(pointers),
    )


def _after(width: int, is_packed: bool = False) -> KernelSpec:
    from tileloom.ops.attention import kernel_triton_bwd_ends as ends

    signature = {"buffer_ptr": "*fp32", "dq_ptr": "*bf16", "scale": "fp32", "cu_q": "*i32"}
    signature |= dict.fromkeys(ends.INT32_ARGUMENTS, "i32")
    signature |= dict.fromkeys(ends.INT64_AFTER, "i64")
    constexprs: dict[str, object] = {"D": width, "BLOCK": 64}
    constexprs |= {} if is_packed else {"cu_q": None}
    return KernelSpec(
        name=f"attention_bwd_after[d{width}{'-packed' if is_packed else ''}-bf16]",
        function=f"{_ENDS}:attention_bwd_after_kernel",
        gluon=False,
        signature=signature | dict.fromkeys(constexprs, "constexpr"),
        constexprs=constexprs,
        archs=("sm_90",),
        aligned=("buffer_ptr", "dq_ptr"),
    )
