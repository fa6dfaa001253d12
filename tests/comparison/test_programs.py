"""What the report of two runs says of their programs: what one side was not given, does not clear,
has not loaded, or computes between its modules.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_value_  # by name, before install()
from torch.utils.checkpoint import checkpoint

import fastcheck
from fastcheck.cli.main import main


class Net(nn.Module):
    """``factor``: of what is computed between the first layer and the norm."""

    def __init__(self, tied: bool = False, factor: float = 1.0, act: nn.Module | None = None):
        super().__init__()
        self.first, self.act, self.last = nn.Linear(8, 8), act or nn.GELU(), nn.Linear(8, 8)
        self.norm, self.head, self.factor = nn.BatchNorm1d(8), nn.Linear(8, 4), factor
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.last(self.act(self.first(x)))
        made: torch.Tensor = self.head(self.norm(x + self.factor * x.square()))
        return made


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    data = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 8, generator=data), torch.randint(0, 4, (16,), generator=data))
        for _ in range(steps)
    ]


def train(
    log: Path,
    net: Callable[[], nn.Module] = Net,
    begin: Callable[[nn.Module, torch.optim.Optimizer], object] = lambda net, optimizer: None,
    at_step: Callable[[int, nn.Module], object] = lambda step, net: None,
    clip: Callable[[Any], object] = lambda parameters: None,
    data: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
    clears: bool = True,
    given: bool = True,
    calls: bool = True,
    saves: str = "",
    more: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss,
) -> str:
    """The directory of the log of some steps. ``saves``: where the third saves its state; ``more``:
    what the program makes of a loss.
    """
    torch.manual_seed(0)
    model, criterion = net(), nn.CrossEntropyLoss()
    opt = optimizer(model.parameters())
    begin(model, opt)
    loss_of = criterion if calls else nn.functional.cross_entropy
    with fastcheck.install(model, *[criterion][: int(given)], log_dir=log):
        for step, (x, y) in enumerate(batches(6) if data is None else data):
            at_step(step, model)
            if clears:
                opt.zero_grad()
            more(loss_of(model(x), y)).backward()
            clip(model.parameters())
            opt.step()
            if saves and step == 2:
                torch.save((model.state_dict(), opt.state_dict()), saves)
    return str(log)


def why(actual: str, reference: str) -> str:
    return " ".join(" ".join(fastcheck.compare(actual, reference).advice).split())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    return train(tmp_path_factory.mktemp("plain") / "log")


def shuffled(
    data: list[tuple[torch.Tensor, torch.Tensor]], per_batch: bool = False
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same samples in other batches; ``per_batch``: in another order within each."""
    if per_batch:
        return [(x.flip(0), y.flip(0)) for x, y in data]
    order = torch.randperm(16 * len(data), generator=torch.Generator().manual_seed(3)).split(16)
    x, y = (torch.cat(parts) for parts in zip(*data))
    return [(x[own], y[own]) for own in order]


def freeze(net: nn.Module) -> None:
    net.get_parameter("last.weight").requires_grad_(False)


def cumulative() -> nn.Module:
    net = Net()
    net.norm.momentum = None
    return net


def unaffine() -> nn.Module:
    net = Net()
    net.norm = nn.BatchNorm1d(8, affine=False)
    return net


def writing_to(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    """An AdamW that changes one of its parameters again."""
    place = [name for name, _ in Net().named_parameters()].index(name)

    class Writing(torch.optim.AdamW):
        def step(self, *given: Any) -> Any:
            super().step(*given)
            self.param_groups[0]["params"][place].data.mul_(1.01)

    Writing.__name__ = "AdamW"
    return Writing


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"given": False}, "CrossEntropyLoss was given to install() in reference alone: what it"),
        ({"calls": False}, "CrossEntropyLoss is called in reference, and not in actual"),
        ({"net": lambda: Net(act=nn.SiLU())}, "act is of class SiLU in actual and GELU in ref"),
        (
            {"net": lambda: Net(act=nn.Identity())},
            "act is of class Identity in actual and GELU in reference",
        ),
        ({"net": cumulative}, "norm.momentum is None in actual and 0.1 in reference"),
        ({"net": lambda: Net(tied=True)}, "last is in both, and has last.weight in reference alo"),
        (
            {"net": lambda: Net(factor=2.0)},
            "norm · forward · input[0] is nothing that an observed module has returned as it is: "
            "code between these modules computes it, after last · forward · output[0]",
        ),
        (
            {"begin": lambda net, _: freeze(net)},
            "from step 0 on reference alone has a gradient of last.weight: in actual the optimizer",
        ),
        (
            {"at_step": lambda step, net: freeze(net) if step == 3 else None},
            "from step 3 on reference alone has a gradient of last.weight: in actual the optimizer",
        ),
        ({"clears": False}, "of actual are the sums of those of this step and of the step before"),
        (
            {"at_step": lambda step, net: net.train(step < 3)},
            "norm.running_mean stays as it was in actual, and moves on the other side: norm runs",
        ),
        (
            {"at_step": lambda step, net: net.eval()},
            "norm.running_mean stays as it was in actual, and moves on the other side: norm runs",
        ),
        (
            {"begin": lambda net, _: net.last.weight.register_hook(lambda grad: grad / 2)},
            "it is the only gradient of a parameter that differs in that step, of 8: look at what",
        ),
        (
            {"data": [batches(6)[place] for place in (0, 1, 4, 3, 2, 5)]},
            "that of step 2 in actual is that of step 4 in reference. Of the 2 that differ, 2 are",
        ),
        (
            {"data": shuffled(batches(6)[:4]) + batches(6)[4:]},
            "the batches of steps 0 to 3, taken together, have the same counts, extremes and sums",
        ),
        (
            {"data": [*batches(2), batches(9)[8], *batches(5)[2:]]},
            "that of step 3 in actual is that of step 2 in reference, and so on, so actual has 1 "
            "more before it (drop_last=, a batch that is taken twice or left out)",
        ),
        (
            {"data": [*batches(2), *batches(7)[3:]]},
            "that of step 2 in actual is that of step 3 in reference, and so on, so reference has",
        ),
        (
            {"at_step": lambda step, net: step == 3 and net(batches(1)[0][0])},
            "step 3 has more batches in actual (the model · forward · input[0]): a call that the",
        ),
        (
            {"net": unaffine},
            "norm is in both, and has norm.weight in reference alone. In actual it is shared with "
            "another module (tied weights), has another name, or is not there. norm.affine is",
        ),
        (
            {"optimizer": writing_to("head.weight")},
            "gradients and settings agree: the optimizer computes something else, or something "
            "else writes to it. 7 other weights are equal to the bit in that step",
        ),
        (
            {"at_step": lambda step, net: net.head.weight.data.add_(step == 3)},
            "look for what begins there (code that writes to it, state that comes into play",
        ),
    ],
)
def test_the_cause_is_named(options: dict[str, Any], text: str, plain: str, tmp_path: Path) -> None:
    assert text in why(train(tmp_path / "log", **options), plain)


def test_a_hook_that_changes_an_input_is_looked_for(plain: str, tmp_path: Path) -> None:
    def round_inputs(net: nn.Module, _: object) -> None:
        net.get_submodule("last").register_forward_pre_hook(
            lambda _, args: args[0].bfloat16().float()
        )

    told = why(train(tmp_path / "log", begin=round_inputs), plain)
    assert "in actual alone last reads input[0] as a tensor of its own; in reference it" in told
    assert "formula" not in told
    assert "alone: last · forward" not in str(fastcheck.compare(tmp_path / "log", plain))


def test_other_batches_are_in_no_other_order(plain: str, tmp_path: Path) -> None:
    assert not why(train(tmp_path / "log", data=[(x + 0.1, y) for x, y in batches(6)]), plain)


@pytest.mark.parametrize(
    "data",
    [
        shuffled(batches(6), per_batch=True),
        shuffled(batches(7))[:6],
        [(x, 3 - y) for x, y in batches(6)],
        [(torch.where(x.abs() < 1, x * 1.01, x), y) for x, y in shuffled(batches(6))],
        [(x.sign(), y) for x, y in shuffled(batches(6))],
    ],
)
def test_other_samples_and_another_order_within_batches_are_not_shuffled(
    data: list[tuple[torch.Tensor, torch.Tensor]], plain: str, tmp_path: Path
) -> None:
    actual = train(tmp_path / "log", data=data)
    if float(data[0][0].abs().min()) == 1:  # of two values: their sums may be equal by chance
        plain = train(tmp_path / "signs", data=[(x.sign(), y) for x, y in batches(6)])
    assert fastcheck.compare(actual, plain)["batches"].answer == "no"
    assert "taken together" not in why(actual, plain)


def test_modules_in_each_others_place_are_named(tmp_path: Path) -> None:
    def net(*classes: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(nn.Linear(8, 8), *(k() for k in classes), nn.Linear(8, 4))

    none = functools.partial(nn.Dropout, 0.0)
    sides = train(tmp_path / "a", net=net(none, nn.ReLU)), train(tmp_path / "b", net(nn.ReLU, none))
    assert "1 is of class Dropout in actual and ReLU in reference" in why(*sides)


def test_a_second_update_in_each_step_shifts_no_steps(tmp_path: Path) -> None:
    held: list[torch.optim.Optimizer] = []

    def step(step: int, net: nn.Module) -> None:
        if step > 0:  # that of the step before, again
            held[0].step()

    def net() -> nn.Module:
        """Its norms have equal weights until the first update."""
        norms = [nn.LayerNorm(8) for _ in range(4)]
        return nn.Sequential(nn.Linear(8, 8), *norms, nn.Linear(8, 4))

    def begin(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        held[:] = [optimizer]

    reference = train(tmp_path / "reference", net=net)
    actual = train(tmp_path / "log", net=net, begin=begin, at_step=step)
    comparison = fastcheck.compare(actual, reference)
    assert comparison.steps == (0, 1, 2, 3, 4, 5) and comparison["batches"].answer == "yes"
    more = "from step 0 on an optimizer updates more often within a step in"
    assert f"{more} actual" in why(actual, reference)
    assert f"{more} reference" in why(reference, actual)


def test_a_dropout_that_draws_other_numbers_is_named(tmp_path: Path) -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4))

    def draw(step: int, net: nn.Module) -> None:
        torch.rand(1 if step == 3 else 0)

    sides = train(tmp_path / "log", net=net, at_step=draw), train(tmp_path / "plain", net=net)
    comparison = fastcheck.compare(*sides)
    assert comparison.first is not None and comparison.first.row.step == 3
    assert "1 (Dropout) draws random numbers: look at the seeds" in why(*sides)
    other = train(tmp_path / "other", net=net, begin=lambda net, _: setattr(net[1], "p", 0.2))
    assert "1.p is 0.2" in why(other, sides[1]) and "random numbers" not in why(other, sides[1])


def test_what_the_model_alone_returns_is_before_the_loss(plain: str, tmp_path: Path) -> None:
    class Twice(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).softmax(-1)

    first = fastcheck.compare(train(tmp_path / "log", net=Twice), plain).first
    assert first is not None and first.row.name.startswith("CrossEntropyLoss")
    assert first.alone == (("the model · forward · output[0]",), ())


def test_a_weight_is_counted_once(plain: str, tmp_path: Path) -> None:
    def change(net: nn.Module, _: object) -> None:
        net.get_parameter("head.bias").data.add_(1)

    comparison = fastcheck.compare(train(tmp_path / "log", begin=change), plain)
    assert comparison["initial weights"].text == "1 of 11 tensors differ"


def test_a_weight_that_is_written_to_before_its_first_update_is_no_initial_weight(
    plain: str, tmp_path: Path
) -> None:
    seen: list[object] = []

    def write(parameters: Iterator[nn.Parameter]) -> None:
        weight = next(parameters)
        if not seen:
            weight.data.mul_(1.01)
        seen.append(weight)

    comparison = fastcheck.compare(train(tmp_path / "log", clip=write), plain)
    assert comparison["initial weights"].answer == "yes"
    assert comparison["update"].found.row.name == "first · optimizer · first.weight"
    told = " ".join(comparison.advice)
    assert "the weights of step 0 are equal to the bit when it begins, and not when" in told
    assert "computes something else" not in told


@pytest.mark.parametrize("rate", [0.001, 0.01])
def test_rates_of_groups_that_are_added_later_are_those_of_their_step(
    rate: float, tmp_path: Path
) -> None:
    def grown(*groups: dict[str, Any]) -> str:
        held: list[torch.optim.Optimizer] = []

        def grow(step: int, net: nn.Module) -> None:
            for group in groups if step == 3 else ():
                own = [net.get_parameter(name) for name in group["params"]]
                held[0].add_param_group({**group, "params": own})

        return train(
            tmp_path / str(len(groups)),
            begin=lambda _, optimizer: held.append(optimizer),
            at_step=grow,
            optimizer=lambda parameters: torch.optim.AdamW(list(parameters)[:-2]),
        )

    names = ["head.weight", "head.bias"]
    whole = grown({"params": names})
    comparison = fastcheck.compare(grown(*({"params": [n], "lr": rate} for n in names)), whole)
    if rate == 0.001:
        assert comparison.is_identical and "divided in another way" in comparison.notes[0]
    else:
        assert comparison.first is not None and comparison.first.row.step == 3


def test_an_embedding_of_ones_own_is_no_other_index(tmp_path: Path) -> None:
    class Scaled(nn.Embedding):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 4

    def sides(kind: type[nn.Embedding], hook: float = 1.0) -> str:
        def net() -> nn.Module:
            made = nn.Sequential(kind(9, 8), nn.Flatten(), nn.Linear(16, 4))
            if hook != 1:
                made[0].register_forward_hook(lambda module, given, rows: rows * hook)
            return made

        data = [(x[:, :2].abs().long(), y) for x, y in batches(3)]
        return train(tmp_path / f"{kind.__name__}{hook}", net=net, data=data)

    reference = sides(nn.Embedding)
    for actual in (sides(Scaled), sides(nn.Embedding, 4.0)):
        told = why(actual, reference)
        assert "looks up rows" not in told and not fastcheck.compare(actual, reference)


class Skipping(Net):
    """One of its layers has no part in the third step."""

    count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        x = self.act(self.first(x))
        made: torch.Tensor = self.head(self.norm(x if self.count == 3 else x + self.last(x)))
        return made


def test_zeros_in_place_of_no_gradient_are_told(tmp_path: Path) -> None:
    class Keeping(torch.optim.AdamW):
        def zero_grad(self, set_to_none: bool = False) -> None:
            super().zero_grad(set_to_none=False)

    Keeping.__name__ = "AdamW"
    logs = [
        train(tmp_path / kind.__name__ / str(place), net=Skipping, optimizer=kind)
        for place, kind in enumerate((Keeping, torch.optim.AdamW))
    ]
    told = why(*logs)
    assert "in 1 step, 2 first, actual alone has a gradient of last.weight, all zeros" in told
    assert "fault of the hardware" not in told


def test_what_the_program_makes_of_a_loss_is_looked_at(plain: str, tmp_path: Path) -> None:
    told = why(train(tmp_path / "log", more=lambda loss: loss + 0.1), plain)
    assert "what comes before the loss is equal to the bit, up to CrossEntropyLoss" in told


def test_growth_has_no_error_that_is_relative_to_zeros(plain: str, tmp_path: Path) -> None:
    def freeze_norm(net: Any, _: object) -> None:
        net.norm.eval()

    growth = fastcheck.compare(plain, train(tmp_path / "log", begin=freeze_norm)).growth
    assert growth and all(step.error < 1e290 for step in growth)


class Taught(Net):
    """A layer of it follows another."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = super().forward(x) + self.teacher(x)
        return made


def test_a_weight_that_no_optimizer_updates_is_looked_at(tmp_path: Path) -> None:
    def follow(decay: float) -> str:
        def at_step(step: int, net: Any) -> None:
            if step > 1:
                net.teacher.weight.data.lerp_(net.head.weight.data, 1 - decay)

        def trained(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.AdamW([one for one in parameters if one.requires_grad])

        return train(tmp_path / str(decay), net=Taught, at_step=at_step, optimizer=trained)

    told = why(follow(0.9), follow(0.8))
    assert "a log has teacher.weight of the first step alone, since no optimizer updates it" in told
    assert "look for what begins there" not in told


def test_an_optimizer_of_another_model_is_told(plain: str, tmp_path: Path) -> None:
    def copied(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([one.detach().clone().requires_grad_() for one in parameters])

    logs = train(tmp_path / "log", optimizer=copied), plain
    assert "optimizers[0] of actual holds none of the model's parameters" in why(*logs)
    assert "optimizers[0] of reference holds none" in why(*logs[::-1])


class OtherAdamW(torch.optim.AdamW):
    pass


def test_settings_that_change_nothing_are_offered(plain: str, tmp_path: Path) -> None:
    actual = train(tmp_path / "log", optimizer=OtherAdamW)
    advice = "--accept hyper-parameters compares what they have computed"
    assert f"{advice}, which agrees" in why(actual, plain)
    assert fastcheck.compare(actual, plain, accept="hyper-parameters")
    faster = why(train(tmp_path / "fast", optimizer=lambda p: torch.optim.AdamW(p, 2e-3)), plain)
    assert advice in faster and "which agrees" not in faster


def test_settings_of_the_module_of_an_initial_weight_are_told(plain: str, tmp_path: Path) -> None:
    def change(net: Any, _: object) -> None:
        net.norm.momentum = 0.2
        net.norm.running_mean.add_(1)

    told = why(train(tmp_path / "log", begin=change), plain)
    assert "norm.momentum is 0.2 in actual and 0.1 in reference" in told


def test_a_rate_that_changes_where_the_updates_part_is_told(tmp_path: Path) -> None:
    def sides(power: float, at: int) -> str:
        held: list[Any] = []

        class Rated(torch.optim.SGD):
            @torch.no_grad()
            def step(self, closure: Any = None) -> None:
                for group in self.param_groups:
                    for parameter in group["params"]:
                        rate = 0.1 * (group["lr"] / 0.1) ** power
                        parameter.sub_(rate * parameter.grad)

        def at_step(step: int, net: nn.Module) -> None:
            held[0].param_groups[0]["lr"] = 0.1 if step < at else 0.01

        return train(
            tmp_path / f"{power} {at}",
            begin=lambda _, optimizer: held.append(optimizer),
            at_step=at_step,
            optimizer=lambda parameters: Rated(parameters, 0.1),
        )

    told = "in that step optimizers[0].groups[0].lr is changed for the first time, from 0.1 to 0.01"
    assert told in why(sides(2.0, 3), sides(1.0, 3))
    # A second step has a momentum for the first time.
    assert told not in why(sides(2.0, 1), sides(1.0, 1))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.embedding(x) - 2 * self.embedding(y))
        return made.flatten(0, 1)


@pytest.mark.parametrize(
    ("order", "text"),
    [
        ((1, 0, 2), "input[0] and the model · forward · input[1] are in each other's place in st"),
        ((0, 1, 0), "input[1] of actual is the model · forward · input[0] of both sides (targets"),
        ((0, 2, 2), "input[1] of actual is CrossEntropyLoss · forward · input[1] of both sides ("),
        ((0, 3, 2), ""),
    ],
)
def test_an_input_in_the_place_of_another_is_told(
    order: tuple[int, int, int], text: str, tmp_path: Path
) -> None:
    def fit(*order: int) -> str:
        torch.manual_seed(0)
        net, criterion = Pair(), nn.CrossEntropyLoss()
        update = torch.optim.SGD(net.parameters(), 0.1)
        data = torch.Generator().manual_seed(1)
        with fastcheck.install(net, criterion, log_dir=tmp_path / str(order)):
            for _ in range(3):
                given = [torch.randint(0, 9, (4, 6), generator=data) for _ in range(4)]
                x, y, labels = (given[place].clone() for place in order)
                update.zero_grad()
                criterion(net(x, y), labels.flatten()).backward()
                update.step()
        return str(tmp_path / str(order))

    told = why(fit(*order), fit(0, 1, 2))
    assert text in told if text else "in step 0" not in told


def test_a_norm_of_a_batch_in_other_parts_has_other_means(tmp_path: Path) -> None:
    def fit(parts: int) -> str:
        torch.manual_seed(0)
        net, criterion = Net(), nn.CrossEntropyLoss()
        update = torch.optim.SGD(net.parameters(), 0.1)
        with fastcheck.install(net, criterion, log_dir=tmp_path / str(parts)):
            for x, y in batches(3):
                update.zero_grad()
                for one, labels in zip(x.chunk(parts), y.chunk(parts)):
                    (criterion(net(one), labels) / parts).backward()
                update.step()
        return str(tmp_path / str(parts))

    assert "norm (BatchNorm1d) takes the mean and the variance of each part" in why(fit(2), fit(1))


def test_other_batches_after_a_resume_leave_the_buffers_as_they_were(tmp_path: Path) -> None:
    saved = str(tmp_path / "saved.pt")
    whole = train(tmp_path / "whole", saves=saved)

    data = [(x + 1, y) for x, y in batches(6)[3:]]
    actual = train(tmp_path / "log", begin=load(saved, lambda _: None), data=data)
    comparison = fastcheck.compare(actual, whole)
    assert comparison.steps == (3, 4, 5) and comparison["batches"].answer == "no"
    assert comparison["initial weights"].answer == "yes"


def test_gradients_of_zeros_are_said(plain: str, tmp_path: Path) -> None:
    def clear(parameters: Any) -> None:
        for parameter in parameters:
            parameter.grad.zero_()

    sides = train(tmp_path / "log", clip=clear), plain
    assert "all zeros in actual" in str(fastcheck.compare(*sides))
    assert "all zeros in reference" in str(fastcheck.compare(*sides[::-1]))


def test_a_weight_that_the_optimizer_lacks_is_in_both_models(plain: str, tmp_path: Path) -> None:
    def without(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(list(parameters)[:-2])

    actual = train(tmp_path / "log", optimizer=without)
    assert not fastcheck.compare(actual, plain)
    assert "is in both" not in why(actual, plain)


def test_a_step_within_a_step_of_the_same_optimizer_is_one_update(
    plain: str, tmp_path: Path
) -> None:
    class Steps(torch.optim.AdamW):
        """Its step calls that of a class that has stepped by itself."""

        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    Steps.__name__ = "AdamW"
    assert fastcheck.compare(train(tmp_path / "log", optimizer=Steps), plain).is_identical


def test_a_dropout_in_eval_mode_is_called(tmp_path: Path) -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4))

    reference = train(tmp_path / "reference", net=net)
    told = why(train(tmp_path / "log", net=net, begin=lambda net, _: net.eval()), reference)
    assert "1.training is False" in told or "the model.training is False in actual" in told
    assert "not in actual" not in told and "does not call it" not in told


def load(saved: str, changes: Callable[[dict[str, Any]], object] | None) -> Callable[..., None]:
    """Loads the weights, and the optimizer's state as ``changes`` leaves it (None: no state)."""

    def begin(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        weights, state = torch.load(saved)
        net.load_state_dict(weights)
        if changes is not None:
            for held in state["state"].values():
                changes(held)
            optimizer.load_state_dict(state)

    return begin


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (None, "began without state, and reference had run 3 steps by then: its state was not"),
        (
            lambda held: held["step"].zero_(),
            "began with a state of 8 of its 8 parameters and step counts of 0, and reference had "
            "run 3 steps by then: its step counts start again",
        ),
        (lambda held: held["exp_avg"].zero_(), "so look at the rest of the optimizer's state"),
    ],
)
def test_the_state_of_an_optimizer_that_was_not_restored(
    changes: Callable[[dict[str, Any]], object] | None, text: str, tmp_path: Path
) -> None:
    saved = str(tmp_path / "saved.pt")
    whole = train(tmp_path / "whole", saves=saved)
    begin, rest = load(saved, changes), batches(6)[3:]
    resumed = train(tmp_path / "resumed", begin=begin, data=rest)
    assert text in why(resumed, whole)
    perfect = train(tmp_path / "perfect", begin=load(saved, lambda held: None), data=rest)
    assert fastcheck.compare(perfect, whole).is_identical
    # Two runs that both continue: neither is paired with a later step of the other.
    if changes is None:
        told = why(resumed, perfect)
        assert "began without state in actual, and with a state of 8 of its 8 parameters" in told


def test_plain_sgd_keeps_no_state(tmp_path: Path) -> None:
    def sgd(momentum: float) -> Callable[[Any], torch.optim.Optimizer]:
        return lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=momentum)

    saved = str(tmp_path / "saved.pt")
    for momentum, is_told in ((0.0, False), (0.9, True)):
        whole = train(tmp_path / f"whole{momentum}", saves=saved, optimizer=sgd(momentum))

        def spoil(step: int, net: nn.Module) -> None:
            if step == 1:
                net.get_parameter("head.weight").data.mul_(2)

        options: dict[str, Any] = {"begin": load(saved, None), "data": batches(6)[3:]}
        options.update(optimizer=sgd(momentum), at_step=spoil)
        told = why(train(tmp_path / f"resumed{momentum}", **options), whole)
        assert ("its state was not loaded" in told) is is_told


def test_clipping_by_value_that_was_imported_by_name(tmp_path: Path) -> None:
    sides = [
        train(tmp_path / str(value), clip=lambda p, value=value: clip_grad_value_(p, value))
        for value in (0.01, 0.02)
    ]
    answer = fastcheck.compare(*sides)["hyper-parameters"]
    assert [tuple(setting) for setting in answer.settings] == [
        ("clipping.value from step 0 on", "0.01", "0.02")
    ]


@pytest.mark.parametrize("content", ["{", "[1]", None])
def test_a_meta_file_that_cannot_be_read_is_named(
    content: str | None, plain: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = train(tmp_path / "log")
    meta = Path(log, "meta-rank0.json")
    assert isinstance(json.loads(meta.read_text()), dict)
    meta.unlink() if content is None else meta.write_text(content)
    comparison = fastcheck.compare(log, plain)
    assert comparison["environment"].answer == "unknown"
    main(["show", log])
    for text in (" ".join(str(comparison).split()), capsys.readouterr().out):
        assert ("meta-rank0.json can't be read: " in text) is (content is not None)


def test_another_norm_of_clipping_is_told(tmp_path: Path) -> None:
    logs = [
        train(
            tmp_path / str(kind),
            clip=lambda parameters, kind=kind: nn.utils.clip_grad_norm_(parameters, 0.1, kind),
        )
        for kind in (float("inf"), 2.0)
    ]
    assert "what clipping reads differs: gradients of other parameters, another" in why(*logs)


@pytest.mark.parametrize("limit", [0.1, 0.2])
def test_clipping_that_is_written_out_is_compared(limit: float, tmp_path: Path) -> None:
    def clip(parameters: Any) -> None:
        grads = [parameter.grad for parameter in parameters]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for grad in grads:
            grad.mul_((limit / (norm + 1e-6)).clamp(max=1))

    actual = train(tmp_path / "a", clip=clip)
    reference = train(
        tmp_path / "b", clip=lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1)
    )
    for sides in (actual, reference), (reference, actual):
        comparison = fastcheck.compare(*sides, accept=("hyper-parameters", "missing"))
        assert comparison.agrees == (limit == 0.1)
        noted = "gradients of parameters are read before they are clipped in" in str(comparison)
        assert noted == (limit == 0.1)
        advice = "--accept hyper-parameters --accept missing compares what they have computed, whi"
        assert (advice in why(*sides)) == (limit == 0.1)


class Recomputing(nn.Module):
    keeps = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 4)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.dropout(self.first(x).relu())
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = checkpoint(self.part, x, use_reentrant=False, preserve_rng_state=self.keeps)
        found: torch.Tensor = self.last(made)
        return found


class Keeping(Recomputing):
    keeps = True


def test_a_mask_that_is_drawn_again_in_backward_is_told(tmp_path: Path) -> None:
    actual = train(tmp_path / "a", net=Recomputing)
    reference = train(tmp_path / "b", net=Keeping)
    told = why(actual, reference)
    assert "dropout (Dropout) makes another gradient of what is equal to the bit: its mask" in told


@pytest.mark.parametrize(
    ("rate", "hooked", "change"),
    [(0.3, "dropout", lambda grad: grad * 2), (0.0, "last", lambda grad: grad.clamp(-1e-3))],
)
def test_a_gradient_that_a_hook_changes_is_no_mask(
    rate: float, hooked: str, change: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    def side(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> str:
        def begin(net: nn.Module, _: torch.optim.Optimizer) -> None:
            net.get_submodule("dropout").p = rate
            net.get_submodule(hooked).register_full_backward_hook(
                lambda module, given, _: (change(given[0]),)
            )

        return train(tmp_path / name, net=Keeping, begin=begin)

    told = fastcheck.compare(side("a", change), side("b", lambda grad: grad))
    assert told.first is not None and told.first.row.name.startswith("dropout · backward")
    assert "its mask" not in str(told)


def test_the_criteria_of_both_sides_are_named(plain: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, criterion = Net(), nn.MultiMarginLoss()
    optimizer = torch.optim.AdamW(net.parameters())
    with fastcheck.install(net, criterion, log_dir=tmp_path / "log"):
        for x, y in batches(6):
            optimizer.zero_grad()
            criterion(net(x), y).backward()
            optimizer.step()
    told = why(str(tmp_path / "log"), plain)
    assert "the criterion is MultiMarginLoss in actual and CrossEntropyLoss in reference" in told
    assert "was given to install()" not in told


@pytest.mark.parametrize(("factor", "is_told"), [(2.0, True), (1.0, False)])
def test_what_a_forward_makes_of_its_modules_is_told(
    factor: float, is_told: bool, plain: str, tmp_path: Path
) -> None:
    class Scaled(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * factor

    told = why(train(tmp_path / "log", net=Scaled), train(tmp_path / "b", net=Doubled))
    assert ("the modules in the model return what is equal to the bit: its" in told) == is_told


class Doubled(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 1.0


def test_optimizers_that_step_in_another_order_are_told(tmp_path: Path) -> None:
    def fit(*order: int) -> str:
        torch.manual_seed(0)
        net, criterion = Net(), nn.CrossEntropyLoss()
        parameters = list(net.parameters())
        updates = [torch.optim.SGD(own, 0.1) for own in (parameters[:2], parameters[2:])]
        with fastcheck.install(net, criterion, log_dir=tmp_path / str(order)):
            for x, y in batches(3):
                net.zero_grad()
                criterion(net(x), y).backward()
                for place in order:
                    updates[place].step()
        return str(tmp_path / str(order))

    text = "the optimizers hold the same parameters in another order: they are numbered in the"
    assert text in why(fit(1, 0), fit(0, 1))


def test_a_dropout_that_falls_silent_is_no_fault_of_the_hardware(tmp_path: Path) -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4))

    def at_step(step: int, net: nn.Module) -> None:
        net.train(step < 3)

    logs = train(tmp_path / "a", net=net, at_step=at_step), train(tmp_path / "b", net=net)
    told = why(*logs)
    assert "was equal to the bit in the steps before" in told and "hardware" not in told


def test_no_setting_is_offered_where_names_are_others(plain: str, tmp_path: Path) -> None:
    def renamed() -> nn.Module:
        net = Net()
        net.last_one, net.last = net.last, nn.Identity()
        net.act = nn.Sequential(net.act, net.last_one)
        del net.last_one
        return net

    actual = train(tmp_path / "log", net=renamed)
    text = str(fastcheck.compare(actual, plain))
    assert "give rename=" in text and "--accept hyper-parameters" not in text
