"""level="op": a NaN or infinity with consequences is an event, and is named where it began."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fastcheck
from accuracy import healthy_awkward
from fastcheck.types import Verdict
from support.programs.op_level import culprit, model_with, verdicts
from support.programs.training import batches, stopped
from support.sampling import sample

pytestmark = pytest.mark.usefixtures("op_observer")

NAN = float("nan")


@pytest.mark.parametrize("name", sample(healthy_awkward.PROGRAMS, 70))
def test_a_healthy_program_is_not_accused(name: str) -> None:
    assert healthy_awkward.is_healthy(name)
    assert healthy_awkward.run(name) == []


def test_the_programs_are_awkward() -> None:
    names = [name for name in healthy_awkward.PROGRAMS if name.startswith("layer")]
    accused = [name for name in names if healthy_awkward.run(name, count="all")]
    assert len(accused) > len(names) // 3


def root(x: torch.Tensor) -> torch.Tensor:
    return torch.sqrt(-x.abs() - 1)  # the culprit


def is_its_line(stop: fastcheck.OverflowDetected) -> bool:
    number = root.__code__.co_firstlineno + 1
    return f"test_consequences.py:{number} in root" in stop.culprit.line


def watch(model: nn.Module, **options: Any) -> fastcheck.Monitor:
    return fastcheck.install(model, level="op", record="stats", **options)


# ---- The places ----------------------------------------------------------------------------------


def test_what_the_model_returns() -> None:
    model = model_with(root)
    watch(model)
    with torch.no_grad():
        stop = stopped(model, torch.ones(2, 8))  # at the end of the call
    assert culprit(stop) == ("1", "aten.sqrt", "forward", "origin")
    assert "the model returned it" in stop.culprit.reason
    assert is_its_line(stop)


class _Kept(nn.Linear):
    """Keeps a mean over some of its rows, which it has no other use for."""

    def __init__(self, kept: float) -> None:
        super().__init__(8, 8)
        self.register_buffer("mean", torch.full((8,), kept))

    def forward(self, x: torch.Tensor, count: int) -> torch.Tensor:  # type: ignore[override]  # a second argument
        if count >= 0:
            self.mean.copy_(x[:count].detach().sum(0) / torch.tensor(float(count)))
        return x


def test_a_nan_that_a_buffer_is_left_with() -> None:
    model = _Kept(0.0)
    watch(model)
    model(torch.ones(2, 8), 2)
    stop = stopped(model, torch.ones(2, 8), 0)
    assert culprit(stop)[1:] == ("aten.div.Tensor", "forward", "origin")
    assert stop.culprit.reason.endswith("it is kept in buffer mean")


@pytest.mark.parametrize(("kept", "count"), [(NAN, -1), (float("inf"), 2)])
def test_a_buffer_that_always_held_one_and_an_infinity_are_none(kept: float, count: int) -> None:
    model = _Kept(kept)
    with watch(model, overflow_nums=-1) as monitor:
        for _ in range(3):
            model(torch.full((2, 8), kept if count > 0 else 1.0), count).nan_to_num()
    assert not any("it is kept in buffer" in event.reason for event in monitor.events)


def test_a_stored_infinity_that_reached_the_loss_is_not_called_meant() -> None:
    model = _Kept(float("inf"))
    watch(model)
    stop = stopped((model(torch.ones(2, 8), -1) * model.mean).sum().backward)
    assert stop.culprit.site.role == "buffer"
    assert stop.culprit.reason.endswith("a stored infinity; it reached the loss")


def test_the_loss() -> None:
    model = model_with(lambda x: x)
    watch(model)
    loss = root(model(torch.ones(2, 8))).sum()
    stop = stopped(loss.backward)
    assert culprit(stop)[1:] == ("aten.sqrt", "forward", "origin")
    assert "it reached the loss" in stop.culprit.reason and is_its_line(stop)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("sign", [1, -1])
def test_an_infinite_loss_with_finite_gradients(sign: int) -> None:
    model = model_with(lambda x: x)
    watch(model)
    loss = model(torch.ones(2, 8)).sum() + torch.full((), 3e38) * sign * 10
    stop = stopped(loss.backward)
    assert culprit(stop)[1] == "aten.mul.Tensor"


def test_an_infinity_on_purpose_is_no_loss() -> None:
    model = model_with(lambda x: x)
    watch(model)
    loss = model(torch.ones(2, 8)).masked_fill(torch.arange(4) == 0, -float("inf")).min()
    stop = stopped(loss.backward)
    assert culprit(stop)[1:] == ("aten.masked_fill.Scalar", "forward", "origin")


def test_the_gradient_of_a_parameter() -> None:
    model = model_with(lambda x: torch.where(x > 1e9, torch.sqrt(x * 0), x))
    watch(model)
    loss = model(torch.ones(2, 8)).square().mean()
    stop = stopped(loss.backward)
    assert culprit(stop) == ("1", "aten.sqrt", "backward", "origin")
    assert "it reached the gradient of 0.weight" in stop.culprit.reason


def test_a_gradient_that_was_made_outside_of_backward() -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch(model)
    before = model.weight.detach().clone()
    model(torch.ones(2, 8)).sum().backward()
    assert model.bias.grad is not None
    model.bias.grad.div_(0).mul_(0)
    stop = stopped(optimizer.step)
    assert culprit(stop)[1:] == ("aten.div_.Tensor", "forward", "origin")
    assert "the gradient of bias" in stop.culprit.reason
    assert torch.equal(model.weight, before)


def test_an_update_that_makes_a_nan() -> None:
    class Wrong(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch's has overloads
            for p in self.param_groups[0]["params"]:
                p.add_((p.grad * 0) / 0)

    model = nn.Linear(8, 4)
    optimizer = Wrong(model.parameters(), lr=0.1)
    watch(model)
    model(torch.ones(2, 8)).sum().backward()
    stop = stopped(optimizer.step)
    assert culprit(stop)[1:] == ("aten.div.Tensor", "optimizer", "origin")
    assert "Wrong wrote it to weight" in stop.culprit.reason


def test_what_an_optimizer_keeps() -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    watch(model)
    (model(torch.ones(2, 8)).sum() * 1e25).backward()
    stop = stopped(optimizer.step)
    assert culprit(stop)[1:] == ("aten.addcmul_", "optimizer", "origin")
    assert "Adam keeps it in its state.exp_avg_sq of weight" in stop.culprit.reason


def test_a_value_that_the_host_reads() -> None:
    model = model_with(lambda x: x)
    monitor = watch(model, overflow_nums=-1)
    with torch.no_grad():
        y = model(torch.ones(2, 8))
        mean = root(y).mean()
        assert monitor.event_count == 0
        mean.item()
    (event,) = (event for event in monitor.events if event.counted)
    assert event.site.op == "aten.sqrt" and "the host read it" in event.reason


def test_probabilities_that_sampling_refuses() -> None:
    """torch raises in the operator: what it was given is an event all the same."""
    model = model_with(lambda x: torch.multinomial(root(x).softmax(-1), 1))
    monitor = watch(model, overflow_nums=-1)
    with torch.no_grad(), pytest.raises(RuntimeError, match="probability tensor contains"):
        model(torch.ones(2, 8))
    monitor.flush()
    (event,) = (event for event in monitor.events if event.counted)
    assert event.site.op == "aten.sqrt" and "the host read it" in event.reason


def test_whether_it_is_a_nan_is_a_finite_answer() -> None:
    model = model_with(lambda x: x)
    monitor = watch(model, overflow_nums=-1)
    with torch.no_grad():
        assert bool(root(model(torch.ones(2, 8))).isnan().any())
    monitor.remove()
    assert verdicts(monitor) == {"absorbed"}


# ---- Origins -------------------------------------------------------------------------------------


def test_a_target_that_is_made_before_the_forward_is_of_that_step() -> None:
    model = model_with(lambda x: x)
    watch(model)

    def run() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            target = torch.ones(2, 4)
            if step == 2:
                target = root(target)
            optimizer.zero_grad()
            F.mse_loss(model(torch.ones(2, 8)), target).backward()
            optimizer.step()

    stop = stopped(run)
    assert is_its_line(stop) and stop.step == 2
    assert stop.culprit.record["call"] == 0  # of the operator, in this step
    assert "No optimizer has updated a weight in this step" in str(stop)


def test_an_optimizer_that_nobody_expected_is_of_the_same_step() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    monitor = watch(model, overflow_nums=-1)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 8)).mean().backward()
        optimizer.step()
        torch.optim.SGD(model[1].parameters(), lr=0.1).step()
    steps = [
        int(record["step"])
        for record in monitor.records()
        if monitor.sites[int(record["site"])].direction == "optimizer"
    ]
    assert steps.count(0) and steps.count(1) == steps.count(2) > 0 and not steps.count(3)


def test_a_value_of_an_earlier_step_is_named_there() -> None:
    """Absorbed at the end of its step, and used in a later one."""
    model = model_with(lambda x: x)
    kept = torch.zeros(2, 8)
    monitor = watch(model)

    def run() -> None:
        nonlocal kept
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            if step == 2:
                kept = root(kept)
            x = torch.ones(2, 8) + (kept if step == 4 else 0)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    stop = stopped(run)
    assert culprit(stop)[1:] == ("aten.sqrt", "forward", "origin")
    assert is_its_line(stop)
    assert stop.step == 2  # after the update of step 1
    assert "the model returned it in step 4" in stop.culprit.reason
    events = [event for event in monitor.events if event.site.op == "aten.sqrt"]
    assert [event.verdict for event in events] == [Verdict.ORIGIN]


@pytest.mark.parametrize("step", [0, 2])
def test_an_infinity_made_before_the_forward(step: int) -> None:
    """Between the optimizer's step and the model's next call."""
    model = model_with(lambda x: x)
    watch(model)

    def run() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for index, x in enumerate(batches(4)):
            scaled = x / torch.full((), float(index != step))  # the batch is divided by 0
            optimizer.zero_grad()
            model(scaled).square().mean().backward()
            optimizer.step()

    stop = stopped(run)
    assert culprit(stop)[1:] == ("aten.div.Tensor", "forward", "origin")
    assert "in run" in stop.culprit.line
    assert stop.report.step == stop.step


def test_what_did_no_harm_before_is_not_blamed_for_another_fault() -> None:
    """Labels that are missing, in each step; and a NaN that the model makes in the third."""

    def run() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, x in enumerate(batches(4)):
            t = torch.full((4, 4), NAN).masked_fill(torch.arange(4) > 0, 1.0) * 2
            y = model(x)
            y = torch.cat([y, root(y)])[4 * (step == 2) :][:4]
            error = (y - t).square()
            optimizer.zero_grad()
            error[:, 1:].nan_to_num(0, 0, 0).mean() if step != 2 else error[:, 1:].mean()
            (y[:, 1:].square().mean() + (error[:, 1:].mean() if step == 2 else 0)).backward()
            optimizer.step()

    model = model_with(lambda x: x)
    watch(model)
    stop = stopped(run)
    assert stop.culprit.site.op == "aten.sqrt"


def test_ctc_is_not_blamed_for_a_fault_elsewhere() -> None:
    def loss(y: torch.Tensor, is_bad: bool) -> torch.Tensor:
        log_p = y[:, None].log_softmax(-1)
        lengths = torch.tensor([4]), torch.tensor([2])
        ctc = F.ctc_loss(log_p, torch.tensor([[1, 2]]), *lengths)
        return ctc + (root(y).mean() if is_bad else 0)

    def run() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step, x in enumerate(batches(4)):
            optimizer.zero_grad()
            loss(model(x), step == 2).backward()
            optimizer.step()

    model = model_with(lambda x: x)
    watch(model)
    stop = stopped(run)
    assert culprit(stop)[1] == "aten.sqrt" and stop.step == 2


def test_two_faults_are_two_events() -> None:
    model = model_with(lambda x: root(x) + torch.log(-x.abs() - 1))
    monitor = watch(model, overflow_nums=-1)
    with torch.no_grad():
        model(torch.ones(2, 8))
    assert [e.site.op for e in monitor.events if e.counted] == ["aten.sqrt", "aten.log"]


def test_a_checkpointed_fault_is_named_in_its_first_run() -> None:
    def again(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.utils.checkpoint.checkpoint(
            lambda h: torch.where(h > 1e9, torch.sqrt(h * 0), h), x, use_reentrant=False
        )
        return y

    model = model_with(again)
    watch(model)
    stop = stopped(lambda: model(torch.ones(2, 8)).square().mean().backward())
    assert culprit(stop)[1:3] == ("aten.sqrt", "backward")


# ---- Harmless ------------------------------------------------------------------------------------

CLEANED: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: root(x).nan_to_num(0) + x,
    lambda x: torch.where(x.isnan(), root(x), x),
    lambda x: torch.cat([root(x).detach(), x])[x.shape[0] :],
]


@pytest.mark.parametrize("function", CLEANED)
def test_what_is_cleaned_is_absorbed_and_shown(function: Any) -> None:
    model = model_with(function)
    monitor = watch(model, overflow_nums=-1)
    with torch.no_grad():
        model(torch.ones(2, 8))
    monitor.remove()
    assert monitor.event_count == 0
    assert verdicts(monitor) == {"absorbed"}
    assert "absorbed" in monitor.summary()


def test_everything_counts_where_that_is_asked_for() -> None:
    model = model_with(CLEANED[0])
    watch(model, stop=fastcheck.Stop(count="all"))
    with torch.no_grad():
        stop = stopped(model, torch.ones(2, 8))
    assert culprit(stop)[1] == "aten.sqrt"


def test_a_long_run_holds_no_chain_of_findings() -> None:
    """A state that is non-finite in each step, made of the one before."""
    model = model_with(lambda x: x)
    monitor = watch(model, overflow_nums=-1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = torch.full((8,), NAN)
    for x in batches(20):
        state = state * 0.5 + x.mean(0)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    findings = monitor._event_store.op_memory.earlier_findings.values()
    assert monitor.event_count == 0 and len(findings) >= 20
    assert max(len(finding.uses.made) for finding in findings) <= 2
    assert max(len(finding.uses.parents) for finding in findings) <= 1


def test_a_nan_that_was_made_beside_an_infinity_is_not_made_of_it() -> None:
    """torch.logdet takes one of the two, by the sign of the determinant."""
    model = nn.Linear(4, 4)
    watch(model)
    with torch.no_grad():
        model.weight.zero_()
    stop = stopped(lambda: (model(torch.ones(1, 4)).mean() + torch.logdet(model.weight)).backward())
    assert culprit(stop)[1] == "aten._linalg_slogdet"
    assert "made a NaN of it" not in stop.culprit.reason
