"""The launches of the CUDA backend, on the fake accelerator with the real kernels
(tests/fakes/cuda_on_fake): what a call enqueues and allocates, and the buffers that it keeps for
each stream, across streams, threads, devices, graph capture and dispatch modes.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fakes import cuda_on_fake, fake_device
from fakes.cuda_on_fake.checks import slots_for, spent
from support.devices.on_device import assert_all_same, in_threads, many, of_cpu, random
from support.helpers import put

fake: Any = fake_device.load()
NAME = fake.name()
CUDA = cuda_on_fake.entry()

pytestmark = [pytest.mark.fake_hooks, pytest.mark.usefixtures("cuda_on_fake_device")]


# --- what a call costs ---------------------------------------------------------------------------


def test_one_launch_and_nothing_else() -> None:
    x, slots = put(random("float32", 50000), NAME), slots_for(2)
    CUDA.observe(x, slots, 0, 3)
    done, names = spent(lambda: CUDA.observe(x, slots, 1, 3))
    assert names == ["fastcheck records"]
    assert {key: value for key, value in done.items() if value} == {"kernel": 1}


@pytest.mark.parametrize("count", [1, 3])
def test_a_launch_is_planned_a_second_time_only_to_size_its_buffers(count: int) -> None:
    library = ctypes.CDLL(str(cuda_on_fake.build()))

    def planned(*hosts: torch.Tensor) -> tuple[int, int]:
        """How often buffers were sized, and how many kernels were launched."""
        there, slots = [put(x, NAME).clone() for x in hosts], slots_for(len(hosts))
        before = library.cuda_on_fake_plans()
        _, names = spent(lambda: CUDA.observe_list(there, slots, 0, 3))
        assert_all_same(slots, of_cpu(list(hosts)))
        return library.cuda_on_fake_plans() - before, names.count("fastcheck records")

    hosts = [random("float32", 9000, k) for k in range(count)]
    assert planned(*hosts) == (0, 1)
    library.cuda_on_fake_refuse_buffers()
    assert planned(*hosts) == (1, 1)
    # A list of several kernels would have launched some of them by then.
    assert planned(*hosts, random("float16", 9)) == (1, 2)


def test_one_launch_for_each_dtype_of_a_list() -> None:
    there = [put(x, NAME) for x in (*many(20), random("float32", 9), random("complex64", 9))]
    slots = slots_for(len(there))
    there = [x.clone() for x in there]  # aligned
    CUDA.observe_list(there, slots, 0, 3)
    done, names = spent(lambda: CUDA.observe_list(there, slots, 0, 3))
    assert names == ["fastcheck records"] * 2  # complex64 goes with float32
    assert {key: value for key, value in done.items() if value} == {"kernel": 2}


def test_a_long_list_takes_one_pinned_table_again_and_again() -> None:
    there = [put(x, NAME).clone() for x in many(200)]
    slots = slots_for(len(there))
    for _ in range(2):
        CUDA.observe_list(there, slots, 0, 3)
        fake.synchronize()
    done, names = spent(lambda: CUDA.observe_list(there, slots, 0, 3))
    assert names == ["fastcheck table", "fastcheck records"]
    assert done.synchronisations == done["alloc"] == done["pinned_alloc"] == 0
    assert done["event_record"] == 1


def test_found_nonfinite_is_one_word_and_one_launch() -> None:
    there = [put(x, NAME).clone() for x in many(20)]
    CUDA.found_nonfinite(there)
    done, names = spent(lambda: CUDA.found_nonfinite(there))
    assert names == ["aten::zero_", "fastcheck found_nonfinite"]
    assert done.synchronisations == 0
    assert done["alloc"] == 1


def test_nothing_waits_for_a_device_that_stands_still() -> None:
    """Nor needs what was given to it any longer: memory is freed in the order of the stream."""
    hosts = [random("float32", 30000), *many(50)]
    wanted = of_cpu(hosts)
    slots = slots_for(2 * len(hosts))
    there = [put(x, NAME) for x in hosts]
    fake.synchronize()
    fake.hold(fake.default_stream())
    before = fake.counters(threading.current_thread())
    for i, x in enumerate(there):
        CUDA.observe(x, slots, i, 3)
    CUDA.observe_list(there, slots, len(hosts), 3)
    assert (fake.counters(threading.current_thread()) - before).synchronisations == 0
    del there, x
    fake.release()
    assert_all_same(slots, [*wanted, *wanted])


# --- workspaces ----------------------------------------------------------------------------------


def test_buffers_grow_behind_launches_that_use_them() -> None:
    """Counters, partials and tables: each list needs more than the one before, and none has run."""
    counts = (3, 300, 700, 1500, 40)
    x = random("bfloat16", 1500, 1)
    hosts = [x[i : i + 1 + i % 9] for i in range(max(counts))]
    slots = [slots_for(count) for count in counts]
    whole = put(x, NAME)
    there = [whole[i : i + 1 + i % 9].clone() for i in range(max(counts))]
    fake.synchronize()
    stream = fake.Stream()
    fake.hold(stream)
    with fake.stream(stream):
        for rows_of_list, count in zip(slots, counts):
            CUDA.observe_list(there[:count], rows_of_list, 0, 3)
    fake.release()
    fake.synchronize()
    wanted = of_cpu(hosts)
    for rows_of_list, count in zip(slots, counts):
        assert_all_same(rows_of_list, wanted[:count])


def test_a_table_is_left_alone_until_its_stream_has_passed() -> None:
    lists = [[x + k for x in many(60)] for k in range(4)]
    slots = slots_for(4 * 60)
    there = [[put(x, NAME).clone() for x in xs] for xs in lists]
    fake.synchronize()
    with fake.held():
        for k, xs in enumerate(there):
            CUDA.observe_list(xs, slots, 60 * k, 3)
    assert_all_same(slots, of_cpu([x for xs in lists for x in xs]))
    done, _ = spent(lambda: CUDA.observe_list(there[0], slots, 0, 3))
    assert done["pinned_alloc"] == 0  # those of before are free again


def test_streams_do_not_share_buffers() -> None:
    """One stands still from before its buffers were zeroed; the other ones go on."""
    x = random("float32", 4096 * 40)
    there = put(x, NAME)
    slots = slots_for(4)
    fake.synchronize()
    streams = [fake.Stream() for _ in range(4)]
    fake.hold(streams[0])
    for i, stream in enumerate(streams):
        with fake.stream(stream):
            CUDA.observe(there, slots, i, 3)
    for stream in streams[1:]:
        stream.synchronize()
    side = fake.Stream()
    with fake.stream(side):
        finished = slots[1:].to("cpu")
    fake.release()
    fake.synchronize()
    assert_all_same(finished, of_cpu([x] * 3))
    assert_all_same(slots, of_cpu([x] * 4))


def test_threads_on_one_stream_and_on_many() -> None:
    hosts = [random("float32", 300 * k + 5, k) for k in range(1, 50)]
    wanted = of_cpu(hosts)

    def work(number: int) -> None:
        stream = fake.default_stream() if number < 3 else fake.Stream()
        with fake.stream(stream):
            for _ in range(2):
                there = [put(x, NAME) for x in hosts[number:]]
                slots = slots_for(len(there) + 1)
                CUDA.observe_list(there, slots, 0, 3)
                CUDA.observe(there[0], slots, len(there), 3)
                assert_all_same(slots, [*wanted[number:], wanted[number]])

    in_threads(6, work)


def test_a_thread_that_waits_for_the_buffers_lets_go_of_python() -> None:
    """An allocation that waits, and takes Python's lock again afterwards, is not blocked by it."""
    x = put(random("float32", 4096 * 600), NAME)
    slots = slots_for(8)
    fake.synchronize()
    fake.set_memory_limit(int(fake.memory_allocated()) + (1 << 16))
    stream = fake.Stream()
    fake.hold(stream)
    try:
        with fake.stream(stream):
            torch.ones(10, device=NAME)
        failed: list[BaseException] = []

        def work(i: int) -> None:
            try:
                with fake.stream(fake.Stream()):
                    CUDA.observe(x, slots, i, 3)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        fake.release()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert all(isinstance(error, torch.OutOfMemoryError) for error in failed)
    finally:
        fake.set_memory_limit(1 << 34)
        fake.release()
    CUDA.observe(x, slots, 0, 3)
    assert_all_same(slots[:1], of_cpu([x.cpu()]))


def test_devices() -> None:
    """The tensors' device is what counts, not the current one, which stays as it is."""
    x = random("float32", 5000)
    for index, current in ((0, 1), (1, 0), (1, 1)):
        there, slots = put(x, NAME).to(f"{NAME}:{index}"), slots_for(3, index)
        fake.set_device(current)
        CUDA.observe(there, slots, 0, 3)
        CUDA.observe_list([there, there], slots, 1, 3)
        assert CUDA.found_nonfinite([there]).device == there.device
        assert fake.current_device() == current
        assert_all_same(slots, of_cpu([x] * 3))


# --- while a graph is captured -------------------------------------------------------------------


@pytest.fixture
def capture() -> Iterator[None]:
    """Streams say that they are being captured. What is put on them runs at once all the same: how
    a graph is replayed can only be seen on a GPU (test_gpu.py)."""
    cuda_on_fake.shim().cuda_on_cpu_pretend_capture(1)
    yield
    cuda_on_fake.shim().cuda_on_cpu_pretend_capture(0)


def test_capture_uses_memory_of_its_own_and_no_pinned_table(capture: None) -> None:
    """Of the graph's pool, that is: what is kept for a stream is neither used nor made."""
    hosts = many(150)
    there = [put(x, NAME).clone() for x in hosts]
    slots = slots_for(len(hosts))
    with fake.stream(fake.Stream()):  # nothing is kept for it yet
        fake.synchronize()
        gc.collect()  # what earlier tests left in circles
        held = fake.memory_allocated()
        done, names = spent(lambda: CUDA.observe_list(there, slots, 0, 3))
        assert fake.memory_allocated() == held
        assert names == ["aten::zero_"] + ["fastcheck records"] * 5  # 32 at a time
        assert done["pinned_alloc"] == done["async_copy"] == done["event_record"] == 0
        done, names = spent(lambda: CUDA.observe(there[7], slots, 7, 3))
        assert names == ["aten::zero_", "fastcheck records"]  # each replay begins with zeros
        found = CUDA.found_nonfinite(there)
        fake.synchronize()
    assert found.item() == 1.0
    assert_all_same(slots, of_cpu(hosts))


# --- the caller's modes --------------------------------------------------------------------------


def test_modes_of_the_caller_do_not_matter() -> None:
    """Buffers are plain memory, whatever the mode in which they had to be allocated."""

    class Meta(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            raise AssertionError(f"{func} was not for the mode to see")

    x = random("complex64", 50000)
    there, slots = put(x, NAME), slots_for(4)
    lazy = there.conj()
    fake.synchronize()
    for i, mode in enumerate((Meta(), torch.inference_mode(), torch.enable_grad())):
        with fake.stream(fake.Stream()), mode:
            CUDA.observe_list([there], slots, i, 3)
            CUDA.observe(lazy, slots, 3, 3)
            CUDA.found_nonfinite([there, lazy])
        fake.synchronize()
    assert_all_same(slots, of_cpu([x, x, x, x.conj()]))
