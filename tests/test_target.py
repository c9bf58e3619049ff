from __future__ import annotations

import dataclasses
import threading

import pytest
import torch

from tileloom import target
from tileloom.target import CPU, H100, Target, override, target_of, target_of_device


def test_cpu_tensor_runs_the_reference():
    assert target_of(torch.zeros(1)) is CPU
    assert CPU.kind == "cpu"


def test_override_nests_and_ends():
    x = torch.zeros(1)
    other = Target("emulated", (8, 0), 108, 163 * 1024, "other")
    with override(H100) as outer:
        assert outer is target_of(x) is H100
        with override(other):
            assert target_of(x) is other
        assert target_of(x) is H100
    assert target_of(x) is CPU


def test_override_ends_with_an_exception():
    with pytest.raises(KeyError), override(H100):
        raise KeyError
    assert target_of(torch.zeros(1)) is CPU


def test_override_is_of_this_thread_only():
    seen = []
    with override(H100):
        thread = threading.Thread(target=lambda: seen.append(target_of(torch.zeros(1))))
        thread.start()
        thread.join()
    assert seen == [CPU]


def test_override_does_not_touch_other_devices():
    with override(H100):
        assert target_of(torch.zeros(1, device="meta")) is CPU


def test_a_gpu_is_known_by_its_own_properties(monkeypatch):
    properties = dataclasses.make_dataclass(
        "Properties",
        ["major", "minor", "multi_processor_count", "name", "shared_memory_per_block_optin"],
    )
    cards = {0: properties(9, 0, 132, "H100", 232448), 3: properties(8, 0, 108, "A100", 0)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", cards.__getitem__)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    target._cuda_target.cache_clear()
    try:
        with override(CPU):
            first = target_of_device(torch.device("cuda", 0))
        assert first == Target("cuda", (9, 0), 132, 227 * 1024, "H100")
        assert first.arch == "sm_90"
        # Where the driver does not say, from the table.
        assert target_of_device(torch.device("cuda")).smem == 163 * 1024
    finally:
        target._cuda_target.cache_clear()


@pytest.mark.gpu
def test_the_gpu_here():
    x = torch.zeros(1, device="cuda")
    here = target_of(x)
    assert here.kind == "cuda"
    assert here.capability == torch.cuda.get_device_capability()
    assert here.smem >= 48 * 1024
    with override(H100):
        assert target_of(x) == here
