"""Decorators for kernels of one's own: name the arguments that are sizes, and launch by arguments.

    @tileloom.tuning.reduction(sizes=dict(x="rows", r="cols"), hint="inner")
    @triton.jit
    def rms_norm_kernel(x, w, y, rows, cols, XBLOCK: tl.constexpr, R0_BLOCK: tl.constexpr): ...

    rms_norm_kernel(x, w, y, rows, cols)

The blocks, the warps and the grid follow from the sizes. On a GPU the first launch of each kind
measures the candidates (or finds the winner in the store); kinds differ by types, alignments and
sizes rounded up to powers of two. Where nothing can be measured, in the emulator for example, the
first candidate runs. Without `sizes=`, the same names are the decorators of generated code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tileloom.errors import OptionError, shown_value
from tileloom.tuning import generated
from tileloom.tuning.config import Config
from tileloom.tuning.hints import Facts, ReductionHint, TileHint, is_reduced
from tileloom.tuning.tuned_kernel import TunedKernel

_DIMS = {"x": "x", "y": "y", "z": "z", "r": "r0_", "r0": "r0_", "r1": "r1_"}


def _decorator(kind: str) -> Callable[..., Any]:
    def decorate(
        *given: Any,
        sizes: Mapping[str, str] | None = None,
        hint: str | None = None,
        configs: Sequence[Any] | None = None,
        changed: Sequence[str] = (),
        zeroed: Sequence[str] = (),
        max_autotune: bool = False,
        loads: int = 0,
        refine: bool = False,
        **of_generated_code: Any,
    ) -> Any:
        if sizes is None:
            return _generated(kind, given, of_generated_code)
        if given or of_generated_code:
            odd = ", ".join(of_generated_code) or f"{len(given)} arguments by position"
            raise OptionError(
                f"tuning: {kind} is given sizes and {odd}; sizes is for kernels of your own, the "
                "other is what generated code gives. Try: sizes, hint, configs, changed, zeroed, "
                "max_autotune, loads, refine."
            )
        by_dim = _by_dim(kind, sizes)
        listed = None if configs is None else _own_list(kind, configs)
        _check_options(kind, changed, zeroed, max_autotune, loads, refine)
        facts = Facts(
            max_autotune=max_autotune,
            num_load=loads,
            num_reduction=int(kind != "pointwise"),
            **_hint(kind, hint),
        )

        def wrap(fn: Any) -> TunedKernel:
            names = getattr(fn, "arg_names", ())
            own = replace(facts, no_x_dim=kind != "pointwise" and "XBLOCK" not in names)
            return TunedKernel(fn, kind, by_dim, own, listed, changed, zeroed, refine)

        return wrap

    decorate.__name__ = decorate.__qualname__ = kind
    decorate.__doc__ = _DOC.format(_KINDS[kind])
    return decorate


def _generated(kind: str, given: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """The decorator of generated code, if it is what was meant."""
    decorator = getattr(generated, kind)
    try:
        inspect.signature(decorator).bind(*given, **named)
    except TypeError as why:
        raise OptionError(
            f"tuning: {kind} is given no sizes, and as a decorator of generated code there is "
            f"{why}. Try: @tileloom.tuning.{kind}(sizes={_EXAMPLES[kind]}), with the names of the "
            "arguments that are the sizes."
        ) from None
    if given and not isinstance(given[0], Mapping):
        raise OptionError(
            f"tuning: {kind} is given no sizes, but {shown_value(given[0])}. Try: "
            f"@tileloom.tuning.{kind}(sizes={_EXAMPLES[kind]}), with the names of the arguments "
            "that are the sizes."
        )
    return decorator(*given, **named)


def _by_dim(kind: str, sizes: Any) -> dict[str, str]:
    """The argument that is the size of each dimension, by the dimension's name in size hints."""
    if not isinstance(sizes, Mapping) or not all(isinstance(n, str) for n in sizes.values()):
        raise OptionError(
            f"tuning: sizes of {kind} is {shown_value(sizes)}; it must be a dictionary from "
            f"dimensions to the names of arguments. Try: sizes={_EXAMPLES[kind]}."
        )
    for dim in sizes:
        if dim not in _DIMS:
            raise OptionError(
                f"tuning: sizes of {kind} names a dimension {shown_value(dim)}; dimensions are x, "
                "y and z, and r or r0, r1 for those that are reduced. Try: "
                "sizes=dict(x='rows', r='cols')."
            )
    reduced = [dim for dim in sizes if is_reduced(_DIMS[dim])]
    if kind == "pointwise" and reduced:
        raise OptionError(
            f"tuning: sizes of pointwise has {reduced[0]!r}, but such a kernel reduces nothing. "
            f"Try: sizes={_EXAMPLES[kind]}, or the decorator tileloom.tuning.reduction."
        )
    if kind != "pointwise" and not reduced:
        raise OptionError(
            f"tuning: sizes of {kind} has {', '.join(sizes) or 'nothing'}; it must name the size "
            f"of r, which is reduced. Try: sizes={_EXAMPLES[kind]}."
        )
    return {_DIMS[dim]: name for dim, name in sizes.items()}


def _check_options(
    kind: str, changed: Any, zeroed: Any, max_autotune: Any, loads: Any, refine: Any
) -> None:
    for what, value in (("changed", changed), ("zeroed", zeroed)):
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise OptionError(
                f"tuning: {what} of {kind} is {shown_value(value)}; it must be a list of names of "
                f"arguments. Try: {what}=['x']."
            )
    for what, value in (("max_autotune", max_autotune), ("refine", refine)):
        if not isinstance(value, bool):
            raise OptionError(
                f"tuning: {what} of {kind} is {shown_value(value)}; it must be True or False. Try: "
                f"{what}=True."
            )
    if type(loads) is not int or loads < 0:
        raise OptionError(
            f"tuning: loads of {kind} is {shown_value(loads)}; it must be a number of loads, an "
            "integer of at least 0. Try: loads=2."
        )


def _own_list(kind: str, configs: Any) -> list[Config]:
    if isinstance(configs, (str, Mapping)) or not isinstance(configs, Sequence):
        raise OptionError(
            f"tuning: configs of {kind} is {shown_value(configs)}; it must be a list of configs. "
            "Try: configs=[tileloom.tuning.Config({'XBLOCK': 128})], or leave configs out."
        )
    if not configs:
        raise OptionError(
            f"tuning: the list of configs of {kind} is empty; it needs at least one. Try: "
            "configs=[tileloom.tuning.Config({'XBLOCK': 128})], or leave configs out."
        )
    return [Config.of(config) for config in configs]


def _hint(kind: str, hint: str | None) -> dict[str, Any]:
    known = {"square": TileHint.SQUARE} if kind == "pointwise" else {
        "inner": ReductionHint.INNER, "outer": ReductionHint.OUTER,
        "outer_tiny": ReductionHint.OUTER_TINY,
    }  # fmt: skip
    if hint is None:
        return {}
    if not isinstance(hint, str) or hint not in known:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionError(
            f"tuning: hint of {kind} is {shown_value(hint)}; it must be None or one of "
            f"{', '.join(map(repr, known))}. Try: hint={next(iter(known))!r}."
        )
    return {"tile_hint" if kind == "pointwise" else "reduction_hint": known[hint]}


_KINDS = {
    "pointwise": "computes each element by itself",
    "reduction": "reduces rows and loops over each in blocks of R0_BLOCK",
    "persistent_reduction": "reduces rows and holds each whole, R0_BLOCK being the row's size",
    "cooperative_reduction": "reduces rows, each shared by RSPLIT programs that meet on the way",
    "split_scan": "scans rows, each shared by several programs in blocks of R0_BLOCK",
}
_EXAMPLES = {kind: "dict(x='rows', r='cols')" for kind in _KINDS} | {"pointwise": "dict(x='n')"}
_DOC = """Tune a kernel that {}.

    Args:
        given: Arguments of generated code, without `sizes`; see `tileloom.tuning.generated`.
        sizes: The name of the argument that is the size of each dimension: ``x``, ``y``, ``z`` for
            those that programs share out, ``r`` (or ``r0``, ``r1``) for those that are reduced.
        hint: How the elements of a reduction lie: ``"inner"`` side by side, ``"outer"`` far apart,
            ``"outer_tiny"`` far apart and few; ``"square"`` for tiles of a pointwise kernel.
        configs: Candidates of your own, the default first, in place of those of the heuristics.
        changed: Arguments that the kernel reads and writes: measuring gives them their values back.
        zeroed: Arguments that each launch is to find filled with zeros while it is measured.
        max_autotune: Whether to measure all candidates where the hint would choose.
        loads: Loads of the kernel for each element; many of them make blocks smaller.
        refine: Whether coordinate descent goes on from the best candidate.
        of_generated_code: Arguments of generated code by name.

    Returns:
        A decorator that makes a `TunedKernel` of a jitted function.

    Raises:
        OptionError: If an option is not of its kind, a name is no argument, or a config sets other
            names or a block that is no power of two.
"""

pointwise = _decorator("pointwise")
reduction = _decorator("reduction")
persistent_reduction = _decorator("persistent_reduction")
cooperative_reduction = _decorator("cooperative_reduction")
split_scan = _decorator("split_scan")
