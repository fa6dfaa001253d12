"""Process-wide observers and patches: connected once, and removed with the last observer."""

from __future__ import annotations

import functools
import gc
from typing import Any, Callable

import pytest

from fastcheck.utils.torch.patching import Listeners, WrappedMethods


class Listener:
    pass


def counting() -> tuple[list[str], Listeners[Listener]]:
    log: list[str] = []
    return log, Listeners(lambda: log.append("begin"), lambda: log.append("end"))


def test_connected_with_the_first_and_let_go_with_the_last() -> None:
    log, listeners = counting()
    first, second = Listener(), Listener()
    listeners.connect(first)
    listeners.connect(second)
    assert set(listeners) == {first, second}
    listeners.disconnect(first)
    listeners.disconnect(first)
    assert log == ["begin"]
    listeners.disconnect(second)
    listeners.disconnect(second)
    assert log == ["begin", "end"]
    listeners.connect(first)
    assert log == ["begin", "end", "begin"]


def test_one_that_is_gone_is_not_told() -> None:
    log, listeners = counting()
    first, second = Listener(), Listener()
    listeners.connect(first)
    listeners.connect(second)
    del first
    gc.collect()
    assert list(listeners) == [second]
    assert log == ["begin"]
    del second
    gc.collect()
    assert list(listeners) == []
    assert log == ["begin", "end"]


def test_the_collector_may_run_in_the_middle_of_the_end() -> None:
    calls: list[int] = []

    def end() -> None:
        calls.append(len(calls))
        listeners.disconnect(one)  # as a finalizer would

    one = Listener()
    listeners: Listeners[Listener] = Listeners(lambda: None, end)
    listeners.connect(one)
    listeners.disconnect(one)
    assert calls == [0]


class Base:
    def say(self) -> str:
        return "said"


class Child(Base):
    pass


def louder(original: Callable[[Any], str]) -> Callable[[Any], str]:
    @functools.wraps(original)
    def wrapper(self: Base) -> str:
        return original(self) + "!"

    return wrapper


def theirs(self: Base) -> str:
    return "theirs"


def test_methods_are_wrapped_once_and_put_back() -> None:
    methods, before = WrappedMethods(), Base.say
    methods.wrap(Child, "say", louder)  # which is Base's
    methods.wrap(Base, "say", louder)
    methods.wrap(Base, "say", louder)
    assert Base().say() == Child().say() == "said!" and "say" not in vars(Child)
    methods.restore()
    methods.restore()
    assert Base.say is before


def test_what_another_has_wrapped_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Base, "say", Base.say)  # put back afterwards
    methods = WrappedMethods()
    methods.wrap(Base, "say", louder)
    Base.say = theirs
    methods.restore()
    assert Base.say is theirs
