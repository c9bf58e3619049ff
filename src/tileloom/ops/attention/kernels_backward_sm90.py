"""Every shipped config of the Hopper backward, as something that compiles with no GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tileloom.launch.aot import KernelSpec
from tileloom.ops.attention.config_backward_sm90 import (
    GluonSm90BackwardConfig,
    is_wide_kernel,
    tile_width,
    widest_of_dropper,
)


@dataclass(frozen=True)
class _Form:
    """What changes the code besides head dim and dtype; modes as in `pieces_gluon_sm90_scores`."""

    lengths: bool = False
    left: bool = False
    right: bool = False
    bias: int = 0
    bias_dtype: str = "bf16"
    mask: int = 0
    dbias: int = 0
    is_packed: bool = False
    dropout: bool = False
    is_ordered: bool = False
    is_shared: bool = False
    is_persistent: bool = False

    @property
    def has_scores(self) -> bool:
        """Whether the narrow kernel knows nothing of it."""
        return bool(self.bias or self.mask or self.dropout)


_FORMS: Mapping[str, _Form] = {
    "full": _Form(),
    "causal": _Form(right=True),
    "lengths": _Form(lengths=True),
    "window-lengths": _Form(lengths=True, left=True, right=True),
    "packed": _Form(is_packed=True),
    "packed-causal": _Form(right=True, is_packed=True),
    "dropout": _Form(dropout=True),
    "packed-dropout": _Form(is_packed=True, dropout=True),
    "causal-bias-dropout": _Form(right=True, bias=2, dbias=2, dropout=True),
    "bias": _Form(bias=2, dbias=2),
    "causal-bias-of-keys": _Form(right=True, bias=1, dbias=1),
    "causal-mask": _Form(right=True, mask=2, is_shared=True),
    "bias-mask-anywhere": _Form(bias=3, bias_dtype="fp32", mask=3, dbias=3),
    "window-lengths-bias-mask": _Form(True, True, True, bias=2, mask=2, dbias=2, is_shared=True),
    "float-bias": _Form(bias=2, bias_dtype="fp32", dbias=3),
    "packed-bias": _Form(bias=3, dbias=3, is_packed=True),
    "causal-ordered": _Form(right=True, is_ordered=True),
    "packed-ordered": _Form(is_packed=True, is_ordered=True),
    "full-persistent": _Form(is_persistent=True),
    "causal-persistent": _Form(right=True, is_persistent=True),
    "window-lengths-persistent": _Form(True, True, True, is_persistent=True),
    "packed-persistent": _Form(is_packed=True, is_persistent=True),
    "packed-causal-persistent": _Form(right=True, is_packed=True, is_persistent=True),
    "causal-ordered-persistent": _Form(right=True, is_ordered=True, is_persistent=True),
    "packed-ordered-persistent": _Form(is_packed=True, is_ordered=True, is_persistent=True),
}
_PACKED = ("packed", "packed-causal")
_SCORES = tuple(form for form, own in _FORMS.items() if own.has_scores)
_PERSISTENT = tuple(form for form, own in _FORMS.items() if own.is_persistent)
_PLAIN = tuple(f for f, own in _FORMS.items() if not own.is_ordered and not own.is_persistent)
_ORDERED = ("causal-ordered",)
_SHAPES = (
    ("bf16", 64, GluonSm90BackwardConfig(128, 2, True), _ORDERED),
    ("bf16", 128, GluonSm90BackwardConfig(64, 2, True), (*_ORDERED, "packed-ordered")),
    ("bf16", 256, GluonSm90BackwardConfig(64, 2, True), _ORDERED),
    ("bf16", 64, GluonSm90BackwardConfig(128, 2), ("full", "causal", "packed-causal")),
    ("bf16", 64, GluonSm90BackwardConfig(64, 3), ("full", "causal", "window-lengths", *_PACKED)),
    ("bf16", 64, GluonSm90BackwardConfig(64, 3, True), (*_ORDERED, "packed-ordered")),
    ("bf16", 64, GluonSm90BackwardConfig(64, 3, persistent=True), _PERSISTENT[:5]),
    ("bf16", 64, GluonSm90BackwardConfig(64, 3, True, persistent=True), _PERSISTENT[5:]),
    ("bf16", 64, GluonSm90BackwardConfig(64, 2), (_SCORES[0], *_SCORES[2:5])),
    ("bf16", 128, GluonSm90BackwardConfig(64, 2), _PLAIN),
    ("fp16", 128, GluonSm90BackwardConfig(64, 2), ("causal",)),
    ("bf16", 256, GluonSm90BackwardConfig(64, 2), ("full", "causal", "window-lengths", *_PACKED)),
    ("bf16", 256, GluonSm90BackwardConfig(64, 2), _SCORES[2:6]),
    ("bf16", (192, 128), GluonSm90BackwardConfig(64, 2), ("full", "causal", "window-lengths")),
    ("bf16", (192, 128), GluonSm90BackwardConfig(64, 2), (*_PACKED, "bias")),
    ("bf16", (256, 128), GluonSm90BackwardConfig(64, 2), ("causal",)),
    ("fp16", (192, 64), GluonSm90BackwardConfig(64, 2), ("causal",)),
    ("bf16", (64, 128), GluonSm90BackwardConfig(64, 2), ("window-lengths",)),
)

_BYTES = {"u8": 1, "fp16": 2, "bf16": 2, "fp32": 4}
_ON_H100 = "H100, Triton 3.6.0, 2026-11-28, 16k tokens, hidden 2048, TFLOP/s at 16k beside cuDNN: "
_ON_H200 = "H200, Triton 3.6.0, 2026-11-28, B 4, L 4096, hidden 2048, ms: "
_ON_H200_BWD = "H200, Triton 3.6.0, 2026-11-28, 16k tokens, 16k, TFLOP/s beside cuDNN: "
_WALKS = "H200, Triton 3.6.0, 2026-11-29, 16k tokens, us beside a program for each block, lengths "
_SPILLS: Mapping[str, tuple[int, str]] = {
    "64-128": (260, _ON_H100 + "537 (491) full, 494 (460) causal; with no spills (64 rows) 462."),
    # 440 on Triton 3.6.0, 296 on 3.7.1, 156 on 3.9.0.
    "64-128-packed-causal": (
        440,
        "H200, 16k rows, lengths of 4k: 345 TFLOP/s, plain 394, with the order of products before "
        "5e80f28 and a budget of 320; not timed since: the rule takes 64 rows.",
    ),
    "64-64": (
        360,
        _ON_H200_BWD + "544 (464) full, 531 (451) causal; with 128 rows 494 and 504.",
    ),
    # 292, 320 on Triton 3.6.0, 416, 432 on 3.9.0: of each block of keys, none in its steps.
    "64-64-packed-persistent": (440, _WALKS + "up to 1k 761, 825."),
    "64-64-packed-causal-persistent": (440, _WALKS + "4k 1544, 1566."),
    "128-64": (280, _ON_H100 + "657 (598) full, 595 (580) causal."),
    "256-64": (360, _ON_H100 + "459 (374) full, 450 (400) causal."),
    "256-64-causal-ordered": (420, "H200, 16k tokens, 4k: 366 TFLOP/s, in no order 430 to 440."),
    "192-64": (
        540,
        "H200, Triton 3.6.0 (84 to 184 bytes), 2026-11-29, 192 x 128, 4k, TFLOP/s beside the wide "
        "kernel with none: full 442 (340), causal 410 (318); 392 to 528 on 3.9.0, not timed.",
    ),
    "64-scores": (700, _ON_H200 + "bias 4.1, its gradient 5.2, mask 3.9; the portable 10 or more."),
    "128-scores": (10000, _ON_H200 + "bias 2.9, its gradient 3.5, mask 2.9, full 2.3."),
    "256-scores": (5000, "As with 128, most lies in the path of poisoned keys and large LSE."),
}
"""`head dim-query block` -> bytes allowed on any Triton, and the measurement."""
_TIMED_DBIAS = "H200, Triton 3.6.0, 2026-11-28, the backward with it, and in the form before: "
_DBIAS_SPILLS: Mapping[str, tuple[int, str]] = {
    "64-full": (90, _TIMED_DBIAS + "6.39, 7.52 ms; 52 bytes on 3.6.0, 84 on 3.9.0."),
    "128-full": (220, _TIMED_DBIAS + "4.50, 4.91 ms; 188 bytes on 3.6.0, 212 on 3.9.0."),
    "128-window-lengths": (1000, _TIMED_DBIAS + "causal 3.36, 3.51 ms."),
}
"""`head dim-form` of what sums a bias's gradient -> the same."""


_KERNEL = "tileloom.ops.attention.kernel_gluon_sm90_bwd"
_ENDS = "tileloom.ops.attention.kernel_triton_bwd_ends"


def gluon_backward_specs() -> tuple[KernelSpec, ...]:
    """Return a spec for every form of the main kernels, and for what runs before and after them."""
    main = [
        _main(dtype, (dims, dims) if isinstance(dims, int) else dims, config, form)
        for dtype, dims, config, forms in _SHAPES
        for form in forms
    ]
    ends = [
        end for width in (64, 128, 256) for end in (_before("bf16", width, width), _after(width))
    ]
    ends += [_before("bf16", 192, 128), _after(192)]
    packed = (_before("bf16", 128, 128, True), _after(128, True))
    sums = (_dbias(64, "full"), _dbias(128, "full"), _dbias(128, "window-lengths"))
    return (*main, *ends, _before("bf16", 256, 128), *packed, *sums)


def _main(
    dtype: str, dims: tuple[int, int], config: GluonSm90BackwardConfig, form: str
) -> KernelSpec:
    from tileloom.ops.attention import kernel_gluon_sm90_bwd as kernel

    width, width_v = map(tile_width, dims)
    rows, is_wide, own = config.block_m, is_wide_kernel(*dims), _FORMS[form]
    tiles = {"q_desc": (rows, width), "k_desc": (64, width), "dk_desc": (64, width)}
    tiles |= {"do_desc": (rows, width_v), "v_desc": (64, width_v), "dv_desc": (64, width_v)}
    signature = {
        name: f"tensordesc<{dtype}[1, 1, {n}, {columns}],{{layout}}>"
        for name, (n, columns) in tiles.items()
    }
    layouts: dict[str, dict[str, int]] = {n: _tile_arguments() for n in tiles}
    signature |= dict.fromkeys(("lse_desc", "delta_desc"), f"tensordesc<fp32[{rows}],{{layout}}>")
    layouts |= dict.fromkeys(("lse_desc", "delta_desc"), _flat_arguments(1))
    if is_wide:
        signature["buffer_ptr"] = "*fp32"
    else:
        signature["dq_desc"] = f"tensordesc<fp32[{rows * width // 256}, 128],{{layout}}>"
        layouts["dq_desc"] = _flat_arguments(2)
    sizes = [_BYTES[own.bias_dtype]] * (own.bias == 2) + [1] * (own.mask == 2)
    count, slots = config.score_tiles(*dims, sizes, drops=own.dropout)
    assert count == len(sizes)
    scores = {
        "bias": (own.bias, own.bias_dtype),
        "mask": (own.mask, "u8"),
        "dbias": (own.dbias, "fp32" if own.dbias == 1 else own.bias_dtype),
    }
    for name, (mode, kind) in scores.items():
        signature[name] = f"*{kind}"
        if mode == 2:
            signature[name] = f"tensordesc<{kind}[1, 1, {rows}, 64],{{layout}}>"
            layouts[name] = score_arguments(_BYTES[kind])
    signature |= dict.fromkeys(("lengths_ptr", "flags", "progress"), "*i32")
    signature |= dict.fromkeys(("lse_ptr", "weight_ptr"), "*fp32")
    signature |= dict.fromkeys(("scale", "keep_scale"), "fp32")
    signature |= dict.fromkeys(kernel.INT32_ARGUMENTS, "i32")
    signature |= dict.fromkeys(kernel.INT64_ARGUMENTS, "i64")
    constexprs: dict[str, object] = {
        "STAGES": config.stages,
        "HAS_LENGTHS": own.lengths,
        "HAS_LEFT": own.left,
        "HAS_RIGHT": own.right,
        "BIAS": own.bias,
        "MASK": own.mask,
        "DBIAS": own.dbias,
        "SCORE_STAGES": slots,
        "DROPOUT": _dropout_mode(own, max(dims)),
        "SHARED": own.is_shared,
        "seed_at": None,  # seed and offset come as numbers
        "offset_at": None,
    }
    names = {"cu_q": "*i32", "cu_k": "*i32", "dk_ptr": f"*{dtype}", "dv_ptr": f"*{dtype}"}
    signature |= names
    absent = {"lengths_ptr": not own.lengths, "progress": not own.is_ordered}
    absent |= dict.fromkeys(names, not own.is_packed)
    absent |= dict.fromkeys(("flags", "lse_ptr", "weight_ptr"), own.bias == 0)
    absent |= {name: mode == 0 for name, (mode, _) in scores.items()}
    constexprs |= {name: None for name, is_absent in absent.items() if is_absent}
    signature |= dict.fromkeys(constexprs, "constexpr")
    widest, kind = max(width, width_v), "scores" if own.has_scores else str(rows)
    spills, reason = _SPILLS.get(f"{widest}-{rows}-{form}", _SPILLS[f"{widest}-{kind}"])
    shape, end = _shape_of(dims), "_wide" if is_wide else ""
    spec = KernelSpec(
        name=f"attention_bwd_gluon_sm90[d{shape}-{form}-{dtype}-{rows}x{config.stages}]",
        function=f"{_KERNEL}{end}:attention_bwd{end}_kernel",
        gluon=True,
        signature=signature,
        constexprs=constexprs,
        archs=("sm_90",),
        options={"launch_pdl": True},
        layouts={n: layout for n, layout in layouts.items() if n not in constexprs},
        aligned=tuple(n for n, kind in signature.items() if kind.startswith("*") and n != "bias"),
        spill_budget=spills,
        spill_reason=reason,
    )
    if 128 < dims[0] <= 192 and width_v <= 128 and not (own.has_scores or own.is_ordered):
        return _of_192(spec, width_v)
    return _narrow(spec, own) if widest <= 64 and kind == "64" else spec


def _dropout_mode(own: _Form, widest: int) -> int:
    """`dropout_mode` of a length that is a multiple of 4."""
    if not own.dropout:
        return 0
    return 2 if not own.is_packed and widest <= widest_of_dropper(own.bias + own.mask > 0) else 1


def _shape_of(dims: tuple[int, int]) -> str:
    return str(dims[0]) if dims[0] == dims[1] else f"{dims[0]}x{dims[1]}"


def _narrow(spec: KernelSpec, own: _Form) -> KernelSpec:
    """The narrow kernel in place of the other: it knows nothing of scores and dropout."""
    from tileloom.ops.attention.kernel_gluon_sm90_bwd_narrow import attention_bwd_narrow_kernel

    known = attention_bwd_narrow_kernel.arg_names
    constexprs = {n: value for n, value in spec.constexprs.items() if n in known}
    constexprs |= {} if own.is_persistent else {"counter": None}
    signature = {n: kind for n, kind in spec.signature.items() if n in known}
    counters = ("counter",) if own.is_persistent else ()
    return replace(
        spec,
        function=f"{_KERNEL}_narrow:attention_bwd_narrow_kernel",
        signature=signature | {"counter": "*i32" if own.is_persistent else "constexpr"},
        constexprs=constexprs,
        aligned=(*(n for n in spec.aligned if n in known), *counters),
    )


def _of_192(spec: KernelSpec, width_v: int) -> KernelSpec:
    """The kernel for 192 columns in place of the wide one: other boxes, eight warps."""
    from tileloom.ops.attention.kernel_gluon_sm90_bwd_192 import attention_bwd_192_kernel

    dtype = re.findall(r"<(\w+)\[", spec.signature["q_desc"])[0]
    boxes = {"q_desc": (64, 128), "k_desc": (128, 128), "dk_desc": (128, 128)}
    boxes |= {name.replace("_", "_rest_"): (rows, 64) for name, (rows, _) in boxes.items()}
    boxes |= dict.fromkeys(("v_desc", "dv_desc"), (128, width_v))
    signature = spec.signature | {
        name: f"tensordesc<{dtype}[1, 1, {rows}, {columns}],{{layout}}>"
        for name, (rows, columns) in boxes.items()
    }
    layouts = spec.layouts | {name: _tile_arguments() for name in boxes}
    for name, lines in (("dq_desc", 64), ("dq_rest_desc", 32)):
        signature[name] = f"tensordesc<fp32[{lines}, 128],{{layout}}>"
        layouts[name] = _flat_arguments(2)
    known = attention_bwd_192_kernel.arg_names
    return replace(
        spec,
        function=f"{_KERNEL}_192:attention_bwd_192_kernel",
        num_warps=8,
        signature={n: signature[n] for n in known},
        constexprs={n: value for n, value in spec.constexprs.items() if n in known},
        layouts={n: layout for n, layout in layouts.items() if n in known},
        aligned=tuple(n for n in spec.aligned if n in known),
        spill_budget=_SPILLS["192-64"][0],
        spill_reason=_SPILLS["192-64"][1],
    )


def _tile_arguments() -> dict[str, int]:
    """Shared-memory layout of a tile `[1, 1, rows, columns]` of 64 columns or more."""
    return {"swizzle_byte_width": 128, "element_bitwidth": 16, "rank": 4}


def score_arguments(itemsize: int) -> dict[str, Any]:
    """Shared-memory layout of a tile `[1, 1, rows, 64]` of bias, mask or a bias's gradient."""
    return {
        "swizzle_byte_width": min(128, 64 * itemsize), "element_bitwidth": 8 * itemsize, "rank": 4
    }  # fmt: skip


def _flat_arguments(rank: int) -> dict[str, int]:
    """Shared-memory layout of float32 numbers as they lie in global memory."""
    return {"swizzle_byte_width": 0, "element_bitwidth": 32, "rank": rank}


def _before(dtype: str, width: int, width_v: int, is_packed: bool = False) -> KernelSpec:
    from tileloom.ops.attention import kernel_triton_bwd_ends as ends

    pointers = {"out_ptr": dtype, "dout_ptr": dtype, "lse_ptr": "fp32", "dlse_ptr": "fp32"}
    pointers |= dict.fromkeys(("statistic_ptr", "delta_ptr", "buffer_ptr"), "fp32")
    signature = {name: f"*{kind}" for name, kind in pointers.items()} | {"unit": "fp32"}
    signature |= {"cu_q": "*i32"}
    signature |= dict.fromkeys(ends.INT32_ARGUMENTS, "i32")
    signature |= dict.fromkeys(ends.INT64_BEFORE, "i64")
    constexprs: dict[str, object] = {"HAS_DLSE": True, "D": width, "D_V": width_v}
    constexprs |= {"ROWS": 16, "BLOCK": 64}
    constexprs |= {} if is_packed else {"cu_q": None}
    shape = _shape_of((width, width_v))
    return KernelSpec(
        name=f"attention_bwd_before[d{shape}{'-packed' if is_packed else ''}-{dtype}]",
        function=f"{_ENDS}:attention_bwd_before_kernel",
        gluon=False,
        signature=signature | dict.fromkeys(constexprs, "constexpr"),
        constexprs=constexprs,
        archs=("sm_90",),
        options={"launch_pdl": True},
        aligned=(*pointers, "cu_q"),
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
        options={"launch_pdl": True},
        aligned=("buffer_ptr", "dq_ptr", "cu_q"),
    )


def _dbias(width: int, form: str) -> KernelSpec:
    from tileloom.ops.attention import kernel_gluon_sm90_dbias as kernel

    own = _FORMS[form]
    tile = f"tensordesc<bf16[1, 1, 64, {width}],{{layout}}>"
    layouts: dict[str, dict[str, Any]] = dict.fromkeys(
        ("q_desc", "k_desc", "v_desc", "do_desc"), _tile_arguments()
    )
    signature = dict.fromkeys(layouts, tile)
    scores = ("bias_desc", "dbias_desc")
    signature |= dict.fromkeys(scores, "tensordesc<bf16[1, 1, 64, 64],{layout}>")
    layouts |= dict.fromkeys(scores, score_arguments(2))
    rows = dict.fromkeys(("lse_ptr", "weight_ptr", "delta_ptr"), "*fp32")
    signature |= rows | {"lengths_ptr": "*i32", "scale": "fp32"}
    signature |= dict.fromkeys(kernel.INT32_ARGUMENTS, "i32")
    constexprs: dict[str, object] = {"SLOTS": 5 if width == 64 else 3, "HAS_LENGTHS": own.lengths}
    constexprs |= {"HAS_LEFT": own.left, "HAS_RIGHT": own.right}
    constexprs |= {} if own.lengths else {"lengths_ptr": None}
    spills, reason = _DBIAS_SPILLS[f"{width}-{form}"]
    return KernelSpec(
        name=f"attention_dbias_sm90[d{width}-{form}-bf16]",
        function="tileloom.ops.attention.kernel_gluon_sm90_dbias:attention_dbias_sm90_kernel",
        gluon=True,
        signature=signature | dict.fromkeys(constexprs, "constexpr"),
        constexprs=constexprs,
        archs=("sm_90",),
        layouts=layouts,
        aligned=tuple(n for n in (*rows, "lengths_ptr") if n not in constexprs),
        spill_budget=spills,
        spill_reason=reason,
    )
