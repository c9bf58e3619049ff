"""L2 eviction policies of bulk copies, as the 64-bit words that the instructions take.

PTX builds such a word at run time (``createpolicy.fractional.L2``). ptxas builds it from constants,
the same ones for sm_90a and sm_100a, so that it can as well be known when a kernel is traced::

    word = 1 << 60 | primary << 57 | secondary << 56 | (sixteenths of the lines - 1) << 52

with primary 0 to 3 for unchanged, first, last, normal and secondary 0 or 1 for unchanged, first.
tests/cpasync/test_eviction.py assembles the instruction and compares.
"""

from __future__ import annotations

from typing import Any

from tileloom.errors import OptionError

# The three words of CUTLASS and of TileLang. What they call normal is, by the encoding above,
# "unchanged": the copy leaves the priority of the lines as it is, as one without a hint does.
EVICT_NORMAL = 0x1000000000000000
EVICT_FIRST = 0x12F0000000000000
EVICT_LAST = 0x14F0000000000000

_PRIMARY = {"unchanged": 0, "first": 1, "last": 2, "normal": 3}
_SECONDARY = {"unchanged": 0, "first": 1}
_NAMED = {"normal": EVICT_NORMAL, "first": EVICT_FIRST, "last": EVICT_LAST}


def cache_policy(primary: str, fraction: float = 1.0, secondary: str = "unchanged") -> int:
    """Compose an L2 eviction policy, as PTX's ``createpolicy.fractional`` does.

    Args:
        primary: Eviction priority of the chosen lines: ``"first"``, ``"last"``, ``"normal"`` or
            ``"unchanged"``.
        fraction: The share of the cache lines that get it, a multiple of 1/16 from 1/16 to 1. The
            hardware chooses them by their addresses.
        secondary: Priority of the others: ``"unchanged"`` or ``"first"``.

    Returns:
        The 64-bit word, for the keyword ``eviction_kind`` of the copies.

    Raises:
        OptionError: If a priority does not exist or the fraction is no multiple of 1/16.

    Example:
        >>> hex(cache_policy("last", 0.5))
        '0x1470000000000000'
    """
    for argument, given, known in (
        ("primary", primary, _PRIMARY),
        ("secondary", secondary, _SECONDARY),
    ):
        if given not in known:
            accepted = ", ".join(map(repr, sorted(known)))
            raise OptionError(
                f"cache_policy: {argument} is {given!r}; accepted are {accepted}. "
                f"Try: {argument}={next(iter(sorted(known)))!r}."
            )
    sixteenths = fraction * 16
    if not 1 <= sixteenths <= 16 or sixteenths != int(sixteenths):
        raise OptionError(
            f"cache_policy: fraction is {fraction}; accepted are the multiples of 1/16 from 1/16 "
            f"to 1. Try: fraction={max(1, min(16, round(sixteenths))) / 16}."
        )
    choice = _PRIMARY[primary] << 57 | _SECONDARY[secondary] << 56
    return 1 << 60 | choice | (int(sixteenths) - 1) << 52


def policy_word(function: str, given: Any) -> Any:
    """Turn what a caller passed as `eviction_kind` into the word of the instruction.

    Args:
        function: The caller's function, for the text of the error.
        given: None, a name ("first", "evict_first"), a member of an enumeration of that name
            (``nvvm.EvictKind.FIRST``, as TileLang's generated code has it), a word as an int, or a
            run-time 64-bit integer of the DSL, which is passed on.

    Returns:
        The word, None, or the run-time value.

    Raises:
        OptionError: If bulk copies have no such policy.
    """
    if given is None:
        return None
    name = given if isinstance(given, str) else getattr(given, "name", None)
    if isinstance(name, str):
        word = _NAMED.get(name.lower().removeprefix("evict_"))
        if word is None:
            raise OptionError(
                f"{function}: eviction_kind is {name!r}, a policy that bulk copies do not have; "
                "accepted are 'normal', 'first', 'last', a word of cache_policy() and None. "
                "Try: eviction_kind=None."
            )
        return word
    if isinstance(given, int) and (isinstance(given, bool) or given >> 60 != 1):
        raise OptionError(
            f"{function}: eviction_kind is {given}, no word of an L2 policy. "
            f"Try: eviction_kind='first', or a word of cache_policy()."
        )
    return given
