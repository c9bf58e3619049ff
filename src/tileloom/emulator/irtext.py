"""Reader of the IR text that Triton prints, for releases 3.6 to 3.9.

The printed form is regular: one operation a line, regions indented. Nothing is skipped: a line that
does not fit is an `IRSyntaxError` that names the line of the dump and the user's source line.
"""

from __future__ import annotations

import re

from tileloom.emulator.ir import UNKNOWN, Block, Func, Loc, Module, Op, parse_type, split_top
from tileloom.emulator.report import IRSyntaxError

_LOCATION = re.compile(r"(#loc\d*) = loc\((.*)\)\s*$")
_ALIAS = re.compile(r"#([\w]+) = (.*)$")
_OP = re.compile(r'((?:%[^="]*?) = )?(?:"([a-z_]+\.[\w.]+)"|([a-z_]+\.[\w.]+))(.*)$')
_VALUE = re.compile(r"%[\w.$-]+(?:#\d+)?")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_FUNC = re.compile(r'tt\.func (?:public |private )?@("[^"]*"|[\w.$<>-]+)\(')


def _strip_locations(line: str) -> tuple[str, str | None]:
    """Remove every balanced ``loc(...)``; return the text and the last location."""
    kept: list[str] = []
    last = None
    at = 0
    while (start := line.find(" loc(", at)) >= 0:
        kept.append(line[at:start])
        end = _matching(line, start + 4)
        last = line[start + 5 : end]
        at = end + 1
    kept.append(line[at:])
    return "".join(kept).rstrip(), last


def _matching(text: str, start: int) -> int:
    """Return the index of the bracket that closes the one at `start`, outside strings."""
    depth = 0
    quoted = False
    for i in range(start, len(text)):
        char = text[i]
        if char == '"' and text[i - 1] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif char in "<([{":
            depth += 1
        elif char in ")]}" or (char == ">" and text[i - 1] != "-"):
            depth -= 1
            if depth == 0:
                return i
    raise ValueError(f"no bracket closes {text[start:]!r}")


def _find_top(text: str, needle: str) -> int:
    """Return where `needle` first stands outside brackets and strings, or -1."""
    depth = 0
    quoted = False
    for i, char in enumerate(text):
        if char == '"' and text[i - 1 : i] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif depth == 0 and text.startswith(needle, i):
            return i
        elif char in "<([{":
            depth += 1
        elif char in ")]}" or (char == ">" and text[i - 1] != "-"):
            depth -= 1
    return -1


def parse_dict(body: str) -> dict[str, str]:
    """Read the inside of an attribute dictionary."""
    found: dict[str, str] = {}
    for item in split_top(body):
        key, _, value = item.partition(" = ")
        found[key.strip().strip('"')] = value.strip()
    return found


def unescape(text: str) -> str:
    r"""Undo MLIR's escapes in a printed string (``\0A`` is a line end)."""
    return re.sub(
        r"\\([0-9A-Fa-f]{2})|\\(.)",
        lambda m: (
            chr(int(m.group(1), 16)) if m.group(1) else {"n": "\n", "t": "\t"}.get(m[2], m[2])
        ),
        text,
    )


class Reader:
    """Reads one module. Use `read_module`."""

    def __init__(self, text: str) -> None:
        self._definitions: dict[str, str] = {}
        self._cache: dict[str, Loc] = {}
        self._aliases: dict[str, str] = {}
        self._lines: list[tuple[str, str | None, int]] = []
        self._scopes: list[dict[str, int]] = [{}]
        self._slots = 1
        self._at = 0
        for number, line in enumerate(text.split("\n"), 1):
            if match := _LOCATION.match(line):
                self._definitions[match.group(1)] = match.group(2)
            elif match := _ALIAS.match(line):
                self._aliases[match.group(1)] = match.group(2)
            elif line.strip():
                body, loc = _strip_locations(line.strip())
                self._lines.append((body, loc, number))

    def read(self) -> Module:
        """Read the module."""
        head = self._lines[0][0]
        attrs = {}
        if "attributes {" in head:
            start = head.index("attributes {") + 11
            attrs = parse_dict(head[start + 1 : _matching(head, start)])
        funcs: dict[str, Func] = {}
        self._at = 1
        while self._at < len(self._lines):
            body = self._lines[self._at][0]
            if body.startswith("tt.func"):
                func = self._func()
                funcs[func.name] = func
            elif body in ("}", "{-#", "#-}"):
                self._at += 1
            else:
                self._fail("a module may hold functions only")
        kernel = next((f for f in funcs.values() if f.loc.col == -1), None)
        if kernel is not None:
            funcs = {kernel.name: kernel, **{n: f for n, f in funcs.items() if f is not kernel}}
        return Module(attrs, funcs, self._aliases)

    def _fail(self, why: str) -> None:
        body, loc, number = self._lines[self._at]
        raise IRSyntaxError(f"line {number} of the IR: {why}: {body[:160]}", self._loc(loc))

    # ---- locations
    def _loc(self, text: str | None) -> Loc:
        if text is None:
            return UNKNOWN
        found = self._cache.get(text)
        if found is None:
            found = self._cache[text] = self._parse_loc(text.strip())
        return found

    def _parse_loc(self, text: str) -> Loc:
        if text in self._definitions:
            return self._loc(self._definitions[text])
        if match := re.match(r"loc\((.*)\)$", text):
            return self._loc(match.group(1))
        if match := re.match(r'"([^"]*)":(\d+):(\d+)', text):
            return Loc(match.group(1), int(match.group(2)), int(match.group(3)))
        if match := re.match(r'"([^"]*)"\((.*)\)$', text):
            inner = self._loc(match.group(2))
            return Loc(inner.file, inner.line, inner.col, match.group(1), inner.caller)
        if match := re.match(r"callsite\((.*) at ([^ ]*)\)$", text):
            callee, caller = self._loc(match.group(1)), self._loc(match.group(2))
            if callee.line == 0:
                return caller
            outer = Loc(callee.file, callee.line, callee.col, callee.name, caller)
            return outer
        if match := re.match(r"fused(?:<.*?>)?\[(.*)\]$", text):
            return self._loc(split_top(match.group(1))[0])
        return UNKNOWN

    # ---- values
    def _define(self, name: str) -> int:
        slot = self._slots
        self._slots += 1
        self._scopes[-1][name] = slot
        return slot

    def _use(self, name: str) -> int:
        slot = self._scopes[-1].get(name)
        if slot is None:
            self._at -= 1
            self._fail(f"value {name} is not defined before this line")
        return slot  # pyright: ignore[reportReturnType]

    def _func(self) -> Func:
        body, loc, _ = self._lines[self._at]
        match = _FUNC.match(body)
        if match is None:
            self._fail("cannot read this function's head")
            raise AssertionError("unreachable")
        self._scopes, self._slots = [{}], 1
        args, types = [], []
        opening = match.end() - 1
        for argument in split_top(body[opening + 1 : _matching(body, opening)]):
            name, _, text = argument.partition(": ")
            args.append(self._define(name))
            brace = _find_top(text, " {")
            types.append(parse_type(text if brace < 0 else text[:brace]))
        self._at += 1
        blocks = self._blocks([])
        self._at += 1
        place = self._loc(loc)
        if body.startswith("tt.func public"):
            place = Loc(place.file, place.line, -1)
        return Func(match.group(1).strip('"'), args, types, blocks, self._slots, place)

    def _blocks(self, args: list[int]) -> list[Block]:
        """Read blocks up to the line that closes their region; that line is left unread."""
        current = Block(args, [])
        blocks = [current]
        while True:
            body = self._lines[self._at][0]
            if body[0] == "}":
                return blocks
            if body[0] == "^":
                match = re.match(r"\^(\w+)(?:\((.*)\))?:", body)
                if match is None:
                    self._fail("cannot read this block's head")
                    raise AssertionError("unreachable")
                names = [a.split(":")[0].strip() for a in split_top(match.group(2) or "")]
                new = [self._define(name) for name in names]
                if not current.ops and len(blocks) == 1 and not current.args:
                    current.args, current.label = new, match.group(1)
                else:
                    current = Block(new, [], match.group(1))
                    blocks.append(current)
                self._at += 1
                continue
            current.ops.append(self._op())

    def _op(self) -> Op:
        body, loc, _ = self._lines[self._at]
        match = _OP.match(body)
        if match is None:
            self._fail("cannot read this operation")
            raise AssertionError("unreachable")
        self._at += 1
        names: list[str] = []
        for result in (match.group(1) or "")[:-3].split(","):
            result = result.strip()
            if ":" in result:
                base, count = result.split(":")
                names += [f"{base}#{i}" for i in range(int(count))]
            elif result:
                names.append(result)
        op = Op(match.group(2) or match.group(3), loc=self._loc(loc))
        rest = match.group(4).strip()
        op.text = rest
        special = getattr(self, "_read_" + op.name.replace(".", "_"), None)
        if special is not None:
            special(op, rest)
        elif rest.endswith("({"):
            self._generic_regions(op, rest)
        else:
            self._plain(op, rest)
        op.results = [self._define(name) for name in names]
        return op

    def _close(self, op: Op) -> str:
        body, loc, _ = self._lines[self._at]
        if loc is not None:
            op.loc = self._loc(loc)
        self._at += 1
        return body

    def _plain(self, op: Op, rest: str) -> None:
        colon = _find_top(rest, " : ")
        if colon < 0 and rest.startswith(": "):
            colon = 0
        head = rest if colon < 0 else rest[:colon]
        arrow = _find_top(rest, " -> ") if colon < 0 else -1
        if arrow >= 0:  # an operation without operands may print only "-> type"
            op.signature = "()" + rest[arrow:]
            self._take_head(op, rest[:arrow])
            return
        op.signature = "" if colon < 0 else rest[colon:].lstrip(" :").strip()
        self._take_head(op, head)

    def _take_head(self, op: Op, head: str) -> None:
        """Take apart what stands before the types: operands, lists, attributes, words."""
        left: list[str] = []
        i = 0
        while i < len(head):
            char = head[i]
            if char == '"':
                match = _STRING.match(head, i)
                if match is None:
                    self._at -= 1
                    self._fail("a string is not closed")
                    raise AssertionError("unreachable")
                op.strings.append(unescape(match.group(1)))
                i = match.end()
            elif char == "{" or head.startswith("<{", i):
                end = _matching(head, i)
                inner = head[i + 1 : end] if char == "{" else head[i + 2 : end - 1]
                op.attrs.update(parse_dict(inner))
                i = end + 1
            elif char == "%":
                match = _VALUE.match(head, i)
                assert match is not None, "a value starts with a percent sign"
                op.operands.append(self._use(match.group(0)))
                i = match.end()
            elif char in "[(":
                end = _matching(head, i)
                inner = split_top(head[i + 1 : end])
                values = [x for x in inner if x[0] == "%"]
                op.operands += [self._use(x) for x in values]
                op.groups.append(len(values))
                left += [x for x in inner if x[0] != "%"]
                i = end + 1
            elif char in " ,":
                i += 1
            else:
                end = i
                while end < len(head) and head[end] not in ' ,[({"':
                    end = _matching(head, end) + 1 if head[end] == "<" else end + 1
                left.append(head[i:end] if end > i else head[i])
                i = max(end, i + 1)
        while "=" in left:
            at = left.index("=")
            # Where a list of operands stands behind it, nothing is left here.
            op.attrs[left[at - 1]] = left[at + 1] if at + 1 < len(left) else ""
            del left[at - 1 : at + 2]
        op.words = left

    def _generic_regions(self, op: Op, rest: str) -> None:
        self._take_head(op, rest[:-2].rstrip())
        op.regions.append(self._blocks([]))
        line = self._close(op)
        while line.startswith("}, {"):
            op.regions.append(self._blocks([]))
            line = self._close(op)
        tail = line.partition(")")[2].strip()
        if tail.startswith("{"):
            end = _matching(tail, 0)
            op.attrs.update(parse_dict(tail[1:end]))
            tail = tail[end + 1 :].strip()
        op.signature = tail.removeprefix(":").strip()

    # ---- operations with a syntax of their own
    def _read_arith_constant(self, op: Op, rest: str) -> None:
        if rest.startswith("{"):
            end = _matching(rest, 0)
            op.attrs.update(parse_dict(rest[1:end]))
            rest = rest[end + 1 :].strip()
        colon = _find_top(rest, " : ")
        op.words = [rest if colon < 0 else rest[:colon]]
        op.signature = "i1" if colon < 0 else rest[colon + 3 :]

    def _read_scf_for(self, op: Op, rest: str) -> None:
        match = re.match(r"(unsigned )?(%\S+) = (%\S+) to (%\S+) step (%\S+)(.*)\{$", rest)
        if match is None:
            self._fail("cannot read this loop's head")
            raise AssertionError("unreachable")
        op.words = ["unsigned"] if match.group(1) else []
        op.operands = [self._use(x) for x in match.group(3, 4, 5)]
        pairs = self._assignments(match.group(6), "iter_args")
        op.operands += [self._use(value) for _, value in pairs]
        args = [self._define(match.group(2))] + [self._define(name) for name, _ in pairs]
        op.regions = [self._blocks(args)]
        tail = self._close(op)
        if " attributes {" in tail or tail.startswith("} {"):
            op.attrs.update(parse_dict(tail[tail.index("{") + 1 : tail.rindex("}")]))

    def _assignments(self, text: str, word: str) -> list[tuple[str, str]]:
        start = text.find(word + "(")
        if start < 0:
            return []
        start += len(word)
        inner = text[start + 1 : _matching(text, start)]
        pairs = [x.partition(" = ") for x in split_top(inner)]
        return [(name, value) for name, _, value in pairs]

    def _read_scf_while(self, op: Op, rest: str) -> None:
        pairs: list[tuple[str, str]] = []
        if rest.startswith("(") and " = " in rest:
            pairs = self._assignments("args" + rest, "args")
        op.operands = [self._use(value) for _, value in pairs]
        op.regions = [self._blocks([self._define(name) for name, _ in pairs])]
        self._at += 1
        op.regions.append(self._blocks([]))
        tail = self._close(op)
        if " attributes {" in tail:
            op.attrs.update(parse_dict(tail[tail.index("{") + 1 : tail.rindex("}")]))

    def _read_scf_if(self, op: Op, rest: str) -> None:
        op.operands = [self._use(rest.split()[0])]
        op.regions = [self._blocks([])]
        if self._lines[self._at][0].startswith("} else {"):
            self._at += 1
            op.regions.append(self._blocks([]))
        tail = self._close(op)
        if tail.startswith("} {"):
            op.attrs.update(parse_dict(tail[3:-1]))

    def _read_ttg_warp_specialize(self, op: Op, rest: str) -> None:
        end = _matching(rest, 0)
        op.operands = [self._use(x) for x in split_top(rest[1:end])]
        tail = rest[end + 1 :].strip()
        if tail.startswith("attributes {"):
            op.attrs.update(parse_dict(tail[12:-1]))
        self._at += 1
        op.regions = [self._blocks([])]
        self._close(op)
        while (line := self._lines[self._at][0]).startswith("partition"):
            match = re.match(r"partition\d+\((.*)\) num_warps\((\d+)\) \{$", line)
            if match is None:
                self._fail("cannot read this partition's head")
                raise AssertionError("unreachable")
            self._scopes.append({})
            args = [self._define(a.split(":")[0].strip()) for a in split_top(match.group(1))]
            self._at += 1
            op.regions.append(self._blocks(args))
            op.partition_warps.append(int(match.group(2)))
            self._scopes.pop()
            self._close(op)

    def _read_tt_print(self, op: Op, rest: str) -> None:
        # The values stand behind the first colon: tt.print " x: " {hex = false} : %0 : f32
        colon = _find_top(rest, " : ")
        self._take_head(op, rest if colon < 0 else rest[:colon])
        if colon >= 0:
            values, _, op.signature = rest[colon + 3 :].partition(" : ")
            op.operands += [self._use(x) for x in split_top(values)]

    def _read_cf_br(self, op: Op, rest: str) -> None:
        op.successors = [self._successor(rest)]

    def _read_cf_cond_br(self, op: Op, rest: str) -> None:
        parts = split_top(rest)
        op.operands = [self._use(parts[0])]
        op.successors = [self._successor(part) for part in parts[1:3]]

    def _successor(self, text: str) -> tuple[str, list[int]]:
        match = re.match(r"\^(\w+)(?:\((.*)\))?", text.strip())
        if match is None:
            self._at -= 1
            self._fail("cannot read this branch")
            raise AssertionError("unreachable")
        values = (match.group(2) or "").split(" : ")[0]
        return match.group(1), [self._use(x) for x in split_top(values)]


def read_module(text: str) -> Module:
    """Read the text of a TTIR or TTGIR module.

    Args:
        text: As Triton prints it, with locations.

    Returns:
        The module; the public function first.

    Raises:
        IRSyntaxError: If a line does not have a form that is known.
    """
    return Reader(text).read()
