"""Graphs of the fake accelerator: what a capture accepts and refuses, and what a replay does."""

from __future__ import annotations

import threading
from typing import Any, Callable

import pytest
import torch

from support.devices.graphs_on_fake import NAME, fake, has_graphs

pytestmark = [pytest.mark.fake_accelerator, has_graphs, pytest.mark.usefixtures("fake_accelerator")]


@pytest.fixture(autouse=True)
def unobserved_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A monitor that another test has left would bring in its records before a capture begins."""
    monkeypatch.setattr("fastcheck.monitor.hooks.graphs._all", list)


def captured(work: Callable[[], object], **options: Any) -> Any:
    graph: Any = torch.accelerator.Graph(**options)
    with fake.stream(fake.Stream()), graph:
        work()
    return graph


def test_a_replay_computes_again_with_what_is_there_now() -> None:
    x, out = torch.ones(4, device=NAME), torch.zeros(4, device=NAME)
    this = threading.current_thread()  # a monitor of another test may still be copying in its own
    before = fake.counters(this)
    graph = captured(lambda: out.copy_(x * 2 + 1))
    done = fake.counters(this) - before
    assert (done["captured"], done["kernel"]) == (3, 0)
    assert out.tolist() == [0.0] * 4
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert out.tolist() == [2 * value + 1] * 4


def test_a_replay_is_one_launch_of_the_current_stream() -> None:
    x = torch.zeros(1, device=NAME)
    graph = captured(lambda: x.add_(1).mul_(2))
    first, second = fake.Stream(), fake.Stream()
    fake.synchronize()
    with fake.held(first):
        with fake.stream(first):
            graph.replay()
        with fake.stream(second):
            graph.replay()  # after the one that is held
        assert not second.query()
    fake.synchronize()
    assert x.tolist() == [6.0]


def test_backward_and_side_streams_are_captured() -> None:
    x = torch.ones(4, device=NAME)
    w = torch.ones(4, device=NAME, requires_grad=True)
    side = fake.Stream()

    def work() -> None:
        (x * w).sum().backward()
        main = fake.current_stream()
        side.wait_event(main.record_event())
        with fake.stream(side):
            assert fake.is_current_stream_capturing()
            x.add_(1)
        main.wait_event(side.record_event())

    graph = captured(work)
    assert not fake.is_current_stream_capturing()
    for _ in range(2):
        graph.replay()
    assert x.tolist() == [3.0] * 4
    assert w.grad is not None and w.grad.tolist() == [2.0] * 4


@pytest.mark.parametrize("what", ["item", "copy", "event", "stream", "device", "query"])
def test_asking_the_device_ends_the_capture_in_failure(what: str) -> None:
    x = torch.ones(3, device=NAME)
    event = fake.Event()
    event.record()
    ask = {
        "item": lambda: x.sum().item(),
        "copy": lambda: x.cpu(),
        "event": event.synchronize,
        "stream": lambda: fake.current_stream().synchronize(),
        "device": fake.synchronize,
        "query": event.query,
    }[what]

    def work() -> None:
        with pytest.raises(RuntimeError, match="not permitted while a graph is captured"):
            ask()

    with pytest.raises(RuntimeError, match="the capture failed"):
        captured(work)
    assert x.add(1).tolist() == [2.0] * 3


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_another_thread_may_ask_unless_the_mode_is_global(mode: Any) -> None:
    event = fake.Event()
    event.record()
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            event.query()
        except RuntimeError as error:
            errors.append(error)

    def work() -> None:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()

    if mode == "global":
        with pytest.raises(RuntimeError, match="the capture failed"):
            captured(work, capture_error_mode=mode)
    else:
        captured(work, capture_error_mode=mode)
    assert len(errors) == (mode == "global")


def test_streams_have_to_keep_to_the_capture() -> None:
    x = torch.zeros(3, device=NAME)
    side, outside = fake.Stream(), fake.Stream()

    def strays() -> None:
        side.wait_event(fake.current_stream().record_event())
        with fake.stream(side):
            x.add_(1)

    with pytest.raises(RuntimeError, match="was not waited for"):
        captured(strays)
    event = outside.record_event()

    def waits_for_another() -> None:
        with pytest.raises(RuntimeError, match="recorded outside of the capture"):
            fake.current_stream().wait_event(event)

    with pytest.raises(RuntimeError, match="recorded outside of the capture"):
        captured(waits_for_another)
    with pytest.raises(RuntimeError, match="default stream"), fake.stream(fake.default_stream()):
        torch.accelerator.Graph().capture_begin()
    with fake.stream(side):
        x.add_(1)
    side.synchronize()
    assert x.tolist() == [1.0] * 3


def test_memory_of_a_capture_is_the_graphs_until_it_is_gone() -> None:
    out = torch.zeros(1, device=NAME)
    x = torch.arange(1000.0, device=NAME)
    fake.synchronize()
    graph = captured(lambda: out.copy_((x * 2).sum()))  # of which the product was freed
    stream = fake.Stream()
    with fake.stream(stream):
        others = [torch.full((1000,), 7.0, device=NAME) for _ in range(8)]
        graph.replay()
    stream.synchronize()
    assert out.item() == 999000.0
    assert all(bool((other == 7).all()) for other in others)
    reserved = fake.memory_reserved()
    with fake.held(stream), fake.stream(stream):
        graph.replay()
        del graph  # the replay that is under way has it still
        taken = torch.zeros(1000, device=NAME)
    stream.synchronize()
    assert out.item() == 999000.0
    assert not bool(taken.any())
    fake.empty_cache()
    assert fake.memory_reserved() < reserved


def test_reset_and_capture_again() -> None:
    x = torch.zeros(1, device=NAME)
    graph = captured(lambda: x.add_(1))
    with pytest.raises(RuntimeError, match=r"reset\(\) it first"), fake.stream(fake.Stream()):
        graph.capture_begin()
    graph.reset()
    with pytest.raises(RuntimeError, match="nothing to replay"):
        graph.replay()
    with fake.stream(fake.Stream()), graph:
        x.add_(10)
    graph.replay()
    assert x.tolist() == [10.0]
