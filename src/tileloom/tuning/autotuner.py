"""The autotuner: compiles a kernel's configs, measures them once, keeps the winner, launches it.

    candidates -> compiled (`loaded`) -> compared (`tune`) -> winner -> kept (`store`) -> launched

It has the calls that modules written by `torch.compile` make on Inductor's own: ``run(...,
stream=)``, ``precompile``, ``set_compile_info``, ``launchers``, pickling.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tileloom.errors import ArgumentError, OptionError, UnsupportedError
from tileloom.launch import bundle_use, compat, watch
from tileloom.tuning import declared
from tileloom.tuning.arguments import has_room
from tileloom.tuning.bundled import winner_in
from tileloom.tuning.config import Config, distinct
from tileloom.tuning.declared import Declared
from tileloom.tuning.hints import HeuristicType, Sizes
from tileloom.tuning.identity import Platform, platform_of
from tileloom.tuning.launchers import check_tensors
from tileloom.tuning.loaded import Loaded
from tileloom.tuning.measure import CallTimer, DeviceTimer
from tileloom.tuning.precompile import Kernel
from tileloom.tuning.stages import stages_of
from tileloom.tuning.store import Record, Store
from tileloom.tuning.tune import Search, Session, Stages, tune

_SHOWN = ("kernel_name", "kernel_flop", "kernel_num_gb")


class CachingAutotuner:
    """One kernel with its candidates; `cached.cached_autotune` makes it. Threads may share it.

    Attributes:
        fn: The jitted function; in a copy out of a pickle what a compile worker said of it, a
            `Declared`, or None.
        configs: The candidates, the default first.
        launchers: Functions that launch compiled candidates; one, once the winner is known.
        triton_meta: What generated code states of signature and device.
        inductor_meta: Facts and settings of generated code.
        size_hints: Powers of two by dimension, or None.
        heuristic_type: The decorator's kind.
        filename: The file of generated code, or None.
        device_props: Properties of the device.
        autotune_cache_info: ``winner``, a flat dictionary, and ``found_by``, once it is known.
    """

    def __init__(
        self,
        fn: Any,
        triton_meta: Mapping[str, Any],
        configs: Iterable[Any],
        *,
        mutated_arg_names: Sequence[str] = (),
        reset_to_zero_arg_names: Sequence[str] = (),
        optimize_mem: bool = True,
        heuristic_type: HeuristicType = HeuristicType.USER_AUTOTUNE,
        size_hints: Sizes | None = None,
        inductor_meta: Mapping[str, Any] | None = None,
        custom_kernel: bool = False,
        filename: str | None = None,
        search: Search | None = None,
    ) -> None:
        """Describe the kernel; nothing is compiled.

        Args:
            fn: The jitted function.
            triton_meta: ``signature``, ``constants``, ``configs``, ``device``.
            configs: The candidates.
            mutated_arg_names: Arguments that the kernel reads and writes.
            reset_to_zero_arg_names: Arguments that each launch is to find filled with zeros.
            optimize_mem: Whether copies of changed arguments may lie in host memory where the
                device has no room.
            heuristic_type: The decorator's kind.
            size_hints: Powers of two by dimension.
            inductor_meta: Facts and settings: the grid, coordinate descent.
            custom_kernel: Whether a user wrote it: then configs that spill are measured too.
            filename: The file of generated code that holds it.
            search: Chooses among further configs; see `tune.Stages`.

        Raises:
            OptionError: If there is no config, or an argument's name is none of the kernel's.
            UnsupportedError: If the binary is to be stored for a C++ program.
        """
        self.fn: Any = fn
        self._name: str = fn.__name__
        self.configs = distinct(Config.of(config) for config in configs)
        self.triton_meta = dict(triton_meta)
        self.inductor_meta = dict(inductor_meta or {})
        self.size_hints = size_hints
        self.heuristic_type = heuristic_type
        self.filename = filename
        self.custom_kernel = custom_kernel
        self.optimize_mem = optimize_mem
        self.mutated_arg_names = tuple(mutated_arg_names)
        self.reset_to_zero_arg_names = tuple(reset_to_zero_arg_names)
        self.device_props = triton_meta["device"]
        self.compile_id: Any = None
        self.is_backward = False
        self.autotune_cache_info: dict[str, Any] = {}
        self.launchers: list[Any] = []
        self.lock = threading.RLock()
        self._search = search
        self._is_warm = False
        self._hashes: dict[Config, str] = {}
        self._assembler = ""
        self._reload: Callable[[], CachingAutotuner] | None = None
        self._loaded_: Loaded | None = None
        self._check()
        watch.register(self)

    def _check(self) -> None:
        if not self.configs:
            raise OptionError(
                f"tuning: the list of configs of '{self._name}' is empty; it needs at least one. "
                "Try: [tileloom.tuning.Config({'XBLOCK': 128})]."
            )
        for what, names in (
            ("mutated_arg_names", self.mutated_arg_names),
            ("reset_to_zero", self.reset_to_zero_arg_names),
        ):
            for name in names:
                if name not in self.fn.arg_names:
                    raise OptionError(
                        f"tuning: {what} names {name!r}, which is no argument of '{self._name}'; "
                        f"those are {', '.join(self.fn.arg_names)}. Try: one of these."
                    )
        if self.inductor_meta.get("store_cubin"):
            raise UnsupportedError(
                f"tuning: the binary of '{self._name}' is to be stored for a C++ program "
                "(store_cubin), which tileloom does not do. Try: a bundle, "
                "tileloom.launch.build_bundle, for Python programs without a compiler."
            )

    def __repr__(self) -> str:
        return f"<autotuner of {self._name} with {len(self.configs)} configs>"

    @property
    def winner(self) -> Config:
        """The config that launches take.

        Raises:
            OptionError: If it is not known yet.
        """
        known = self.autotune_cache_info.get("winner")
        if known is None:
            raise OptionError(
                f"tuning: the winner of '{self._name}' is not known before its first launch. Try: "
                "launch it once."
            )
        return Config.from_dict(known)

    # The seams: a test, or another way to measure, replaces these in a subclass

    def make_timer(self, restore: Callable[[], Any]) -> CallTimer:
        """Make what takes the time of a launch.

        Args:
            restore: Gives the launch's arguments their values back; to be called ahead of each.
        """
        return DeviceTimer(self._device, before=restore)

    def platform(self) -> Platform:
        """Return what this device's winners are stored under."""
        return platform_of(self._device)

    # What generated code and its compile workers call

    def set_compile_info(self, compile_id: Any, is_backward: bool) -> None:
        """Note which compilation the kernel belongs to, for logs."""
        self.compile_id = compile_id
        self.is_backward = is_backward

    def precompile(
        self,
        warm_cache_only: bool = False,
        reload_kernel: Callable[[], CachingAutotuner] | None = None,
        static_triton_bundle_key: str | None = None,
    ) -> None:
        """Compile what the first launch will need: the winner, or all candidates.

        Args:
            warm_cache_only: Only fill Triton's cache, as in a compile worker: no GPU is asked.
            reload_kernel: Makes this kernel anew from its source, for a copy out of a pickle.
            static_triton_bundle_key: Accepted and not used: bundles are those of tileloom.launch.

        Raises:
            NoTritonConfigsError: If no config compiles.
            DeviceError: If there is no GPU.
        """
        with self.lock:
            self._reload = reload_kernel or self._reload
            if warm_cache_only:
                self._warm()
            elif not self.launchers:
                found = self._find()
                if found is not None:
                    self._use(found.config, found.found_by)
                    return
                self._loaded.load_all(self.configs)
                self.launchers = [self._loaded.launches[c].launcher for c in self._runnable()]

    def _warm(self) -> None:
        """Compile in this process, a thread for each config: it is a worker of another's pool."""
        loaded = self._loaded
        compiled = loaded.kernel.compile_all(self.configs, loaded.capability)
        for config, found in compiled.items():
            if isinstance(found, Exception):
                loaded.failures[config] = f"{type(found).__name__}: {found}"
            else:
                self._hashes[config] = found.hash
        if len(loaded.failures) == len(self.configs):
            raise loaded.none_runs()
        # Workers of PyTorch's take the assembler that comes with it, not Triton's.
        self._assembler = compat.assembler_version(loaded.capability)
        self._is_warm = loaded.is_warm = True

    def prepare_for_pickle(self) -> tuple[Any, ...]:
        """Drop what no pickle holds, and return it for `restore_after_unpickle`."""
        kept = self.fn, self.launchers, self._loaded_
        said = declared.of(self.fn) if self._is_warm and self.fn is not None else None
        self.fn, self.launchers, self._loaded_ = said, [], None
        return (*kept, self.__dict__.pop("run", None))

    def restore_after_unpickle(self, old_values: tuple[Any, ...] | None) -> None:
        """Take back what `prepare_for_pickle` returned; None in another process."""
        if old_values:
            self.fn, self.launchers, self._loaded_, run = old_values
            if run is not None:
                self.__dict__["run"] = run

    def prepare_for_caching(self) -> None:
        """Nothing needs to be dropped before the kernel is kept in a cache."""

    def is_statically_launchable(self) -> bool:
        """Whether PyTorch's own static launcher could launch it: it is never asked to."""
        return False

    def __getstate__(self) -> dict[str, Any]:
        if self.launchers:
            raise OptionError(
                f"tuning: '{self._name}' is pickled with launchers, which belong to this process. "
                "Try: prepare_for_pickle() first."
            )
        said = self.fn if isinstance(self.fn, Declared) else None
        dropped = {"lock": None, "fn": said, "_loaded_": None, "_reload": None}
        return {**self.__dict__, **dropped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.renew()
        watch.register(self)

    def forget(self) -> None:
        """Drop what is loaded, not what is known; the next launch loads the winner anew."""
        with self.lock:
            self.__dict__.pop("run", None)
            self.launchers, self._loaded_ = [], None

    def renew(self) -> None:
        """Begin anew in a forked child."""
        self.lock = threading.RLock()

    def run(self, *args: Any, stream: Any, benchmark_run: bool = False, **kwargs: Any) -> Any:
        """Launch the kernel; the first time, find its winner.

        Once the winner is known, this attribute is the winner's launcher itself.

        Args:
            args: The kernel's arguments but for its constants, then extra ones of the grid.
            stream: The CUstream.
            benchmark_run: Accepted for Inductor's benchmarks; it changes nothing.
            kwargs: Arguments by name.

        Returns:
            What the launch returns: Triton's CompiledKernel, or None if the grid is empty.

        Raises:
            ArgumentError: If an argument is missing or there are too many.
            DeviceError: If a tensor is not on a GPU, or there is none.
            NoTritonConfigsError: If no config runs.
        """
        with self.lock:
            if "winner" not in self.autotune_cache_info or len(self.launchers) != 1:
                self._decide(args, kwargs)
        launcher = self.launchers[0]
        result = launcher(*args, **kwargs, stream=stream)
        self.__dict__["run"] = launcher
        return result

    # From candidates to the winner

    @property
    def _device(self) -> torch.device:
        return torch.device(self.device_props.type, self.device_props.index or 0)

    @property
    def _is_kept(self) -> bool:
        """Whether winners go to the store and come from there."""
        meta = self.inductor_meta
        return meta.get("autotune_local_cache", True) and not meta.get("force_disable_caches")

    @property
    def _shown_name(self) -> str:
        return str(self.inductor_meta.get("kernel_name") or self._name)

    @property
    def _loaded(self) -> Loaded:
        if self._loaded_ is None:
            if isinstance(self.fn, Declared):
                self.fn.reload = self._reload
            elif self.fn is None:
                if self._reload is None:
                    raise declared.not_here(self._name)
                self.fn = self._reload().fn
            kernel = Kernel.of(self.fn, self.triton_meta, self.inductor_meta, self.filename)
            cc = int(self.device_props.cc)
            made = Loaded(kernel, self._device, cc, self.inductor_meta, self._profile)
            made.is_warm, made.hashes, self._loaded_ = self._is_warm, self._hashes, made
        return self._loaded_

    @property
    def _stages(self) -> Stages:
        return stages_of(
            self.configs,
            self.triton_meta | {"device": self.device_props},
            self.inductor_meta,
            self.heuristic_type,
            self.size_hints,
            name=self._name,
            is_custom=self.custom_kernel,
            search=self._search,
        )

    def _runnable(self) -> list[Config]:
        found = self._loaded.runnable(self.configs, self._stages.most_spills)
        if not found:
            raise self._loaded.none_runs()
        return found

    def _is_tuned(self, stages: Stages) -> bool:
        """Whether there is anything to choose."""
        return len(self.configs) > 1 or stages.names != "list"

    def _identity(self, stages: Stages) -> tuple[dict[str, Any], Platform]:
        loaded = self._loaded
        problem = loaded.kernel.problem(self.size_hints, stages.names, loaded.arch)
        platform = self.platform()
        if self._assembler:
            platform = replace(platform, assembler=self._assembler)
        return problem.as_json(), platform

    def _is_enough(self, record: Record) -> bool:
        """Whether a record knows every candidate, and its winner is one or was found by more."""
        known = record.known()
        if any(config not in known for config in self.configs):
            return False
        return record.found_by != "list" or record.config in self.configs

    def _find(self) -> Record | None:
        """Look the winner up: in the active bundle, then in the store."""
        stages = self._stages
        if not self._is_tuned(stages):
            return None
        problem, platform = self._identity(stages)
        bundle = bundle_use.active_bundle()
        if bundle is not None and (found := winner_in(bundle, problem, platform.gpu)) is not None:
            return found
        found = Store().find(problem, platform) if self._is_kept else None
        return found if found is not None and self._is_enough(found) else None

    def _decide(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Leave one launcher: of the winner that is known, or that is found now."""
        stages = self._stages
        arguments = self._in_order(args, kwargs)
        names = self._loaded.kernel.parameters(self.inductor_meta)
        check_tensors(self._loaded.kernel, self._shown_name, dict(zip(names, arguments)))
        if "winner" in self.autotune_cache_info:
            self._use(self.winner, self.autotune_cache_info["found_by"])
            return
        if not self._is_tuned(stages):
            self._loaded.load_all(self.configs)
            self._use(self._runnable()[0], "list")
            return
        found = self._find()
        if found is None and not self._is_kept:
            found = self._tune(None, stages, arguments)
        elif found is None:
            found = Store().find_or_make(
                *self._identity(stages),
                self._is_enough,
                lambda known: self._tune(known, stages, arguments),
            )
        self._use(found.config, found.found_by)

    def _use(self, config: Config, found_by: str) -> None:
        """Leave one config, and let go of all others."""
        loaded = self._loaded
        loaded.load(config)
        if config not in loaded.launches:
            raise loaded.none_runs()
        loaded.keep(config)
        wanted = loaded.kernel.wanted(config, loaded.arch)
        bundle_use.record_wanted(loaded.kernel.fn, wanted, loaded.kernel.file)
        self.launchers = [loaded.launches[config].launcher]
        self.autotune_cache_info |= {"winner": config.to_dict(), "found_by": found_by}

    def _tune(self, record: Record | None, stages: Stages, arguments: Sequence[Any]) -> Record:
        """Measure, with the arguments of a launch, what a record does not know."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise OptionError(
                f"tuning: '{self._name}' is first launched inside a CUDA graph's capture, which "
                "measuring would break. Try: launch it once before the capture."
            )
        is_kept = record is not None and (
            record.found_by != "list" or record.config in self.configs
        )
        found = tune(
            self._loaded,
            stages,
            self._session(arguments),
            record.known() if record is not None and is_kept else {},
            record.config if record is not None and is_kept else None,
        )
        problem, platform = self._identity(stages)
        order = dict.fromkeys([*(c for c in self.configs if c in found.tried), *found.tried])
        return Record(
            problem=problem,
            platform=platform,
            winner=found.winner.to_dict(),
            found_by=found.found_by,
            candidates=tuple(found.tried[config] for config in order),
            measured=found.measured,
            file=self.filename or "",
        )

    def _session(self, arguments: Sequence[Any]) -> Session:
        return Session(
            self._loaded,
            arguments,
            self.mutated_arg_names,
            self.reset_to_zero_arg_names,
            self.make_timer,
            has_room if self.optimize_mem else lambda tensor: True,
        )

    def _in_order(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        names = self._loaded.kernel.parameters(self.inductor_meta)
        given = dict(zip(names, args)) | dict(kwargs)
        if len(args) > len(names) or set(given) != set(names):
            raise ArgumentError(
                f"tuning: '{self._name}' takes {', '.join(names)}; given are {len(args)} by "
                f"position{''.join(f', {name}' for name in kwargs)}. Try: each of them once, and "
                "stream= by name."
            )
        return [given[name] for name in names]

    def _profile(self, config: Config, stream: Any) -> dict[str, Any]:
        """What PyTorch's profiler shows beside a launch."""
        meta = self.inductor_meta
        return {
            "kernel_file": self.filename or "",
            "kernel_backend": "triton",
            "stream": stream,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "kernel_kwargs": ",".join(f"{name}={value}" for name, value in config.kwargs.items()),
            **{name: meta[name] for name in _SHOWN if name in meta},
        }
