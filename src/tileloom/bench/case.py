"""What is measured: a problem with its sizes, its inputs, its FLOP and its bytes."""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch

from tileloom.bench.contender import Inputs
from tileloom.errors import OptionError

BIASES = {
    "heads": (False, True, True, True),
    "full": (True, True, True, True),
    "keys": (True, False, False, True),
}
"""Which of the dimensions B, H, Lq and Lk a bias has for itself."""

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class _Named(Protocol):
    @property
    def name(self) -> str: ...


C = TypeVar("C", bound=_Named)


@dataclass(frozen=True)
class AttentionCase:
    """One cell of the attention table.

    Attributes:
        name: The cell's name, such as ``"d128-l4096-causal"``.
        batch: Sequences.
        heads_q: Heads of the queries.
        heads_kv: Heads of the keys and values.
        len_q: Queries of a sequence.
        len_k: Keys of a sequence.
        head_dim: Head dimension of q, k and v.
        is_causal: Whether a query sees only the keys up to its own position.
        dtype_name: ``"bfloat16"``, ``"float16"`` or ``"float32"``.
        direction: ``"forward"`` or ``"backward"``.
        bias: Which bias is added to the scores: ``""`` for none, or a key of `BIASES`.
        bias_gradient: Whether a backward gives the gradient of the bias too.
        dropout_p: Probability that a score is dropped.
        window: With `is_causal`: how many keys to the left of its own position a query sees; 0 for
            all.
    """

    name: str
    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_k: int
    head_dim: int
    is_causal: bool
    dtype_name: str = "bfloat16"
    direction: str = "forward"
    bias: str = ""
    bias_gradient: bool = False
    dropout_p: float = 0.0
    window: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of q, k, v and of the output."""
        return _DTYPES[self.dtype_name]

    @property
    def flops(self) -> float:
        """FLOP of two matrix products, of five for a backward; causal counts half, by custom."""
        products = 4.0 if self.direction == "forward" else 10.0
        return products * self.scores * self.head_dim

    @property
    def scores(self) -> float:
        """Scores that are computed; causal counts half, a window exactly."""
        heads = self.batch * self.heads_q
        if self.window:
            seen = [min(i, self.window) + 1 for i in range(self.len_q)]
            return float(heads * sum(seen))
        return heads * self.len_q * self.len_k * (0.5 if self.is_causal else 1.0)

    @property
    def bias_shape(self) -> tuple[int, int, int, int]:
        """Shape of the bias, if there is one."""
        whole = (self.batch, self.heads_q, self.len_q, self.len_k)
        own = BIASES.get(self.bias, (False,) * 4)
        return (*(n if has else 1 for n, has in zip(whole, own)),)  # pyright: ignore[reportReturnType]

    @property
    def bias_bytes(self) -> int:
        """Bytes of the bias, twice where its gradient is written."""
        if not self.bias:
            return 0
        wanted = self.direction == "backward" and self.bias_gradient
        return math.prod(self.bias_shape) * self.dtype.itemsize * (2 if wanted else 1)

    @property
    def input_bytes(self) -> int:
        """Bytes of q, k and v together."""
        rows = self.heads_q * self.len_q + 2 * self.heads_kv * self.len_k
        return self.batch * rows * self.head_dim * self.dtype.itemsize

    @property
    def bytes_moved(self) -> int:
        """Bytes of q, k, v and o, and of their gradients: the least that a kernel must move."""
        out = self.batch * self.heads_q * self.len_q * self.head_dim * self.dtype.itemsize
        return (self.input_bytes + out) * (
            1 if self.direction == "forward" else 2
        ) + self.bias_bytes

    def inputs(self, device: torch.device, seed: int) -> Inputs:
        """Make one set of inputs.

        Args:
            device: Where they lie.
            seed: Seed of the generator; each set takes its own.

        Returns:
            q, k and v (and dout), contiguous `[B, H, L, D]`, drawn from N(0, 1). Never zeros: the
            power that a kernel draws, and so its clock, depends on the data.
        """
        generator = torch.Generator(device=device).manual_seed(seed)

        def draw(heads: int, length: int) -> torch.Tensor:
            shape = (self.batch, heads, length, self.head_dim)
            return torch.randn(shape, generator=generator, device=device, dtype=self.dtype)

        q = draw(self.heads_q, self.len_q)
        k = draw(self.heads_kv, self.len_k)
        v = draw(self.heads_kv, self.len_k)
        is_forward = self.direction == "forward"
        dout = None if is_forward else draw(self.heads_q, self.len_q)
        bias = None
        if self.bias:
            options: dict[str, Any] = {"device": device, "dtype": self.dtype}
            bias = torch.randn(self.bias_shape, generator=generator, **options)
        return Inputs(q, k, v, dout, bias)


def _read(entry: Any, path: Path) -> AttentionCase:
    known = {field.name: field.type for field in fields(AttentionCase)}
    if not isinstance(entry, dict):
        raise OptionError(f"bench: {path} has a case that is not an object: {entry!r}.")
    values = cast("dict[str, Any]", entry)
    unknown = sorted(set(values) - set(known))
    optional = {field.name for field in fields(AttentionCase) if field.default is not MISSING}
    missing = sorted(set(known) - set(values) - optional)
    if unknown or missing:
        raise OptionError(
            f"bench: case {values.get('name')!r} of {path} lacks {missing} and has unknown fields "
            f"{unknown}; a case has {sorted(known)}."
        )
    kinds: dict[str, type] = {"str": str, "int": int, "bool": bool, "float": float}
    for name, value in values.items():
        kind = kinds[str(known[name])]
        if type(value) is not kind or (isinstance(value, int) and kind is int and value < 1):
            raise OptionError(
                f"bench: case {values['name']!r} of {path} has {name}={value!r}; it must be "
                f"{'an integer >= 1' if kind is int else f'a {kind.__name__}'}."
            )
    case = AttentionCase(**values)
    if case.dtype_name not in _DTYPES:
        raise OptionError(
            f"bench: case {case.name!r} of {path} has dtype_name={case.dtype_name!r}; it must be "
            f"one of {', '.join(_DTYPES)}."
        )
    if case.direction not in ("forward", "backward"):
        raise OptionError(
            f"bench: case {case.name!r} of {path} has direction={case.direction!r}; it must be "
            "forward or backward."
        )
    if case.bias not in ("", *BIASES):
        raise OptionError(
            f"bench: case {case.name!r} of {path} has bias={case.bias!r}; it must be one of "
            f"{', '.join(BIASES)}."
        )
    return case


def load_cases(path: Path) -> tuple[AttentionCase, ...]:
    """Read the cases of a JSON file.

    Args:
        path: A file with an object that has a list ``"cases"``, each with the fields of
            `AttentionCase`.

    Returns:
        The cases, in the file's order.

    Raises:
        OptionError: If the file cannot be read, or a case is not well formed.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        entries = list(content["cases"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(
            f"bench: the cases file {path} cannot be read ({type(error).__name__}: {error}); it "
            'must be JSON with a list "cases". Try: benchmarks/attention_cases.json.'
        ) from None
    cases = tuple(_read(entry, path) for entry in entries)
    names = [case.name for case in cases]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise OptionError(f"bench: {path} has two cases of the name {twice[0]!r}.")
    return cases


def select(cases: Sequence[C], wanted: str) -> tuple[C, ...]:
    """Choose cases by name.

    Args:
        cases: All cases.
        wanted: ``"all"``, or a comma list of names, where ``*`` and ``?`` stand for anything.

    Returns:
        Every case that one of the names means, in the order of `cases`.

    Raises:
        OptionError: If one of the names means no case.
    """
    patterns = [part.strip() for part in wanted.split(",") if part.strip()]
    if patterns == ["all"]:
        return tuple(cases)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(case.name, pattern) for case in cases):
            raise OptionError(
                f"bench: --cases names {pattern!r}, and there is no such case; there are "
                f"{', '.join(case.name for case in cases)}. Try: --cases all."
            )
    if not patterns:
        raise OptionError("bench: --cases is empty; it must name cases. Try: --cases all.")
    return tuple(case for case in cases if any(fnmatch.fnmatchcase(case.name, p) for p in patterns))
