"""The ways to launch a compiled kernel, from the slowest to the fastest, and which to trust.

==========  ======================================================================  ==============
tier        what it calls                                                           where
==========  ======================================================================  ==============
plain       `kernel[grid](...)`                                                     always right
seam        `CompiledKernel.run(...)`, Triton's launcher with addresses as numbers  Triton 3.6-3.9
direct      `utils.launch(...)`, its C function without the Python around it        from 3.7 on
packed      `cuLaunchKernelEx` of the driver, `driver.packed_launch`                Triton 3.6-3.9
==========  ======================================================================  ==============

The fastest is taken that passes its self-test, once for each device: a small kernel is launched by
Triton's own path and by the tier, and must write the same memory. One that fails is logged and
never used again in the process.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Sequence
from typing import Any

from tileloom import knobs, log
from tileloom.errors import LaunchError, OptionError
from tileloom.launch import driver
from tileloom.launch.descriptors import Spec, TensorMaps, tensor_maps
from tileloom.launch.scratch import POINTERS, Allocator, Scratch, unused
from tileloom.launch.specialize import Unsupported

TIERS = ("packed", "direct", "seam", "plain")
Entry = Callable[..., Any]
Grid = tuple[int, int, int] | None
_NOTHING = contextlib.nullcontext()
_log = log.get_logger("launch")


class Varying:
    """Stands for an argument whose value is given in each launch."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


ADDRESS = Varying("ADDRESS")
NUMBER = Varying("NUMBER")


class Variant:
    """A compiled kernel on one device, and how it is launched.

    It holds Triton's CompiledKernel: from 3.8 on that one unloads the module when it goes.

    Attributes:
        compiled: Triton's CompiledKernel.
        kernel: The jitted function.
        device: The device's number.
        scratch: The memory that it needs in each launch, None if none.
        reason: Why only the plain tier may launch it, ``""`` if any may.
    """

    def __init__(
        self, compiled: Any, kernel: Any, device: int, allocate: Allocator | None = None
    ) -> None:
        """Read what a launch needs.

        Args:
            compiled: Triton's CompiledKernel.
            kernel: The jitted function.
            device: The device's number.
            allocate: Gives scratch memory; the default is whom `triton.set_allocator` was given.
        """
        self.compiled = compiled
        self.kernel = kernel
        self.device = device
        metadata = compiled.metadata
        self.scratch: Scratch | None = None
        if size := metadata.global_scratch_size:
            size, align = size * metadata.num_ctas, metadata.global_scratch_align
            self.scratch = Scratch(compiled.name, size, align, allocate)
        self.reason = ""
        if metadata.profile_scratch_size:
            self.reason = "it is made for Triton's profiler, which allocates for it"

    def launch(self, grid: Sequence[int], stream: int, arguments: Sequence[Any]) -> Any:
        """Launch by Triton's launcher, whatever the arguments are.

        Args:
            grid: Three numbers.
            stream: The CUstream.
            arguments: The kernel's arguments, constants included, tensors as they are.
        """
        compiled = self.compiled
        self.run(
            *grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments
        )
        return compiled

    def run(self, *arguments: Any) -> None:
        """Call `CompiledKernel.run`, which allocates scratch memory as this variant does."""
        with _NOTHING if self.scratch is None else self.scratch.lent():
            self.compiled.run(*arguments)

    def entry(self, grid: Grid, forms: Sequence[Any]) -> Entry:
        """Prepare a launch in which only addresses and some numbers vary.

        Args:
            grid: Blocks along x, y and z; None if each launch says it.
            forms: For each argument its value, or `ADDRESS`, `NUMBER`, or a descriptor's `Spec`.

        Returns:
            `entry(stream, *values)`: an address for each `ADDRESS` and `Spec`, a number for each
            `NUMBER`, in order. With `grid=None` it is `entry(x, y, z, stream, *values)`.

        Raises:
            Unsupported: If only Triton's own path may launch it.
        """
        if self.reason:
            raise Unsupported(self.reason)
        for tier in self.tiers():
            try:
                return _BUILDERS[tier](self, grid, forms)
            except (Unsupported, OptionError, struct.error, OverflowError, TypeError) as why:
                _log.debug("%s: not by the %s tier: %s", self.compiled.name, tier, why)
        raise Unsupported("no tier takes it")

    def tiers(self) -> list[str]:
        """Return the tiers to try, the fastest first."""
        return usable(self.device)

    def types(self) -> list[str | tuple[str, ...]]:
        """The type of each argument, in order, as it was compiled."""
        signature = self.compiled.src.signature
        return [signature[name] for name in self.kernel.arg_names]


def _is_descriptor(kind: object) -> bool:
    return isinstance(kind, str) and kind.startswith("tensordesc")


def _metas(variant: Variant) -> list[dict[str, Any]]:
    found: Sequence[dict[str, Any]] | None
    found = getattr(variant.compiled.metadata, "tensordesc_meta", None)
    metas = list(found or ())
    wanted = sum(map(_is_descriptor, variant.types()))
    if len(metas) != wanted:
        raise Unsupported("its descriptors are no tensor maps")
    return metas


def _packed(variant: Variant, grid: Grid, forms: Sequence[Any]) -> Entry:
    metas = iter(_metas(variant))
    types: list[str] = []
    fixed: dict[int, Any] = {}
    tables: dict[int, TensorMaps] = {}
    for kind, form in zip(variant.types(), forms):
        if isinstance(kind, tuple):
            raise Unsupported("a tuple")
        if kind == "constexpr":
            continue
        if isinstance(form, Spec):
            tables[len(types)] = tensor_maps(form, next(metas))
            types.append(driver.TENSOR_MAP)
            for each, numbers in (("i32", form.shape), ("i64", form.strides)):
                for number in numbers:
                    fixed[len(types)] = int(number)
                    types.append(each)
            continue
        if not isinstance(form, Varying):
            fixed[len(types)] = form
        types.append(kind)
    scratch = variant.scratch
    types += POINTERS
    fixed |= unused(len(types), scratch)
    compiled = variant.compiled
    num_warps, num_ctas, shared_bytes = compiled.packed_metadata
    launch = driver.packed_launch(
        compiled.function, types, fixed, grid=grid, threads=32 * num_warps, name=compiled.name,
        device=variant.device, shared_bytes=shared_bytes, num_ctas=num_ctas,
        cooperative=bool(compiled.metadata.launch_cooperative_grid),
        pdl=bool(compiled.metadata.launch_pdl), tables=tables, result=compiled,
    )  # fmt: skip
    return scratch.given(launch, grid) if scratch else launch


class _At:
    """A tensor of which only the address matters, for Triton's own encoding."""

    def __init__(self, address: int, dtype: Any) -> None:
        self._address = address
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self._address


_CALL_SOURCE = """
def make(run, result, {names}):
    def entry({place}stream, {values}):
        run({call})
        return result
    return entry
"""


def _compile_call(
    run: Callable[..., Any],
    grid: Grid,
    after: Sequence[Any],
    forms: Sequence[Any],
    expand: Callable[[Spec], Callable[[int], Sequence[Any]]],
    result: Any,
    *,
    packs: bool,
) -> Entry:
    """Compile the call `run(*grid, stream, *after, *arguments)`, all by position.

    Args:
        run: What is called.
        grid: Blocks along x, y and z; None if each launch says it.
        after: Constants behind it.
        forms: The arguments; see `Variant.entry`.
        expand: From a descriptor's spec to the function from its address to what stands for it.
        result: What the entry returns.
        packs: Whether the arguments are one tuple.
    """
    constants: dict[str, Any] = {}
    values: list[str] = []

    def constant(value: Any) -> str:
        name = f"c{len(constants)}"
        constants[name] = value
        return name

    def expression(form: Any) -> str:
        if isinstance(form, (Varying, Spec)):
            values.append(f"v{len(values)}")
        if isinstance(form, Spec):
            return f"*{constant(expand(form))}({values[-1]})"
        return values[-1] if isinstance(form, Varying) else constant(form)

    place = ["x", "y", "z"] if grid is None else []
    blocks = place if grid is None else [*map(constant, grid)]
    first = [*blocks, "stream", *map(constant, after)]
    rest = "".join(f"{expression(form)}, " for form in forms)
    text = _CALL_SOURCE.format(
        names=", ".join(constants),
        place="".join(f"{name}, " for name in place),
        values=", ".join(values),
        call=", ".join([*first, f"({rest})" if packs else rest]),
    )
    scope: dict[str, Any] = {}
    exec(text, scope)
    return scope["make"](run, result, *constants.values())


def _seam(variant: Variant, grid: Grid, forms: Sequence[Any]) -> Entry:
    """Prepare a launch by Triton's own launcher, with addresses as numbers."""
    compiled = variant.compiled

    def expand(spec: Spec) -> Callable[[int], tuple[Any]]:
        return lambda address: (spec.with_base(_At(address, spec.dtype)),)

    after = (compiled.function, compiled.packed_metadata, None, None, None)
    run = variant.run if variant.scratch else compiled.run
    return _compile_call(run, grid, after, forms, expand, compiled, packs=False)


def _direct(variant: Variant, grid: Grid, forms: Sequence[Any]) -> Entry:
    if variant.scratch:
        raise Unsupported("its scratch memory is allocated in the Python around it")
    compiled = variant.compiled
    runner = compiled.run
    from triton.runtime.driver import driver as config

    active: Any = config.active
    utils = active.utils
    if not hasattr(utils, "launch") or not hasattr(runner, "arg_annotations"):
        raise Unsupported("this Triton has no generic launcher")
    metas = iter(_metas(variant))

    def expand(spec: Spec) -> Callable[[int], tuple[Any, ...]]:
        maps = _TritonMaps(utils.fill_tma_descriptor_tiled, spec, next(metas))
        tail = (*map(int, spec.shape), *map(int, spec.strides))
        return lambda address: (maps[address], *tail)

    after = (
        compiled.function, runner.launch_cooperative_grid, runner.launch_pdl,
        compiled.packed_metadata, None, None, None, None, None, runner.arg_annotations,
        runner.kernel_signature,
    )  # fmt: skip
    return _compile_call(utils.launch, grid, after, forms, expand, compiled, packs=True)


class _TritonMaps(TensorMaps):
    """As `TensorMaps`, in the object that Triton's launcher takes."""

    def __init__(self, fill: Callable[..., Any], spec: Spec, meta: dict[str, Any]) -> None:
        super().__init__(spec, meta)
        self._fill = fill

    def encode(self, address: int) -> Any:
        shape, strides, box = self._arguments
        o = self._options
        return self._fill(
            address, o["swizzle"], o["element_bytes"], o["element_type"], box, shape, strides,
            o["fill"],
        )  # fmt: skip


_BUILDERS: dict[str, Callable[[Variant, Grid, Sequence[Any]], Entry]] = {
    "packed": _packed,
    "direct": _direct,
    "seam": _seam,
}
_verdicts: dict[tuple[int, str], bool] = {}


def usable(device: int) -> list[str]:
    """Return the tiers to try on a device, the fastest first, without the plain one.

    Args:
        device: The device's number.

    Returns:
        Those that passed their self-test; only the one of the knob ``launch.tier`` if it is set.
    """
    wanted = knobs.get("launch.tier")
    tiers = TIERS[:-1] if wanted == "auto" else (wanted,)
    return [tier for tier in tiers if tier in _BUILDERS and _passes(device, tier)]


def _passes(device: int, tier: str) -> bool:
    verdict = _verdicts.get((device, tier))
    if verdict is None:
        try:
            self_test(device, tier)
            verdict = True
        except Exception as why:  # whatever goes wrong in it, the tier is not to be used
            verdict = False
            level = _log.debug if isinstance(why, Unsupported) else _log.warning
            level("the %s tier is not used on device %d: %s", tier, device, why)
        _verdicts[device, tier] = verdict
    return verdict


def is_settled(device: int) -> bool:
    """Whether the tiers of a device are known, or can be tested now: not inside a graph capture."""
    import torch

    tested = all((device, tier) in _verdicts for tier in _BUILDERS)
    return tested or not torch.cuda.is_current_stream_capturing()


def self_test(device: int, tier: str) -> None:
    """Launch a small kernel by Triton's own path and by a tier, and compare the memory they write.

    Args:
        device: The device's number; it is the current one.
        tier: The tier.

    Raises:
        LaunchError: If the two differ.
        Unsupported: If this Triton does not have the tier.
    """
    import torch

    from tileloom.launch.probe import BLOCK, SCALARS, launch_probe

    small, large, _, truth = SCALARS
    forms = [ADDRESS, ADDRESS, small, large, NUMBER, truth, None, BLOCK]

    def prepare(compiled: Any, kernel: Any, grid: tuple[int, int, int]) -> Entry:
        return _BUILDERS[tier](Variant(compiled, kernel, device), grid, forms)

    with torch.cuda.device(device):
        expected, found = launch_probe(device, prepare)
    if not torch.equal(expected, found):
        raise LaunchError(
            f"launch: the {tier} tier wrote {found.tolist()} in its self-test, Triton's own path "
            f"{expected.tolist()}. Try: report it with the versions of Triton and driver."
        )
