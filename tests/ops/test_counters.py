"""Kept counters and workspaces: one for each device and stream, and never one of a captured graph.

What a stream does with them is tested on a GPU: `tests/ops/gemm/test_gpu.py`.
"""

from __future__ import annotations

import contextlib
import threading
from typing import ClassVar

import pytest
import torch

from tileloom.ops import _counters as counters


class OnGpu:
    """As much of a CUDA tensor as is asked; what it makes lies on the CPU."""

    is_cuda = True
    threads: ClassVar = []
    streams: ClassVar = []

    def __init__(self, device=0):
        self.device = device

    def get_device(self):
        return self.device

    def new_zeros(self, count, dtype):
        self.threads.append((threading.current_thread(), self.streams[-1:]))
        return torch.zeros(count, dtype=dtype)

    def new_empty(self, count, dtype):
        self.threads.append((threading.current_thread(), self.streams[-1:]))
        return torch.empty(count, dtype=dtype)


@pytest.fixture
def gpu(monkeypatch):
    """The state that the module asks of CUDA, to be set by a test."""
    state = {"stream": 7, "capturing": False}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: state["stream"], raising=False
    )
    for name in ("_zeros", "_rooms", "_free"):
        monkeypatch.setattr(counters, name, {})

    @contextlib.contextmanager
    def on(stream):
        OnGpu.streams.append(stream)
        yield
        OnGpu.streams.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: f"stream {state['stream']}")
    monkeypatch.setattr(torch.cuda, "stream", on)
    OnGpu.threads.clear()
    return state


KEPT = [(counters.split_counters, 5000, torch.int32), (counters.workspace, 70_000, torch.float32)]


@pytest.mark.parametrize(("get", "count", "dtype"), KEPT)
def test_one_is_kept_for_each_device_and_stream(gpu, get, count, dtype):
    first = get(OnGpu(), count)
    assert (first.dtype, first.numel()) == (dtype, count)
    assert get(OnGpu(), count - 9) is first
    assert get(OnGpu(device=1), count) is not first
    gpu["stream"] = 8
    assert get(OnGpu(), count) is not first
    gpu["stream"] = 7
    assert get(OnGpu(), count) is first


@pytest.mark.parametrize(("get", "count", "dtype"), KEPT)
def test_it_grows_and_stays_large(gpu, get, count, dtype):
    del dtype
    first = get(OnGpu(), count)
    large = get(OnGpu(), 2 * count)
    assert large is not first
    assert large.numel() == 2 * count
    assert get(OnGpu(), count) is large


@pytest.mark.parametrize(("get", "count", "dtype"), KEPT)
def test_a_graph_that_is_captured_gets_its_own(gpu, get, count, dtype):
    del dtype
    kept = get(OnGpu(), count)
    gpu["capturing"] = True
    captured = get(OnGpu(), count)
    assert captured is not kept
    assert get(OnGpu(), count) is not captured
    gpu["capturing"] = False
    assert get(OnGpu(), count) is kept


@pytest.mark.parametrize(
    "get",
    [
        counters.zero_counter,
        lambda like: counters.split_counters(like, 5000),
        lambda like: counters.workspace(like, 10),
    ],
)
def test_what_is_kept_comes_from_no_pool_of_the_callers_thread(gpu, get):
    """A pool that allocations go to is a thread's; the stream is the caller's."""
    get(OnGpu())
    get(OnGpu())
    ((thread, streams),) = OnGpu.threads
    assert thread is not threading.current_thread()
    assert streams == ["stream 7"]
    gpu["capturing"] = True
    get(OnGpu())
    assert OnGpu.threads[-1] == (threading.current_thread(), [])


def test_an_allocation_that_fails_fails_where_it_was_asked_for(gpu):
    class Full(OnGpu):
        def new_empty(self, count, dtype):
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        counters.workspace(Full(), 10)
    assert not counters._rooms


def test_counters_are_zero_and_a_large_workspace_is_not_kept(gpu):
    assert not counters.split_counters(OnGpu(), 5000).any()
    small = counters.workspace(OnGpu(), 10)
    most = counters.MOST_KEPT_BYTES // 4
    large = counters.workspace(OnGpu(), most + 1)
    assert large.numel() == most + 1
    assert counters.workspace(OnGpu(), 10) is small
    assert counters.workspace(OnGpu(), most) is counters.workspace(OnGpu(), most)


def test_streams_without_end_keep_no_memory_without_end(gpu):
    for stream in range(3 * counters._MOST_STREAMS):
        gpu["stream"] = stream
        counters.workspace(OnGpu(), 10)
    assert len(counters._rooms) <= counters._MOST_STREAMS


def test_on_the_cpu_nothing_is_kept(gpu):
    like = torch.zeros(3)
    assert counters.workspace(like, 10) is not counters.workspace(like, 10)
    assert counters.split_counters(like, 10).tolist() == [0] * 10
    assert not counters._rooms
    assert not counters._zeros
