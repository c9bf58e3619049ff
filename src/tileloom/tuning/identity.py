"""What a winner is stored under: the kernel as it is compiled and the machine that it ran on.

A config that was tuned for another GPU, driver or assembler is never taken unmeasured: of recorded
tunings, those of another architecture reached 55 to 67 % of the best there.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tileloom.errors import LaunchError
from tileloom.launch import compat, driver
from tileloom.launch.bundle_key import options_that_differ
from tileloom.target import target_of_device

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_DRIVER_VERSION = re.compile(r"\b\d{3,}\.\d+(?:\.\d+)*\b")


@dataclass(frozen=True)
class Platform:
    """The machine and the compiler of a measurement.

    Attributes:
        gpu: The GPU's model, such as ``"NVIDIA H100 80GB HBM3"``.
        driver: Version of its driver, such as ``"580.159.04"``.
        triton: Version of Triton, such as ``"3.7.1"``.
        assembler: Version of the assembler that Triton takes for this GPU, such as ``"12.8"``.
    """

    gpu: str
    driver: str
    triton: str
    assembler: str


@functools.cache
def driver_version() -> str:
    """Return the version of NVIDIA's driver, or the CUDA version that it supports."""
    try:
        found = _DRIVER_VERSION.search(_DRIVER_FILE.read_text())
    except OSError:
        found = None
    if found is not None:
        return found[0]
    try:
        return f"CUDA {driver.cuda_version()}"
    except LaunchError:
        return "none"


@functools.lru_cache(maxsize=64)
def platform_of(device: torch.device) -> Platform:
    """Return what a kernel on a device is measured on; about 10 ms the first time in a process.

    Args:
        device: A GPU.
    """
    target = target_of_device(device)
    capability = target.capability[0] * 10 + target.capability[1]
    return Platform(
        gpu=target.name,
        driver=driver_version(),
        triton=".".join(map(str, compat.triton_version())),
        assembler=compat.assembler_version(capability),
    )


@dataclass(frozen=True)
class Problem:
    """A kernel as it is compiled, without what the config decides.

    Attributes:
        kernel: ``"module:name"`` of the jitted function.
        source: Hash of its source and that of all it calls; see `compat.source_hash`.
        types: Type of each parameter that no config and no constant decides.
        constants: Values of the constant parameters, without those of the config.
        aligned: Parameters that are specialised as divisible by 16.
        options: Compile options that every config has.
        size_hints: Powers of two by dimension, or None.
        stages: What was tried beside the list of configs, such as ``"list+descent"``.
        arch: The architecture it is compiled for, such as ``"sm_90"``.
        parameters: Names of all parameters, in order.
        gluon: Whether it is a Gluon kernel.
    """

    kernel: str
    source: str
    types: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    aligned: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    size_hints: Mapping[str, int] | None = None
    stages: str = "list"
    arch: str = "sm_90"
    parameters: Sequence[str] = ()
    gluon: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data: values that JSON does not know by their `repr`."""
        data = asdict(self) | {
            "aligned": sorted(self.aligned),
            "options": options_that_differ(self.options),
        }
        return json.loads(json.dumps(data, default=repr))


def key_of(problem: Mapping[str, Any], platform: Mapping[str, str]) -> str:
    """Name a problem on a machine.

    Args:
        problem: What `Problem.as_json` returned.
        platform: A `Platform` as a dictionary.

    Returns:
        A hexadecimal SHA-256. Values are told apart by type: 1, 1.0 and True differ.
    """
    return _digest([problem, dict(platform)])


def _digest(parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
