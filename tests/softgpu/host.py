"""The driver: memory, streams, graphs, events, and what it refuses; run by `test_softgpu.py`, once for each order in
which work on streams may be done."""

import ctypes
import os

import numpy as np
import pytest
from cuda.core import Device
from numba import cuda
from numba.cuda.cudadrv.driver import CudaAPIError

import softgpu

LATE = os.environ["SOFTGPU_STREAMS"] != "now"
COUNT = 256


@pytest.fixture(autouse=True)
def silent():
    softgpu.revive()
    yield
    assert softgpu.findings() == []


@pytest.fixture
def stream():
    """A stream that waits for no other."""
    Device(0).set_current()
    return Device(0).create_stream()


@pytest.fixture
def x():
    return cuda.to_device(np.zeros(COUNT, np.float32))


@cuda.jit("void(float32[::1], float32)")
def add(x, value):
    x[cuda.grid(1)] += value


def test_two_gpus_have_memory_of_their_own():
    arrays = []
    for index in (0, 1):
        with cuda.gpus[index]:
            x = cuda.to_device(np.full(COUNT, index, np.float32))
            add[1, COUNT](x, np.float32(10))
            assert x.copy_to_host().tolist() == [10 + index] * COUNT
            arrays.append(x)
    assert len(cuda.gpus) == 2
    assert cuda.gpus[1].compute_capability == (9, 0)


def test_memory_is_counted_and_runs_out():
    cuda.current_context().deallocations.clear()
    free, total = cuda.current_context().get_memory_info()
    x = cuda.device_array(total // 4, np.uint8)
    assert cuda.current_context().get_memory_info()[0] == free - total // 4
    with pytest.raises(CudaAPIError, match="OUT_OF_MEMORY"):
        cuda.device_array(total, np.uint8)
    del x
    cuda.current_context().deallocations.clear()
    assert cuda.current_context().get_memory_info()[0] >= free


def test_work_on_one_stream_is_in_order_and_a_graph_replays_it(stream, x):
    cuda.synchronize()
    builder = Device(0).create_graph_builder()
    builder.begin_building()
    add[1, COUNT, builder](x, np.float32(1))
    add[1, COUNT, builder](x, np.float32(2))
    graph = builder.end_building().complete()
    graph.upload(stream)
    stream.sync()
    assert x.copy_to_host()[0] == 0  # captured, not done
    for _ in range(3):
        graph.launch(stream)
    add[1, COUNT, stream](x, np.float32(100))
    stream.sync()
    assert x.copy_to_host().tolist() == [109] * COUNT


def test_while_a_graph_is_captured_nothing_else_may_wait_or_allocate(x):
    Device(0).set_current()
    builder = Device(0).create_graph_builder()
    builder.begin_building()
    for forbidden in (cuda.synchronize, x.copy_to_host, lambda: cuda.device_array(4, np.float32)):
        with pytest.raises(CudaAPIError, match="STREAM_CAPTURE"):
            forbidden()
    builder.end_building()


def test_a_missing_synchronization_shows(stream, x):
    cuda.synchronize()
    add[1, COUNT, stream](x, np.float32(1))
    early = x.copy_to_host()[0]
    stream.sync()
    assert x.copy_to_host()[0] == 1
    assert early == (0 if LATE else 1)


def test_the_default_stream_waits_for_those_that_do_not_refuse():
    stream = cuda.stream()
    x = cuda.to_device(np.zeros(COUNT, np.float32), stream=stream)
    add[1, COUNT, stream](x, np.float32(1))
    add[1, COUNT](x, np.float32(1))
    add[1, COUNT, stream](x, np.float32(1))
    assert x.copy_to_host()[0] == 3


def test_a_copy_from_page_locked_memory_is_done_when_it_returns_and_another_need_not_be(stream):
    pinned, paged = cuda.pinned_array(4, np.float32), np.ones(4, np.float32)
    pinned[:] = 1
    for source, is_done in ((pinned, True), (paged, not LATE)):
        x = cuda.to_device(np.zeros(4, np.float32))
        cuda.synchronize()
        x.copy_to_device(source)
        add[1, 4, stream](x, np.float32(1))
        stream.sync()
        cuda.synchronize()
        assert x.copy_to_host().tolist() == [2 if is_done else 1] * 4


def test_events_tell_a_time_that_is_the_same_every_time(x):
    times = []
    for _ in range(2):
        start, stop = cuda.event(), cuda.event()
        start.record()
        add[1, COUNT](x, np.float32(1))
        stop.record()
        stop.synchronize()
        times.append(cuda.event_elapsed_time(start, stop))
    assert times[0] == times[1] > 0


def test_launches_that_no_gpu_would_take(x):
    for grid, block in (((1,), (2048,)), ((1, 70000), (32,))):
        with pytest.raises(Exception, match="INVALID_VALUE"):
            add[grid, block](x, np.float32(1))


def test_a_stream_of_another_gpu_is_refused(x):
    with cuda.gpus[1]:
        stream = cuda.stream()
    with pytest.raises(Exception, match="INVALID_HANDLE"):
        add[1, COUNT, stream](x, np.float32(1))
    assert softgpu.findings()[0].startswith("contextcheck: a launch on a stream of GPU 1, in the context of GPU 0")
    softgpu.revive()


def test_the_driver_is_ours():
    assert ctypes.CDLL("libcuda.so.1").softgpu_ticks() > 0
