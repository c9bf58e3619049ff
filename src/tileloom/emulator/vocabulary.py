"""The names in a report: Gluon's own, or those of `tileloom.cpasync.gluon` where a file has them.

The IR knows neither: it has the operations that both are compiled to.
"""

from __future__ import annotations

import linecache
import re

from tileloom.emulator.ir import Loc

_NAMES = {
    "fence_async_shared() after the last mbarrier.init": "fence_barrier_init() after the last "
    "mbarrier_init",
    "fence.proxy.async after the write": 'fence_proxy_async("global") after the write',
    "fence.proxy.async for global memory": 'fence_proxy_async("global")',
    "needs cp.async.bulk.wait_group": "needs tma_store_wait(0, read=False)",
    "fence_async_shared": "fence_proxy_async",
    "tma.store_wait": "tma_store_wait",
    "async_copy.wait_group": "cp_async_wait",
    "async_copy.mbarrier_arrive": "mbarrier_cp_async_arrive",
    "mbarrier.init": "mbarrier_init",
    "mbarrier.invalidate": "mbarrier_invalidate",
    "mbarrier.expect": "arrive_and_expect_tx",
    "mbarrier.arrive": "mbarrier_arrive",
    "mbarrier.wait": "mbarrier_wait",
    "bar.sync": "named_barrier_sync",
    "bar.arrive": "named_barrier_arrive",
}
_ANY = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, _NAMES))})(?!\w)")
_MODULE = r"tileloom\.cpasync"
_IMPORT = re.compile(
    rf"^\s*(?:from {_MODULE} import [^#\n]*\bgluon\b|(?:from|import) {_MODULE}\.gluon\b)", re.M
)
_NAMED = re.compile(r"(\w+)\s*(?::[^=]+)?=(?!=)")


def in_words_of(loc: Loc, text: str) -> str:
    """Return a report's text with the names that the file of the kernel imports."""
    files = {place.file for place in loc.chain()}
    if any(_IMPORT.search("".join(linecache.getlines(file))) for file in files):
        return _ANY.sub(lambda match: _NAMES[match[0]], text)
    return text


def variable_of(loc: Loc, otherwise: str) -> str:
    """Return the name that an allocation has in the source.

    A function that returns it at once leaves the name to who called it.
    """
    for place in loc.chain():
        if place.name:
            return place.name
        line = linecache.getline(place.file, place.line).strip()
        if match := _NAMED.match(line):
            return match[1]
        if not line.startswith("return "):
            break
    return otherwise
