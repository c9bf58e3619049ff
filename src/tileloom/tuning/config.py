"""`Config`: one way to compile a kernel, as `triton.Config` says it, but a value.

Unlike Triton's, configs compare and hash by what they say, and become plain dictionaries that JSON
can hold. The module loads neither Triton nor torch.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tileloom.errors import OptionError, known_keywords, shown_value
from tileloom.tuning.hints import MAX_TENSOR

OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
"""Compile options of a config; every other entry of its dictionary is an argument of the kernel."""

WARPS = (1, 2, 4, 8, 16, 32)

# Names that a tile's dimension has, by Inductor's custom and by that of Triton's tutorials.
_BLOCK = re.compile(r"([XYZ]|R\d?_?)?BLOCK(_(\d+|[DHKMNXYZ]|SIZE(_[KMN])?))?")

# Fields that only some builds of Triton have, none of those that tileloom supports.
_ABSENT = ("num_consumer_groups", "num_buffers_warp_spec")
_HOOKS = ("pre_hook", "ir_override")


@known_keywords
@dataclass(frozen=True, eq=False)
class Config:
    """Constants and compile options of a kernel.

    Two configs are equal if they compile the same: the order of `kwargs` does not count, nor does
    `is_scalable`.

    Attributes:
        kwargs: The kernel's constexpr arguments by name. Not to be changed: use `with_kwargs`.
        num_warps: Warps of a program.
        num_stages: Depth of the software pipeline.
        num_ctas: Programs of a cluster.
        maxnreg: Registers a thread may use at most, or None.
        is_scalable: Whether `registers.scaled_config` may halve its reduction blocks.
    """

    kwargs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    num_ctas: int = 1
    maxnreg: int | None = None
    is_scalable: bool = field(default=True, repr=False)

    def __post_init__(self) -> None:
        given: object = self.kwargs
        if not isinstance(given, Mapping):
            raise OptionError(
                f"Config: kwargs is {shown_value(given)}; it must be a dictionary from names of "
                "compile-time arguments to their values. Try: Config({'XBLOCK': 128})."
            )
        object.__setattr__(self, "kwargs", dict(self.kwargs))
        for name, value in self.kwargs.items():
            _check_argument(self, name, value)
        for name in OPTIONS:
            value = getattr(self, name)
            if name == "maxnreg" and value is None:
                continue
            least = 0 if name == "num_stages" else 1
            if type(value) is not int or value < least:
                raise OptionError(
                    f"Config: {name} is {shown_value(value)}; it must be an integer of at least "
                    f"{least}. Try: Config({{...}}, {name}={128 if name == 'maxnreg' else 1})."
                )
        if self.num_warps not in WARPS:
            raise OptionError(
                f"Config: num_warps is {self.num_warps}; a program has 1, 2, 4, 8, 16 or 32 warps. "
                "Try: num_warps=4."
            )

    def _identity(self) -> tuple[Any, ...]:
        return (
            tuple(sorted(self.kwargs.items())),
            *(getattr(self, name) for name in OPTIONS),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __str__(self) -> str:
        return ", ".join(f"{name}: {value}" for name, value in self.to_dict().items())

    def with_kwargs(self, **kwargs: Any) -> Config:
        """Return a copy with some of the kernel's arguments replaced or added."""
        return replace(self, kwargs={**self.kwargs, **kwargs})

    def without_kwargs(self, *names: str) -> Config:
        """Return a copy without some of the kernel's arguments; names it does not have are fine."""
        kept = {name: value for name, value in self.kwargs.items() if name not in names}
        return replace(self, kwargs=kept)

    def all_kwargs(self) -> dict[str, Any]:
        """Return constants and compile options in one dictionary, as a launch takes them."""
        options = {name: getattr(self, name) for name in OPTIONS}
        return {**self.kwargs, **{name: v for name, v in options.items() if v is not None}}

    def to_dict(self) -> dict[str, Any]:
        """Return the config as one flat dictionary: kwargs, num_warps, num_stages.

        `num_ctas` and `maxnreg` stand in it only where they are not 1 and None.
        """
        flat = {**self.kwargs, "num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.num_ctas != 1:
            flat["num_ctas"] = self.num_ctas
        if self.maxnreg is not None:
            flat["maxnreg"] = self.maxnreg
        return flat

    @classmethod
    def from_dict(cls, flat: Mapping[str, Any]) -> Config:
        """Make a config from a flat dictionary; what is no compile option is a kernel argument.

        Raises:
            OptionError: If it asks for Triton's own hooks, which a stored config would lose, or
                for a field that the supported versions of Triton do not have.
        """
        given: object = flat
        if not isinstance(given, Mapping):
            raise OptionError(
                f"Config: a flat config is a {type(given).__name__}; it must be a dictionary. Try: "
                "{'XBLOCK': 128, 'num_warps': 4}."
            )
        kwargs = dict(flat)
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        for name in (*_HOOKS, *_ABSENT):
            if kwargs.pop(name, None):
                raise OptionError(
                    f"Config: {name} is given, but a config holds only constants and "
                    f"{', '.join(OPTIONS)}. Try: leave {name} out."
                )
        return cls(kwargs, **options)

    @classmethod
    def of(cls, value: Any) -> Config:
        """Make a config from a `Config`, a flat dictionary, or a `triton.Config`.

        Raises:
            OptionError: If it is none of these, or carries a hook.
        """
        if isinstance(value, Config):
            return value
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        if not isinstance(getattr(value, "kwargs", None), Mapping):
            raise OptionError(
                f"Config: a config is a {type(value).__name__}; it must be a tileloom.tuning.Config"
                ", a dict or a triton.Config. Try: Config({'XBLOCK': 128}, num_warps=4)."
            )
        names = (*OPTIONS, *_HOOKS, *_ABSENT)
        given = {name: getattr(value, name) for name in names if hasattr(value, name)}
        return cls.from_dict({**value.kwargs, **given})


def _check_argument(config: Config, name: object, value: object) -> None:
    """Refuse what is no compile-time argument, and a block that no kernel can have."""
    if not isinstance(name, str):
        raise OptionError(
            f"Config: a compile-time argument is named {shown_value(name)}; a name is a text. Try: "
            "Config({'XBLOCK': 128})."
        )
    # A tensor can be hashed, by its identity; numbers of NumPy can, but JSON does not take them.
    is_plain = not hasattr(type(value), "__array__") and isinstance(value, Hashable)
    try:
        is_plain = is_plain and hash(value) is not None
    except TypeError:  # a tuple of lists
        is_plain = False
    if not is_plain:
        raise OptionError(
            f"Config: {name} is {shown_value(value)}; a compile-time argument is a Python number, "
            "a text, None, or another value that can be hashed. Try: "
            f"Config({{{name!r}: 128}})."
        )
    if _BLOCK.fullmatch(name) and isinstance(value, int) and value > MAX_TENSOR:
        raise OptionError(
            f"Config: the config {config} sets {name} to {value}, but a tensor in a Triton kernel "
            f"has at most {MAX_TENSOR} elements (TRITON_MAX_TENSOR_NUMEL). Try: {name}=1024, and a "
            "loop in the kernel."
        )


def distinct(configs: Iterable[Config]) -> list[Config]:
    """Drop configs that an earlier one equals; the order stays."""
    return list(dict.fromkeys(configs))
