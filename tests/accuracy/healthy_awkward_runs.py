"""Healthy programs that make NaN and infinities in their optimizer, in what a model keeps, in its
batch, or in evaluation. Each is given ``watch``, which installs a monitor on a model, and returns
what has to be finite at its end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Callable

import torch
from torch import nn
from torch.nn import functional as F

from accuracy.healthy_awkward_layers import LAYERS
from accuracy.healthy_awkward_losses import LOSSES

__all__ = ["PROGRAMS"]

INF, NAN = float("inf"), float("nan")
Tensor = torch.Tensor
Watch = Callable[[nn.Module], Any]
Program = Callable[[Watch], Iterable[Tensor]]
PROGRAMS: dict[str, Program] = {}
STEPS = 3


def program(function: Program) -> Program:
    PROGRAMS[f"run: {function.__name__.replace('_', ' ')}"] = function
    return function


class Around(nn.Module):
    """A function between two linear layers."""

    def __init__(self, function: Callable[[Tensor], Tensor] = lambda h: h) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(self.function(self.before(x)))
        return y


def fit(
    model: nn.Module,
    watch: Watch,
    loss: Callable[[Tensor], Tensor] = lambda y: y.square().mean(),
    optimizer: Any = None,
    batch: Callable[[], Tensor] = lambda: torch.randn(4, 8),
) -> list[Tensor]:
    """Trains; the losses, gradients and parameters."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch(model)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = loss(model(batch()))
        value.backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        found.append(value.detach())
    return [*found, *(p.detach() for p in model.parameters())]


def of_layer(function: Callable[[Tensor], Tensor]) -> Program:
    return lambda watch: fit(Around(function), watch)


def of_loss(function: Callable[[Tensor], Tensor]) -> Program:
    return lambda watch: fit(Around(), watch, function)


PROGRAMS.update({f"layer: {name}": of_layer(one) for name, one in LAYERS.items()})
PROGRAMS.update({f"loss: {name}": of_loss(one) for name, one in LOSSES.items()})


# ---- Optimizers ----------------------------------------------------------------------------------


class Lamb(torch.optim.Optimizer):
    """A trust ratio of 0/0 for a bias that begins at 0."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as torch's own
        for group in self.param_groups:
            for p in group["params"]:
                weight, update = p.norm(), p.grad.norm()
                one = torch.ones(())
                ratio = torch.where(weight > 0, torch.where(update > 0, weight / update, one), one)
                p.add_(p.grad * ratio, alpha=-group["lr"])


@program
def lamb(watch: Watch) -> Iterable[Tensor]:
    model = Around()
    nn.init.zeros_(model.before.bias)
    return fit(
        model, watch, loss=lambda y: y[:, :4].square().mean(), optimizer=Lamb(model.parameters())
    )


@program
def clipping_of_a_zero_gradient(watch: Watch) -> Iterable[Tensor]:
    model = Around(lambda h: h * 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def clip(*_: Any) -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_((1.0 / p.grad.norm()).clamp(max=1))

    optimizer.register_step_pre_hook(clip)
    return fit(model, watch, optimizer=optimizer)


@program
def a_best_loss_that_begins_at_infinity(watch: Watch) -> Iterable[Tensor]:
    best = torch.tensor(INF)

    def loss(y: Tensor) -> Tensor:
        nonlocal best
        value = y.square().mean()
        best = torch.minimum(best, value.detach())
        return value

    return [*fit(Around(), watch, loss), best]


@program
def loss_scaling_that_overflows_first(watch: Watch) -> Iterable[Tensor]:
    model = Around()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    watch(model)
    for _ in range(6):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(4, 8)).square().sum() * 1e3).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        bool(torch.isfinite(norm))
        scaler.step(optimizer)
        scaler.update()
    return [p.detach() for p in model.parameters()]


@program
def gradients_accumulated_over_masked_passes(watch: Watch) -> Iterable[Tensor]:
    model = Around(LAYERS["a row that is masked entirely"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch(model)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(3):
            model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


# ---- What a model keeps --------------------------------------------------------------------------


class Keeping(Around):
    """With a buffer, which a function uses and writes."""

    def __init__(self, value: Tensor, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.register_buffer("kept", value)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(self.use(self, self.before(x)))
        return y


def keeping(name: str, value: Callable[[], Tensor]) -> Callable[[Any], Any]:
    def make(use: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
        PROGRAMS[f"run: {name}"] = lambda watch: fit(Keeping(value(), use), watch)
        return use

    return make


@keeping("a NaN in a buffer that nothing uses", lambda: torch.full((8,), NAN))
def _unused(model: Any, h: Tensor) -> Tensor:
    return h


@keeping("a sentinel of NaN", lambda: torch.full((8,), NAN))
def _sentinel(model: Any, h: Tensor) -> Tensor:
    if torch.isnan(model.kept).any():
        model.kept.copy_(h.detach().mean(0))
    return h - model.kept


@keeping("a moving average that begins at NaN", lambda: torch.full((8,), NAN))
def _average(model: Any, h: Tensor) -> Tensor:
    new = h.detach().mean(0)
    model.kept = torch.where(model.kept.isnan(), new, 0.9 * model.kept + 0.1 * new)
    return h - model.kept


@keeping("a moving average that begins at NaN, in place", lambda: torch.full((8,), NAN))
def _average_in_place(model: Any, h: Tensor) -> Tensor:
    new = h.detach().mean(0)
    mixed = model.kept * 0.9 + new * 0.1
    model.kept.copy_(torch.where(model.kept.isnan(), new, mixed))
    return h - model.kept


@keeping("a minimum that begins at infinity", lambda: torch.full((8,), INF))
def _minimum(model: Any, h: Tensor) -> Tensor:
    model.kept.copy_(torch.minimum(model.kept, h.detach().amin(0)))
    return h - model.kept


@keeping("a mask of +infinity", lambda: torch.zeros(8, 8).masked_fill(torch.eye(8).bool(), INF))
def _positive_mask(model: Any, h: Tensor) -> Tensor:
    return F.softmin(h @ h.t() + model.kept[:4, :4], -1) @ h


@keeping("a mask of -infinity", lambda: torch.full((4, 4), -INF).triu(1))
def _mask(model: Any, h: Tensor) -> Tensor:
    return (h @ h.t() + model.kept).softmax(-1) @ h


@keeping("a queue with empty places", lambda: torch.full((6, 8), NAN))
def _queue(model: Any, h: Tensor) -> Tensor:
    model.kept = torch.cat([h.detach()[:2], model.kept[:4]])
    filled = ~model.kept.isnan().any(-1)
    return h + model.kept[filled].mean(0)


@keeping("the last batch, with missing values", lambda: torch.zeros(4, 8))
def _last_batch(model: Any, h: Tensor) -> Tensor:
    batch = h.detach().clone()
    batch[0, 0] = NAN
    model.kept.copy_(batch)
    return h + model.kept.nanmean()


# ---- Batches -------------------------------------------------------------------------------------


def with_missing_values() -> Tensor:
    x = torch.randn(4, 8)
    x[1, 3] = x[3, 0] = NAN
    return x


class Imputing(Around):
    def forward(self, x: Tensor) -> Tensor:
        missing = torch.isnan(x)
        y: Tensor = super().forward(torch.where(missing, self.before.bias.detach(), x))
        return y


@program
def a_model_that_imputes_its_batch(watch: Watch) -> Iterable[Tensor]:
    return fit(Imputing(), watch, batch=with_missing_values)


@program
def a_batch_normalised_before_it_is_imputed(watch: Watch) -> Iterable[Tensor]:
    def batch() -> Tensor:
        x = with_missing_values()
        return ((x - x.nanmean(0)) / 2).nan_to_num(0)

    return fit(Around(), watch, batch=batch)


@program
def a_data_set_normalised_at_its_beginning(watch: Watch) -> Iterable[Tensor]:
    """A constant column of the data is 0/0; it is removed in each batch."""
    model = Around()
    watch(model)
    data = torch.randn(12, 8)
    data[:, 2] = 1
    data = (data - data.mean(0)) / data.std(0)
    rows = iter(data.split(4))
    return fit(model, lambda model: None, batch=lambda: next(rows).nan_to_num(0, 0, 0))


@program
def a_mask_of_infinities_as_an_argument(watch: Watch) -> Iterable[Tensor]:
    class Masked(Around):
        def forward(self, x: Tensor) -> Tensor:
            h = self.before(x[:, :8])
            y: Tensor = self.after((h @ h.t() + x[:, 8:]).softmax(-1) @ h)
            return y

    mask = torch.full((4, 4), -INF).triu(1)
    return fit(Masked(), watch, batch=lambda: torch.cat([torch.randn(4, 8), mask], 1))


# ---- Evaluation and other ways of training -------------------------------------------------------


@program
def evaluation_with_masked_rows(watch: Watch) -> Iterable[Tensor]:
    model = Around(LAYERS["a row that is masked entirely"])
    watch(model)
    with torch.no_grad():
        return [model(torch.randn(4, 8)) for _ in range(STEPS)]


@program
def log_probabilities_of_0(watch: Watch) -> Iterable[Tensor]:
    """The model returns -Inf where an action is not allowed."""
    model = Around(lambda h: h)
    watch(model)

    def loss(y: Tensor) -> Tensor:
        allowed = (torch.arange(8) < 5).float()
        return F.cross_entropy(y + torch.log(allowed), torch.randint(5, (4,)))

    return fit(model, lambda model: None, loss)


@program
def checkpointed_layers_with_a_masked_row(watch: Watch) -> Iterable[Tensor]:
    def checkpointed(h: Tensor) -> Tensor:
        function = LAYERS["a row that is masked entirely"]
        y: Tensor = torch.utils.checkpoint.checkpoint(function, h, use_reentrant=False)
        return y

    return fit(Around(checkpointed), watch)


@program
def a_hidden_state_with_unused_places(watch: Watch) -> Iterable[Tensor]:
    """Kept over the steps; only the places in use are read."""
    state = torch.full((4, 8), NAN)

    def carry(h: Tensor) -> Tensor:
        nonlocal state
        used = torch.arange(4) < 2
        h = torch.where(used[:, None] & ~state.isnan(), h + state.nan_to_num(0), h)
        state = torch.where(used[:, None], h.detach(), torch.tensor(NAN))
        return h

    return fit(Around(carry), watch)


@program
def gradients_by_functorch(watch: Watch) -> Iterable[Tensor]:
    model = Around(LAYERS["a row that is masked entirely"])
    watch(model)
    values = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(model, values, (x,))
        return y.square().mean()

    for _ in range(STEPS):
        gradients = torch.func.grad(loss)(values, torch.randn(4, 8))
        values = {name: value - 0.01 * gradients[name] for name, value in values.items()}
    return values.values()


@program
def two_models_against_each_other(watch: Watch) -> Iterable[Tensor]:
    maker, critic = Around(LAYERS["normalize of a zero row"]), Around()
    models = nn.ModuleDict({"maker": maker, "critic": critic})
    watch(models)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (maker, critic)]
    for _ in range(STEPS):
        for model, optimizer in zip((maker, critic), optimizers):
            models.zero_grad()
            y = critic(maker(torch.randn(4, 8)))
            (y.mean() if model is maker else -y.mean()).backward()
            optimizer.step()
    return [p.detach() for p in models.parameters()]
