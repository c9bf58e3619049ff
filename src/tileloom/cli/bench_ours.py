"""Our own attention as a contender of `tileloom bench attention`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tileloom.errors import OptionError, TileloomError

if TYPE_CHECKING:
    import torch

    from tileloom.bench import Contender
    from tileloom.bench.case import AttentionCase
    from tileloom.ops._op import Choice
    from tileloom.ops.attention.config import AttentionConfig

OURS = "tileloom"
DROPOUT_SEED = 20261128
"""Of PyTorch's generator, before each result with dropout that is judged."""


def kept_by_dropout(
    case: AttentionCase, head: int, rows: slice, device: torch.device
) -> torch.Tensor:
    """Give the scores that dropout keeps after `DROPOUT_SEED`: `bench.scores.Kept`.

    Args:
        case: The problem.
        head: Of B * Hq.
        rows: Which rows.
        device: Where to compute.
    """
    from tileloom.testing import dropout_mask

    size = (1, 1, rows.stop - rows.start, case.len_k)
    offset = (head * case.len_q + rows.start) * case.len_k
    whole = dropout_mask(case.dropout_p, seed=DROPOUT_SEED, offset=offset, size=size, device=device)
    return whole[0, 0]


def _shown(case: AttentionCase) -> Any:
    """The case's mask, None without."""
    from tileloom.ops.attention.masks import causal, window

    if not case.is_causal:
        return None
    return window(case.window, 0) if case.window else causal()


def _choice(
    case: AttentionCase,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    config: AttentionConfig | None,
) -> Choice:
    """Ask the operator's dispatch what it takes for a case."""
    from tileloom.ops.attention.config import choose
    from tileloom.ops.attention.config_backward import choose_backward
    from tileloom.ops.attention.masks import Band
    from tileloom.ops.attention.problem import AttentionProblem, Layout
    from tileloom.target import target_of

    shown = _shown(case)
    problem = AttentionProblem(
        *(case.batch, case.heads_q, case.heads_kv, case.len_q, case.len_k),
        *(case.head_dim, case.head_dim),
        dtype=case.dtype,
        scale=case.head_dim**-0.5,
        q=Layout.of(q),
        k=Layout.of(k),
        v=Layout.of(v),
        band=Band() if shown is None else shown.band,
        has_bias=bool(case.bias),
        bias_dtype=case.dtype if case.bias else None,
        dropout_p=case.dropout_p,
    )
    if case.direction == "backward":
        return choose_backward(problem, target_of(q))
    return choose(problem, target_of(q), config)


def ours(name: str, config: AttentionConfig | None) -> Contender:
    """Make a contender of `tileloom.attention`.

    Args:
        name: The column's name.
        config: An explicit config, or None for what the dispatch chooses.

    Returns:
        The contender. It refuses a case that only the reference would take: that is no kernel.
    """
    from tileloom.bench import Contender, Inputs
    from tileloom.ops.attention.api import attention

    def decided(case: AttentionCase, inputs: Inputs) -> Choice:
        return _choice(case, inputs.q, inputs.k, inputs.v, config)

    def refuse(case: AttentionCase, inputs: Inputs) -> str | None:
        try:
            choice = decided(case, inputs)
        except TileloomError as error:
            return str(error)
        if choice.backend != "reference":
            return None
        why = [f"{backend}: {'; '.join(texts)}" for backend, texts in choice.refused.items()]
        return " | ".join(["only the reference takes it, which is no kernel", *why])

    def describe(case: AttentionCase, inputs: Inputs) -> dict[str, Any]:
        choice = decided(case, inputs)
        return {
            "backend": choice.backend,
            "config": choice.config.encode(),
            "source": choice.source,
            "refused": {name: list(why) for name, why in choice.refused.items()},
        }

    def prepare(case: AttentionCase, inputs: Inputs) -> Any:
        q, k, v = inputs.q, inputs.k, inputs.v
        options: dict[str, Any] = {"is_causal": case.is_causal, "config": config}
        if case.window:
            options |= {"is_causal": False, "mask": _shown(case)}
        if inputs.bias is not None:
            options["bias"] = inputs.bias
        if case.dropout_p:
            options["dropout_p"] = case.dropout_p
        return lambda: attention(q, k, v, **options)

    return Contender(name, "ours", prepare, refuse=refuse, describe=describe)


def read_config(text: str) -> tuple[AttentionConfig, str]:
    """Read one `--config`.

    Args:
        text: `config.encode()` of a config, after `CASES@` if it is for some cases only.

    Returns:
        The config, and the pattern of case names (``"*"`` without `CASES@`).

    Raises:
        OptionError: If no config is written so.
    """
    from tileloom.ops.attention.config import GluonSm90Config, TritonConfig, decode

    cases, at, rest = text.rpartition("@")
    try:
        config = decode(rest)
    except (ValueError, IndexError, TypeError):
        config = None
    # Fields left out at the end have their defaults; all others must come back as they are.
    if config is None or not f"{config.encode()},".startswith(f"{rest},"):
        raise OptionError(
            f"bench: --config {text!r} is no config; it must be a text of config.encode(), after "
            f"CASES@ if it is for some cases only. Try: --config {GluonSm90Config().encode()} or "
            f"--config 'd64-*@{TritonConfig().encode()}'."
        )
    return config, cases if at else "*"
