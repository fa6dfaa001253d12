"""Models that train on several threads of one process: what one thread does is not about the model
of another, and its gradients are looked at by nobody else.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any, Callable, ClassVar, Optional

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.utils.torch.patching import Listeners

NAN = float("nan")
LEVELS = pytest.mark.parametrize("level", ["module", "op"])

pytestmark = pytest.mark.usefixtures("fresh_start")


class Watched(nn.Parameter):
    """Notes which threads ask for its gradient."""

    asked: ClassVar[set[int]] = set()

    @property
    def grad(self) -> Any:
        Watched.asked.add(threading.get_ident())
        return torch.Tensor.grad.__get__(self)  # type: ignore[attr-defined]  # a getset descriptor

    @grad.setter
    def grad(self, value: Optional[torch.Tensor]) -> None:
        torch.Tensor.grad.__set__(self, value)  # type: ignore[attr-defined]  # torch's stub has a plain attribute


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def watched() -> nn.Sequential:
    model = net()
    for module in model:
        for name, parameter in list(module.named_parameters()):
            setattr(module, name, Watched(parameter.detach()))
    return model


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(3, 4)).square().mean()


def elsewhere(work: Callable[[], object]) -> None:
    """Runs it on another thread, to its end."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in errors:
        raise error


def step(model: nn.Module, optimizer: torch.optim.Optimizer, *, clips: bool = False) -> None:
    optimizer.zero_grad()
    loss_of(model).backward()
    if clips:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@LEVELS
def test_no_other_thread_asks_for_gradients(level: Any) -> None:
    """Not where it runs backward(), clips, scales or steps; the model has a non-finite value that
    waits for what becomes of it, and a step that may be over.
    """
    model, other = watched(), net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    others = torch.optim.SGD(other.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu")

    def train_other() -> None:
        for _ in range(3):
            step(other, others, clips=True)
            torch.autograd.grad(loss_of(other), list(other.parameters()))
            scaler.scale(loss_of(other)).backward()
            scaler.step(others)
            scaler.update()

    training = fastcheck.Training(scaler=1024.0)
    with fastcheck.install(model, level=level, overflow_nums=-1, training=training):
        step(model, optimizer)
        optimizer.zero_grad()
        loss = model(torch.full((3, 4), NAN)).square().mean()

        def while_it_runs(gradient: torch.Tensor) -> None:
            Watched.asked = set()
            elsewhere(train_other)
            assert Watched.asked <= {threading.get_ident()}

        loss.register_hook(while_it_runs)
        loss.backward()
        Watched.asked = set()
        elsewhere(train_other)
        optimizer.zero_grad()
        elsewhere(train_other)
        assert not Watched.asked - {threading.get_ident()}


def test_another_models_loss_while_backward_runs() -> None:
    """The gradients that come in the middle of another model's backward() are not from it."""
    model, other = net(), net()

    def train(gradient: torch.Tensor) -> None:
        elsewhere(lambda: loss_of(model).backward())

    with fastcheck.install(model, overflow_nums=-1) as monitor:
        elsewhere(lambda: model(torch.randn(3, 4)))
        loss = loss_of(other)
        (loss * NAN).backward()
        loss = loss_of(other) * NAN
        loss.register_hook(train)
        loss.backward()
        monitor.flush()
        assert not monitor.events


def test_another_models_scaler() -> None:
    """It decides nothing about the gradients of a model that is trained without one, and its
    update() ends no step of that.
    """
    model, other = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    others = torch.optim.SGD(other.parameters(), 0.01)
    scaler, its = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")

    def scale() -> None:
        scaler.scale(loss_of(other)).backward()
        scaler.step(others)
        scaler.update()

    with fastcheck.install(model, overflow_nums=-1) as monitor:
        step(model, optimizer)
        elsewhere(scale)
        output = model(torch.randn(3, 4))
        elsewhere(scale)
        output.register_hook(lambda gradient: gradient * NAN)
        output.square().mean().backward()
        assert monitor.events
        optimizer.step()
        optimizer.zero_grad()
        its.scale(loss_of(model)).backward()
        its.step(optimizer)
        index = monitor.step_index
        elsewhere(scale)
        loss_of(model)
        assert monitor.step_index == index
        its.update()
        loss_of(model)
        assert monitor.step_index == index + 1


def test_a_backward_that_raises_is_over() -> None:
    model = watched()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("on purpose")

    with fastcheck.install(model, overflow_nums=-1):
        step(model, optimizer)
        loss = loss_of(model)
        loss.register_hook(fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            loss.backward()
        Watched.asked = set()
        loss_of(model).backward()
        assert Watched.asked == {threading.get_ident()}


def test_the_next_thread_takes_over() -> None:
    """Once the thread that has trained is gone, another one may look at the gradients."""
    model = watched()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with fastcheck.install(model, overflow_nums=-1):
        elsewhere(lambda: step(model, optimizer))
        optimizer.zero_grad()
        Watched.asked = set()
        loss_of(model).backward()
        assert Watched.asked == {threading.get_ident()}


def test_listeners_that_come_while_others_are_told() -> None:
    class Listener:
        pass

    listeners: Listeners[Listener] = Listeners()
    first, second = Listener(), Listener()
    listeners.connect(first)
    told = []
    for listener in listeners:
        elsewhere(lambda: listeners.connect(second))
        told.append(listener)
    assert told == [first]
    assert list(listeners) == [first, second]


class Contended(deque[Any]):
    """Warnings to which another thread adds one whenever all were looked at."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__()
        self.texts = texts

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        self.come()

    def __len__(self) -> int:
        count = super().__len__()
        self.come()
        return count

    def come(self) -> None:
        if self.texts:
            elsewhere(lambda: self.append((self.texts.pop(), fastcheck.FastcheckWarning)))


def test_a_warning_that_comes_while_others_are_emitted_is_not_lost() -> None:
    monitor = fastcheck.install(net())
    monitor._session.event_store.warnings = Contended(["third", "second", "first"])
    monitor._session.event_store.warn_later("of this thread")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            monitor.step()
        monitor.remove()
    texts = [str(warning.message) for warning in caught]
    assert texts == ["of this thread", "first", "second", "third"]
