"""Winners in bundles: what was tuned on one machine is launched on others without measuring.

A bundle holds the compiled winner and its record. There the driver and the compiler may be others,
but not the model of GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tileloom.errors import BundleError, OptionError
from tileloom.launch.aot import KernelSpec
from tileloom.launch.bundle import Bundle
from tileloom.launch.bundle_build import build_bundle
from tileloom.launch.bundle_format import Variant
from tileloom.tuning.identity import key_of
from tileloom.tuning.store import OPERATOR, Record


def pairs_of(records: Sequence[Record]) -> list[tuple[KernelSpec, str]]:
    """Describe the winners of records, for `build_bundle`.

    Args:
        records: The records.

    Returns:
        Specs and architectures, each compiled kernel once.
    """
    found: dict[tuple[str, str], KernelSpec] = {}
    for record in records:
        spec = _spec(record)
        found.setdefault((spec.name, spec.archs[0]), spec)
    return [(spec, arch) for (_, arch), spec in found.items()]


def _spec(record: Record) -> KernelSpec:
    problem, config = record.problem, record.config
    given = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    types = problem["types"]
    names = problem["parameters"]
    values = {**given, **problem["constants"], **config.kwargs}
    extra = {"num_ctas": config.num_ctas, "maxnreg": config.maxnreg}
    usual = {"num_ctas": 1, "maxnreg": None}
    short = str(problem["kernel"]).rpartition(":")[2]
    return KernelSpec(
        name=f"{short}[{record.key[:16]}]",
        function=problem["kernel"],
        gluon=problem["gluon"],
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={name: values[name] for name in names if name not in types},
        archs=(problem["arch"],),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aligned=tuple(problem["aligned"]),
        options=problem["options"] | {n: v for n, v in extra.items() if v != usual[n]},
        file=record.file,
    )


def bundle_winners(path: Path | str, records: Sequence[Record], **options: Any) -> list[Variant]:
    """Compile the winners of records and write them, with the records, into a bundle.

    Args:
        path: The file.
        records: What `Store` has. Those of operators are left out: which kernels a call of an
            operator launches is not in them.
        options: Of `build_bundle`.

    Returns:
        What the bundle holds.

    Raises:
        OptionError: If there is no record.
        CompileError, BundleError, OSError: As `build_bundle`.
    """
    of_kernels = [record for record in records if record.problem["stages"] != OPERATOR]
    if records and not of_kernels:
        raise OptionError(
            "tuning: the winners to bundle are those of operators' calls, which say nothing of the "
            "kernels that a call launches. Try: winners of kernels; a bundle of operators is made "
            "by tileloom.launch.build_bundle."
        )
    if not records:
        raise OptionError(
            "tuning: there is no winner to bundle. Try: `tileloom cache ls`, after a program that "
            "tunes its kernels has run."
        )
    winners = [record.as_json() for record in of_kernels]
    return build_bundle(path, pairs_of(of_kernels), winners=winners, **options)


def winner_in(bundle: Bundle, problem: Mapping[str, Any], gpu: str) -> Record | None:
    """Find a bundle's winner for a problem.

    Args:
        bundle: The bundle.
        problem: What `Problem.as_json` returned.
        gpu: The GPU's model.

    Raises:
        BundleError: If a record in it cannot be read.
    """
    return _records(bundle).get(key_of(problem, {"gpu": gpu}))


@functools.lru_cache(maxsize=8)
def _records(bundle: Bundle) -> dict[str, Record]:
    found: dict[str, Record] = {}
    for number, winner in enumerate(bundle.winners()):
        try:
            record = Record.from_json(winner)
        except (KeyError, TypeError, ValueError) as error:
            raise BundleError(
                f"bundle: winner number {number} of '{bundle.path}' cannot be read ({error}). Try: "
                "build it again with `tileloom cache export`."
            ) from None
        found[key_of(record.problem, {"gpu": record.platform.gpu})] = record
    return found
