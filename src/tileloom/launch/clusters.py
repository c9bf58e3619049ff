"""How many clusters of CTAs a GPU runs at a time: a grid of clusters that walk has as many.

A cluster lies in one GPC, a group of multiprocessors, of which some are switched off, others on the
next card. An H200 of 132 multiprocessors had places for 30 clusters of 4 CTAs and 15 of 8, not for
33 and 16. A cluster without a place runs when another has ended: nothing hangs, but a walk takes
half as long again. Only the driver knows.
"""

from __future__ import annotations

import ctypes
import functools
import struct

from tileloom.launch import driver
from tileloom.target import Target

_EMPTY = b".version 7.8 .target sm_90 .address_size 64 .visible .entry tileloom_empty() { ret; }"


def clusters_at_once(ctas: int, target: Target, device: int, *, per_sm: int = 1) -> int:
    """Count the clusters that run at a time.

    Args:
        ctas: CTAs of a cluster.
        target: The hardware; what the emulator plays has no GPCs.
        device: The device's number.
        per_sm: CTAs that a multiprocessor holds.

    Returns:
        The number, at least 1.

    Raises:
        LaunchError: If the driver refuses.
    """
    if target.kind != "cuda" or ctas == 1:
        return max(1, target.sms * per_sm // ctas)
    return _asked(ctas, per_sm, device)


@functools.cache
def _asked(ctas: int, per_sm: int, device: int) -> int:
    """Ask for a kernel of which just so many CTAs fit into a multiprocessor's shared memory."""
    shared, name = 228 * 1024 // per_sm - 2048, "tileloom_empty"
    function = driver.load_cubin(_EMPTY, name, shared_bytes=shared, device=device)
    attribute = ctypes.create_string_buffer(struct.pack("<i4x3I52x", 4, ctas, 1, 1))
    at = ctypes.addressof(attribute)
    config = ctypes.create_string_buffer(
        struct.pack("<7I4xQQI4x", ctas, 1, 1, 32, 1, 1, shared, 0, at, 1)  # CUlaunchConfig
    )
    found = ctypes.c_int()
    handle = ctypes.c_void_p(function.handle)
    status = driver.library().cuOccupancyMaxActiveClusters(ctypes.byref(found), handle, config)
    driver.check(
        status, f"asking how many clusters of {ctas} blocks device {device} runs at a time"
    )
    return max(1, found.value)
