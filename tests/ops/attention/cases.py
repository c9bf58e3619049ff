"""Attention calls that the emulator's and the GPU's tests share, and how they are judged.

A call is described without tensors, so that its id, its inputs and its answer are the same on every
machine. Cases named A1 to A24 are those of users' bug reports against other kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tileloom import masks
from tileloom.ops.attention import attention_reference
from tileloom.ops.attention.masks import Mask
from tileloom.ops.attention.problem import AttentionProblem, Layout
from tileloom.testing import Case, assert_accurate, laid_out

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
Extra = Callable[["AttentionCase", torch.device], Any]


def _nothing() -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class Inputs:
    """What one call gets."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: Mapping[str, Any]


@dataclass(frozen=True)
class AttentionCase:
    """One call: sizes `(B, Hq, Hkv, Lq, Lk, D, Dv)`, and what is special about it.

    `mask` and `bias` make those arguments; `hide` lists key positions of batch 0 that no query
    sees, which get NaN in k and v.
    """

    name: str
    sizes: tuple[int, int, int, int, int, int, int]
    dtype: torch.dtype = FP16
    layouts: tuple[Any, Any, Any] = ("contiguous", "contiguous", "contiguous")
    mask: Extra | None = None
    bias: Extra | None = None
    options: Mapping[str, Any] = field(default_factory=_nothing)
    hide: slice | None = None
    input_scale: float = 1.0

    @property
    def case(self) -> Case:
        names = ("B", "Hq", "Hkv", "Lq", "Lk", "D", "Dv")
        return Case(
            self.name, dict(zip(names, self.sizes)), self.dtype, input_scale=self.input_scale
        )

    @property
    def id(self) -> str:
        return self.case.id

    def inputs(self, device: torch.device | str = "cpu") -> Inputs:
        device = torch.device(device)
        q = self._tensor("q", "B Hq Lq D", self.layouts[0], device)
        k = self._tensor("k", "B Hkv Lk D", self.layouts[1], device)
        v = self._tensor("v", "B Hkv Lk Dv", self.layouts[2], device)
        if self.hide is not None:
            k[0, :, self.hide] = float("nan")
            v[0, :, self.hide] = float("nan")
        options = dict(self.options)
        if self.mask is not None:
            options["mask"] = self.mask(self, device)
        if self.bias is not None:
            options["bias"] = self.bias(self, device)
        return Inputs(q, k, v, options)

    def _tensor(self, name: str, dims: str, layout: Any, device: torch.device) -> torch.Tensor:
        if callable(layout):
            return layout(self.case.tensor(name, dims, device=device))
        return self.case.tensor(name, dims, layout=layout, device=device)


def check(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Judge O and LSE by the accuracy rule, hidden rows exactly, shapes and dtypes too."""
    q, k, v = inputs.q, inputs.k, inputs.v
    arguments = {**inputs.options, "return_lse": True}
    reference, reference_lse = attention_reference(
        q, k, v, compute_dtype=torch.float64, **arguments
    )
    baseline, baseline_lse = attention_reference(q, k, v, compute_dtype=q.dtype, **arguments)
    assert out.dtype == q.dtype
    assert lse.dtype == torch.float32
    assert out.stride(3) == 1 or out.shape[3] == 1
    blind = reference_lse == float("-inf")
    assert torch.equal(lse == float("-inf"), blind)
    assert not bool(out[blind].any())
    if bool(blind.all()) or reference.numel() == 0:
        assert out.shape == reference.shape
        assert lse.shape == reference_lse.shape
        return
    assert_accurate(out, reference, baseline, name="out")
    assert_accurate(lse, reference_lse, baseline_lse, name="lse")


def problem_of(inputs: Inputs) -> AttentionProblem:
    """The problem that dispatch would see."""
    q, k, v = inputs.q, inputs.k, inputs.v
    mask = inputs.options.get("mask")
    shown = masks.dense(mask) if isinstance(mask, torch.Tensor) else mask
    shown = masks.window(None, None) if shown is None else shown
    if inputs.options.get("is_causal"):
        shown = shown & masks.causal()
    scale = inputs.options.get("scale")
    return AttentionProblem(
        *(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3]),
        dtype=q.dtype,
        scale=1.0 if scale is None else scale,
        q=Layout.of(q),
        k=Layout.of(k),
        v=Layout.of(v),
        band=shown.band,
        has_key_lengths=shown.lengths is not None,
        has_mask=shown.visible is not None,
        has_bias=inputs.options.get("bias") is not None,
        dropout_p=inputs.options.get("dropout_p", 0.0),
        bias_dtype=getattr(inputs.options.get("bias"), "dtype", None),
    )


# What makes masks and biases. The tensors are drawn on the CPU: the same numbers everywhere.


def shown_by(mask: Mask | Callable[[], Mask]) -> Extra:
    """A mask without tensors."""
    return lambda case, device: mask() if callable(mask) else mask


def lengths(*values: int, dtype: torch.dtype = torch.int64, then: Mask | None = None) -> Extra:
    """Key lengths, combined with `then`."""

    def make(case: AttentionCase, device: torch.device) -> Mask:
        own = masks.key_lengths(torch.tensor(values, dtype=dtype, device=device))
        return own if then is None else own & then

    return make


def visible(shape: tuple[int, ...], *, rows_from: int | None = None) -> Extra:
    """A random bool mask; rows from `rows_from` on see nothing; `hide` is hidden from all."""

    def make(case: AttentionCase, device: torch.device) -> torch.Tensor:
        generator = torch.Generator().manual_seed(7)
        mask = torch.rand(shape, generator=generator) < 0.6
        if rows_from is not None:
            mask[..., rows_from:, :] = False
        if case.hide is not None:
            mask[..., case.hide] = False
        return mask.to(device)

    return make


def added(
    shape: tuple[int, ...],
    *,
    dtype: torch.dtype | None = None,
    columns: tuple[slice, float] | None = None,
    rows: tuple[slice, float] | None = None,
    layout: Any = "contiguous",
    is_zero: bool = False,
) -> Extra:
    """A random bias (or zeros), with constant columns and rows; `hide` is -inf for all."""

    def make(case: AttentionCase, device: torch.device) -> torch.Tensor:
        generator = torch.Generator().manual_seed(11)
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        values = values * (0.0 if is_zero else 1.0)
        if columns is not None:
            values[..., columns[0]] = columns[1]
        if rows is not None:
            values[..., rows[0], :] = rows[1]
        if case.hide is not None:
            values[..., case.hide] = float("-inf")
        made = values.to(dtype or case.dtype).to(device)
        return layout(made) if callable(layout) else laid_out(made, layout)

    return make


def _min(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).min


def length_outermost(tensor: torch.Tensor) -> torch.Tensor:
    """Stored as `[L, B, H, D]`, as A9 has it."""
    return tensor.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)


def same_columns(tensor: torch.Tensor) -> torch.Tensor:
    """Its first column, expanded over all by a stride of 0."""
    return tensor[..., :1].clone().expand(tensor.shape)


def rows_of_16_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same, each row at a multiple of 16 bytes, with something else between them."""
    length, unit = tensor.shape[-1], 16 // tensor.itemsize
    whole = tensor.new_ones((*tensor.shape[:-1], -(-length // unit) * unit))
    whole[..., :length] = tensor
    return whole[..., :length]


def cut_from(longer: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """All but the last `longer` rows of a larger tensor, whose others are NaN; A24."""

    def make(tensor: torch.Tensor) -> torch.Tensor:
        batch, heads, length, width = tensor.shape
        whole = tensor.new_full((batch, heads, length + longer, width), float("nan"))
        whole[:, :, :length] = tensor
        return whole[:, :, :-longer]

    return make


def expanded_to_full(make_bias: Extra) -> Extra:
    """The same bias, expanded to `[B, Hq, Lq, Lk]` by strides of 0."""

    def make(case: AttentionCase, device: torch.device) -> torch.Tensor:
        batch, heads, _, len_q, len_k, *_ = case.sizes
        return make_bias(case, device).expand(batch, heads, len_q, len_k)

    return make


_CAUSAL: Mapping[str, Any] = {"is_causal": True}
_PLAIN = (2, 3, 3, 70, 93, 32, 32)
_SQUARE_77 = (2, 3, 3, 77, 77, 32, 32)
_LAYOUTS = ("transposed", "gapped", "unaligned", "offset", "last_strided", "expanded")


def _reported() -> list[AttentionCase]:
    """What users hit in other kernels, as far as the forward goes."""
    zeros = {"shape": (1, 1, 441, 441), "is_zero": True}
    biases = {"both": (1, 1, 77, 77), "heads": (2, 1, 77, 77), "rows": (1, 3, 1, 77)}
    found = [
        AttentionCase(
            "A1-columns-of-min", (1, 1, 1, 441, 441, 64, 64), FP32,
            bias=added(**zeros, columns=(slice(0, 128), _min(FP32))),
        ),
        AttentionCase(
            "A2-blind-rows", (1, 1, 1, 8, 8, 8, 8), mask=visible((1, 1, 8, 8), rows_from=4)
        ),
        AttentionCase(
            "A2-blind-rows", (1, 2, 2, 200, 200, 64, 64),
            mask=visible((1, 1, 200, 200), rows_from=4),
        ),
        AttentionCase("A4-one-key", (1, 1, 1, 1, 1, 16, 16), input_scale=3.0),
        AttentionCase(
            "A6-unbounded-window", (1, 2, 2, 129, 64, 64, 64),
            mask=shown_by(masks.window(None, 2**31 - 1, anchor="bottom_right")),
        ),
        AttentionCase(
            "A9-length-outermost", (4, 1, 1, 65, 200, 64, 64),
            layouts=("contiguous", length_outermost, length_outermost),
        ),
        *(
            AttentionCase(f"A12-bias-{name}", _SQUARE_77, bias=added(shape))
            for name, shape in biases.items()
        ),
        AttentionCase(
            "A12-bias-expanded", _SQUARE_77, bias=expanded_to_full(added(biases["rows"]))
        ),
        *(
            AttentionCase("A16-empty", (b, 2, 2, lq, lk, 16, 16), options=options)
            for b, lq, lk in ((1, 5, 0), (1, 0, 5), (0, 5, 5))
            for options in ({}, _CAUSAL)
        ),
        *(
            AttentionCase("A22-head-dim", (1, 4, 2, 70, 70, d, d), options=_CAUSAL)
            for d in (512, 72, 80, 96, 200)
        ),
        *(
            AttentionCase(
                f"A24-cut-from-{n}", (1, 2, 2, 64, 100, 32, 32),
                layouts=("contiguous", cut_from(n), cut_from(n)),
            )
            for n in (128, 64)
        ),
    ]  # fmt: skip
    return found


def _shown() -> list[AttentionCase]:
    """Masks, hidden keys and lengths."""
    window = masks.window
    bands = {
        "top-left": masks.causal(),
        "bottom-right": masks.causal("bottom_right"),
        "window": window(10, 20),
        "window-bottom-right": window(40, 3, anchor="bottom_right"),
        "left-only": window(17, None),
        "both-anchors": window(30, None) & window(None, 5, anchor="bottom_right"),
        "contradiction": window(5, 0) & window(0, 5, anchor="bottom_right"),
    }
    sizes = ((1, 4, 2, 70, 140, 32, 32), (1, 4, 2, 140, 70, 32, 32))
    bottom_right = masks.causal("bottom_right")
    return [
        *(
            AttentionCase(f"{name}", size, mask=shown_by(mask))
            for name, mask in bands.items()
            for size in sizes
        ),
        # No row sees a key, though the bounds of a whole tile overlap: nothing may be loaded.
        AttentionCase(
            "contradiction-nan", (1, 2, 2, 70, 75, 32, 32), hide=slice(0, None),
            mask=shown_by(window(None, 0) & window(0, None, anchor="bottom_right")),
        ),
        AttentionCase("lengths", (4, 2, 2, 33, 100, 32, 32), mask=lengths(0, 5, 100, 1000)),
        AttentionCase(
            "lengths-nan", (2, 2, 1, 80, 100, 32, 32), hide=slice(70, None),
            mask=lengths(70, 100, dtype=torch.int32, then=bottom_right),
        ),
        AttentionCase(
            "lengths-window", (3, 2, 2, 80, 100, 32, 32),
            mask=lengths(-3, 31, 2**40, then=window(20, 9, anchor="bottom_right")),
        ),
        AttentionCase(
            "causal-nan", (1, 2, 2, 70, 140, 32, 32), hide=slice(70, None), options=_CAUSAL
        ),
        AttentionCase(
            "mask-nan", (1, 2, 2, 70, 140, 32, 32), hide=slice(33, 61),
            mask=visible((1, 2, 70, 140)),
        ),
        AttentionCase(  # a program has several tiles, and all of them go round twice
            "mask-nan-tiles", (2, 2, 1, 130, 176, 64, 64), hide=slice(33, 61),
            mask=visible((2, 1, 130, 176)),
        ),
        AttentionCase(
            "mask-of-keys-nan", (2, 2, 2, 70, 140, 32, 32), hide=slice(120, None),
            mask=visible((2, 1, 1, 140)), options=_CAUSAL,
        ),
        AttentionCase(
            "bias-nan", (1, 2, 2, 70, 140, 32, 32), hide=slice(0, 50), bias=added((70, 140))
        ),
        AttentionCase(
            "bias-of-keys-nan", (1, 2, 2, 70, 140, 32, 32), hide=slice(64, 96), bias=added((1, 140))
        ),
    ]  # fmt: skip


def _scored() -> list[AttentionCase]:
    """Biases, scales, sizes."""
    everything = masks.window(50, 20, anchor="bottom_right")
    return [
        AttentionCase(
            "rows-of-min", (1, 2, 2, 40, 90, 32, 32), FP32,
            bias=added((40, 90), rows=(slice(3, 9), _min(FP32))),
        ),
        AttentionCase(
            "double-bias", _PLAIN, FP32,
            bias=added((70, 93), dtype=torch.float64, columns=(slice(0, 50), -1e300)),
        ),
        *(
            AttentionCase(f"bias-{layout}", _PLAIN, bias=added((3, 70, 93), layout=layout))
            for layout in ("unaligned", "last_strided", "transposed")
        ),
        AttentionCase("bias-of-rows", _PLAIN, bias=added((70, 1)), mask=visible((2, 1, 70, 93))),
        AttentionCase("bias-float", _PLAIN, bias=added((3, 1, 93), dtype=FP32)),
        AttentionCase("negative-scale", _PLAIN, options={"scale": -0.3, **_CAUSAL}),
        AttentionCase("negative-scale-chunks", (1, 2, 2, 33, 40, 300, 64),
                      options={"scale": -0.1}),
        AttentionCase("negative-scale-bias", _PLAIN, options={"scale": -0.3},
                      bias=added((70, 93))),
        AttentionCase("zero-scale", _PLAIN, options={"scale": 0.0, **_CAUSAL}),
        AttentionCase("large-scores", _PLAIN, options=_CAUSAL, input_scale=8.0),
        AttentionCase("single", (1, 1, 1, 1, 1, 64, 64)),
        AttentionCase("one-key", (1, 2, 2, 65, 1, 16, 16)),
        AttentionCase("one-query", (2, 4, 1, 1, 129, 64, 64)),
        AttentionCase("no-width", (1, 2, 2, 33, 40, 0, 16)),
        AttentionCase("narrow", (1, 2, 2, 33, 65, 1, 3), FP32),
        AttentionCase("wider-values", (1, 4, 2, 65, 33, 40, 72)),
        AttentionCase("fewer-values", (1, 2, 2, 33, 65, 64, 16), FP32),
        AttentionCase("latent", (1, 4, 2, 130, 171, 192, 128), BF16, options=_CAUSAL),
        AttentionCase(
            "latent-mask-nan", (1, 2, 2, 130, 176, 136, 40), hide=slice(33, 61),
            mask=visible((1, 130, 176)),
        ),
        AttentionCase(
            "widest-values", (2, 2, 1, 65, 90, 8, 256), layouts=("gapped", "transposed", "gapped"),
            mask=lengths(90, 41, then=everything), options={"scale": 0.2},
        ),
        AttentionCase("fewest-values", (1, 2, 1, 65, 90, 256, 8), bias=added((1, 65, 90))),
        AttentionCase("wide-float", (1, 1, 1, 20, 35, 300, 520 // 2), FP32, options=_CAUSAL),
        AttentionCase(
            "everything", (2, 4, 2, 100, 130, 72, 40),
            layouts=("transposed", "gapped", "transposed"),
            mask=lambda case, device: lengths(111, 40, then=everything)(case, device)
            & visible((2, 1, 100, 130))(case, device),
            bias=added((4, 100, 130)), options={"scale": 0.2},
        ),
    ]  # fmt: skip


def _laid_out() -> list[AttentionCase]:
    return [
        *(
            AttentionCase(f"{layout}", (2, 4, 2, 65, 90, 64, 64), layouts=(layout,) * 3)
            for layout in _LAYOUTS
        ),
        AttentionCase(
            "mixed", (2, 4, 2, 65, 90, 64, 64), FP32, layouts=("transposed", "expanded", "gapped")
        ),
        AttentionCase(
            "same-columns",
            (1, 2, 2, 33, 40, 32, 32),
            layouts=(same_columns, "contiguous", same_columns),
        ),
    ]


GROUPS: Mapping[str, tuple[AttentionCase, ...]] = {
    "reported": tuple(_reported()),
    "shown": tuple(_shown()),
    "scored": tuple(_scored()),
    "laid-out": tuple(_laid_out()),
}
"""The cases by what they are about; every one is small enough for the emulator."""
