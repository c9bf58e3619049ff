"""PTX instructions that compute values, vectorised over lanes."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tileloom.emulator import dtypes

if TYPE_CHECKING:
    from tileloom.emulator.ptx import Instruction, Lanes

WORD: dict[int, Any] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_FLOAT: dict[str, Any] = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
_PACKED = {"f16x2": "f16", "bf16x2": "bf16", "s16x2": "s16", "u16x2": "u16", "f32x2": "f32"}


@lru_cache(maxsize=256)
def width(kind: str) -> int:
    """Return the width in bits of a PTX type such as ``u32``, ``bf16x2``, ``e4m3x2``."""
    if kind == "pred":
        return 8
    match = re.match(r"[a-z]*?(\d+)(?:x(\d+))?$", kind)
    if kind.startswith(("e4m3", "e5m2")):
        return 8 * int(kind.rpartition("x")[2]) if "x" in kind else 8
    if match is None:
        raise ValueError(f"PTX type '{kind}'")
    return int(match.group(1)) * int(match.group(2) or 1)


def zeros(kind: str, count: int) -> np.ndarray:
    """Return a register's worth of zeros."""
    return np.zeros(count, np.bool_ if kind == "pred" else WORD[width(kind)])


def typed(raw: np.ndarray, kind: str) -> np.ndarray:
    """Read raw words as values of a type; bf16 as float32, packed types with a last axis of 2."""
    if kind == "pred":
        return raw.astype(np.bool_)
    if kind in _PACKED:
        single = _PACKED[kind]
        half = WORD[width(single)]
        pairs = np.ascontiguousarray(raw).view(half).reshape(-1, 2)
        return typed(pairs, single)
    if kind == "bf16":
        return dtypes.from_bits(np.ascontiguousarray(raw), "bf16")
    if kind in _FLOAT:
        return np.ascontiguousarray(raw).view(_FLOAT[kind])
    if kind[0] == "s":
        return np.ascontiguousarray(raw).view(np.dtype(f"i{width(kind) // 8}"))
    return raw


def words(values: Any, kind: str) -> np.ndarray:
    """Turn values of a type into raw words, wrapping integers and rounding floats."""
    if kind == "pred":
        return np.asarray(values, np.bool_)
    if kind in _PACKED:
        halves = words(values, _PACKED[kind])
        return np.ascontiguousarray(halves).view(WORD[width(kind)]).reshape(-1)
    values = np.asarray(values)
    if kind == "bf16":
        return dtypes.to_bits(values, "bf16")
    if kind in _FLOAT:
        out = np.atleast_1d(values).astype(_FLOAT[kind])
        return np.ascontiguousarray(out).view(WORD[width(kind)])
    if values.dtype == np.bool_:
        return values.astype(WORD[width(kind)])
    return values.astype(WORD[width(kind)])


@lru_cache(maxsize=4096)
def immediate(text: str, kind: str) -> Any:
    """Read a literal as a raw word."""
    bits = width(kind)
    if match := re.match(r"(-?)0[fF]([0-9a-fA-F]{8})$", text):
        word = np.uint32(int(match.group(2), 16))
        value = np.array([word], np.uint32).view(np.float32)[0]
        value = -value if match.group(1) else value
        return (
            words(np.array([value]), kind)[0]
            if kind in _FLOAT and kind != "f32"
            else np.array([value], np.float32).view(np.uint32)[0].astype(WORD[bits])
        )
    if match := re.match(r"0[dD]([0-9a-fA-F]{16})$", text):
        return np.uint64(int(match.group(1), 16))
    if re.match(r"-?\d+\.\d*(e[+-]?\d+)?$", text):
        return words(np.array([float(text)]), kind)[0]
    if not re.match(r"-?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$", text):
        raise ValueError(f"operand '{text}' is no register and no number")
    value = int(text.rstrip("U"), 0) & ((1 << bits) - 1)
    return WORD[bits](value)


def _round(values: Any, kind: str) -> Any:
    single = _PACKED.get(kind, kind)
    if single == "bf16":
        return dtypes.round_bf16(values)
    return values


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "sub": operator.sub, "and": operator.and_, "or": operator.or_,
    "xor": operator.xor,
}  # fmt: skip


def _divide(a: Any, b: Any) -> Any:
    if a.dtype.kind == "f":
        return a / b
    safe = np.where(b == 0, 1, b).astype(a.dtype)
    floor = np.floor_divide(a, safe)
    inexact = (a - floor * safe != 0) & ((a < 0) != (safe < 0))
    return floor + inexact.astype(a.dtype)


def _minimum(a: Any, b: Any) -> Any:
    return np.fmin(a, b)


def _maximum(a: Any, b: Any) -> Any:
    return np.fmax(a, b)


_UNARY: dict[str, Callable[[Any], Any]] = {
    "ex2": np.exp2, "lg2": np.log2, "rcp": lambda x: 1 / x, "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x), "sin": np.sin, "cos": np.cos, "tanh": np.tanh, "abs": np.abs,
    "neg": np.negative, "not": np.invert, "cnot": lambda x: (x == 0).astype(x.dtype),
}  # fmt: skip
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt,
    "ge": operator.ge, "lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge,
}  # fmt: skip
_KNOWN_PARTS = frozenset({
    "ftz", "approx", "rn", "rz", "rm", "rp", "sat", "full", "lo", "hi", "wide", "cc", "NaN", "relu",
    "satfinite", "rni", "rzi", "rmi", "rpi", "l", "r", "clamp", "wrap", "xorsign", "abs",
    "eq", "ne", "lt", "le", "gt", "ge", "ls", "hs", "equ", "neu", "ltu", "leu", "gtu", "geu", "num",
    "nan", "and", "or", "xor", "b4e", "noftz",
})  # fmt: skip


@lru_cache(maxsize=1024)
def strange_part(parts: tuple[str, ...]) -> str | None:
    """Return the first part of an opcode that is not known."""
    kind = re.compile(r"(pred|[sub](8|16|32|64)|bf16|f16|f32|f64|e[45]m[23])(x\d)?$")
    return next((p for p in parts[1:] if p not in _KNOWN_PARTS and not kind.match(p)), None)


_BETWEEN_LANES = ("shfl", "match", "redux", "activemask", "movmatrix", "mma", "ldmatrix")


def play(lanes: Lanes, i: Instruction) -> None:
    """Run one value instruction."""
    name = i.parts[0]
    function = _PLAY.get(name)
    if name in _BETWEEN_LANES:
        raise lanes.fail("what other lanes of the warp hold is the layout's business", i)
    if function is None:
        raise lanes.fail(f"'{name}' is not known", i)
    strange = strange_part(i.parts if name != "vote" else (name, *i.parts[3:]))
    if strange:
        raise lanes.fail(f"'.{strange}' is not known", i)
    try:
        function(lanes, i)
    except (ValueError, KeyError, IndexError) as error:
        raise lanes.malformed(error, i) from None


def _mov(lanes: Lanes, i: Instruction) -> None:
    target, source = i.operands
    kind = i.type
    if target.startswith("{"):
        names = [n.strip() for n in target[1:-1].split(",")]
        part = WORD[width(kind) // len(names)]
        pieces = np.ascontiguousarray(lanes.raw(source, kind)).view(part).reshape(-1, len(names))
        for n, name in enumerate(names):
            lanes.write(name, pieces[:, n].copy())
    elif source.startswith("{"):
        names = [n.strip() for n in source[1:-1].split(",")]
        small = f"b{width(kind) // len(names)}"
        stacked = np.stack([lanes.raw(n, small) for n in names], -1)
        lanes.write(target, np.ascontiguousarray(stacked).view(WORD[width(kind)]).reshape(-1))
    else:
        lanes.write(target, lanes.raw(source, kind))


def _binary(lanes: Lanes, i: Instruction) -> None:
    target, a, b = i.operands
    kind = i.type
    name = i.parts[0]
    x, y = lanes.read(a, kind), lanes.read(b, kind)
    if name in ("min", "max"):
        value = (_minimum if name == "min" else _maximum)(x, y)
        if "NaN" in i.parts:
            value = (np.minimum if name == "min" else np.maximum)(x, y)
    elif name == "div":
        value = _divide(x, y)
    elif name == "rem":
        value = x - _divide(x, y) * y
    elif name == "copysign":
        value = np.copysign(y, x)
    else:
        value = _BINARY[name](x, y)
    if "relu" in i.parts:
        value = np.fmax(value, 0)
    if "sat" in i.parts and x.dtype.kind == "f":
        value = np.clip(np.nan_to_num(value, nan=0.0), 0, 1)
    lanes.put(target, _round(value, kind), kind)


def _unary(lanes: Lanes, i: Instruction) -> None:
    target, a = i.operands
    kind = i.type
    value = lanes.read(a, kind)
    lanes.put(target, _round(_UNARY[i.parts[0]](value), kind), kind)


def _wide(kind: str) -> str:
    return f"{kind[0]}{2 * width(kind)}"


def _fused(x: float, y: float, z: float, mode: str) -> float:
    """Give x * y + z of finite doubles with one rounding: "rn", "rz", "rm" or "rp"."""
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    if exact == 0:  # of which sign, only floats know; x * y is exact then
        signs = {math.copysign(1, x * y), math.copysign(1, z)}
        return -0.0 if signs == {-1} or (mode == "rm" and -1 in signs) else 0.0
    try:
        near = float(exact)
    except OverflowError:
        near = math.inf if exact > 0 else -math.inf
    over = near == math.inf or (near != -math.inf and Fraction(near) > exact)
    under = near == -math.inf or (near != math.inf and Fraction(near) < exact)
    if over and (mode == "rm" or (mode == "rz" and exact > 0)):
        return math.nextafter(near, -math.inf)
    if under and (mode == "rp" or (mode == "rz" and exact < 0)):
        return math.nextafter(near, math.inf)
    return near


def _sum_and_rest(a: Any, b: Any) -> tuple[Any, Any]:
    """Give a + b rounded, and exactly what that lost."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _product_and_rest(a: Any, b: Any) -> tuple[Any, Any]:
    """Give a * b rounded, and exactly what that lost, by halves of 26 bits."""
    product = a * b
    a_high, b_high = (x * 134217729.0 - (x * 134217729.0 - x) for x in (a, b))
    a_low, b_low = a - a_high, b - b_high
    rest = a_high * b_high - product
    return product, ((rest + a_high * b_low) + a_low * b_high) + a_low * b_low


def _fused_doubles(lanes: Lanes, i: Instruction) -> None:
    """Play `fma.f64`, which rounds once: numpy would round twice."""
    target, *sources = i.operands
    mode = next((p for p in i.parts if p in ("rn", "rz", "rm", "rp")), "rn")
    x, y, z = (np.broadcast_to(lanes.read(source, "f64"), lanes.count) for source in sources)
    with np.errstate(all="ignore"):
        product, lost = _product_and_rest(x, y)
        total, left = _sum_and_rest(product, z)
        rest, fine = _sum_and_rest(left, lost)
        value, rest = _sum_and_rest(total, rest)  # and `fine`, which is less than any rest but 0
        rest = np.where(rest == 0, fine, rest)
        up = {"rz": value < 0, "rp": True}.get(mode, False) & (rest > 0)
        down = {"rz": value > 0, "rm": True}.get(mode, False) & (rest < 0)
        step = np.spacing(np.abs(value))
        tame = [(np.abs(v) > 1e-130) & (np.abs(v) < 1e130) for v in (x, y, z, value)]
        sure = np.logical_and.reduce(tame)
        if mode == "rn":  # halfway, `fine` may decide
            sure &= 2 * np.abs(rest) < 0.99 * step
        value = np.where(up, np.nextafter(value, np.inf), value)
        value = np.where(down, np.nextafter(value, -np.inf), value)
        plain = np.array(x * y + z)
    for n in np.flatnonzero(~sure):
        given = float(x[n]), float(y[n]), float(z[n])
        value[n] = _fused(*given, mode) if all(map(math.isfinite, given)) else plain[n]
    lanes.put(target, value, "f64")


def _multiply(lanes: Lanes, i: Instruction) -> None:
    target, a, b, *rest = i.operands
    kind = i.type
    if i.parts[0] == "fma" and kind == "f64":
        _fused_doubles(lanes, i)
        return
    x, y = lanes.read(a, kind), lanes.read(b, kind)
    if x.dtype.kind == "f":
        double = np.float64 if x.dtype == np.float32 and rest else x.dtype
        value: Any = np.multiply(x, y, dtype=double)
        if rest:
            value = (value + lanes.read(rest[0], kind)).astype(x.dtype)
        lanes.put(target, _round(value, kind), kind)
        return
    if "wide" in i.parts:
        out = _wide(kind)
        big = np.int64 if kind[0] == "s" else np.uint64
        value = x.astype(big) * y.astype(big)
        if rest:
            value = value + lanes.read(rest[0], out).astype(big)
        lanes.put(target, value, out)
        return
    value = x.astype(object) * y.astype(object)
    if "hi" in i.parts:
        value = value >> width(kind)
    if rest:
        value = value + lanes.read(rest[0], kind).astype(object)
    mask = (1 << width(kind)) - 1
    lanes.write(target, (value & mask).astype(WORD[width(kind)]))


def _shift(lanes: Lanes, i: Instruction) -> None:
    target, a, b = i.operands
    kind = i.type
    bits = width(kind)
    x = lanes.read(a, kind)
    amount = lanes.raw(b, "u32").astype(np.int64)
    if i.parts[0] == "shl":
        value = np.where(
            amount >= bits, 0, np.left_shift(x, np.minimum(amount, bits - 1).astype(x.dtype))
        )
    else:
        value = np.right_shift(x, np.minimum(amount, bits - 1).astype(x.dtype))
        if kind[0] != "s":
            value = np.where(amount >= bits, 0, value)
    lanes.write(target, value.astype(WORD[bits]))


def _setp(lanes: Lanes, i: Instruction) -> None:
    target, a, b, *rest = i.operands
    kind = i.type
    x, y = lanes.read(a, kind), lanes.read(b, kind)
    name = i.parts[1]
    if name in ("num", "nan"):
        bad = np.isnan(x) | np.isnan(y)
        value = bad if name == "nan" else ~bad
    elif name.endswith("u") and name[:-1] in _COMPARE:
        value = _COMPARE[name[:-1]](x, y) | np.isnan(x) | np.isnan(y)
    elif name == "ne" and x.dtype.kind == "f":
        value = (x != y) & ~np.isnan(x) & ~np.isnan(y)
    else:
        value = _COMPARE[name](x, y)
    if rest:
        other = lanes.raw(rest[0].lstrip("!"), "pred")
        other = ~other if rest[0].startswith("!") else other
        value = _BINARY[i.parts[2]](value, other)
    first, _, second = target.partition("|")
    lanes.write(first, value)
    if second:
        lanes.write(second, ~value)


def _selp(lanes: Lanes, i: Instruction) -> None:
    target, a, b, p = i.operands
    pick = lanes.raw(p, "pred").astype(np.bool_)
    lanes.write(target, np.where(pick, lanes.raw(a, i.type), lanes.raw(b, i.type)))


def _vote(lanes: Lanes, i: Instruction) -> None:
    """Whether a predicate holds in any or in all of 32 neighbours that run the instruction."""
    target, source, members = i.operands
    if i.parts[1] != "sync" or i.parts[2:] not in (("any", "pred"), ("all", "pred")):
        raise lanes.fail("of votes, only vote.sync.any.pred and vote.sync.all.pred are known", i)
    if (np.asarray(lanes.read(members, "b32")) != 0xFFFFFFFF).any():
        raise lanes.fail("a vote of some lanes of a warp", i)
    holds = np.broadcast_to(lanes.raw(source.lstrip("!"), "pred").astype(np.bool_), lanes.count)
    holds = ~holds if source.startswith("!") else holds
    unite = np.logical_or if i.parts[2] == "any" else np.logical_and
    if lanes.mask is not None:
        holds = np.where(lanes.mask, holds, i.parts[2] == "all")
    warps = unite.reduceat(holds, range(0, lanes.count, 32))
    lanes.write(target, np.repeat(warps, 32)[: lanes.count])


_ROUNDING = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_ELEMENT = {"e4m3x2": "f8E4M3FN", "e5m2x2": "f8E5M2"}


def _cvt(lanes: Lanes, i: Instruction) -> None:
    target, *sources = i.operands
    types = [p for p in i.parts[1:] if re.match(r"([subf]\d+|bf16|e[45]m[23])(x\d+)?$", p)]
    to, source = types[0], types[-1]
    if len(sources) == 2:  # two floats into one packed register; the first goes to the upper half
        high, low = (lanes.read(s, source) for s in sources)
        pair = np.stack([low, high], -1)
        if "relu" in i.parts:
            pair = np.fmax(pair, 0)
        if to in _ELEMENT:
            raw = dtypes.to_bits(dtypes.saturate(pair, _ELEMENT[to]), _ELEMENT[to])
            lanes.write(target, np.ascontiguousarray(raw).view(np.uint16).reshape(-1))
        else:
            lanes.put(target, pair, to)
        return
    if source in _ELEMENT:
        raw = np.ascontiguousarray(lanes.raw(sources[0], "u16")).view(np.uint8).reshape(-1, 2)
        lanes.put(target, dtypes.from_bits(raw, _ELEMENT[source]), to)
        return
    x = lanes.read(sources[0], source)
    mode = next((p for p in i.parts if p in _ROUNDING), None)
    if x.dtype.kind == "f" and mode:
        x = _ROUNDING[mode](x)
    if x.dtype.kind == "f" and to[0] in "su":
        bits = width(to)
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if to[0] == "s" else (0, 2**bits - 1)
        clipped = np.clip(np.nan_to_num(x.astype(np.float64), nan=0.0), float(low), float(high))
        top = clipped >= float(high)
        value = np.where(top, 0, clipped).astype(np.int64 if to[0] == "s" else np.uint64)
        x = np.where(top, high, value.astype(object)).astype(object)
        lanes.write(target, np.array([int(v) & (2**bits - 1) for v in x], WORD[bits]))
        return
    if "rz" in i.parts and to == "bf16":
        lanes.write(target, (lanes.raw(sources[0], "b32") >> np.uint32(16)).astype(np.uint16))
        return
    lanes.put(target, x, to)


def _bits_extract(lanes: Lanes, i: Instruction) -> None:
    target, a, start, length = i.operands
    kind = i.type
    bits = width(kind)
    x = lanes.read(a, kind).astype(object)
    p = (lanes.raw(start, "u32") & 255).astype(object)
    n = (lanes.raw(length, "u32") & 255).astype(object)
    out = []
    for value, at, size in zip(x, p, n):
        piece = (int(value) >> min(int(at), bits)) & ((1 << int(size)) - 1)
        if kind[0] == "s" and size and piece >> (int(size) - 1):
            piece -= 1 << int(size)
        out.append(piece & ((1 << bits) - 1))
    lanes.write(target, np.array(out, WORD[bits]))


def _permute(lanes: Lanes, i: Instruction) -> None:
    target, a, b, c = i.operands
    if i.type != "b32" or len(i.parts) > 2:
        raise ValueError("this mode of prmt")
    both = np.stack([lanes.raw(a, "b32"), lanes.raw(b, "b32")], -1)
    source = np.ascontiguousarray(both).view(np.uint8).reshape(-1, 8)
    control = lanes.raw(c, "b32")
    out = np.zeros((lanes.count, 4), np.uint8)
    for n in range(4):
        nibble = (control >> np.uint32(4 * n)) & np.uint32(15)
        byte = np.take_along_axis(source, (nibble & 7).astype(np.int64)[:, None], 1)[:, 0]
        sign = np.where(byte >> 7, 255, 0).astype(np.uint8)
        out[:, n] = np.where(nibble & 8, sign, byte)
    lanes.write(target, out.view(np.uint32).reshape(-1))


def _lop3(lanes: Lanes, i: Instruction) -> None:
    target, a, b, c, table = i.operands
    x, y, z = (lanes.raw(o, "b32") for o in (a, b, c))
    truth = int(table, 0)
    out = np.zeros(lanes.count, np.uint32)
    for n in range(8):
        if truth >> n & 1:
            term = (x if n & 4 else ~x) & (y if n & 2 else ~y) & (z if n & 1 else ~z)
            out |= term
    lanes.write(target, out)


def _count_bits(lanes: Lanes, i: Instruction) -> None:
    target, a = i.operands
    bits = width(i.type)
    raw = lanes.raw(a, i.type)
    count = (
        (lambda v: bin(v).count("1")) if i.parts[0] == "popc" else (lambda v: bits - v.bit_length())
    )
    lanes.write(target, np.array([count(int(v)) for v in raw], np.uint32))


def _cvta(lanes: Lanes, i: Instruction) -> None:
    lanes.write(i.operands[0], lanes.raw(i.operands[1], "u64"))


_PLAY: dict[str, Callable[[Any, Any], None]] = {
    "mov": _mov, "mul": _multiply, "mad": _multiply, "fma": _multiply, "shl": _shift, "shr": _shift,
    "setp": _setp, "selp": _selp, "cvt": _cvt, "bfe": _bits_extract, "prmt": _permute,
    "lop3": _lop3, "vote": _vote,
    "popc": _count_bits, "clz": _count_bits, "cvta": _cvta,
    **dict.fromkeys([*_BINARY, "min", "max", "div", "rem", "copysign"], _binary),
    **dict.fromkeys(_UNARY, _unary),
}  # fmt: skip
KNOWN = frozenset(_PLAY)
