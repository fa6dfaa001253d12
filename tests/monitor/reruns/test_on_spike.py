"""Watch(rerun=True): a step with a spike is run again, and training goes on as if it were not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
import support.ranks.rerun_workers as work
from support.programs.training_state import same, state_of
from support.ranks.ranks_harness import run_ranks, values

pytestmark = pytest.mark.filterwarnings("ignore::fastcheck.WatchWarning")

SPIKE, STEPS = 35, 39
NO_SCALER = torch.amp.GradScaler("cpu", enabled=False)


class Loop:
    """A model with dropout and a scheduler. In step SPIKE the batch is far off, or the first run
    of the step computes one wrong element, or each run another one.
    """

    def __init__(self, fault: str, watch: Any, calls_step: bool = False) -> None:
        torch.manual_seed(0)
        self.fault, self.number, self.runs = fault, 0, 0
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.001)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.999)
        self.monitor = fastcheck.install(self.model, watch=watch, record="stats")
        self.calls_step = calls_step
        self.model[0].register_forward_hook(self.spoil)

    def spoil(self, module: Any, args: Any, output: torch.Tensor) -> Any:
        is_due = self.number == SPIKE and bool(args[0][0, 0] == 7)
        self.runs += is_due
        if is_due and (self.fault == "each" or (self.fault == "once" and self.runs == 1)):
            return torch.cat([output[:1] + 1000.0 * self.runs, output[1:]])
        return None

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = (self.model(x) - x[:, :4]).square().mean()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        if self.calls_step:
            self.monitor.step(loss)
        return loss.detach()

    def train(self) -> list[torch.Tensor]:
        losses = []
        for number in range(STEPS):
            x = torch.randn(32, 8)
            x[0, 0] = 7.0 if number == SPIKE else 0.0
            if number == SPIKE and self.fault == "batch":
                x[1:] *= 100
            self.number = number if number <= SPIKE else SPIKE
            losses.append(self.monitor.run(self.step, x))
        self.monitor.remove()
        return losses

    def events(self) -> list[Any]:
        return [event for event in self.monitor.watch.events if event.kind == "rerun"]


def run(fault: str, **options: Any) -> tuple[Loop, list[torch.Tensor]]:
    loop = Loop(fault, False, **options)
    loop.monitor.remove()
    loop.monitor = fastcheck.install(
        loop.model,
        watch=fastcheck.Watch(window=32, warm_up=16, rerun=[loop.schedule]),
        record="stats",
    )
    return loop, loop.train()


@pytest.mark.parametrize(
    ("fault", "cause", "text"),
    [
        ("batch", "program", "the step has the same numbers"),
        ("once", "hardware", "the step has other numbers at 0 (Linear) · forward · output"),
        ("each", "unknown", "with other bits. First that differs: 0 (Linear)"),
    ],
)
@pytest.mark.parametrize("calls_step", [False, True])
def test_the_cause_and_the_state_afterwards(
    fault: str, cause: str, text: str, calls_step: bool
) -> None:
    plain = Loop(fault, False, calls_step=calls_step)
    wanted = plain.train()
    loop, losses = run(fault, calls_step=calls_step)
    (event,) = loop.events()
    assert (event.step, event.cause, event.is_warning) == (SPIKE, cause, cause != "program")
    assert text in str(event)
    assert all(map(torch.equal, losses, wanted))
    assert same(
        state_of(loop.model, loop.optimizer, NO_SCALER, schedule=loop.schedule.state_dict()),
        state_of(plain.model, plain.optimizer, NO_SCALER, schedule=plain.schedule.state_dict()),
    )


def test_a_healthy_run_runs_nothing_again() -> None:
    loop, _ = run("none")
    assert loop.events() == [] and loop.runs == 1


def test_options_that_cannot_be_used() -> None:
    wrong: list[Any] = [3, "", [object()], [torch.optim.lr_scheduler.StepLR]]
    for rerun in wrong:
        with pytest.raises(fastcheck.ConfigError, match=r"Watch\(rerun=\)"):
            fastcheck.Watch(rerun=rerun)


@pytest.mark.parametrize(
    ("fault", "cause", "text"),
    [
        ("batch", "program", "the step has the same numbers"),
        ("once", "hardware", "has other numbers on rank 1 at module.0 (Linear) · forward · output"),
    ],
)
def test_all_ranks_run_a_step_again_that_has_spiked_on_one(
    fault: str, cause: str, text: str
) -> None:
    plain = values(run_ranks(work.a_spike_on_one_rank, fault, 1, False, world_size=2))
    found = values(run_ranks(work.a_spike_on_one_rank, fault, 1, True, world_size=2))
    for one, other in zip(found, plain):
        ((step, named, report),) = one["events"]
        assert (step, named) == (work.SPIKE, cause)
        assert text in report
        assert one["losses"] == other["losses"] and one["weights"] == other["weights"]
        assert one["runs"] == 3


def test_where_one_rank_fails_none_runs_anything_again() -> None:
    """The error of fastcheck's own is on rank 0, before the spike; both train to the end."""
    plain = values(run_ranks(work.a_spike_on_one_rank, "batch", 1, False, world_size=2))
    found = values(run_ranks(work.a_spike_on_one_rank, "batch", 1, True, 20, world_size=2))
    for rank, (one, other) in enumerate(zip(found, plain)):
        assert one["events"] == [] and one["losses"] == other["losses"] and one["runs"] == 1
        assert ["the rerun of a step" in text for text in one["warned"]] == [True] * (rank == 0)
