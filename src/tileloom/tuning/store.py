"""Winners on disk: one JSON file for each kernel on each machine, under ``cache.dir``.

A file is replaced as a whole and carries a checksum, so that a reader meets the old record or the
new one, whenever a writer is killed. A file that is not what was written is said, moved aside and
measured anew. Processes that need the same record wait for the one that measures it: its lock
is the operating system's and goes with it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tileloom import knobs, log
from tileloom.errors import OptionError, shown_value
from tileloom.launch.bundle_format import replacing
from tileloom.tuning.config import Config
from tileloom.tuning.identity import Platform, key_of

KIND = "tileloom-tuning"
SCHEMA = 1
OPERATOR = "operator"
"""The stages of a record of an operator's call; see `of_operators`."""

_log = log.get_logger("tuning")
_SAY_AFTER_S = 5.0
_LOOK_EVERY_S = 0.02
_LEFT_AFTER_S = 60.0
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class CacheWarning(UserWarning):
    """Something is wrong with the store of winners; the text says what is done instead."""


@dataclass(frozen=True)
class Candidate:
    """What is known of one config.

    Attributes:
        config: The config, as `Config.to_dict` gives it.
        ms: Its time on the device in ms, the median of its samples; None if it did not run.
        ratio: That time over the winner's, paired within rounds; None if it did not run.
        reason: Why it was not timed to the end; empty if it was.
        registers: 32-bit registers of a thread, None if unknown.
        spills: Registers of a thread that lie in memory, None if unknown.
        shared_bytes: Shared memory of a block, None if unknown.
    """

    config: Mapping[str, Any]
    ms: float | None = None
    ratio: float | None = None
    reason: str = ""
    registers: int | None = None
    spills: int | None = None
    shared_bytes: int | None = None


@dataclass(frozen=True)
class Record:
    """The winner for a problem on a machine, and how it was found.

    Attributes:
        problem: The kernel as it is compiled; `Problem.as_json`.
        platform: What it was measured on.
        winner: The winner's config, as `Config.to_dict` gives it.
        found_by: The stage that found it: ``"list"``, ``"scaled"``, ``"search"``, ``"descent"``.
        candidates: Every config that was tried, in the order of the list.
        measured: How: date, seconds, rounds, clock.
        file: The file of generated code that holds the kernel, empty for other kernels.
    """

    problem: Mapping[str, Any]
    platform: Platform
    winner: Mapping[str, Any]
    found_by: str
    candidates: Sequence[Candidate]
    measured: Mapping[str, Any] = field(default_factory=dict)
    file: str = ""

    @property
    def key(self) -> str:
        """Its name in the store."""
        return key_of(self.problem, asdict(self.platform))

    @property
    def config(self) -> Config:
        """The winner."""
        return Config.from_dict(self.winner)

    def known(self) -> dict[Config, Candidate]:
        """Return what is known, by config."""
        return {Config.from_dict(one.config): one for one in self.candidates}

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return json.loads(json.dumps(asdict(self), allow_nan=False))

    @classmethod
    def from_json(cls, data: Any) -> Record:
        """Make a record of plain data.

        Raises:
            KeyError, TypeError, ValueError: If it is no record.
        """
        fields = dict(data)
        platform = Platform(**fields.pop("platform"))
        candidates = tuple(Candidate(**one) for one in fields.pop("candidates"))
        made = cls(**fields, platform=platform, candidates=candidates)
        for one in (made, platform, *candidates):
            _check_types(one)
        made.known()  # so that a config that is none is found here
        _ = made.config
        for name, types in (("kernel", str), ("size_hints", (dict, type(None)))):
            if not isinstance(made.problem[name], types):
                raise TypeError(f"{name} is {shown_value(made.problem[name])}")
        return made


_COUNT = (int, type(None))
_NUMBER = (float, *_COUNT)
_TYPES: dict[type, dict[str, Any]] = {
    Record: {"problem": dict, "winner": dict, "found_by": str, "measured": dict, "file": str},
    Platform: dict.fromkeys(("gpu", "driver", "triton", "assembler"), str),
    Candidate: {
        "config": dict, "ms": _NUMBER, "ratio": _NUMBER, "reason": str, "registers": _COUNT,
        "spills": _COUNT, "shared_bytes": _COUNT,
    },
}  # fmt: skip


def _check_types(one: Record | Platform | Candidate) -> None:
    """Refuse what nobody wrote: a checksum does not tell who made it."""
    for name, types in _TYPES[type(one)].items():
        value = getattr(one, name)
        if not isinstance(value, types) or isinstance(value, bool):
            raise TypeError(f"{name} is {shown_value(value)}")


def _checksum(record: Mapping[str, Any]) -> str:
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _no_such_number(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def read_record(path: Path) -> Record:
    """Read a record's file.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is not what was written; the text says why.
    """
    text = path.read_bytes()
    if not text:
        raise ValueError("it is empty")
    try:
        content = json.loads(text, parse_constant=_no_such_number)
        if content["kind"] != KIND or content["schema"] != SCHEMA:
            raise ValueError(f"it is of kind {content['kind']!r}, schema {content['schema']!r}")
        if _checksum(content["record"]) != content["sha256"]:
            raise ValueError("its checksum is another")
        record = Record.from_json(content["record"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(str(error) or type(error).__name__) from None
    if not path.stem.endswith(record.key[:_KEY_LETTERS]):
        raise ValueError("its name belongs to another record")
    return record


_KEY_LETTERS = 32


class Store:
    """Records of winners in a folder.

    Attributes:
        folder: Where they lie; it need not exist. By default ``tuning/v1`` under ``cache.dir``.
    """

    def __init__(self, folder: Path | None = None) -> None:
        given: object = folder
        if given is not None and not isinstance(given, Path):
            raise OptionError(
                f"Store: folder is {given!r:.80}; it must be a pathlib.Path, or None for that of "
                "the knob cache.dir. Try: Path('winners')."
            )
        self.folder = folder or Path(knobs.get("cache.dir")) / "tuning" / f"v{SCHEMA}"
        self._is_written = True

    def path(self, problem: Mapping[str, Any], platform: Platform) -> Path:
        """Return where the record of a problem on a machine lies, or would."""
        name = re.sub(r"\W", "_", str(problem["kernel"]).rpartition(":")[2])[:80]
        key = key_of(problem, asdict(platform))
        return self.folder / f"{name}-{key[:_KEY_LETTERS]}.json"

    def find(self, problem: Mapping[str, Any], platform: Platform) -> Record | None:
        """Look a record up.

        Args:
            problem: What `Problem.as_json` returned.
            platform: The machine.

        Returns:
            The record; None if there is none. A file that is not what was written is moved aside,
            with a `CacheWarning`.
        """
        path = self.path(problem, platform)
        try:
            return read_record(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            _warn(f"tuning: '{path}' cannot be read: {error.strerror}; the kernel is tuned anew.")
        except ValueError as error:
            _set_aside(path, str(error))
        return None

    def save(self, record: Record) -> bool:
        """Write a record, whole or not at all.

        Returns:
            False if the folder cannot be written, which is said once, with a `CacheWarning`.
        """
        path = self.path(record.problem, record.platform)
        plain = record.as_json()
        content = {"kind": KIND, "schema": SCHEMA, "sha256": _checksum(plain), "record": plain}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # What a loss of power leaves of it is found damaged, and the kernel tuned anew.
            with replacing(path, is_synced=False) as file:
                file.write(json.dumps(content, indent=1).encode() + b"\n")
        except OSError as error:
            self._cannot_write(error)
            return False
        return True

    def find_or_make(
        self,
        problem: Mapping[str, Any],
        platform: Platform,
        is_enough: Callable[[Record], bool],
        make: Callable[[Record | None], Record],
    ) -> Record:
        """Look a record up, and have it made where there is none, by one process at a time.

        Args:
            problem: What `Problem.as_json` returned.
            platform: The machine.
            is_enough: Whether a record answers what is asked.
            make: Makes a record; it is given the one that is not enough, or None.

        Returns:
            The record that is in the store now. Whoever comes while another process makes it waits
            and takes that one's.
        """
        found = self.find(problem, platform)
        if found is not None and is_enough(found):
            return found
        with self._locked(self.path(problem, platform)):
            found = self.find(problem, platform)
            if found is not None and is_enough(found):
                return found
            made = make(found)
            self.save(made)
            return made

    def files(self) -> list[Path]:
        """Return the files of records, those that cannot be read included, by name."""
        return sorted(self.folder.glob("*.json"))

    def leavings(self) -> list[Path]:
        """Return files that writers left behind when they were killed, and what was set aside."""
        half = [path for path in self.folder.glob(".*.new") if _is_left(path)]
        return sorted([*half, *self.folder.glob("*.corrupt-*")])

    def remove(self, path: Path) -> None:
        """Remove a file of the store, and its lock where nobody holds it."""
        path.unlink(missing_ok=True)
        lock = path.with_suffix(".lock")
        with contextlib.suppress(OSError), open(lock, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _locked(self, path: Path) -> Generator[None]:
        """Be the only process in here for a record; without locks, be one of them, and say so."""
        lock = path.with_suffix(".lock")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = _take(lock)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                _warn(
                    f"tuning: '{lock}' cannot be locked: {error.strerror}; processes that need "
                    "its kernel at once each tune it. Try: TILELOOM_CACHE_DIR, with a local folder."
                )
            else:
                self._cannot_write(error)
            yield
            return
        try:
            yield
        finally:
            os.close(descriptor)

    def _cannot_write(self, error: OSError) -> None:
        if self._is_written:
            self._is_written = False
            _warn(
                f"tuning: winners cannot be kept in '{self.folder}': {error.strerror}; every "
                "process tunes for itself. Try: TILELOOM_CACHE_DIR, with a folder that can be "
                "written."
            )


def _take(lock: Path) -> int:
    """Wait for a lock, and return the open file that holds it."""
    began, is_said = time.monotonic(), False
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not is_said and time.monotonic() - began > _SAY_AFTER_S:
                        is_said = True
                        holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
                        _log.warning("waiting for process %s, which tunes %s", holder, lock.stem)
                    time.sleep(_LOOK_EVERY_S)
            # Whoever clears the store may have removed the file between the two steps.
            if _is_same(descriptor, lock):
                os.pwrite(descriptor, str(os.getpid()).encode().ljust(20), 0)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    mine = os.fstat(descriptor)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


def _is_left(path: Path) -> bool:
    """Whether nobody writes a file any more: a write takes milliseconds."""
    with contextlib.suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime > _LEFT_AFTER_S
    return False


def _set_aside(path: Path, why: str) -> None:
    aside = path.with_name(f"{path.name}.corrupt-{time.time_ns():x}")
    try:
        path.replace(aside)
    except FileNotFoundError:  # another process was faster
        return
    except OSError as error:
        _warn(
            f"tuning: '{path}' is damaged ({why}), and cannot be moved aside: {error.strerror}; "
            "the kernel is tuned anew."
        )
        return
    _warn(
        f"tuning: '{path}' is damaged: {why}. It now lies at '{aside.name}', and the kernel is "
        "tuned anew."
    )


def _warn(text: str) -> None:
    _log.warning("%s", text)
    log.warn(text, CacheWarning)


def readable(store: Store) -> Iterator[tuple[Path, Record | None, str]]:
    """Go through a store without changing it.

    Yields:
        Each file with its record and an empty text, or with None and why it cannot be read.
    """
    for path in store.files():
        try:
            yield path, read_record(path), ""
        except (OSError, ValueError) as error:
            yield path, None, str(error)
