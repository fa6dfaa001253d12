"""level="op": the culprit is an op, with its module and its line."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fastcheck
from fastcheck.types import Verdict
from support.programs.op_level import Attention, culprit, model_with, train
from support.programs.training import Net, change_gradient, stopped

pytestmark = pytest.mark.usefixtures("op_observer")

INF = float("inf")


def test_a_nan_five_steps_after_a_healthy_mask_is_named() -> None:
    model = Attention()
    tail = model_with(lambda x: x)
    whole = nn.Sequential(model, tail)
    fastcheck.install(whole, level="op", record="stats")

    def before(step: int) -> None:
        if step == 5:
            tail[1].function = lambda x: (x * 0) / (x * 0)

    stop = stopped(train, whole, 10, before, shape=(2, 6, 8))
    assert culprit(stop) == ("1.1", "aten.div.Tensor", "forward", "origin")
    assert stop.step == 5


@pytest.mark.parametrize("scale", [1e30, 1.0])
def test_a_norm_that_overflows_is_named_where_gradients_are_clipped_by_it(scale: float) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with fastcheck.install(model, level="op") as monitor:
        try:
            for _ in range(2):
                optimizer.zero_grad()
                (model(torch.ones(3, 4)).sum() * scale).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        except fastcheck.OverflowDetected as stop:
            assert scale > 1 and "norm" in str(stop.culprit.site.op)
            assert "it reached the norm by which gradients were clipped" in stop.culprit.reason
        else:
            assert scale == 1.0 and not monitor.events


def test_a_row_that_is_masked_entirely() -> None:
    model = Attention()
    model.mask = lambda scores: scores.masked_fill(torch.ones_like(scores).bool(), -INF)
    fastcheck.install(model, level="op", record="stats")
    stop = stopped(train, model, 1, shape=(2, 6, 8))
    assert culprit(stop) == ("", "aten._softmax", "forward", "origin")
    assert "masked entirely" in stop.culprit.reason


@pytest.mark.parametrize("is_intended", [False, True])
def test_the_infinities_that_are_named_are_those_that_did_harm(is_intended: bool) -> None:
    """A mask with one -Inf where all is masked anyway, to which scores add a whole row of them."""
    lowest = torch.finfo(torch.float32).min
    padding = torch.zeros(6, 6)
    padding[0] = lowest
    causal = torch.zeros(6, 6)
    causal[0, 5] = -INF if is_intended else lowest

    def attend(x: torch.Tensor) -> torch.Tensor:
        mask = causal + padding
        for _ in range(2):  # the second one reads a NaN and the mask
            weights = (x @ x.T).abs() * -1e33 + mask
            x = weights.softmax(-1) @ x
        return x

    model = model_with(attend)
    fastcheck.install(model, level="op")
    stop = stopped(train, model, 1, shape=(6, 8))
    assert culprit(stop) == ("1", "aten.add.Tensor", "forward", "origin")
    assert int(stop.culprit.record["neginf_count"]) == 6
    assert "5 of its infinities are not among those that it read" in stop.culprit.reason


def test_what_first_overflows_is_named_where_more_of_it_does_later() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        x = (x * 0 + 3e38).cumsum(1)
        return x * x

    model = model_with(twice)
    fastcheck.install(model, level="op")
    stop = stopped(train, model, 1)
    assert culprit(stop) == ("1", "aten.cumsum", "forward", "origin")


@pytest.mark.parametrize("kind", ["in place", "another memory"])
@pytest.mark.parametrize("is_late", [False, True])
def test_the_operator_behind_a_write_through_data_is_named(kind: str, is_late: bool) -> None:
    """``x.data`` counts its versions by itself, and ``x.data = y`` keeps the count of ``x``."""
    model = Net(4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fastcheck.install(model, level="op")

    def write() -> None:
        weight = next(model.parameters())
        if kind == "in place":
            weight.data.sub_(10).log_()
        else:
            weight.data = weight.data.sub(10).log()

    with pytest.raises(fastcheck.OverflowDetected) as stop:
        for step in range(3):
            if step == 2 and not is_late:
                write()
            optimizer.zero_grad()
            model(torch.rand(3, 4)).sum().backward()
            if step == 2 and is_late:
                write()
            optimizer.step()
    name = "aten.log_" if kind == "in place" else "aten.log"
    assert culprit(stop.value) == ("", name, "forward", "origin")
    assert "in write" in stop.value.culprit.line


NUMBERS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x * float("nan"),
    lambda x: x.masked_fill(x > 0, float("nan")),
    lambda x: x + torch.full_like(x, float("nan")),
    lambda x: (x * 0) * INF,
]


@pytest.mark.parametrize("level", ["op", "module"])
@pytest.mark.parametrize("function", NUMBERS)
def test_a_number_that_is_not_finite_is_told(function: Any, level: str) -> None:
    model = model_with(function)
    fastcheck.install(model, level=level)
    stop = stopped(train, model, 1)
    made = stop.report.made_by
    reason = stop.culprit.reason if made is None else made.how
    assert "finite" in reason and "but for a number that it was given" in reason


def test_the_last_operator_of_a_recomputation_is_named_by_its_first_run() -> None:
    """Its result is saved for its backward, and recomputed where no one sees it return."""

    class Checkpointed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            grown = checkpoint(lambda x: (x.abs() + 1e4).exp(), x, use_reentrant=False)
            return torch.tanh(grown)

    model = nn.Sequential(nn.Linear(8, 8), Checkpointed(), nn.Linear(8, 4))
    fastcheck.install(model, level="op")
    stop = stopped(train, model, 1)
    assert culprit(stop) == ("1", "aten.exp", "forward", "origin")


def test_a_number_that_is_written_into_a_gradient() -> None:
    """Another number that is NaN, such as one that follows from it, is not it."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fastcheck.install(model, level="op"), pytest.raises(fastcheck.OverflowDetected) as stop:
        model(torch.ones(2, 4)).sum().backward()
        assert model.weight.grad is not None
        model.weight.grad.data[0] = float("nan")
        total = model.weight.grad.norm()
        optimizer.step()
    assert total.isnan() and stop.value.report.made_by is None
    text = " ".join(str(stop.value).split())
    assert "The line writes one number, which is not finite" in text
    assert "look at the data" not in text


ORIGINS: list[tuple[str, Callable[[torch.Tensor], torch.Tensor], str]] = [
    ("0/0", lambda x: (x * 0) / (x * 0), "aten.div.Tensor"),
    ("log(0)", lambda x: x + torch.log(x * 0), "aten.log"),
    ("sqrt(-1)", lambda x: torch.sqrt(-x.abs() - 1), "aten.sqrt"),
    ("exp", lambda x: torch.exp(x.abs() * 1e4), "aten.exp"),
    ("inf-inf", lambda x: torch.exp(x.abs() * 1e4) - torch.exp(x.abs() * 1e4), "aten.exp"),
    ("layer norm of a constant", lambda x: F.layer_norm(x * 0, (8,), eps=0), ""),
    ("pow", lambda x: (-x.abs() - 1) ** 0.5, "aten.pow.Tensor_Scalar"),
]


@pytest.mark.parametrize(
    ("function", "op"), [row[1:] for row in ORIGINS], ids=[r[0] for r in ORIGINS]
)
def test_the_op_is_named(function: Any, op: str) -> None:
    model = model_with(function)
    fastcheck.install(model, level="op", record="stats")
    stop = stopped(train, model, 1)
    module, name, direction, verdict = culprit(stop)
    assert (module, direction, verdict) == ("1", "forward", "origin")
    assert name == op or (not op and "norm" in name)
    assert "test_culprits.py" in stop.culprit.line or "training.py" in stop.culprit.line
    assert name in str(stop)


def test_an_exponential_that_overflows_in_float16() -> None:
    model = model_with(lambda x: torch.exp(x.abs().half() * 100 + 20).float())
    fastcheck.install(model, level="op", record="stats")
    stop = stopped(train, model, 1)
    assert culprit(stop)[:2] == ("1", "aten.exp")
    assert stop.culprit.record["posinf_count"] > 0


def test_a_float16_matmul_that_overflows() -> None:
    model = model_with(
        lambda x: (x.abs().half() + 2).matmul(torch.full((8, 8), -60000.0).half()).float()
    )
    fastcheck.install(model, level="op", record="stats")
    stop = stopped(train, model, 1)
    assert culprit(stop)[:2] == ("1", "aten.mm")


def test_where_hides_the_bad_branch_in_forward_but_not_in_backward() -> None:
    model = model_with(lambda x: torch.where(x > 1e9, torch.sqrt(x * 0), x))
    fastcheck.install(model, level="op", record="stats")
    stop = stopped(train, model, 1)
    module, op, direction, verdict = culprit(stop)
    assert (module, op, direction, verdict) == ("1", "aten.sqrt", "backward", "origin")
    assert "SqrtBackward0" in stop.culprit.reason or "div" in stop.culprit.site.label


def test_an_embedding_with_nan_weights() -> None:
    model = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].weight[2] = float("nan")
    fastcheck.install(model, level="op", record="stats")
    with pytest.raises(fastcheck.OverflowDetected) as caught:
        model(torch.tensor([0, 2]))
    event = caught.value.culprit
    assert (event.site.module, event.site.label, event.verdict) == ("0", "weight", Verdict.ARRIVED)


def test_a_poke_between_steps_is_named_where_it_was() -> None:
    model = Net()
    monitor = fastcheck.install(model, level="op", record="stats", overflow_nums=-1)
    train(model, 2)
    with torch.no_grad():
        next(model.parameters()).view(-1)[3] = float("nan")
    train(model, 1)
    began = [e for e in monitor.events if e.verdict in (Verdict.ORIGIN, Verdict.ARRIVED)]
    assert "test_culprits.py" in began[0].line
    assert began[0].site.module_type == "outside the model"


def test_a_poke_through_data_is_seen() -> None:
    model = Net()
    monitor = fastcheck.install(model, level="op", record="stats", overflow_nums=-1)
    train(model, 2)
    next(model.parameters()).data.fill_(float("nan"))
    train(model, 1)
    first = monitor.events[0]
    assert (first.site.op, first.verdict) == ("aten.fill_.Scalar", Verdict.ORIGIN)
    # The parameter itself, which counts its versions apart, is known to hold what was written.
    assert not any("from outside of torch" in event.reason for event in monitor.events)


def test_a_poke_through_numpy_arrives() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    monitor = fastcheck.install(model, level="op", record="stats", overflow_nums=-1)
    x = torch.ones(2, 8)
    with torch.no_grad():
        model(x)
    y = torch.from_numpy(x.numpy().copy())
    y.numpy()[0, 0] = float("nan")
    with torch.no_grad():
        model(y)
    first = monitor.events[0]
    assert (first.site.role, first.verdict) == ("input", Verdict.ARRIVED)


@pytest.mark.parametrize(
    ("loss", "op"),
    [
        (F.mse_loss, "aten.mse_loss"),
        (F.l1_loss, "aten.sub.Tensor"),
        (lambda y, target: (y - F.dropout(target, 0.5, training=False)).sum(), "aten.sub.Tensor"),
    ],
)
def test_a_target_that_a_composite_operator_hands_on_arrives(loss: Any, op: str) -> None:
    model = nn.Linear(8, 8)
    fastcheck.install(model, level="op")
    target = torch.from_numpy(np.full((2, 8), np.nan, np.float32))
    stop = stopped(lambda: loss(model(torch.ones(2, 8)), target).backward())
    assert culprit(stop) == ("", op, "forward", "arrived")


def test_an_optimizer_whose_second_moment_overflows() -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
    fastcheck.install(model, level="op", record="stats")
    stop = stopped(train, model, 2, loss=lambda y: y.sum() * 1e25, optimizer=optimizer)
    assert culprit(stop)[1:3] == ("aten.addcmul_", "optimizer")


def test_uninitialised_memory_that_is_used_arrives() -> None:
    model = model_with(lambda x: x + torch.empty(8))
    fastcheck.install(model, level="op", record="stats")
    torch.use_deterministic_algorithms(True)
    try:
        stop = stopped(train, model, 1)
    finally:
        torch.use_deterministic_algorithms(False)
    assert culprit(stop) == ("1", "aten.add.Tensor", "forward", "arrived")


def test_a_custom_loss_outside_the_model_is_blamed() -> None:
    model = Net()
    fastcheck.install(model, level="op", record="stats")
    stop = stopped(train, model, 1, loss=lambda y: torch.log(y.sum() * 0))
    event = stop.culprit
    assert (event.site.op, event.site.module_type) == ("aten.log", "outside the model")
    assert "of aten.log #0 in outside the model" in str(stop)


def test_two_origins_in_one_step() -> None:
    model = nn.Sequential(*(model_with(lambda x: x) for _ in range(1)))
    # Both are cleaned: they count by their appearance alone.
    options = {"overflow_nums": -1, "stop": fastcheck.Stop(count="all")}
    monitor = fastcheck.install(model, level="op", record="stats", **options)

    def both(x: torch.Tensor) -> torch.Tensor:
        a = torch.sqrt(-x.abs() - 1)
        b = torch.log(-x.abs() - 1)
        return x + torch.nan_to_num(a) + torch.nan_to_num(b)

    model[0][1].function = both
    with torch.no_grad():
        model(torch.ones(2, 8))
    origins = [e.site.op for e in monitor.events if e.verdict is Verdict.ORIGIN]
    assert origins == ["aten.sqrt", "aten.log"]


def test_only_the_backward_is_bad() -> None:
    model = model_with(lambda x: change_gradient(x, lambda gradient: gradient / 0 * 0))
    fastcheck.install(model, level="op", record="stats")
    stop = stopped(train, model, 1)
    assert stop.culprit.site.direction == "backward"
    assert "aten.div" in stop.culprit.site.label or "aten.div" in str(stop.culprit.site.op)
    assert "_ChangedBackward" in stop.culprit.reason


def test_the_infinity_that_a_nan_was_made_of_says_so() -> None:
    model = model_with(lambda x: torch.exp(x.abs() * 1e4) - torch.exp(x.abs() * 1e4))
    fastcheck.install(model, level="op", record="stats")
    with pytest.raises(fastcheck.OverflowDetected) as caught:
        model(torch.ones(2, 8))  # by the time the module returns
    assert "aten.sub.Tensor made a NaN of it" in caught.value.culprit.reason


def test_a_loss_that_is_told_and_infinite() -> None:
    model = Net()
    monitor = fastcheck.install(model, level="op", record="stats")
    with torch.no_grad(), pytest.raises(fastcheck.OverflowDetected) as caught:
        monitor.step(loss=torch.log(model(torch.ones(2, 8)).sum() * 0))
    assert culprit(caught.value)[1:] == ("aten.log", "forward", "origin")


def test_backward_goes_by_the_call_of_the_forward() -> None:
    """The third square root of the step is the bad one, and is the first to run in backward."""

    def roots(x: torch.Tensor) -> torch.Tensor:
        good = torch.sqrt(x.abs() + 1) + torch.sqrt(x.abs() + 2)
        return good + torch.where(x > 1e9, torch.sqrt(x * 0), x)

    model = model_with(roots)
    fastcheck.install(model, level="op", record="stats")
    stop = stopped(train, model, 1)
    assert culprit(stop) == ("1", "aten.sqrt", "backward", "origin")
    assert int(stop.culprit.record["call"]) == 2
    assert stop.culprit.site.label.startswith("grad_input[")
    assert "of aten.sqrt #2 in 1 (Apply)" in str(stop)


def test_the_operator_behind_the_gradient_of_one_sample() -> None:
    """Under vmap(grad) a call of wrappers has the node, and what it calls the numbers."""
    model = nn.Linear(4, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def loss(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = torch.func.functional_call(model, {"weight": weight}, (x,))
        return (y / (y.square().sum().sqrt() + 0.0)).sum()

    def run() -> None:
        for step in range(3):
            x = torch.ones(3, 4)
            x[1] = 0.0 if step == 2 else 2.0
            weight = model.weight.detach()
            of_each = torch.func.vmap(torch.func.grad(loss), (None, 0))(weight, x)
            model.weight.grad = of_each.mean(0)
            optimizer.step()

    with fastcheck.install(model, level="op"):
        stop = stopped(run)
    assert culprit(stop)[1:3] == ("aten.div.Tensor", "backward")
    text = " ".join(str(stop).split())
    assert "in loss" in text and "The derivative of x / n divides by n" in text


def _of_negatives(x: torch.Tensor) -> torch.Tensor:
    return torch.log(-x.square() - 1)


def _sum(x: torch.Tensor) -> torch.Tensor:
    return _of_negatives(x).sum()


TRANSFORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "grad": torch.func.grad(_sum),
    "grad_and_value": torch.func.grad_and_value(_sum),
    "vjp": lambda x: torch.func.vjp(_of_negatives, x),
    "jvp": lambda x: torch.func.jvp(_of_negatives, (x,), (x,)),
    "jacrev": torch.func.jacrev(_of_negatives),
    "jacfwd": torch.func.jacfwd(_of_negatives),
    "hessian": torch.func.hessian(_sum),
    "vmap": torch.func.vmap(_of_negatives),
    "vmap of grad": torch.func.vmap(torch.func.grad(_sum)),
    "grad of vmap": torch.func.grad(lambda x: torch.func.vmap(_of_negatives)(x).sum()),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_an_operator_within_a_transform(name: str) -> None:
    everything = fastcheck.Stop(count="all")
    with fastcheck.install(Net(), level="op", overflow_nums=-1, stop=everything) as monitor:
        TRANSFORMS[name](torch.ones(3))
        first = monitor.events[0]
    assert (first.site.op, first.site.role, first.verdict) == ("aten.log", "output", Verdict.ORIGIN)


@pytest.mark.filterwarnings("ignore::fastcheck.WatchWarning")
def test_a_gradient_that_is_nan_in_each_step_does_not_overflow() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def run() -> None:
        for _ in range(30):
            optimizer.zero_grad()
            y = model(torch.ones(3, 4)) + 5
            scaler.scale(torch.where(y > 0, y, (-y.abs()).sqrt()).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

    with fastcheck.install(model, level="op"):
        stop = stopped(run)
    assert "loss scaling, and a gradient is still NaN" in " ".join(str(stop).split())


@pytest.mark.parametrize("name", ["Adam", "Adagrad", "RMSprop"])
def test_the_divisor_of_an_update_of_lists(name: str) -> None:
    """Of the lists that one operator reads, the elements that made the culprit are shown."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)).half()
    with torch.no_grad():
        model[1].weight[0] = 0
        model[1].weight[1] = 1
    optimizer = getattr(torch.optim, name)(model[1:].parameters(), foreach=True)
    with fastcheck.install(model, level="op"), pytest.raises(fastcheck.OverflowDetected) as stop:
        model(torch.ones(3, 4).half())[:, 0].sum().backward()
        optimizer.step()
    read = {site.label.partition(" ")[0]: int(r["numel"]) for site, r in stop.value.report.inputs}
    numel = int(stop.value.culprit.record["numel"])
    assert read == dict.fromkeys(("self", "tensor1", "tensor2"), numel)
    assert "and the eps that the optimizer adds, if any, is lost" in " ".join(
        str(stop.value).split()
    )
