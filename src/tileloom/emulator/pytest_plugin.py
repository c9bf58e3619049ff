"""A fixture and a marker for tests of kernels: enable with ``-p tileloom.emulator.pytest_plugin``.

>>> def test_my_kernel(emulated):            # once for each schedule
...     my_kernel[grid](...)                 # an error in the kernel raises here

``@pytest.mark.emulate(schedules=("late", "random"), levels=("ttgir", "machine"), seeds=(0, 1))``
says how, and further options of `tileloom.emulator.run`; a test with the marker runs on the
emulator also without the fixture. By default: late, eager and random, at ``ttgir``, seed 0.
``map_cuda=True`` makes the test's CUDA devices the CPU, as `tileloom check` does for a whole file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

_DEFAULT = {"schedules": ("late", "eager", "random"), "levels": ("ttgir",), "seeds": (0,)}
_OPTIONS = ("arch", "sms", "max_steps", "ignore", "read_before_write_fence", "timeline", "collect")
_MAP = "map_cuda"


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line(
        "markers",
        "emulate(schedules=, levels=, seeds=, **options): how the fixture `emulated` runs kernels",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that has the fixture or the marker once for each schedule, level and seed."""
    markers = list(metafunc.definition.iter_markers("emulate"))
    if "emulated" not in metafunc.fixturenames and not markers:
        return
    chosen: dict[str, Any] = dict(_DEFAULT)
    for marker in reversed(markers):  # the closest one decides
        unknown = sorted(set(marker.kwargs) - {*_DEFAULT, *_OPTIONS, _MAP})
        if unknown or marker.args:
            raise pytest.UsageError(
                f"emulate: {unknown[0] if unknown else marker.args[0]!r} is not known; accepted "
                f"are {', '.join([*_DEFAULT, *_OPTIONS, _MAP])}."
            )
        for name in sorted(set(marker.kwargs) & set(_DEFAULT)):
            value = marker.kwargs[name]
            if not isinstance(value, (tuple, list)) or not value:
                one = value if isinstance(value, (str, int)) else _DEFAULT[name][0]
                raise pytest.UsageError(
                    f"emulate: {name} is {value!r}; it must be a tuple. Try: {name}=({one!r},)."
                )
        chosen.update(marker.kwargs)
    ways, names = [], []
    for level in chosen["levels"]:
        for schedule in chosen["schedules"]:
            for seed in chosen["seeds"] if schedule == "random" else (0,):
                options = {k: chosen[k] for k in (*_OPTIONS, _MAP) if k in chosen}
                ways.append({"level": level, "schedule": schedule, "seed": seed, **options})
                names.append(f"{level}-{schedule}" + (str(seed) if schedule == "random" else ""))
    metafunc.parametrize("_emulation", ways, ids=names, indirect=True)


@pytest.fixture(autouse=True)
def _emulation(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Run a chosen test's kernels on the emulator; leave every other test alone."""
    if not hasattr(request, "param"):
        yield None
        return
    from tileloom.emulator import run
    from tileloom.emulator.devices import cuda_on_cpu

    options = dict(request.param)
    is_mapped = options.pop(_MAP, False)
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(run(**options))
        if is_mapped:
            stack.enter_context(cuda_on_cpu(session.target))
        yield session


@pytest.fixture
def emulated(_emulation: Any) -> Any:
    """Run the test's kernels on the emulator; gives the `tileloom.emulator.Run`."""
    return _emulation
