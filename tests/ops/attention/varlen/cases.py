"""Packed calls that all tests share, and how they are judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from tests.ops.attention.cases import BF16, FP16, FP32

import tileloom
from tileloom import masks
from tileloom.bench.gradients import joined
from tileloom.ops.attention import attention_varlen_reference
from tileloom.ops.attention.masks import Mask
from tileloom.ops.attention.philox import draw
from tileloom.ops.attention.varlen.backward import attention_varlen_bwd
from tileloom.ops.attention.varlen.reference import attention_varlen_reference_backward
from tileloom.testing import Case, WeakCaseError, assert_accurate

_SEED = 1234
Extra = Callable[["VarlenCase", torch.device], Any]


def _nothing() -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class Inputs:
    """What one call gets."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    offsets: tuple[torch.Tensor, torch.Tensor]
    bounds: tuple[int, int]
    options: Mapping[str, Any]

    def exact(self) -> dict[str, Any]:
        """The reference's options, with the random numbers that `call` draws."""
        own = dict(self.options)
        if own.get("dropout_p"):
            torch.manual_seed(_SEED)
            device = self.tensors[0].device
            own["philox"] = draw(self.tensors[0], 0) if device.type == "cpu" else (_SEED, 0)
        return own

    def arguments(self) -> tuple[Any, ...]:
        """The positional arguments."""
        return (*self.tensors, *self.offsets, *self.bounds)


@dataclass(frozen=True)
class VarlenCase:
    """One call: lengths of queries and keys, sizes `(Hq, Hkv, D, Dv)`, and what is special."""

    name: str
    lens_q: tuple[int, ...]
    lens_k: tuple[int, ...]
    sizes: tuple[int, int, int, int] = (2, 2, 32, 32)
    dtype: torch.dtype = FP16
    layout: Any = "contiguous"
    mask: Mask | Extra | None = None
    bias: Extra | None = None
    options: Mapping[str, Any] = field(default_factory=_nothing)
    input_scale: float = 1.0
    spare: int = 0
    """By how much max_q and max_k are above the longest sequence."""
    hide: slice | None = None
    """Keys that mask or bias hides from every row; those of the first sequence hold NaN."""

    @property
    def case(self) -> Case:
        names = ("Hq", "Hkv", "D", "Dv")
        sizes = dict(zip(names, self.sizes)) | {"Tq": sum(self.lens_q), "Tk": sum(self.lens_k)}
        return Case(self.name, sizes, self.dtype, input_scale=self.input_scale)

    @property
    def id(self) -> str:
        return self.case.id

    @property
    def bounds(self) -> tuple[int, int]:
        """max_q and max_k."""
        most = (max(lens, default=0) + self.spare for lens in (self.lens_q, self.lens_k))
        a, b = most
        return a, b

    @property
    def full(self) -> tuple[int, int, int, int]:
        """Shape of the padded batch's scores."""
        return (len(self.lens_q), self.sizes[0], *self.bounds)

    def inputs(self, device: torch.device | str = "cpu") -> Inputs:
        device = torch.device(device)
        dims = (("q", "Tq Hq D"), ("k", "Tk Hkv D"), ("v", "Tk Hkv Dv"))
        q, k, v = (
            self.case.tensor(name, text, layout=self.layout, device=device) for name, text in dims
        )
        if self.hide is not None:
            for tensor in (k, v):
                tensor[: self.lens_k[0]][self.hide] = float("nan")
        options = dict(self.options)
        if self.mask is not None:
            is_value = isinstance(self.mask, Mask)
            options["mask"] = self.mask if is_value else self.mask(self, device)
        if self.bias is not None:
            options["bias"] = self.bias(self, device)
        return Inputs((q, k, v), self.offsets(device), self.bounds, options)

    def poisoned(self, device: torch.device | str = "cpu") -> Inputs:
        """The inputs with NaN in keys that no row of their sequence sees, as where it has none."""
        inputs = self.inputs(device)
        mask = inputs.options.get("mask")
        shown = masks.dense(mask) if isinstance(mask, torch.Tensor) else mask or Mask(masks.Band())
        heads_q, heads_kv = self.sizes[:2]
        whole = None if shown.visible is None else shown.visible.expand(self.full)
        ends = (0, *accumulate(self.lens_k))
        for s, (rows, keys) in enumerate(zip(self.lens_q, self.lens_k)):
            lengths = None if shown.lengths is None else shown.lengths[s : s + 1]
            corner = None if whole is None else whole[s : s + 1, :, :rows, :keys]
            seen = Mask(shown.band, lengths, corner).materialize(1, rows, keys)
            seen = seen.expand(1, heads_q, rows, keys)[0].any(1)
            seen = seen.unflatten(0, (heads_kv, heads_q // heads_kv)).any(1).to(device)
            for tensor in inputs.tensors[1:]:
                tensor[ends[s] : ends[s + 1]].transpose(0, 1)[~seen] = float("nan")
        return inputs

    def offsets(self, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        """Where sequences begin and end."""
        a, b = (
            torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device)
            for lens in (self.lens_q, self.lens_k)
        )
        return a, b


def call(inputs: Inputs, **configs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE, as a user gets them."""
    torch.manual_seed(_SEED)
    out, lse = tileloom.attention_varlen(
        *inputs.arguments(), **inputs.options, return_lse=True, **configs
    )
    return out, lse


def check(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Judge O and LSE by the accuracy rule, hidden rows exactly, shapes and dtypes too."""
    q = inputs.tensors[0]
    arguments, options = inputs.arguments(), {**inputs.exact(), "return_lse": True}
    reference, reference_lse = attention_varlen_reference(
        *arguments, **options, compute_dtype=torch.float64
    )
    baseline, baseline_lse = attention_varlen_reference(
        *arguments, **options, compute_dtype=q.dtype
    )
    assert out.dtype == q.dtype
    assert out.shape == reference.shape
    assert lse.shape == reference_lse.shape
    blind = reference_lse == float("-inf")
    assert torch.equal(lse == float("-inf"), blind)
    assert not bool(out[blind.T].any())
    if bool(blind.all()) or reference.numel() == 0:
        return
    assert_accurate(joined(out), joined(reference), joined(baseline), name="out")
    assert_accurate(lse, reference_lse, baseline_lse, name="lse")


def upstream(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Random gradients of O and LSE, the same on every machine."""
    q, _, v = inputs.tensors
    generator = torch.Generator().manual_seed(5)
    shape = (*q.shape[:2], v.shape[2])
    dout = torch.randn(shape, generator=generator, dtype=torch.float64).to(q.dtype).to(q.device)
    dlse = torch.randn(shape[1::-1], generator=generator, dtype=torch.float64)
    return dout, dlse.to(torch.float32).to(q.device)


def gradients(inputs: Inputs, **configs: Any) -> list[torch.Tensor]:
    """The gradients that a user gets, by autograd."""
    leaves = [t.detach().requires_grad_() for t in inputs.tensors]
    options = dict(inputs.options)
    if options.get("bias") is not None:
        options["bias"] = options["bias"].detach().requires_grad_()
        leaves.append(options["bias"])
    torch.manual_seed(_SEED)
    out, lse = tileloom.attention_varlen(
        *leaves[:3], *inputs.offsets, *inputs.bounds, **options, return_lse=True, **configs
    )
    dout, dlse = upstream(inputs)
    return list(torch.autograd.grad([out, lse], leaves, [dout, dlse.to(lse.dtype)]))


def gradients_by(inputs: Inputs, config: str) -> list[torch.Tensor]:
    """The gradients by the backward's operator alone, after the reference's forward."""
    q, k, v = inputs.tensors
    own = inputs.exact()
    out, lse = attention_varlen_reference(*inputs.arguments(), **own, return_lse=True)
    mask, bias, scale = (own.get(name) for name in ("mask", "bias", "scale"))
    shown = masks.dense(mask) if isinstance(mask, torch.Tensor) else mask or Mask(masks.Band())
    band = shown.band
    dout, dlse = upstream(inputs)
    results = attention_varlen_bwd(
        dout, dlse, q, k, v, out, lse.to(torch.float32), *inputs.offsets, *inputs.bounds,
        shown.visible, bias, shown.lengths, band.left_top, band.right_top, band.left_bottom,
        band.right_bottom, q.shape[2] ** -0.5 if scale is None else scale,
        own.get("dropout_p", 0.0), *own.get("philox", (None, None)), True, True, bias is not None,
        config,
    )  # fmt: skip
    return list(results[: 3 if bias is None else 4])


def check_gradients(inputs: Inputs, found: list[torch.Tensor]) -> None:
    """Judge gradients by the accuracy rule, shapes and dtypes too."""
    own = list(inputs.tensors)
    if inputs.options.get("bias") is not None:
        own.append(inputs.options["bias"])
    given, arguments = upstream(inputs), inputs.arguments()
    q = inputs.tensors[0]
    reference, baseline = (
        attention_varlen_reference_backward(
            *given, *arguments, **inputs.exact(), compute_dtype=dtype
        )
        for dtype in (torch.float64, q.dtype)
    )
    for name, mine, gradient, r, b in zip(
        ("dq", "dk", "dv", "dbias"), own, found, reference, baseline
    ):
        assert r is not None
        assert b is not None
        assert gradient.shape == mine.shape, name
        assert gradient.dtype == mine.dtype, name
        if not r.numel():
            continue
        try:
            assert_accurate(joined(gradient), joined(r), joined(b.to(mine.dtype)), name=name)
        except WeakCaseError:
            # Rounding is all there is, as in dQ of rows that see one key.
            size = max(float(t.abs().max()) for t in (*given, *reference[:3]) if t.numel())
            limit = 4 * float((b.double() - r).abs().max())
            limit += float(torch.finfo(q.dtype).eps) * size
            assert float((gradient.double() - r).abs().max()) <= limit, name


def key_lengths(*values: int, then: Mask | None = None) -> Extra:
    """Key lengths of each sequence, combined with `then`."""

    def make(case: VarlenCase, device: torch.device) -> Mask:
        own = masks.key_lengths(torch.tensor(values, dtype=torch.int32, device=device))
        return own if then is None else own & then

    return make


def visible(*dims: str) -> Extra:
    """A random bool mask over the named dimensions of S, H, Q and K, of size 1 in the others."""

    def make(case: VarlenCase, device: torch.device) -> torch.Tensor:
        shown = _drawn(case, dims, 7) > -0.3
        if case.hide is not None:
            shown[..., case.hide] = False
        return shown.to(device)

    return make


def added(*dims: str, dtype: torch.dtype | None = None) -> Extra:
    """A random bias over the named dimensions of S, H, Q and K, of size 1 in the others."""

    def make(case: VarlenCase, device: torch.device) -> torch.Tensor:
        bias = _drawn(case, dims, 11)
        if case.hide is not None:
            bias[..., case.hide] = float("-inf")
        return bias.to(dtype or case.dtype).to(device)

    return make


def _drawn(case: VarlenCase, dims: tuple[str, ...], seed: int) -> torch.Tensor:
    shape = [n if name in dims else 1 for name, n in zip("SHQK", case.full)]
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


_UNEVEN = ((70, 0, 3, 40), (93, 5, 0, 17))
_BANDS: Mapping[str, Mask] = {
    "causal": masks.causal(),
    "bottom-right": masks.causal("bottom_right"),
    "window": masks.window(10, 20),
    "window-bottom-right": masks.window(20, 3, anchor="bottom_right"),
    "left-only": masks.window(17, None),
    "both-anchors": masks.window(30, None) & masks.window(None, 5, anchor="bottom_right"),
    "contradiction": masks.window(5, 0) & masks.window(0, 5, anchor="bottom_right"),
}
REPORTED = [
    VarlenCase(
        "A5-M1-more-rows-than-keys", (76, 34, 146), (1, 1, 1), (1, 1, 32, 32),
        mask=masks.causal("bottom_right"), input_scale=3.0,
    ),
    VarlenCase(
        "A14-empty-entries", (0, 1, 0, 1), (0, 3, 0, 5), (9, 3, 64, 64), mask=masks.causal()
    ),
    VarlenCase("A16-no-keys", (5, 2), (0, 0)),
    VarlenCase("A16-no-rows", (0, 0), (5, 2)),
    VarlenCase("A16-no-sequence", (), ()),
]  # fmt: skip
"""What users hit in other kernels."""
PLAIN = [
    VarlenCase("uneven", *_UNEVEN),
    VarlenCase("one", (77,), (90,), spare=30),
    VarlenCase("grouped", *_UNEVEN, sizes=(6, 2, 64, 64), dtype=BF16),
    VarlenCase("values-wider", *_UNEVEN, sizes=(2, 1, 32, 64), options={"scale": 0.3}),
    VarlenCase("head-dim-72", (40, 33), (40, 33), (2, 1, 72, 72), mask=masks.causal()),
    VarlenCase("fp32", *_UNEVEN, sizes=(4, 2, 32, 32), dtype=FP32, mask=masks.causal()),
    VarlenCase("negative-scale", *_UNEVEN, options={"scale": -0.2}),
    *(
        VarlenCase(f"layout-{name}", *_UNEVEN, sizes=(2, 2, 32, 32), layout=name)
        for name in ("gapped", "unaligned", "last_strided")
    ),
]
SHOWN = [
    *(VarlenCase(name, (70, 33, 0), (45, 90, 4), mask=mask) for name, mask in _BANDS.items()),
    VarlenCase(
        "row-0-sees-one-key", (70, 1, 0), (45, 112, 90),
        mask=masks.window(0, 0, anchor="bottom_right"),
    ),
    VarlenCase("lengths", *_UNEVEN, mask=key_lengths(50, 9, 3, 0)),
    VarlenCase(
        "lengths-bottom-right", *_UNEVEN,
        mask=key_lengths(50, 2, 3, 17, then=masks.causal("bottom_right")),
    ),
    VarlenCase("mask", *_UNEVEN, mask=visible("S", "Q", "K"), spare=3),
    VarlenCase("mask-of-keys", *_UNEVEN, mask=visible("H", "K")),
    VarlenCase(
        "mask-nan", (150, 0, 3, 140), (170, 5, 0, 31), (2, 1, 64, 64), mask=visible("S", "Q", "K"),
        hide=slice(33, 61),
    ),
]  # fmt: skip
BIASED = [
    VarlenCase("bias-whole", *_UNEVEN, bias=added("S", "H", "Q", "K"), spare=5),
    VarlenCase("bias-shared", *_UNEVEN, bias=added("H", "Q", "K", dtype=FP32)),
    VarlenCase(
        "bias-of-keys", *_UNEVEN, sizes=(4, 2, 32, 32), bias=added("S", "K"),
        mask=masks.causal("bottom_right"),
    ),
    VarlenCase("bias-of-rows", *_UNEVEN, bias=added("H", "Q")),
    VarlenCase(
        "bias-mask-nan", *_UNEVEN, (2, 1, 72, 40), BF16, mask=visible("H", "K"),
        bias=added("H", "Q", "K"), hide=slice(20, 50),
    ),
]  # fmt: skip
DROPPED = [
    VarlenCase("M3-dropout", *_UNEVEN, options={"dropout_p": 0.3}),
    VarlenCase(
        "M3-dropout-causal", *_UNEVEN, sizes=(4, 2, 64, 64), options={"dropout_p": 0.1}, spare=3,
        mask=masks.causal("bottom_right"),
    ),
    VarlenCase("dropout-bias", *_UNEVEN, options={"dropout_p": 0.3}, bias=added("H", "Q", "K")),
]  # fmt: skip
GROUPS: Mapping[str, list[VarlenCase]] = {
    "reported": REPORTED, "plain": PLAIN, "shown": SHOWN, "biased": BIASED,
    "dropped": DROPPED,
}  # fmt: skip
