"""What a report says of two programs that differ in one thing: calls, dtypes, data, a stop."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.utils.text.numbers import worded


class Net(nn.Module):
    """Layers that are called in some order, with dropout behind each."""

    def __init__(self, order: Sequence[int], count: int = 3, rate: float = 0.1) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(rate)) for _ in range(count)
        )
        self.last = nn.Linear(8, 4)
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number in self.order:
            x = x + self.layers[number](x)
        made: torch.Tensor = self.last(x)
        return made


def run(
    directory: Path,
    order: Sequence[int] = (0, 1, 2),
    steps: range = range(6),
    autocast: bool = False,
    nan_at: Optional[int] = None,
    parts: Sequence[int] = (0,),
    loads: str = "",
    saves: str = "",
    begins: int = 0,
    flips: Optional[int] = None,
    leaves_out: bool = False,
) -> Path:
    torch.manual_seed(0)
    net, criterion = Net(order), nn.CrossEntropyLoss()
    if leaves_out:
        del net.layers[1]
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = torch.Generator().manual_seed(1)
    batches = [torch.randn(2, 6, 8, generator=data) for _ in range(8)]
    objects = {"net": net, "optimizer": optimizer, "schedule": schedule}
    if loads:
        held = torch.load(loads, weights_only=True)
        torch.set_rng_state(held.pop("random"))
        for name, state in held.items():
            objects[name].load_state_dict(state)
    try:
        with fastcheck.install(net, criterion, log_dir=directory):
            for step in steps:
                if step == nan_at:
                    with torch.no_grad():
                        net.layers[1][0].weight[0, 0] = float("nan")
                optimizer.zero_grad()
                for part in parts if step == 3 else range(len(parts)):
                    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                        x = batches[step - begins][part]
                        made = net(x if len(parts) > 1 else x + 0)
                    criterion(made.float(), torch.arange(6) % 4).backward()
                if step == 2 and flips is not None:
                    grad = net.layers[1][0].weight.grad
                    assert grad is not None
                    grad.view(torch.int32)[0, 3] ^= 1 << flips
                optimizer.step()
                schedule.step()
                if saves and step == 2:
                    states: dict[str, Any] = {k: v.state_dict() for k, v in objects.items()}
                    torch.save({**states, "random": torch.get_rng_state()}, saves)
    except fastcheck.OverflowDetected:
        assert nan_at is not None
    return directory


def compare(
    actual: Path, reference: Path, **options: Any
) -> tuple[fastcheck.types.Comparison, str]:
    made = fastcheck.compare(actual, reference, **options)
    return made, " ".join(str(made).split())


def test_a_run_that_stops_at_a_nan_has_no_other_schedule(tmp_path: Path) -> None:
    """A learning rate that a step would have had is known from its update alone."""
    stopped, whole = run(tmp_path / "a", nan_at=4), run(tmp_path / "b")
    made, text = compare(stopped, whole)
    assert made["hyper-parameters"].answer == made["batches"].answer == "yes"
    assert made.first is not None and made.first.row.name == (
        "layers.1.0 · optimizer · layers.1.0.weight"
    )
    assert "NaN or infinities on one side" in text
    assert {entry.name for entry in made.missing} == set()
    assert "1 other of its kind is equal" in text
    other, _ = compare(whole, stopped)
    assert other["hyper-parameters"].answer == "yes" and not other.agrees


def test_modules_that_are_called_in_another_order_are_named(tmp_path: Path) -> None:
    reference = run(tmp_path / "b")
    _, text = compare(run(tmp_path / "a", order=(0, 2, 1)), reference)
    assert (
        "modules are called in another order: after layers.0.1 the next that returns is layers.2.0 "
        "in actual, and layers.1.0 in reference" in text
    )
    assert "another order: after" not in compare(run(tmp_path / "c", order=(0, 2)), reference)[1]


def test_a_layer_that_is_left_out_is_no_shared_weight(tmp_path: Path) -> None:
    left_out = run(tmp_path / "a", order=(0, 1), leaves_out=True)
    _, text = compare(left_out, run(tmp_path / "b"))
    assert "layers.1.0.weight is what layers.2.0.weight is in reference" in text
    assert "modules have other names, as where one before them is left out" in text
    assert "shared" not in text


def test_a_layer_that_is_not_called_is_named(tmp_path: Path) -> None:
    reference = run(tmp_path / "b")
    _, text = compare(run(tmp_path / "a", order=(0, 2)), reference)
    assert "layers.1 is in both models, and actual does not call it" in text
    _, text = compare(run(tmp_path / "c", order=(0, 2, 1)), reference)
    assert "does not call it" not in text


class Words(nn.Module):
    """An embedding of words and places; ``mask`` may be left out."""

    def __init__(self, first_place: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(20, 8), nn.Embedding(20, 8)
        self.first = [first_place]  # no number, which install() would find

    def forward(self, ids: torch.Tensor, mask: Optional[torch.Tensor] = None) -> torch.Tensor:
        places = self.places(torch.arange(ids.shape[1]) + self.first[0])
        x = self.words(ids) + places
        return x if mask is None else x * mask[..., None]


def words(log: Path, first_place: int = 0, has_mask: bool = True) -> Path:
    torch.manual_seed(0)
    net = Words(first_place)
    with fastcheck.install(net, log_dir=log):
        for _ in range(3):
            ids = torch.randint(0, 20, (4, 6))
            mask = (torch.arange(6) < 4).expand(4, 6) * 1.0
            net(ids, mask if has_mask else None).square().mean().backward()
    return log


def test_an_argument_that_one_side_never_gives_and_an_index_are_told(tmp_path: Path) -> None:
    reference = words(tmp_path / "b")
    _, text = compare(words(tmp_path / "a", has_mask=False), reference)
    assert "reference alone reads the model · forward · input[1]: in actual it is not give" in text
    assert "the same batch twice" not in text
    _, text = compare(words(tmp_path / "c", first_place=2), reference)
    assert "places (Embedding) looks up rows of a weight that agrees: look at the indices" in text


def test_autocast_is_told_by_dtypes(tmp_path: Path) -> None:
    autocast, reference = run(tmp_path / "a", autocast=True), run(tmp_path / "b")
    _, text = compare(autocast, reference)
    assert (
        "first · forward · output[0] is bfloat16 in actual and float32 in reference, as with "
        "torch.autocast on one side" in text
    )
    assert "--accept dtype" in text
    assert "--accept dtype" not in compare(reference, run(tmp_path / "c", order=(0, 1, 1)))[1]


def test_data_that_begin_anew_after_a_resume_are_named(tmp_path: Path) -> None:
    file = str(tmp_path / "state.pt")
    reference = run(tmp_path / "b", saves=file)
    resumed = run(tmp_path / "a", steps=range(3, 6), loads=file)
    assert compare(resumed, reference)[0].is_identical
    anew = run(tmp_path / "c", steps=range(3, 6), loads=file, begins=3)
    for sides, longer in (((anew, reference), "reference"), ((reference, anew), "actual")):
        made, text = compare(*sides)
        assert made["batches"].answer == "no"
        assert "begin anew: what it reads first, in place of the batch of step" in text
        assert f"is the batch of step 0 in {longer}" in text
    later = run(tmp_path / "d", steps=range(3, 6), loads=file, begins=-2)
    assert "begin anew" not in compare(later, reference)[1]


def test_a_batch_that_is_given_twice_is_no_other_number_of_batches(tmp_path: Path) -> None:
    doubled, reference = run(tmp_path / "a", parts=(0, 0)), run(tmp_path / "b", parts=(0, 1))
    _, text = compare(doubled, reference)
    assert "has as many calls on both sides" in text and "as the same batch twice" in text
    assert "more batches" not in text
    _, text = compare(run(tmp_path / "c", parts=(0, 1, 1)[:2]), reference)
    assert "identical" in text


def test_a_gradient_whose_update_is_the_same_is_read(tmp_path: Path) -> None:
    """Nothing is said to be missing that is equal to the bit."""
    flipped, reference = run(tmp_path / "a", flips=0), run(tmp_path / "b")
    made, text = compare(flipped, reference)
    assert made.first is not None and "gradient of layers.1.0.weight" in made.first.row.name
    assert "the updates that follow are equal to the bit" in text
    assert "no tensor computed from it" not in text


@pytest.mark.parametrize("rate", [0.1, 0.0])
def test_dropout_of_a_batch_in_other_parts_draws_others(rate: float, tmp_path: Path) -> None:
    def halves(directory: Path, count: int) -> Path:
        torch.manual_seed(0)
        net = Net((0, 1, 2), rate=rate)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
        with fastcheck.install(net, log_dir=directory):
            for _ in range(3):
                optimizer.zero_grad()
                for part in x.chunk(count):
                    (net(part).square().mean() / count).backward()
                optimizer.step()
        return directory

    made, text = compare(halves(tmp_path / "a", 2), halves(tmp_path / "b", 1))
    assert made.agrees == (not rate)
    assert ("layers.0.1 (Dropout) draws random numbers, and others" in text) == bool(rate)


@pytest.mark.parametrize(("count", "text"), [(1, "1 tensor is"), (2, "2 tensors are")])
def test_notes_are_worded_for_their_count(count: int, text: str) -> None:
    assert worded("{} tensor[ is|s are]", count).format(count) == text


def warned_run(log: Path, faults: str = "", steps: int = 14, depth: int = 0) -> str:
    """Steps with clipping; ``faults``: what the loop does otherwise. ``depth``: of the module."""
    torch.manual_seed(0)
    net: nn.Module = nn.Linear(4, 2)
    for _ in range(depth):
        net = nn.Sequential(net)
    optimizer, data = torch.optim.SGD(net.parameters(), lr=0.1), torch.Generator().manual_seed(1)
    with warnings.catch_warnings(), fastcheck.install(net, log=fastcheck.Log(log)):
        warnings.simplefilter("ignore")
        for _ in range(steps):
            if "not cleared" not in faults:
                optimizer.zero_grad()
            net(torch.randn(6, 4, generator=data)).square().mean().backward()
            if "late" not in faults:
                nn.utils.clip_grad_norm_(net.parameters(), 0.01)
            optimizer.step()
            if "late" in faults:
                nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    return str(log)


def test_a_warning_of_one_run_alone_is_told(tmp_path: Path) -> None:
    def said(actual: str, reference: str) -> list[str]:
        return [t for t in fastcheck.compare(actual, reference).advice if "was warned" in t]

    plain, late = warned_run(tmp_path / "plain"), warned_run(tmp_path / "late", "late")
    clipped = "was warned: step 10: gradients were clipped after the update that used them"
    (text,) = said(late, plain)
    assert text.startswith(f"the run of actual alone {clipped}")
    (text,) = said(plain, late)
    assert text.startswith(f"the run of reference alone {clipped}")
    # The other run ends before, or is warned of the same under another name.
    assert not said(late, warned_run(tmp_path / "short", steps=9))
    sides = [warned_run(tmp_path / str(n), "not cleared", depth=n) for n in range(2)]
    assert fastcheck.compare(*sides)["hyper-parameters"].settings and not said(*sides)
    (text,) = said(sides[0], plain)
    assert "gradients are not cleared" in text


def text_of(actual: str, reference: str) -> str:
    return " ".join(str(fastcheck.compare(actual, reference)).split())


def rolled_back(log: Path, changes: Callable[[nn.Module, dict[str, Any], int], object]) -> str:
    """Eight steps; ``changes``: called after each with the weights as step 3 began with them."""
    torch.manual_seed(0)
    net, data = Net([0, 1, 2], rate=0.0), torch.Generator().manual_seed(1)
    net.first.requires_grad_(False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    with fastcheck.install(net, log=fastcheck.Log(log)):
        for step in range(8):
            if step == 3:
                kept = copy.deepcopy(net.state_dict())
            optimizer.zero_grad()
            net(torch.randn(6, 8, generator=data)).square().mean().backward()
            optimizer.step()
            if step >= 3:
                changes(net, kept, step)
    return str(log)


def test_weights_that_are_put_back_are_told(tmp_path: Path) -> None:
    def halved(net: nn.Module, kept: dict[str, Any], step: int) -> None:
        with torch.no_grad():
            net.get_parameter("last.weight").mul_(0.5 if step == 5 else 1)

    def loaded(net: nn.Module, kept: dict[str, Any], step: int) -> None:
        if step == 5:
            net.load_state_dict(kept)

    def held(net: nn.Module, kept: dict[str, Any], step: int) -> None:
        if step >= 3:
            net.load_state_dict(kept)

    plain = rolled_back(tmp_path / "plain", lambda *_: None)
    loads = rolled_back(tmp_path / "loaded", loaded)
    said = "all parameters of {} in step 6 are what they were in step 3, to the bit"
    assert said.format("actual") in text_of(loads, plain)
    assert said.format("reference") in text_of(plain, loads)
    assert fastcheck.compare(loads, rolled_back(tmp_path / "too", loaded)).is_identical
    for name, changes in (("halved", halved), ("held", held)):
        assert "put back" not in text_of(rolled_back(tmp_path / name, changes), plain)

    def turned(net: nn.Module, kept: dict[str, Any], step: int, last: int = 8) -> None:
        sign = 1 if step % 2 or step >= last else -1
        net.load_state_dict({name: sign * weight for name, weight in kept.items()})

    turns = rolled_back(tmp_path / "turns", turned)
    stays = rolled_back(tmp_path / "stays", lambda *given: turned(*given, last=6))
    found = fastcheck.compare(turns, stays)
    assert found.first is not None and found.first.row.step == 6
    assert "put back" not in str(found)


class Scaled(nn.Module):
    """A model that divides what its layer returns. ``shares``: it returns that itself."""

    def __init__(self, scale: float, shares: bool) -> None:
        super().__init__()
        self.head, self.scale, self.shares = nn.Linear(8, 4), scale, shares

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(x)
        return made if self.shares else made / self.scale


def scaled(
    log: Path,
    inside: float = 1.0,
    outside: float = 1.0,
    *,
    shares: bool = False,
    noise: float = 0.0,
    evaluates: bool = False,
    warm: int = 5,
    ahead: int = 0,
) -> str:
    """Six steps; ``noise``: of gradients; ``warm``: the steps of a warm-up, ``ahead`` by some."""
    torch.manual_seed(0)
    net, criterion = Scaled(inside, shares), nn.CrossEntropyLoss()
    optimizer, data = torch.optim.AdamW(net.parameters()), torch.Generator().manual_seed(1)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + ahead + 1) / warm))
    with fastcheck.install(net, criterion, log=fastcheck.Log(log)):
        for step in range(6):
            x, y = torch.randn(16, 8, generator=data), torch.arange(16) % 4
            if evaluates and step == 2:
                with torch.no_grad():
                    net(torch.randn(8, 8, generator=torch.Generator().manual_seed(5)))
            optimizer.zero_grad()
            made = net(x)
            criterion(made if outside == 1 else made / outside, y).backward()
            for parameter in net.parameters() if noise else ():
                assert parameter.grad is not None
                parameter.grad += noise * torch.randn(parameter.shape)
            optimizer.step()
            rates.step()
    return str(log)


def test_a_scale_that_moves_out_of_a_module_is_the_same_function(tmp_path: Path) -> None:
    inside, outside = scaled(tmp_path / "in", 2.0), scaled(tmp_path / "out", outside=2.0)
    for sides in ((inside, outside), (outside, inside)):
        assert "the model · forward · output[0] differs: the loss of the step" in text_of(*sides)
        assert fastcheck.compare(*sides, accept="missing").agrees
    plain = scaled(tmp_path / "plain")
    assert fastcheck.compare(inside, plain)["forward"].answer == "no"
    assert not fastcheck.compare(scaled(tmp_path / "3", 3.0), outside, accept="missing").agrees
    assert not fastcheck.compare(outside, plain, accept="missing").agrees


def test_what_hands_a_criterion_another_tensor_is_told(tmp_path: Path) -> None:
    plain = scaled(tmp_path / "plain", shares=True)
    outside = text_of(scaled(tmp_path / "out", outside=2.0, shares=True), plain)
    assert "in actual alone CrossEntropyLoss reads input[0] as a tensor of its own" in outside
    assert "returns output[0]" not in outside
    inside = text_of(scaled(tmp_path / "in", 2.0), plain)
    assert "in actual alone the model returns output[0] as a tensor of its own" in inside
    assert "CrossEntropyLoss reads" not in inside


def test_gradients_that_all_change_after_backward_are_told(tmp_path: Path) -> None:
    plain, said = scaled(tmp_path / "plain"), "no gradient of a parameter is equal to the bit"
    assert said in text_of(scaled(tmp_path / "noise", noise=1e-3), plain)
    assert said not in text_of(scaled(tmp_path / "scale", 2.0), plain)


def test_a_call_more_of_one_side_is_told_where_all_else_agrees(tmp_path: Path) -> None:
    text = text_of(scaled(tmp_path / "more", evaluates=True), scaled(tmp_path / "plain"))
    assert "that the other side does not make, as of an evaluation." in text


def test_a_schedule_that_is_a_step_ahead_is_told(tmp_path: Path) -> None:
    plain = scaled(tmp_path / "plain")
    ahead, said = scaled(tmp_path / "ahead", ahead=1), "lr is that of reference 1 step"
    assert f"{said} earlier" in text_of(ahead, plain) and f"{said} later" in text_of(plain, ahead)
    for other in (plain, scaled(tmp_path / "4", warm=4)):
        assert said not in text_of(other, plain)
