"""The extra ``cute``: whether the CuTe DSL is installed, and what to say where it is not."""

from __future__ import annotations

import importlib.util
import re

from tileloom.errors import TileloomError

OLDEST = (4, 7)
_REMEDY = "Try: pip install 'nvidia-cutlass-dsl>=4.7'."


class MissingCuteError(TileloomError, ImportError):
    """nvidia-cutlass-dsl is not installed, or too old."""


def require_cute(name: str) -> None:
    """Refuse a function of `tileloom.cpasync` where the CuTe DSL cannot be imported.

    Args:
        name: The function that was asked for, for the text of the error.

    Raises:
        MissingCuteError: If nvidia-cutlass-dsl is missing, or older than 4.7.
    """
    if importlib.util.find_spec("cutlass") is None:
        raise MissingCuteError(
            f"cpasync: {name} is for kernels in CuTe DSL, and nvidia-cutlass-dsl is not installed. "
            f"{_REMEDY}"
        )
    import cutlass  # pyright: ignore[reportMissingImports]

    version = str(getattr(cutlass, "__version__", "unknown"))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < OLDEST:
        raise MissingCuteError(
            f"cpasync: {name} needs nvidia-cutlass-dsl 4.7 or newer; the module 'cutlass' found is "
            f"version {version}. {_REMEDY}"
        )
