"""Exponent counts of the CUDA backend, on the fake accelerator with the real kernel
(tests/fakes/cuda_on_fake): the CPU's words, one launch, streams, capture, and errors.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from backends.cuda.test_kernels import LAYOUTS
from fakes import cuda_on_fake, fake_device
from fakes.cuda_on_fake.checks import spent
from fastcheck.backends.table import exponent_words
from support.devices.on_device import in_threads, random
from support.helpers import put
from support.records.reference import FLOAT_NAMES, RECORD_BYTES

fake: Any = fake_device.load()
NAME = fake.name()
CUDA = cuda_on_fake.entry()

pytestmark = [pytest.mark.fake_hooks, pytest.mark.usefixtures("cuda_on_fake_device")]


def words(x: torch.Tensor, order: str = "storage") -> list[int]:
    return [int(word) for word in fastcheck.exponents(x, order=order).words]


@pytest.mark.parametrize("name", FLOAT_NAMES)
def test_every_dtype_and_layout(name: str) -> None:
    x = random(name, 12000, 8)
    for layout in LAYOUTS.values():
        host = layout(x)
        there = put(host, NAME)
        for order in ("storage", "logical"):
            assert words(there, order) == words(host, order), (layout, order)
    assert words(put(x[:0], NAME)) == words(x[:0])


def test_views_of_other_signs() -> None:
    x = random("complex64", 400)
    for host in (x.conj(), torch._neg_view(x), x[3:]):
        assert words(put(host, NAME)) == words(host)


def test_one_launch_and_the_words() -> None:
    x = put(random("float32", 50000), NAME)
    exponent_words(x)
    done, names = spent(lambda: exponent_words(x))
    assert names == ["fastcheck exponents"]
    assert (done["kernel"], done["alloc"], done.synchronisations) == (1, 1, 0)


def test_nothing_waits_for_a_device_that_stands_still() -> None:
    hosts = [random("bfloat16", 9000 + i, i) for i in range(4)]
    there = [put(x, NAME) for x in hosts]
    fake.synchronize()
    stream = fake.Stream()
    fake.hold(stream)
    before = fake.counters(threading.current_thread())
    with fake.stream(stream):
        found = [exponent_words(x) for x in there]
    assert (fake.counters(threading.current_thread()) - before).synchronisations == 0
    fake.release()
    fake.synchronize()
    assert [x.tolist() for x in found] == [words(x) for x in hosts]


def test_streams_and_threads_do_not_share_totals() -> None:
    hosts = [random("float32", 4096 * k + 5, k) for k in range(1, 7)]

    def work(number: int) -> None:
        with fake.stream(fake.Stream()):
            x = put(hosts[number], NAME)
            for _ in range(3):
                assert words(x) == words(hosts[number])

    in_threads(len(hosts), work)


def test_a_captured_count_is_replayed() -> None:
    x = random("float32", 9000, 1)
    there = put(x, NAME)
    exponent_words(there)
    graph: Any = torch.accelerator.Graph()
    with fake.stream(fake.Stream()), graph:
        found = exponent_words(there)
    for factor in (1.0, 0.5, 2.0**-40):
        there.copy_(x * factor)
        graph.replay()
        fake.synchronize()
        assert found.tolist() == words(x * factor)


def test_integers_are_refused() -> None:
    with pytest.raises(TypeError, match="no exponents"):
        CUDA.exponents(put(torch.arange(5), NAME), False)
    with pytest.raises(TypeError, match="no exponents"):
        CUDA.observe_and_count(put(torch.arange(5), NAME), put(slots(1), NAME), 0)


def slots(count: int) -> torch.Tensor:
    return torch.zeros((count, RECORD_BYTES), dtype=torch.uint8)


@pytest.mark.parametrize("name", FLOAT_NAMES)
def test_record_and_exponents_of_every_dtype_and_layout(name: str) -> None:
    x = random(name, 12000, 8)
    there = put(slots(2), NAME)
    for layout in LAYOUTS.values():
        tensor = put(layout(x), NAME)
        CUDA.observe(tensor, there, 0, 3)
        found = CUDA.observe_and_count(tensor, there, 1)
        record, same = there.cpu()
        assert torch.equal(record, same)
        assert found.tolist() == words(tensor)


def test_record_and_exponents_in_one_launch() -> None:
    x, there = put(random("float32", 50000), NAME), put(slots(1), NAME)
    CUDA.observe_and_count(x, there, 0)
    done, names = spent(lambda: CUDA.observe_and_count(x, there, 0))
    assert names == ["fastcheck record and exponents"]
    assert (done["kernel"], done["alloc"], done.synchronisations) == (1, 1, 0)


def test_slots_that_are_not_there() -> None:
    x = put(random("float32", 100), NAME)
    with pytest.raises(IndexError, match="within a ring of 2"):
        CUDA.observe_and_count(x, put(slots(2), NAME), 2)


def test_a_run_counts_by_the_kernel() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(NAME)
    monitor = fastcheck.install(model, record="range", stop=fastcheck.Stop(max_lag=None))
    model(put(torch.randn(16, 8), NAME)).sum().backward()
    with fake.recorded_launches() as names:
        model(put(torch.randn(16, 8), NAME)).sum().backward()
        monitor.step()
    assert any("fastcheck record and exponents" in name for name in names)
    assert not any("fastcheck exponents" in name for name in names)
    assert not any("scatter" in name for name in names)
    assert monitor.advice()
    monitor.remove()
