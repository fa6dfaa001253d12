"""Process-wide observers and patches: connected once, and removed with the last observer."""

from __future__ import annotations

import functools
import gc
from contextlib import ExitStack
from typing import Any, Callable

import pytest

from fastcheck.utils.torch.patching import Listeners, wrap_method


class Listener:
    pass


def counting() -> tuple[list[str], Listeners[Listener]]:
    log: list[str] = []

    def begin(at_end: ExitStack) -> None:
        log.append("begin")
        at_end.callback(log.append, "end")

    return log, Listeners(begin)


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
    listeners: Listeners[Listener] = Listeners(lambda at_end: at_end.callback(end))
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
    at_end, before = ExitStack(), Base.say
    wrap_method(at_end, Child, "say", louder)  # which is Base's
    wrap_method(at_end, Base, "say", louder)
    wrap_method(at_end, Base, "say", louder)
    assert Base().say() == Child().say() == "said!" and "say" not in vars(Child)
    at_end.close()
    at_end.close()
    assert Base.say is before


def test_what_another_has_wrapped_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Base, "say", Base.say)  # put back afterwards
    with ExitStack() as at_end:
        wrap_method(at_end, Base, "say", louder)
        Base.say = theirs
    assert Base.say is theirs
