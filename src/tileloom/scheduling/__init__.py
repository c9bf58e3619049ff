"""Persistent tile schedulers: one protocol, the same integers on the host and on the device.

`TileSchedulerParams` says which tiles there are and in which order; a scheduler deals them out:
`StaticPersistentScheduler` by turns, `AsyncInputScheduler` by turns with a wait for the chunk of
rows, `DynamicPersistentScheduler` by a counter. The classes here are Python (`host.py`); those of
`tileloom.scheduling.device` are for kernels. `simulate` plays a schedule against the clock.
"""

from tileloom.scheduling.host import (
    AsyncInputScheduler,
    DynamicPersistentScheduler,
    StaticPersistentScheduler,
    WorkTileInfo,
)
from tileloom.scheduling.params import RasterOrder, TileSchedulerParams
from tileloom.scheduling.simulate import Simulation, Span, simulate

__all__ = [
    "AsyncInputScheduler",
    "DynamicPersistentScheduler",
    "RasterOrder",
    "Simulation",
    "Span",
    "StaticPersistentScheduler",
    "TileSchedulerParams",
    "WorkTileInfo",
    "simulate",
]
