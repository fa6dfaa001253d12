"""count="calls" (all non-finite results of a call are one event), and API names in events."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastcheck
from fastcheck.calls.modes import ApiCalls
from fastcheck.extension import extension
from fastcheck.log.reader import read_log
from fastcheck.utils.names.api import format_call, intern_call

NAN = float("nan")


class Two(nn.Module):
    """Two outputs, and an operator that takes both."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * self.weight, x + self.weight


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.two = Two()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.two(x)
        return a + b


@pytest.mark.parametrize(("count", "total"), [("all", 4), ("calls", 2), ("origin", 1)])
def test_at_module_level(count: str, total: int) -> None:
    """The batch, two outputs of Two, and the output of Net: two calls."""
    net = Net()
    with fastcheck.install(net, overflow_nums=-1, stop=fastcheck.Stop(count=count)) as monitor:
        net(torch.full((3,), NAN))
        assert monitor.event_count == total
        # All of them are events, whatever they count.
        assert len(monitor.events) == 4


def test_each_call_and_each_step_counts_again() -> None:
    net = Net()
    with fastcheck.install(net, overflow_nums=-1, stop=fastcheck.Stop(count="calls")) as monitor:
        net(torch.ones(3))
        for _ in range(2):
            net(torch.full((3,), NAN))
        assert monitor.event_count == 4
        monitor.step()
        net(torch.full((3,), NAN))
        assert monitor.event_count == 6


@pytest.fixture
def numbers() -> Iterator[ApiCalls]:
    mode = ApiCalls(extension.op_observer().set_api)
    mode.open()
    yield mode
    mode.close()
    mode.close()
    assert torch._C._len_torch_function_stack() == 0


def test_events_name_the_api(numbers: ApiCalls, tmp_path: Path) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # An operator whose backward is a sum, and whose forward nothing reads: a view.
            x = self.first(x).expand(2, 3, 4)
            return self.last(F.softmax(x, -1))

    net = Deep()
    with fastcheck.install(
        net, level="op", overflow_nums=-1, stop=fastcheck.Stop(count="calls"), log_dir=tmp_path
    ) as monitor:
        net(torch.ones(3, 4))
        numbers.reset()
        out = net(torch.ones(3, 4))
        out.backward(torch.full_like(out, 1e38) * torch.tensor([1.0, 2, 3, 3.4]) * 10)
        monitor.step()
        names = [f"{e.api}.{e.site.direction}" for e in monitor.events if e.counted]
        count = monitor.event_count
    assert names[:2] == ["Tensor.mul.1.forward", "Functional.linear.1.backward"]
    assert "Tensor.expand.0.backward" in names and "Functional.softmax.0.backward" in names
    assert names[-1] == "Functional.linear.0.backward"
    # A linear has three gradients, and is one call.
    assert names.count("Functional.linear.1.backward") > 1 and count == len(set(names))
    assert {event.api for event in read_log(tmp_path).events} >= {"Functional.linear.1"}


def test_sums_of_gradients_are_no_calls(numbers: ApiCalls) -> None:
    weight = nn.Parameter(torch.ones(2))
    net = nn.ParameterList([weight])
    holder = nn.Module()
    holder.parts = net  # type: ignore[assignment]  # a module in place of a list
    holder.forward = lambda x: (x * weight).log() + weight  # type: ignore[method-assign]  # a forward of its own, as users set one
    with fastcheck.install(
        holder, level="op", overflow_nums=-1, stop=fastcheck.Stop(count="calls")
    ) as monitor:
        holder(torch.ones(2)).sum().backward()
        assert monitor.event_count == 0
        holder(torch.full((2,), NAN)).sum().backward()
        outside = [e for e in monitor.events if e.site.direction == "backward" and not e.api]
        assert outside and not any(event.counted for event in outside)


def test_the_message_names_the_api(
    numbers: ApiCalls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.no_grad():
        net[1].weight.fill_(3e38)
        net[0].weight.fill_(1)
    stop = fastcheck.Stop(count="calls", style="msprobe")
    monitor = fastcheck.install(net, level="op", stop=stop)
    with pytest.raises(fastcheck.OverflowDetected) as caught:
        net(torch.full((1, 2), 9.0))
        monitor.step()
    monitor.remove()
    text = str(caught.value)
    assert "in Functional.linear.1.forward.output.0 at step 0" in text.splitlines()[0]
    assert "API       Functional.linear.1.forward" in text
    assert caught.value.culprit.api == "Functional.linear.1"


def test_numbers_are_spelt_as_they_were_given() -> None:
    for name, call in (("Functional.linear", 0), ("Tensor.add_", 2**31), ("Functional.linear", 7)):
        assert format_call(intern_call(name, call)) == f"{name}.{call}"
    assert format_call(-1) == ""


@pytest.mark.parametrize("level", ["module", "op"])
def test_a_paused_monitor_reads_nothing(level: str) -> None:
    net, bad, good = nn.Linear(2, 2), torch.full((1, 2), NAN), torch.ones(1, 2)
    with fastcheck.install(net, level=level, overflow_nums=-1) as monitor:
        net(good)
        monitor._pause(True)
        before = len(monitor.records())
        net(bad)
        bad * 2
        assert len(monitor.records()) == before and not monitor.events
        monitor._pause(False)
        net(good)
        assert len(monitor.records()) > before and not monitor.events
        net(bad)
        assert monitor.event_count == 1


def test_what_was_found_before_a_pause_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    net = nn.Linear(2, 2)
    with torch.no_grad():
        net.weight.fill_(3e38)
    monitor = fastcheck.install(net, level="op", stop=fastcheck.Stop(count="all"))
    net(torch.full((1, 2), 9.0))  # an infinity, which nothing has taken over yet
    with pytest.raises(fastcheck.OverflowDetected):
        monitor._pause(True)
    monitor.remove()


def test_compiled_code_takes_no_notice(numbers: ApiCalls) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(net, backend=backend)
    x = torch.ones(1, 2)
    assert torch.equal(compiled(x), net(x))
    assert len(graphs) == 1
