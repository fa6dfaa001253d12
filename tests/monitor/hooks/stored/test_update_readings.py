"""What install(watch=) reads of updates: by how much a parameter moved, and what it lost."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.monitor.hooks.stored import rotation, update_readings


def numbers_of(monitor: Any, role: str) -> dict[tuple[int, str], float]:
    """The numbers of this role: by step and name of the parameter."""
    found = {}
    for record in monitor.records():
        site = monitor._session.sites[int(record["site"])]
        if site.role == role:
            found[int(record["step"]), site.key] = float(record["sum"])
    return found


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 4,
    watch: Any = True,
    scaler: Any = None,
    closure: bool = False,
) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """The monitor, and the weights before each step and after the last."""
    torch.manual_seed(1)
    dtype = next(model.parameters()).dtype
    weights = []

    def copies() -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    with fastcheck.install(model, watch=watch, overflow_nums=-1) as monitor:
        for _ in range(steps):
            weights.append(copies())
            x = torch.randn(8, 4).to(dtype)

            def loss(x: torch.Tensor = x) -> torch.Tensor:
                optimizer.zero_grad()
                value = model(x).float().square().mean()
                (value if scaler is None else scaler.scale(value)).backward()
                return value

            if closure:
                optimizer.step(loss)
                continue
            loss()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
        weights.append(copies())
    return monitor, weights


def ratio(before: torch.Tensor, after: torch.Tensor) -> float:
    moved = (after.double() - before.double()).norm()
    return float(moved / before.double().norm())


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_the_ratio_of_one_parameter_a_step_in_turn(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    monitor, weights = train(model, torch.optim.AdamW(model.parameters(), **options), steps=6)
    found = numbers_of(monitor, "update_ratio")
    names = ["0.weight", "0.bias", "1.weight"]
    assert list(found) == [(step, names[step % 3]) for step in range(6)]
    for (step, name), value in found.items():
        expected = ratio(weights[step][name], weights[step + 1][name])
        assert value == pytest.approx(expected, rel=1e-5)
    assert numbers_of(monitor, "lost_updates") == {}


def test_training_is_bit_identical() -> None:
    def run(watch: Any) -> list[dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4).bfloat16()
        return train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 6, watch)[1]

    for watched, plain in zip(run(fastcheck.Watch()), run(False)):
        assert all(torch.equal(watched[name], plain[name]) for name in plain)


@pytest.mark.parametrize(("dtype", "rate"), [(torch.bfloat16, 1e-3), (torch.float16, 1e-4)])
def test_the_share_that_an_update_did_not_change(dtype: torch.dtype, rate: float) -> None:
    model = nn.Linear(4, 4, bias=False).to(dtype)
    with torch.no_grad():
        model.weight[:, :2] = 64.0  # the next number is 0.25 (bfloat16) or 0.03 away
    monitor, weights = train(model, torch.optim.SGD(model.parameters(), lr=rate), 1)
    kept = (weights[0]["weight"] == weights[1]["weight"]).float().mean()
    assert 0.4 < kept < 1
    assert numbers_of(monitor, "lost_updates") == {(0, "weight"): pytest.approx(float(kept))}


def test_an_element_without_a_gradient_has_lost_nothing() -> None:
    model = nn.Linear(4, 4, bias=False).bfloat16()
    mask = torch.zeros(4, 4, dtype=torch.bfloat16)
    mask[0, 0] = 1  # all other elements have a gradient of 0
    model.weight.register_hook(lambda gradient: gradient * mask)
    monitor, _ = train(model, torch.optim.SGD(model.parameters(), lr=1.0), 1)
    assert numbers_of(monitor, "lost_updates") == {(0, "weight"): 0.0}


def test_of_a_huge_parameter_a_part_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation, "_MOST_ELEMENTS", 8)
    model = nn.Linear(4, 4, bias=False)
    monitor, weights = train(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
    found = numbers_of(monitor, "update_ratio")
    for step, rows in ((0, slice(0, 2)), (1, slice(2, 4)), (2, slice(0, 2))):
        before, after = weights[step]["weight"][rows], weights[step + 1]["weight"][rows]
        assert found[step, "weight"] == pytest.approx(ratio(before, after), rel=1e-5)


@pytest.mark.parametrize("shape", [(), (1,), (3, 1, 5), (1, 100), (7, 11, 13), (0, 4)])
def test_a_part_is_bounded_and_each_is_reached(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(float(math.prod(shape))).reshape(shape)
    seen: set[float] = set()
    for turn in range(200):
        part = rotation.part_of(tensor, turn, 20)
        assert part.numel() <= 20
        assert part.data_ptr() >= tensor.data_ptr()  # a view
        seen.update(part.flatten().tolist())
    assert seen == set(tensor.flatten().tolist())


def test_what_has_no_gradient_or_is_frozen_has_no_turn() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight.requires_grad_(False)
    model[1].register_parameter("unused", nn.Parameter(torch.zeros(2)))
    monitor, _ = train(model, torch.optim.SGD(model.parameters(), lr=0.1), 6)
    names = [name for _, name in numbers_of(monitor, "update_ratio")]
    assert names == ["0.bias", "1.weight", "1.bias"] * 2


def test_a_weight_of_zeros_or_one_that_is_not_finite_gives_no_event() -> None:
    model = nn.Linear(4, 4)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e38)
    monitor, _ = train(model, optimizer, 4)
    values = numbers_of(monitor, "update_ratio")
    assert len(values) == 4 and all(np.isfinite(list(values.values())))
    assert all(event.site.role != "update_ratio" for event in monitor.events)


def test_an_update_that_the_scaler_skips_is_not_read() -> None:
    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, 10.0)  # the scaled loss is beyond float32 in the first step
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-120)
    monitor, _ = train(model, torch.optim.SGD(model.parameters(), lr=0.1), 3, scaler=scaler)
    assert [step for step, _ in numbers_of(monitor, "update_ratio")] == [1, 2]


def test_a_step_with_a_closure_is_left_out() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    monitor, _ = train(model, optimizer, 2, closure=True)
    assert numbers_of(monitor, "update_ratio") == {}


def test_several_optimizers_take_turns() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    both = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    with fastcheck.install(model, watch=True) as monitor:
        for _ in range(6):
            model(torch.randn(2, 4)).square().mean().backward()
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
    found = numbers_of(monitor, "update_ratio")
    assert len({step for step, _ in found}) == len(found) == 6
    assert {name for _, name in found} == {"0.weight", "1.weight"}


def test_it_can_be_switched_off() -> None:
    model = nn.Linear(4, 4).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor, _ = train(model, optimizer, watch=fastcheck.Watch(updates=False))
    assert numbers_of(monitor, "update_ratio") == numbers_of(monitor, "lost_updates") == {}
    with pytest.raises(fastcheck.ConfigError, match="updates"):
        fastcheck.Watch(updates="yes")  # type: ignore[arg-type]  # what is refused


def test_an_error_in_the_reading_ends_only_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("no memory")

    monkeypatch.setattr(update_readings, "part_of", fail)
    model = nn.Linear(4, 4)
    with pytest.warns(fastcheck.FastcheckWarning, match="no memory"):
        monitor, weights = train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not torch.equal(weights[0]["weight"], weights[-1]["weight"])
    assert set(monitor.records()["step"].tolist()) == {0, 1, 2, 3}


class TestMoments:
    @staticmethod
    def read(optimizer: Any, model: nn.Module, **options: Any) -> list[tuple[int, str]]:
        monitor, _ = train(model, optimizer, 4, fastcheck.Watch(**options))
        sites = [monitor._session.sites[int(number)] for number in monitor.records()["site"]]
        return [
            (int(step), site.key)
            for step, site in zip(monitor.records()["step"], sites)
            if site.role == "optimizer_state"
        ]

    def test_of_the_parameter_whose_turn_it_is(self) -> None:
        model = nn.Linear(4, 4)
        found = self.read(torch.optim.AdamW(model.parameters()), model, updates=False)
        names = ["weight", "bias", "weight", "bias"]
        assert found == [
            (step, f"{name}.{key}")
            for step, name in enumerate(names)
            for key in ("exp_avg", "exp_avg_sq")
        ]

    def test_of_all(self) -> None:
        model = nn.Linear(4, 4)
        found = self.read(torch.optim.SGD(model.parameters(), momentum=0.9), model, moments="all")
        names = ["weight.momentum_buffer", "bias.momentum_buffer"]
        assert found == [(step, name) for step in range(4) for name in names]

    def test_of_none(self) -> None:
        model = nn.Linear(4, 4)
        assert self.read(torch.optim.Adam(model.parameters()), model, moments="none") == []
        with pytest.raises(fastcheck.ConfigError, match="moments"):
            fastcheck.Watch(moments="some")

    def test_one_that_is_not_finite_is_the_origin(self) -> None:
        """An infinite second moment makes updates of 0: nothing else in the run shows it."""
        model = nn.Linear(4, 4)
        optimizer = torch.optim.Adam(model.parameters())
        with fastcheck.install(model, watch=True, overflow_nums=-1) as monitor:
            for step in range(4):
                if step == 2:
                    optimizer.state[model.weight]["exp_avg_sq"][0, 0] = float("inf")
                model(torch.ones(2, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        (event,) = monitor.events
        assert (event.step, event.site.key) == (2, "weight.exp_avg_sq")
        assert event.verdict.name == "ORIGIN" and "after the update" in event.reason

    def test_one_behind_a_gradient_that_is_not_finite_is_its_consequence(self) -> None:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.Adam(model.parameters())
        watch = fastcheck.Watch(moments="all")
        with fastcheck.install(model, watch=watch, overflow_nums=-1) as monitor:
            model(torch.ones(2, 4)).square().mean().backward()
            assert model.weight.grad is not None
            model.weight.grad[0, 0] = float("inf")
            optimizer.step()
        first, *others = monitor.events
        assert first.site.key == "weight" and first.site.role == "param_grad"
        assert {one.site.key for one in others} == {"weight.exp_avg", "weight.exp_avg_sq"}
        assert {one.verdict.name for one in others} == {"PROPAGATED"}


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.AdamW, {}), (torch.optim.RMSprop, {}), (torch.optim.NAdam, {"foreach": True})],
)
def test_gradients_below_eps_are_warned_of(kind: Any, options: dict[str, Any]) -> None:
    model = nn.Linear(4, 4)
    optimizer = kind(model.parameters(), lr=1e-4, eps=1e3, **options)
    with pytest.warns(fastcheck.WatchWarning, match="below the optimizer's eps of 1000"):
        monitor, _ = train(model, optimizer, 25)
    (event,) = monitor.watch.events
    assert (event.kind, event.step) == ("epsilon", 19)


def steps_with_a_turn(model: nn.Module, steps: int) -> list[int]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor, _ = train(model, optimizer, steps=steps)
    return sorted({step for step, _ in numbers_of(monitor, "update_ratio")})


@pytest.mark.filterwarnings("ignore::fastcheck.FastcheckWarning")
def test_a_small_model_has_a_turn_in_one_of_eight_steps_after_three_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    # The third round is over where the next one would begin.
    assert steps_with_a_turn(model, 30) == [*range(10), 15, 23]
    monkeypatch.setattr(rotation, "_SMALL", 36)  # 16 + 4 + 16 elements
    assert steps_with_a_turn(model, 30) == [*range(30)]
