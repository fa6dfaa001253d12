"""The stop message says whether the update of the event's step was applied, and is right."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastcheck

pytestmark = [
    pytest.mark.usefixtures("fresh_start"),
    pytest.mark.filterwarnings("ignore:.* has stepped with a learning rate of"),
]
APPLIED, INTACT = "weights have been updated in this step", "No optimizer has updated a weight"


class Statistics(nn.Module):
    """Reads its statistics in evaluation only. ``is_buffer``: op level knows them as the model's,
    and stops when it has returned.
    """

    def __init__(self, is_buffer: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        if is_buffer:
            self.register_buffer("variance", torch.ones(4))
        else:
            self.variance = torch.ones(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        if self.training:
            with torch.no_grad():
                self.variance.lerp_(x.var(0), 0.1)
            return x
        return x / self.variance


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().cpu().clone() for parameter in model.parameters()]


@pytest.mark.filterwarnings("ignore:var.*degrees of freedom:UserWarning")
@pytest.mark.parametrize("is_skipped", [False, True])
@pytest.mark.parametrize("level", ["module", "op"])
def test_of_a_stop_that_comes_later(level: str, is_skipped: bool, device: str) -> None:
    torch.manual_seed(0)
    model = Statistics(is_buffer=level == "module").to(device)
    model.variance = model.variance.to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    held = []
    stop = None
    with fastcheck.install(model, level=level) as monitor:
        try:
            for step in range(7):
                held.append(weights(model))
                optimizer.zero_grad()
                x = torch.ones(1 if step == 2 else 8, 4).to(device)
                model(x).square().mean().backward()
                if not (is_skipped and step == 2):
                    optimizer.step()
                monitor.step()
                if step == 5:
                    with torch.no_grad():
                        model.eval()(torch.ones(8, 4).to(device))
                    model.train()
            monitor.flush()
        except fastcheck.OverflowDetected as error:
            stop = error
    assert stop is not None
    held.append(weights(model))
    before, after = held[stop.step], held[stop.step + 1]
    was_applied = any(not torch.equal(a, b) for a, b in zip(before, after))
    text = " ".join(str(stop).split())
    assert not (was_applied and INTACT in text)
    assert not (APPLIED in text and not was_applied)
    if level == "op":
        assert stop.step == 2 and (APPLIED in text) is not is_skipped
        assert stop.report.updated_since == ((3, 4, 5) if is_skipped else (2, 3, 4, 5))
        assert stop.report.broken_weights == () and "No weight holds NaN or Inf now" in text


@pytest.mark.parametrize("level", ["module", "op"])
def test_which_weights_hold_nan(level: str, device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(device)
    model[1].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = fastcheck.install(model, level=level, stop=fastcheck.Stop(protect_weights=False))
    with monitor, pytest.raises(fastcheck.OverflowDetected) as stop:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(3, 4).to(device)).sum().backward()
            optimizer.param_groups[0]["lr"] = float("inf")
            optimizer.step()
        monitor.flush()
    text = " ".join(str(stop.value).split())
    assert stop.value.report.broken_weights == ("0.weight", "0.bias")
    assert "0.weight, 0.bias hold NaN or Inf now." in text
    assert "try 1. SGD has stepped with a learning rate of inf, as a schedule" in text
    assert "that divides by 0 where" in text and "leaves the range" not in text
    assert "load a checkpoint from before that" in text


def test_of_weights_that_a_loop_updates_by_hand(device: str) -> None:
    model = nn.Linear(4, 2).to(device)
    with fastcheck.install(model) as monitor, pytest.raises(fastcheck.OverflowDetected) as stop:
        for scale in (1.0, float("inf"), 1.0, 1.0):
            model.zero_grad()
            model((torch.ones(2, 4) * scale).to(device)).sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
            monitor.step()
        monitor.flush()
    assert INTACT not in str(stop.value)


def test_of_two_optimizers_one_of_which_skips_itself(device: str) -> None:
    model = nn.ModuleDict({name: nn.Linear(4, 2) for name in ("good", "bad")}).to(device)
    optimizers = [torch.optim.Adam(part.parameters(), fused=True) for part in model.values()]
    x = torch.ones(2, 4).to(device)
    before = weights(model["good"])
    with fastcheck.install(model) as monitor, pytest.raises(fastcheck.OverflowDetected) as stop:
        model["good"](x).sum().backward()
        loss = model["bad"](x).sum()
        model["bad"].weight.register_hook(lambda gradient: gradient * float("nan"))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        monitor.flush()
    is_same = all(map(torch.equal, before, weights(model["good"])))
    assert is_same or INTACT not in str(stop.value)


@pytest.mark.parametrize("stop", [{}, {"overflow_nums": -1}, {"overflow_nums": 3}, {"warn": True}])
@pytest.mark.filterwarnings("ignore::fastcheck.FastcheckWarning")
def test_which_bad_updates_are_applied_on_the_cpu(stop: dict[str, int]) -> None:
    options = dict(stop)
    arguments = {"action": "warn"} if options.pop("warn", False) else {}
    for protect in ("auto", True):
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        settings = fastcheck.Stop(protect_weights=protect, **arguments)  # type: ignore[arg-type]  # options of several types
        is_stopped = False
        with fastcheck.install(model, stop=settings, **options):  # type: ignore[arg-type]  # options of several types
            try:
                model(torch.full((2, 4), float("nan"))).sum().backward()
                optimizer.step()
            except fastcheck.OverflowDetected:
                is_stopped = True
        is_intact = bool(model.weight.isfinite().all())
        assert is_stopped == (not stop) and is_intact == (is_stopped or protect is True)


def test_the_update_that_broke_a_weight(device: str) -> None:
    model = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.ones(2, 4).to(device)
    with fastcheck.install(model, sync="call"), pytest.raises(fastcheck.OverflowDetected) as stop:
        for step in range(4):
            optimizer.zero_grad()
            model(x).mean().backward()
            if step == 2:
                optimizer.param_groups[0]["lr"] = float("nan")
            optimizer.step()
    text = " ".join(str(stop.value).split())
    assert stop.value.report.updated_since == (2,)
    assert "The update of step 2 was applied after it was last read finite, and none since." in text
    assert INTACT not in text


@pytest.mark.filterwarnings("ignore:var.*degrees of freedom:UserWarning")
def test_of_an_optimizer_that_holds_no_weight() -> None:
    """What a frozen model is run on is updated in the step of the event, and no weight."""
    torch.manual_seed(0)
    model = Statistics().requires_grad_(False)
    given = torch.ones(8, 4).requires_grad_()
    optimizer = torch.optim.SGD([given], 0.1)
    with fastcheck.install(model, level="op"), pytest.raises(fastcheck.OverflowDetected) as stop:
        for step in range(4):
            optimizer.zero_grad()
            model(given[:1] if step == 2 else given).square().mean().backward()
            optimizer.step()
        model.eval()(given.detach())
    assert stop.value.culprit.step == 2
    assert APPLIED not in str(stop.value)
