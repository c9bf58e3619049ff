"""A kernel of a bundle in the place that Triton's compiled kernels have in a launcher."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tileloom.launch import tiers
from tileloom.launch.bundle import Bundle
from tileloom.launch.bundle_format import Variant
from tileloom.launch.bundle_parameters import values_of
from tileloom.launch.scratch import ALIGNMENT, of_torch


class LoadedKernel:
    """A bundled kernel on a device, with as much of Triton's CompiledKernel as a launch needs.

    It is what a launch returns in place of the CompiledKernel.

    Attributes:
        variant: What the bundle says of it.
        name: Name of the function in the binary.
        function: The CUfunction.
        packed_metadata: Warps of a block, blocks of a cluster, shared bytes, as Triton packs them.
        metadata: Triton's names of the rest.
        src: Has the `signature`.
        n_regs: Registers of a thread.
    """

    def __init__(self, bundle: Bundle, variant: Variant, device: int) -> None:
        loaded = bundle.loaded(variant, device)
        self.variant = variant
        self.name = variant.entry
        self.function = loaded.function.handle
        self.n_regs = loaded.function.registers
        self.packed_metadata = (variant.threads // 32, variant.num_ctas, variant.shared_bytes)
        self.metadata = SimpleNamespace(
            name=variant.entry,
            num_warps=variant.threads // 32,
            num_ctas=variant.num_ctas,
            shared=variant.shared_bytes,
            tensordesc_meta=[p.descriptor for p in variant.parameters if p.descriptor is not None],
            launch_cooperative_grid=variant.cooperative,
            launch_pdl=variant.pdl,
            global_scratch_size=variant.scratch_bytes,
            global_scratch_align=ALIGNMENT,
            profile_scratch_size=0,
        )
        self.src = SimpleNamespace(signature={p.name: p.type for p in variant.parameters})
        self._names = [p.name for p in variant.parameters]
        self._loaded = loaded

    def run(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        """Launch as Triton's `CompiledKernel.run` does: function, metadata, hooks, arguments."""
        values = values_of(self.variant.parameters, dict(zip(self._names, rest[5:])))
        self._loaded.launch((x, y, z), stream, values)


class BundledVariant(tiers.Variant):
    """A launcher's variant that nobody compiled; see `tiers.Variant`.

    It is launched by the driver alone. No tier is tested for it: a self-test compiles a kernel.
    """

    def __init__(self, bundle: Bundle, variant: Variant, kernel: Any, device: int) -> None:
        super().__init__(LoadedKernel(bundle, variant, device), kernel, device, of_torch(device))

    def tiers(self) -> list[str]:
        """Return the only one that needs no Triton."""
        return ["packed"]
