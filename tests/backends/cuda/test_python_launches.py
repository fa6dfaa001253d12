"""The CUDA backend that Python launches, where no compiled extension fits the installed torch: on
the fake accelerator, held to what the extension's is held to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from backends.cuda import test_binding as records
from backends.cuda import test_binding_exponents as exponents
from backends.cuda import test_binding_launches as launches
from fakes import cuda_on_fake, fake_device
from fakes.cuda_on_fake.checks import slots_for, spent
from fastcheck.backends.table import exponent_words
from support.devices.on_device import assert_all_same, many, of_cpu, random
from support.helpers import put

fake: Any = fake_device.load()
NAME = fake.name()
PYTHON = cuda_on_fake.python_entry()

pytestmark = [pytest.mark.fake_hooks, pytest.mark.usefixtures("cuda_on_fake_device")]

SAME_RECORDS = (
    records.test_lazy_views,
    records.test_subclasses_and_gradients,
    records.test_found_nonfinite_of_many,
)
SAME_EXPONENTS = (
    exponents.test_record_and_exponents_in_one_launch,
    exponents.test_slots_that_are_not_there,
    exponents.test_integers_are_refused,
)
SAME_LAUNCHES = (
    launches.test_one_launch_and_nothing_else,
    launches.test_one_launch_for_each_dtype_of_a_list,
    launches.test_a_long_list_takes_one_pinned_table_again_and_again,
    launches.test_found_nonfinite_is_one_word_and_one_launch,
    launches.test_nothing_waits_for_a_device_that_stands_still,
    launches.test_buffers_grow_behind_launches_that_use_them,
    launches.test_a_table_is_left_alone_until_its_stream_has_passed,
    launches.test_streams_do_not_share_buffers,
    launches.test_threads_on_one_stream_and_on_many,
    launches.test_devices,
    launches.test_modes_of_the_caller_do_not_matter,
)


@pytest.fixture(autouse=True)
def launched_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "CUDA", PYTHON)
    monkeypatch.setattr(launches, "CUDA", PYTHON)
    monkeypatch.setattr(exponents, "CUDA", PYTHON)


@pytest.mark.parametrize("test", [*SAME_RECORDS, *SAME_EXPONENTS, *SAME_LAUNCHES])
def test_as_the_extension(test: Any) -> None:
    test()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "int8", "bool"])
def test_records(dtype: str) -> None:
    records.test_dtypes_and_sizes(dtype)
    records.test_layouts(dtype)
    records.test_alignments(dtype)
    records.test_found_nonfinite(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "float64"])
def test_exponents(dtype: str) -> None:
    exponents.test_record_and_exponents_of_every_dtype_and_layout(dtype)
    x = random(dtype, 5000, 8)
    for order in (False, True):
        for host in (x, x[::3]):
            there = PYTHON.exponents(put(host, NAME), order)
            assert there.tolist() == exponent_words(host, order).tolist()


@pytest.fixture
def capture() -> Iterator[None]:
    cuda_on_fake.shim().cuda_on_cpu_pretend_capture(1)
    yield
    cuda_on_fake.shim().cuda_on_cpu_pretend_capture(0)


def test_capture(capture: None) -> None:
    hosts = many(150)
    there = [put(x, NAME).clone() for x in hosts]
    slots = slots_for(len(hosts))
    with fake.stream(fake.Stream()):  # nothing is kept for it
        fake.synchronize()
        done, names = spent(lambda: PYTHON.observe_list(there, slots, 0, 3))
        fake.synchronize()
    assert [name for name in names if name == "fastcheck records"] == ["fastcheck records"] * 5
    assert done["pinned_alloc"] == done["async_copy"] == done["event_record"] == 0
    assert_all_same(slots, of_cpu(hosts))


def test_a_stream_made_outside_of_torch_keeps_no_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    class External:
        """A stream of torch's, under a number that is its handle."""

        def __init__(self, stream: Any) -> None:
            self.native_handle = self.stream_id = stream.native_handle

    stream, slots = fake.Stream(), slots_for(60)
    there = [put(x, NAME).clone() for x in many(60)]
    with fake.stream(stream):
        external = External(stream)
        monkeypatch.setattr(fake, "current_stream", lambda device=None: external)
        for _ in range(2):
            done, _ = spent(lambda: PYTHON.observe_list(there, slots, 0, 3))
            assert done["pinned_alloc"] == done["event_record"] == 0 < done["alloc"]
        monkeypatch.undo()
    fake.synchronize()
    assert_all_same(slots, of_cpu([x.cpu() for x in there]))


def test_errors() -> None:
    x = put(random("float32", 10), NAME)
    with pytest.raises(IndexError, match=r"expected slots within a ring of 2, got \[1, 3\)"):
        PYTHON.observe_list([x, x], slots_for(2), 1, 3)
    with pytest.raises(ValueError, match="expected slots in a contiguous uint8 tensor, got"):
        PYTHON.observe(x, slots_for(1).float(), 0, 3)
    with pytest.raises(ValueError, match=f"expected all tensors on {NAME}:0, got one on {NAME}:1"):
        PYTHON.observe_list([x, x.to(f"{NAME}:1")], slots_for(2), 0, 3)
    with pytest.raises(ValueError, match="expected depth 1"):
        PYTHON.observe(x, slots_for(1), 0, 7)
