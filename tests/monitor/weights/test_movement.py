"""Warnings of weights that do not move and missing gradients: once each, none in a healthy run."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any, Callable

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.monitor.weights.stalled import StalledWeights
from support.programs.stalled import STEPS, Branches, Frozen, said
from support.programs.training import Net, batches
from support.warned import warned

pytestmark = pytest.mark.usefixtures("fresh_start")


@pytest.fixture(params=["module", "op"], autouse=True)
def each_level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "op":
        monkeypatch.setattr(fastcheck, "install", functools.partial(fastcheck.install, level="op"))


def optimizers() -> list[Callable[[nn.Module], torch.optim.Optimizer]]:
    return [
        lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    ]


@pytest.mark.parametrize("make", optimizers())
@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_healthy_run_says_nothing(make: Any, accumulate: int) -> None:
    model = Net()
    assert said(model, make(model), accumulate=accumulate) == []


def test_a_layer_that_is_written_back() -> None:
    model = Net()
    optimizer = Frozen(model.parameters(), [model.head.weight], lr=0.01)
    (text,) = said(model, optimizer)
    assert text.startswith("weights that don't move: head.weight kept")


def test_an_optimizer_of_the_program_that_leaves_biases_out() -> None:
    class Matrices(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    if parameter.ndim > 1:
                        parameter.sub_(parameter.grad, alpha=0.01)

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    (text,) = said(model, Matrices(model.parameters(), lr=0.01))
    assert text.startswith("weights that don't move: 0.bias, 1.bias kept")
    assert "or the optimizer is not one of torch's and leaves them out" in text


def test_an_update_below_the_spacing_of_the_dtype() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)).to(torch.bfloat16)
    model[0].to(torch.float32)
    model[0].register_forward_hook(lambda module, args, out: out.to(torch.bfloat16))
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1:].parameters()}], lr=1e-9
    )
    (text,) = said(model, optimizer)
    assert "1.weight" in text
    assert "spacing" in text
    assert "0.weight" not in text


def test_a_parameter_without_elements() -> None:
    """FSDP1 leaves those of other ranks in the model so."""
    model = Net()
    model.elsewhere = nn.Parameter(torch.empty(0))
    assert said(model, torch.optim.SGD(model.parameters(), lr=0.01)) == []


def test_a_layer_that_has_converged() -> None:
    """It moved before: at a rate this small nothing of it changes any more."""
    model = Net()
    groups = [{"params": model.blocks.parameters()}, {"params": model.head.parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.01)

    def decay(step: int) -> None:
        if step == 5:
            optimizer.param_groups[1]["lr"] = 1e-12

    assert said(model, optimizer, before_update=decay) == []


def test_a_layer_that_the_optimizer_was_not_given() -> None:
    model = Net()
    optimizer = torch.optim.SGD(
        [p for name, p in model.named_parameters() if not name.startswith("head")], lr=0.01
    )
    (text,) = said(model, optimizer)
    assert "no optimizer that has stepped holds head.weight, head.bias" in text


@pytest.mark.parametrize("rate", [0.01, 0.0])
def test_two_optimizers_that_share_a_model(rate: float) -> None:
    model = Net()
    first = torch.optim.SGD(model.blocks.parameters(), lr=0.01)
    second = torch.optim.SGD(model.head.parameters(), lr=rate)

    class Both:
        def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
            self.optimizers = optimizers

        def step(self) -> None:
            for optimizer in self.optimizers:
                optimizer.step()

        def zero_grad(self) -> None:
            for optimizer in self.optimizers:
                optimizer.zero_grad()

    assert said(model, Both(first, second), steps=40) == []
    assert said(model, Both(second, first), steps=40) == []


def test_a_detached_branch() -> None:
    model = Branches(torch.detach)
    (text,) = said(model)
    assert text.startswith("no gradient: side.weight, side.bias had grad=None in 10 updates")
    assert "is detached" in text and "reentrant checkpoint" in text


def test_a_clamp_beyond_its_limits() -> None:
    (text,) = said(Branches(lambda y: (y - 100).clamp(0, 1)))
    assert text.startswith("gradients that are all 0: of side.weight, side.bias")
    assert "clamp beyond its limits" in text


class Turns(nn.Module):
    """``used(step)``: the layers, of 20, that a step calls."""

    def __init__(self, used: Callable[[int], list[int]]) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(20)])
        self.used, self.step = used, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return sum((self.experts[at](x) for at in self.used(self.step - 1)), torch.zeros(8))


def test_experts_that_are_chosen_now_and_then() -> None:
    """Some of them never."""
    assert said(Turns(lambda step: [step % 7, 7 + step % 6]), steps=40) == []


def test_a_layer_of_many_that_is_never_called() -> None:
    (text,) = said(Turns(lambda step: [at for at in range(20) if at != 11]))
    assert text.startswith("no gradient: experts.11.weight, experts.11.bias had grad=None")


def test_frozen_on_purpose() -> None:
    model = Branches(torch.detach)
    model.side.requires_grad_(False)
    assert said(model) == []


def test_a_dead_relu() -> None:
    model = Branches(torch.relu)
    with torch.no_grad():
        model.side.bias.fill_(-100.0)
    (text,) = said(model)
    assert text.startswith("gradients that are all 0: of side.weight, side.bias, in 10 updates")


@pytest.mark.parametrize(
    ("offset", "dies_at", "steps", "count"),
    [(0.0, 5, 30, 0), (0.0, 0, 100, 0), (0.0, 0, 115, 1), (1.0, 5, 30, 1)],
)
def test_a_loss_that_is_exactly_0(offset: float, dies_at: int, steps: int, count: int) -> None:
    """As where each example meets the margin: silent, unless it has long been nothing else; a first
    reward may come late.
    """
    model = Offset(offset)

    def die(step: int) -> None:
        if step == dies_at:
            with torch.no_grad():
                model.linear.bias.fill_(-1000.0)
            for parameter in model.parameters():
                parameter.grad.zero_()

    model.linear.bias.data.fill_(-1000.0 if dies_at == 0 else 1000.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    texts = said(model, optimizer, before_update=die, steps=steps)
    assert [text.split(":")[0] for text in texts] == ["gradients that are all 0"] * count


class Offset(nn.Module):
    def __init__(self, offset: float) -> None:
        super().__init__()
        self.linear, self.offset = nn.Linear(8, 4), offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x)) + self.offset


def test_a_relu_that_is_dead_now_and_then() -> None:
    model = Branches(torch.relu)

    def wake(step: int) -> None:
        with torch.no_grad():
            model.side.bias.fill_(100.0 if step % 9 == 7 else -100.0)

    assert said(model, before_update=wake, steps=40) == []


def test_a_schedule_that_is_at_0_for_a_while() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def schedule(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.0 if step < 15 or 20 < step < 40 else 0.01

    assert said(model, optimizer, before_update=schedule, steps=44) == []


def test_one_group_at_0() -> None:
    model = Net()
    groups = [
        {"params": model.blocks.parameters()},
        {"params": model.head.parameters(), "lr": torch.tensor(0.0)},
    ]
    assert said(model, torch.optim.SGD(groups, lr=0.01)) == []


def test_updates_that_a_scaler_skips() -> None:
    model = Net()
    scaler = torch.amp.GradScaler("cpu", growth_interval=1000)

    def spoil(step: int) -> None:
        if step < 14 or step > 18:
            model.head.weight.grad[0, 0] = float("inf")

    assert (
        said(model, scaler=scaler, before_update=spoil, stop=fastcheck.Stop(max_skipped=1000)) == []
    )


def test_bad_gradients_count_for_nothing() -> None:
    """The optimizer, or the guard, may skip such an update by itself."""
    model = Net()
    optimizer = Frozen(model.parameters(), list(model.head.parameters()), lr=0.01)

    def spoil(step: int) -> None:
        if step % 2:
            model.head.bias.grad[0] = float("inf")

    assert said(model, optimizer, before_update=spoil, steps=18) == []


def test_a_gradient_of_rounding_errors() -> None:
    """A normalisation takes any constant away: a bias before it has a gradient of noise alone, and
    SGD never moves it by a bit.
    """
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    before = model[0].bias.detach().clone()
    assert said(model, torch.optim.SGD(model.parameters(), lr=1e-3)) == []
    assert torch.equal(before, model[0].bias)  # or this shows nothing


def test_an_optimizer_that_gathers_by_itself() -> None:
    """Its steps do nothing, but for each twentieth."""

    class Gathers(torch.optim.SGD):
        count = 0

        def step(self, closure: Any = None) -> Any:
            self.count += 1
            return super().step(closure) if self.count % 20 == 0 else None

    model = Net()
    assert said(model, Gathers(model.parameters(), lr=0.01), steps=50) == []


def test_an_optimizer_that_never_does_anything() -> None:
    model = nn.Linear(8, 4)
    optimizer = Frozen(model.parameters(), list(model.parameters()), lr=0.01)
    assert said(model, optimizer, steps=90) == []
    (text,) = said(model, optimizer, steps=110)
    assert "weight, bias kept every bit" in text


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "norm",
    [
        nn.utils.parametrizations.spectral_norm,
        nn.utils.parametrizations.weight_norm,
        nn.utils.spectral_norm,
        nn.utils.weight_norm,
    ],
)
@pytest.mark.parametrize("is_whole", [False, True])
def test_a_bias_that_cancels_where_its_weight_is_parametrized(norm: Any, is_whole: bool) -> None:
    """The last layer of a critic: what two halves of the batch add to its bias is 0."""
    last = norm(nn.Linear(8, 1))
    model = last if is_whole else nn.Sequential(nn.Linear(8, 8), last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with warnings.catch_warnings(), fastcheck.install(model, overflow_nums=-1):
        warnings.simplefilter("error")
        for x in batches(20):
            optimizer.zero_grad()
            y = model(x)
            (y[:2].mean() - y[2:].mean()).backward()
            assert not last.bias.grad.any()
            optimizer.step()


def test_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x).relu())

    assert said(Tied()) == []
    model = Tied()
    (text,) = said(model, Frozen(model.parameters(), [model.b.weight], lr=0.01))
    assert "a.weight kept" in text
    assert "b.weight" not in text


def test_a_loop_of_ones_own() -> None:
    """Without an optimizer of torch a step is no update: only if something moved it was."""
    model = Net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with fastcheck.install(model, overflow_nums=-1) as monitor:
            for step, x in enumerate(batches(48)):
                model(x).square().mean().backward()
                with torch.no_grad():
                    for name, parameter in model.named_parameters():
                        if step % 16 == 15 and name != "head.bias":
                            parameter -= 0.01 * parameter.grad
                monitor.step()
        texts = [str(one.message) for one in caught]
    assert texts == []


@pytest.mark.parametrize("each_level", ["module"], indirect=True)
def test_a_loop_of_ones_own_is_not_looked_at_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    found, model = looks(monkeypatch), Branches(torch.detach)
    with fastcheck.install(model, overflow_nums=-1) as monitor:
        for x in batches(40):
            model(x).square().mean().backward()
            with torch.no_grad():
                for parameter in model.main.parameters():
                    parameter -= 0.01 * parameter.grad
            monitor.step()
    assert len(found) == 10


@pytest.mark.parametrize("record", ["health", "stats"])
def test_nothing_is_known_without_checksums(record: str) -> None:
    assert said(Branches(torch.detach), record=record) == []


def test_said_once_and_as_an_error_where_warnings_are() -> None:
    model = Branches(torch.detach)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with fastcheck.install(model, overflow_nums=-1):
        for step, x in enumerate(batches(STEPS)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            if step != 9:
                optimizer.step()
                continue
            with pytest.raises(fastcheck.FastcheckWarning, match="no gradient"):
                optimizer.step()


def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one for each update whose parameters are asked one by one."""
    found: list[int] = []
    weigh = StalledWeights._weigh_gradients

    def counted(self: StalledWeights, *args: Any) -> bool:
        found.append(1)
        return weigh(self, *args)

    monkeypatch.setattr(StalledWeights, "_weigh_gradients", counted)
    return found


@pytest.mark.parametrize("make", optimizers())
def test_a_healthy_run_is_looked_at_closely_now_and_then(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, model = looks(monkeypatch), Net()
    assert said(model, make(model), steps=210) == []
    assert len(found) == 2 + 2


def test_a_branch_that_is_detached_late() -> None:
    def join(y: torch.Tensor) -> torch.Tensor:
        return y.detach() if len(seen) > 30 else y

    seen: list[int] = []
    model = Branches(join)
    (text,) = said(model, before_update=lambda step: seen.append(step), steps=60)
    assert text.startswith("no gradient: side.weight, side.bias")


def test_a_relu_that_dies_late(monkeypatch: pytest.MonkeyPatch) -> None:
    found, model = looks(monkeypatch), Branches(torch.relu)

    def die(step: int) -> None:
        if step in (0, 30):
            with torch.no_grad():
                model.side.bias.fill_(-100.0 if step else 100.0)

    (text,) = said(model, before_update=die, steps=60)
    assert text.startswith("gradients that are all 0: of side.weight, side.bias, in 10 updates")
    assert len(found) == 2 + 10  # not after the warning


def test_an_expert_that_gives_way_to_another() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)
            self.count = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            chosen: torch.Tensor = self.a(x) if 2 < self.count < 30 else self.b(x)
            return chosen

    assert said(Experts(), steps=60) == []


def test_a_model_that_grows() -> None:
    """Its layers are called from some step on, one after another."""
    assert said(Turns(lambda step: list(range(1 + step // 4))), steps=80) == []


def test_weights_that_are_added_times_0() -> None:
    """So that DistributedDataParallel has a gradient of each."""

    class Unused(Net):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 0.0 * sum(p.sum() for p in self.other.parameters())

    assert said(Unused(), steps=60) == []


def test_a_head_that_is_left_alone() -> None:
    """It is called for a validation alone."""
    model = Net()
    model.other = nn.Linear(8, 4)

    def validate(step: int) -> None:
        if step % 20 == 0:
            with torch.no_grad():
                model.other(torch.randn(2, 8))

    assert said(model, before_update=validate, steps=260) == []


def test_a_layer_that_is_thawed_and_written_back(monkeypatch: pytest.MonkeyPatch) -> None:
    found, model = looks(monkeypatch), Net()
    model.head.weight.requires_grad_(False)
    optimizer = Frozen(model.parameters(), [model.head.weight], lr=0.01)

    def thaw(step: int) -> None:
        if step == 29:
            model.head.weight.requires_grad_(True)

    (text,) = said(model, optimizer, before_update=thaw, steps=60)
    assert text.startswith("weights that don't move: head.weight kept")
    assert len(found) < 20  # not examined after the warning


def test_a_rate_that_rises_late_for_weights_that_are_written_back() -> None:
    model = Net()
    groups = [{"params": model.blocks.parameters()}, {"params": model.head.parameters(), "lr": 0.0}]
    optimizer = Frozen(groups, [model.head.weight], lr=0.01)

    def rise(step: int) -> None:
        optimizer.param_groups[1]["lr"] = 0.01 if step >= 30 else 0.0

    (text,) = said(model, optimizer, before_update=rise, steps=60)
    assert text.startswith("weights that don't move: head.weight kept")


def test_an_error_of_its_own_leaves_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, *args: Any) -> None:
        raise ZeroDivisionError("for the test")

    monkeypatch.setattr("fastcheck.monitor.weights.stalled.StalledWeights._weigh_gradients", fail)
    model = Net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with fastcheck.install(model, overflow_nums=-1) as monitor:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for x in batches(4):
                model(x).square().mean().backward()
                optimizer.step()
        texts = [str(one.message) for one in caught]
        assert len(monitor.records())
    assert len(texts) == 1
    assert "no longer observes whether weights move: ZeroDivisionError" in texts[0]


@pytest.mark.parametrize("kind", ["copy", "twin", "shared", "untrained"])
def test_an_optimizer_of_a_copy(kind: str) -> None:
    """``twin``: another model, which is trained; ``shared``: other parameters over the same values,
    which get no gradients; ``untrained``: the model has no gradients either.
    """
    is_told = kind in ("copy", "shared")
    model = Net()
    other = copy.deepcopy(model)
    if kind == "shared":
        other.load_state_dict(model.state_dict(), assign=True)
    optimizer = torch.optim.Adam(other.parameters(), 1e-3)
    with warnings.catch_warnings(record=True) as caught, fastcheck.install(model) as monitor:
        warnings.simplefilter("always")
        for x in batches(STEPS):
            model.zero_grad()
            with torch.set_grad_enabled(kind != "untrained"):
                loss = model(x).square().mean()
            if kind != "untrained":
                loss.backward()
            if kind == "twin":
                optimizer.zero_grad()
                other(x).square().mean().backward()
            optimizer.step()
        summary = str(monitor.summary())
    texts = [str(w.message) for w in caught if "holds none of the model's" in str(w.message)]
    assert len(texts) == is_told
    assert ("those of Adam have the same shapes" in " ".join(summary.split())) == is_told


@pytest.mark.parametrize("kind", ["apart", "of views", "other"])
def test_an_optimizer_of_one_row_of_all_parameters(kind: str) -> None:
    """``of views``: the parameters are views of it; ``other``: it has other gradients."""
    model = Net()
    parameters = list(model.parameters())
    row = nn.Parameter(torch.cat([p.detach().flatten() for p in parameters]))
    if kind == "of views":
        parts = row.detach().split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts):
            parameter.data = part.view_as(parameter)
    optimizer = torch.optim.Adam([row], 1e-3)
    with warnings.catch_warnings(record=True) as caught, fastcheck.install(model):
        warnings.simplefilter("always")
        for x in batches(STEPS):
            model.zero_grad()
            model(x).square().mean().backward()
            gradients = [p.grad.flatten() for p in parameters if p.grad is not None]
            row.grad = torch.randn_like(row) if kind == "other" else torch.cat(gradients)
            optimizer.step()
    told = [str(w.message) for w in caught if "holds none of the model's" in str(w.message)]
    assert len(told) == (kind == "apart")


@pytest.mark.parametrize("kind", ["teacher", "trained", "by hand", "beside"])
def test_an_optimizer_of_another_model(kind: str) -> None:
    """``teacher``: it has no gradients; ``trained``: it has some; ``by hand``: the loop updates the
    model; ``beside``: an optimizer of the model steps, too, and moves nothing yet.
    """
    model, other = Net(), nn.Linear(3, 2)
    own = torch.optim.SGD(model.parameters(), 1e-30) if kind == "beside" else None
    optimizer = torch.optim.Adam(other.parameters(), 1e-3)
    with warnings.catch_warnings(record=True) as caught, fastcheck.install(model):
        warnings.simplefilter("always")
        for x in batches(STEPS):
            model.zero_grad()
            model(x).square().mean().backward()
            if kind == "trained":
                optimizer.zero_grad()
                other(torch.rand(4, 3)).sum().backward()
            optimizer.step()
            if own is not None:
                own.step()
            for p in model.parameters() if kind == "by hand" else ():
                p.data -= 0.01 * p.grad
    texts = [str(w.message) for w in caught if "holds none of the model's" in str(w.message)]
    assert len(texts) == (kind == "teacher")
    assert kind != "teacher" or "those of Adam had no gradients in 10 updates" in texts[0]


@pytest.mark.parametrize("is_stacked", [False, True])
def test_an_ensemble_whose_weights_were_stacked(is_stacked: bool) -> None:
    """The optimizer holds the models, and functions are called with copies of their weights."""
    models = [nn.Linear(8, 1) for _ in range(3)]
    base = copy.deepcopy(models[0]).to("meta")
    weights, _ = torch.func.stack_module_state(models)
    held = [p for model in models for p in model.parameters()]
    optimizer = torch.optim.SGD(weights.values() if is_stacked else held, 0.01)
    call = torch.vmap(lambda own, x: torch.func.functional_call(base, own, (x,)), in_dims=(0, None))
    with warned() as caught, fastcheck.install(*models):
        for x in batches(2 * STEPS):
            optimizer.zero_grad()
            call(weights, x).square().mean().backward()
            optimizer.step()
    found = [str(one) for one in caught]
    assert len(found) == (not is_stacked)
    assert all("no gradient" in text and "or of a copy" in text for text in found)


def test_gradients_that_are_clipped_to_0() -> None:
    """They were not 0 when they were read, but their update has none."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with warned() as texts, fastcheck.install(model):
        for x in batches(STEPS):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.0)
            optimizer.step()
    (text,) = texts
    assert "gradients were clipped to 0, which makes them 0" in text


@pytest.mark.parametrize("kind", ["same", "other", "late"])
def test_two_optimizers_of_another_model(kind: str) -> None:
    """A discriminator is trained, and its gradients reach the generator, which is observed.
    ``same``: both optimizers were given the discriminator; ``other``: each holds a part of it;
    ``late``: the generator has an optimizer that steps in the last steps alone.
    """
    model, other = Net(), nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1))
    first, second = ([*other], [*other]) if kind != "other" else ([other[0]], [other[1]])
    optimizers = [
        torch.optim.Adam([p for layer in layers for p in layer.parameters()], 1e-3)
        for layers in (first, second)
    ]
    late = torch.optim.SGD(model.parameters(), 0.01)
    with warned() as texts, fastcheck.install(model):
        for step, x in enumerate(batches(STEPS)):
            model.zero_grad()
            other.zero_grad()
            other(model(x)).mean().backward()
            if kind == "late" and step % 5 == 4:
                late.step()
            for optimizer in optimizers:
                optimizer.step()
    is_told = kind == "same"
    assert ["2 optimizers hold the same parameters, none" in t for t in texts] == [True] * is_told


@pytest.mark.parametrize(("writes", "width"), [(False, 4), (False, 5), (True, 4)])
def test_a_layer_that_no_optimizer_holds(writes: bool, width: int) -> None:
    """``writes``: the loop updates it by itself."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model.head = nn.Linear(8, width)
    with warned() as texts, fastcheck.install(model):
        for x in batches(35):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if writes:
                with torch.no_grad():
                    model.head.weight.mul_(0.99)
                    model.head.bias.sub_(0.01)
    assert ["head.weight, head.bias" in text for text in texts] == [True] * (not writes)
    # The optimizer holds the head that was there before, where that has the same shapes.
    what = "Give an optimizer these" if width == 5 else "may have replaced it since the optimizer"
    assert all(what in text for text in texts)


@pytest.mark.parametrize("level", ["module", "op"])
def test_a_parameter_that_forward_replaces(level: str) -> None:
    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.rows = nn.Linear(8, 8), nn.Parameter(torch.randn(4, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.rows = nn.Parameter(nn.functional.normalize(self.rows.data, dim=1))
            return self.first(x) @ self.rows.t()

    model: nn.Module = Normalised()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with warned() as texts, fastcheck.install(model, level=level):
        for x in batches(35):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    (text,) = texts
    assert "holds rows" in text and "may have replaced it since the optimizer was made" in text


def test_a_bias_that_a_loss_of_derivatives_does_not_depend_on() -> None:
    """A network of forces, as the derivative of an energy."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with warned() as texts, fastcheck.install(model):
        for x in batches(15):
            x = x.requires_grad_()
            (force,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            optimizer.zero_grad()
            (force - 1).square().mean().backward()
            optimizer.step()
    assert texts == []
