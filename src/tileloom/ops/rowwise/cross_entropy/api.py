"""The public function `cross_entropy`: checks its arguments, then calls its operator."""

from __future__ import annotations

from typing import Any

import torch

from tileloom import knobs
from tileloom.errors import OptionError, shown_value, unknown_option
from tileloom.launch.layout import elements_share_memory
from tileloom.ops._op import is_eager
from tileloom.ops._plans import plan_key
from tileloom.ops.rowwise.checks import check_config, check_no_tangent
from tileloom.ops.rowwise.config import CONFIGS, RowConfig, announce
from tileloom.ops.rowwise.cross_entropy.autograd import cross_entropy_fwd
from tileloom.ops.rowwise.cross_entropy.checks import check_options, check_tensors
from tileloom.ops.rowwise.cross_entropy.plans import forward_plan, forward_plans
from tileloom.ops.rowwise.cross_entropy.problem import Options, Reduction

_OPTIONS = (
    *("label_smoothing", "ignore_index", "soft_cap", "reduction", "inplace_backward", "config"),
)
_ELSEWHERE = {  # what other libraries call it
    "weight": "reduction='none' and a product with weight[labels]: there are no class weights",
    "softcap": "soft_cap=",
    "logit_softcapping": "soft_cap=",
    "smoothing": "label_smoothing=",
    "ignored_index": "ignore_index=",
    "inplace": "inplace_backward=",
    "size_average": "reduction=",
    "reduce": "reduction=",
    "lse_square_scale": "adding it to the loss: there is no z-loss",
}


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    soft_cap: float | None = None,
    reduction: Reduction = "mean",
    inplace_backward: bool = False,
    config: RowConfig | None = None,
    **unknown: object,
) -> torch.Tensor:
    """Compute the cross entropy of logits over the last dimension and their labels.

    Math: `loss = log(sum_j exp(z_j)) - (1 - s) z_label - s mean_j z_j` for each row z of the logits
    and smoothing s, in float32; with a soft cap c first `z = c tanh(logits / c)`.
    Equivalent: `torch.nn.functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())`
    with the same options.

    Args:
        logits: `[..., V]`, float16, bfloat16 or float32 (float64 by the reference), any leading
            shape and strides.
        labels: `[...]`, int32 or int64, any strides: the right class of each row, in 0 .. V - 1, or
            `ignore_index`.
        label_smoothing: Share of the target that is spread over all V classes, 0 to 1.
        ignore_index: Rows with this label give loss 0 and gradient 0 and do not count in the mean;
            their logits are not used.
        soft_cap: A bound of the logits, above 0, as Gemma 2 has it; None for none.
        reduction: ``"mean"`` over the rows that count, ``"sum"``, or ``"none"``.
        inplace_backward: Whether the backward writes the gradient over the logits, which saves a
            tensor of their size. The logits are lost then: who else needs them for a gradient, and
            a second backward, get an error. A leaf that requires grad, and a view of one, is
            refused: its values are what is trained.
        config: Forces a backend: a `ReferenceConfig` or `TritonConfig` of
            `tileloom.ops.rowwise.config`. Default: the kernels where they take the problem.
        unknown: Any other keyword is refused with the nearest option.

    Returns:
        A scalar, or `[...]` for ``"none"``; float32 whatever the logits (float64 for float64): a
        loss rounded to bfloat16 has two digits. The mean over no row is NaN, as in torch (its
        gradient is 0). A row whose label is out of range gives NaN, and so does its gradient;
        nothing is read out of bounds. The setting `debug.labels` makes it an error.

    Raises:
        ShapeError: If logits have no dimension, or labels not their leading shape.
        DtypeError: If a dtype is not supported.
        DeviceError: If the tensors lie on different devices.
        OptionError: If an option is out of range; if `inplace_backward` is asked for logits whose
            elements share memory or that are a leaf; with `debug.labels` if a label is wrong.
        UnknownOptionError: If there is no such option.
        ConfigError: If `config` cannot run the problem; it lists the reasons.
        GradientError: If a gradient of the gradient, or a forward-mode derivative, is asked for; in
            the backward, if the logits have been changed in the meantime.

    Memory: two float32 a row are kept beside the logits; the gradient is one tensor of the logits'
        size, or none with `inplace_backward`. Nothing else of that size is made.
    Determinism: bitwise repeatable; no atomics.
    Gradients: of the logits; not twice.
    Autocast: leaves it alone: logits of any dtype are computed with in float32.
    Hardware: portable kernels from sm_80 on; the CPU by the reference. A mean or sum costs no
        synchronisation.
    Source: online softmax (arXiv 1805.02867); gradient in place as in Liger (arXiv 2410.10989).

    Example:
        >>> cross_entropy(torch.zeros(3, 8), torch.tensor([1, 7, -100]))
        tensor(2.0794)
    """
    if unknown:
        raise unknown_option("cross_entropy", next(iter(unknown)), _OPTIONS, _ELSEWHERE)
    text: Any = "" if config is None else config.encode() if isinstance(config, CONFIGS) else None
    options = (label_smoothing, ignore_index, soft_cap, reduction)
    plan = key = None
    if isinstance(logits, torch.Tensor) and is_eager((logits, labels)):  # pyright: ignore[reportUnnecessaryIsInstance]
        key = plan_key((logits, labels), *options, text)
        plan = forward_plans.get(key)
    if plan is None:
        _check(logits, labels, config)
        check_options(*options)
    if inplace_backward is not False:
        _check_inplace(logits, inplace_backward)
    if knobs.get("debug.labels"):
        _check_labels(logits, labels, ignore_index)
    if key is None or (logits.requires_grad and torch.is_grad_enabled()):
        numbers = (label_smoothing, ignore_index, soft_cap or 0.0, reduction)
        return cross_entropy_fwd(logits, labels, *numbers, inplace_backward, text)[0]
    if plan is None:
        plan = forward_plan(logits, labels, Options.of(*options), text)
        announce(plan.choice, plan.choice.problem)
        forward_plans.put(key, plan)
    return plan.run(logits, labels)[0]


def _check(logits: torch.Tensor, labels: object, config: RowConfig | None) -> None:
    check_tensors(logits, labels)
    check_config("cross_entropy", config)
    check_no_tangent("cross_entropy", logits)


def _check_inplace(logits: torch.Tensor, inplace_backward: object) -> None:
    if not isinstance(inplace_backward, bool):
        raise OptionError(
            f"cross_entropy: inplace_backward is {shown_value(inplace_backward)}; it must be True "
            "or False."
        )
    if inplace_backward and elements_share_memory(logits):
        raise OptionError(
            f"cross_entropy: inplace_backward=True, and logits of shape {tuple(logits.shape)} have "
            f"strides {logits.stride()}: elements share memory, so that no gradient can be written "
            "over them. Try: inplace_backward=False."
        )
    if inplace_backward and _is_trained(logits):
        raise OptionError(
            f"cross_entropy: inplace_backward=True, and logits of shape {tuple(logits.shape)} are "
            "a leaf that requires grad, or a view of one: the gradient would be written over its "
            "values. Try: inplace_backward=False, or logits that are the output of a layer."
        )


def _is_trained(logits: torch.Tensor) -> bool:
    """Whether a gradient is asked for of a leaf's memory, as for a Parameter and its views."""
    if not (logits.requires_grad and torch.is_grad_enabled()):
        return False
    base = None if torch.compiler.is_compiling() else logits._base  # `_is_given` looks then
    return logits.is_leaf or (base is not None and base.requires_grad and base.is_leaf)


def _check_labels(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> None:
    """Read the labels back, which waits for the GPU; nothing while a compiler traces."""
    if torch.compiler.is_compiling():
        return
    size = logits.shape[-1]
    bad = ((labels < 0) | (labels >= size)) & (labels.to(torch.int64) != ignore_index)
    if not bool(bad.any()):
        return
    place = tuple(int(i) for i in bad.nonzero()[0])
    at = ", ".join(map(str, place))
    raise OptionError(
        f"cross_entropy: labels[{at}] is {int(labels[place])}; a label must be in 0 .. {size - 1} "
        f"or ignore_index={ignore_index} ({int(bad.sum())} of {labels.numel()} labels are not). "
        "Try: compare the tokenizer's vocabulary with the logits' last dimension."
    )
