"""The groups of options of install(): Stop, Log, Filter and Training; and OnRequest."""

from __future__ import annotations

import math
import os
import signal as signals
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any, Callable, Optional, Union

import torch

from fastcheck.errors import (
    ConfigError,
    as_list,
    check_bool,
    choice,
    local_path,
    names_options,
    plain,
)
from fastcheck.utils.names.style import check_style
from fastcheck.utils.text.numbers import parse_bytes
from fastcheck.utils.torch.versions import GradScaler


@names_options
@dataclass(frozen=True)
class OnRequest:
    """Options by which a run that is under way is asked to observe its next steps more closely:
    ``install(model, on_request=fastcheck.OnRequest(file="more", steps=3))``, and ``touch more``.

    Args:
        file: a path. The request is that a file there is touched or made; it is looked at once in a
            second at most, at the end of a step.
        signal: a signal, such as ``"SIGUSR1"``. install() then has to be called in the main thread.
            A former handler is called too, and put back by remove().
        level: ``"op"``: a second monitor at op level, which stops nothing, with a log of its own.
            ``"dump"``: a fastcheck.Dumper for each step.
        steps: how many steps, from the next step on.
        dir: where it is written, to ``step12-op`` or ``step12-dump``.
        tensors: with ``level="dump"``, write the values too.

    Raises:
        ConfigError: an option has a value that can't be used.
    """

    file: Union[str, os.PathLike[str], None] = None
    signal: Union[str, int, None] = None
    level: str = "op"
    steps: int = 3
    dir: Union[str, os.PathLike[str]] = "fastcheck_request"
    tensors: bool = False

    def __post_init__(self) -> None:
        if self.file is None and self.signal is None:
            raise ConfigError(
                "nothing can make the request",
                expected="a file, a signal, or both",
                got="file=None, signal=None",
                hint='fastcheck.OnRequest(signal="SIGUSR1")',
            )
        if self.file is not None:
            object.__setattr__(self, "file", local_path("file", self.file, "the path of a file"))
        if self.signal is not None:
            object.__setattr__(self, "signal", _checked_signal(self.signal))
        choice("level", self.level, ("op", "dump"))
        at_least_one("steps", self.steps, "a number of steps")
        object.__setattr__(self, "dir", local_path("dir", self.dir, "a directory"))
        check_bool("tensors", self.tensors)
        if self.tensors and self.level != "dump":
            raise ConfigError(
                "OnRequest(tensors=) is for a dump",
                expected='level="dump" with tensors=True',
                got=f"level={self.level!r}",
            )

    @property
    def path(self) -> Optional[str]:
        """``file`` as a string."""
        return None if self.file is None else os.fspath(self.file)

    @property
    def number(self) -> Optional[signals.Signals]:
        """``signal`` as a signal's number."""
        return None if self.signal is None else _checked_signal(self.signal)


def _checked_signal(value: Union[str, int]) -> signals.Signals:
    try:
        if isinstance(value, str):
            return signals.Signals[value]
        if isinstance(value, int) and not isinstance(value, bool):
            return signals.Signals(value)
    except (KeyError, ValueError):
        pass
    raise ConfigError(
        "signal is none of this system",
        expected='a name or a number of a signal, such as "SIGUSR1"',
        got=repr(value),
    )


Action = Union[str, Callable[..., Any]]
Optimizers = Union[torch.optim.Optimizer, Iterable[torch.optim.Optimizer], None]
Patterns = Union[str, Iterable[str], None]
ScalerLike = Union[GradScaler, float, Callable[[], float], None]

ROLES = ("input", "output", "grad_output", "grad_input", "optimizer_state", "param")
_COUNTS = ("origin", "all", "calls")
_ACTIONS = ("raise", "warn")


@names_options
@dataclass(frozen=True)
class Stop:
    """Options of a stop: which events stop a run, when that may happen, and what it leaves behind:
    ``install(model, stop=fastcheck.Stop(within=100))``.

    Args:
        count: ``"origin"`` counts events where overflows begin or enter, of those that have a
            consequence; ``"all"`` counts every appearance, and what they spread to;
            ``"calls"`` the same, but of each call of an operator or module only the first, as
            ptdbg_ascend and msprobe count.
        within: count only the events of the last ``within`` steps; None: of the whole run.
        action: ``"raise"`` raises OverflowDetected, ``"warn"`` warns; a callable is called with the
            Event.
        max_skipped: this many steps in a row that loss scaling skips count as one event.
        max_lag: with ``sync="never"``, how many steps the host may be ahead of the device before it
            waits; None: any number.
        protect_weights: whether an update with a non-finite gradient is skipped on the device, by
            the ``found_inf`` argument of torch's fused optimizers, so that a later stop finds the
            weights intact. ``"auto"``: where the optimizer has that argument, on accelerators and
            among several ranks with ``sync="never"``, if events may stop the run. True: always,
            with a warning where an optimizer does not have it. False: never.
        replay: run a step of ``monitor.run(step, batch)`` that is stopped again at op level, so
            that the report names the operator and the line.
        dump: a directory. A stop writes the inputs and outputs of the operator that is the culprit,
            its random state, the environment, and a script that runs it again there. At module
            level for steps of ``monitor.run(step, batch)``, which sets ``replay``; at op level with
            ``sync="call"``.
        style: how reports name tensors: ``"fastcheck"``, or ``"msprobe"`` for names such as
            ``Functional.softmax.7.backward.output.0``.
        report: whether a stop writes the log as an HTML page, ``report.html`` beside it, and names
            it in the message. Of a log of more than 128 MiB ``fastcheck report`` makes the page.
        find_operator: whether a stop at module level looks for the operator that made the numbers:
            in the graph of the loss and, on the CPU, by running the call that the stop interrupts
            once more, on copies.

    Raises:
        ConfigError: an option has a value that can't be used.
    """

    count: str = "origin"
    within: Optional[int] = None
    action: Action = "raise"
    max_skipped: int = 20
    max_lag: Optional[int] = 2
    protect_weights: Union[bool, str] = "auto"
    replay: bool = False
    dump: Union[str, os.PathLike[str], None] = None
    style: str = "fastcheck"
    report: bool = True
    find_operator: bool = True

    def __post_init__(self) -> None:
        choice("count", self.count, _COUNTS)
        if self.within is not None:
            at_least_one(
                "within", self.within, "a number of steps, or None to count over the whole run"
            )
        if not callable(self.action):
            choice("action", self.action, _ACTIONS, "a callable that takes the Event")
        at_least_one("max_skipped", self.max_skipped, "a number of skipped steps in a row")
        if self.max_lag is not None:
            at_least_one(
                "max_lag",
                self.max_lag,
                "how many steps the host may be ahead of the device, or None for no limit",
                "max_lag=2 stops one or two steps after the event",
            )
        if not isinstance(self.protect_weights, bool):
            choice("protect_weights", self.protect_weights, ("auto",), "True or False")
        check_bool("replay", self.replay)
        if self.dump is not None:
            object.__setattr__(self, "dump", _directory("dump", self.dump))
        check_style(self.style)
        check_bool("report", self.report)
        check_bool("find_operator", self.find_operator)


@names_options
@dataclass(frozen=True)
class Log:
    """Options of the log: where the records of a run are written, and how many of them are held in
    memory: ``install(model, log=fastcheck.Log("runs/new", limit="10GB"))``.

    Args:
        dir: the directory that all records are written to. None: only a stop writes, to
            ``fastcheck_log/``.
        limit: the size the log may have, in bytes or as a text such as ``"1GB"``; the oldest steps
            are deleted first. Events outlive them, until they take half of it. None: no limit.
        history: how many steps of records are held in memory. A stop writes them.

    Raises:
        ConfigError: an option has a value that can't be used.
    """

    dir: Union[str, os.PathLike[str], None]
    limit: Union[str, int, None] = "1GB"
    history: int = 100

    def __post_init__(self) -> None:
        if self.dir is not None:
            object.__setattr__(self, "dir", _directory("the log's dir", self.dir))
        parse_bytes(self.limit)
        at_least_one("history", self.history, "a number of steps to hold")

    @property
    def limit_bytes(self) -> Optional[int]:
        """``limit`` in bytes."""
        return parse_bytes(self.limit)


@names_options
@dataclass(frozen=True)
class Filter:
    """Options of what is observed, by operators, tensors and steps: ``install(model, level="op",
    filter=fastcheck.Filter(ops=["aten._softmax", "!aten.mul*"]))``.

    Args:
        ops: at op level, names of operators or patterns: ``"aten._softmax"``, ``"mm"``,
            ``"aten.add*"``, ``"Functional.softmax"``. A name that begins with ``!`` leaves the
            operator out. A composite operator stands for the operators it calls, and the operators
            of the forward pass for those of their backward.
        roles: at op level, which tensors are read: ``"output"``, ``"grad_input"``,
            ``"optimizer_state"`` (results of the optimizer's operators), ``"param"`` (parameters
            and buffers, once), and ``"input"`` and ``"grad_output"`` (tensors that an operator
            reads and no observed operator made).
        steps: the steps to observe, counted from 0: a range, or their numbers.

    Raises:
        ConfigError: an option has a value that can't be used.
    """

    ops: Patterns = None
    roles: Patterns = None
    steps: Optional[Iterable[int]] = None

    def __post_init__(self) -> None:
        for name, examples in (
            ("ops", 'names of operators or patterns such as "aten._softmax" or "mm"'),
            ("roles", 'roles such as "output" or "grad_input"'),
        ):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, pattern_tuple(name, value, examples))
        for role in self.roles or ():
            choice("role", role, ROLES)
        if self.steps is not None:
            object.__setattr__(self, "steps", _checked_steps(self.steps))


@names_options
@dataclass(frozen=True)
class Training:
    """The parts of the training program that install() can't find, and what it may change there:
    ``install(model, training=fastcheck.Training(scaler=lambda: loss_scale))``.

    Args:
        optimizer: the optimizers whose ``step()`` ends a step of the run; of several the last of
            them. None: those of the model's parameters.
        scaler: the loss scale, as a number or as a callable that returns it, or a
            ``torch.amp.GradScaler``. None: a GradScaler is found when it is used.
        process_group: the ranks that stop together (a ``torch.distributed.ProcessGroup``). None:
            all ranks, where torch.distributed is initialised. Each of them calls install().
        reset_overflow_status: on an Ascend NPU in saturation mode, whether fastcheck clears the
            device's overflow status at the start and at each step boundary after it has read it, at
            op level after each operator, so that every overflow is attributed to its step or
            operator. The device has a single status: leave it False where other code reads
            it.

    Raises:
        ConfigError: an option has a value that can't be used.
    """

    optimizer: Optimizers = None
    scaler: ScalerLike = None
    process_group: Any = None
    reset_overflow_status: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "optimizer", _checked_optimizers(self.optimizer))
        object.__setattr__(self, "scaler", _checked_scaler(self.scaler))
        check_process_group(self.process_group)
        check_bool("reset_overflow_status", self.reset_overflow_status)

    @property
    def optimizers(self) -> Optional[tuple[torch.optim.Optimizer, ...]]:
        """``optimizer`` as a tuple."""
        return _checked_optimizers(self.optimizer)

    @cached_property
    def has_own_scaling(self) -> bool:
        """The scale is a number or a callable: which updates are skipped is then not observable."""
        return self.scaler is not None and not isinstance(self.scaler, GradScaler)

    @cached_property
    def has_own_scale(self) -> bool:
        """The loss is scaled without a GradScaler."""
        return self.has_own_scaling and self.scaler != 1.0


def at_least_one(
    name: str, value: object, expected: str, hint: str = "", *, beside: Optional[int] = None
) -> None:
    """ConfigError if ``value`` is not an int of at least 1. ``beside``: another value that is
    accepted.
    """
    if isinstance(value, int) and not isinstance(value, bool) and (value >= 1 or value == beside):
        return
    raise ConfigError(
        f"{name} must be an int >= 1" + (f" or {beside}" if beside else ""),
        expected=expected,
        got=repr(value),
        hint=hint,
    )


def pattern_tuple(name: str, value: Union[str, Iterable[str]], examples: str) -> tuple[str, ...]:
    """One pattern or several as a tuple; ConfigError if there is none, or not a string."""
    patterns = tuple(as_list(value))
    if patterns and all(isinstance(pattern, str) for pattern in patterns):
        return patterns
    has_some = any(isinstance(pattern, str) for pattern in patterns)
    raise ConfigError(
        f"{name} holds something that is not a string" if has_some else f"{name} holds no pattern",
        expected=examples,
        got=repr(value),
        hint=f"leave {name}= out to observe everything" if not patterns else "",
    )


def _directory(name: str, value: object) -> str:
    return local_path(name, value, "a directory, or None")


def _checked_steps(value: Iterable[int]) -> Union[range, tuple[int, ...]]:
    wanted = value if isinstance(value, range) else tuple(map(plain, as_list(value)))
    # A range is not spelled out: its first and last number stand for all.
    ends = (*wanted[:1], *wanted[-1:]) if isinstance(wanted, range) else wanted
    are_steps = all(type(step) is int and step >= 0 for step in ends)
    if isinstance(value, Iterable) and ends and are_steps:
        return wanted
    raise ConfigError(
        "steps must be ints of at least 0",
        expected="a range, such as range(100, 110), or the numbers of steps, from 0",
        got=repr(value),
        hint="leave steps= out to observe every step",
    )


def _checked_optimizers(value: Optimizers) -> Optional[tuple[torch.optim.Optimizer, ...]]:
    if value is None:
        return None
    optimizers = tuple(as_list(value))
    others = [one for one in optimizers if not isinstance(one, torch.optim.Optimizer)]
    if others or not optimizers:
        other = others[0] if others else value
        raise ConfigError(
            "optimizer is not an optimizer",
            expected="a torch.optim.Optimizer, or several",
            got=f"{type(other).__name__}: {other!r}",
            hint="leave optimizer= out: install() finds the optimizers of the model's "
            "parameters; for an optimizer of another class call monitor.step() after each "
            "step",
        )
    return optimizers


def _checked_scaler(value: ScalerLike) -> ScalerLike:
    if value is None or isinstance(value, GradScaler) or callable(value):
        return value
    if isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) < math.inf:
        return float(value)
    raise ConfigError(
        "scaler is not a loss scale",
        expected="a torch.amp.GradScaler, a finite number above 0, or a callable that returns one",
        got=f"{type(value).__name__}: {value!r}",
        hint="leave scaler= out: install() finds a GradScaler",
    )


def check_process_group(value: Any) -> None:
    distributed = torch.distributed
    if value is None or (
        distributed.is_available() and isinstance(value, distributed.ProcessGroup)
    ):
        return
    raise ConfigError(
        "process_group is not a process group of this rank",
        expected="what torch.distributed.new_group() gives its members, or None: all ranks",
        got=f"{type(value).__name__}: {value!r}",
        hint="leave process_group= out, or install() on the members of the group only",
    )
