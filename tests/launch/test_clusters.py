"""How many clusters run at a time: what the driver is asked."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import replace

import pytest
from tests.launch import bundle_fakes

from tileloom.errors import LaunchError
from tileloom.launch import clusters
from tileloom.launch.clusters import clusters_at_once
from tileloom.target import H100

H200 = replace(H100, kind="cuda")


class Card(bundle_fakes.FakeCuda):
    """A driver that knows where clusters have places; `asked` notes what for."""

    def __init__(self, places):
        super().__init__()
        self.places, self.asked = places, []
        kinds = (ctypes.c_void_p,) * 3
        call = self._guarded("cuOccupancyMaxActiveClusters", self._places_of)
        self.cuOccupancyMaxActiveClusters = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(call)

    def _places_of(self, found, function, config):
        *grid, shared, _, attributes, count = struct.unpack(
            "<7IxxxxQQI", ctypes.string_at(config, 52)
        )
        kind, x, y, z = struct.unpack("<i4x3I", ctypes.string_at(attributes, 20))
        assert (kind, count, x, y, z) == (4, 1, grid[0], 1, 1)
        self.asked.append((x, shared))
        ctypes.c_int.from_address(found).value = self.places.get(x, 0)


@pytest.fixture
def card(monkeypatch):
    monkeypatch.setattr(clusters, "_asked", clusters._asked.__wrapped__)
    return bundle_fakes.install(monkeypatch, Card({2: 66, 8: 15}))


def test_the_driver_knows_where_clusters_have_places(card):
    assert [clusters_at_once(n, H200, 0) for n in (2, 8)] == [66, 15]
    assert card.asked == [(2, 226 * 1024), (8, 226 * 1024)]
    assert card.wanted_shared == [(8, 226 * 1024)] * 2


def test_two_of_a_multiprocessor_share_its_memory(card):
    clusters_at_once(8, H200, 0, per_sm=2)
    ((_, shared),) = card.asked
    assert 2 * (shared + 1024) <= 228 * 1024 < 3 * (shared + 1024)


def test_one_cluster_runs_wherever_there_is_no_place(card):
    assert clusters_at_once(4, H200, 0) == 1


def test_nobody_is_asked_for_blocks_alone_and_on_the_emulator(card):
    assert clusters_at_once(1, H200, 0) == 132
    assert clusters_at_once(8, H100, -1) == 16
    assert clusters_at_once(8, replace(H100, sms=4), -1, per_sm=1) == 1
    assert card.asked == []


def test_the_drivers_own_words_are_given(card):
    card.status["cuOccupancyMaxActiveClusters"] = 7
    text = "asking how many clusters of 8 blocks device 0 runs at a time failed: CUDA error 7"
    with pytest.raises(LaunchError, match=text):
        clusters_at_once(8, H200, 0)


@pytest.mark.gpu
def test_a_gpu_holds_no_more_than_it_has_multiprocessors():
    import torch

    from tileloom.target import target_of

    target = target_of(torch.empty(1, device="cuda"))
    if target.capability != (9, 0):
        pytest.skip("clusters of Hopper")
    for ctas in (2, 4, 8):
        assert target.sms // ctas // 2 < clusters_at_once(ctas, target, 0) <= target.sms // ctas
