"""The PTX machine for kernels that TileLang generates: what they use beyond our own examples.

Grids of three dimensions, boxes of any rank with the swizzles of 64 and 128 bytes, wgmma of any
width with B in either order, ldmatrix and mma, shuffles that cross, elections.
"""

from __future__ import annotations

import re

import numpy as np

from tests.cpasync import ptx_ops
from tests.cpasync.ptx_machine import BLOCKED, Machine
from tests.cpasync.ptx_ops import bits


def swizzled(at, span):
    """Addresses under a swizzle of `span` bytes."""
    lines = {0: 0, 32: 1, 64: 3, 128: 7}[span]
    return at ^ ((at >> 7 & lines) << 4)


class Box(ptx_ops.TensorMap):
    """A TMA descriptor: a tensor of any rank, and a box in the tensor's order.

    Args:
        tensor: A NumPy array.
        box: Sizes of a box.
        span: Bytes of the swizzle, or 0.
    """

    def __init__(self, tensor, box, span):
        self.tensor, self.box, self.span = tensor, tuple(box), span
        self.size = int(np.prod(box)) * tensor.itemsize

    def _part(self, crd):
        corner = crd[::-1]
        ends = [min(c + n, m) for c, n, m in zip(corner, self.box, self.tensor.shape)]
        inside = tuple(slice(max(c, 0), max(e, c, 0)) for c, e in zip(corner, ends))
        return inside, tuple(slice(s.start - c, s.stop - c) for s, c in zip(inside, corner))

    def _places(self, start):
        assert start % (8 * self.span or 16) == 0, "a box that is not aligned to its swizzle"
        return swizzled(start + np.arange(self.size), self.span)

    def load(self, shared, start, crd):
        box = np.zeros(self.box, self.tensor.dtype)
        inside, part = self._part(crd)
        box[part] = self.tensor[inside]
        shared[self._places(start)] = box.reshape(-1).view(np.uint8)

    def store(self, shared, start, crd, add):
        raw = np.ascontiguousarray(shared[self._places(start)])
        box = raw.view(self.tensor.dtype).reshape(self.box)
        inside, part = self._part(crd)
        self.tensor[inside] = self.tensor[inside] + box[part] if add else box[part]


def halves(words):
    """Words of 32 bits as pairs of float16, in float32."""
    return np.array(words, np.uint32).view(np.float16).astype(np.float32)


class TileLangMachine(Machine):
    """One block of a kernel that TileLang generated; `block` is its index along x, y and z.

    TileLang lets the thread that stores fence, after a barrier with those that wrote: a fence along
    the way is enough for PTX's memory model, so it counts here for what its thread has learnt of.
    """

    def __init__(self, *arguments):
        self.learnt: dict[int, list[dict[int, list[tuple[int, int]]]]] = {}
        super().__init__(*arguments)

    def compiled(self, name, operands):
        for prefix, make in (
            ("elect.sync", self._elect),
            ("shfl.sync.bfly", self._cross),
            ("barrier.sync", self._bar),
            ("ldmatrix.", self._ldmatrix),
            ("mma.sync.aligned.m16n8k16", self._mma),
            ("cvt.rn.f16.f32", self._half),
            ("add.f32", self._add),
        ):
            if name.startswith(prefix):
                return make(name, operands)
        return super().compiled(name, operands)

    def value(self, text):
        if match := re.fullmatch(r"%ctaid\.([xyz])", text):
            number = self.block["xyz".index(match[1])]
            return lambda t: number
        return super().value(text)

    def _bar(self, name, operands):
        ident = self.value(operands[0])
        count = self.value(operands[1]) if len(operands) > 1 else lambda t: self.threads_of

        def act(threads):
            seen = {t.index: list(self.written.get(t.index, ())) for t in threads}
            for thread in threads:
                self.learnt.setdefault(thread.index, []).append(seen)

        return lambda t: self.meet(t, ("bar", ident(t)), count(t), act)

    def _fence(self, name, operands):
        own = super()._fence(name, operands)

        def run(t):
            own(t)
            for seen in self.learnt.pop(t.index, ()):
                for writer, writes in seen.items():
                    fenced = set(map(id, writes))
                    kept = [w for w in self.written.get(writer, ()) if id(w) not in fenced]
                    self.written[writer] = kept

        return run

    def _elect(self, name, operands):
        predicate = operands[0].partition("|")[2]
        return lambda t: t.registers.__setitem__(predicate, t.index % 32 == 0)

    def _warp(self, act):
        key = object()
        return lambda t: self.meet(t, (key, t.index // 32), 32, act)

    def _cross(self, name, operands):
        target, source, mask = operands[0], self.value(operands[1]), int(operands[2])

        def act(threads):
            words = [source(thread) for thread in threads]
            for lane, thread in enumerate(threads):
                thread.registers[target] = words[lane ^ mask]

        return self._warp(act)

    def _half(self, name, operands):
        target, source = operands[0], self.value(operands[1])

        def run(t):
            number = np.array([source(t)], np.uint32).view(np.float32).astype(np.float16)
            t.registers[target] = int(number.view(np.uint16)[0])

        return run

    def _add(self, name, operands):
        target, a, b = operands[0], *map(self.value, operands[1:])

        def run(t):
            pair = np.array([a(t), b(t)], np.uint32).view(np.float32)
            t.registers[target] = int(np.float32(pair[0] + pair[1]).view(np.uint32))

        return run

    def mbarrier(self, name, operands):
        if name.startswith("mbarrier.expect_tx"):
            address, size = self.address(operands[0]), self.value(operands[1])
            return lambda t: self.barriers[address(t)].update(transactions=size(t))
        if name.startswith("mbarrier.try_wait"):  # hardware looks at the lowest bit of the parity
            address, target, parity = (
                self.address(operands[1]),
                operands[0],
                self.value(operands[2]),
            )

            def wait(t):
                if self.barriers[address(t)].phase & 1 == parity(t) & 1:
                    return BLOCKED
                t.registers[target] = True
                return None

            return wait
        return super().mbarrier(name, operands)

    # ---- matrices
    def _ldmatrix(self, name, operands):
        names, address = self.listed(operands[0]), self.address(operands[1])
        turned = ".trans." in name

        def act(threads):
            rows = [address(thread) for thread in threads]
            for index, register in enumerate(names):
                raw = np.stack([self.shared[r : r + 16] for r in rows[8 * index : 8 * index + 8]])
                matrix = raw.view(np.uint16)
                matrix = np.ascontiguousarray(matrix.T if turned else matrix)
                words = matrix.view(np.uint32).reshape(-1).tolist()
                for thread, word in zip(threads, words):
                    thread.registers[register] = word

        return self._warp(act)

    def _mma(self, name, operands):
        a, b, c = ([self.value(r) for r in self.listed(o)] for o in operands[1:4])
        names = self.listed(operands[0])
        lane = np.arange(32)
        row, column = lane // 4, lane % 4 * 2

        def gathered(threads, registers):
            return [halves([r(t) for t in threads]).reshape(32, 2) for r in registers]

        def act(threads):
            left, right = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32)
            for i, pair in enumerate(gathered(threads, a)):
                for j in range(2):
                    left[row + i % 2 * 8, column + i // 2 * 8 + j] = pair[:, j]
            for i, pair in enumerate(gathered(threads, b)):
                for j in range(2):
                    right[column + i * 8 + j, row] = pair[:, j]
            sums = left @ right
            for i, (register, old) in enumerate(zip(names, c)):
                before = np.array([old(t) for t in threads], np.uint32).view(np.float32)
                added = before + sums[row + i // 2 * 8, column + i % 2]
                words = added.astype(np.float32).view(np.uint32).tolist()
                for thread, word in zip(threads, words):
                    thread.registers[register] = word

        return self._warp(act)

    def wgmma(self, name, operands):
        if "mma_async" not in name:
            return super().wgmma(name, operands)
        key, names = object(), self.listed(operands[0])
        sources = [self.value(o) for o in operands[1:4]]
        width, b_turned = int(re.search(r"m64n(\d+)k16", name)[1]), operands[7] == "1"
        assert operands[4:7] == ["1", "1", "0"], "only A rows by K, and no negation"

        def act(threads):
            groups = self.products.setdefault(threads[0].index // 128, [[]])
            a, b, accumulate = (source(threads[0]) for source in sources)

            def product():
                left = self._matrix(a, 64, turned=False)
                self._accumulate(
                    threads, names, left @ self._matrix(b, width, b_turned).T, accumulate
                )

            self.later(groups[-1], product, "reads")

        return lambda t: self.meet(t, (key, t.index // 128), 128, act)

    def _accumulate(self, threads, names, sums, accumulate):
        lane, value = np.arange(128)[:, None], np.arange(len(names))[None, :]
        row = lane // 32 * 16 + lane % 32 // 4 + value // 2 % 2 * 8
        added = sums[row, value // 4 * 8 + lane % 4 * 2 + value % 2]
        if accumulate:
            old = [[thread.registers[name] for name in names] for thread in threads]
            added = added + np.array(old, np.uint32).view(np.float32)
        for thread, values in zip(threads, added.astype(np.float32).view(np.uint32).tolist()):
            thread.registers.update(zip(names, values))

    def _matrix(self, descriptor, rows, turned):
        """`[rows, 16]` of an operand; turned, its rows lie contiguous and not its 16 columns."""
        span = {1: 128, 2: 64, 3: 32}[bits(descriptor, 62, 2)]
        start, leading, stride = (bits(descriptor, at, 14) << 4 for at in (0, 16, 32))
        row, k = np.arange(rows)[:, None], np.arange(16)[None, :]
        if turned:
            wide = span // 2
            at = row // wide * leading + k // 8 * stride + k % 8 * span + row % wide * 2
        else:
            at = row // 8 * stride + row % 8 * span + k * 2
        at = swizzled(start + at, span)
        raw = np.stack([self.shared[at], self.shared[at + 1]], -1)
        return raw.reshape(rows, 32).view(np.float16).astype(np.float32)
