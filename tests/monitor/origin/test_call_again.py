"""Tests of a call that runs again, to find the operator that made the numbers of a stop."""

from __future__ import annotations

import copy
import math
import random
import re
import warnings
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, Callable

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.log.reader import read_log
from fastcheck.record.statistics import statistics_of
from fastcheck.report.build import report_from_log
from fastcheck.report.message import packed, unpacked
from fastcheck.report.render import headline
from support.programs.training import batches

pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")

Loss = Callable[[torch.Tensor], torch.Tensor]

# The call that the stop interrupts, run again


class Block(nn.Module):
    """A model that makes a NaN when ``is_on``: batch norm, dropout, a counter and a cache."""

    def __init__(self, bad: Loss) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.drop, self.lstm = nn.Dropout(0.5), nn.LSTM(8, 8, batch_first=True)
        self.calls, self.cache, self.bad, self.is_on = 0, [torch.zeros(1)], bad, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.cache.append(x.detach())
        self.cache[0].add_(random.random())
        x = self.drop(self.norm(self.first(x)))
        x = x + self.lstm(x.unsqueeze(1))[0].squeeze(1)
        if self.is_on:
            x = self.bad(x)
        return self.last(x)


def stop_of_model(
    model: Any, steps: int = 3, loss: Loss = torch.mean, **options: Any
) -> fastcheck.OverflowDetected:
    optimizer = torch.optim.Adam(model.parameters())
    with fastcheck.install(model, **options), pytest.raises(fastcheck.OverflowDetected) as stop:
        for index, x in enumerate(batches(steps)):
            model.is_on = index == steps - 1
            optimizer.zero_grad()
            loss(model(x)).backward()
            optimizer.step()
    return stop.value


def negative_root(x: torch.Tensor) -> torch.Tensor:
    return torch.sqrt(-x.abs() - 1)


def test_the_operator_in_a_call() -> None:
    seen = []

    def bad(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.detach().clone())
        return negative_root(x)

    torch.manual_seed(0)
    stop = stop_of_model(Block(bad))
    made = stop.report.made_by
    assert made is not None and made.operator == "aten.sqrt"
    assert torch.equal(*seen)  # the same dropout
    assert made.line.startswith(f"{__file__}:") and made.line.endswith("in negative_root")
    (name, record), *_ = made.inputs
    largest = float((-seen[0].abs() - 1).max())
    assert name == "self (aten.sub.Tensor)" and statistics_of(record).max == largest
    assert made.result is not None and statistics_of(made.result).nan_count == 32
    assert "Block was run again" in str(stop)


def test_an_operator_that_read_infinities_too_made_more_of_them() -> None:
    def masked_twice(x: torch.Tensor) -> torch.Tensor:
        lowest = torch.full((1, 8), torch.finfo(torch.float16).min, dtype=torch.float16)
        mask = torch.cat([lowest, lowest + lowest])  # its second row is -Inf
        return (x[:2].half() * 2000 + mask).softmax(-1).float().log()

    stop = stop_of_model(Block(masked_twice))
    made = stop.report.made_by
    assert made is not None
    assert [statistics_of(record).inf_count for _, record in made.inputs] == [0, 8]
    assert made.how.startswith(
        "aten.add.Tensor made NaN or Inf in addition to those that it read: Block"
    )


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The states of two runs are the same; lists under "values" and "gradients" hold tensors."""
    assert found.keys() == expected.keys()
    for name, known in expected.items():
        if name == "generator":
            assert torch.equal(found[name], known)
        elif name not in ("values", "gradients"):
            assert found[name] == known, name
        else:
            assert len(found[name]) == len(known)
            for one, other in zip(found[name], known):
                assert (one is None) == (other is None)
                assert one is None or torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


@pytest.mark.parametrize("raises", [False, True])
def test_a_call_is_run_on_copies(raises: bool) -> None:
    """Everything is as a run without the search leaves it, bit for bit, even if it raises."""

    def state_after(find_operator: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        random.seed(0)
        runs: list[int] = []

        def bad(x: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            seen = model.get_buffer("seen")
            seen += random.random()
            seen.data += torch.rand(())
            if raises and len(runs) > 1:
                model.norm.eval()
                raise LookupError("only once")
            return negative_root(x)

        model = Block(bad)
        model.register_buffer("seen", torch.zeros(()))
        before = nn.Linear(8, 8)
        model.norm.register_forward_hook(lambda *_: None)
        hooks = [dict(module._forward_hooks) for module in model.modules()]
        objects = {name: id(value) for name, value in vars(model).items()}
        optimizer = torch.optim.Adam(model.parameters())
        stop = fastcheck.Stop(find_operator=find_operator)
        with fastcheck.install(model, stop=stop), torch.autocast("cpu", torch.bfloat16):
            with pytest.raises(fastcheck.OverflowDetected) as raised:
                for index, x in enumerate(batches(3)):
                    model.is_on = index == 2
                    optimizer.zero_grad()
                    y = before(x)
                    model(y).float().square().mean().backward()
                    optimizer.step()
            assert torch.is_grad_enabled() and torch.is_autocast_enabled("cpu")
        found = raised.value.report.made_by
        assert (found is not None) == find_operator and len(runs) == 1 + find_operator
        assert found is None or ("LookupError: only once" in found.how) == raises
        y.sum().backward()  # the graph in front of the call is whole
        assert hooks == [dict(module._forward_hooks) for module in model.modules()]
        assert objects["cache"] == id(model.cache) and objects["_modules"] == id(model._modules)
        tensors = [*model.parameters(), *model.buffers(), *before.parameters(), *model.cache]
        return {
            "values": [tensor.detach().clone() for tensor in tensors],
            "gradients": [p.grad for p in [*model.parameters(), *before.parameters()]],
            "versions": [tensor._version for tensor in tensors],
            "generator": torch.get_rng_state(),
            "random": random.getstate(),
            "calls": model.calls,
            "names": [list(vars(module)) for module in model.modules()],
            "modes": [module.training for module in model.modules()],
        }

    assert_same(state_after(True), state_after(False))


def test_statistics_of_a_norm_do_not_explain_an_output() -> None:
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), nn.Linear(4, 1))

    def bad(module: nn.Module, args: Any) -> tuple[torch.Tensor]:
        # The running variance of three overflows, of which nothing is made in training.
        return (args[0] * torch.tensor([1e25, 1e25, 1e25, 1.0]),)

    norm.register_forward_pre_hook(bad)
    with torch.no_grad():
        model[2].weight.fill_(3e38)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        model(torch.randn(16, 4)).mean().backward()
    text = " ".join(str(stop.value).split())
    assert "in output of 2 (Linear)" in text
    assert "aten.addmm in 2 made it" in text


def test_hooks_of_the_call_itself_do_not_run_twice() -> None:
    model = Block(negative_root)
    seen: list[int] = []

    def halve(module: nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor:
        seen.append(module.calls)
        return args[0] / 2

    model.register_forward_pre_hook(halve)
    made = stop_of_model(model).report.made_by
    assert made is not None and made.operator == "aten.sqrt"
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("tail", [nn.BatchNorm1d(4), nn.BatchNorm1d(4).eval(), nn.Identity()])
def test_what_is_made_of_data_without_a_graph(tail: nn.Module) -> None:
    """A norm in training mode has taken the infinity in by then."""

    class Exp(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.exp()

    torch.manual_seed(0)  # of finite weights by Inf none is NaN: the loss alone shows harm
    model = nn.Sequential(Exp(), copy.deepcopy(tail), nn.Linear(4, 2))
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        for high in (1.0, 95.0, 1.0):
            x = torch.randn(8, 4)
            x[0, 0] = high
            model(x).square().mean().backward()
    made = stop.value.report.made_by
    assert made is not None and made.operator == "aten.exp" and "in forward" in made.line
    assert "self reaches 95: exp of more than 88.7" in " ".join(str(stop.value).split())


def test_code_between_submodules() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x) / (x * 0))

    made = stop_of_model(Mixed()).report.made_by
    assert made is not None and made.operator == "aten.div.Tensor"
    assert {name: statistics_of(one).zero_count for name, one in made.inputs}[
        "other (aten.mul.Tensor)"
    ] == 32


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_what_a_recurrent_module_reads_in_a_late_step(kind: type[nn.RNNBase]) -> None:
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.last = kind(8, 8, batch_first=True), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            steps = x.unsqueeze(1).repeat(1, 90, 1)
            steps = steps / (torch.arange(90.0) - 80).unsqueeze(1)
            return self.last(self.cell(steps)[0])

    made = stop_of_model(Sequence()).report.made_by
    assert made is not None and made.operator == "aten.div.Tensor"


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor


def test_what_a_dataclass_holds_is_copied() -> None:
    runs: list[int] = []

    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(8, 4)

        def forward(self, batch: Batch) -> torch.Tensor:
            y: torch.Tensor = self.last(negative_root(batch.x))
            runs.append(1)
            if len(runs) == 2:
                batch.x.zero_()
            return y

    model, batch = Writing(), Batch(torch.ones(4, 8))
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        model(batch)
    made = stop.value.report.made_by
    assert made is not None and made.operator == "aten.sqrt" and len(runs) == 2
    assert torch.equal(batch.x, torch.ones(4, 8))


class OwnMapping(MutableMapping[str, Any]):
    """A mapping whose copy shares the dict that it keeps its items in."""

    def __init__(self, **items: Any) -> None:
        self.items_of = items

    def __getitem__(self, name: str) -> Any:
        return self.items_of[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.items_of[name] = value

    def __delitem__(self, name: str) -> None:
        del self.items_of[name]

    def __iter__(self) -> Any:
        return iter(self.items_of)

    def __len__(self) -> int:
        return len(self.items_of)


def test_what_containers_within_others_hold_is_copied() -> None:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(8, 4)
            self.cache = {"states": [torch.ones(2)]}
            self.batch = Batch(torch.ones(2))
            self.lengths: list[list[int]] = [[]]

        def forward(self, batch: OwnMapping) -> torch.Tensor:
            for tensor in (self.cache["states"][0], self.batch.x):
                tensor.mul_(2)
            self.lengths[0].append(1)
            y: torch.Tensor = self.last(negative_root(batch["x"]))
            return y

    model, x = Remembering(), torch.ones(4, 8)
    batch = OwnMapping(x=x)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        model(batch)
    made = stop.value.report.made_by
    assert made is not None and made.operator == "aten.sqrt"
    assert batch["x"] is x
    assert all(bool((t == 2).all()) for t in (model.cache["states"][0], model.batch.x))
    assert model.lengths == [[1]]


def test_an_input_that_was_written_in_place() -> None:
    class Writing(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            return super().forward(x)

    made = stop_of_model(Writing(negative_root)).report.made_by
    assert made is not None and made.operator == ""
    assert "could not be run again: input[0] was written in place since" in made.how


def test_an_error_of_the_second_run_is_said() -> None:
    class Once(Block):
        ran: set[int] = set()  # noqa: RUF012  # state that no module holds

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.is_on and self.ran:
                raise LookupError("only once")
            self.ran.update([1] if self.is_on else [])
            return super().forward(x)

    made = stop_of_model(Once(negative_root)).report.made_by
    assert made is not None and made.operator == ""
    assert "could not be run again: LookupError: only once" in made.how


def test_a_check_of_the_program_that_ends_the_call() -> None:
    """Both runs end there, so that nothing is made of what the check has seen."""

    class Checking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            y = self.last(negative_root(torch.where(y > 99, y * 0 / 0, y)))
            assert not y.isnan().any()
            return y

    model = nn.Sequential(nn.Linear(8, 8), Checking())
    monitor = fastcheck.install(model)
    with pytest.raises(AssertionError):
        model(torch.ones(4, 8))
    with pytest.raises(fastcheck.OverflowDetected) as stop:
        monitor.remove()
    made = stop.value.report.made_by
    assert made is not None and made.operator == "aten.sqrt" and "in negative_root" in made.line


def test_a_second_run_that_is_finite_is_not_held_against_the_stop() -> None:
    seen: list[int] = []

    def once(x: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return negative_root(x) if len(seen) == 1 else x

    made = stop_of_model(Block(once)).report.made_by
    assert made is not None and made.operator == ""
    assert "no operator in it could be named" in made.how and "finite" not in made.how


def test_it_can_be_switched_off() -> None:
    stop = stop_of_model(Block(negative_root), stop=fastcheck.Stop(find_operator=False))
    assert stop.report.made_by is None


# A call that is over, run again forward and backward


def where_root(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 9, x, (x * 0).sqrt())


def one_row(x: torch.Tensor) -> torch.Tensor:
    return x + 0 * x[:1].detach().var(0)


class Deep(nn.Module):
    """The root of 0 is farther from the loss than what is kept of its graph."""

    def __init__(self, bad: Loss) -> None:
        super().__init__()
        self.block, self.last, self.is_on = Block(bad), nn.Linear(4, 4), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.block.is_on = self.is_on
        x = self.block(x)
        for _ in range(80):
            x = x + 1e-3
        return self.last(x)


@pytest.mark.parametrize("count", ["origin", "all"])
def test_the_operator_of_a_backward_in_a_module(count: str) -> None:
    """count="all" stops within the backward, in a hook."""
    torch.manual_seed(0)
    stop = stop_of_model(Deep(where_root), stop=fastcheck.Stop(count=count))
    made = stop.report.made_by
    assert made is not None and made.operator == "aten.sqrt" and made.is_backward
    assert made.line.startswith(f"{__file__}:") and made.line.endswith("in where_root")
    assert dict(made.inputs).keys() == {"self (aten.where.self)", "other (aten.sqrt)"}
    assert statistics_of(dict(made.inputs)["other (aten.sqrt)"]).zero_count == 32
    text = " ".join(str(stop).split())
    assert "(in SqrtBackward0) made it" in text
    assert "Deep was run again on its inputs, forward and backward, with random gradients" in text
    assert "The derivative of sqrt is infinite at 0" in text


def test_a_call_that_is_over_has_no_line_of_what_runs_now() -> None:
    """The operators of torch's own modules, which run again where the loss has called backward."""
    model = nn.Sequential(nn.Linear(8, 4))

    def blow_up(x: torch.Tensor) -> torch.Tensor:
        return model(x).abs().mean()

    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        for size in (1.0, -3e38):
            nn.init.constant_(model[0].weight, size)
            blow_up(torch.ones(2, 8)).backward()
    made = stop.value.report.made_by
    assert made is not None and made.operator == "aten.addmm" and made.line == ""
    assert "To find the line, run again" in " ".join(str(stop.value).split())


def test_a_backward_is_run_on_copies() -> None:
    """Everything is as a run without the search leaves it, bit for bit."""

    def state_after(find_operator: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        random.seed(0)
        model = Deep(where_root)
        seen: list[str] = []
        model.block.norm.register_full_backward_hook(lambda *_: seen.append("backward"))
        model.block.first.weight.register_hook(lambda _: seen.append("gradient"))
        model.register_forward_pre_hook(lambda *_: seen.append("forward"))
        stop = fastcheck.Stop(find_operator=find_operator)
        found = stop_of_model(model, stop=stop).report.made_by
        assert (found is not None and found.operator == "aten.sqrt") == find_operator
        tensors = [*model.parameters(), *model.buffers(), *model.block.cache]
        return {
            "values": [tensor.detach().clone() for tensor in tensors],
            "gradients": [parameter.grad for parameter in model.parameters()],
            "versions": [tensor._version for tensor in tensors],
            "generator": torch.get_rng_state(),
            "random": random.getstate(),
            "calls": model.block.calls,
            "seen": seen,
        }

    assert_same(state_after(True), state_after(False))


def test_the_gradient_of_a_parameter_that_is_used_by_itself() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.last, self.is_on = nn.Parameter(torch.zeros(8)), nn.Linear(8, 4), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(x * self.scale.sqrt() if self.is_on else x)

    stop = stop_of_model(Scaled())
    made = stop.report.made_by
    assert stop.report.culprit.site.role == "param_grad"
    assert made is not None and made.operator == "aten.sqrt" and made.line.endswith("in forward")


def test_what_forward_made_reaches_the_gradient_of_a_parameter_alone() -> None:
    """The gradients that the module passes on are finite."""

    class Decayed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decay, self.last = nn.Parameter(torch.tensor([200.0] + 7 * [1.0])), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(x + (-self.decay.exp()).exp())

    stop = stop_of_model(nn.Sequential(nn.Linear(8, 8), Decayed()))
    made = stop.report.made_by
    assert stop.report.culprit.site.key == "1.decay"
    assert made is not None and made.operator == "aten.exp" and made.line.endswith("in forward")
    assert [name for name, _ in made.inputs] == ["self (parameter 1.decay)"]


def test_a_buffer_that_its_module_has_made_non_finite() -> None:
    class Norm(nn.Module):
        variance: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("variance", torch.ones(8))
            self.is_on = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.variance.lerp_(x[: 1 if self.is_on else 4].var(0), 0.1)
            return x

    model = nn.Sequential(nn.Linear(8, 8), Norm())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        for index, x in enumerate(batches(4)):
            model[1].is_on = index == 2
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
    made = stop.value.report.made_by
    assert made is not None and made.operator == "aten.var.correction"
    text = " ".join(str(stop.value).split())
    assert "In 1: aten.var.correction made NaN or Inf of finite values" in text
    assert "var of one element is 0/0" in text and "Buffer 1.variance keeps" in text


class Running(nn.Module):
    """Divides by what it has counted before this call. The count is a buffer."""

    seen: torch.Tensor

    def __init__(self, written: str) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(()))
        self.written = written

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.detach().mean() * 0 / self.seen
        if self.written == "in place":
            self.seen += len(x)
        elif self.written == "by .data":
            self.seen.data += len(x)
        else:
            self.seen = self.seen + len(x)
        return x + scale


@pytest.mark.parametrize("written", ["in place", "by .data", "replaced"])
@pytest.mark.parametrize("when", [0, 2])
def test_a_call_runs_again_with_its_buffers_as_they_were(written: str, when: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Running(written), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        for index, x in enumerate(batches(4)):
            if index == when:
                model[1].seen.data.zero_()
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
    made = stop.value.report.made_by
    assert stop.value.step == when
    assert made is not None and made.operator == "aten.div.Tensor" and "in 1 made it" in made.how
    assert float(model[1].seen) == 4  # that of the run itself


def test_a_part_that_runs_again_leaves_the_buffers_beside_it() -> None:
    class Root(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 0).log()

    class Task(nn.Module):
        """A whole step within a call."""

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.root = nn.Linear(8, 8), Root()
            self.optimizers = [torch.optim.SGD(self.parameters(), 0.1)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.root(self.linear(x).detach())
            (self.linear(x).sum() + y.sum()).backward()
            self.optimizers[0].step()
            return y  # type: ignore[no-any-return]  # a module's result is Any

    model = nn.Sequential(Running("in place"), Task())
    seen = model[0].seen
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        model(torch.ones(4, 8))
    made = stop.value.report.made_by
    assert made is not None and "1 was run again" in made.how
    assert model[0].seen is seen and float(seen) == 5


def test_the_infinities_that_a_maximum_over_nothing_leaves() -> None:
    class Pool(nn.Module):
        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            return x.masked_fill(~keep, -math.inf).amax(1)

    pool, head = Pool(), nn.Linear(1, 2)
    optimizer = torch.optim.SGD(head.parameters(), 0.1)
    with fastcheck.install(head, pool), pytest.raises(fastcheck.OverflowDetected) as stop:
        for x in batches(2):
            keep = torch.ones(4, 8, dtype=torch.bool)
            keep[1] = False
            optimizer.zero_grad()
            head(pool(x, keep)[:, None]).mean().backward()
            optimizer.step()
    made = stop.value.report.made_by
    assert stop.value.culprit.site.module == "Pool"
    assert (
        made is not None and made.operator == "aten.amax" and "left -Inf in its result" in made.how
    )
    assert "check that no row is masked whole" in str(stop.value)


def test_the_log_of_0_in_a_target_is_not_what_the_loss_made() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        goal = torch.tensor([1.0, 0.0, 2.0, 1.0]).log()
        nn.functional.smooth_l1_loss(model(torch.ones(1, 4)), goal[None]).backward()
    text = " ".join(str(stop.value).split())
    assert "SmoothL1LossBackward0 in the graph of the loss read it in a tensor that has no" in text
    assert "The first bad element of goal is [1], in row 1" in text
    assert "It holds -Inf alone, as the log of 0 is" in text
    assert "while what it read was" not in text


def test_a_buffer_that_was_never_finite_is_blamed_in_training() -> None:
    class Rotary(nn.Module):
        cos: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cos", torch.full((8,), math.inf).cos())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.cos

    model = nn.Sequential(nn.Linear(8, 8), Rotary(), nn.Linear(8, 1))
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        model(torch.ones(2, 8)).mean().backward()
    assert (stop.value.culprit.site.role, stop.value.culprit.site.label) == ("buffer", "cos")
    assert "it was non-finite when it was first read" in stop.value.culprit.reason


def test_a_weight_that_no_optimizer_holds() -> None:
    """An average of weights, corrected by 0 at first."""
    student, teacher = nn.Linear(4, 2), nn.Linear(4, 2).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), 0.1)
    with fastcheck.install(student, teacher), pytest.raises(fastcheck.OverflowDetected) as stop:
        for step in range(3):
            x = torch.ones(2, 4)
            optimizer.zero_grad()
            (student(x) - teacher(x)).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                for p in teacher.parameters():
                    p.mul_(0).div_(torch.tensor(1 - 0.9**step))
    assert stop.value.culprit.reason.endswith("no optimizer that has stepped holds it")
    assert stop.value.report.learning_rates == ()


def test_the_backward_of_a_criterion_that_is_installed() -> None:
    class Distance(nn.Module):
        def forward(self, x: torch.Tensor, is_on: bool) -> torch.Tensor:
            y = x.abs().sqrt() if is_on else x
            for _ in range(80):
                y = y + 1e-3
            return y.mean()

    model, criterion = nn.Sequential(nn.Linear(8, 8)), Distance()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = fastcheck.install(model, criterion)
    with pytest.raises(fastcheck.OverflowDetected) as stop:
        for index, x in enumerate(batches(4)):
            optimizer.zero_grad()
            criterion(model(x) * (index != 2), index == 2).backward()
            optimizer.step()
    made = stop.value.report.made_by
    assert made is not None and made.operator == "aten.sqrt" and made.line.endswith("in forward")
    assert "Distance was run again on its inputs, forward and backward" in made.how
    # The monitor of the run has not seen it.
    assert [one.call.node.path for one in monitor._session.passes.held] == ["", "Distance"]
    monitor.remove()
    assert stop.value.report.event_count == 1


def test_a_call_that_is_not_the_same_again_explains_nothing() -> None:
    class Other(Deep):
        count = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Other.count += 1
            return super().forward(x) * Other.count

    stop = stop_of_model(Other(where_root))
    assert stop.report.culprit.site.direction == "backward"
    assert stop.report.made_by is None


class _Recursive(nn.Module):
    """Calls itself, each time with another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.is_on = nn.Linear(8, 8), False

    def forward(self, x: torch.Tensor, depth: int = 3) -> torch.Tensor:
        if depth == 0:
            return negative_root(x) if self.is_on else x
        out: torch.Tensor = self(self.layer(x), depth - 1)
        return out


def test_a_module_that_calls_itself_runs_again_with_the_arguments_of_the_call() -> None:
    made = stop_of_model(_Recursive()).report.made_by
    assert made is not None and made.operator == "aten.sqrt"


class Careful(nn.Module):
    """Has a finite gradient where that of its result is large."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient / (gradient.abs() > 0.05)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.Function.apply(x)
        return result


@pytest.mark.parametrize("is_in_loss", [False, True])
def test_what_only_the_random_gradients_do_is_not_blamed(is_in_loss: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Identity(), Careful())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        for x in batches(3):
            optimizer.zero_grad()
            y = model(x)
            result = y.clone()
            if is_in_loss:
                result.register_hook(lambda g: g.index_fill(0, torch.tensor(0), float("nan")))
            (result.sum() * 0.1).backward()
            model[0].bias.grad[0] = float("nan")
            optimizer.step()
    culprit = stop.value.report.culprit.site
    assert culprit.role == "grad_output" if is_in_loss else culprit.key == "0.bias"
    assert stop.value.report.made_by is None


def test_the_copies_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastcheck.monitor.origin.call_again._MOST_BYTES", 1000)
    made = stop_of_model(Block(negative_root)).report.made_by
    assert made is not None and made.operator == ""
    assert "Block was not run again: a copy of its parameters and buffers" in made.how


def test_small_buffers_are_held_with_a_call() -> None:
    """The smallest ones of the program's own modules, up to 64 KB together."""
    model = nn.Sequential(nn.Linear(8, 8), Running("by .data"), nn.BatchNorm1d(8), Running("no"))
    for index, size in enumerate((9 << 10, 6 << 10, 1 << 10)):
        model[3].register_buffer(f"table{index}", torch.rand(size))
    with fastcheck.install(model) as monitor:
        for _ in range(2):
            model(torch.rand(4, 8))
        first, second = (run.buffers for run in monitor._session.passes.held)
    names = ["seen", "seen", "table2", "table1"]
    assert [name for _, name, _ in first] == [name for _, name, _ in second] == names
    assert [float(run[0][2]) for run in (first, second)] == [1, 5]
    # Of what has not changed there is one copy.
    assert [a[2] is b[2] for a, b in zip(first, second)] == [False, False, True, True]
    for index in range(100):
        model[3].register_buffer(f"small{index}", torch.rand(1))
    with fastcheck.install(model) as monitor:
        model(torch.rand(4, 8))
        assert len(monitor._session.passes.held[0].buffers) == 64


def test_a_sparse_buffer_is_not_held() -> None:
    """Its bytes can't be asked for."""
    model = nn.Sequential(nn.Linear(8, 8), Running("no"))
    model[1].register_buffer("edges", torch.eye(3).to_sparse())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with fastcheck.install(model) as monitor:
            model(torch.rand(4, 8))
            assert [name for _, name, _ in monitor._session.passes.held[0].buffers] == ["seen"]
    assert "no longer observes" not in monitor.summary()


def test_what_is_held_of_calls() -> None:
    model = nn.ModuleDict({"first": nn.Linear(8, 8), "last": nn.Linear(8, 8)})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fastcheck.install(model) as monitor:
        passes = monitor._session.passes
        for _ in range(2):
            x = torch.rand(4, 8)
            y = model["first"](x)
            model["last"](y).mean().backward()
            assert [one.call.node.path for one in passes.held] == ["first", "last"]
            # No graph is held.
            assert passes.held[0].args[0] is x
            assert passes.held[1].args[0].grad_fn is None and passes.held[1].args[0].requires_grad
            optimizer.step()
        del x
        with torch.no_grad():
            model["first"](torch.rand(4, 8))
        assert len(passes.held) == 0
        for _ in range(20):
            model["first"](torch.rand(4, 8))
        assert len(passes.held) == 8
        model["first"](torch.rand((1 << 21) + 1, 8))
        model["first"](torch.rand(4, 8))
        assert [len(one.args[0]) for one in passes.held] == [4]
        model["first"](torch.rand(4, 8)).exp().mean().backward()
        derivatives = monitor._session.backwards.derivatives
        assert len(derivatives.of(monitor.step_index)) == 1
    # remove()
    assert not passes.held and not derivatives.of(monitor.step_index)


@pytest.mark.parametrize("level", ["module", "op"])
def test_a_bad_batch_is_named_with_its_first_bad_element_and_row(level: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fastcheck.install(model, level=level), pytest.raises(fastcheck.OverflowDetected) as stop:
        for step in range(4):
            x = torch.randn(8, 6)
            if step == 2:
                x[5, 2], x[7, 0] = float("nan"), float("inf")
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    text = " ".join(str(stop.value).split())
    assert "first bad element of input[0] is [5, 2], in row 5: 2 of 8 rows hold" in text
    assert "look at the data, not at the model" in text


def _scaled(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(x.numpy() / x.numpy()[0, 0]) for name, x in batch.items()}


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("level", ["module", "op"])
def test_a_bad_batch_is_named_with_the_line_that_assigned_it(level: str) -> None:
    model = nn.Linear(6, 3)
    with fastcheck.install(model, level=level), pytest.raises(fastcheck.OverflowDetected) as stop:
        for read in (torch.ones(8, 6), torch.zeros(8, 6)):
            x = _scaled({"x": read})["x"]
            batch = [x, read]
            model(batch[0])
    made = stop.value.report.made_by
    assert made is not None and made.inputs == ()
    text = " ".join(str(stop.value).split())
    assert "Look at the lines that may have made it: it divides, and 0/0 is NaN" in text
    assert len(made.written) == 1 and " in _scaled: return {name: " in made.written[0]
    assert re.match(
        r"x, assigned at .*test_call_again.py:\d+ in test_\w+: x = _scaled\(", made.variable
    )


def test_of_a_bad_batch_that_is_read_from_another_the_first_is_named() -> None:
    model = nn.Linear(6, 3)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        batch = {"x": torch.ones(2, 6) / torch.zeros(6)}
        x = batch["x"] - 1
        model(x)
    made = stop.value.report.made_by
    assert made is not None and "x was assigned from batch (batch['x']), which" in made.how
    assert made.variable.startswith("batch['x']; batch is assigned at ")
    text = " ".join(str(stop.value).split())
    assert "1. Look at the line that assigns it: it divides" in text and "Usual" not in text


@pytest.mark.parametrize("level", ["module", "op"])
def test_of_a_bad_batch_of_which_no_variable_is_found_the_call_is_named(level: str) -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    with fastcheck.install(model, level=level), pytest.raises(fastcheck.OverflowDetected) as stop:
        # It lies deeper than variables are searched.
        read = {"batch": {"x": torch.full((1, 1), math.nan)}}
        model(read["batch"]["x"])
    made = stop.value.report.made_by
    assert made is not None and made.variable == ""
    assert f"The call is at {__file__}:" in made.how and ": model(" in made.how


class _Masked(nn.Module):
    """Attention to two keys, of which a mask rules out the second with -Inf, or both."""

    def __init__(self, is_whole: bool) -> None:
        super().__init__()
        self.is_whole, self.attend = is_whole, _Attend()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.tensor([-65504.0, -65504.0]).half()
        mask = mask + torch.tensor([-65504.0 if self.is_whole else 0.0, -65504.0]).half()
        return self.attend(x, mask)


class _Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(2, 2).half()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.out((x + mask).softmax(-1))


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_mask_that_did_no_harm_is_not_blamed(is_whole: bool) -> None:
    """Of the mask and the sum the one is, of which the NaN was computed."""
    model = _Masked(is_whole)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        model(torch.full((3, 2), -64.0).half())
    report = stop.value.report
    site, made = report.culprit.site, report.made_by
    assert made is not None
    if is_whole:
        assert (site.module, site.op, site.label) == ("attend", None, "input[1]")
        assert made.site is not None and made.site.module == ""
        return
    assert site == made.site
    assert (site.module, site.module_type, site.op) == ("attend", "_Attend", "aten.add.Tensor")
    assert str(stop.value).startswith("6 -Inf in output of aten.add.Tensor #1 in attend (_Attend)")
    assert "it made infinities beside those that it read" in report.culprit.reason
    assert [one.label for one, _ in report.inputs] == ["self", "other (aten.add.Tensor)"]
    assert [e.site for e in report.events if e.counted] == [site]
    # The log, and what reads it, have the same verdict.
    assert report.log_path is not None
    log = read_log(report.log_path)
    (event,) = (one for one in log.events if one.counted)
    assert (event.site, event.line, event.verdict) == (
        site,
        report.culprit.line,
        fastcheck.types.Verdict.ORIGIN,
    )
    shown = report_from_log(log, event, "fastcheck")
    assert shown is not None and headline(shown) == headline(report)
    assert [record["neginf_count"] for _, record in shown.inputs] == [0, 1]
    assert unpacked(packed(report)) is not None
