"""The backends that every row-wise operator has, and how one is chosen.

An operator adds a rule, `(problem, target) -> TritonConfig`, and its own reasons where it has any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from tileloom.errors import (
    ConfigError,
    OptionError,
    bullet_list,
    check_fields,
    shown_value,
)
from tileloom.ops import _op
from tileloom.ops._op import Choice
from tileloom.ops.rowwise.rows import Rows
from tileloom.target import Target

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""What the Triton kernels take; float64 goes to the reference."""

FIRST_WORD = 32
"""Where the words of programs that share rows begin, behind their ticket: in the next 128 bytes."""

_MAX_INT32 = 2**31 - 1
LARGEST_WIDTH = 2**30


class RowProblem(Protocol):
    """What the shared reasons read of an operator's problem."""

    @property
    def rows(self) -> Rows:
        """The rows of all its tensors."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the rows."""
        ...


Problem = TypeVar("Problem", bound=RowProblem)


@dataclass(frozen=True)
class ReferenceConfig:
    """The formula in plain torch, in the operator's `reference.py`. Runs everywhere."""

    backend = "reference"

    def encode(self) -> str:
        """Return the config as the text that the operator's schema carries."""
        return "reference"

    def reasons_against(self, problem: RowProblem, target: Target) -> tuple[str, ...]:
        """Return why this config cannot run the problem on the target; empty if it can."""
        del problem, target
        return ()


@dataclass(frozen=True)
class Tile:
    """What one program of a row-wise kernel holds at a time.

    Attributes:
        block: Columns: a power of two. Where it covers the row, the row is read once and kept in
            registers, else it is walked in blocks.
        rows: Rows: a power of two.
        num_warps: Warps: a power of two.
        per_sm: Programs for each multiprocessor, of kernels whose programs walk over many rows;
            where several share a row, and in cross entropy's forward, it bounds the registers of a
            thread as well, so that all run.
        stages: Depth of the pipeline of such a walk: 1 loads a tile when it is needed, more copy
            the next ones into shared memory ahead.
        split: Softmax, where the block does not cover a row: whether it takes a program for each
            block, which meet (`pieces_split`), instead of one that walks. Norms, backward, where
            the block covers a row: whether programs of their own add up the gradients of weight and
            bias, which read all rows again, in the same launch.
        ring: Norms, backward: whether a program takes whole rows, in pieces of `block` columns that
            come into a ring of `stages` rows in shared memory. With `ctas`, forward and backward:
            whether clusters walk over rows, each CTA with a ring of its columns.
        ctas: CTAs of a cluster that share a row, `block` columns each: Hopper, norms, and forward
            of softmax. 1: a program is no cluster.
    """

    block: int
    rows: int = 1
    num_warps: int = 4
    per_sm: int = 1
    stages: int = 1
    split: bool = False
    ring: bool = False
    ctas: int = 1

    def __post_init__(self) -> None:
        """Refuse a field of a wrong type."""
        check_fields(self)

    @property
    def registers(self) -> int:
        """Registers that each thread may have, of an SM's 65536, if it is to hold all `per_sm`."""
        return min(255, 65536 // (32 * self.num_warps * self.per_sm) // 8 * 8)

    @property
    def register_bound(self) -> int | None:
        """`registers` where a multiprocessor is to hold several programs; None: any."""
        return self.registers if self.per_sm > 1 else None

    def faults(self, name: str) -> list[str]:
        """What is wrong with the tile itself; `name` is what the config calls it."""
        why: list[str] = []
        powers = (("block", 16, 65536), ("rows", 1, 1024), ("num_warps", 1, 32), ("ctas", 1, 8))
        for field, least, most in (*powers, ("per_sm", 1, 32), ("stages", 1, 8)):
            value = getattr(self, field)
            is_any = field in ("per_sm", "stages")
            is_right = is_any or not value & (value - 1)
            if not is_right or not least <= value <= most:
                kind = "an integer" if is_any else "a power of two"
                why.append(f"{name}.{field} is {value}, not {kind} in {least}..{most}")
        if not why and self.block * self.rows > 2**17:
            why.append(f"{name} has {self.block} x {self.rows} elements, more than 2^17")
        return why

    def encode(self) -> str:
        """Return the tile as text."""
        forms = int(self.split), int(self.ring), self.ctas
        fields = (self.block, self.rows, self.num_warps, self.per_sm, self.stages, *forms)
        return ",".join(map(str, fields))


@dataclass(frozen=True)
class TritonConfig:
    """The portable kernels.

    Attributes:
        forward: Tile of the forward kernel; None: as the operator's rule says.
        backward: Tile of the backward kernel; None: as the operator's rule says.
    """

    forward: Tile | None = None
    backward: Tile | None = None
    backend = "triton"

    def __post_init__(self) -> None:
        """Refuse what is no tile."""
        for name, tile in (("forward", self.forward), ("backward", self.backward)):
            if not isinstance(tile, (Tile, type(None))):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise OptionError(
                    f"TritonConfig: {name} is {shown_value(tile)}; it must be a Tile or None. Try: "
                    f"{name}=Tile(1024)."
                )

    def encode(self) -> str:
        """Return the config as the text that the operator's schema carries."""
        return "triton:" + "/".join(
            "" if t is None else t.encode() for t in (self.forward, self.backward)
        )

    def filled(self, rule: TritonConfig) -> TritonConfig:
        """Return the config with the rule's tiles where it has none."""
        return TritonConfig(self.forward or rule.forward, self.backward or rule.backward)

    def reasons_against(self, problem: RowProblem, target: Target) -> tuple[str, ...]:
        """Return why this config cannot run the problem on the target; empty if it can."""
        why = _op.portable_reasons(target)
        if problem.dtype not in DTYPES:
            why.append(f"dtype {problem.dtype} is not float16, bfloat16 or float32")
        why += problem.rows.reasons
        if problem.rows.count > _MAX_INT32:
            why.append(f"there are {problem.rows.count} rows, more than 2^31 - 1")
        if problem.rows.width > LARGEST_WIDTH:
            why.append(f"a row has {problem.rows.width} elements, more than 2^30")
        for name, tile in (("forward", self.forward), ("backward", self.backward)):
            if tile is not None:
                why += tile.faults(name)
        return tuple(why)


RowConfig = ReferenceConfig | TritonConfig
CONFIGS = (ReferenceConfig, TritonConfig)


def padded(width: int) -> int:
    """The power of two that a row's columns are rounded up to, at least 16."""
    return max(16, 1 << max(width - 1, 0).bit_length())


def parts_of(width: int, tile: Tile) -> int:
    """How many programs share a row: one for each tile, or one for all of a ring or a cluster."""
    return 1 if tile.ring or tile.ctas > 1 else -(-width // tile.block)


def cluster_reasons(name: str, rows: Rows, tile: Tile, target: Target) -> list[str]:
    """Why a cluster cannot take the rows; empty if it can, or if the tile is none."""
    if tile.ctas == 1:
        return []
    why: list[str] = []
    if target.capability != (9, 0):
        why.append(f"{name}.ctas is made for Hopper, and {target.name} is {target.arch}")
    if rows.vector < 2 or rows.groups != 1:
        why.append(
            f"{name}.ctas takes rows of one common stride, of whole 16 bytes, and these have "
            "several, or others"
        )
    if tile.block * tile.ctas != rows.width:
        why.append(
            f"{name}.ctas times its block are {tile.ctas} x {tile.block} columns, and a row has "
            f"{rows.width} elements"
        )
    is_odd = not tile.ring and tile.ctas * tile.num_warps % 32 != 0
    if is_odd or tile.block < 32 * tile.num_warps * rows.vector:
        why.append(
            f"{name}.ctas takes 32 warps or more with 16 bytes for each thread, and these are "
            f"{tile.ctas} x {tile.num_warps} for {tile.ctas} x {tile.block} columns"
        )
    return why


def cluster_of(rows: Rows, dtype: torch.dtype, target: Target) -> Tile | None:
    """A cluster of 8 warps a CTA that takes a long row of 16-bit elements; None if it cannot."""
    ctas = 4 if rows.width == 32768 else 8
    tile = Tile(padded(rows.width) // ctas, 1, 8, ctas=ctas)
    fits = dtype.itemsize == 2 and tile.block <= 16384
    return tile if fits and not cluster_reasons("forward", rows, tile, target) else None


def groups_of(rows: Rows, tile: Tile, sms: int) -> int:
    """Groups of rows whose programs the GPU takes at a time; each has as many turns."""
    most = max(1, min(rows.count, sms * tile.per_sm // parts_of(rows.width, tile)))
    turns = -(-rows.count // most)
    return -(-rows.count // turns)


def decode(op: str, text: str) -> RowConfig | None:
    """Read a config from the text that the operators' schemas carry; "" means: choose.

    Raises:
        ConfigError: If no config writes such a text.
    """
    return _op.read_config(op, "config", text, _read)


def _read(text: str) -> RowConfig | None:
    backend, _, rest = text.partition(":")
    if backend == "triton":
        return TritonConfig(*(_decode_tile(tile) for tile in rest.split("/")))
    if text not in ("reference", ""):
        raise ValueError(text)
    return ReferenceConfig() if text else None


def _decode_tile(text: str) -> Tile | None:
    if not text:
        return None
    *fields, split, ring, ctas = (int(field) for field in text.split(","))
    return Tile(*fields, split=split == 1, ring=ring == 1, ctas=ctas)


def announce(choice: Choice, problem: RowProblem) -> None:
    """Make the decision visible; warn once where the kernels refused what they are made for."""
    refused = "triton" in choice.refused and problem.dtype in DTYPES
    _op.announce(choice, slower_than="triton" if refused else None)


def choose(
    op: str,
    problem: Problem,
    target: Target,
    config: RowConfig | None,
    rule: Callable[[Problem, Target], TritonConfig],
    own: Callable[[Problem, TritonConfig, Target], Sequence[str]] = lambda *_: (),
) -> Choice:
    """Choose backend and config: an explicit config, else the kernels, else the reference.

    Args:
        op: The operator's name.
        problem: What is to be computed.
        target: Where.
        config: Forces its backend; tiles that it leaves open come from the rule.
        rule: The tiles for a problem where the kernels run.
        own: Reasons of the operator's own against a config.

    Returns:
        The decision with its source, and the reasons of the kernels if they refused.

    Raises:
        ConfigError: If an explicit config cannot run the problem.
    """
    if config is not None:
        reasons: tuple[str, ...] = ()
        if isinstance(config, TritonConfig):
            config = config.filled(rule(problem, target))
            reasons = config.reasons_against(problem, target) or (*own(problem, config, target),)
        if reasons:
            raise ConfigError(
                f"{op}: config={config} cannot run this problem:\n"
                f"{bullet_list({config.backend: reasons})}\n"
                "Try: config=None, which chooses a backend that can."
            )
        return Choice(op, config.backend, config, "explicit", {}, problem)
    if target.kind == "cpu":
        return Choice(op, "reference", ReferenceConfig(), "rule", {}, problem)
    best = rule(problem, target)
    reasons = best.reasons_against(problem, target) or (*own(problem, best, target),)
    if not reasons:
        return Choice(op, best.backend, best, "rule", {}, problem)
    return Choice(op, "reference", ReferenceConfig(), "rule", {best.backend: reasons}, problem)
