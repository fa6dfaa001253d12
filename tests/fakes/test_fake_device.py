"""The fake accelerator detects the faults that other tests rely on it to detect."""

from __future__ import annotations

import ctypes
import math
import threading
import time
from typing import Any, Callable

import pytest
import torch

from fakes import fake_device
from support.devices.device_calls import WAITS

fake: Any = fake_device.load()
NAME = fake.name()

pytestmark = [pytest.mark.fake_accelerator, pytest.mark.usefixtures("fake_accelerator")]


def during(work: Callable[[], Any]) -> dict[str, int]:
    this = threading.current_thread()  # a monitor of another test may still be copying in its own
    before = fake.counters(this)
    work()
    return (fake.counters(this) - before).nonzero()


# ---- Memory --------------------------------------------------------------------------------------


def test_fresh_and_freed_memory_is_poisoned() -> None:
    assert torch.empty(300, device=NAME).isnan().all().item()
    x = torch.ones(300, device=NAME)
    del x
    assert torch.empty(300, device=NAME).isnan().all().item()


@pytest.mark.parametrize("told", [False, True], ids=["use after free", "record_stream"])
def test_memory_is_reused_in_stream_order(told: bool) -> None:
    x = torch.ones(300, device=NAME)
    side = fake.Stream()
    fake.current_stream().synchronize()
    fake.hold(side)
    with fake.stream(side):
        seen = x + 1
    if told:
        x.record_stream(side)
    address = x.data_ptr()
    del x
    again = torch.zeros(300, device=NAME)
    assert (again.data_ptr() == address) is not told
    fake.current_stream().synchronize()
    fake.release(side)
    side.synchronize()
    assert bool((seen == 2).all().item()) is told


def test_nothing_below_the_cache_after_warm_up() -> None:
    def step() -> None:
        x = torch.randn(50, 7, device=NAME)
        (x @ x.T).sum()

    step()
    counts = [during(step) for _ in range(5)][-1]
    assert "alloc_below_cache" not in counts
    assert counts["alloc"] == counts["cache_hit"] == counts["free"] == 3


def test_memory_statistics_limit_and_empty_cache() -> None:
    fake.empty_cache()
    base = fake.memory_allocated()
    x = torch.empty(1 << 20, device=NAME)
    assert fake.memory_allocated() - base == 4 << 20
    assert torch.accelerator.memory.memory_allocated() == fake.memory_allocated()
    del x
    assert fake.memory_allocated() == base
    assert fake.memory_reserved() >= base + (4 << 20)
    assert during(fake.empty_cache)["free_below_cache"] == 1
    limit = fake.memory_stats()["limit"]
    fake.set_memory_limit(fake.memory_reserved())
    try:
        with pytest.raises(torch.OutOfMemoryError, match="tried to allocate"):
            torch.empty(1 << 24, device=NAME)
    finally:
        fake.set_memory_limit(limit)


# ---- Asynchrony ----------------------------------------------------------------------------------


def test_host_does_not_wait_for_kernels() -> None:
    x = torch.zeros(8, device=NAME)
    event = fake.Event()
    with fake.held(fake.current_stream()):
        counts = during(lambda: x.add_(1).mul_(3))
        event.record()
        assert not event.query()
        assert not fake.current_stream().query()
    event.synchronize()
    assert event.query()
    assert x.tolist() == [3.0] * 8
    assert counts == {"kernel": 2}


def test_delay_shows_in_event_times() -> None:
    start, end = fake.Event(enable_timing=True), fake.Event(enable_timing=True)
    x = torch.zeros(8, device=NAME)
    fake.set_delay(20_000)
    with fake.held(fake.current_stream()):  # so that the times are the device's, not the host's
        start.record()
        x.add_(1).add_(1)
        end.record()
    end.synchronize()
    assert start.elapsed_time(end) >= 40.0


def test_advance_runs_a_held_stream_kernel_by_kernel() -> None:
    x = torch.zeros(1, device=NAME)
    main = fake.current_stream()
    main.synchronize()
    fake.hold(main)
    events = []
    for _ in range(3):
        x.add_(1)
        events.append(main.record_event())
    for done in range(1, 4):
        fake.advance(1)
        events[done - 1].synchronize()
        time.sleep(0.05)  # time for a kernel too many to run
        assert [event.query() for event in events] == [k < done for k in range(3)]
    fake.release(main)
    assert x.item() == 3


def test_streams_are_ordered_by_events_only() -> None:
    x = torch.zeros(4, device=NAME)
    main, side = fake.current_stream(), fake.Stream()
    main.synchronize()
    fake.hold(main)
    x.fill_(7)
    with fake.stream(side):
        early = x.clone()
        side.record_event().synchronize()
        side.wait_stream(main)
        late = x.clone()
    assert not side.query()
    fake.release(main)
    side.synchronize()
    assert (early.sum().item(), late.sum().item()) == (0.0, 28.0)


def test_kernel_errors_are_reported_later_and_by_name() -> None:
    table = torch.ones(4, 2, device=NAME)
    bad = torch.tensor([9], device=NAME)
    table.index_select(0, bad)
    with pytest.raises(RuntimeError, match=r"aten::index_select.*reported asynchronously"):
        fake.synchronize()
    assert table.sum().item() == 8


def test_waiting_inside_a_kernel_is_refused() -> None:
    x = torch.zeros(1, device=NAME)
    fake.launch(lambda view: fake.current_stream().synchronize(), x)
    with pytest.raises(RuntimeError, match="inside a kernel"):
        fake.synchronize()


def test_python_kernels_run_in_stream_order() -> None:
    x = torch.arange(4.0, device=NAME)
    x.mul_(2)
    fake.launch(lambda view, by: view.add_(by), x, 1, name="plus one")
    x.mul_(10)
    assert x.tolist() == [10.0, 30.0, 50.0, 70.0]


def test_native_handle_launches_through_the_c_interface() -> None:
    first, second = fake.Stream(), fake.Stream()
    assert first.native_handle != second.native_handle
    library = ctypes.CDLL(str(fake_device.library()))
    library.fake_device_memory.restype = ctypes.c_void_p
    x = torch.ones(4, device=NAME)
    main = fake.current_stream()

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def kernel(address: int) -> None:
        ctypes.memset(library.fake_device_memory(ctypes.c_void_p(address)), 0, 8)

    library.fake_device_launch(
        ctypes.c_void_p(main.native_handle),
        b"zero half",
        kernel,
        ctypes.c_void_p(x.data_ptr()),
        None,
    )
    assert x.tolist() == [0.0, 0.0, 1.0, 1.0]


# ---- Copies and pinned memory --------------------------------------------------------------------


def test_pinned_memory() -> None:
    assert torch.ones(3).pin_memory().is_pinned()
    assert torch.empty(3, pin_memory=True)[1:].is_pinned()
    assert not torch.ones(3).is_pinned()


def test_copies_to_and_from_pinned_memory_do_not_wait() -> None:
    source, target = torch.ones(5).pin_memory(), torch.zeros(5, pin_memory=True)
    fake.hold(fake.default_stream())

    def there_and_back() -> None:
        target.copy_(source.to(NAME, non_blocking=True), non_blocking=True)

    counts = during(there_and_back)
    assert (counts["async_copy"], counts.get("blocking_copy", 0)) == (2, 0)
    source.fill_(2)  # too early, and visibly so
    assert all(map(math.isnan, target.tolist()))
    fake.release()
    fake.synchronize()
    assert target.tolist() == [2.0] * 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.complex64, torch.int64, torch.uint8])
def test_what_a_copy_in_flight_will_overwrite_is_not_there_any_more(dtype: torch.dtype) -> None:
    x, target = torch.ones(2, 3, dtype=dtype, device=NAME), torch.ones(2, 6, dtype=dtype)
    target = target.pin_memory()
    with fake.held():
        target[:, ::2].copy_(x, non_blocking=True)
        assert (target[:, ::2] != 1).all() and (target[:, 1::2] == 1).all()
    fake.synchronize()
    assert (target == 1).all()


@pytest.mark.parametrize("ask", ["query", "synchronize"])
def test_an_event_is_asked_while_its_device_is_current(ask: str) -> None:
    """As torch does not make it so, CUDA would make a context on the device that is current."""
    with fake.device(1):
        event = fake.Event()
        event.record(fake.current_stream())
    with pytest.raises(RuntimeError, match="an event of device 1 while device 0 was current"):
        getattr(event, ask)()
    with fake.device(1):
        getattr(event, ask)()


def test_pinned_memory_in_flight_is_not_reused() -> None:
    source = torch.ones(5000).pin_memory()
    fake.hold(fake.default_stream())
    x = source.to(NAME, non_blocking=True)
    address = source.data_ptr()
    del source
    assert torch.zeros(5000).pin_memory().data_ptr() != address
    fake.release()
    assert x.sum().item() == 5000


@pytest.mark.parametrize(
    "copy",
    [
        lambda host, x: x.copy_(host, non_blocking=True),
        lambda host, x: x.copy_(host.pin_memory()),
        lambda host, x: host.copy_(x, non_blocking=True),
        lambda host, x: x.cpu(),
        lambda host, x: torch.tensor([1.0], device=NAME),
    ],
    ids=["pageable up", "pinned up, blocking", "pageable down", "cpu()", "torch.tensor"],
)
def test_other_copies_wait_and_are_counted(copy: Callable[[Any, Any], Any]) -> None:
    host, x = torch.ones(4), torch.zeros(4, device=NAME)
    assert during(lambda: copy(host, x)).get("blocking_copy") == 1


# ---- Counters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WAITS)
def test_every_wait_is_counted_and_can_be_forbidden(kind: str) -> None:
    x = torch.ones(4, device=NAME)
    before = fake.counters(threading.current_thread())
    WAITS[kind](x)
    counts = fake.counters(threading.current_thread()) - before
    assert (counts[kind], counts.synchronisations) == (1, 1)
    fake.set_sync_debug_mode("error")
    if kind == "event_synchronize":  # as with CUDA
        WAITS[kind](x)
        return
    with pytest.raises(RuntimeError, match=kind):
        WAITS[kind](x)


def test_a_copy_that_is_refused_is_not_under_way() -> None:
    """Who was refused lets the memory go: a copy that comes nevertheless writes to another's."""
    host, x = torch.zeros(4), torch.ones(4, device=NAME)
    fake.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="blocking_copy"):
        host.copy_(x)
    fake.settle()
    assert host.sum() == 0


def test_counters_survive_the_reuse_of_a_thread_identifier() -> None:
    x = torch.ones(4, device=NAME)
    before = fake.counters()
    own = []

    def work() -> None:
        x.sum().item()
        own.append(fake.counters(threading.current_thread())["item"])

    for _ in range(5):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert own == [1] * 5
    assert (fake.counters() - before)["item"] == 5


def test_counters_tell_threads_apart() -> None:
    x = torch.ones(4, device=NAME)
    before = fake.counters(threading.main_thread())
    ready, checked = threading.Event(), threading.Event()

    def other() -> None:
        x.sum().item()
        ready.set()
        checked.wait()

    thread = threading.Thread(target=other)
    thread.start()
    ready.wait()
    assert fake.counters(thread)["item"] == 1
    assert not (fake.counters(threading.main_thread()) - before).nonzero()
    checked.set()
    thread.join()


def test_launches_are_recorded_by_name() -> None:
    x = torch.ones(4, device=NAME)
    with fake.recorded_launches() as names:
        torch._foreach_add_([x, x[:2]], 1)
        x.sum()
    assert names == ["0:0 aten::_foreach_add_.Scalar", "0:0 aten::sum.IntList_out"]
