"""What each kernel of a model moves and how fast: printed as it runs, written at the end.

Generated code calls `start_graph` ahead of a model and `end_graph` behind it where
``profile_bandwidth`` is set; its kernels are `DebugAutotuner` then.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tileloom import log
from tileloom.tuning.autotuner import CachingAutotuner

_log = log.get_logger("tuning")
_SLOW_GBPS = 650.0
_SHORT_MS = 0.012


@dataclass(frozen=True)
class Measured:
    """One kernel's launch.

    Attributes:
        ms: Device time, in ms.
        gb: Memory read and written, in GB (1e9 bytes).
        name: The kernel's name.
    """

    ms: float
    gb: float
    name: str

    @property
    def gb_per_s(self) -> float:
        """Bandwidth, in GB/s."""
        return self.gb / (self.ms / 1e3)

    def line(self, suffix: str = "", *, colour: bool = False) -> str:
        """Return a line of the report; in red where a long kernel is slow, if colours show."""
        text = f"{self.ms:.3f}ms    \t{self.gb:.3f} GB \t {self.gb_per_s:7.2f}GB/s{suffix}"
        is_slow = self.ms > _SHORT_MS and self.gb_per_s < _SLOW_GBPS
        return f"\x1b[31m{text}\x1b[0m" if is_slow and colour else text


_calls: list[Measured] = []


def start_graph() -> None:
    """Begin a report: forget what was measured before."""
    _calls.clear()


def end_graph(output_file: str | None) -> None:
    """Print the sum of what was measured since `start_graph`, and append a report to a file.

    Args:
        output_file: The file, or None. The report has a line for each kernel, the longest first,
            with its share of the time.

    Raises:
        OSError: If the file cannot be written.
    """
    if not _calls:
        return
    caller = inspect.stack()[1].filename
    whole = Measured(sum(c.ms for c in _calls), sum(c.gb for c in _calls), "")
    summary = (
        f"SUMMARY ({caller})\n{whole.ms:.2f}ms   \t {whole.gb:.2f} GB\t {whole.gb_per_s:.2f}GB/s"
    )
    _print(summary)
    if output_file is None:
        return
    longest_first = sorted(_calls, key=lambda call: call.ms, reverse=True)
    lines = [c.line(f" \t {c.ms / whole.ms * 100:.2f}% \t {c.name}") for c in longest_first]
    title = f"TRITON KERNELS BANDWIDTH INFO ({caller})"
    with Path(output_file).open("a", encoding="utf-8") as file:
        file.write("\n".join(["=" * 20, title, *lines, summary]) + "\n\n")


def _print(text: str) -> None:
    print(text, file=sys.stdout, flush=True)
    _log.info("%s", text)


def bytes_moved(arguments: Sequence[Any], names: Sequence[str]) -> int:
    """Add up what a launch reads and writes: each tensor once, those that it does both to twice.

    Args:
        arguments: The launch's.
        names: Their names; ``in_out_ptr`` at the start of one says that it does both.

    Returns:
        Bytes. Of a tensor with gaps or repeated elements what lies in memory counts once.
    """
    total = 0
    for name, value in zip(names, arguments):
        if isinstance(value, torch.Tensor):
            sizes = [s for s, stride in zip(value.shape, value.stride()) if stride]
            elements = torch.Size(sizes).numel() if value.numel() else 0
            total += elements * value.element_size() * (1 + name.startswith("in_out_ptr"))
    return total


class DebugAutotuner(CachingAutotuner):
    """An autotuner that reports the bandwidth of its kernel, once, and launches it every time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As `CachingAutotuner`; ``profile_bandwidth_regex`` names the kernels to report."""
        super().__init__(*args, **kwargs)
        self.cached: Measured | None = None

    def run(self, *args: Any, stream: Any, benchmark_run: bool = False, **kwargs: Any) -> Any:
        """Launch the kernel, and the first time measure it; see `CachingAutotuner.run`."""
        name = self._shown_name
        result = super().run(*args, stream=stream, benchmark_run=benchmark_run, **kwargs)
        # Every launch comes here, so that each counts in the report of its graph.
        self.__dict__.pop("run", None)
        if re.match(self.inductor_meta.get("profile_bandwidth_regex") or "", name):
            if self.cached is None:
                self.cached = self._measured(name, args, kwargs)
                _print(self.cached.line(f" \t {name}", colour=sys.stdout.isatty()))
            _calls.append(self.cached)
        return result

    def _measured(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Measured:
        arguments = self._in_order(args, kwargs)
        names = self._loaded.kernel.parameters(self.inductor_meta)
        gb = self.inductor_meta.get("kernel_num_gb")
        if gb is None:
            gb = bytes_moved(arguments, names) / 1e9
        with self._session(arguments) as session:
            ms = session.time(self.winner)
        return Measured(ms, float(gb), name)
