"""The configs of one kernel that are compiled and loaded on a device, and why others are not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import torch

from tileloom.errors import CompileError, DeviceError
from tileloom.launch import bundle_use, tiers
from tileloom.launch.launcher import cuda_driver
from tileloom.launch.loading import load
from tileloom.launch.scratch import of_torch
from tileloom.tuning.config import Config
from tileloom.tuning.launchers import Launch
from tileloom.tuning.precompile import Kernel, precompile


class NoTritonConfigsError(CompileError):
    """No config of a kernel runs; the text has the reason of each."""


class Loaded:
    """What is compiled of a kernel.

    Attributes:
        kernel: The kernel.
        device: The device.
        capability: Its compute capability as one number, such as 90.
        launches: What is loaded, by config.
        failures: Why other configs are not.
        is_warm: Whether Triton's cache holds the list already.
        hashes: By config the names in that cache, as far as another process said them.
    """

    def __init__(
        self,
        kernel: Kernel,
        device: torch.device,
        capability: int,
        inductor_meta: Mapping[str, Any],
        profile: Callable[[Config, Any], Any],
    ) -> None:
        """Begin with nothing; see `Launch` for the facts."""
        self.kernel = kernel
        self.device = device
        self.capability = capability
        self.launches: dict[Config, Launch] = {}
        self.failures: dict[Config, str] = {}
        self.is_warm = False
        self.hashes: Mapping[Config, str] = {}
        self._inductor_meta = inductor_meta
        self._profile = profile

    @property
    def index(self) -> int:
        """The device's number."""
        return self.device.index or 0

    @property
    def arch(self) -> str:
        """For example ``"sm_90"``."""
        return f"sm_{self.capability}"

    def load_all(self, configs: Iterable[Config]) -> None:
        """Compile configs, several of them in workers unless it `is_warm`, and load what compiles.

        Raises:
            DeviceError: If there is no GPU.
        """
        new = [c for c in configs if c not in self.launches and c not in self.failures]
        if len(new) > 1 and not self.is_warm and not bundle_use.is_forbidden():
            results = precompile(self.kernel, new, self.arch)
            self.failures |= {c: r.error for c, r in results.items() if r.error is not None}
        for config in new:
            if config not in self.failures:
                self.load(config)

    def load(self, config: Config) -> None:
        """Compile a config, or take it from Triton's cache or a bundle, and load it.

        What goes wrong is noted in `failures`.

        Raises:
            DeviceError: If there is no GPU.
            OptionError: If the config is none of this kernel's.
        """
        if config in self.launches:
            return
        kernel = self.kernel
        wanted = kernel.wanted(config, self.arch)
        with self.on_device():
            try:
                variant: Any = bundle_use.find_wanted(kernel.fn, wanted, self.index)
                if variant is None:
                    key = self.hashes.get(config)
                    compiled = None if key is None else kernel.cached(config, self.capability, key)
                    compiled = compiled or kernel.compile(config, self.capability)
                    load(compiled)
                    variant = tiers.Variant(compiled, kernel.fn, self.index, of_torch(self.index))
            except Exception as error:
                self.failures[config] = f"{type(error).__name__}: {error}"
                return
            self.launches[config] = Launch(
                kernel, config, variant, self._inductor_meta, profile=self._profile
            )

    @contextlib.contextmanager
    def on_device(self) -> Generator[None]:
        """Make the kernel's device the current one of Triton's driver, inside a `with` block."""
        active = cuda_driver()
        if active is None:
            raise DeviceError(
                f"tuning: '{self.kernel.short_name}' needs a GPU, and Triton finds none here. Try: "
                "a machine with a GPU; precompile(warm_cache_only=True) compiles without one."
            )
        before = active.get_current_device()
        active.set_current_device(self.index)
        try:
            yield
        finally:
            active.set_current_device(before)

    def stream(self) -> Any:
        """The current stream of the device."""
        return cuda_driver().get_current_stream(self.index)

    def keep(self, config: Config) -> None:
        """Let go of all but one config."""
        self.launches = {config: self.launches[config]}

    def costs(self, config: Config) -> dict[str, int | None]:
        """Return registers of a thread, those that lie in memory, and shared bytes of a block."""
        compiled = self.launches[config].variant.compiled
        return {
            "registers": getattr(compiled, "n_regs", None),
            "spills": getattr(compiled, "n_spills", None),
            "shared_bytes": int(compiled.metadata.shared),
        }

    def runnable(self, configs: Sequence[Config], most_spills: int | None) -> list[Config]:
        """Return those that are loaded, in order; those that spill more only if all do.

        Args:
            configs: The candidates.
            most_spills: Registers of a thread that may lie in memory; None for any number.
        """
        there = [config for config in configs if config in self.launches]
        if most_spills is None:
            return there
        return [c for c in there if (self.costs(c)["spills"] or 0) <= most_spills] or there

    def none_runs(self, more: Mapping[Config, str] | None = None) -> NoTritonConfigsError:
        """Say why nothing runs.

        Args:
            more: Reasons beside those that are known.
        """
        reasons = self.failures | dict(more or {})
        listed = "\n".join(f"- {config}: {why}" for config, why in reasons.items())
        return NoTritonConfigsError(
            f"tuning: no config of '{self.kernel.short_name}' runs. The reason of each:\n{listed}\n"
            "Try: smaller blocks or fewer stages, or correct the kernel."
        )
