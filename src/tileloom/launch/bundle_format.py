"""The bundle file: compiled kernels and all that a launch needs, as data that cannot run by itself.

    line 1      tileloom bundle <format> <bytes of the manifest> <SHA-256 of the manifest>
    manifest    JSON: versions, kernels, and for each binary its size and SHA-256
    binaries    cubins one after another, each stored once

Every byte is under a checksum, and every size is known before anything is read: a file that was
cut, lengthened or changed is refused, here or when the binary concerned is read. There are no
names of files, no compression and no code of Python's in it. The checksums are not signatures:
a cubin is a program, so take bundles only from those whose programs you would run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import weakref
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

from tileloom.errors import BundleError, OptionError

FORMAT = 1
"""The format that this tileloom writes, and the only one that it reads."""

_START = re.compile(rb"tileloom bundle (\d{1,9})\b")
_HEADER = re.compile(_START.pattern + rb" (\d{1,9}) ([0-9a-f]{64})\n")
_FORMS = {"arch": re.compile(r"sm_\d{2,3}"), "toolkit": re.compile(r"\d{1,3}(\.\d{1,3})*")}
_MANIFEST_BYTES = 64 * 2**20  # more than any real one: about 100,000 kernels
_REBUILD = "Try: build it again with `tileloom bundle build`."

Constant = None | bool | int | float | str
"""What a compile-time parameter may be: what JSON holds exactly."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel, as one compiled variant of it wants it.

    Attributes:
        name: Its name.
        type: As in `KernelSpec`: ``"*fp32"``, ``"i32"``, ``"constexpr"``,
            ``"tensordesc<bf16[64, 64],...>"``.
        aligned: Whether the value, an address or a number, must be divisible by 16.
        optional: Whether a call may leave it out: it is a compile-time parameter of the function,
            no number or tensor that this variant happens to know.
        value: The only value that a ``"constexpr"`` takes.
        descriptor: How a descriptor's tensor map is encoded, in Triton's words: ``swizzle``,
            ``elem_size``, ``elem_type``, ``block_size``, ``fp4_padded``.
    """

    name: str
    type: str
    aligned: bool = False
    optional: bool = False
    value: Constant = None
    descriptor: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Variant:
    """One compiled variant of a kernel: for one signature, one architecture, one set of options.

    Attributes:
        name: Unique among the variants of an architecture, for example ``"add[bf16]"``.
        function: ``"module:name"`` of the jitted function.
        source: Hash of its source; see `compat.source_hash`.
        key: What a launcher looks for; see `bundle_key.kernel_key`.
        arch: For example ``"sm_90"``.
        target: Instruction set of the binary, for example ``"sm_90a"``.
        ptx_version: PTX version of the binary, for example ``"8.7"``.
        toolkit: CUDA version of the assembler, for example ``"12.8"``.
        triton: Version of the compiler.
        parameters: The function's parameters in order.
        options: Compile options: the chosen config, with the compile-time parameters.
        entry: Name of the function in the binary.
        threads: Threads of a block.
        num_ctas: Blocks of a cluster.
        shared_bytes: Dynamic shared memory of a block.
        registers: Registers of a thread.
        cooperative: Whether the whole grid must be resident.
        pdl: Whether it starts before the kernel ahead of it has ended.
        scratch_bytes: Global memory that each block needs.
        binary: Number of its binary in the bundle.
    """

    name: str
    function: str
    source: str
    key: str
    arch: str
    target: str
    ptx_version: str
    toolkit: str
    triton: str
    parameters: tuple[Parameter, ...]
    options: Mapping[str, Constant]
    entry: str
    threads: int
    num_ctas: int
    shared_bytes: int
    registers: int
    cooperative: bool
    pdl: bool
    scratch_bytes: int
    binary: int

    @property
    def family(self) -> str:
        """The name without its ``[config]``."""
        return self.name.partition("[")[0]

    @property
    def constants(self) -> dict[str, Constant]:
        """Values of the compile-time parameters."""
        return {p.name: p.value for p in self.parameters if p.type == "constexpr"}


def _table(cls: type) -> dict[str, tuple[type, ...]]:
    """Which JSON types each field of a dataclass takes; its own values are checked elsewhere."""
    kinds: dict[str, tuple[type, ...]] = {
        "str": (str,),
        "int": (int,),
        "bool": (bool,),
        "Constant": (type(None), bool, int, float, str),
        "Mapping[str, Any] | None": (type(None), dict),
        "Mapping[str, Constant]": (dict,),
        "tuple[Parameter, ...]": (list,),
    }
    return {name: kinds[kind] for name, kind in cls.__annotations__.items()}


_FIELDS = {cls: _table(cls) for cls in (Parameter, Variant)}
_DESCRIPTOR = {
    "swizzle": int,
    "elem_size": int,
    "elem_type": int,
    "block_size": list,
    "fp4_padded": bool,
}


@dataclass
class BundleFile:
    """A bundle on disk whose manifest has been read and checked; binaries are read when asked for.

    The file stays open, so that one that is put in its place later changes nothing here.

    Attributes:
        path: Where it was found.
        tileloom: Version that built it.
        raw: The manifest's kernels as JSON; `variant` checks one and makes a `Variant` of it.
        winners: Records of tuned kernels as JSON, which `tileloom.tuning` reads.
    """

    path: Path
    tileloom: str
    raw: list[dict[str, Any]]
    winners: list[dict[str, Any]]
    _descriptor: int = field(repr=False)
    _binaries: list[tuple[int, int, str]] = field(repr=False)  # offset, size, SHA-256

    def variant(self, index: int) -> Variant:
        """Return the variant of a number below `len(raw)`.

        Raises:
            BundleError: If the manifest describes it wrongly.
        """
        with _blame(self.path, f"kernel number {index}"):
            data = dict(self.raw[index])
            made = [_make(Parameter, p) for p in data.get("parameters", ())]
            variant = _make(Variant, {**data, "parameters": []}, parameters=tuple(made))
            if not 0 <= variant.binary < len(self._binaries):
                raise ValueError(f"it names binary {variant.binary}, there is none")
            if not (1 <= variant.threads <= 1024 and variant.threads % 32 == 0):
                raise ValueError(f"it has {variant.threads} threads")
            sizes = (variant.shared_bytes, variant.registers, variant.scratch_bytes)
            if not 1 <= variant.num_ctas <= 16 or min(sizes) < 0:
                raise ValueError("a number of it is out of range")
            for name, form in _FORMS.items():
                if not form.fullmatch(text := getattr(variant, name)):
                    raise ValueError(f"its {name} is {text!r}")
            return variant

    def size(self, variant: Variant) -> int:
        """Return the bytes of a variant's binary."""
        return self._binaries[variant.binary][1]

    def binary(self, variant: Variant) -> bytes:
        """Read the binary of a variant.

        Raises:
            BundleError: If it is not what was written.
        """
        offset, size, wanted = self._binaries[variant.binary]
        data = os.pread(self._descriptor, size, offset)
        if hashlib.sha256(data).hexdigest() != wanted:
            _refuse(self.path, f"the binary of '{variant.name}' is not what was written")
        return data


def _refuse(path: Path, why: str) -> NoReturn:
    raise BundleError(f"bundle: '{path}' is damaged: {why}. {_REBUILD}")


@contextlib.contextmanager
def _blame(path: Path, what: str) -> Generator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, BundleError):
            raise
        _refuse(path, f"{what} in its manifest cannot be read ({error})")


def _make(cls: type, data: Any, **more: Any) -> Any:
    """Make a dataclass of JSON: exactly its fields, each of its type."""
    fields = _FIELDS[cls]
    if not isinstance(data, dict) or set(data) != set(fields):
        raise ValueError(f"a {cls.__name__.lower()} has other fields than {', '.join(fields)}")
    for name, kinds in fields.items():
        if type(data[name]) not in kinds:  # isinstance would take a bool for an int
            raise ValueError(f"its {name} is {data[name]!r}")
    if isinstance(shape := data.get("descriptor"), dict):
        if {k: type(v) for k, v in shape.items()} != _DESCRIPTOR:
            raise ValueError(f"the descriptor of {data['name']} is {shape!r}")
        if not shape["block_size"] or any(type(n) is not int for n in shape["block_size"]):
            raise ValueError(f"the descriptor of {data['name']} has no block")
    return cls(**{**data, **more})


def read_bundle(path: Path) -> BundleFile:
    """Open a bundle: read and check its manifest, and that all of its bytes are there.

    Args:
        path: The file.

    Returns:
        The bundle; none of its binaries has been read yet.

    Raises:
        BundleError: If there is no such file, it is no bundle, another format, or damaged.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise BundleError(
            f"bundle: '{path}' cannot be opened: {error.strerror}. Try: the path of a file that "
            "`tileloom bundle build` wrote."
        ) from None
    try:
        made = _read(path, descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    weakref.finalize(made, os.close, descriptor)
    return made


def _read(path: Path, descriptor: int) -> BundleFile:
    try:
        start = os.pread(descriptor, 256, 0)
    except OSError as error:  # a folder can be opened, but not read
        raise BundleError(
            f"bundle: '{path}' cannot be read: {error.strerror}. Try: the path of a file that "
            "`tileloom bundle build` wrote."
        ) from None
    begins = _START.match(start)
    if begins is None:
        raise BundleError(
            f"bundle: '{path}' is no bundle: it does not begin with 'tileloom bundle'. Try: the "
            "path of a file that `tileloom bundle build` wrote."
        )
    if int(begins[1]) != FORMAT:
        raise BundleError(
            f"bundle: '{path}' has format {int(begins[1])}, this tileloom reads format {FORMAT}. "
            "Try: build it again, or use the tileloom that built it."
        )
    header = _HEADER.match(start)
    if header is None:
        _refuse(path, "its first line cannot be read")
    size = int(header[2])
    if size > _MANIFEST_BYTES:
        _refuse(path, f"it claims a manifest of {size} bytes; at most {_MANIFEST_BYTES} are read")
    text = os.pread(descriptor, size, len(header[0]))
    if hashlib.sha256(text).hexdigest().encode() != header[3]:
        _refuse(path, "its manifest is not what was written")
    with _blame(path, "something"):
        manifest = json.loads(text.decode(), parse_constant=_no_such_number)
        binaries: list[tuple[int, int, str]] = []
        offset = len(header[0]) + size
        for length, checksum in manifest["binaries"]:
            if type(length) is not int or length < 0 or type(checksum) is not str:
                raise ValueError(f"a binary of {length!r} bytes")
            binaries.append((offset, length, checksum))
            offset += length
        for kernel in manifest["kernels"]:
            if not all(type(kernel[name]) is str for name in ("name", "key", "arch", "function")):
                raise ValueError("a kernel has no name")
        # Bundles of before there were winners have none.
        winners = manifest.get("winners", [])
        if not all(isinstance(winner, dict) for winner in winners):
            raise ValueError("a winner is no object")
        made = BundleFile(
            path=path,
            tileloom=str(manifest["tileloom"]),
            raw=list(manifest["kernels"]),
            winners=list(winners),
            _descriptor=descriptor,
            _binaries=binaries,
        )
    there = os.fstat(descriptor).st_size
    if there != offset:
        _refuse(path, f"it has {there} bytes, its manifest says {offset}")
    return made


def _no_such_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def write_bundle(
    path: Path,
    variants: Sequence[Variant],
    binaries: Sequence[bytes],
    *,
    tileloom: str,
    winners: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write a bundle. Whoever opens `path` meets the old file or the whole new one.

    The same input gives the same bytes: no date, no path and no random number goes in.

    Args:
        path: The file; its folder must exist.
        variants: What it holds; `Variant.binary` counts in `binaries`.
        binaries: The cubins.
        tileloom: The version that builds it.
        winners: Records of tuned kernels, as plain data.

    Raises:
        OSError: If the file cannot be written; what was at `path` is then untouched.
    """
    manifest = {
        "tileloom": tileloom,
        "kernels": [_plain(variant) for variant in variants],
        "binaries": [[len(data), hashlib.sha256(data).hexdigest()] for data in binaries],
        **({"winners": list(winners)} if winners else {}),
    }
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    digest = hashlib.sha256(text).hexdigest()
    header = f"tileloom bundle {FORMAT} {len(text)} {digest}\n".encode()
    with replacing(path) as file:
        file.writelines((header, text, *binaries))


def _plain(variant: Variant) -> dict[str, Any]:
    parameters = [{n: getattr(p, n) for n in _FIELDS[Parameter]} for p in variant.parameters]
    return {n: getattr(variant, n) for n in _FIELDS[Variant]} | {"parameters": parameters}


def path_of(path: object) -> Path:
    """Read a bundle's path as a caller gives it.

    Raises:
        OptionError: If it is none.
    """
    if not isinstance(path, (str, Path)):
        raise OptionError(
            f"bundle: path is a {type(path).__name__}; it must be the name of a file, a str or a "
            "pathlib.Path. Try: 'my.bundle'."
        )
    return Path(path)


@contextlib.contextmanager
def replacing(path: Path, *, is_synced: bool = True) -> Generator[IO[bytes]]:
    """Write to a new file of its own name beside `path`, and put it in its place at the end.

    Args:
        path: The file.
        is_synced: Whether to wait until the disk has it, which only a machine that loses power
            needs; a process that is killed does not.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.new")
    try:
        with open(new, "xb") as file:
            yield file
            file.flush()
            if is_synced:
                os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
