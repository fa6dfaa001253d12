"""Tests of the facts of a training loop that no record holds: orders of calls, and modes."""

from __future__ import annotations

import itertools
import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastcheck
from accuracy.invariants_healthy import HEALTHY
from accuracy.invariants_loops import LOOPS
from accuracy.invariants_programs import FAULTS
from accuracy.invariants_threads import THREADS
from support.sampling import sample
from support.told import loss, texts


def uncleared(model: nn.Module, optimizer: Any) -> None:
    loss(model).backward()
    optimizer.step()


def test_gradients_that_are_not_cleared() -> None:
    found = texts(uncleared, 40)
    assert len(found) == 1 and "gradients are not cleared" in found[0] and "0.weight" in found[0]
    assert found[0].startswith("step 11: ")


@pytest.mark.parametrize("kind", ["attribute", "misspelt", "method", "read", "one is open"])
def test_a_module_that_an_attribute_does_not_freeze(kind: str) -> None:
    """``misspelt``: of a parameter; ``read``: the program has frozen its parameters, too; ``one is
    open``: all but a bias.
    """

    def step(model: nn.Module, optimizer: Any) -> None:
        first: Any = model[0]
        if kind == "method":
            first.requires_grad_(False)
        elif kind == "misspelt":
            first.weight.require_grad = False
        else:
            first.requires_grad = False
            first.weight.requires_grad_(kind == "attribute")
            first.bias.requires_grad_(kind != "read")
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    found = [text for text in texts(step) if "which torch does not read" in text]
    assert len(found) == (kind in ("attribute", "misspelt"))
    name = "0.weight.require_grad" if kind == "misspelt" else "0.requires_grad"
    assert all(f": {name} is False" in text for text in found)


@pytest.mark.parametrize("how", ["attribute", "defaults", "group", "both", "once", "none"])
def test_a_learning_rate_that_is_set_where_nothing_reads_it(how: str) -> None:
    """``both``: in the groups, too; ``once``: before the first update, and not changed after."""
    counted = itertools.count()

    def step(model: nn.Module, optimizer: Any) -> None:
        rate = 0.05 if next(counted) < 12 or how == "once" else 0.005
        if how in ("attribute", "both", "once"):
            optimizer.lr = rate
        if how == "defaults":
            optimizer.defaults["lr"] = rate
        if how == "group":
            optimizer.param_groups[0]["learning_rate"] = rate
        if how == "both":
            optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    found = [text for text in texts(step, 25) if "was set to" in text]
    place = {
        "attribute": "optimizer.lr",
        "defaults": 'optimizer.defaults["lr"]',
        "group": 'optimizer.param_groups[0]["learning_rate"]',
    }.get(how)
    assert len(found) == (place is not None)
    assert all(f"{place} was set to 0.005, where the optimizer" in text for text in found)


@pytest.mark.parametrize("kind", ["prefix", "none", "part", "other model", "within a wrapper"])
def test_weights_of_which_none_were_loaded(kind: str) -> None:
    """``none``: there were none to load; ``part``: those of a layer fit."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    if kind == "part":
        state["0.weight"] = model[0].weight.detach()
    target: nn.Module = nn.Linear(8, 4) if kind == "other model" else model
    if kind == "within a wrapper":
        target = nn.ModuleDict({"wrapped": model})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with fastcheck.install(model) as monitor:
            target.load_state_dict({} if kind == "none" else state, strict=False)
            for _ in range(3):
                loss(model).backward()
    found = [
        event.text for event in monitor.watch.events if "has loaded no parameter" in event.text
    ]
    assert len(found) == (kind in ("prefix", "within a wrapper"))
    assert all("4 keys" in text and "(module.0.weight, not " in text for text in found)
    assert all(re.search(r"test_facts.py:\d+", text) for text in found)
    assert not hasattr(nn.Module.load_state_dict, "_fastcheck")


def test_ten_updates_have_to_agree() -> None:
    assert not texts(uncleared, 11)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_are_cleared_now_and_then(to_none: bool) -> None:
    count = iter(range(100))

    def program(model: nn.Module, optimizer: Any) -> None:
        uncleared(model, optimizer)
        if next(count) % 9 in (3, 8):
            optimizer.zero_grad(set_to_none=to_none)

    assert not texts(program, 90)


@pytest.mark.parametrize(
    ("parts", "kind"),
    sample(itertools.product((1, 4, 20), ("kept", "cleared", "finite", "updated", "put back")), 8),
)
def test_nan_to_which_backward_only_adds(kind: str, parts: int) -> None:
    """A loop skips an update whose gradients are not finite, and clears them only after one."""
    count = iter(range(100))
    others: list[Any] = []

    def program(model: nn.Module, optimizer: Any) -> None:
        step = next(count)
        for part in range(parts):
            is_bad = part == 0 and (step == 5 or (kind == "put back" and step > 5))
            (loss(model) * (float("nan") if is_bad and kind != "finite" else 1.0)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step < 5 or (kind != "finite" and torch.isfinite(norm)):
            optimizer.step()
            optimizer.zero_grad()
        elif kind == "cleared":
            optimizer.zero_grad()
        elif kind == "put back" and step % 2:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        elif kind == "updated" and step % 2:
            others.append(torch.optim.SGD(model.parameters(), 0.0) if not others else others[0])
            others[0].step()

    steps = 6 + max(44 // parts, 6)
    found = [text for text in texts(program, steps, overflow_nums=-1) if "holds NaN" in text]
    if kind == "kept":
        assert len(found) == 1 and "the gradient of 0.weight holds NaN" in found[0]
        assert f"the last {max(40, 4 * parts)} calls of backward() added to it" in found[0]
    else:
        assert not found


def test_momentum_of_the_loops_own() -> None:
    """What is left of the last gradient was changed: that is meant."""

    def program(model: nn.Module, optimizer: Any) -> None:
        uncleared(model, optimizer)
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)

    assert not texts(program, 40)


def test_gradients_that_are_cleared_before_the_update() -> None:
    def program(model: nn.Module, optimizer: Any) -> None:
        loss(model).backward()
        optimizer.zero_grad()
        optimizer.step()

    found = texts(program)
    assert len(found) == 1 and "cleared between backward() and the update" in found[0]


def test_clipping_that_comes_too_late() -> None:
    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        uncleared(model, optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    found = texts(program)
    assert len(found) == 1 and "clipped after the update" in found[0]


def test_gradients_of_autograd_grad_that_are_clipped() -> None:
    """No backward() is called there."""

    def program(model: nn.Module, optimizer: Any) -> None:
        parameters = list(model.parameters())
        for one, gradient in zip(parameters, torch.autograd.grad(loss(model), parameters)):
            one.grad = gradient
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    assert not texts(program, 40)


def test_clipping_of_nothing() -> None:
    used: list[Any] = []

    def program(model: nn.Module, optimizer: Any) -> None:
        used[:] = used or [model.parameters()]
        optimizer.zero_grad()
        loss(model).backward()
        nn.utils.clip_grad_norm_(used[0], 1.0)
        optimizer.step()

    found = texts(program)
    assert len(found) == 1 and "clipping was given no gradient" in found[0]


@pytest.mark.parametrize(
    ("limit", "by", "what"),
    [
        ({"max_norm": 0.0}, "norm", "clipped to 0, which makes them 0"),
        ({"max_norm": -1.0}, "norm", "clipped to -1, which turns their sign"),
        ({"clip_value": 0}, "value", "clipped to 0, which makes them 0"),
        ({"clip_value": -0.5}, "value", "clipped to -0.5, which makes this number of each"),
        ({"max_norm": 0.1}, "norm", ""),
    ],
)
def test_clipping_to_no_positive_number(limit: dict[str, float], by: str, what: str) -> None:
    clip = nn.utils.clip_grad_norm_ if by == "norm" else nn.utils.clip_grad_value_

    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        loss(model).backward()
        clip(model.parameters(), **limit)
        optimizer.step()

    found = texts(program)
    assert len(found) == bool(what) and what in "".join(found)


def test_two_losses_and_parts_of_one_add_up() -> None:
    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        one = loss(model)
        one.backward(inputs=list(model[0].parameters()), retain_graph=True)
        one.backward(inputs=list(model[2].parameters()))
        loss(model).backward()
        optimizer.step()

    assert not texts(program, 30)


def test_a_closure_makes_the_gradients() -> None:
    def program(model: nn.Module, optimizer: Any, clears: bool = False) -> None:
        def closure() -> torch.Tensor:
            if clears:
                optimizer.zero_grad()
            made = loss(model)
            made.backward()
            return made

        optimizer.step(closure)

    found = texts(program, 40)
    assert len(found) == 1 and "gradients are not cleared" in found[0]
    assert not texts(lambda model, optimizer: program(model, optimizer, True), 40)


def test_a_weight_that_is_written_at_each_update_is_a_constraint() -> None:
    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        uncleared(model, optimizer)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)

    assert not texts(program, 60)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_that_are_nan_are_not_written_for_that(dtype: torch.dtype) -> None:
    count = itertools.count()

    def program(model: nn.Module, optimizer: Any) -> None:
        if next(count) == 0:
            model.to(dtype)
        optimizer.zero_grad()
        made = model(torch.randn(8, 8, dtype=dtype)).square().mean()
        (made * (torch.nan if next(count) >= 90 else 1.0)).backward()
        optimizer.step()

    assert not [
        text for text in texts(program, 60, overflow_nums=-1) if "something other than" in text
    ]


@pytest.mark.parametrize("first", [torch.float64, torch.bfloat16])
def test_weights_that_change_their_dtype_are_not_compared(first: torch.dtype) -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with warnings.catch_warnings(record=True) as caught, fastcheck.install(model):
        warnings.simplefilter("always")
        for dtype in (first, first, torch.float32, torch.float32):
            model.to(dtype)
            optimizer.zero_grad()
            model(torch.randn(8, 8, dtype=dtype)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert not [str(warning.message) for warning in caught]


class Holder(torch.optim.Optimizer):
    """As ZeroRedundancyOptimizer holds one, and SAM."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_an_optimizer_that_another_holds_is_not_told_as_a_second(is_wrapped: bool) -> None:
    others: list[torch.optim.Optimizer] = []

    def program(model: nn.Module, optimizer: Any) -> None:
        if not others:
            second = torch.optim.SGD(model.parameters(), 0.01)
            others.append(Holder(optimizer) if is_wrapped else second)
        for used in others if is_wrapped else (optimizer, *others):
            optimizer.zero_grad()
            loss(model).backward()
            used.step()

    assert any("updated by two optimizers" in text for text in texts(program)) != is_wrapped


class Float32(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


@pytest.mark.parametrize("last", [nn.Linear, Float32])
def test_a_layer_with_weights_may_be_outside_of_autocast(last: type[nn.Linear]) -> None:
    """Dropout returns the dtype that it is given, which is float32 after the embedding."""
    last.__name__ = "Linear"
    layers = [(nn.Dropout(0.1), nn.Linear(8, 8)) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(5, 8), *sum(layers, ()), nn.Dropout(0.1), last(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with fastcheck.install(model) as monitor:
        for _ in range(20):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                model(torch.randint(5, (16,))).float().square().mean().backward()
            optimizer.step()
    found = [event.text for event in monitor.watch.events if "return a dtype" in event.text]
    assert len(found) == (last is Float32)
    assert all("1 of 4 modules of class Linear return a dtype" in text for text in found)


class Doubled(torch.autograd.Function):
    """One with attributes of its own, that have the names of a node's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.variable, ctx.name = 2.0, "doubled"
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.variable


@pytest.mark.parametrize("kind", ["attributes", "freed"])
def test_a_graph_that_is_looked_at_may_be_any(kind: str) -> None:
    """What is noticed afterwards is noticed still."""
    count = iter(range(100))

    def program(model: nn.Module, optimizer: Any) -> None:
        output = model(torch.randn(8, 8))
        made = F.cross_entropy(output, torch.arange(8) % 4)
        if kind == "attributes":
            made = Doubled.apply(made)
        if kind == "freed" and next(count) == 10:
            torch.autograd.grad(made, list(model.parameters()))
            with pytest.raises(RuntimeError, match="second time"):
                made.backward()
        else:
            made.backward()
        optimizer.step()

    assert any("gradients are not cleared" in text for text in texts(program, 40))


def test_a_saved_tensor_is_unpacked_by_the_program_alone() -> None:
    """As offloaded activations are, each of which is given once."""
    held: dict[int, torch.Tensor] = {}
    numbers = itertools.count()

    def pack(tensor: torch.Tensor) -> int:
        number = next(numbers)
        held[number] = tensor
        return number

    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(pack, held.pop):
            made = F.cross_entropy(model(torch.randn(8, 8)), torch.arange(8) % 4)
        made.backward()
        optimizer.step()

    assert not texts(program, 40) and not held


def test_a_checkpointed_loss_is_computed_twice_a_step() -> None:
    norm = nn.BatchNorm1d(4)

    def loss_of(output: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(norm(output), torch.arange(8) % 4)

    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        checkpoint(loss_of, model(torch.randn(8, 8)), use_reentrant=False).backward()
        optimizer.step()

    assert not texts(program, 40)
    assert norm.num_batches_tracked == 80


def test_likelihoods_of_probabilities_may_be_meant() -> None:
    """-p of the label is a loss that is robust to wrong labels."""

    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        F.nll_loss(model(torch.randn(8, 8)).softmax(1), torch.arange(8) % 4).backward()
        optimizer.step()

    found = texts(program, 40, may_warn=False)
    assert len(found) == 1 and "expects logarithms" in found[0]


class Replayed(torch.autograd.Function):
    """A loss whose memory is the same each time, as where a CUDA graph is replayed."""

    memory = torch.zeros(())

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Replayed.memory.numpy()[...] = x.item()  # as its version stays the same
        return Replayed.memory.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def test_two_losses_in_the_same_memory_are_two() -> None:
    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        for _ in range(2):
            Replayed.apply(loss(model)).backward()
        optimizer.step()

    assert not texts(program, 30)


def test_a_loss_that_is_added_after_clipping_is_not_clipped_twice() -> None:
    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        loss(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        (1e-3 * sum(p.square().sum() for p in model.parameters())).backward()
        optimizer.step()

    assert not texts(program, 30)


def test_what_another_optimizer_has_clipped_is_not_clipped() -> None:
    count, made = iter(range(100)), []

    def program(model: Any, optimizer: Any) -> None:
        made[:] = made or [
            torch.optim.SGD(part.parameters(), 0.01) for part in (model[0], model[2])
        ]
        each, seldom = made
        loss(model).backward()
        nn.utils.clip_grad_norm_(model[0].parameters(), 1.0)
        each.step()
        each.zero_grad()
        if next(count) % 4 == 3:
            seldom.step()
            seldom.zero_grad()

    assert not [text for text in texts(program, 80) if "clipped" in text]


def test_a_weight_that_two_optimizers_update_is_changed_by_both() -> None:
    count, made = iter(range(100)), []

    def program(model: nn.Module, optimizer: Any) -> None:
        made[:] = made or [torch.optim.SGD(list(model.parameters())[::-1], 0.01)]
        optimizer.zero_grad()
        loss(model).backward()
        (made[0] if next(count) % 15 == 14 else optimizer).step()

    assert not [text for text in texts(program, 80) if "has changed" in text]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_what_optimizers_that_take_turns_on_the_same_weights_have_done_is_not_mixed_up(
    kind: Any,
) -> None:
    count, made = iter(range(100)), []

    def program(model: nn.Module, optimizer: Any) -> None:
        made[:] = made or [kind(model.parameters(), 0.05)]
        one = optimizer if next(count) % 5 else made[0]
        one.zero_grad()
        loss(model).backward()
        one.step()

    told = texts(program, 80, kinds=("invariant", "settings"))
    assert ["two optimizers" in text for text in told] == [True]


def test_an_optimizer_of_a_second_stage_has_a_rate_of_its_own() -> None:
    count, made = iter(range(100)), []

    def program(model: nn.Module, optimizer: Any) -> None:
        if next(count) == 45:
            made.append(torch.optim.SGD(model.parameters(), 0.2))
        (made or [optimizer])[0].zero_grad()
        loss(model).backward()
        (made or [optimizer])[0].step()

    (told,) = texts(program, 80, kinds=("settings",))
    expected = "step 45: the learning rate (another optimizer's) was changed from 0.01 to 0.2"
    assert told.startswith(expected)


def test_a_schedule_of_optimizers_that_take_turns_does_not_warn() -> None:
    count, made = iter(range(200)), []

    def program(model: nn.Module, optimizer: Any) -> None:
        if not made:
            made.extend([optimizer, torch.optim.SGD(model.parameters(), 0.01)])
            made.extend([torch.optim.lr_scheduler.ExponentialLR(one, 0.99) for one in made])
        optimizer = made[next(count) // 30 % 2]
        optimizer.zero_grad()
        uncleared(model, optimizer)
        made[2].step()
        made[3].step()

    found = texts(program, 120, may_warn=False)
    assert any("scheduler steps whose optimizer does not" in text for text in found)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_schedule_of_an_optimizer_that_never_steps(is_wrapped: bool) -> None:
    made: list[Any] = []

    def program(model: nn.Module, optimizer: Any) -> None:
        if not made:
            idle = torch.optim.SGD(model.parameters(), 0.01)
            if is_wrapped:
                idle.param_groups = optimizer.param_groups
            made.append(torch.optim.lr_scheduler.ExponentialLR(idle, 0.99))
        optimizer.zero_grad()
        uncleared(model, optimizer)
        made[0].step()

    found = [text for text in texts(program, 40) if "whose optimizer does not" in text]
    assert bool(found) is not is_wrapped


def test_the_losses_of_a_scaler_are_bounded_where_nothing_is_updated() -> None:
    scaler = torch.amp.GradScaler("cpu")
    with fastcheck.install(nn.Linear(2, 2)) as monitor:
        for _ in range(100):
            scaler.scale(torch.ones(()))
        assert len(monitor._watcher._facts._losses._given) == 16


def test_evaluation_mode() -> None:
    def program(model: nn.Module, optimizer: Any) -> None:
        model.eval()
        optimizer.zero_grad()
        uncleared(model, optimizer)

    found = texts(program, 40)
    assert len(found) == 1 and "trained in evaluation mode" in found[0] and "Dropout" in found[0]
    assert not texts(program, 29)


def test_dropout_in_passes_without_gradients() -> None:
    def program(model: nn.Module, optimizer: Any, passes: int = 3) -> None:
        optimizer.zero_grad()
        uncleared(model, optimizer)
        with torch.no_grad():
            for _ in range(passes):
                model(torch.randn(8, 8))

    found = texts(program)
    assert len(found) == 1 and "dropout is active in passes without gradients" in found[0]
    assert not texts(lambda model, optimizer: program(model, optimizer, 2))


@pytest.mark.parametrize("kind", ["training", "evaluation", "trained"])
def test_a_teacher_with_dropout(kind: str) -> None:
    torch.manual_seed(0)
    student, teacher = nn.Linear(8, 4), nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.1))
    teacher.train(kind != "evaluation")
    held = [*student.parameters(), *(teacher.parameters() if kind == "trained" else ())]
    optimizer = torch.optim.SGD(held, 0.01)
    with fastcheck.install(student, teacher) as monitor:
        for _ in range(15):
            x = torch.randn(8, 8)
            with torch.no_grad():
                y = teacher(x)
            optimizer.zero_grad()
            (student(x) - (teacher(x) if kind == "trained" else y)).square().mean().backward()
            optimizer.step()
    found = [event.text for event in monitor.watch.events if "dropout is active" in event.text]
    assert len(found) == (kind == "training")
    assert all("Dropout, p=0.1, in Sequential, which no optimizer holds" in text for text in found)


def test_nothing_is_said_where_nothing_is_watched() -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with fastcheck.install(model, watch=False):
        for _ in range(20):
            uncleared(model, optimizer)


@pytest.mark.parametrize(
    "name",
    sample(
        [
            "average_not_put_back",
            "backward_twice",
            "cleared_for_each_micro_batch",
            "clip_before_backward",
            "clip_of_everything",
            "clip_of_nothing",
            "clipped_in_each_micro_batch",
            "counter_in_bfloat16",
            "frozen_norms_that_count_on",
            "gradients_of_the_other_loss",
            "held_by_two",
            "layer_outside_of_autocast",
            "momentum_of_keras",
            "nan_gradients_that_are_kept",
            "only_batch_norm_is_trained",
            "optimizer_made_in_each_epoch",
            "plateau_in_the_wrong_mode",
            "positions_in_bfloat16",
            "scale_that_is_stuck",
            "scheduler_not_loaded",
            "scheduler_of_another",
            "scheduler_of_micro_batches",
            "scheduler_twice",
            "sigmoid_twice",
            "softmax_before_cross_entropy",
            "state_cleared",
            "statistics_of_the_validation_set",
            "step_in_each_micro_batch",
            "weights_of_one_number",
            "weights_untied",
        ],
        7,
    ),
)
def test_a_fault_and_its_fixed_version(name: str) -> None:
    fault = next(one for one in (*FAULTS, *THREADS, *LOOPS) if one.name == name)
    for is_faulty in (True, False):
        torch.manual_seed(0)
        program = fault.program(is_faulty)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            models = next(program)
            models = models if isinstance(models, tuple) else (models,)
            with fastcheck.install(*models, overflow_nums=-1) as monitor:
                for _ in program:
                    pass
        found = [e.text for e in monitor.watch.events if e.kind == "invariant"]
        assert len(found) == is_faulty
        assert all(re.search(fault.text, text) for text in found)


def test_schedulers_that_are_made_of_others_step_once() -> None:
    made: list[Any] = []

    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        uncleared(model, optimizer)
        if not made:
            parts = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99) for _ in range(2)]
            made.append(torch.optim.lr_scheduler.ChainedScheduler(parts))
        made[0].step()

    assert not texts(program, 30)


@pytest.mark.parametrize("name", sample(["dcgan", "sharpness_aware", "checkpointed", "lora"], 2))
def test_a_healthy_program(name: str) -> None:
    """Warnings are errors here."""
    torch.manual_seed(0)
    program = next(one for one in HEALTHY if one.__name__ == name)()
    model = next(program)
    with fastcheck.install(*(model if isinstance(model, tuple) else (model,))):
        for _ in program:
            pass


def test_a_learning_rate_below_0_from_the_first_update_on_is_meant() -> None:
    def step(model: nn.Module, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = -0.01
        optimizer.zero_grad()
        uncleared(model, optimizer)

    assert not texts(step)


def test_a_learning_rate_that_is_lowered_to_0_in_parts() -> None:
    rates = [0.3, 0.3 - 0.1, 0.3 - 0.1 - 0.1, 0.3 - 0.1 - 0.1 - 0.1]
    assert rates[-1] < 0

    def step(model: nn.Module, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = rates.pop(0) if len(rates) > 1 else rates[0]
        optimizer.zero_grad()
        uncleared(model, optimizer)

    assert not texts(step)


@pytest.mark.parametrize("trains", [True, False])
def test_a_teacher_in_evaluation_mode_is_as_it_should_be(trains: bool) -> None:
    """Where the student is in evaluation mode, too, it is told."""
    teacher = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5)).eval().requires_grad_(False)
    student = nn.Linear(8, 4).train(trains)
    optimizer = torch.optim.SGD(student.parameters(), 0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with fastcheck.install(teacher, student):
            for _ in range(40):
                x = torch.randn(8, 8)
                optimizer.zero_grad()
                (student(x) - teacher(x)).square().mean().backward()
                optimizer.step()
    told = [str(w.message) for w in caught if "trained in evaluation mode" in str(w.message)]
    assert len(told) == (not trains)


def test_an_optimizer_that_steps_twice_for_one_backward() -> None:
    def step(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
        optimizer.step()

    (text,) = texts(step)
    assert text.startswith("step 10: the optimizer steps twice for one backward()")
    assert "0.weight" in text


def test_steps_without_a_backward_of_their_own_that_are_meant() -> None:
    """A gradient that the loop writes, one that nothing makes anew, and every other step."""
    count = itertools.count()

    def written(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
        optimizer.step()

    def replayed(model: nn.Module, optimizer: Any) -> None:
        if not next(count):
            loss(model).backward()
        optimizer.step()

    def now_and_then(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
        if next(count) % 2:
            optimizer.step()

    assert not [text for step in (written, replayed, now_and_then) for text in texts(step, 40)]


def test_an_optimizer_that_never_steps() -> None:
    def unstepped(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step  # noqa: B018  # without parentheses

    (said,) = texts(unstepped, 80)
    assert "cleared 64 times, and no optimizer has stepped, though SGD holds" in said
    assert not texts(unstepped, 60)


def test_gradients_that_are_cleared_without_a_step_and_are_meant_to_be() -> None:
    """The loop of a model whose gradients are looked at, a long accumulation, a line search."""

    def looked_at(model: nn.Module) -> list[str]:
        with fastcheck.install(model) as monitor:
            for _ in range(80):
                model.zero_grad()
                loss(model).backward()
        return [event.text for event in monitor.watch.events]

    def accumulated(model: nn.Module, optimizer: Any) -> None:
        loss(model).backward()

    def searched(model: nn.Module, optimizer: Any) -> None:
        def closure() -> torch.Tensor:
            search.zero_grad()
            value = loss(model)
            value.backward()
            return value

        search = torch.optim.LBFGS(model.parameters(), 1e-4, max_iter=80, tolerance_change=0)
        search.step(closure)

    assert not looked_at(nn.Linear(8, 4))
    assert not texts(accumulated, 80)
    assert not [text for text in texts(searched, 1) if "no optimizer" in text]
