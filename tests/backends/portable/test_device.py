"""Launches, memory and waits of the portable backend, counted on the fake accelerator.

Runs with FASTCHECK_TEST_DEVICE=fake, as the tests of statistics do for the values.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Callable

import pytest
import torch

import fastcheck
from fastcheck.backends.portable import backend as portable
from fastcheck.backends.portable import many as portable_many
from fastcheck.backends.portable.backend import any_nonfinite
from fastcheck.backends.table import backend_for
from support.devices.on_device import in_threads
from support.helpers import DEVICE, ON_CPU, assert_same, tensor_of
from support.records.reference import DEPTHS, VALUE_BYTES, pattern, record
from support.sampling import sample

if ON_CPU:
    pytest.skip("needs FASTCHECK_TEST_DEVICE=fake", allow_module_level=True)

from fakes import fake_device

pytestmark = pytest.mark.fake_statistics


fake: Any = fake_device.load()
MIB = 1 << 20


@pytest.fixture(autouse=True)
def clean_device() -> Iterator[None]:
    yield
    fake.release()
    fake.synchronize(0)
    fake.synchronize(1)


def slots_for(count: int, index: int = 0) -> torch.Tensor:
    return torch.zeros(count, 192, dtype=torch.uint8, device=f"{DEVICE}:{index}")


def launches(call: Callable[[], object]) -> list[str]:
    """The launches of one call after it was made twice. It may not wait, copy or allocate."""
    call()
    call()
    fake.synchronize()
    before = fake.counters()
    with fake.recorded_launches() as names:
        call()
    done = fake.counters() - before
    assert done.synchronisations == 0
    assert done["blocking_copy"] == done["async_copy"] == 0  # nothing goes to or from the host
    assert done["alloc_below_cache"] == done["pinned_alloc"] == 0
    return list(names)


def on_device(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(count, dtype=dtype).to(DEVICE)


#: Elements of each, how many.
LISTS = ((32 * 4096, 2), (4096, 10), (4096, 64))


# --- launches ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "dtype", "most"),
    [
        # What was counted. Health: compare, add up, weigh, add up; with the padding to whole words
        # two more, and two for more than one group of 1024. Full: 16 rows of chains of 5 launches.
        (4096, torch.float32, (4, 19, 128)),
        (768 * 768, torch.float16, (5, 34, 143)),
        (1000, torch.bfloat16, (4, 19, 147)),
        (1001, torch.bfloat16, (6, 21, 149)),
        (1024 * 4, torch.float64, (4, 25, 134)),
        (4096, torch.int64, (4, 13, 122)),
        (64, torch.float32, (4, 19, 57)),  # chains of one word
        (MIB, torch.bfloat16, (11, 54, 163)),
    ],
)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_launches_of_one_tensor(
    count: int, dtype: torch.dtype, most: tuple[int, int, int], depth: int
) -> None:
    x, slots = on_device(count, dtype), slots_for(2)
    names = launches(lambda: portable.observe(x, slots, 1, depth))
    assert len(names) <= most[depth - 1], names


@pytest.mark.parametrize(("depth", "most"), [(1, 7), (2, 59), (3, 207)])
def test_launches_of_200_parameters(depth: int, most: int) -> None:
    """About one launch for each, of 200 weights, biases and scalars: 1.6 MiB, which sums
    are taken of in several parts.
    """
    xs = [on_device(count) for k in range(50) for count in (64 * 64, 64 * 64 + k, 64, 1)]
    slots = slots_for(200)
    names = launches(lambda: portable.observe_list(xs, slots, 0, depth))
    assert len(names) <= most, names
    for x, row in zip(xs, slots.cpu()):
        wanted = record(x.cpu(), depth={n: name for name, n in DEPTHS.items()}[depth])
        assert_same(row.numpy().tobytes()[:VALUE_BYTES] + wanted[VALUE_BYTES:], wanted)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_launches_do_not_grow_with_the_list(depth: int) -> None:
    """They depend on the bytes, the padding to whole segments included: the same bytes in more
    tensors take no more, and more tensors none either while they fit the same parts. Where a
    tensor is more than one segment, the extremes of these are brought together.
    """
    slots = slots_for(64)
    taken = [
        len(launches(lambda xs=xs: portable.observe_list(xs, slots, 0, depth)))
        for xs in ([on_device(count)] * many for count, many in LISTS)
    ]
    # 4096 components are one segment at depth 3, and several at depth 2.
    assert (taken[0] - taken[1], taken[2] - taken[1]) == (4 if depth == 3 else 0, 0), taken


def test_launches_of_found_nonfinite() -> None:
    xs = [on_device(100 + k) for k in range(200)]
    assert len(launches(lambda: any_nonfinite(xs))) <= 5
    mixed = [*xs, *(x.bfloat16() for x in xs)]
    assert len(launches(lambda: any_nonfinite(mixed))) <= 8


def test_public_functions_do_not_wait() -> None:
    x, y = on_device(5000), on_device(70, torch.float16)
    for call in (
        lambda: fastcheck.stats(x),
        lambda: fastcheck.stats(x, record="health"),
        lambda: fastcheck.stats([x, y]),
        lambda: fastcheck.stats(x.view(50, 100).t(), order="logical"),
        lambda: fastcheck.found_nonfinite([x, y]),
    ):
        launches(call)
    s = fastcheck.stats(x)
    before = fake.counters()
    assert (s.numel, s.sum, s.max) == (5000, 5000.0, 1.0)
    done = fake.counters() - before
    assert done.synchronisations == done["blocking_copy"] == 1  # all fields are fetched at once
    assert done["kernel"] == 1


def test_the_ops_do_not_wait() -> None:
    x, y, slots = on_device(5000), on_device(70, torch.float16), slots_for(2)
    ops = torch.ops.fastcheck
    for call in (
        lambda: ops.stats(x),
        lambda: ops.stats_list([x, y], 2),
        lambda: ops.checksum(x),
        lambda: ops.found_nonfinite([x, y]),
        lambda: ops.observe_(x, slots, 1, 3, 7, 8, 9, 10, 0),
    ):
        launches(call)


def test_a_list_of_new_sizes_does_not_wait() -> None:
    """Its index comes from pinned memory. (Constants are another matter: once for each device.)"""
    slots = slots_for(3)
    portable.observe_list([on_device(n) for n in (5, 4097, 70)], slots, 0, 3)
    xs = [on_device(n) for n in (6, 4098, 71)]
    before = fake.counters()
    portable.observe_list(xs, slots, 0, 3)
    done = fake.counters() - before
    assert (done.synchronisations, done["blocking_copy"]) == (0, 0)
    assert done["async_copy"] == 1


def test_nothing_runs_before_the_device_does() -> None:
    """Launched on a device that stands still, and right when it goes on."""
    x = tensor_of(pattern("random", "float32", 9000, 1), "float32")
    there, slots = x.to(DEVICE), slots_for(3)
    portable.observe(there, slots, 0, 3)
    portable.observe_list([there, there], slots, 0, 3)
    slots.zero_()
    fake.synchronize()
    with fake.held():
        portable.observe(there, slots, 0, 3)
        portable.observe_list([there, there], slots, 1, 3)
    for row in slots.cpu():
        actual = row.numpy().tobytes()[:VALUE_BYTES] + record(x)[VALUE_BYTES:]
        assert_same(actual, record(x))


# --- memory --------------------------------------------------------------------------------------


def peak(call: Callable[[], object]) -> int:
    """Bytes of the device that a call takes beyond what is held before it."""
    call()
    fake.synchronize()
    fake.reset_peak_memory_stats()
    before = fake.memory_allocated()
    call()
    fake.synchronize()
    return int(fake.max_memory_allocated()) - before


#: Of each way to read components.
READ = (
    "float32",
    "float16",
    "float64",
    "float8_e5m2",
    "complex64",
    "int64",
    "uint8",
    "uint32",
    "uint16",
    "uint64",
    "bool",
    "int16",
)


@pytest.mark.parametrize(("dtype", "depth"), sample(itertools.product(READ, (1, 2, 3)), 8))
def test_temporaries_stay_within_the_bound(dtype: str, depth: int) -> None:
    count = 5 * MIB // 2 + 77
    x = torch.zeros(count * getattr(torch, dtype).itemsize, dtype=torch.uint8, device=DEVICE)
    x = x.view(getattr(torch, dtype))
    slots = slots_for(60)
    strided = x[: count // 2 * 2].view(2, -1)[:, 1:]
    parts = list(x.split(count // 50))
    apart = [part[::2] for part in parts]
    cases: dict[str, Callable[[], object]] = {
        "one": lambda: portable.observe(x, slots, 0, depth),
        "strided": lambda: portable.observe(strided, slots, 0, depth),
        "list": lambda: portable.observe_list(parts, slots, 0, depth),
        "strided list": lambda: portable.observe_list(apart, slots, 0, depth),
    }
    if x.is_complex():
        cases["lazy"] = lambda: portable.observe(x.conj(), slots, 0, depth)
        cases["lazy list"] = lambda: portable.observe_list(
            [p.conj() for p in parts], slots, 0, depth
        )
    used = {name: peak(call) / MIB for name, call in cases.items()}
    assert max(used.values()) <= 16, used


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_smaller_bound_is_kept(depth: int) -> None:
    x, slots = on_device(3 * MIB), slots_for(1)
    used = peak(lambda: portable.observe(x, slots, 0, depth, temporary_bytes=4 * MIB))
    assert MIB < used <= 4 * MIB


def test_found_nonfinite_takes_no_memory_to_speak_of() -> None:
    x = on_device(4 * MIB)
    float8 = torch.zeros(20 * MIB, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    assert peak(lambda: any_nonfinite([x, x])) < MIB
    assert peak(lambda: any_nonfinite([float8, float8.view(5, -1).t()])) <= 16 * MIB


# --- devices, streams, threads -------------------------------------------------------------------


def test_two_devices() -> None:
    host = tensor_of(pattern("random", "float16", 5000, 1), "float16")
    for index in (1, 0, 1):
        x = host.to(f"{DEVICE}:{index}")
        for s in (fastcheck.stats(x), fastcheck.stats([x, x])[1]):
            assert s.tensor.device == x.device
            assert_same(s.record.tobytes(), record(host))
        assert fastcheck.found_nonfinite([x]).device == x.device


def test_mixed_devices_are_an_error() -> None:
    here, there, host = on_device(3), torch.ones(3).to(f"{DEVICE}:1"), torch.ones(3)
    for xs, item in (([here, there], 1), ([here, here, host], 2), ([host, here], 1)):
        for call in (fastcheck.stats, fastcheck.found_nonfinite):
            with pytest.raises(
                fastcheck.UnsupportedTensorError, match=rf"item {item}: expected a tensor on .*got"
            ):
                call(xs)


def test_streams_and_threads() -> None:
    """Each thread on a stream of its own, with lists of sizes of its own, sharing constants."""
    hosts = [
        tensor_of(pattern("random", "float32", 900 * k + 5, k), "float32") for k in range(1, 9)
    ]
    wanted = [record(x) for x in hosts]

    def work(number: int) -> None:
        with fake.stream(fake.Stream()):
            for _ in range(5):
                xs = [x.to(DEVICE) for x in hosts[number:]]
                rows = [s.record.tobytes() for s in fastcheck.stats(xs)]
                rows += [fastcheck.stats(xs[0]).record.tobytes()]
                for row, whole in zip(rows, [*wanted[number:], wanted[number]]):
                    assert_same(row, whole)

    portable_many._plan.cache_clear()
    in_threads(4, work)


def test_what_is_kept_of_a_list_belongs_to_its_stream() -> None:
    """A stream stands still before the index of a list is there; another one reads the same."""
    host = tensor_of(pattern("random", "float32", 9001, 2), "float32")
    x, slots = host.to(DEVICE), slots_for(4)
    portable.observe_list([x, x[1:]], slots, 0, 3)  # for the constants, which are shared
    xs = [x, x]
    fake.synchronize()
    first, second = fake.Stream(), fake.Stream()
    with fake.held(first):
        with fake.stream(first):
            portable.observe_list(xs, slots, 0, 3)
        with fake.stream(second):
            portable.observe_list(xs, slots, 2, 3)
            rows = slots[2:].cpu()
    for row in rows:
        assert_same(row.numpy().tobytes()[:VALUE_BYTES] + record(host)[VALUE_BYTES:], record(host))


def test_the_backend_of_the_device() -> None:
    backend = backend_for(torch.device(DEVICE, 1))
    assert (backend.name, backend.determinism) == ("portable", "sums")
    assert backend.device_mode == fastcheck.types.DeviceMode.UNKNOWN
    assert backend_for(torch.device("cpu")).name == "cpu"
    assert backend_for(torch.device("cuda")).device_mode == fastcheck.types.DeviceMode.IEEE
