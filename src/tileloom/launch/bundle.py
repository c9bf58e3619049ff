"""Kernels that were compiled elsewhere, launched with no compiler and no Triton.

>>> from tileloom import launch
>>> bundle = launch.load_bundle("kernels.bundle")  # doctest: +SKIP
>>> bundle.kernel("add_kernel")[(blocks,)](x, y, out, n, BLOCK=1024)  # doctest: +SKIP

`bundle_build` makes such files. `bundle_use` lets the package's own launches look into one.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tileloom.errors import BundleError, known_keywords
from tileloom.launch import driver
from tileloom.launch.bundle_arguments import bind, choose, device_of, form_of
from tileloom.launch.bundle_format import BundleFile, Variant, path_of, read_bundle
from tileloom.launch.bundle_parameters import types_of, values_of
from tileloom.launch.scratch import ALIGNMENT, Scratch, of_torch, unused

_ARCH_SINCE = {"sm_80": 11000, "sm_90": 11080, "sm_100": 12080}
"""The first CUDA version that knows an architecture, as the driver counts them."""


def least_driver(variant: Variant) -> int:
    """Return the CUDA version that a driver must have, as it counts them: 12080 for 12.8.

    A binary runs on every driver of its toolkit's major version or a later one (NVIDIA's "minor
    version compatibility"), as long as the driver knows the architecture.
    """
    major = int(variant.toolkit.partition(".")[0])
    return max(major * 1000, _ARCH_SINCE.get(variant.arch, 0))


def reason_against(variant: Variant, capability: int, cuda_version: int) -> str:
    """Say why a binary cannot run on a GPU, in both versions; empty if it can.

    Args:
        variant: The variant.
        capability: The GPU's compute capability, for example 90.
        cuda_version: Of the driver, for example 12080.
    """
    number = int(variant.arch.removeprefix("sm_"))
    exact = variant.target.endswith("a")
    # Without the `a` a binary also runs on later GPUs of the same major capability.
    runs = capability == number if exact else number <= capability < number // 10 * 10 + 10
    if not runs:
        return f"it is built for {variant.target}, the GPU is an sm_{capability}"
    least = least_driver(variant)
    if cuda_version < least:
        return (
            f"it needs a driver for CUDA {_dotted(least)} or later, the driver here is for CUDA "
            f"{_dotted(cuda_version)}"
        )
    return ""


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


class Bundle:
    """A bundle that has been opened; `load_bundle` makes it. Threads may share it.

    A kernel is checked and read from the file when it is first launched, once for each device. It
    then stays on the device until the process ends.

    Attributes:
        path: The file.
        tileloom: The version that built it.
    """

    def __init__(self, file: BundleFile) -> None:
        self.path = file.path
        self.tileloom = file.tileloom
        self._file = file
        self._numbers = {raw["key"]: i for i, raw in reversed(list(enumerate(file.raw)))}
        self._families: dict[str, list[int]] = {}
        for i, raw in enumerate(file.raw):
            for name in dict.fromkeys((raw["name"], raw["name"].partition("[")[0])):
                self._families.setdefault(name, []).append(i)
        self._variants: dict[int, Variant] = {}
        self._loaded: dict[tuple[int, int], Loaded] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<bundle '{self.path}' of {len(self._file.raw)} kernels>"

    def __len__(self) -> int:
        return len(self._file.raw)

    def winners(self) -> list[dict[str, Any]]:
        """Return the records of tuned kernels, as plain data; `tileloom.tuning` reads them."""
        return list(self._file.winners)

    def variants(self) -> list[Variant]:
        """Return all compiled variants, in the order of the file.

        Raises:
            BundleError: If the manifest describes one wrongly.
        """
        return [self.variant(number) for number in range(len(self))]

    def variant(self, number: int) -> Variant:
        """Return the variant of a number below `len(bundle)`.

        Raises:
            BundleError: If the manifest describes it wrongly.
        """
        variant = self._variants.get(number)
        if variant is None:
            # Of two threads that come here at once, both get the same object.
            variant = self._variants.setdefault(number, self._file.variant(number))
        return variant

    def kernel(self, name: str) -> BundledKernel:
        """Return a kernel that can be launched.

        Args:
            name: A variant's name, or the part before its ``[config]``: then each launch takes the
                first variant that fits its arguments, the most specialised ones first.

        Raises:
            BundleError: If there is none of this name, or those of it are different functions.
        """
        numbers = self._families.get(name)
        if numbers is None:
            near = difflib.get_close_matches(name, self._families, n=1)
            known = dict.fromkeys(raw["name"].partition("[")[0] for raw in self._file.raw)
            hint = f"Did you mean '{near[0]}'?" if near else f"Kernels: {', '.join(known)}."
            raise BundleError(f"bundle: there is no kernel '{name}' in '{self.path}'. {hint}")
        variants = [self.variant(i) for i in numbers]
        functions = dict.fromkeys(variant.function for variant in variants)
        if len(functions) > 1:
            names = ", ".join(dict.fromkeys(variant.name for variant in variants))
            raise BundleError(
                f"bundle: '{name}' in '{self.path}' are kernels of different functions, "
                f"{', '.join(functions)}. Try: one of {names}."
            )
        return BundledKernel(self, name, variants)

    def find(self, key: str) -> Variant | None:
        """Return the variant of a key that `bundle_key.kernel_key` made, None if there is none."""
        number = self._numbers.get(key)
        return None if number is None else self.variant(number)

    def binary(self, variant: Variant) -> bytes:
        """Return the cubin of a variant.

        Raises:
            BundleError: If it is not what was written.
        """
        return self._file.binary(variant)

    def size(self, variant: Variant) -> int:
        """Return the bytes of a variant's cubin."""
        return self._file.size(variant)

    def load(self, variant: Variant, device: int) -> driver.Function:
        """Load a variant onto a device, at each call anew.

        Args:
            variant: One of this bundle's.
            device: The device's number.

        Raises:
            BundleError: If it cannot run there; the text names both versions. If it is damaged.
            LaunchError: If the driver refuses it.
        """
        why = reason_against(variant, driver.capability(device), driver.cuda_version())
        if why:
            raise BundleError(
                f"bundle: kernel '{variant.name}' of '{self.path}' cannot run on device {device}: "
                f"{why}. Try: a bundle that is built for this machine."
            )
        return driver.load_cubin(
            self.binary(variant), variant.entry, shared_bytes=variant.shared_bytes, device=device
        )

    def loaded(self, variant: Variant, device: int) -> Loaded:
        """Return a variant on a device, loading it there if it is not yet; see `load`."""
        at = (id(variant), device)
        with self._lock:
            found = self._loaded.get(at)
            if found is None:
                function = self.load(variant, device)
                found = self._loaded[at] = Loaded(variant, function)
        return found


class Loaded:
    """A variant on a device, ready to be launched; `Bundle.loaded` makes it.

    Attributes:
        variant: The variant.
        function: What the driver calls it.
    """

    def __init__(self, variant: Variant, function: driver.Function) -> None:
        self.variant = variant
        self.function = function
        scratch = _scratch(variant, function.device)
        types = types_of(variant.parameters)
        launch = driver.packed_launch(
            function.handle,
            types,
            unused(len(types), scratch),
            grid=None,
            threads=variant.threads,
            name=variant.name,
            device=function.device,
            shared_bytes=variant.shared_bytes,
            num_ctas=variant.num_ctas,
            cooperative=variant.cooperative,
            pdl=variant.pdl,
        )
        self._launch = scratch.given(launch, None) if scratch else launch

    def launch(self, grid: tuple[int, int, int], stream: int, values: Sequence[Any]) -> None:
        """Launch it.

        Args:
            grid: Blocks, or clusters, along x, y and z; none of them 0.
            stream: The CUstream.
            values: What `bundle_parameters.values_of` made.
        """
        self._launch(*grid, stream, *values)


def _scratch(variant: Variant, device: int) -> Scratch | None:
    size = variant.scratch_bytes * variant.num_ctas
    return Scratch(variant.name, size, ALIGNMENT, of_torch(device)) if size else None


class BundledKernel:
    """A kernel of a bundle, called as Triton's: `kernel[grid](*args, **constants)`.

    Attributes:
        name: What was asked for.
        variants: Its variants, the most specialised ones first.
    """

    def __init__(self, bundle: Bundle, name: str, variants: Sequence[Variant]) -> None:
        self.name = name
        self.variants = sorted(variants, key=_generality)
        self._bundle = bundle
        self._on_device: dict[int, list[Variant]] = {}
        self._exact = {name for variant in variants for name in variant.constants}
        self._chosen: dict[tuple[int, tuple[Any, ...]], Variant] = {}

    def __repr__(self) -> str:
        return f"<kernel {self.name} of {self._bundle!r}>"

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """Return what launches the kernel.

        Args:
            grid: One to three numbers of blocks, or a function that makes them of a dictionary of
                all arguments and constants.

        Returns:
            A function of the kernel's arguments, by position or keyword. A compile-time constant
            may be left out where the variants that fit agree in it. Pointers are tensors on one
            GPU, or addresses as integers; descriptors are any object with ``base``, ``shape``,
            ``strides`` and ``block_shape``. The kernel runs on PyTorch's current stream of the
            tensors' GPU.
        """
        return functools.partial(self._launch, grid)

    def _launch(self, grid: Any, /, *args: Any, **named: Any) -> None:
        import torch

        arguments = bind(self.name, self.variants[0].parameters, args, named)
        device = device_of(self.name, arguments)
        current = torch.cuda.current_device()
        index: int = current if device is None else device.index
        with _NOTHING if index == current else torch.cuda.device(index):
            variant = self._choose(index, arguments)
            if callable(grid):
                grid = grid({**variant.constants, **arguments})
            whole = driver.normal_grid(grid, self.name)
            stream = torch._C._cuda_getCurrentRawStream(index)
            values = values_of(variant.parameters, arguments)
            self._bundle.loaded(variant, index).launch(whole, stream, values)

    def _choose(self, index: int, arguments: Mapping[str, Any]) -> Variant:
        """Return the variant for a call, the known one where a call of its form has come before."""
        form = index, form_of(arguments, self._exact)
        try:
            variant = self._chosen.get(form)
        except TypeError:  # an argument that cannot be hashed
            return choose(self.name, self._for_device(index), arguments)
        if variant is None:
            variant = choose(self.name, self._for_device(index), arguments)
            if len(self._chosen) >= _FORMS:
                self._chosen.clear()
            self._chosen[form] = variant
        return variant

    def _for_device(self, index: int) -> list[Variant]:
        """Return the variants that run on a device; if there is none, say why."""
        if index in self._on_device:
            return self._on_device[index]
        capability, version = driver.capability(index), driver.cuda_version()
        why = [reason_against(variant, capability, version) for variant in self.variants]
        fits = [variant for variant, text in zip(self.variants, why) if not text]
        if not fits:
            raise BundleError(
                f"bundle: kernel '{self.name}' of '{self._bundle.path}' cannot run on device "
                f"{index}: {'; '.join(dict.fromkeys(why))}. Try: a bundle that is built "
                "for this machine."
            )
        self._on_device[index] = fits
        return fits


_FORMS = 1024  # how many a kernel remembers

_NOTHING = contextlib.nullcontext()


def _generality(variant: Variant) -> tuple[int, int]:
    """Sort the variants that ask for most first; equal ones stay in the order of the file."""
    run_time = [p for p in variant.parameters if not p.optional]
    known = sum(p.type == "constexpr" for p in run_time)
    return -known, -sum(p.aligned for p in run_time)


@known_keywords
def load_bundle(path: str | Path) -> Bundle:
    """Open a bundle. Its kernels are read when they are first launched.

    Args:
        path: A file that `tileloom bundle build` or `bundle_build.build_bundle` wrote.

    Returns:
        The bundle. A file put in its place later does not change it.

    Raises:
        BundleError: If there is no such file, it is no bundle, has another format, or is damaged.
        OptionError: If `path` is none.
    """
    return Bundle(read_bundle(path_of(path)))
