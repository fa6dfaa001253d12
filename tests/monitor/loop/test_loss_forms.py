"""Tests of losses that are no loss for what they are given, by their graph."""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastcheck
from support.told import loss, texts
from support.warned import warned


def texts_of_term(make: Callable[[torch.Tensor], torch.Tensor]) -> list[str]:
    """What is told of a loss one term of which is made of the model's result."""

    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        y = model(torch.randn(8, 8))
        (make(y) + y.square().mean()).backward()
        optimizer.step()

    return texts(program, 40)


@pytest.mark.parametrize("is_twice", [False, True])
def test_a_softmax_of_a_softmax(is_twice: bool) -> None:
    """transformers#45120: the balancing loss of a router that returns its probabilities."""

    def program(model: nn.Module, optimizer: Any) -> None:
        logits = model(torch.randn(8, 8))
        routed = logits.softmax(-1)
        chosen = torch.nn.functional.one_hot(routed.argmax(-1), 4).float().mean(0)
        balance = (routed if is_twice else logits).view(2, 4, 4).softmax(-1).mean((0, 1))
        optimizer.zero_grad()
        (routed.square().mean() + (chosen * balance).sum()).backward()
        optimizer.step()

    found = texts(program, 40, may_warn=False)
    assert len(found) == is_twice
    assert all("a softmax is given the result of softmax" in text for text in found)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda y: torch.nn.functional.cross_entropy(y[:, :1], torch.zeros(8).long()), "one class"),
        (lambda y: F.nll_loss(F.log_softmax(y[:, :1], -1), torch.zeros(8).long()), "one class"),
        (lambda y: torch.nn.functional.cross_entropy(y, torch.zeros(8).long()), ""),
        (lambda y: F.binary_cross_entropy(y[:, :1].softmax(1), torch.ones(8, 1)), "softmax over"),
        (lambda y: F.mse_loss(y[:, :1].softmax(-1).squeeze(1), torch.ones(8)), "softmax over"),
        (lambda y: F.mse_loss(y.softmax(-1), torch.ones(8, 4)), ""),
        (lambda y: F.binary_cross_entropy(y.softmax(0)[:, :1], torch.ones(8, 1)), ""),
        (lambda y: torch.nn.functional.layer_norm(y[:, :1], (1,)).square().mean(), "layer_norm"),
        (lambda y: torch.nn.functional.layer_norm(y, (4,)).square().mean(), ""),
        (lambda y: torch.nn.functional.group_norm(y, 4).square().mean(), "group_norm"),
        (lambda y: torch.nn.functional.group_norm(y, 2).square().mean(), ""),
    ],
)
def test_a_function_of_one_element(make: Any, found: str) -> None:
    said = texts_of_term(make)
    assert len(said) == bool(found) and all(found in text for text in said)


@pytest.mark.parametrize(
    ("make", "is_other"),
    [
        (lambda y, t: F.nll_loss(F.log_softmax(y, 0), t), True),
        (lambda y, t: F.nll_loss(F.log_softmax(y, -2), t), True),
        (lambda y, t: F.nll_loss(F.softmax(y, 0).log(), t), True),
        (lambda y, t: F.nll_loss(F.log_softmax(y, 0)[torch.arange(6)], t[:6]), True),
        (lambda y, t: F.nll_loss(F.log_softmax(y, 1)[torch.arange(6)], t[:6]), False),
        (lambda y, t: F.nll_loss(F.log_softmax(y, -1), t), False),
        (lambda y, t: F.nll_loss(F.log_softmax(y.view(8, 4, 1, 1), -3), t.view(8, 1, 1)), False),
        (lambda y, t: -F.log_softmax(y, 0).gather(1, t[:, None]).mean(), True),
        (lambda y, t: -(F.log_softmax(y, 0) * F.one_hot(t, 4)).sum(1).mean(), True),
        (lambda y, t: -F.log_softmax(y, -1).gather(1, t[:, None]).mean(), False),
        (lambda y, t: -(F.one_hot(t, 4) * F.log_softmax(y, 1)).sum(1).mean(), False),
        # Each column is one list, as of a ranking, and one weight is that of several.
        (lambda y, t: -F.log_softmax(y, 0).gather(0, t[None, :1]).mean(), False),
        (lambda y, t: -(torch.ones(8, 4) / 8 * F.log_softmax(y, 0)).sum(), False),
        (lambda y, t: (F.log_softmax(y, 0) * torch.ones(4)).mean(), False),
        # Of a square, each column may be what is normalised, as of pairs.
        (lambda y, t: F.nll_loss(F.log_softmax(y[:4], 0), torch.arange(4)), False),
    ],
)
def test_a_softmax_over_another_dimension_than_that_of_the_classes(
    make: Any, is_other: bool
) -> None:
    """pytorchfundamentals#21."""

    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        make(model(torch.randn(8, 8)), torch.arange(8) % 4).backward()
        optimizer.step()

    said = texts(program, 40)
    assert len(said) == is_other
    assert all("taken over dimension 0" in text and "dim=1 for nll_loss" in text for text in said)


def _targets(target: torch.Tensor, scale: float) -> torch.Tensor:
    return F.one_hot(target, 4) * scale


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda y, t: F.nll_loss(y - 5, t), ""),
        (lambda y, t: F.nll_loss(y + 5, t), "log_softmax"),
        (lambda y, t: F.nll_loss(y + 5, t) / 4, "log_softmax"),
        (lambda y, t: F.nll_loss(y + 5, t, reduction="none").mean(), "log_softmax"),
        (lambda y, t: F.nll_loss(F.log_softmax(y, 1), t), ""),
        (lambda y, t: F.binary_cross_entropy_with_logits(y - 5, _targets(t, -255.0)), "targets"),
        (lambda y, t: F.binary_cross_entropy_with_logits(y + 5, _targets(t, 255.0)), "targets"),
        (lambda y, t: F.binary_cross_entropy_with_logits(y, _targets(t, 1.0)), ""),
        # The rest of a cross entropy, and the ascent of a loss.
        (lambda y, t: F.nll_loss(y, t) + y.logsumexp(1).mean(), ""),
        (lambda y, t: -F.cross_entropy(y, t), ""),
        (lambda y, t: -0.1 * F.cross_entropy(y, t), ""),
    ],
)
@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_loss_below_0_that_is_never_below_0(make: Any, found: str, is_scaled: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=is_scaled)

    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        scaler.scale(make(model(torch.randn(8, 8)), torch.arange(8) % 4)).backward()
        scaler.step(optimizer)
        scaler.update()

    said = texts(program, 15)
    assert len(said) == bool(found)
    assert all("the loss is -" in text and found in text for text in said)


@pytest.mark.parametrize("is_zeroed", [False, True])
def test_a_ctc_loss_of_logits(is_zeroed: bool) -> None:
    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        logits = 0.1 * model(torch.randn(6, 2, 8)) + 1
        lengths = torch.full((2,), 6), torch.full((2,), 2)
        targets = torch.tensor([[1, 2], [3, 1]])
        F.ctc_loss(logits, targets, *lengths, zero_infinity=is_zeroed).backward()
        optimizer.step()

    (said,) = texts(program, 15)
    assert "log_softmax may be missing" in said


def test_a_loss_of_two_optimizers_is_not_that_of_one() -> None:
    """What the other maximises is in the loss of the step."""
    other: list[Any] = []

    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(8, 8)), torch.arange(8) % 4).backward()
        optimizer.step()
        other[:] = other or [torch.optim.SGD([model[0].bias], 1e-9)]
        (-loss(model) - 100).backward()
        other[0].step()

    assert not [text for text in texts(program, 40) if "below 0" in text]


_KEPT = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("make", "is_made"),
    [
        (lambda y: nn.Linear(4, 4)(y), True),
        (lambda y: nn.Conv1d(1, 4, 3)(y[:, None]), True),
        (lambda y: _KEPT(y), False),
        (lambda y: F.linear(y, torch.randn(4, 4, requires_grad=True)), False),
        (lambda y: F.linear(y, torch.randn(4, 4)), False),
        (lambda y: y + nn.Parameter(torch.zeros(8, 4)), False),
    ],
)
def test_a_layer_that_forward_makes(make: Any, is_made: bool) -> None:
    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        make(model(torch.randn(8, 8))).square().mean().backward()
        optimizer.step()

    said = texts(program, 60)
    assert len(said) == is_made
    assert all("1 of 3 weight matrices ([4, " in text for text in said)


def test_a_copy_that_is_trained_by_itself_is_no_layer_of_forward() -> None:
    """An inner loop on a copy of the model, as in first-order MAML."""

    def program(model: nn.Module, optimizer: Any) -> None:
        inner = copy.deepcopy(model)
        optimizer.zero_grad()
        loss(inner).backward()
        for own, made in zip(model.parameters(), inner.parameters()):
            own.grad = made.grad
        optimizer.step()

    assert not [text for text in texts(program, 60) if "made anew" in text]


@pytest.mark.parametrize(
    ("difference", "is_broadcast"),
    [
        (lambda y, t: y.sum(1, True) - t, True),
        (lambda y, t: t - y.sum(1, True), True),
        (lambda y, t: y.sum(1, True).squeeze(1) - t[:, None], True),
        (lambda y, t: y.sum(1, True) + t, True),
        (lambda y, t: y.sum(1, True)[None] - t[None], True),
        (lambda y, t: y.sum(1) - t, False),
        # Each with each, as it is written.
        (lambda y, t: y.sum(1)[:, None] - t, False),
        # Several targets, and several results for one.
        (lambda y, t: y.sum(1, True) - torch.zeros(8, 3), False),
        (lambda y, t: y - t[:, None], False),
        # Results that are compared among themselves.
        (lambda y, t: y.sum(1, True) - y.sum(1), False),
    ],
)
@pytest.mark.parametrize("size", [torch.square, torch.abs])
def test_a_result_that_is_broadcast_against_its_target(
    difference: Any, is_broadcast: bool, size: Any
) -> None:
    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        size(difference(model(torch.randn(8, 8)), torch.randn(8))).mean().backward()
        optimizer.step()

    said = texts(program, 40)
    assert len(said) == is_broadcast
    assert all(re.search(r"was broadcast to \[(1, )?8, 8\].*same shape", text) for text in said)


def _huber(error: torch.Tensor) -> torch.Tensor:
    return torch.where(error.abs() < 1, 0.5 * error**2, error.abs() - 0.5)


@pytest.mark.parametrize(
    ("make", "is_broadcast"),
    [
        (lambda y, t: _huber(y.sum(1, True) - t), True),
        (lambda y, t: (y.sum(1, True) - t) ** 2 + (y.mean(1, True) - t).pow(2), True),
        (lambda y, t: 0.5 * (y[:, 0] + y[:, 1] - t[:, None]) ** 2, True),
        (lambda y, t: _huber(y.sum(1) - t), False),
        (lambda y, t: (y[:, 0] - t) ** 2 + (y.sum(1) - t).pow(2), False),
        (lambda y, t: (y.sum(1)[:, None] - t) ** 2 * torch.rand(8, 8), False),
        # Part of an energy distance: the mean over all pairs of two samples.
        (lambda y, t: (y.sum(1) - t[:, None]).abs(), False),
    ],
)
def test_terms_of_a_loss_that_are_broadcast(make: Any, is_broadcast: bool) -> None:
    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        make(model(torch.randn(8, 8)), torch.randn(8)).mean().backward()
        optimizer.step()

    said = texts(program, 40)
    assert len(said) == is_broadcast and all("was broadcast to [8, 8]" in text for text in said)


@pytest.mark.parametrize(
    ("labels", "blank", "found"),
    [
        ([[0, 2], [3, 1]], 0, "its blank, 0, as 1 of 4 labels"),
        ([[1, 2], [3, 0]], 0, "its blank, 0, as 1 of 4 labels"),
        ([0, 2, 3, 1], 0, "its blank, 0, as 1 of 4 labels"),
        ([[0, 2], [1, 3]], 3, "its blank, 3, as 1 of 4 labels"),
        ([[1, 2], [3, 1]], 0, ""),
        ([1, 2, 3, 1], 0, ""),
        ([[0, 2], [1, 2]], 3, ""),
        # Padding is no label.
        ([[1, 2, 0, 0], [3, 1, 0, 0]], 0, ""),
    ],
)
def test_labels_of_a_ctc_loss_that_are_its_blank(labels: Any, blank: int, found: str) -> None:
    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        made, lengths = model(torch.randn(12, 2, 8)).log_softmax(-1), torch.tensor([2, 2])
        of = torch.full((2,), 12), lengths
        F.ctc_loss(made, torch.tensor(labels), *of, blank=blank, zero_infinity=True).backward()
        optimizer.step()

    said = texts(program, 40)
    assert len(said) == bool(found)
    assert all(found in text for text in said)


@pytest.mark.parametrize("dimension", [0, 1])
def test_a_softmax_over_samples_before_a_dice_loss(dimension: int) -> None:
    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        made = model(torch.randn(6, 5, 8)).transpose(1, 2).softmax(dimension)
        labels = F.one_hot(torch.randint(4, (6, 5)), 4).transpose(1, 2)
        overlap = (made * labels).sum((0, 2))
        (1 - 2 * overlap / (made.sum((0, 2)) + labels.sum((0, 2)) + 1)).mean().backward()
        optimizer.step()

    said = texts(program, 40)
    assert len(said) == (dimension == 0)
    assert all("4 classes in dimension 1 of [6, 4, 5]" in text for text in said)


def test_a_look_at_a_graph_is_not_the_program_reading_it() -> None:
    """A number by which a similarity is multiplied is read to know its sign."""
    model, level = nn.Linear(4, 3), {"level": "op", "overflow_nums": 1}
    divisor = torch.zeros(())
    with fastcheck.install(model, **level), pytest.raises(fastcheck.OverflowDetected) as stop:
        ((1 / divisor) * model(torch.ones(2, 4)).square().mean()).backward()
    assert "reached the loss" in stop.value.culprit.reason
    assert "the host read it" not in stop.value.culprit.reason


def _divergence(y: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.kl_div(y, torch.ones(8, 4) / 4, **options)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda y: _divergence(y.softmax(1), reduction="batchmean"), "kl_div"),
        (lambda y: _divergence(y.softmax(1), reduction="none").sum(-1).mean(), "kl_div"),
        (lambda y: _divergence(y.softmax(1).view(8, 4), reduction="sum"), "kl_div"),
        (lambda y: _divergence(y.log_softmax(1), reduction="batchmean"), ""),
        (lambda y: _divergence(y.softmax(1).log(), reduction="sum"), ""),
        (lambda y: _divergence(y.softmax(1), reduction="sum", log_target=True), ""),
        # The distance of probabilities to others, and what is expected of them.
        (lambda y: (torch.ones(8, 4) - y.softmax(1)).abs().mean(), ""),
        (lambda y: (1 - torch.ones(8, 4) * y.softmax(1)).mean(), ""),
        (lambda y: (torch.ones(8, 4) - y.softmax(1) * torch.ones(8, 4)).mean(), ""),
        # The same form with rewards in place of targets.
        (lambda y: (torch.ones(8, 4) - torch.rand(8, 4) * y.softmax(1)).mean(), ""),
    ],
)
def test_a_divergence_of_probabilities(make: Any, found: str) -> None:
    """kl_div() wants logarithms of probabilities as its input."""

    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        make(model(torch.randn(8, 8))).backward()
        optimizer.step()

    said = texts(program, 40)
    assert len(said) == bool(found)
    assert all("kl_div is given the result of a softmax" in text for text in said)


def _ctc(logits: torch.Tensor) -> torch.Tensor:
    lengths = torch.full((2,), 6), torch.full((2,), 2)
    return F.ctc_loss(logits, torch.tensor([[1, 2], [3, 1]]), *lengths)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda y: _ctc(y), "the result of a linear layer"),
        (lambda y: _ctc(y.softmax(-1)), "the result of a softmax"),
        (lambda y: _ctc(y.log_softmax(0)), "taken over dimension 0 of [6, 2, 4]"),
        (lambda y: _ctc(y.transpose(0, 1).log_softmax(1).transpose(0, 1)), "over dimension 1 of"),
        (lambda y: _ctc(y.log_softmax(-1)), ""),
        (lambda y: _ctc(y.transpose(0, 1).log_softmax(2).transpose(0, 1)), ""),
        (lambda y: _ctc((y.softmax(-1) + 1e-6).log()), ""),
    ],
)
def test_the_input_of_a_ctc_loss(make: Any, found: str) -> None:
    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        make(model(torch.randn(6, 2, 8))).backward()
        optimizer.step()

    said = [text for text in texts(program, 40) if "in the graph of the loss" in text]
    assert len(said) == bool(found) and all(found in text for text in said)


@pytest.mark.parametrize("kind", ["total", "term", "number", "twice", "features", "view"])
def test_a_loss_that_holds_those_before_it(kind: str) -> None:
    """``term``: one that was made before; ``twice``: the graph of a step is used twice;
    ``features``: data that has no graph; ``view``: of a weight, which shows what that holds now.
    """
    model, total = nn.Linear(8, 4), torch.zeros(())
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    term, view = (model.weight * torch.ones(4, 8)).sum(), model.weight[0]
    features = nn.Linear(8, 8)(torch.randn(8, 8)).detach()
    with warned() as said, fastcheck.install(model):
        for _ in range(40):
            now = model(features if kind == "features" else torch.randn(8, 8)).square().mean()
            total = total + (now if kind == "total" else now.item())
            now = now + {"term": term, "view": view.abs().mean()}.get(kind, 0)
            optimizer.zero_grad()
            is_kept = kind in ("total", "term", "twice")
            (total if kind == "total" else now).backward(retain_graph=is_kept)
            if kind == "twice":
                now.sqrt().backward()
            optimizer.step()
    held = [text for text in said if "backward() goes through all of it once more" in text]
    assert len(held) == (kind in ("total", "term"))
    what = "step 3: .* is that of the update before" if kind == "total" else "at least ten updates"
    assert all(re.search(what, text) for text in held)


def test_losses_of_two_optimizers_that_share_a_part() -> None:
    """A GAN whose generated batch is not detached for the discriminator."""
    made, judge = nn.Linear(4, 8), nn.Linear(8, 1)
    optimizers = [torch.optim.SGD(part.parameters(), 1e-3) for part in (judge, made)]
    with warned() as said, fastcheck.install(made, judge):
        for _ in range(40):
            batch = made(torch.randn(8, 4))
            for optimizer, sign in zip(optimizers, (1, -1)):
                optimizer.zero_grad()
                (sign * judge(batch).mean()).backward(retain_graph=sign > 0)
                optimizer.step()
    assert not said


@pytest.mark.parametrize("kind", ["loop", "step", "no cache"])
def test_an_autocast_around_the_loop(kind: str) -> None:
    """It keeps its casts of the weights until it is left: the loss stays what it was."""
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    around: Any = contextlib.nullcontext()
    if kind != "step":
        around = torch.autocast("cpu", torch.bfloat16, cache_enabled=kind == "loop")
    with warned() as said, fastcheck.install(model), around:
        for _ in range(40):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=kind != "no cache"):
                result = model(torch.randn(8, 8))
            optimizer.zero_grad()
            result.float().square().mean().backward()
            optimizer.step()
    assert ["a cast of a weight" in text for text in said] == [True] * (kind == "loop")


@pytest.mark.parametrize(
    ("make", "is_told"),
    [
        (lambda y, t: F.cross_entropy(F.log_softmax(y, 1).exp(), t), True),
        (lambda y, t: F.cross_entropy(F.log_softmax(y, 1), t), False),
        (lambda y, t: F.cross_entropy(y.exp(), t), False),
    ],
)
def test_a_cross_entropy_of_the_exponential_of_log_softmax(make: Any, is_told: bool) -> None:
    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        make(model(torch.randn(8, 8)), torch.arange(8) % 4).backward()
        optimizer.step()

    said = [text for text in texts(program, 40) if "is given the result of exp(log_softm" in text]
    assert len(said) == is_told


@pytest.mark.parametrize("criterion", [F.mse_loss, F.smooth_l1_loss, F.huber_loss])
@pytest.mark.parametrize("is_same", [False, True])
def test_a_criterion_of_a_tensor_and_itself(criterion: Any, is_same: bool) -> None:
    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        y = model(torch.randn(8, 8))
        target = y.detach() if is_same else y.detach().clone()
        (criterion(y, target) + y.square().mean()).backward()
        optimizer.step()

    said = [text for text in texts(program, 40) if "the distance of a tensor and itself" in text]
    assert len(said) == is_same


@pytest.mark.parametrize("is_detached", [False, True])
def test_a_ratio_of_a_policy_to_itself(is_detached: bool) -> None:
    """Its gradient is 0, while that of the entropy is not."""

    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        logs = model(torch.randn(8, 8)).log_softmax(-1)
        ratio = (logs - (logs.detach() if is_detached else logs)).exp()
        ((ratio * torch.randn(8, 4)).mean() + (logs.exp() * logs).mean()).backward()
        optimizer.step()

    said = [text for text in texts(program, 40) if "a tensor and itself" in text]
    assert len(said) == (not is_detached)


@pytest.mark.parametrize("kind", ["both", "detached", "another", "maximum"])
def test_a_ratio_of_a_policy_that_was_computed_twice(kind: str) -> None:
    """``another``: of what a second model returns, which is the same at first; ``maximum``: numbers
    less their largest, of rows of one.
    """
    others: list[nn.Module] = []

    def program(model: nn.Module, optimizer: Any) -> None:
        others.append(copy.deepcopy(model))
        optimizer.zero_grad()
        x = torch.randn(8, 8)
        new, old = (model[2](model[0](x)).log_softmax(-1) for _ in range(2))
        if kind == "another":
            old = others[0][2](others[0][0](x)).log_softmax(-1)
        if kind == "maximum":
            new = new[:, :1]
            old = new.amax(1, keepdim=True)
        ratio = (new - (old.detach() if kind == "detached" else old)).exp()
        ((ratio * torch.randn(8, 4)).mean() + (new.exp() * new).mean()).backward()
        optimizer.step()

    said = [text for text in texts(program, 40) if "two results with a gradient, which are" in text]
    assert len(said) == (kind == "both")


def _signs(size: int = 8) -> torch.Tensor:
    return torch.arange(size) % 2 * 2 - 1.0


def _halves(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return y[:, :2], y[:, 2:]


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda y, t: F.soft_margin_loss(y[:, 0], t), "soft_margin_loss"),
        (lambda y, t: F.hinge_embedding_loss(y.abs().sum(1), t), "hinge_embedding_loss"),
        (lambda y, t: F.cosine_embedding_loss(*_halves(y), t), "cosine_embedding_loss"),
        (lambda y, t: F.margin_ranking_loss(y[:, 0], y[:, 1], t, margin=1.0), "margin_ranking"),
    ],
)
@pytest.mark.parametrize("targets", ["0 and 1", "signs", "ones", "some are masked"])
def test_targets_of_0_and_1_where_signs_are_expected(make: Any, found: str, targets: str) -> None:
    made = {"0 and 1": _signs().clamp(min=0), "signs": _signs(), "ones": torch.ones(8)}.get(
        targets, _signs() * torch.tensor([0, 1, 1, 1, 1, 1, 1, 1])
    )

    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        make(model(torch.randn(8, 8)), made).backward()
        optimizer.step()

    said = texts(program, 40)
    assert len(said) == (targets == "0 and 1")
    assert all(f"{found}" in text and "1 and -1" in text for text in said)


@pytest.mark.parametrize(
    ("make", "is_wrong"),
    [
        (lambda y: F.binary_cross_entropy_with_logits(y, torch.ones(8, 4) + 1), True),
        (lambda y: F.binary_cross_entropy_with_logits(y, torch.ones(8, 4) - 2), True),
        (lambda y: F.binary_cross_entropy_with_logits(y, torch.ones(8, 4) * 1.2), False),
        # What is -1 may be masked.
        (
            lambda y: F.binary_cross_entropy_with_logits(y, -torch.ones(8, 4), torch.zeros(8, 4)),
            False,
        ),
        (
            lambda y: (
                F.binary_cross_entropy_with_logits(y, -torch.ones(8, 4), reduction="none")
                * torch.zeros(8, 4)
            ).mean(),
            False,
        ),
    ],
)
def test_targets_beyond_0_and_1(make: Any, is_wrong: bool) -> None:
    said = texts_of_term(make)
    assert len(said) == is_wrong
    assert all("a binary cross entropy is given targets from" in text for text in said)


@pytest.mark.parametrize(("dimension", "is_mixed"), [(0, True), (1, True), (2, False), (-1, False)])
def test_a_softmax_over_samples_or_heads(dimension: int, is_mixed: bool) -> None:
    """Over dimension 2 it may be meant: each value is given to one cluster or slot."""

    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        x = model(torch.randn(24, 8)).view(2, 2, 6, 4)
        weights = F.dropout((x @ x.transpose(-1, -2)).softmax(dimension), 0.1)
        (weights @ x).square().mean().backward()
        optimizer.step()

    said = texts(program, 40)
    assert len(said) == is_mixed
    what = f"over dimension {dimension} of [2, 2, 6, 6], and the matrix product"
    assert all(what in text and "dim=-1" in text for text in said)


def _similarity(kind: str, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    fixed = other.detach()
    normal, of_other = F.normalize(one, dim=-1), F.normalize(other, dim=-1)
    return {
        "both": lambda: -F.cosine_similarity(one, other).mean(),
        "half": lambda: 1 - (normal * of_other).sum(-1).mean() / 2,
        "two": lambda: (2 - 2 * (normal * of_other).sum(-1)).mean() - (of_other * normal).sum(),
        "detached": lambda: -F.cosine_similarity(one, fixed).mean(),
        "apart": lambda: F.cosine_similarity(one, other).mean(),
        "negatives": lambda: (
            F.cosine_similarity(one, other.roll(1, 0)).mean()
            - F.cosine_similarity(one, other).mean()
        ),
        "variance": lambda: -F.cosine_similarity(one, other).mean() - one.std(0).mean(),
        "teacher": lambda: -F.cosine_similarity(one, other).mean(),
        "labelled": lambda: -(F.cosine_similarity(one, other) * torch.randn(8)).mean(),
    }[kind]()


@pytest.mark.parametrize(
    "kind",
    ["both", "half", "two", "detached", "apart", "negatives", "variance", "teacher", "labelled"],
)
def test_a_loss_that_is_least_where_all_results_are_the_same(kind: str) -> None:
    """SimSiam without its stop-gradient. No optimizer holds a teacher, though it has a graph."""
    teacher = nn.Linear(8, 4)

    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        x = torch.randn(8, 8)
        other = teacher(x) if kind == "teacher" else model(x)
        _similarity(kind, model(x), other).backward()
        optimizer.step()

    said = texts(program, 40)
    assert len(said) == (kind in ("both", "half", "two"))
    assert all("where all results are the same" in text and "detach()" in text for text in said)


@pytest.mark.parametrize(
    ("make", "is_broadcast"),
    [
        (lambda p, t: t * p.log() + (1 - t) * (1 - p).log(), True),
        (lambda p, t: (1 - t) * (1 - p).log() - t * p.log(), True),
        (lambda p, t: t[:, None] * p.log() + (1 - t[:, None]) * (1 - p).log(), False),
        (lambda p, t: t * p[:, 0].log() + (1 - t) * (1 - p[:, 0]).log(), False),
        # Each with each, as it is written.
        (lambda p, t: t * p[:, 0][:, None] + (1 - t) * p[:, 0][:, None], False),
    ],
)
def test_a_cross_entropy_by_hand_of_other_shapes(make: Any, is_broadcast: bool) -> None:
    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        p = model(torch.randn(8, 8)).mean(1, keepdim=True).sigmoid()
        (-make(p, torch.rand(8)).mean()).backward()
        optimizer.step()

    said = [text for text in texts(program, 40) if "was broadcast to [8, 8]" in text]
    assert len(said) == is_broadcast


def test_a_loss_of_many_terms() -> None:
    """As of a long sequence: more than Python nests calls."""

    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        losses = -F.cosine_similarity(model(torch.randn(8, 8)), model(torch.randn(8, 8)))
        sum(losses[step % 8] for step in range(2000)).backward()
        optimizer.step()

    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    with warned() as said, fastcheck.install(model) as monitor:
        for _ in range(12):
            program(model, optimizer)
    assert not said and "no longer" not in str(monitor.summary())


@pytest.mark.parametrize(
    ("weights", "is_broadcast"), [((8, 1), True), ((8,), False), ((8, 8), False), ((1,), False)]
)
def test_a_weight_that_is_broadcast_against_its_result(
    weights: tuple[int, ...], is_broadcast: bool
) -> None:
    """An advantage of shape [N, 1] and log-probabilities of shape [N]."""

    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        logs = model(torch.randn(8, 8)).log_softmax(1)[:, 0]
        torch.min(-logs * torch.randn(weights), -logs * torch.randn(weights)).mean().backward()
        optimizer.step()

    said = texts(program, 40)
    assert len(said) == is_broadcast
    assert all("the product of a result of shape [8]" in text for text in said)


@pytest.mark.parametrize("is_same", [False, True])
def test_a_triplet_whose_positive_is_its_anchor(is_same: bool) -> None:
    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        anchor, positive, negative = (model(torch.randn(8, 8)) for _ in range(3))
        F.triplet_margin_loss(anchor, anchor if is_same else positive, negative).backward()
        optimizer.step()

    said = texts(program, 40)
    assert len(said) == is_same
    assert all("whose anchor and positive are one tensor" in text for text in said)


def _focal(loss: torch.Tensor) -> torch.Tensor:
    return (0.25 * (1 - torch.exp(-loss)) ** 2 * loss).mean()


@pytest.mark.parametrize(
    ("make", "is_told"),
    [
        (lambda y, t: _focal(F.cross_entropy(y, t)), True),
        (lambda y, t: _focal(F.cross_entropy(y, t)) / 0.25, True),
        (lambda y, t: _focal(F.binary_cross_entropy_with_logits(y, torch.rand(8, 4))), True),
        (lambda y, t: _focal(y.square().mean()), True),
        (lambda y, t: _focal(F.cross_entropy(y, t, reduction="none")), False),
        (lambda y, t: _focal(F.cross_entropy(y[:1], t[:1])), False),
        (lambda y, t: sum(_focal(F.cross_entropy(y[n : n + 1], t[:1])) for n in range(3)), False),
        (lambda y, t: torch.exp(F.cross_entropy(y, t)), False),
        (lambda y, t: 1 - torch.exp(-F.cross_entropy(y, t)), False),
    ],
)
def test_a_focal_loss_of_a_mean(make: Any, is_told: bool) -> None:
    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        make(model(torch.randn(8, 8)), torch.arange(8) % 4).backward()
        optimizer.step()

    said = [text for text in texts(program, 40, may_warn=False) if "focal" in text]
    assert len(said) == is_told


def test_the_first_loss_of_a_margin_loss() -> None:
    """ArcFace multiplies cosines by 30 or 64: its first loss is large for any weights."""
    classes = torch.randn(4, 4)

    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        cosines = F.linear(F.normalize(model(torch.randn(8, 8))), F.normalize(classes))
        loss = F.cross_entropy(64 * cosines, torch.arange(8) % 4)
        assert loss > 10
        loss.backward()
        optimizer.step()

    assert not any("guessing" in text for text in texts(program, 1))


def test_differences_of_all_pairs() -> None:
    """Those of one and itself among them."""

    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        rows = model(torch.randn(3, 8)).unbind()
        sum((one - other).norm() for one in rows for other in rows).backward()
        optimizer.step()

    assert texts(program, 40) == []


@pytest.mark.parametrize("kind", ["penalty", "graph", "attack", "alone", "parameters"])
def test_a_penalty_on_a_gradient_without_a_graph(kind: str) -> None:
    """``attack``: the input is moved by the gradient of a loss; ``alone``: by that of an output."""

    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        x = torch.randn(8, 8, requires_grad=True)
        y = model(x)
        if kind == "attack":
            y = F.cross_entropy(y, torch.zeros(8).long())
        inputs = list(model.parameters()) if kind == "parameters" else [x]
        is_kept, has_graph = kind != "alone", kind == "graph"
        found, *_ = torch.autograd.grad(
            y.sum(), inputs, retain_graph=is_kept, create_graph=has_graph
        )
        loss = F.cross_entropy(model(x.detach() + found[:8].sign().mean()), torch.ones(8).long())
        sum([loss] if kind == "alone" else [loss, (found.norm() - 1) ** 2]).backward()
        optimizer.step()

    said = texts(program, 40)
    # sum() begins with a number, which looks like a term without a graph.
    assert len(said) == (kind in ("penalty", "attack", "parameters"))
    assert all(("create_graph=True" in text) is (kind == "penalty") for text in said)
    assert all(("it trains nothing" in text) is (kind != "penalty") for text in said)


class _Causal(nn.Module):
    """A small transformer. ``kind``: how attention looks back; ``both``: it does not."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding, self.place = nn.Embedding(12, 8), nn.Embedding(16, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 12)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        size = tokens.shape[1]
        x = self.embedding(tokens) + self.place(torch.arange(size))
        later = torch.ones(size, size, dtype=torch.bool).triu(1)
        if self.kind == "shifts":
            x = torch.cat([torch.zeros(len(x), 1, 8), x[:, :-1]], 1)
        if self.kind == "by hand":
            weights = (x @ x.transpose(1, 2)).masked_fill(later, -torch.inf).softmax(-1)
            x = x + weights @ x
        elif self.kind in ("causal", "shifts"):
            x = x + F.scaled_dot_product_attention(x, x, x, is_causal=True)
        else:
            x = self.layer(x, src_mask=later if self.kind == "mask" else None)
        return self.head(x)


def _told_in(model: nn.Module, loss: Any, steps: int = 35) -> list[str]:
    """The invariants that a loop of this loss is told of."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fastcheck.FastcheckWarning)
        with fastcheck.install(model) as monitor:
            for _ in range(steps):
                optimizer.zero_grad()
                loss(model).backward()
                optimizer.step()
    return [event.text for event in monitor.watch.events if event.kind == "invariant"]


@pytest.mark.parametrize(
    ("kind", "targets", "is_told"),
    [
        ("by hand", "same", True),
        ("causal", "same", True),
        ("mask", "same", True),
        ("causal", "same, padded", True),
        ("causal", "shifted", False),
        # As transformers does: as many, the last of them ignored.
        ("causal", "shifted, padded", False),
        # An encoder that gives back what it was given, and a masked language model.
        ("both", "same", False),
        ("both", "masked", False),
        # A model that is given all tokens, and shifts them itself.
        ("shifts", "same", False),
    ],
)
def test_targets_that_are_not_shifted(kind: str, targets: str, is_told: bool) -> None:
    torch.manual_seed(0)

    def loss(model: nn.Module) -> torch.Tensor:
        tokens = torch.randint(1, 12, (4, 9))
        given, labels = tokens, tokens.clone()
        if targets == "shifted":
            given, labels = tokens[:, :-1], tokens[:, 1:]
        elif targets == "shifted, padded":
            labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
        elif targets == "same, padded":
            labels[:, 6:] = -100
        elif targets == "masked":
            given = tokens.masked_fill(torch.rand(4, 9) < 0.2, 0)
        return F.cross_entropy(model(given).flatten(0, 1), labels.flatten())

    found = _told_in(_Causal(kind), loss)
    assert len(found) == is_told and all("the model has to copy its input" in t for t in found)


@pytest.mark.parametrize(
    ("layer", "order", "is_told"),
    [
        (nn.ReLU(), 2, True),
        (nn.LeakyReLU(), 2, True),
        (nn.Tanh(), 2, False),
        (nn.SiLU(), 2, False),
        # A gradient penalty has first derivatives alone.
        (nn.ReLU(), 1, False),
    ],
)
def test_second_derivatives_through_relu(layer: nn.Module, order: int, is_told: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 16), layer, nn.Linear(16, 16), layer, nn.Linear(16, 1))

    def loss(model: nn.Module) -> torch.Tensor:
        x = torch.rand(32, 1, requires_grad=True)
        value = made = model(x)
        for _ in range(order):
            (made,) = torch.autograd.grad(made.sum(), x, create_graph=True)
        return (made + value - x.sin()).square().mean()

    found = _told_in(net, loss)
    assert len(found) == is_told and all("whose second derivative is 0" in text for text in found)
