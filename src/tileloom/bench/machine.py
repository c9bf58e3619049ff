"""What the numbers were taken on: card, versions, commit; and its clock and power meanwhile."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

from tileloom.bench.stats import quantile

_PACKAGES = ("triton", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "flash-attn-4")


def _output_of(command: Sequence[str], cwd: Path | None = None) -> str | None:
    """Run a short command; None if it is not there or fails."""
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _properties(device: torch.device) -> Any:
    return cast("Any", torch.cuda).get_device_properties(device)


def gpu_id(device: torch.device) -> str:
    """Name a GPU as nvidia-smi knows it, which may count others than this process does."""
    uuid = str(getattr(_properties(device), "uuid", ""))
    if not uuid:
        return str(device.index or 0)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Collect what a reader needs to know of the machine.

    Args:
        device: The GPU.

    Returns:
        Plain data: card, SMs, L2, driver, power limit, Python, torch, CUDA, cuDNN and packages.
        What cannot be found out is None.
    """
    properties = _properties(device)
    query = _output_of(
        [
            "nvidia-smi",
            f"--id={gpu_id(device)}",
            "--query-gpu=driver_version,power.limit,clocks.max.sm",
            "--format=csv,noheader,nounits",
        ]
    )
    parts = [part.strip() for part in query.splitlines()[0].split(",")] if query else []
    driver, power_limit, max_clock = parts if len(parts) == 3 else (None, None, None)
    cudnn: Any = torch.backends.cudnn
    return {
        "card": properties.name,
        "capability": [properties.major, properties.minor],
        "sms": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": l2_bytes(device),
        "driver": driver,
        "power_limit_w": power_limit,
        "max_clock_mhz": max_clock,
        "host": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda_version": cast("Any", torch.version).cuda,
        "cudnn": cudnn.version(),
        "packages": {name: v for name in _PACKAGES if (v := _version(name)) is not None},
    }


def l2_bytes(device: torch.device) -> int:
    """Return the size of a GPU's L2 cache in bytes; 64 MiB where torch does not know it."""
    return int(getattr(_properties(device), "L2_cache_size", 0)) or 2**26


def git_state(given: str | None) -> dict[str, Any]:
    """Find out which code is measured.

    Args:
        given: A commit that the caller names, where there is no repository to ask.

    Returns:
        ``{"commit": ..., "dirty": ...}``: dirty says whether `src` differs from the commit, and is
        None where git does not know it; so is the commit.
    """
    here = Path(__file__).resolve().parent
    head = _output_of(["git", "rev-parse", "HEAD"], here)
    top = _output_of(["git", "rev-parse", "--show-toplevel"], here)
    status = None if top is None else _output_of(["git", "status", "--porcelain", "src"], Path(top))
    dirty = None if status is None else bool(status)
    if given is not None and (head is None or not head.startswith(given.lower())):
        return {"commit": given, "dirty": None}
    return {"commit": head, "dirty": dirty}


def now() -> str:
    """Return the date and time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class CardState:
    """What the card did over a stretch of time."""

    clock_mhz: float
    clock_mhz_low: float
    power_w: float
    temperature_c: float
    readings: int

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


class Watch:
    """Notes clock, power and temperature while something else runs, by a background nvidia-smi.

    It costs this process one thread that waits for lines. Where nvidia-smi is missing, `reason`
    says so and there are no readings.
    """

    def __init__(self, device: torch.device, *, every_ms: int = 100) -> None:
        """Start watching.

        Args:
            device: The GPU.
            every_ms: Time between readings.
        """
        self.reason: str | None = None
        self._readings: list[tuple[float, float, float, float]] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._terminal = -1
        self._thread = threading.Thread(target=self._read, daemon=True)
        if shutil.which("nvidia-smi") is None:
            self.reason = "nvidia-smi is not on the path"
            return
        base = ["nvidia-smi", f"--id={gpu_id(device)}", "--format=csv,noheader,nounits"]
        fields = next(
            (
                query
                for query in ("power.draw.instant", "power.draw")
                if _output_of([*base, f"--query-gpu=clocks.sm,{query},temperature.gpu"])
            ),
            None,
        )
        if fields is None:
            self.reason = "nvidia-smi does not answer for this GPU"
            return
        try:
            # A terminal, since into a pipe nvidia-smi may write in blocks, long after the reading.
            self._terminal, theirs = os.openpty()
        except OSError as error:
            self.reason = f"there is no terminal to read nvidia-smi from ({error})"
            return
        # Should this process be killed, nvidia-smi would never end; so it does within the hour.
        bounded = ["timeout", "3600", *base] if shutil.which("timeout") else base
        self._process = subprocess.Popen(
            [*bounded, f"--query-gpu=clocks.sm,{fields},temperature.gpu", f"--loop-ms={every_ms}"],
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        self._thread.start()

    def _read(self) -> None:
        rest = b""
        while True:
            try:
                new = os.read(self._terminal, 4096)
            except OSError:  # how a terminal says that the other side is gone
                return
            if not new:
                return
            *lines, rest = (rest + new).split(b"\n")
            for line in lines:
                self.take(line.decode(errors="replace"), time.perf_counter())

    def take(self, line: str, at: float) -> None:
        """Take one line of nvidia-smi; a line that holds no three numbers is skipped.

        Args:
            line: Clock in MHz, power in W, temperature in degrees Celsius.
            at: When it was read, by `time.perf_counter`.
        """
        try:
            clock, power, temperature = (float(part) for part in line.split(","))
        except ValueError:
            return
        self._readings.append((at, clock, power, temperature))

    def between(self, start: float, end: float) -> CardState | None:
        """Sum up the readings of a stretch of time, given by `time.perf_counter`.

        Returns:
            Medians and the lowest clock; None if nothing was read meanwhile.
        """
        inside = [reading for reading in list(self._readings) if start <= reading[0] <= end]
        if not inside:
            return None
        clocks, powers, degrees = ([reading[i] for reading in inside] for i in (1, 2, 3))
        return CardState(
            quantile(clocks, 0.5), min(clocks), quantile(powers, 0.5), quantile(degrees, 0.5),
            len(inside)
        )  # fmt: skip

    def close(self) -> None:
        """Stop the background process."""
        if self._process is None:
            return
        self._process.terminate()
        self._process.wait(timeout=5)
        self._thread.join(timeout=5)
        os.close(self._terminal)
        self._process = None
