"""Which tiles run a normalisation: the rule. The kernels refuse only what all row-wise ones do."""

from __future__ import annotations

from dataclasses import replace

from tileloom.ops._op import Choice
from tileloom.ops.rowwise import config as shared
from tileloom.ops.rowwise.config import RowConfig, Tile, TritonConfig, padded, parts_of
from tileloom.ops.rowwise.norm.problem import NormProblem
from tileloom.target import Target

# The most columns of a row that a program keeps in registers: float32, 1024 threads; the backward
# has the shares of dweight and dbias there as well.
_WHOLE_FORWARD = 32768
_WHOLE_BACKWARD = 16384
_WHOLE_BACKWARD_CENTRED = 8192
# The largest tile beside which the backward keeps the weight in registers.
HELD = 8192


# Rows up to which the backward is one launch that reads them twice, not two launches.
_FEW = 256


# Tiles of clusters that walk over many rows, by the columns of a row and the bytes of an element of
# its vectors: forward of an RMS norm, of a layer norm; backward of both.
_WALKS_RMS = {
    (65536, 2): Tile(32768, 1, 16, 1, 3, ring=True, ctas=2),
    (131072, 2): Tile(32768, 1, 16, 1, 3, ring=True, ctas=4),
}
_WALKS_LAYER = {
    (16384, 4): Tile(8192, 1, 8, 2, 6, ring=True, ctas=2),
    (32768, 2): Tile(16384, 1, 16, 1, 6, ring=True, ctas=2),
    (131072, 2): Tile(16384, 1, 16, 1, 4, ring=True, ctas=8),
}
_WALKS_RMS_BACKWARD = {
    (16384, 4): Tile(8192, 1, 16, 1, 4, ring=True, ctas=2),
    (131072, 2): Tile(16384, 1, 16, 1, 3, ring=True, ctas=8),
}
_WALKS_LAYER_BACKWARD = {
    **_WALKS_RMS_BACKWARD,
    (16384, 2): Tile(8192, 1, 8, 2, 3, ring=True, ctas=2),
}


def smem_bytes(problem: NormProblem, tile: Tile) -> int:
    """Shared memory that the backward's pipeline takes, in bytes."""
    row = problem.dtype.itemsize * (3 if problem.has_residual else 2)
    if tile.ring:
        pieces = -(-problem.rows.width // tile.block)
        return pieces * tile.block * (tile.stages * row + problem.weight_bytes) + 1024
    weight = 4 if tile.block > HELD else 0
    return (tile.stages - 1) * tile.block * tile.rows * (row + weight) + 4096


def _shared(problem: NormProblem, target: Target, tile: Tile) -> Tile:
    """The tile, widened until no more than half of the multiprocessors share a row."""
    while 2 * parts_of(problem.rows.width, tile) > target.sms and tile.block < 65536:
        tile = replace(
            tile, block=2 * tile.block, num_warps=min(32, 2 * tile.num_warps),
            per_sm=max(1, tile.per_sm // 2),
        )  # fmt: skip
    return tile


def _walk(problem: NormProblem, target: Target) -> Tile | None:
    """Clusters that walk over many rows, where they were measured to be faster."""
    if problem.is_backward:
        tiles = _WALKS_LAYER_BACKWARD if problem.is_centred else _WALKS_RMS_BACKWARD
    else:
        tiles = _WALKS_LAYER if problem.is_centred else _WALKS_RMS
    tile = tiles.get((problem.rows.width, problem.weight_bytes))
    if tile is None or problem.rows.count <= _FEW:
        return None
    name = "backward" if problem.is_backward else "forward"
    why = shared.cluster_reasons(name, problem.rows, tile, target)
    return None if why or walk_reasons(name, problem, tile, target) else tile


def _forward(problem: NormProblem, target: Target) -> Tile:
    if not problem.is_backward and (walk := _walk(problem, target)) is not None:
        return walk
    width, is_half = padded(problem.rows.width), problem.dtype.itemsize == 2
    if width > _WHOLE_FORWARD:
        cluster = shared.cluster_of(problem.rows, problem.dtype, target)
        if cluster is not None and problem.is_centred and not problem.has_residual:
            return cluster
        if not is_half:
            return _shared(problem, target, Tile(2048, 1, 8, 3))
        tile = Tile(8192, 1, 8, 2) if problem.is_centred else Tile(4096, 1, 4, 4)
        return _shared(problem, target, tile)
    if width > 4096:
        return Tile(width, 1, 16 if is_half or width < 32768 else 32)
    rows = max(1, 2048 // width)
    return Tile(width, rows, max(1, width * rows // 512))


def _ring(problem: NormProblem, target: Target) -> Tile | None:
    """The ring for a layer norm whose rows are too wide to be held, or fill a power of two badly.

    It holds two sums a column in registers, which other forms cannot for 16384 columns.
    """
    width = problem.rows.width
    if not problem.is_centred or problem.rows.count <= _FEW:
        return None
    if _WHOLE_BACKWARD_CENTRED < width <= _WHOLE_BACKWARD:
        tile = Tile(4096, 1, 16, 1, 2, ring=True)
    elif 4096 < width <= 6144:
        tile = Tile(1024, 1, 4, 2, 3, ring=True)
    else:
        return None
    fits = tile.per_sm * smem_bytes(problem, tile) <= target.smem
    return tile if fits and not ring_reasons(problem, tile, target) else None


def _backward(problem: NormProblem, target: Target) -> Tile:
    width, is_half = padded(problem.rows.width), problem.dtype.itemsize == 2
    if problem.is_backward and (walk := _walk(problem, target)) is not None:
        return walk
    if (ring := _ring(problem, target)) is not None:
        return ring
    if width > (_WHOLE_BACKWARD_CENTRED if problem.is_centred else _WHOLE_BACKWARD):
        tile = Tile(4096, 1, 4, 2, 2) if is_half else Tile(2048, 1, 8, 2, 2)
        many = Tile(2048, 1, 4, 4, 2)  # more programs wait for their sums at a time
        is_long = (
            problem.rows.width > 65536 and 2 * parts_of(problem.rows.width, many) <= target.sms
        )
        if is_half and is_long and not problem.is_centred:
            return many
        tile = _shared(problem, target, tile)
        return tile if tile.block < 16384 else replace(tile, stages=1)
    if problem.rows.count <= _FEW:
        return Tile(width, 1, max(4, width // 512), split=True)
    if width == 16384:
        return Tile(width, 1, 32 if is_half else 16)
    if width == 8192 and is_half:  # rows that fill the tile leave less time to load ahead
        return Tile(width, 1, 8, 1, 3 if width == problem.rows.width else 4)
    if width == 4096 and is_half:  # one program a multiprocessor: half the shares of dweight
        return Tile(width, 1, 8, 1, 5) if problem.is_centred else Tile(width, 2, 8, 1, 3)
    rows = 2048 // width if width <= 512 else 1
    warps = max(1, width * rows // 512)
    per_sm = 4 if warps <= 2 else 2 if warps <= 8 else 1
    tile = Tile(width, rows, warps, per_sm, 3)
    while tile.stages > 1 and per_sm * smem_bytes(problem, tile) > target.smem:
        tile = replace(tile, stages=tile.stages - 1)
    return tile


def rule(problem: NormProblem, target: Target) -> TritonConfig:
    """Give the tiles for a problem: whole rows in registers while they fit, else shared rows.

    Measured on an H200 on 2026-11-28 (Triton 3.6.0, bfloat16, 2^26 elements), as a share of the
    bandwidth of a copy, 4.2 TB/s. Whole rows, rms norm: forward 0.94 (4096), 0.94 (8192), 0.95
    (16384), 0.88 (32768); backward 0.95 (4096), 0.91 (5120), 0.87 (16384; a ring 0.86). Layer norm:
    forward 0.93 (4096), 0.90 (16384); backward 0.95 (4096), 0.90 (8192). By a ring, layer norm
    backward: 0.86 (5120; whole rows 0.85), 0.74 (16384; shared rows 0.55). Shared rows of 131072:
    forward 0.82 (rms), 0.65 (layer), backward 0.72 (parts of 4096: 0.69) and 0.50; of 2^20: 0.60
    forward, 0.41 and 0.19 backward. An H100 has 0.71 of that bandwidth: its shares are higher.
    A pipeline of shared memory for shared rows was slower: 0.66 and less, of layer norm of 16384
    0.41. Clusters that walk over rows, and what they replaced, in the same run: rms norm forward
    0.87 and 0.82 (131072), 0.88 and 0.81 (65536); layer norm forward 0.78 and 0.70 (131072), 0.85
    and 0.73 (32768), with float32 weights 0.83 and 0.45 (16384); backward of 131072 0.87 and 0.73
    (rms), 0.71 and 0.49; of 16384 0.83 and 0.69 (layer), with float32 weights 0.82 and 0.77 (rms),
    0.80 and 0.66. docs/rowwise.md has what else was tried.
    """
    return TritonConfig(_forward(problem, target), _backward(problem, target))


def ring_reasons(problem: NormProblem, tile: Tile, target: Target) -> list[str]:
    """Why a ring of shared memory cannot bring the rows, its size aside."""
    why: list[str] = []
    if target.capability != (9, 0):
        why.append(f"backward.ring is made for Hopper, and {target.name} is {target.arch}")
    if problem.dtype.itemsize != 2:
        why.append(f"backward.ring takes float16 and bfloat16, and rows are {problem.dtype}")
    if problem.rows.vector != 8 or problem.rows.groups != 1 or not problem.is_aligned:
        why.append(
            "backward.ring copies 16 bytes at a time from rows of one common stride, and these "
            "have several, or do not begin at multiples of 16 bytes"
        )
    if tile.block != 256 * tile.num_warps or tile.rows != 1 or tile.stages < 2:
        why.append(
            f"backward.ring takes blocks of 256 columns for each warp, 1 row and 2 stages or more, "
            f"and they are {tile.block} for {tile.num_warps} warps, {tile.rows} and {tile.stages}"
        )
    return why


# What a kernel may take of shared memory unasked. Triton asks for more where the rows alone are
# more, and does not count the boxes.
_UNASKED = 48 * 1024


def walk_bytes(name: str, problem: NormProblem, tile: Tile) -> tuple[int, int]:
    """Shared memory of a CTA of a cluster that walks: its rows, and boxes for the sums."""
    row = (2 if name == "backward" else 1) * tile.block * problem.dtype.itemsize
    sums = 4 * (2 if problem.is_centred else 1) * tile.ctas * tile.num_warps
    return tile.stages * row, 4 * (8 + sums)


def walk_reasons(name: str, problem: NormProblem, tile: Tile, target: Target) -> list[str]:
    """Why clusters cannot walk over the rows, apart from what every cluster needs."""
    why: list[str] = []
    if problem.dtype.itemsize != 2:
        why.append(
            f"{name}.ctas takes float16 and bfloat16 with a ring, and rows are {problem.dtype}"
        )
    if not problem.is_aligned:
        why.append(f"{name}.ctas with a ring takes rows that begin at multiples of 16 bytes")
    if problem.has_residual:
        why.append(f"{name}.ctas with a ring takes no residual")
    if tile.rows != 1 or tile.stages < 3:
        why.append(
            f"{name}.ctas with a ring takes 1 row and 3 stages or more, and they are {tile.rows} "
            f"and {tile.stages}"
        )
    rows, boxes = walk_bytes(name, problem, tile)
    needs = tile.per_sm * (rows + boxes)
    if rows <= _UNASKED < rows + boxes:
        why.append(
            f"{name}.stages is {tile.stages}, so that rows take {rows} bytes of shared memory; "
            f"with a ring they must take {_UNASKED - boxes} or less, or more than {_UNASKED}"
        )
    if needs > target.smem:
        why.append(
            f"{name}.stages is {tile.stages}, which needs {needs} bytes of shared memory, and "
            f"{target.name} has {target.smem}"
        )
    return why


def _own_reasons(problem: NormProblem, config: TritonConfig, target: Target) -> list[str]:
    why: list[str] = []
    for name, tile in (("forward", config.forward), ("backward", config.backward)):
        if tile is None:
            continue
        why += shared.cluster_reasons(name, problem.rows, tile, target)
        if tile.ctas > 1 and tile.ring:
            why += walk_reasons(name, problem, tile, target)
        parts = parts_of(problem.rows.width, tile)
        if parts > 1 and 2 * parts > target.sms:
            why.append(
                f"{name}.block is {tile.block}, so that {parts} programs share a row and wait for "
                f"each other, more than half of the {target.sms} multiprocessors of {target.name}"
            )
    tile = config.backward
    if tile is not None and tile.ctas > 1:
        if not tile.ring:
            why.append(f"backward.ctas is {tile.ctas}, and only clusters with a ring take it")
        return why
    if tile is not None and tile.ring:
        why += ring_reasons(problem, tile, target)
    if tile is None or tile.split or parts_of(problem.rows.width, tile) > 1:
        return why
    needs = smem_bytes(problem, tile)
    if needs > target.smem:
        why.append(
            f"backward.stages is {tile.stages}, which needs {needs} bytes of shared memory, and "
            f"{target.name} has {target.smem}"
        )
    return why


def choose(op: str, problem: NormProblem, target: Target, config: RowConfig | None) -> Choice:
    """Choose backend and tiles; see `tileloom.ops.rowwise.config.choose`."""
    return shared.choose(op, problem, target, config, rule, _own_reasons)
