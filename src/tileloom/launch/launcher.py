"""`prepare(kernel)`: a launcher with the calling convention of Triton and less of its cost."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tileloom.errors import OptionError


class Launcher:
    """Launches one kernel; `prepare` makes it.

    `launcher[grid](*args, **constexprs)` takes what `kernel[grid](...)` takes and does the same.

    Attributes:
        kernel: The jitted function.
        options: Compile options given to `prepare`, the defaults of every launch.
    """

    def __init__(self, kernel: Any, options: dict[str, Any]) -> None:
        self.kernel = kernel
        self.options = options

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return functools.partial(self.kernel[grid], **self.options)

    def __repr__(self) -> str:
        name = getattr(self.kernel, "__name__", type(self.kernel).__name__)
        return f"<launcher of {name}>"


def prepare(
    kernel: Any,
    *,
    num_warps: int | None = None,
    num_stages: int | None = None,
    **options: Any,
) -> Launcher:
    """Make a launcher for a jitted kernel. Nothing is compiled and Triton is not loaded.

    Args:
        kernel: What `triton.jit` or `gluon.jit` made.
        num_warps: Warps of a block; default: Triton's.
        num_stages: Depth of Triton's software pipeline; default: Triton's.
        options: Other compile options of Triton, such as ``num_ctas`` or ``maxnreg``. Each call
            may override any of them by keyword, as with Triton.

    Returns:
        The launcher. `launcher[grid](...)` has exactly the calling convention of `kernel[grid]`.

    Raises:
        OptionError: If `kernel` was not made by `triton.jit` or `gluon.jit`.
    """
    if not hasattr(kernel, "__getitem__") or not hasattr(kernel, "run"):
        raise OptionError(
            f"launch.prepare: kernel is a {type(kernel).__name__}; it must be a function made by "
            "triton.jit or gluon.jit. Try: prepare(triton.jit(function))."
        )
    given = {"num_warps": num_warps, "num_stages": num_stages}
    return Launcher(kernel, {k: v for k, v in given.items() if v is not None} | options)
