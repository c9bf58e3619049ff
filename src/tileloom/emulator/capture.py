"""Catching kernel launches: a driver that Triton takes for a GPU, and what a launch does here.

Nothing of Triton is patched. A driver of our own is made the active one, and a stage hook keeps the
compiler's first stages and hands over the IR's text in place of a binary. Triton does
specialisation, caching and descriptor handling as ever, and calls our launcher with the CPU
tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import tempfile
import threading
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from triton import knobs as triton_knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver

from tileloom.emulator import costs, dialect, dtypes
from tileloom.emulator.costs import Assembled
from tileloom.emulator.im2col import Im2colDesc
from tileloom.emulator.ir import parse_type
from tileloom.emulator.irtext import read_module
from tileloom.emulator.lower import Program
from tileloom.emulator.memory import Desc, Storage, storage_bytes
from tileloom.emulator.report import LaunchError

if TYPE_CHECKING:
    from tileloom.emulator.session import Run

_sessions: list[Run] = []
_threads: list[int] = []
_programs: dict[tuple[str, str], Program] = {}
_LEVELS = {"ttir": 1, "ttgir": 2, "machine": 3}


def current() -> Run:
    """Return the innermost emulated run."""
    return _sessions[-1]


class _Utils:
    """What Triton asks of a driver about binaries and devices."""

    def load_binary(self, name: str, kernel: Any, shared: int, device: int) -> tuple[Any, ...]:
        text = kernel.decode() if isinstance(kernel, bytes) else kernel
        return 0, _program(text), 0, 0, 1024

    def unload_module(self, module: Any) -> None:
        """Forget nothing: programs are kept with their text."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        session = current()
        return {
            "max_shared_mem": session.target.smem,
            "multiprocessor_count": session.target.sms,
            "warpSize": 32,
            "max_num_regs": 65536,
            "sm_clock_rate": 1,
            "mem_clock_rate": 1,
            "mem_bus_width": 1,
        }


def _program(text: str) -> Program:
    header, _, body = text.partition("\n")
    language, level, said = header.removeprefix("// ").split(" ", 2)
    key = (text, level)
    found = _programs.get(key)
    if found is None:
        # Cheap enough that nothing is kept on disk: a few milliseconds for the largest kernels.
        found = _programs[key] = Program(read_module(body), level=level)
        found.is_gluon = language == "gluon"
        facts: dict[str, Any] | None = json.loads(said)
        if facts is not None:
            notes = tuple(facts.pop("notes"))
            found.assembled = Assembled(**facts, notes=notes)
    return found


def _flatten(name: str, kind: Any, value: Any, out: list[tuple[str, Any, Any]]) -> None:
    if isinstance(kind, tuple):
        for i, (k, v) in enumerate(zip(kind, value)):
            _flatten(f"{name}[{i}]", k, v, out)
    elif kind != "constexpr":
        out.append((name, kind, value))


class _Arguments:
    """Turns the arguments of a launch into values of the frame."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self._known: dict[int, Storage] = {}

    def storage(self, tensor: torch.Tensor, name: str) -> Storage:
        if tensor.device.type != "cpu":
            raise LaunchError(
                f"emulator: argument '{name}' is on {tensor.device}; the emulator takes CPU "
                f"tensors. "
                "Try: pass the tensor's .cpu()."
            )
        elem = dtypes.TORCH.get(tensor.dtype)
        if elem is None:
            raise LaunchError(
                f"emulator: argument '{name}' has dtype {tensor.dtype}; supported are "
                f"{', '.join(str(d).removeprefix('torch.') for d in dtypes.TORCH)}."
            )
        pointer = tensor.untyped_storage().data_ptr()
        found = self._known.get(pointer) if pointer else None
        if found is None:
            data = storage_bytes(tensor)
            found = Storage(len(self.storages), name, data, tensor.element_size())
            found.address = pointer
            self.storages.append(found)
            self._known[pointer] = found
        return found

    def flatten(self, signature: list[tuple[str, Any]], args: tuple[Any, ...]) -> list[Any]:
        flat: list[tuple[str, Any, Any]] = []
        for (name, kind), value in zip(signature, args):
            _flatten(name, kind, value, flat)
        out: list[Any] = []
        for name, kind, value in flat:
            self._one(name, kind, value, out)
        return out

    def _one(self, name: str, kind: str, value: Any, out: list[Any]) -> None:
        if kind.startswith("tensordesc"):
            base = value.base
            storage = self.storage(base, name)
            elem = dtypes.TORCH[base.dtype]
            nan = getattr(value, "padding", "zero") == "nan"
            shape, strides = [int(x) for x in value.shape], [int(x) for x in value.strides]
            block = tuple(int(x) for x in value.block_shape)
            if getattr(value, "round_f32_to_tf32", False):
                raise LaunchError(
                    f"emulator: tensor descriptor '{name}' has round_f32_to_tf32=True, which is "
                    "not played. Try: without it; wgmma rounds to tf32 itself."
                )
            place = (storage, base.storage_offset(), shape, strides, block, elem, nan, name)
            if getattr(value, "mode", "") == "im2col":
                steps = tuple(value.element_strides or [1] * len(shape))[1:-1]
                lower = tuple(value.pixel_box_lower_corner)
                upper = tuple(value.pixel_box_upper_corner)
                desc = Im2colDesc(*place, None, None, lower, upper, steps)
            else:
                desc = Desc(*place)
            from tileloom.emulator.lower_global import check_descriptor

            check_descriptor(desc, base.data_ptr(), name)
            out += [desc, *shape, *strides]
        elif isinstance(value, torch.Tensor):
            storage = self.storage(value, name)
            out.append(storage.base + value.storage_offset() * value.element_size())
        elif hasattr(value, "data_ptr"):
            inner = getattr(value, "base", None)
            if not isinstance(inner, torch.Tensor):
                raise LaunchError(
                    f"emulator: argument '{name}' is a {type(value).__name__}; the emulator needs "
                    f"a "
                    "torch tensor to know its size."
                )
            storage = self.storage(inner, name)
            out.append(storage.base + inner.storage_offset() * inner.element_size())
        elif kind.startswith("*"):
            out.append(0 if value is None else int(value))
        elif kind.startswith(("fp", "bf")):
            elem = {"fp64": "f64", "fp16": "f16", "bf16": "bf16"}.get(kind, "f32")
            out.append(dtypes.scalar(dtypes.round_to(np.float64(value), elem), elem))
        elif kind in ("i1", "u1"):
            out.append(bool(value))
        else:
            bits = int(re.sub(r"\D", "", kind))
            out.append(dtypes.wrap(int(value), f"i{bits}"))


class _Launcher:
    """What Triton calls to launch a kernel."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self._signature = list(src.signature.items())
        self._pdl = bool(getattr(metadata, "launch_pdl", False))

    def __call__(
        self, x: int, y: int, z: int, stream: Any, program: Program, packed: Any, metadata: Any,
        enter: Any, leave: Any, *args: Any,
    ) -> None:  # fmt: skip
        if max(y, z) > 65535 or x >= 2**31:
            raise LaunchError(
                f"emulator: the grid of kernel '{program.name}' is {(x, y, z)}; the hardware takes "
                "at most 2147483647 x 65535 x 65535. Try: the longest axis first."
            )
        arguments = _Arguments()
        values = arguments.flatten(self._signature, args)
        expected = len(program.module.kernel.args)
        if len(values) < expected:
            raise LaunchError(
                f"emulator: kernel '{program.name}' takes {expected} values and the launch gives "
                f"{len(values)}: {[k for k, _ in self._signature]}."
            )
        storages = arguments.storages
        current().launch(program, values[:expected], (x, y, z), storages, pdl=self._pdl)


def played_once(fn: Any, *args: Any, quantiles: Any = None, **options: Any) -> Any:
    """Stand for `triton.testing.do_bench`: run `fn` once, and call every time a millisecond."""
    fn()
    return [1.0] * len(quantiles) if quantiles else 1.0


class EmulatedDriver(DriverBase):
    """The driver that Triton sees inside an emulated run."""

    def __init__(self, capability: int, level: str, assembles: bool) -> None:
        self._assembles = assembles
        self.utils = _Utils()
        self.launcher_cls = _Launcher
        self._capability = capability
        self._level = level

    @classmethod
    def is_active(cls) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Tell Triton that this driver can be used; it is never found by search."""
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Return the type's own name: no C++ launcher is compiled."""
        return ty

    def get_current_target(self) -> GPUTarget:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the architecture that kernels are compiled for."""
        return GPUTarget("cuda", self._capability, 32)

    def get_active_torch_device(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
    ) -> torch.device:
        """Return the device of the tensors."""
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        """Return what plays a candidate of an autotuner once: all are checked, none is timed."""
        return played_once

    def get_current_device(self) -> int:
        """Return a number for what is compiled for, so that caches keep them apart."""
        return 10_000 + self._capability * 10 + _LEVELS[self._level] + 5 * self._assembles

    def set_current_device(self, device: int) -> None:
        """Take any device: there is one."""

    def get_current_stream(self, device: int | None = None) -> int:
        """Return the only stream."""
        return 0

    def get_device_interface(self) -> Any:
        """Return torch's CUDA module, as Triton expects."""
        return torch.cuda

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        """Return a small buffer: there is no cache to flush."""
        return torch.empty(1, dtype=torch.int32)

    def clear_cache(self, cache: torch.Tensor) -> None:
        """Do nothing: there is no cache."""


def _stages_hook(
    self: Any = None,
    stages: Any = None,
    options: Any = None,
    language: Any = None,
    capability: Any = None,
) -> Any:
    session = current()
    level = session.options.level
    assembles = level == "machine" and "registers" in session.options.costs
    if self is None:  # Triton 3.7 and later ask for a cache key.
        key = f"tileloom-emulator-{level}-{assembles}"
        return key, key
    name = "gluon" if "gluon" in str(language).lower() else "triton"
    kept = {k: v for k, v in stages.items() if k in dialect.kept_stages(name, level)}
    rest = dict(stages)
    stages.clear()
    stages.update(kept)

    def finish(src: Any, metadata: dict[str, Any]) -> bytes:
        said: Assembled | None = None
        if assembles:
            said = costs.assemble(src, rest, metadata, vars(options), capability or 90)
        return _finish(src, metadata, name, level, capability or 90, said)

    stages["cubin"] = finish
    return None


def _finish(
    src: Any, metadata: dict[str, Any], language: str, level: str, capability: int,
    said: Assembled | None,
) -> bytes:  # fmt: skip
    """Stand in for the last stage: the 'binary' is the text of the IR."""
    if level == "machine":
        dialect.run_machine_passes(src, capability)
    text = src.str()
    metadata["shared"] = _shared_bytes(src, text, level, capability)
    metadata.setdefault("num_warps", 4)
    metadata.setdefault("tensordesc_meta", None)
    for key in ("tmem_size", "global_scratch_size", "profile_scratch_size"):
        metadata.setdefault(key, 0)
    for key in ("global_scratch_align", "profile_scratch_align"):
        metadata.setdefault(key, 1)
    match = re.search(r"tt\.func public @([\w.$]+)", text)
    metadata["name"] = match.group(1) if match else "kernel"
    facts = json.dumps(dataclasses.asdict(said) if said is not None else None)
    return f"// {language} {level} {facts}\n{text}".encode()


_ALLOCATION = re.compile(r"ttg\.local_alloc.*(!ttg\.memdesc<.*>)[^>]*$", re.M)


def _shared_bytes(src: Any, text: str, level: str, capability: int) -> int:
    """Return how much shared memory the kernel needs: Triton refuses what the card has not.

    Before the compiler has placed the buffers, their sum tells whether it is worth asking it to.
    """
    if level != "machine":
        kinds = [parse_type(t.split(" loc(")[0]) for t in _ALLOCATION.findall(text)]
        total = sum(int(np.prod(k.shape)) * dtypes.size_of(k.elem) for k in kinds)
        if 2 * total <= current().target.smem:
            return 0
        dialect.run_machine_passes(src, capability, fences=False)
        text = src.str()
    shared = re.search(r"ttg\.shared = (\d+)", text[:20000])
    return int(shared.group(1)) if shared else 0


@contextlib.contextmanager
def captured(session: Run) -> Generator[None]:
    """Let every launch inside the block go to `session`; give the old driver back at its end."""
    dialect.check_version()
    here = threading.get_ident()
    if _threads and _threads[-1] != here:
        raise LaunchError(
            "emulator: another thread is inside emulator.run; Triton's driver is one for all "
            "threads. Try: one process for each."
        )
    before = driver._active
    hook = triton_knobs.runtime.add_stages_inspection_hook
    _sessions.append(session)
    _threads.append(here)
    with tempfile.TemporaryDirectory(prefix="tileloom-emulator-") as folder:
        try:
            options = session.options
            assembles = "registers" in options.costs
            driver.set_active(EmulatedDriver(session.capability, options.level, assembles))
            hooks: Any = triton_knobs.runtime
            hooks.add_stages_inspection_hook = _stages_hook
            with dialect.quiet(), triton_knobs.cache.scope():
                triton_knobs.cache.dir = folder
                yield
        finally:
            triton_knobs.runtime.add_stages_inspection_hook = hook
            driver._active = before
            _sessions.pop()
            _threads.pop()
