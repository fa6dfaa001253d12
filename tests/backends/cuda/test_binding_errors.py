"""Errors of CUDA that the binding meets, on the fake accelerator with the real kernels
(tests/fakes/cuda_on_fake): whose they are, captures that must not end, and handles of streams that
are used again.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fakes import cuda_on_fake, fake_device
from fakes.cuda_on_fake.checks import slots_for, spent
from fastcheck.monitor.distributed.replicas import _ChecksumCopies
from fastcheck.monitor.precision import ExponentReadings
from fastcheck.record.site import SiteTable
from fastcheck.ring.depths import Depths
from fastcheck.ring.device import DeviceRing
from fastcheck.utils.torch.lost_device import is_lost
from fastcheck.utils.torch.streams import DeviceStreams, streams_of
from support.devices.on_device import assert_all_same, many, of_cpu, random
from support.helpers import put

fake: Any = fake_device.load()
NAME = fake.name()
CUDA = cuda_on_fake.entry()
ILLEGAL_ADDRESS, INVALID_CONFIGURATION = 700, 9

pytestmark = [pytest.mark.fake_hooks, pytest.mark.usefixtures("cuda_on_fake_device")]


@pytest.fixture
def shim() -> Iterator[ctypes.CDLL]:
    """The shim of CUDA's runtime, without errors afterwards."""
    yield cuda_on_fake.shim()
    for lasts in (0, 1):
        cuda_on_fake.shim().cuda_on_cpu_set_error(0, lasts)


def test_an_earlier_error_is_not_a_launch_s(shim: ctypes.CDLL) -> None:
    x = random("float32", 5000)
    there, slots = put(x, NAME), slots_for(1)
    shim.cuda_on_cpu_set_error(INVALID_CONFIGURATION, 0)
    CUDA.observe(there, slots, 0, 3)
    assert_all_same(slots, of_cpu([x]))


def test_the_failure_of_an_earlier_kernel_is_known_as_such(shim: ctypes.CDLL) -> None:
    there, slots = put(random("float32", 10), NAME), slots_for(1)
    shim.cuda_on_cpu_set_error(ILLEGAL_ADDRESS, 1)
    with pytest.raises(RuntimeError, match="in a kernel that ran before a launch") as raised:
        CUDA.observe(there, slots, 0, 3)
    assert "an illegal memory access was encountered" in str(raised.value)
    assert is_lost(raised.value)


def test_a_failure_of_a_call_is_not_that_of_the_device(shim: ctypes.CDLL) -> None:
    there, slots = put(random("float32", 10), NAME), slots_for(1)
    shim.cuda_on_cpu_set_error(INVALID_CONFIGURATION, 1)
    with pytest.raises(RuntimeError, match="a launch failed") as raised:
        CUDA.observe(there, slots, 0, 3)
    assert not is_lost(raised.value)


def test_what_torch_raises_is_known_too() -> None:
    there = put(random("float32", 10), NAME)
    fake.lose()
    try:
        with pytest.raises(RuntimeError) as raised:
            there.cpu()
        assert is_lost(raised.value)
    finally:
        fake.find_again()


# --- while another thread captures ---------------------------------------------------------------


def captured_while(work: Any) -> None:
    """A graph is captured, and meanwhile another thread does ``work``. The capture must not fail,
    and neither must the work."""
    graph = torch.accelerator.Graph(capture_error_mode="global")
    x = torch.ones(3, device=NAME)
    failed: list[BaseException] = []
    fake.synchronize()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    with fake.stream(fake.Stream()):
        graph.capture_begin()
        y = x + 1
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        graph.capture_end()
        graph.replay()
    fake.synchronize()
    assert not failed
    assert y.tolist() == [2.0] * 3


@pytest.mark.skipif(not hasattr(torch.accelerator, "Graph"), reason="torch has no such graphs")
def test_a_query_of_the_ring_ends_no_capture() -> None:
    streams = DeviceStreams(torch.device(NAME, 0))
    DeviceRing(streams, CUDA, Depths(3), 4, 4)
    event = streams.new_event()
    event.record(streams.current())
    captured_while(lambda: streams.is_done(event))


@pytest.mark.skipif(not hasattr(torch.accelerator, "Graph"), reason="torch has no such graphs")
def test_a_query_of_a_list_s_table_ends_no_capture() -> None:
    hosts = many(60)
    there = [put(x, NAME).clone() for x in hosts]
    slots = slots_for(len(there))
    CUDA.observe_list(there, slots, 0, 3)
    captured_while(lambda: CUDA.observe_list(there, slots, 0, 3))
    assert_all_same(slots, of_cpu(hosts))


@pytest.mark.skipif(not hasattr(torch.accelerator, "Graph"), reason="torch has no such graphs")
def test_a_query_of_counted_exponents_ends_no_capture() -> None:
    streams_of.cache_clear()  # no ring has prepared the device's streams
    readings = ExponentReadings(SiteTable())
    slots = slots_for(1)
    assert readings.read(put(random("float32", 100), NAME), slots, 0, 0, 0, False)
    readings.send()
    captured_while(lambda: readings.take_in(waits=False))


@pytest.mark.skipif(not hasattr(torch.accelerator, "Graph"), reason="torch has no such graphs")
def test_a_query_of_replicas_ends_no_capture() -> None:
    streams_of.cache_clear()
    copies = _ChecksumCopies(0, [], [put(random("float32", 100), NAME)])
    captured_while(copies.are_here)


# --- streams that were made outside of torch -----------------------------------------------------


@pytest.fixture
def external() -> Iterator[None]:
    """All streams are as those that a library has made, and may destroy."""
    library = ctypes.CDLL(str(cuda_on_fake.build()))
    library.cuda_on_fake_pretend_external(1)
    yield
    library.cuda_on_fake_pretend_external(0)


def test_a_stream_with_the_handle_of_a_destroyed_one_waits_for_its_work(external: None) -> None:
    x, slots = put(random("float32", 50000), NAME), slots_for(3)
    for _ in range(2):
        done, _ = spent(lambda: CUDA.observe(x, slots, 0, 3))
        assert (done["event_record"], done["event_wait"]) == (1, 0)
    cuda_on_fake.shim().cuda_on_cpu_renumber_streams()
    done, _ = spent(lambda: CUDA.observe(x, slots, 2, 3))
    assert (done["event_record"], done["event_wait"]) == (1, 1)
    assert done["alloc"] == done.synchronisations == 0
    done, _ = spent(lambda: CUDA.observe(x, slots, 2, 3))
    assert done["event_wait"] == 0


def test_torch_s_own_streams_need_no_event() -> None:
    x, slots = put(random("float32", 50000), NAME), slots_for(1)
    CUDA.observe(x, slots, 0, 3)
    cuda_on_fake.shim().cuda_on_cpu_renumber_streams()
    done, _ = spent(lambda: CUDA.observe(x, slots, 0, 3))
    assert done["event_record"] == done["event_wait"] == 0
