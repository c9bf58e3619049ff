"""Everything rare that changes what a launch must do, so that no launch has to ask for each.

What tells us of itself (a fork, `refresh`) makes every launcher forget its tables: it costs a
launch nothing. What does not (Triton's hooks and knobs) lies in a few lists and dictionaries of
Triton's that are empty nearly always; a launch tests that they are, or are as they were.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol

from tileloom.launch import descriptors, driver


class _Forgetful(Protocol):
    def forget(self) -> None: ...

    def renew(self) -> None: ...


_everyone: weakref.WeakSet[Any] = weakref.WeakSet()


def register(one: _Forgetful) -> None:
    """Have `forget` called when something rare happens, after a fork `renew` before it.

    The object is not kept alive.
    """
    _everyone.add(one)


def refresh() -> None:
    """Make every launcher forget what it has prepared; the next launch decides anew.

    To be called after a change that no launcher can see: an environment variable of Triton, a
    knob of tileloom, or a jitted function whose caches were cleared. A forked child calls it by
    itself.
    """
    for one in list(_everyone):
        one.forget()


def _in_child() -> None:
    """Begin anew after a fork. A lock that a thread of the parent held would stay locked."""
    driver.renew()
    descriptors.renew()
    for one in list(_everyone):
        one.renew()
        one.forget()


os.register_at_fork(after_in_child=_in_child)


def signals(kernel: Any) -> list[Any]:
    """Return what a launch of the kernel has to test: lists and dictionaries, mostly empty.

    Args:
        kernel: The jitted function.

    Returns:
        Hooks around launches, hooks before them, and the knobs that were set from Python.
    """
    from triton import knobs

    runtime = knobs.runtime
    hooks = (runtime.launch_enter_hook, runtime.launch_exit_hook)
    calls = [hook.calls for hook in hooks if hasattr(hook, "calls")]
    return [*calls, kernel.pre_run_hooks, vars(runtime), vars(knobs.compilation)]


def has_hooks(kernel: Any) -> bool:
    """Whether somebody wants to see launches: profilers, or hooks of the kernel itself."""
    from triton import knobs

    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    return bool(kernel.pre_run_hooks) or any(
        hook is not None and getattr(hook, "calls", True) for hook in hooks
    )


def is_quiet(kernel: Any) -> bool:
    """Whether a launch may leave Triton's own path: no hooks, no debugging, no instrumentation."""
    from triton import knobs

    return not (
        has_hooks(kernel)
        or knobs.runtime.debug
        or getattr(kernel, "debug", None)
        or knobs.compilation.instrumentation_mode
        or knobs.runtime.add_stages_inspection_hook is not None
        or getattr(knobs.compilation, "fpsan_homomorphic_casts", None)
    )


def check_globals(kernel: Any) -> None:
    """Raise what Triton raises when a global variable that a kernel was compiled with has changed.

    Args:
        kernel: The jitted function.

    Raises:
        RuntimeError: In Triton's words.
    """
    for (name, _), (value, scope) in kernel.used_global_vals.items():
        now = scope.get(name, None)
        if now is not value and now != value:
            raise RuntimeError(
                f"Global variable {name} has changed since we compiled this kernel, from {value} "
                f"to {now}"
            )
