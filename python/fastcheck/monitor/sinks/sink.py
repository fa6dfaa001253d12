"""ScalarSink, the protocol of a sink, and open_sinks(), which opens those that ``sinks=`` names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional, Protocol, Union

import torch

from fastcheck.errors import ConfigError, as_list, did_you_mean
from fastcheck.utils.torch.rank import own_rank

from .libraries import LIBRARIES, TensorBoard, Wandb, sink_of


class ScalarSink(Protocol):
    """A place that scalars go to. Only ``log`` is needed of an object that a user gives."""

    def log(self, scalars: Mapping[str, float], step: int, /) -> object:
        """Writes the numbers of one step."""


Sinks = Union[str, ScalarSink, Sequence[Union[str, ScalarSink]], None]


def open_sinks(given: Any, *, is_trial: bool = False) -> tuple[ScalarSink, ...]:
    """The sinks that ``install(sinks=)`` names. Names stand for nothing on other ranks than 0,
    whose trackers have no run; objects are used where they are given. ``is_trial``: see sink_of().

    Raises:
        ConfigError: an unknown name, a library that is not installed or has no active run, or an
            object without a method that takes scalars.
    """
    if given is None:
        return ()
    entries = as_list(given) if _method(given) is None else [given]
    sinks = [_open(entry, is_trial) for entry in entries]
    return tuple(sink for sink in sinks if sink is not None)


def sinks_of_environment(*, is_trial: bool = False) -> tuple[ScalarSink, ...]:
    """The sinks that the variable FASTCHECK_SINKS names, with commas between them.

    Raises:
        ConfigError: as open_sinks().
    """
    names = [name.strip() for name in os.environ.get("FASTCHECK_SINKS", "").split(",")]
    return open_sinks([name for name in names if name], is_trial=is_trial)


def _open(given: Any, is_trial: bool) -> Optional[ScalarSink]:
    if isinstance(given, str):
        name, _, target = given.partition(":")
        if name not in LIBRARIES:
            raise ConfigError(
                f"unknown sink {name!r}",
                expected=", ".join(map(repr, LIBRARIES)) + ", or an object with log(dict, step)",
                got=repr(name),
                hint=did_you_mean(name, LIBRARIES),
            )
        return sink_of(name, target, is_trial=is_trial) if own_rank() == 0 else None
    package = type(given).__module__.rpartition(".")[0]
    if package == __package__:  # made by an adapter for a trainer
        return given
    if package.partition(".")[0] == "wandb":
        return Wandb(given)
    if callable(getattr(given, "add_scalar", None)):
        return TensorBoard(given)
    method = _method(given)
    if method is None:
        raise ConfigError(
            "a sink can't be written to",
            expected="an object with log(dict, step), log_metrics(dict, step), "
            "log_dict(dict, step), track(dict, step=) or add_scalar(name, value, step)",
            got=f"{type(given).__name__}: {given!r}",
            hint="names of libraries: " + ", ".join(LIBRARIES),
        )
    return _Given(given, method)


def _method(given: object) -> Optional[Callable[..., object]]:
    """The method that takes a dict and a step: of a user's object, a Lightning or a Composer
    logger, a torchtune logger, an aim run.
    """
    if isinstance(given, torch.Tensor):  # its log() is the logarithm
        return None
    for name in ("log", "log_metrics", "log_dict", "track"):
        method = getattr(given, name, None)
        if callable(method):
            return method
    return None


class _Given:
    """An object of the user's; ``text``, ``alert`` and ``warning`` are passed on to it where it has
    them.
    """

    def __init__(self, owner: object, method: Callable[..., object]) -> None:
        self._method = method
        self.name = type(owner).__name__
        for name in ("text", "alert", "warning"):
            if callable(getattr(owner, name, None)):
                setattr(self, name, getattr(owner, name))

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._method(scalars, step=step)
