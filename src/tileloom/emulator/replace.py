"""Loading changed copies of files in place of the files, for mutants of library kernels."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Generator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


class _Copies(importlib.abc.MetaPathFinder):
    """Finds the modules that the others find, but loads some from elsewhere."""

    def __init__(self, copies: Mapping[Path, Path]) -> None:
        self.copies = {path.resolve(): copy for path, copy in copies.items()}
        self.used: set[Path] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module; see `importlib.abc.MetaPathFinder`."""
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is None:
                continue
            origin = Path(spec.origin or "").resolve()
            if origin not in self.copies:
                return spec
            self.used.add(origin)
            folders = spec.submodule_search_locations
            return importlib.util.spec_from_file_location(
                fullname, self.copies[origin], submodule_search_locations=folders
            )
        return None


@contextlib.contextmanager
def loading(copies: Mapping[Path, Path]) -> Generator[set[Path]]:
    """Load copies in place of files that are imported inside the block.

    Args:
        copies: For each file the one to load instead. A module that is loaded already stays.

    Yields:
        The files (resolved) that were asked for so far.
    """
    finder = _Copies(copies)
    sys.meta_path.insert(0, finder)
    try:
        yield finder.used
    finally:
        sys.meta_path.remove(finder)
