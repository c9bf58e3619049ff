"""Every shipped config of the attention kernels, as something that compiles with no GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from tileloom.launch.aot import KernelSpec
from tileloom.ops.attention.config import TritonConfig, gluon_rule, head_tiles, triton_rule
from tileloom.ops.attention.kernels_backward import triton_backward_specs
from tileloom.ops.attention.kernels_backward_sm90 import gluon_backward_specs
from tileloom.ops.attention.masks import Band
from tileloom.ops.attention.problem import AttentionProblem, Layout, Packed
from tileloom.target import SMEM_BYTES, Target

PROVED_32BIT: Mapping[str, str] = {}
"""Kernel name -> proof, for each that adds a 32-bit offset to a pointer. None does."""

_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def shipped() -> tuple[KernelSpec, ...]:
    """Return a spec for every config that dispatch can choose, in the forms that differ most."""
    return (
        *_triton_specs(),
        *_gluon_specs(),
        *_triton_backward_specs(),
        *gluon_backward_specs(),
    )


@dataclass(frozen=True)
class _Form:
    """What changes the code of a kernel besides head dim and dtype."""

    name: str
    band: Band = field(default_factory=Band)
    has_key_lengths: bool = False
    has_mask: bool = False
    has_bias: bool = False
    is_packed: bool = False
    length: int = 4096
    bias_dtype: torch.dtype | None = None
    bias_mode: int = 2
    mask_mode: int = 2
    is_shared: bool = False
    dropout_p: float = 0.0

    @property
    def rides(self) -> bool:
        """Whether the TMA unit brings bias or mask."""
        return 3 in (self.has_bias * self.bias_mode, self.has_mask * self.mask_mode)


_FULL = _Form("full")
_RAGGED = _Form("ragged", length=4001)
_LONG_CAUSAL = _Form("long-causal", Band(right_top=0), length=16384)
_LENGTHS = _Form("lengths", has_key_lengths=True)
_CAUSAL_LENGTHS = _Form("causal-lengths", Band(right_top=0), has_key_lengths=True)
_CAUSAL = _Form("causal", Band(right_top=0))
_WINDOW = _Form("window-lengths", Band(left_bottom=256, right_bottom=256), has_key_lengths=True)
_PACKED = _Form("packed-causal", Band(right_bottom=0), is_packed=True)
_ALL_PACKED = (_Form("packed", is_packed=True), _PACKED)
_TENSORS = replace(
    _WINDOW, name="window-lengths-mask-bias", has_mask=True, has_bias=True, is_shared=True
)
_WINDOW_DROPOUT = replace(_WINDOW, name="window-lengths-dropout", dropout_p=0.1)
_ALL = replace(_TENSORS, name="window-lengths-mask-bias-dropout", dropout_p=0.1)
_BIAS = _Form("bias", has_bias=True, bias_mode=3, is_shared=True)
_CAUSAL_BIAS = replace(_BIAS, name="causal-bias", band=Band(right_top=0))
_FLOAT_BIAS = _Form("ragged-float-bias", has_bias=True, bias_dtype=torch.float32, length=4001)
_ROW_BIAS = _Form("row-bias", has_bias=True, bias_mode=1)
_DROPOUT = _Form("dropout", dropout_p=0.1)
_CAUSAL_DROPOUT = _Form("causal-dropout", Band(right_top=0), dropout_p=0.1)
_MASK = _Form("mask", has_mask=True, mask_mode=3)
_ROW_MASK = _Form("row-mask", has_mask=True, mask_mode=1)
_PACKED_BIAS = _Form("packed-bias", has_bias=True, is_packed=True)
_RIDING = replace(_TENSORS, name="window-lengths-mask-riding-bias", bias_mode=3)


def _problem(
    head_dim: int, dtype: torch.dtype, form: _Form, head_dim_v: int = 0
) -> AttentionProblem:
    """A problem; v is as wide as q and k if no width of its own is given."""
    n = form.length
    layout = Layout((16 * n * head_dim, n * head_dim, head_dim, 1), True)
    return AttentionProblem(
        batch=1,
        heads_q=16,
        heads_kv=16,
        len_q=n,
        len_k=n,
        head_dim=head_dim,
        head_dim_v=head_dim_v or head_dim,
        dtype=dtype,
        scale=1.0 / math.sqrt(head_dim),
        q=layout,
        k=layout,
        v=layout,
        band=form.band,
        has_key_lengths=form.has_key_lengths,
        has_mask=form.has_mask,
        has_bias=form.has_bias,
        packed=Packed(n, n) if form.is_packed else None,
        dropout_p=form.dropout_p,
        bias_dtype=(form.bias_dtype or dtype) if form.has_bias else None,
    )


_TRITON_CASES = (
    (torch.float16, 32, (_FULL,)),
    (torch.float16, 72, (_CAUSAL,)),
    (torch.bfloat16, 64, (_FULL, _WINDOW, _TENSORS, _WINDOW_DROPOUT)),
    (torch.bfloat16, 128, (_CAUSAL, _WINDOW, _TENSORS, _PACKED, _ALL)),
    (torch.bfloat16, 256, (_WINDOW, _TENSORS)),
    (torch.bfloat16, 512, (_WINDOW, _TENSORS)),
    *((torch.float32, head_dim, (_TENSORS,)) for head_dim in (32, 128, 256, 512)),
    (torch.float32, 64, (_TENSORS, _ALL)),
)


def _triton_specs() -> tuple[KernelSpec, ...]:
    specs: list[KernelSpec] = []
    for dtype, head_dim, forms in _TRITON_CASES:
        for form in forms:
            problem = _problem(head_dim, dtype, form)
            archs: dict[TritonConfig, list[str]] = {}
            for capability in SMEM_BYTES:
                target = Target("cuda", capability, 1, SMEM_BYTES[capability], "any")
                archs.setdefault(triton_rule(problem, target), []).append(target.arch)
            for config, names in archs.items():
                specs.append(_triton_spec(problem, form, config, tuple(names)))
    return tuple(specs)


def _triton_spec(
    problem: AttentionProblem, form: _Form, config: TritonConfig, archs: tuple[str, ...]
) -> KernelSpec:
    from tileloom.ops.attention import kernel_triton as kernel
    from tileloom.ops.attention.launch_triton_fwd import constants

    dtype = _SHORT[problem.dtype]
    vector = 16 // problem.dtype.itemsize
    constexprs: dict[str, object] = {
        **constants(problem, config),
        "VECTOR": vector,
        # A mask and a bias with a row for each query, the bias unaligned: the costliest form.
        "MASK_MODE": 2 if form.has_mask else 0,
        "MASK_VECTOR": 16 if form.has_mask else 0,
        "BIAS_MODE": 2 if form.has_bias else 0,
        "BIAS_VECTOR": 1 if form.has_bias else 0,
    }
    signature = {
        **dict.fromkeys(("q", "k", "v", "bias", "out"), f"*{dtype}"),
        "mask": "*u8",
        **dict.fromkeys(("lengths", "cu_q", "cu_k"), "*i32"),
        "lse": "*fp32",
        **dict.fromkeys(("scale", "keep_scale"), "fp32"),
        **dict.fromkeys(kernel.INT64_ARGUMENTS, "i64"),
        **dict.fromkeys(kernel.INT32_ARGUMENTS, "i32"),
    }
    absent = {
        "mask": not form.has_mask,
        "bias": not form.has_bias,
        "lengths": not form.has_key_lengths,
        **dict.fromkeys(("cu_q", "cu_k"), not form.is_packed),
        **dict.fromkeys(("seed_at", "offset_at"), True),  # seed and offset come as numbers
    }
    constexprs.update({name: None for name, is_absent in absent.items() if is_absent})
    signature.update(dict.fromkeys(constexprs, "constexpr"))
    tiles = f"{config.block_m}x{config.block_n}-w{config.num_warps}-s{config.num_stages}"
    return KernelSpec(
        name=f"attention_fwd_triton[d{problem.head_dim}-{form.name}-{dtype}-{tiles}]",
        function="tileloom.ops.attention.kernel_triton:attention_fwd_kernel",
        gluon=False,
        signature=signature,
        constexprs=constexprs,
        archs=archs,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aligned=tuple(n for n, kind in signature.items() if kind.startswith("*") and n != "bias"),
    )


_BACKWARD_CASES = (
    (torch.float16, 32, (_WINDOW,)),
    (torch.bfloat16, 64, (_FULL, _WINDOW, _TENSORS, _ALL)),
    (torch.bfloat16, 128, (_WINDOW, _TENSORS, _PACKED, _WINDOW_DROPOUT)),
    (torch.bfloat16, 256, (_WINDOW, _TENSORS)),
    (torch.bfloat16, 512, (_TENSORS,)),
    *((torch.float32, head_dim, (_CAUSAL, _TENSORS)) for head_dim in (64, 128)),
    *((torch.float32, head_dim, (_TENSORS,)) for head_dim in (256, 512)),
)


def _triton_backward_specs() -> tuple[KernelSpec, ...]:
    problems = [
        (_problem(head_dim, dtype, form), form.name)
        for dtype, head_dim, forms in _BACKWARD_CASES
        for form in forms
    ]
    return tuple(triton_backward_specs(problems))


_GLUON_CASES = (
    (torch.bfloat16, 16, (_WINDOW,)),
    (torch.float16, 32, (_LENGTHS, _CAUSAL, _TENSORS)),
    (torch.bfloat16, 64, (_FULL, _RAGGED, _CAUSAL, _LONG_CAUSAL, _CAUSAL_LENGTHS, _WINDOW)),
    (torch.bfloat16, 64, (*_ALL_PACKED, _PACKED_BIAS)),
    (torch.bfloat16, 64, (_DROPOUT, _CAUSAL_DROPOUT)),
    (torch.bfloat16, 128, (_DROPOUT, _CAUSAL_DROPOUT)),
    (torch.bfloat16, 64, (_BIAS, _CAUSAL_BIAS, _FLOAT_BIAS, _ROW_BIAS, _MASK, _ROW_MASK)),
    (torch.bfloat16, 128, (_FULL, _RAGGED, _CAUSAL, _CAUSAL_LENGTHS, _WINDOW, *_ALL_PACKED)),
    (torch.bfloat16, 128, (_BIAS, _CAUSAL_BIAS, _MASK, _RIDING)),
    (torch.float16, 128, (_CAUSAL,)),
    (torch.bfloat16, 256, (_FULL, _RAGGED, _CAUSAL, _CAUSAL_LENGTHS, _WINDOW, *_ALL_PACKED)),
    (torch.bfloat16, 256, (_BIAS, _RIDING)),
)

_UNEVEN_CASES = (
    (192, 128, (_FULL, _CAUSAL, _PACKED)),
    (64, 128, (_WINDOW,)),
    (128, 64, (_BIAS,)),
)
_ON_39 = "On Triton 3.9.0; none on 3.6.0, which was timed: "
_ON_H200 = "H200, Triton 3.6.0, 2026-11-28, 16k tokens, hidden 2048, TFLOP/s: "
_RARE = "Around what a tile does once, or when it goes round again (SASS). H200, L 4096: "
_SPILLS: Mapping[str, tuple[int, str]] = {
    "32-window-lengths-mask-bias": (2200, _RARE + "not timed; none of note on 3.6.0."),
    "64-bias": (1050, _RARE + "352, plain 523, cuDNN with the bias 270 TFLOP/s."),
    "64-causal-bias": (400, _RARE + "1.01 ms; plain 0.66."),
    "64-row-bias": (500, _RARE + "1.53 ms; plain 1.08."),
    "64-mask": (100, _RARE + "2.2 ms; plain 1.08."),
    "128x64-bias": (1500, _RARE + "not timed."),
    "128-dropout": (260, _RARE + "310 TFLOP/s, 273 in the form before; none on 3.6.0."),
    "128-causal-dropout": (300, _RARE + "280 TFLOP/s, 256 in the form before; 188 bytes on 3.6.0."),
    "128-bias": (520, _RARE + "508, plain 659, cuDNN with the bias 306 TFLOP/s."),
    "128-causal-bias": (700, _RARE + "0.69 ms; plain 0.48."),
    "128-mask": (240, _RARE + "1.22 ms; plain 0.85."),
    "128-window-lengths-mask-riding-bias": (3800, _RARE + "not timed; 124 bytes on 3.6.0."),
    "256-bias": (1700, _RARE + "not timed; 984 bytes on 3.6.0."),
    "256-window-lengths-mask-riding-bias": (3900, _RARE + "not timed; 1372 bytes on 3.6.0."),
    "128-full": (220, _ON_39 + _ON_H200 + "738 at 16k, cuDNN 666."),
    "128-ragged": (250, _ON_39 + _ON_H200 + "738 at 16k, cuDNN 666."),
    "128-causal": (24, _ON_39 + _ON_H200 + "717 at 16k, cuDNN 615."),
    "128-causal-lengths": (24, _ON_39 + _ON_H200 + "717 at 16k without lengths, cuDNN 615."),
    "128-window-lengths": (8, _ON_39 + _ON_H200 + "435 at 4k with a window of 512."),
    "128-packed": (220, _ON_39 + _ON_H200 + "738 at 16k where one sequence, cuDNN 666."),
    "128-packed-causal": (24, _ON_39 + _ON_H200 + "717 at 16k where one sequence, cuDNN 615."),
    "256-packed": (56, _ON_39 + _ON_H200 + "830 at 16k where one sequence, cuDNN 733."),
    "256-packed-causal": (112, _ON_39 + _ON_H200 + "750 at 16k where one sequence, cuDNN 606."),
    "256-causal": (28, _ON_39 + "2026-11-29, 757 TFLOP/s at 16k, the form before 706."),
    "256-causal-lengths": (
        250,
        "Outside the loops (SASS). " + _ON_H200 + "750 without, cuDNN 606.",
    ),
    "256-window-lengths": (
        330,
        "Outside the loops (SASS). " + _ON_H200 + "750 without, cuDNN 606.",
    ),
}
"""`head dim-form` -> bytes allowed on any Triton, and the measurement that justifies them."""


def _gluon_specs() -> tuple[KernelSpec, ...]:
    cases = [(d, d, dtype, forms) for dtype, d, forms in _GLUON_CASES]
    cases += [(d, d_v, torch.bfloat16, forms) for d, d_v, forms in _UNEVEN_CASES]
    return tuple(
        _gluon_spec(_problem(d, dtype, form, d_v), form)
        for d, d_v, dtype, forms in cases
        for form in forms
    )


def _gluon_spec(problem: AttentionProblem, form: _Form) -> KernelSpec:
    from tileloom.ops.attention import kernel_gluon_sm90_fwd as kernel
    from tileloom.ops.attention.descriptors_gluon_sm90 import layout_arguments
    from tileloom.ops.attention.launch_gluon_sm90_fwd import constants, is_dynamic

    config = gluon_rule(problem)
    dtype = _SHORT[problem.dtype]
    width, _, width_v = head_tiles(problem.head_dim, problem.head_dim_v)
    tensors = {
        "q_desc": (64, width),
        "k_desc": (config.block_n, width),
        "v_desc": (config.block_n, width_v),
        "o_desc": (64, width_v),
    }
    signature = {
        name: f"tensordesc<{dtype}[1, 1, {rows}, {columns}],{{layout}}>"
        for name, (rows, columns) in tensors.items()
    }
    layouts = {name: layout_arguments(columns) for name, (_, columns) in tensors.items()}
    bias_dtype = _SHORT[problem.bias_dtype or problem.dtype]
    if form.rides:
        ride, itemsize = (bias_dtype, 2) if form.has_bias else ("u8", 1)
        signature["ride_desc"] = f"tensordesc<{ride}[1, 1, 64, {config.block_n}],{{layout}}>"
        layouts["ride_desc"] = layout_arguments(config.block_n, itemsize)
    signature |= {"o_ptr": f"*{dtype}", "lse_ptr": "*fp32", "lengths_ptr": "*i32"}
    signature |= {"cu_q": "*i32", "cu_k": "*i32"}
    signature |= {"counter": "*i32", "bias_ptr": f"*{bias_dtype}", "mask_ptr": "*u8"}
    signature |= {"seed_at": "*i64", "offset_at": "*i64", "keep_scale": "fp32"}
    signature |= {"scale": "fp32"} | dict.fromkeys(kernel.INT32_ARGUMENTS, "i32")
    signature |= dict.fromkeys(kernel.INT64_ARGUMENTS, "i64")
    constexprs = constants(problem, config, is_shared=form.is_shared)
    constexprs["BIAS_MODE"] = form.bias_mode if form.has_bias else 0
    constexprs["BIAS_VECTOR"] = 16 // problem.bias_dtype.itemsize if problem.bias_dtype else 0
    constexprs["MASK_MODE"] = form.mask_mode if form.has_mask else 0
    constexprs["MASK_VECTOR"] = 16 if form.has_mask else 0
    if not form.rides:
        constexprs["ride_desc"] = None
    if not form.has_bias:
        constexprs["bias_ptr"] = None
    if not form.has_mask:
        constexprs["mask_ptr"] = None
    constexprs |= {"seed_at": None, "offset_at": None}
    if not constexprs["STORE_TMA"]:
        constexprs["o_desc"] = None
    if not problem.has_key_lengths:
        constexprs["lengths_ptr"] = None
    if not is_dynamic(problem, config):
        constexprs["counter"] = None
    if not problem.packed:
        constexprs |= {"cu_q": None, "cu_k": None}
    signature |= dict.fromkeys(constexprs, "constexpr")
    dims = str(problem.head_dim)
    if problem.head_dim_v != problem.head_dim:
        dims += f"x{problem.head_dim_v}"
    spills, reason = _SPILLS.get(f"{dims}-{form.name}", (0, ""))
    return KernelSpec(
        name=f"attention_fwd_gluon_sm90[d{dims}-{form.name}-{dtype}]",
        function="tileloom.ops.attention.kernel_gluon_sm90_fwd:attention_fwd_kernel",
        gluon=True,
        signature=signature,
        constexprs=constexprs,
        archs=("sm_90",),
        layouts={name: layouts[name] for name in layouts if name not in constexprs},
        aligned=tuple(n for n, kind in signature.items() if kind.startswith("*")),
        spill_budget=spills,
        spill_reason=reason,
    )
