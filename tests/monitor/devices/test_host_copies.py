"""Copies from a device that the host does not wait for: what may not have arrived is not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from torch import nn

import fastcheck
from support.devices.training_on_fake import NAME, fake
from support.programs.dumping import calls, log

pytestmark = [
    pytest.mark.fake_accelerator,
    pytest.mark.usefixtures("fake_accelerator"),
    pytest.mark.filterwarnings("ignore:.*observe.*"),
]


class ToHost(nn.Module):
    """Returns what it is given, on its way to the host."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to("cpu", non_blocking=True)


class Mirrored(nn.Module):
    """Keeps the mean of its input in pinned memory of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, device=NAME)
        self.register_buffer("mean", torch.zeros(8).pin_memory())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.copy_(x.detach().mean(0), non_blocking=True)
        return self.linear(x)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


Use = Callable[[torch.Tensor], object]


def into_pinned(loss: torch.Tensor) -> torch.Tensor:
    return torch.empty((), device="cpu", pin_memory=True).copy_(loss, non_blocking=True)


def there_and_back(loss: torch.Tensor) -> torch.Tensor:
    return loss.to("cpu", non_blocking=True).to(NAME, non_blocking=True)


def part(loss: torch.Tensor) -> torch.Tensor:
    return loss.expand(4).to("cpu", non_blocking=True).view(2, 2)[1].detach()


USES: dict[str, Use] = {
    "to": lambda loss: loss.to("cpu", non_blocking=True),
    "copy_": into_pinned,
    "back": there_and_back,
    "a view": part,
    "to module": lambda loss: ToHost()(loss),
    "criterion": lambda loss: nn.Identity()(loss.to("cpu", non_blocking=True)),
    "observe": lambda loss: fastcheck.observe("loss", loss.to("cpu", non_blocking=True)),
    "float64": lambda loss: loss.double().to("cpu", non_blocking=True),
}


def train(model: nn.Module, use: Use, steps: int = 5, **options: Any) -> fastcheck.Monitor:
    """Uses each loss while the device is far behind, and never waits."""
    model = model.to(NAME)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    xs = [torch.randn(4, 8).to(NAME) for _ in range(steps)]
    monitor = fastcheck.install(model, record="stats", **options)
    fake.set_delay(1000)
    for x in xs:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        use(loss.detach())
        fake.synchronize()
    monitor.flush()
    return monitor


def bad(records: Any) -> int:
    return sum(int(records[f"{kind}_count"].sum()) for kind in ("nan", "posinf", "neginf"))


@pytest.mark.parametrize("level", ["module", "op"])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_loss_on_its_way_to_the_host(level: str, use: Use, op_observer: None) -> None:
    with train(net(), use, level=level, overflow_nums=1, watch=True) as monitor:
        records = monitor.records()
        assert len(records) > 20 and bad(records) == 0
        assert monitor.events == ()


@pytest.mark.parametrize("level", ["module", "op"])
@pytest.mark.parametrize("kind", ["output", "buffer"])
def test_within_the_model(level: str, kind: str, op_observer: None) -> None:
    model = Mirrored() if kind == "buffer" else nn.Sequential(net().to(NAME), ToHost())
    xs = [torch.randn(4, 8).to(NAME) for _ in range(3)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with fastcheck.install(model, level=level, overflow_nums=1) as monitor:
        fake.set_delay(1000)
        for x in xs:
            y = model(x)
            if kind == "buffer":
                y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            fake.synchronize()
        monitor.flush()
        assert monitor.events == () and bad(monitor.records()) == 0


@pytest.mark.parametrize("level", ["module", "op"])
def test_a_value_that_has_arrived_in_plain_memory_is_read(level: str, op_observer: None) -> None:
    """Only pinned memory may be behind."""
    seen: list[torch.Tensor] = []

    def use(loss: torch.Tensor) -> None:
        seen.append(fastcheck.observe("loss", loss.cpu()))

    model = net().to(NAME)
    x = torch.randn(4, 8).to(NAME)
    with fastcheck.install(model, level=level, overflow_nums=-1) as monitor:
        for _ in range(2):
            use(model(x).square().mean().detach())
        monitor.flush()
        sites = {str(monitor.sites[int(r["site"])]) for r in monitor.records()}
    assert any("loss" in site for site in sites) and not seen[0].is_pinned()


def test_the_optimizer_of_pinned_parameters_is_observed() -> None:
    """Offloaded weights live in pinned memory; the host's update reads them at that moment."""
    model = net()
    for parameter in model.parameters():
        parameter.data = parameter.data.pin_memory()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with fastcheck.install(model, overflow_nums=-1) as monitor:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float("nan")).pin_memory()
        model(torch.ones(2, 8))
        optimizer.step()
        monitor.flush()
        roles = {monitor.sites[int(r["site"])].role for r in monitor.records()}
        assert {"param", "param_grad"} <= roles
        assert [event.site.role for event in monitor.events if event.counted][:1] == ["param_grad"]


def test_what_is_made_of_it_is_no_origin() -> None:
    model = net().to(NAME)
    batch = torch.full((4, 8), float("nan"), device="cpu").pin_memory()
    with fastcheck.install(model, level="op", overflow_nums=-1) as monitor:
        model(batch.to(NAME, non_blocking=True)).sum().backward()
        monitor.step()
        monitor.flush()
    first = next(event for event in monitor.events if event.counted)
    assert (first.site.role, first.verdict) == ("input", fastcheck.types.Verdict.ARRIVED), (
        first.reason
    )
    assert "into which outside the model · aten._to_copy" in first.reason


def test_a_scaled_gradient_that_is_made_of_it_is_no_origin() -> None:
    model, scaler = net().to(NAME), torch.amp.GradScaler(NAME, init_scale=2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inf = torch.full((4, 8), float("inf"), device="cpu").pin_memory()
    with fastcheck.install(model, level="op", overflow_nums=-1) as monitor:
        y = model(torch.ones(4, 8).to(NAME))
        y.register_hook(lambda gradient: inf.to(NAME, non_blocking=True))
        scaler.scale(y.sum()).backward()
        optimizer.step()  # the scaler is not asked, and skips nothing
        monitor.step()
        monitor.flush()
    first = next(event for event in monitor.events if event.site.op == "aten._to_copy")
    assert first.verdict is fastcheck.types.Verdict.ARRIVED
    assert "pinned memory" in first.reason


@pytest.mark.parametrize("options", [{}, {"tensors": True}, {"order": "logical"}])
def test_a_dump_leaves_it_out(options: dict[str, Any], tmp_path: Path) -> None:
    model, x = net().to(NAME), torch.randn(4, 8).to(NAME)
    fake.set_delay(20_000)
    with fastcheck.Dumper(tmp_path, **options) as dumper:
        host = model(x).sum().detach().to("cpu", non_blocking=True)
        host.view(1)
    assert not dumper.problem
    assert bad(log(tmp_path).records) == 0
    (copy,) = (line for line in calls(tmp_path) if line.get("op") == "aten._to_copy")
    assert "pinned" in copy["out"][0]["problem"]
