"""prove() leaves a program as it was, bit for bit: also where it raises in the middle of a step."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Optional

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

import fastcheck

RELATIONS = ["again", "permuted", "micro_batches", "saved"]


@dataclass
class Program:
    model: nn.Module
    step: Callable[..., Any]
    optimizer: Any = None
    also: tuple[Any, ...] = ()
    batch: Any = None

    def given(self) -> Any:
        return torch.linspace(-1, 1, 24).view(6, 4) if self.batch is None else self.batch


CASES: dict[str, Callable[[], Program]] = {}


def case(make: Callable[[], Program]) -> Callable[[], Program]:
    CASES[make.__name__] = make
    return make


def fixed(value: Any, seen: Optional[set[int]] = None) -> Any:
    """A value that can be compared: the bits of tensors, the states of generators, attributes."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        dense = value.detach().to_dense() if value.is_sparse else value.detach()
        grad = None if not value.is_leaf or value.grad is None else fixed(value.grad)
        return dense.dtype, tuple(dense.shape), dense.numpy().tobytes(), value.requires_grad, grad
    if isinstance(value, (torch.Generator, np.random.RandomState)):
        return fixed(value.get_state())
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return {str(key): fixed(one, seen) for key, one in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [fixed(one, seen) for one in value]
    if isinstance(value, (nn.Module, torch.optim.Optimizer, torch.amp.GradScaler)):
        if id(value) in seen:
            return None
        seen.add(id(value))
        return fixed(
            {k: v for k, v in vars(value).items() if "hook" not in k and k != "defaults"}, seen
        )
    return value if isinstance(value, (int, float, str, set, type(None))) else type(value).__name__


def trains(model: nn.Module, optimizer: Any) -> Callable[[Any], Any]:
    def step(x: Any) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def layers(*parts: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), *parts, nn.Linear(4, 2))


def of(model: nn.Module, optimizer: Optional[torch.optim.Optimizer] = None) -> Program:
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.1)
    return Program(model, trains(model, optimizer), optimizer)


@case
def foreach() -> Program:
    model = layers()
    return of(model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True, amsgrad=True))


@case
def fused() -> Program:
    model = layers()
    return of(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True))


@case
def capturable_rate() -> Program:
    model = layers()
    program = of(model, torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1)))
    train = program.step

    def step(x: Any) -> Any:
        program.optimizer.param_groups[0]["lr"].mul_(0.5)
        return train(x)

    program.step = step
    return program


@case
def closures_of_lbfgs() -> Program:
    model = layers(nn.Tanh())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=3)

    def step(x: Any) -> Any:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure)  # type: ignore[no-untyped-call]  # torch has it untyped

    return Program(model, step, optimizer)


@case
def a_loss_scale() -> Program:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def step(x: Any) -> Any:
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return Program(model, step, optimizer, (scaler,))


@case
def a_schedule_and_an_average() -> Program:
    program = of(layers(nn.BatchNorm1d(4)))
    average = torch.optim.swa_utils.AveragedModel(program.model)
    schedule = torch.optim.lr_scheduler.StepLR(program.optimizer, 1)
    train = program.step

    def step(x: Any) -> Any:
        loss = train(x)
        average.update_parameters(program.model)
        schedule.step()
        return loss

    program.step, program.also = step, (average, schedule)
    return program


@case
def a_second_model() -> Program:
    model, critic = layers(), layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Any) -> Any:
        critic.requires_grad_(False)
        loss = (model(x) - critic(x)).square().mean()
        critic.requires_grad_(True)
        (loss + critic(x).square().mean()).backward()
        optimizer.step()
        return loss

    return Program(model, step, optimizer, (critic,))


@case
def parameters_of_the_optimizer_alone() -> Program:
    model, gain = layers(), torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([*model.parameters(), gain], lr=0.1, momentum=0.9)

    def step(x: Any) -> Any:
        loss = (model(x) * gain).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return Program(model, step, optimizer, (), None)


@case
def tied_weights() -> Program:
    model: Any = layers(nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return of(model)


@case
def parametrized() -> Program:
    return of(
        layers(
            parametrizations.weight_norm(nn.Linear(4, 4)),
            parametrizations.spectral_norm(nn.Linear(4, 4)),
            parametrizations.orthogonal(nn.Linear(4, 4)),
        )
    )


@case
def pruned() -> Program:
    return of(layers(prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5)))


@case
def sparse_gradients() -> Program:
    table = nn.EmbeddingBag(10, 4, sparse=True)
    model = nn.Sequential(table, nn.Linear(4, 2))
    program = of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    program.batch = torch.arange(12).view(6, 2) % 10
    return program


class Remembering(nn.Module):
    """Keeps in its attributes what no state_dict() has."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.by_size = 0, {}  # type: ignore[var-annotated]  # any keys
        self.means, self.seen = deque([0.0], maxlen=4), {3}
        self.last: Optional[torch.Tensor] = None
        self.own, self.numbers = torch.Generator().manual_seed(0), np.random.RandomState(0)
        self.modern, self.python = np.random.default_rng(0), random.Random(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.by_size.setdefault(len(x), []).append(1)
        self.means.append(float(x.detach().mean()))
        self.seen.add(self.calls)
        self.last, self.made_late = x.detach(), self.calls
        torch.rand(1, generator=self.own)
        drawn = self.numbers.rand(), self.modern.random(), self.python.random()
        return x * (1 + 0 * sum(drawn))

    def state(self) -> Any:
        return self.modern.bit_generator.state, self.python.getstate()


@case
def attributes_of_modules() -> Program:
    return of(layers(Remembering()))


@case
def random_numbers() -> Program:
    program = of(layers(nn.Dropout(0.5)))
    train = program.step
    program.step = lambda x: train(x + random.random() + np.random.rand())
    return program


@case
def frozen_and_in_evaluation() -> Program:
    program = of(layers(nn.BatchNorm1d(4)))
    program.model.eval()
    program.model.get_parameter("0.weight").requires_grad_(False)
    train = program.step

    def step(x: Any) -> Any:
        program.model.train()
        program.model.requires_grad_(True)
        return train(x)

    program.step = step
    return program


@case
def updated_in_backward() -> Program:
    model, optimizers = layers(), []
    for parameter in model.parameters():
        own = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        optimizers.append(own)

        def update(p: Any, own: Any = own) -> None:
            own.step()
            own.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)

    def step(x: Any) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return Program(model, step, optimizers)


@case
def inputs_that_need_a_gradient() -> Program:
    model = layers(nn.Tanh())

    def step(x: Any) -> Any:
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (slope - y.mean()).square().mean()

    x = torch.linspace(-1, 1, 24).view(6, 4).requires_grad_()
    x.grad = torch.ones(6, 4)
    return Program(model, step, batch=x)


#: What state_dict() does not have.
NOT_SAVED = {"parameters_of_the_optimizer_alone", "attributes_of_modules"}


class BrokenError(Exception):
    pass


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("raises_at", [0, 1, 9])
@pytest.mark.parametrize("name", list(CASES))
def test_all_is_as_it_was(name: str, raises_at: int) -> None:
    torch.manual_seed(0)
    program = CASES[name]()
    given = program.given()
    for _ in range(2):  # optimizers and gradients have a state then
        program.step(given)
    watched = (program.model, program.optimizer, program.also, given)
    own = [m.state() for m in program.model.modules() if isinstance(m, Remembering)]

    def state() -> Any:
        now = [m.state() for m in program.model.modules() if isinstance(m, Remembering)]
        assert now == own
        generators = torch.get_rng_state(), random.getstate(), list(np.random.get_state())
        return fixed((watched, generators))

    before, calls = state(), 0
    training = [module.training for module in program.model.modules()]

    def counted(x: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != raises_at:
            return program.step(x)

        def broken(*_: Any) -> None:
            raise BrokenError

        (last,) = list(program.model.children())[-1:]
        hook = last.register_full_backward_hook(broken)
        try:
            return program.step(x)
        finally:
            hook.remove()

    try:
        proof = fastcheck.prove(
            counted,
            given,
            model=program.model,
            optimizer=program.optimizer,
            also=program.also,
            relations=RELATIONS,
        )
    except BrokenError:
        assert raises_at
    else:
        assert calls >= 9 and raises_at != 1
        assert raises_at or not [o for o in proof.outcomes if o.state == "failed"], str(proof)
        assert raises_at or name in NOT_SAVED or proof.holds, str(proof)
    assert state() == before
    assert [module.training for module in program.model.modules()] == training


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass(frozen=True)
class Frozen:
    inner: dict[str, Any]
    y: torch.Tensor
    scale: float = 2.0


X, Y = torch.linspace(-1, 1, 24).view(6, 4), torch.arange(6.0)[:, None]


def batch_encoding() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.BatchEncoding({"x": X, "y": Y})


def model_output() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.modeling_outputs.BaseModelOutput(last_hidden_state=X, hidden_states=(Y,))


FORMS: dict[str, tuple[Callable[[], Any], Callable[[Any], tuple[Any, Any]]]] = {
    "tuple": (lambda: (X, Y), lambda b: b),
    "list": (lambda: [X, [Y, None]], lambda b: (b[0], b[1][0])),
    "named tuple": (lambda: Pair(X, Y), lambda b: (b.x, b.y)),
    "dataclass": (lambda: Frozen({"x": X}, Y), lambda b: (b.inner["x"] * b.scale, b.y)),
    "numbers of rows": (
        lambda: {"x": X, "y": [float(y) for y in Y], "names": ["a"] * 6},
        lambda b: (b["x"], torch.tensor(b["y"])[:, None]),
    ),
    "array": (lambda: {"x": X, "y": Y.numpy()}, lambda b: (b["x"], torch.from_numpy(b["y"]))),
    "BatchEncoding": (batch_encoding, lambda b: (b.x, b["y"])),
    "ModelOutput": (model_output, lambda b: (b.last_hidden_state, b.hidden_states[0])),
}


@pytest.mark.parametrize("form", list(FORMS))
def test_a_batch_of_any_form_keeps_its_form(form: str) -> None:
    make, parts = FORMS[form]
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    seen: list[Any] = []

    def step(batch: Any) -> Any:
        x, y = parts(batch)
        seen.append(y.flatten().tolist())
        return F.mse_loss(model(x), y)

    given = make()
    proof = fastcheck.prove(step, given, model=model, relations=["permuted", "alone"])
    assert [one.state for one in proof.outcomes] == ["holds", "holds"], str(proof)
    assert [1.0, 3.0, 5.0, 0.0, 2.0, 4.0] in seen and [5.0] * 6 in seen
    assert parts(given)[0].equal(parts(make())[0])


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (object(), "no tensors are known in the batch"),
        (torch.ones(1, 4), "fewer than two rows"),
        ((torch.ones(1, 4), torch.tensor([0, 2, 4])), "fewer than two rows"),
        ((torch.ones(3, 4), torch.ones(2)), "dimension 0 of batch[0] 3, batch[1] 2"),
    ],
)
def test_the_reason_why_rows_are_not_known(batch: Any, reason: str) -> None:
    model = nn.Linear(4, 1)
    given = torch.ones(3, 4)
    proof = fastcheck.prove(lambda _: model(given).mean(), batch, model=model, relations="permuted")
    assert proof.outcomes[0].state == "not asked" and reason in proof.outcomes[0].note


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_mode_of_the_caller_is_left(mode: Any) -> None:
    model = nn.Linear(4, 1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        assert loss.requires_grad and not loss.is_inference()
        return loss

    with mode():
        x = torch.randn(4, 4)
        proof = fastcheck.prove(step, x, model=model)
        assert not torch.is_grad_enabled()
    assert proof.holds and all(one.state != "failed" for one in proof.outcomes)


def test_autocast_of_the_caller_is_left_out_and_its_weights_are_not_kept() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1))
    x = torch.randn(4, 16)
    losses: set[float] = set()

    def counted(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        losses.add(float(loss.detach()))
        return loss

    with torch.autocast("cpu", torch.bfloat16):
        held = model(x).detach()
        fastcheck.prove(counted, x, model=model, relations="again")
        assert len(losses) == 4  # as it is, and three times with its weights moved
        proof = fastcheck.prove(lambda x: model(x).square().mean(), x, model=model)
        assert torch.is_autocast_enabled("cpu") and model(x).equal(held)
    assert proof.holds and proof["autocast against none"].state == "holds"
    assert (proof["autocast against none"].score or 0) > 0
