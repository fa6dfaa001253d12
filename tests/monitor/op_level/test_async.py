"""level="op" on an accelerator without waits: the same events and reports as on the CPU, without
delaying or changing the run.
"""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fastcheck
from fakes import fake_device
from fastcheck.types import Verdict
from support.programs.op_level import INF, Attention, causal, culprit, loop, model_with
from support.programs.training import Net, batches, change_gradient, stopped

pytestmark = [pytest.mark.fake_accelerator, pytest.mark.usefixtures("op_observer")]
fake: Any = fake_device.load()
NAME = fake.name()

Function = Callable[[torch.Tensor], torch.Tensor]


Told = list[tuple[Any, ...]]


def has_line_anywhere(site: fastcheck.types.Site) -> bool:
    """A device may run what has no forward in a thread without Python; and on the CPU lines are few
    in a step.
    """
    return site.direction == "forward" or (site.direction == "backward" and bool(site.module))


def told(monitor: fastcheck.Monitor) -> Told:
    """The fields of an event."""
    known = {int(r["seq"]): monitor.sites[int(r["site"])] for r in monitor.records()}
    return [
        (
            str(event.site),
            event.step,
            event.verdict.name,
            event.reason,
            event.counted,
            event.line if has_line_anywhere(event.site) else "",
            [(label, str(known[seq])) for label, seq in event.inputs if seq in known],
            [int(event.record[f"{kind}_count"]) for kind in ("nan", "posinf", "neginf")],
        )
        for event in monitor.events
    ]


def watched(make: Callable[[], nn.Module], device: str, *shape: int, **options: Any) -> Told:
    torch.manual_seed(0)
    model = make().to(device)
    data = [x.to(device) for x in batches(2, *shape)]
    with fastcheck.install(
        model, level="op", record="stats", overflow_nums=-1, **options
    ) as monitor:
        loop(model, data)
        monitor.flush()
        return told(monitor)


def masked(mask: Function) -> nn.Module:
    model = Attention()
    model.mask = mask
    return model


def bad_gradient(x: torch.Tensor) -> torch.Tensor:
    return change_gradient(x, lambda gradient: gradient / 0 * 0)


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[:, 2:4].div_(0).mul_(0)
    return y[:, 1:3].sum() + x.relu()


def split(x: torch.Tensor) -> torch.Tensor:
    a, b = torch.log(x * 0 + torch.arange(8, device=x.device)).chunk(2, -1)
    return torch.cat([torch.relu(a), b * 0], -1)


def half_overflow(x: torch.Tensor) -> torch.Tensor:
    weight = torch.full((8, 8), -60000.0, device=x.device).half()
    return (x.abs().half() + 2).matmul(weight).float()


CASES: dict[str, Callable[[], nn.Module]] = {
    "0/0": lambda: model_with(lambda x: (x * 0) / (x * 0)),
    "log(0)": lambda: model_with(lambda x: x + torch.log(x * 0)),
    "sqrt(-1)": lambda: model_with(lambda x: torch.sqrt(-x.abs() - 1)),
    "exp": lambda: model_with(lambda x: torch.exp(x.abs() * 1e4)),
    "inf-inf": lambda: model_with(lambda x: torch.exp(x.abs() * 1e4) - torch.exp(x.abs() * 1e4)),
    "an infinity that is taken up": lambda: model_with(
        lambda x: torch.sigmoid(torch.exp(x.abs() * 1e4)) + torch.exp(-torch.exp(x.abs() * 1e4))
    ),
    "a float16 matmul": lambda: model_with(half_overflow),
    "where": lambda: model_with(lambda x: torch.where(x > 1e9, torch.sqrt(x * 0), x)),
    "only backward": lambda: model_with(bad_gradient),
    "a view written in place": lambda: model_with(in_place),
    "parts of a whole": lambda: model_with(split),
    "a healthy mask": lambda: masked(causal),
    "a row masked entirely": lambda: masked(
        lambda s: s.masked_fill(torch.ones_like(s).bool(), -INF)
    ),
    "a mask that was added": lambda: masked(
        lambda s: (
            s
            + torch.full(s.shape[-2:], torch.finfo(s.dtype).min, device=s.device).triu(1)
            + torch.full(s.shape[-2:], torch.finfo(s.dtype).min, device=s.device).triu(1)
        )
    ),
    "layer norm of a constant": lambda: model_with(lambda x: F.layer_norm(x * 0, (8,), eps=0)),
}


HEALTHY = ("a healthy mask", "a mask that was added")
IN_PARTS = ("a view written in place",)


@pytest.mark.parametrize("case", CASES)
def test_the_events_are_the_cpus(case: str) -> None:
    shape = (2, 6, 8) if "mask" in case else (4, 8)
    here = watched(CASES[case], "cpu", *shape)
    there = watched(CASES[case], NAME, *shape)
    if case in IN_PARTS:
        # A part of what is not known yet is read by itself.
        here, there = ([(*row[:6], *row[7:]) for row in rows] for rows in (here, there))
    assert there == here
    assert here
    assert any(row[4] for row in here) == (case not in HEALTHY)


class TestNothingWaits:
    @pytest.mark.parametrize("record", ["health", "full"])
    def test_losses_and_weights(self, record: str) -> None:
        def run(is_watched: bool) -> tuple[list[torch.Tensor], Any]:
            torch.manual_seed(0)
            model = nn.Sequential(masked(causal), nn.LayerNorm(8), Net(dropout=0.1)).to(NAME)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            data = [x.to(NAME) for x in batches(8, 2, 6, 8)]
            options: dict[str, Any] = {"record": record, "stop": fastcheck.Stop(max_lag=None)}
            monitor = fastcheck.install(model, level="op", **options) if is_watched else None
            losses = loop(model, data[:4], optimizer=optimizer)  # constants, rings
            fake.synchronize()
            before = fake.counters()
            losses += loop(model, data[4:], optimizer=optimizer)
            spent = fake.counters() - before
            fake.synchronize()
            assert spent.synchronisations == 0 and spent["blocking_copy"] == 0
            if monitor is not None:
                monitor.remove()
                assert monitor.event_count == 0
                said = monitor.summary()
                assert "no longer observes" not in said and "full ring" not in said
                assert len(monitor.records()) > 8 * 100
            return [*losses, *model.parameters()], None

        plain, _ = run(False)
        for mine, theirs in zip(run(True)[0], plain):
            assert torch.equal(mine.cpu(), theirs.cpu())

    def test_the_records_are_the_cpus(self) -> None:
        """Of the same operators with the same numbers: none of those that read is among them."""

        def run(device: str) -> list[tuple[Any, ...]]:
            torch.manual_seed(0)
            copied = model_with(lambda x: torch.zeros_like(x).copy_(x))  # as the ring is
            model = nn.Sequential(masked(causal), nn.ReLU(inplace=True), copied).to(device)
            data = [x.to(device) for x in batches(3, 2, 6, 8)]
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
            with fastcheck.install(model, level="op") as monitor:
                loop(model, data, optimizer=optimizer)
            rows = monitor.records()
            # What the device reads again are parts of what it does not know to be finite yet.
            made = [(record, monitor.sites[int(record["site"])]) for record in rows]
            return [
                (str(site), int(record["step"]), int(record["call"]), int(record["numel"]))
                for record, site in made
                if site.role in ("output", "grad_input")
            ]

        assert run(NAME) == run("cpu")

    def test_a_part_of_what_has_turned_out_finite_is_not_read_again(self) -> None:
        table = torch.randn(64, 8).to(NAME)
        at = [0]
        model = model_with(lambda x: x + table[at[0] : at[0] + 4]).to(NAME)

        def before(step: int) -> None:
            at[0] = 4 * step
            fake.synchronize()

        with fastcheck.install(model, level="op", sync="step") as monitor:
            _ = table * 1
            loop(model, [x.to(NAME) for x in batches(8)], before=before)
        rows = monitor.records()
        parts = [r for r in rows if monitor.sites[int(r["site"])].label == "other"]
        steps = {int(r["step"]) for r in parts if int(r["numel"]) == 32}
        assert steps <= {0, 1}  # until the record of the whole has come

    def test_copies_of_records_are_not_counted_among_the_models(self) -> None:
        model = model_with(lambda x: torch.zeros_like(x).copy_(x)).to(NAME)
        x = torch.ones(2, 8).to(NAME)
        with fastcheck.install(model, level="op") as monitor, torch.no_grad():
            for _ in range(3):
                model(x)
                monitor.flush()
        rows = [r for r in monitor.records() if monitor.sites[int(r["site"])].op == "aten.copy_"]
        assert [int(row["call"]) for row in rows] == [0, 1, 2]


class TestStopping:
    def test_never_stops_one_step_later_at_the_latest(self) -> None:
        model = model_with(lambda x: torch.sqrt(-x.abs() - 1)).to(NAME)
        fastcheck.install(model, level="op", record="stats")
        stop = stopped(loop, model, [x.to(NAME) for x in batches(6)])
        assert culprit(stop) == ("1", "aten.sqrt", "forward", "origin")
        assert stop.step == 0 and "test_async.py" in stop.culprit.line
        assert "aten.sub.Tensor" in str(stop)  # what it read

    @pytest.mark.parametrize("function", [lambda x: torch.log(x * 0) * 0, bad_gradient])
    def test_step_stops_before_the_optimizer_uses_it(self, function: Function) -> None:
        model = model_with(lambda x: x).to(NAME)
        before: list[torch.Tensor] = []

        def break_it(step: int) -> None:
            if step == 2:
                model[1].function = function  # type: ignore[union-attr]  # the module has that attribute
                before.extend(p.detach().clone() for p in model.parameters())

        fastcheck.install(model, level="op", record="stats", sync="step")
        data = [x.to(NAME) for x in batches(5)]
        stop = stopped(loop, model, data, before=break_it)
        assert stop.step == 2
        for parameter, was in zip(model.parameters(), before):
            assert torch.equal(parameter.detach().cpu(), was.cpu())

    def test_a_backward_goes_by_the_line_of_its_forward(self) -> None:
        def hidden(x: torch.Tensor) -> torch.Tensor:
            z = torch.sqrt(x * 0)
            return torch.where(x > 1e9, z, x)

        model = model_with(hidden).to(NAME)
        fastcheck.install(model, level="op", record="stats", sync="step")
        stop = stopped(loop, model, [x.to(NAME) for x in batches(2)])
        assert culprit(stop) == ("1", "aten.sqrt", "backward", "origin")
        line = hidden.__code__.co_firstlineno + 1
        assert stop.culprit.line.endswith(f"test_async.py:{line} in hidden")

    def test_a_healthy_mask_and_a_nan_five_steps_later(self) -> None:
        tail = model_with(lambda x: x)
        model = nn.Sequential(masked(causal), tail).to(NAME)

        def before(step: int) -> None:
            if step == 5:
                tail[1].function = lambda x: (x * 0) / (x * 0)

        fastcheck.install(model, level="op", record="stats")
        data = [x.to(NAME) for x in batches(12, 2, 6, 8)]
        stop = stopped(loop, model, data, before=before)
        assert culprit(stop) == ("1.1", "aten.div.Tensor", "forward", "origin")
        assert stop.step == 5

    def test_a_checkpoint_that_is_bad(self) -> None:
        def make() -> nn.Module:
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
            with torch.no_grad():
                model[1].weight[0, 0] = float("nan")  # type: ignore[index]  # it is a Linear
            return model

        here = watched(make, "cpu")
        assert watched(make, NAME) == here
        assert "checkpoint" in here[0][3]

    @pytest.mark.parametrize("loss", [float("nan"), float("-inf")])
    def test_a_loss_that_is_told(self, loss: float) -> None:
        def run(device: str) -> list[tuple[Any, ...]]:
            torch.manual_seed(0)
            model = model_with(lambda x: torch.sqrt(-x.abs() - 1)).to(device)
            x = torch.ones(2, 8).to(device)
            with fastcheck.install(model, level="op", overflow_nums=-1) as monitor:
                model(x).sum().backward()
                monitor.step(loss=loss)
                monitor.flush()
                # What the sum gives back is a part of one number, and read by itself.
                return [row[:6] for row in told(monitor)]

        assert run(NAME) == run("cpu")

    def test_a_batch_that_is_bad(self) -> None:
        model = Net().to(NAME)
        data = [torch.full((4, 8), float("nan")).to(NAME)]
        fastcheck.install(model, level="op", sync="step")
        stop = stopped(loop, model, data)
        assert stop.culprit.verdict is Verdict.ARRIVED
        assert "is part of the batch" in stop.culprit.reason

    @pytest.mark.parametrize("foreach", [False, True])
    def test_an_optimizer_whose_second_moment_overflows(self, foreach: bool) -> None:
        model = nn.Linear(8, 4).to(NAME)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=foreach)
        fastcheck.install(model, level="op", record="stats")
        stop = stopped(
            loop,
            model,
            [x.to(NAME) for x in batches(5)],
            loss=lambda y: y.sum() * 1e25,
            optimizer=optimizer,
        )
        assert stop.culprit.site.direction == "optimizer"
        assert "addcmul" in (stop.culprit.site.op or "")


class TestFilters:
    def test_what_is_left_out_is_not_read(self) -> None:
        model = model_with(lambda x: torch.sqrt(-x.abs() - 1)).to(NAME)
        data = [x.to(NAME) for x in batches(2)]
        options: dict[str, Any] = {
            "filter": fastcheck.Filter(ops=["sqrt"], roles=["output"]),
            "overflow_nums": -1,
        }
        with fastcheck.install(model, level="op", **options) as monitor:
            loop(model, data)
        ops = {monitor.sites[int(record["site"])].op for record in monitor.records()}
        assert ops == {"aten.sqrt"}
        assert [event.site.op for event in monitor.events if event.counted] == ["aten.sqrt"] * 2

    def test_an_infinity_that_goes_where_nobody_looks_is_no_event(self) -> None:
        model = masked(CASES["a mask that was added"]().mask).to(NAME)
        data = [x.to(NAME) for x in batches(2, 2, 6, 8)]
        options: dict[str, Any] = {
            "filter": fastcheck.Filter(ops=["aten.add.Tensor"]),
            "overflow_nums": -1,
        }
        with fastcheck.install(model, level="op", **options) as monitor:
            loop(model, data)
        assert monitor.event_count == 0
        absorbed = [event for event in monitor.events if event.verdict is Verdict.ABSORBED]
        assert absorbed and "left out by a filter" in absorbed[0].reason

    def test_steps(self) -> None:
        model = Net().to(NAME)
        with fastcheck.install(model, level="op", every=3) as monitor:
            loop(model, [x.to(NAME) for x in batches(7)])
        assert set(monitor.records()["step"].tolist()) == {0, 3, 6}


def test_a_region_in_which_values_may_be_nonfinite() -> None:
    """It is judged later than it ends, by what held when the operators ran."""

    def run(device: str, *, is_inside: bool) -> int:
        model = nn.Linear(8, 4).to(device)
        x = torch.ones(4, 8).to(device)
        with fastcheck.install(model, level="op", record="stats", overflow_nums=-1) as monitor:
            for _ in range(2):
                y = model(x).detach()
                before = (y * 0) / (y * 0)
                with fastcheck.allow_nonfinite(reason="classes without samples"):
                    inside = (y * 0) / (y * 0)
                value = inside if is_inside else before
                value.sum().isnan().item()  # finite: an answer
                with fastcheck.allow_nonfinite(reason="classes without samples"):
                    float(value.sum())
                monitor.step()
            monitor.flush()
            return monitor.event_count

    for device in ("cpu", NAME):
        assert run(device, is_inside=True) == 0
        assert run(device, is_inside=False) > 0


def test_an_infinity_written_into_a_weight_began_there() -> None:
    model = model_with(lambda x: x).to(NAME)
    with fastcheck.install(model, level="op", overflow_nums=-1) as monitor:
        for step, x in enumerate(batches(4)):
            if step == 2:
                with torch.no_grad():
                    model[0].weight.fill_(INF)
            model(x.to(NAME)).square().mean().backward()
            monitor.step()
        monitor.flush()
        first = next(event for event in monitor.events if event.counted)
    assert (first.step, first.site.op) == (2, "aten.fill_.Scalar")
    assert "it was written into 0.weight" in first.reason
