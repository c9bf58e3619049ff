"""The contests of the demo: the model's own attention inputs, and its whole forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, Self

import torch

from tileloom.bench.timer import DeviceTimer, Plan, Timer
from tileloom.report.contest import PLAN, Entrant, Replay, attention_contest, run_contest
from tileloom.report.findings import Contest

BATCH = 64
DTYPE = torch.float16

Tokens = dict[str, torch.Tensor]


class Embedder(Protocol):
    """What the contests need of `integrations.hf_embedder.Embedder`, whose words these are."""

    @property
    def device(self) -> torch.device: ...  # noqa: D102
    def cast(self, dtype: torch.dtype, device: torch.device) -> Self: ...  # noqa: D102
    def use(self, implementation: str) -> Self: ...  # noqa: D102
    def tokenize(self, texts: Sequence[str], batch_size: int) -> list[Tokens]: ...  # noqa: D102
    def attention_inputs(  # noqa: D102
        self, tokens: Tokens
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
    def whole_pass(self, tokens: Tokens) -> Callable[[], torch.Tensor]: ...  # noqa: D102


def embedding_contests(
    embedder: Embedder,
    texts: Sequence[str],
    device: torch.device,
    *,
    timer: Timer | None = None,
    plan: Plan = PLAN,
) -> tuple[list[Contest], str]:
    """Time tileloom beside PyTorch's attention on what the model really computes.

    tileloom must be registered with transformers.

    Args:
        embedder: The model in float32; it is copied.
        texts: Texts, of which the longest ones make one padded batch.
        device: Where; a GPU unless a `timer` is given.
        timer: Takes the time; by default the GPU's events.
        plan: Rounds, lengths and pauses.

    Returns:
        The contests that could be held, and why there are no more; empty if all were held.
    """
    on_gpu = timer is None
    timer = timer or DeviceTimer(device)
    held: list[Contest] = []
    half = embedder.cast(DTYPE, device)
    longest = sorted(texts, key=len, reverse=True)[:BATCH]
    tokens = half.tokenize(longest, len(longest))[0]
    try:
        q, k, v = half.use("eager").attention_inputs(tokens)
        batch, heads, length, width = q.shape
        lengths = tokens["attention_mask"].sum(1, dtype=torch.int32).to(device)
        sizes = f"batch {batch}, {heads} heads of {width}, {length} tokens, float16"
        for text, given in ((f"padded, {int(lengths.min())} to {length} each", lengths),
                            ("no padding", None)):  # fmt: skip
            title = f"One attention call ({sizes}, {text})"
            held.append(attention_contest(title, q, k, v, given, timer, plan))
        held.append(_whole_passes(embedder, half, tokens, timer, plan, on_gpu=on_gpu))
    except RuntimeError as error:
        first = str(error).strip().splitlines()[:1]
        return held, f"The contest after these could not be held: {' '.join(first)}"
    return held, ""


def _whole_passes(
    embedder: Embedder, half: Embedder, tokens: Tokens, timer: Timer, plan: Plan, *, on_gpu: bool
) -> Contest:
    exact = embedder.cast(torch.float64, half.device).use("eager")
    truth = exact.whole_pass(tokens)()
    baseline = half.use("eager").whole_pass(tokens)()
    entrants: list[Entrant] = []
    names = {"tileloom": "tileloom", "PyTorch SDPA": "sdpa", "eager": "eager"}
    for name, implementation in names.items():
        # each has a copy of its own: the switch is a state of the model
        call = half.cast(DTYPE, half.device).use(implementation).whole_pass(tokens)
        entrants.append(Entrant(name, Replay(call) if on_gpu else call))
    batch, length = tokens["input_ids"].shape
    how = "as a CUDA graph, " if on_gpu else ""
    title = f"The whole model ({how}{batch} texts, {length} tokens, float16)"
    return run_contest(title, entrants, truth, baseline, timer, plan)
