"""The CUDA backend of torch tensors, on the fake accelerator with the real kernels
(tests/cuda_on_fake): the CPU's records, byte for byte, and nothing that waits.

What is at stake here is what lies between torch and the kernels: arguments, slots, streams,
workspaces, lists. The kernels' own bits are held to the CPU's by test_cuda_on_cpu.py.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import cuda_on_fake
import fake_device
import fastcheck
from cuda_on_fake.checks import slots_for, spent
from fastcheck import backends
from helpers import SIZES, even, kinds, put, tensor_of
from on_device import assert_all_same, in_threads, of_cpu, random, rows
from reference import DEPTHS, DTYPES, RECORD_BYTES
from test_cuda_on_cpu import LAYOUTS
from vectors import pattern

fake: Any = fake_device.load()
NAME = fake.name()
CUDA = cuda_on_fake.entry()
ALL = sorted(DTYPES)

pytestmark = pytest.mark.usefixtures("cuda_on_fake_device")


def many(count: int) -> list[torch.Tensor]:
    """Tensors of a dtype that has to travel in a table from the 33rd on, some not aligned."""
    return [random("bfloat16", 41 * i + 1, i)[i % 2 :] for i in range(count)]


# --- records -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL)
def test_dtypes_and_sizes(dtype: str) -> None:
    """One by one into slots of a ring, in no order, and all of them in one list."""
    hosts = [
        tensor_of(pattern(kind, dtype, even(size, dtype), size), dtype)
        for kind, size in itertools.product(kinds(dtype), SIZES)
    ]
    there = [put(x, NAME) for x in hosts]
    for depth, level in DEPTHS.items():
        wanted = of_cpu(hosts, depth)
        slots = slots_for(len(hosts) + 2)
        for i in reversed(range(len(hosts))):
            CUDA.observe(there[i], slots, i + 1, level)
        assert_all_same(slots[1:-1], wanted, depth)
        assert set(rows(slots[:: len(hosts) + 1])) == {b"\xa5" * RECORD_BYTES}
        slots = slots_for(len(hosts) + 2)
        CUDA.observe_list(there, slots, 2, level)
        assert_all_same(slots[2:], wanted, depth)


@pytest.mark.parametrize("dtype", ALL)
def test_layouts(dtype: str) -> None:
    x = random(dtype, 12000, 8)
    hosts = [layout(x) for layout in LAYOUTS.values()]
    there = [put(x, NAME) for x in hosts]
    for observe, order in (
        (CUDA.observe_list, "storage"),
        (CUDA.observe_list_logical, "logical"),
    ):
        slots = slots_for(len(hosts))
        observe(there, slots, 0, 3)
        assert_all_same(slots, of_cpu(hosts, order=order), order)


@pytest.mark.parametrize("dtype", ALL)
def test_alignments(dtype: str) -> None:
    block = random(dtype, 4096 + 333, 21)
    hosts = [block[i : i + 4200] for i in range(18)]
    slots = slots_for(len(hosts))
    CUDA.observe_list([put(x, NAME) for x in hosts], slots, 0, 3)
    assert_all_same(slots, of_cpu(hosts))


def test_lazy_views() -> None:
    x = random("complex64", 900, 3).view(30, 30)
    hosts = [x.conj(), x.t().conj(), x.imag._neg_view(), x.conj().imag, x[::2].conj()]
    slots = slots_for(len(hosts))
    CUDA.observe_list([put(host, NAME) for host in hosts], slots, 0, 3)
    assert_all_same(slots, of_cpu(hosts))


def test_subclasses_and_gradients() -> None:
    x = random("float32", 5000).nan_to_num(0, 0, 0)
    there = put(x, NAME)
    slots = slots_for(2)
    CUDA.observe(nn.Parameter(there), slots, 0, 3)
    CUDA.observe((nn.Parameter(there) * 1).view(50, 100).t(), slots, 1, 3)
    assert_all_same(slots, of_cpu([x, x]))


@pytest.mark.parametrize("count", [0, 1, 32, 33, 150])
def test_lists(count: int) -> None:
    hosts = many(count)
    mixed = [x for i, x in enumerate(hosts) for x in (x, random("float32", i), x[::3])]
    for xs in (hosts, mixed):
        slots = slots_for(len(xs))
        CUDA.observe_list([put(x, NAME) for x in xs], slots, 0, 3)
        assert_all_same(slots, of_cpu(xs))


@pytest.mark.parametrize("dtype", ALL)
def test_found_nonfinite(dtype: str) -> None:
    clean = [torch.ones(n, dtype=getattr(torch, dtype)) for n in (3, 5000, 0)]
    found = CUDA.found_nonfinite([put(x, NAME) for x in clean])
    assert (found.shape, found.dtype, found.device.type) == ((), torch.float32, NAME)
    assert found.item() == 0.0
    if DTYPES[dtype].kind == "float":
        clean[1][4321] = float("nan")
        assert CUDA.found_nonfinite([put(x, NAME) for x in clean]).item() == 1.0
        assert CUDA.found_nonfinite([put(clean[1][::5], NAME)]).item() == 0.0
        assert CUDA.found_nonfinite([put(clean[1][::4], NAME)]).item() == 0.0
        assert CUDA.found_nonfinite([put(clean[1][1::3], NAME)]).item() == 1.0


def test_found_nonfinite_of_many() -> None:
    hosts = many(100)
    finite = [x.nan_to_num(0.0, 0.0, 0.0) for x in hosts]
    assert CUDA.found_nonfinite([put(x, NAME) for x in finite]).item() == 0.0
    assert CUDA.found_nonfinite([put(x, NAME) for x in [*finite, hosts[-1]]]).item() == 1.0
    assert CUDA.found_nonfinite([]).item() == 0.0


# --- the public functions ------------------------------------------------------------------------


def test_stats_is_the_cpus_record() -> None:
    x = random("float16", 7000)
    for y in (x, x[:6400].view(80, 80).t(), x[::3]):
        for depth, order in itertools.product(DEPTHS, ("storage", "logical")):
            there = fastcheck.stats(put(y, NAME), depth=depth, order=order)
            here = fastcheck.stats(y, depth=depth, order=order)
            assert there.record.tobytes() == here.record.tobytes()
    assert fastcheck.checksum(put(x, NAME)) == fastcheck.checksum(x)
    assert fastcheck.found_nonfinite([put(x, NAME)]).item() == 1.0


def test_the_entry() -> None:
    assert backends.backend_for(torch.device(NAME, 1)) is CUDA
    assert (CUDA.name, CUDA.determinism) == ("cuda", "bitwise")
    assert (CUDA.is_immediate, CUDA.has_host_flag) == (False, False)
    assert CUDA.device_mode == fastcheck.DeviceMode.IEEE


# --- what a call costs ---------------------------------------------------------------------------


def test_one_launch_and_nothing_else() -> None:
    x, slots = put(random("float32", 50000), NAME), slots_for(2)
    CUDA.observe(x, slots, 0, 3)
    done, names = spent(lambda: CUDA.observe(x, slots, 1, 3))
    assert names == ["fastcheck records"]
    assert {key: value for key, value in done.items() if value} == {"kernel": 1}


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
    before = fake.counters()
    for i, x in enumerate(there):
        CUDA.observe(x, slots, i, 3)
    CUDA.observe_list(there, slots, len(hosts), 3)
    assert (fake.counters() - before).synchronisations == 0
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


# --- errors --------------------------------------------------------------------------------------


def test_errors() -> None:
    x, slots = put(torch.ones(3), NAME), slots_for(2)
    there: Any = CUDA.observe
    with pytest.raises(TypeError, match=rf"expected a {NAME.upper()} tensor, came one on cpu"):
        there(torch.ones(3), slots, 0, 3)
    with pytest.raises(TypeError, match=r"expected a torch.Tensor, came list"):
        there([1.0], slots, 0, 3)
    with pytest.raises(TypeError, match=r"item 1: expected a strided tensor"):
        CUDA.observe_list([x, torch.ones(3).to_sparse()], slots, 0, 3)
    with pytest.raises(ValueError, match=r"expected slots in a contiguous uint8 tensor"):
        there(x, torch.zeros(1, 192, dtype=torch.uint8), 0, 3)
    with pytest.raises(ValueError, match=r"depth 1 \(health\)"):
        there(x, slots, 0, 4)
    with pytest.raises(IndexError, match=r"within a ring of 2, came \[1, 3\)"):
        CUDA.observe_list([x, x], slots, 1, 3)
    with pytest.raises(ValueError, match=rf"all tensors on {NAME}:0, came one on {NAME}:1"):
        CUDA.observe_list([x, x.to(f"{NAME}:1")], slots, 0, 3)
    shrunk = put(torch.ones(100), NAME)
    shrunk.untyped_storage().resize_(0)
    with pytest.raises(TypeError, match=r"storage holds all its elements"):
        there(shrunk, slots, 0, 3)
    assert set(rows(slots)) == {b"\xa5" * RECORD_BYTES}
