"""The instructions of `ptx_machine`, each compiled into a function of a thread."""

from __future__ import annotations

import functools
import re

import numpy as np


def bits(word, start, count):
    return word >> start & (1 << count) - 1


class Globals:
    """Global memory: arrays at addresses of their own, each with a margin that nobody may touch."""

    def __init__(self):
        self.arrays = {}

    def add(self, array):
        """Give a contiguous array an address, at a multiple of 4096."""
        base = len(self.arrays) + 1 << 32
        self.arrays[base] = array.reshape(-1).view(np.uint8)
        return base

    def at(self, address, size):
        base = address >> 32 << 32
        array = self.arrays[base]
        assert address - base + size <= array.size, f"{size} bytes at {address - base} are outside"
        return array[address - base : address - base + size]


class TensorMap:
    """A TMA descriptor of a matrix: its box, and whether rows of 128 bytes are swizzled.

    Args:
        matrix: Rows of a NumPy array; views have their row stride.
        box: Rows and columns of the box.
        swizzled: The 128-byte swizzle.
    """

    def __init__(self, matrix, box, swizzled=False):
        self.matrix, self.box, self.swizzled = matrix, box, swizzled
        self.size = box[0] * box[1] * matrix.itemsize
        assert matrix.strides[0] % 16 == 0
        assert not swizzled or box[1] * matrix.itemsize == 128

    def _offsets(self, start):
        assert start % (1024 if self.swizzled else 128) == 0
        width = self.box[1] * self.matrix.itemsize
        at = start + np.arange(self.box[0])[:, None] * width + np.arange(width)[None, :]
        return at ^ (at >> 7 & 7) << 4 if self.swizzled else at

    def _parts(self, crd):
        (column, row), (rows, columns) = crd, self.box
        top, left = max(row, 0), max(column, 0)
        bottom = min(row + rows, self.matrix.shape[0])
        right = min(column + columns, self.matrix.shape[1])
        inside = slice(top, max(bottom, top)), slice(left, max(right, left))
        return inside, tuple(slice(s.start - o, s.stop - o) for s, o in zip(inside, (row, column)))

    def load(self, shared, start, crd):
        box = np.zeros(self.box, self.matrix.dtype)
        inside, part = self._parts(crd)
        box[part] = self.matrix[inside]
        shared[self._offsets(start)] = box.view(np.uint8)

    def store(self, shared, start, crd, add):
        box = np.ascontiguousarray(shared[self._offsets(start)]).view(self.matrix.dtype)
        inside, part = self._parts(crd)
        self.matrix[inside] = self.matrix[inside] + box[part] if add else box[part]


def _signed(value, width):
    return value - (1 << width) if value >> width - 1 else value


def _divide(a, b):  # towards zero, as hardware does
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_INTEGER = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": _divide,
    "rem": lambda a, b: a - _divide(a, b) * b,
    "min": min,
    "max": max,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
    "mad": lambda a, b, c: a * b + c,
    "neg": lambda a: -a,
    "not": lambda a: ~a,
}
_COMPARE = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
_NOTHING = ("prefetch.", "fence.mbarrier", "setmaxnreg.", "wgmma.fence")
_FLOAT = {"mul": lambda a, b: a * b, "fma": lambda a, b, c: a * b + c}


def _float(word):
    return np.array(word, np.uint32).view(np.float32)


class SimpleOps:
    """Compiles instructions; the machine has the memories, barriers and meetings."""

    def compiled(self, name, operands):
        """A function of a thread: None to go on, an index to jump to, or BLOCKED."""
        if name.startswith(_NOTHING):
            return lambda thread: None
        for prefix, make in (
            ("cp.async.bulk.tensor", self._tensor_copy),
            ("cp.reduce.async.bulk.tensor", self._tensor_copy),
            ("cp.async.", self._copy),
            ("mbarrier.", self.mbarrier),
            ("wgmma.", self.wgmma),
            ("stmatrix.", self._stmatrix),
            ("fence.proxy.async", self._fence),
            ("ld.", self._load),
            ("st.", self._store),
            ("bar.sync", self._bar),
            ("shfl.sync.idx", self._broadcast),
            ("bra", self._branch),
            ("ret", self._ret),
        ):
            if name.startswith(prefix):
                return make(name, operands)
        return self._arithmetic(name, operands)

    # Operands

    def value(self, text):
        """A function of a thread that gives an operand's value."""
        if text in ("%tid.x", "%ctaid.x", "%nctaid.x"):
            number = {"%ctaid.x": self.block[0], "%nctaid.x": self.block[1]}.get(text)
            return (lambda t: t.index) if number is None else (lambda t: number)
        if text.startswith("%") or text == "p":
            return lambda t: t.registers[text]
        if text.startswith("0f"):
            number = int(text[2:], 16)
        else:
            number = self.symbols[text] if text in self.symbols else int(text, 0)
        return lambda t: number

    def address(self, text):
        base, _, offset = text.strip("[]").partition("+")
        base, offset = self.value(base), int(offset or 0)
        return lambda t: base(t) + offset

    @staticmethod
    def listed(text):
        return [part.strip() for part in text.strip("{}").split(",")]

    # Registers

    def _arithmetic(self, name, operands):
        parts = name.split(".")
        operation, kind = parts[0], parts[-1]
        target = operands[0]
        if operation in ("mov", "cvta", "cvt") and "{" not in "".join(operands):
            if operation == "cvt" and kind == "f32":
                return self._pack(operands)
            source, width = self.value(operands[1]), int(re.sub(r"\D", "", parts[-1]) or 64)
            sizes = [int(re.sub(r"\D", "", p)) for p in parts[1:] if re.fullmatch(r"[usb]\d+", p)]
            mask = (1 << min([*sizes, width])) - 1
            return lambda t: t.registers.__setitem__(target, source(t) & mask)
        if operation == "mov":
            return self._halves(operands)
        sources = [self.value(o) for o in operands[1:]]
        if operation == "selp":
            a, b, p = sources
            return lambda t: t.registers.__setitem__(target, a(t) if p(t) else b(t))
        if kind == "pred":
            function = _INTEGER[operation]
            if operation == "not":
                return lambda t: t.registers.__setitem__(target, not sources[0](t))
            return lambda t: t.registers.__setitem__(target, function(*(s(t) for s in sources)))
        if kind == "f32":
            function = _FLOAT[operation]
            return lambda t: t.registers.__setitem__(
                target, int(np.float32(function(*(_float(s(t)) for s in sources))).view(np.uint32))
            )
        return self._integer(operation, parts, target, sources)

    def _integer(self, operation, parts, target, sources):
        width = int(parts[-1][1:])
        mask, signed = (1 << width) - 1, parts[-1][0] == "s"
        compared = operation == "setp"
        function = _COMPARE[parts[1]] if compared else _INTEGER[operation]
        out = (1 << 2 * width) - 1 if "wide" in parts else mask
        high = width if "hi" in parts else 0
        # Bits compare as unsigned numbers; a shift's count is one always.
        shift = operation in ("shl", "shr")

        def run(t):
            values = [source(t) & mask for source in sources]
            if signed:
                values[: 1 if shift else None] = [
                    _signed(v, width) for v in values[: 1 if shift else None]
                ]
            result = function(*values)
            t.registers[target] = result if compared else result >> high & out

        return run

    def _pack(self, operands):
        """cvt.rn.f16x2.f32: the first source is the upper half."""
        target, high, low = operands[0], self.value(operands[1]), self.value(operands[2])

        def run(t):
            pair = np.array([low(t), high(t)], np.uint32).view(np.float32).astype(np.float16)
            t.registers[target] = int(pair.view(np.uint32)[0])

        return run

    def _halves(self, operands):
        if operands[0].startswith("{"):
            low, high = self.listed(operands[0])
            source = self.value(operands[1])
            return lambda t: t.registers.update(
                {low: source(t) & 0xFFFFFFFF, high: source(t) >> 32}
            )
        target, (low, high) = operands[0], map(self.value, self.listed(operands[1]))
        return lambda t: t.registers.__setitem__(target, high(t) << 32 | low(t))

    # Control

    def _branch(self, name, operands):
        label = operands[0]
        return lambda t: self.labels[label]

    def _ret(self, name, operands):
        return lambda t: setattr(t, "done", True)

    def _bar(self, name, operands):
        ident = self.value(operands[0])
        count = self.value(operands[1]) if len(operands) > 1 else lambda t: self.threads_of
        return lambda t: self.meet(t, ("bar", ident(t)), count(t))

    def _broadcast(self, name, operands):
        """shfl.sync.idx from lane 0, which is all that the DSL emits here."""
        target, source = operands[0].split("|")[0], self.value(operands[1])
        assert operands[2:4] == ["0", "31"]
        key = object()

        def act(threads):
            word = source(threads[0])
            for thread in threads:
                thread.registers[target] = word

        return lambda t: self.meet(t, (key, t.index // 32), 32, act)

    # Memory

    def _load(self, name, operands):
        target, source = operands
        width = int(re.search(r"[bu](\d+)$", name)[1]) // 8
        if ".param." in name:
            value = self.value(source.strip("[]"))
            return lambda t: t.registers.__setitem__(target, value(t))
        names, address = self.listed(target), self.address(source)
        is_global = ".global" in name

        def run(t):
            start = address(t)
            assert start % (width * len(names)) == 0, "unaligned load"
            size = width * len(names)
            source = self.memory.at(start, size) if is_global else self.shared[start : start + size]
            raw = source.tobytes()
            words = [
                int.from_bytes(raw[i : i + width], "little") for i in range(0, len(raw), width)
            ]
            t.registers.update(zip(names, words))

        return run

    def _store(self, name, operands):
        address, sources = self.address(operands[0]), self.listed(operands[1])
        values = [self.value(source) for source in sources]
        width = int(re.search(r"b(\d+)$", name)[1]) // 8
        is_global = ".global" in name

        def run(t):
            start, size = address(t), width * len(values)
            assert start % size == 0, "unaligned store"
            raw = b"".join((v(t) & (1 << 8 * width) - 1).to_bytes(width, "little") for v in values)
            if is_global:
                self.memory.at(start, size)[:] = np.frombuffer(raw, np.uint8)
            else:
                self.shared[start : start + size] = np.frombuffer(raw, np.uint8)
                self.written.setdefault(t.index, []).append((start, size))

        return run

    def _stmatrix(self, name, operands):
        assert name == "stmatrix.sync.aligned.m8n8.x4.shared.b16"
        address = self.address(operands[0])
        values = [self.value(source) for source in self.listed(operands[1])]
        key = object()

        def act(threads):
            rows = [address(thread) for thread in threads]
            for index, value in enumerate(values):
                words = np.array([value(thread) for thread in threads], np.uint32)
                for row in range(8):
                    start = rows[index * 8 + row]
                    assert start % 16 == 0, "unaligned row"
                    self.shared[start : start + 16] = words[row * 4 : row * 4 + 4].view(np.uint8)
                    for thread in threads[row * 4 : row * 4 + 4]:
                        self.written.setdefault(thread.index, []).append((start, 16))

        return lambda t: self.meet(t, (key, t.index // 32), 32, act)

    # Copies

    def _fence(self, name, operands):
        assert name == "fence.proxy.async.shared::cta"

        def run(t):
            self.written.pop(t.index, None)

        return run

    def _copy(self, name, operands):
        kind = name.split(".")[2]
        if kind in ("commit_group", "wait_group"):
            return self._groups("copies", kind, operands)
        if kind == "bulk":
            return self._groups("stores", name.split(".")[3], operands)
        dst, src = map(self.address, operands[:2])
        size = int(operands[2])
        given = self.value(operands[3]) if len(operands) > 3 else lambda t: size

        def run(t):
            to, of, read = dst(t), src(t), given(t)
            assert to % size == 0
            assert 0 <= read <= size

            def act():
                self.shared[to : to + size] = 0
                if read:
                    assert of % size == 0
                    self.shared[to : to + read] = self.memory.at(of, read)

            self.later(t.copies[-1], act, "loads")

        return run

    def _groups(self, which, kind, operands):
        if kind == "commit_group":
            return lambda t: getattr(t, which).append([])
        left = int(operands[0])
        return lambda t: self.drain(getattr(t, which), left)

    def _tensor_copy(self, name, operands):
        if ".mbarrier::complete_tx" in name:
            return self._tensor_load(operands)
        token, crd = operands[0].strip("[]").split(",", 1)
        token, crd = self.value(token), [self.value(c) for c in self.listed(crd.strip())]
        source, add = self.address(operands[1]), name.startswith("cp.reduce")

        def run(t):
            tensor, start = self.maps[token(t)], source(t)
            at = [_signed(c(t), 32) for c in crd]
            self.check_fenced(start, tensor.size)
            store = functools.partial(tensor.store, self.shared, start, at, add)
            self.later(t.stores[-1], store, "reads")

        return run

    def _tensor_load(self, operands):
        target, barrier = self.address(operands[0]), self.address(operands[2])
        token, crd = operands[1].strip("[]").split(",", 1)
        token, crd = self.value(token), [self.value(c) for c in self.listed(crd.strip())]

        def run(t):
            tensor = self.maps[token(t)]
            at = [_signed(c(t), 32) for c in crd]
            load = (tensor, target(t), at, barrier(t), tensor.size)
            if self.late == "loads":
                self.loads.append(load)
            else:
                self._complete(load)

        return run
