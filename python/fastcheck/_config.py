"""The options of install(), checked once: everything after this may trust them."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any, Callable, Optional, Union

import torch

from ._compat import GradScaler
from ._errors import ConfigError, did_you_mean, explain
from ._log import parse_bytes
from ._record import Depth
from ._style import check_style

__all__ = ["Action", "Config", "Optimizers", "ScalerLike", "make_config"]

Action = Union[str, Callable[..., Any]]
Optimizers = Union[torch.optim.Optimizer, Iterable[torch.optim.Optimizer], None]
ScalerLike = Union[GradScaler, float, Callable[[], float], None]

_DEPTHS = {"health": Depth.HEALTH, "stats": Depth.STATS, "full": Depth.FULL}
_SYNCS = ("never", "step", "call")
_COUNTS = ("origin", "all", "calls")
_ACTIONS = ("raise", "warn")
_EXPECTED = {
    "ops": 'names of operators or patterns such as "aten._softmax" or "mm"',
    "roles": 'roles such as "output" or "grad_input"',
}


@dataclass(frozen=True)
class Config:
    """The options of install() after checking; what each means is in install()'s docstring."""

    optimizers: Optional[tuple[torch.optim.Optimizer, ...]]
    scaler: ScalerLike
    overflow_nums: int
    within: Optional[int]
    count: str
    action: Action
    record: str
    sync: str
    max_lag: Optional[int]
    protect_weights: Union[bool, str]
    include: Optional[tuple[str, ...]]
    exclude: tuple[str, ...]
    every: int
    history: int
    max_skipped: int
    log_dir: Optional[str]
    log_limit: Optional[int]
    process_group: Any
    level: str = "module"
    # At op level; empty: all.
    ops: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    steps: Optional[Container[int]] = None
    style: str = "fastcheck"
    replay: bool = False
    dump_on_overflow: Optional[str] = None
    reset_overflow_status: bool = False

    def observes(self, step: int) -> bool:
        """Whether this step is read."""
        return step % self.every == 0 and (self.steps is None or step in self.steps)

    @property
    def is_filtered(self) -> bool:
        """Operators, their tensors or steps are left out."""
        return bool(self.ops or self.roles or self.every > 1 or self.steps is not None)

    @property
    def has_own_scaling(self) -> bool:
        """The user gave a number or a callable: nobody tells which updates are skipped."""
        return self.scaler is not None and not isinstance(self.scaler, GradScaler)

    @property
    def may_stop(self) -> bool:
        """Whether events can end the run."""
        return self.overflow_nums > 0 and self.action == "raise"

    @property
    def may_wait(self) -> bool:
        """Whether the host may wait for a device in the middle of a step."""
        return self.level == "op" and self.sync == "call"

    @property
    def depth(self) -> Depth:
        return _DEPTHS[self.record]

    def to_meta(self) -> dict[str, Any]:
        """The options that a reader of the log wants to know, ready for JSON."""
        return {
            "overflow_nums": self.overflow_nums,
            "within": self.within,
            "count": self.count,
            "action": self.action if isinstance(self.action, str) else repr(self.action),
            "record": self.record,
            "include": self.include,
            "exclude": self.exclude,
            "every": self.every,
            **({"steps": str(self.steps)} if self.steps is not None else {}),
            **({"ops": self.ops} if self.ops else {}),
            **({"roles": self.roles} if self.roles else {}),
            "history": self.history,
            "max_skipped": self.max_skipped,
        }


def make_config(
    *,
    optimizer: Optimizers,
    scaler: ScalerLike,
    overflow_nums: int,
    within: Optional[int],
    count: str,
    action: Action,
    level: str,
    record: str,
    sync: str,
    max_lag: Optional[int],
    protect_weights: Union[bool, str],
    include: Union[str, Iterable[str], None],
    exclude: Union[str, Iterable[str], None],
    ops: Union[str, Iterable[str], None],
    roles: Union[str, Iterable[str], None],
    steps: Optional[Iterable[int]],
    every: int,
    history: int,
    max_skipped: int,
    log_dir: Union[str, os.PathLike[str], None],
    log_limit: Union[str, int, None],
    process_group: Any,
    style: str,
    replay: bool,
    reset_overflow_status: bool = False,
    dump_on_overflow: Union[str, os.PathLike[str], None] = None,
) -> Config:
    """Checks every option; the first one that can't be used raises ConfigError, with nothing
    installed.
    """
    _one_of("level", level, ("module", "op"))
    _one_of("record", record, tuple(_DEPTHS))
    for name, value in (("ops", ops), ("roles", roles)):
        if value is not None and level != "op":
            raise ConfigError(
                explain(
                    f"{name}= is for op level",
                    expected=f'level="op" with {name}=, or level="module" without',
                    came=f"{name}={value!r}, level={level!r}",
                    do="at module level include= and exclude= choose modules",
                )
            )
    _one_of("sync", sync, _SYNCS)
    _one_of("count", count, _COUNTS)
    if not callable(action):
        _one_of("action", action, _ACTIONS, "or a callable that takes the stop report")
    if overflow_nums != -1 or isinstance(overflow_nums, bool):
        _positive(
            "overflow_nums",
            overflow_nums,
            "the number of overflow events to stop at, or -1 to never stop",
            "overflow_nums=1 stops at the first event; overflow_nums=-1 only records",
        )
    if within is not None:
        _positive("within", within, "a number of steps, or None to count over the whole run")
    if not isinstance(protect_weights, bool):
        _one_of("protect_weights", protect_weights, ("auto",), "or True or False")
    if not isinstance(reset_overflow_status, bool):
        raise ConfigError(
            explain(
                "reset_overflow_status is neither True nor False",
                expected="whether the device's overflow status may be cleared",
                came=repr(reset_overflow_status),
            )
        )
    if max_lag is not None:
        _positive(
            "max_lag",
            max_lag,
            "how many steps the host may be ahead of the device, or None for no limit",
            "max_lag=2 stops one or two steps after the event",
        )
    _positive("every", every, "observe every so many steps", "every=1 observes each step")
    _positive("history", history, "a number of steps to hold")
    _positive("max_skipped", max_skipped, "a number of skipped steps in a row")
    if log_dir is not None and not isinstance(log_dir, (str, os.PathLike)):
        raise ConfigError(
            explain("log_dir is not a path", expected="a directory, or None", came=repr(log_dir))
        )
    if dump_on_overflow is not None:
        _check_dump(dump_on_overflow, level, sync, action, overflow_nums)
    return Config(
        optimizers=_optimizers(optimizer),
        scaler=_scaler(scaler),
        overflow_nums=overflow_nums,
        within=within,
        count=count,
        action=action,
        record=record,
        sync=sync,
        max_lag=max_lag,
        protect_weights=protect_weights,
        include=None if include is None else _patterns("include", include),
        exclude=_patterns("exclude", exclude) if exclude else (),
        ops=_patterns("ops", ops) if ops is not None else (),
        roles=_patterns("roles", roles) if roles is not None else (),
        steps=_steps(steps),
        every=every,
        history=history,
        max_skipped=max_skipped,
        log_dir=None if log_dir is None else os.fspath(log_dir),
        log_limit=parse_bytes(log_limit),
        process_group=_process_group(process_group),
        level=level,
        style=check_style(style),
        # What a step reads is dumped when it is run again.
        replay=bool(replay) or (dump_on_overflow is not None and level == "module"),
        dump_on_overflow=None if dump_on_overflow is None else os.fspath(dump_on_overflow),
        reset_overflow_status=reset_overflow_status,
    )


def _check_dump(
    directory: object, level: str, sync: str, action: Action, overflow_nums: int
) -> None:
    """Everything that would leave dump_on_overflow= without anything to dump is an error."""
    wrong = ""
    if not isinstance(directory, (str, os.PathLike)):
        wrong, came = "is not a path", repr(directory)
    elif overflow_nums == -1:
        wrong, came = "dumps what stops the run, and nothing does", "overflow_nums=-1"
    elif level == "op" and sync != "call":
        wrong, came = 'dumps operators only with sync="call"', f'level="op", sync={sync!r}'
    elif level == "module" and action != "raise":
        wrong = "runs a step again that was stopped, and none is"
        came = f'level="module", action={action!r}'
    if wrong:
        raise ConfigError(
            explain(
                f"dump_on_overflow= {wrong}",
                expected='a directory, with level="module" and monitor.run(step, batch), or with '
                'level="op" and sync="call"',
                came=came,
            )
        )


def _one_of(name: str, value: object, choices: tuple[str, ...], otherwise: str = "") -> None:
    if isinstance(value, str) and value in choices:
        return
    expected = " or ".join(f'"{choice}"' for choice in choices)
    raise ConfigError(
        explain(
            f"unknown {name}",
            expected=f"{expected} {otherwise}".rstrip(),
            came=repr(value),
            do=did_you_mean(value, choices) if isinstance(value, str) else "",
        )
    )


def _positive(name: str, value: object, expected: str, do: str = "") -> None:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return
    raise ConfigError(
        explain(
            f"{name} is out of range",
            expected=f"an int of at least 1: {expected}",
            came=repr(value),
            do=do,
        )
    )


def _patterns(name: str, value: Union[str, Iterable[str]]) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else tuple(value)
    if patterns and all(isinstance(pattern, str) for pattern in patterns):
        return patterns
    raise ConfigError(
        explain(
            f"{name} holds no pattern",
            expected=_EXPECTED.get(name, 'module paths or patterns such as "layers.*.attn"'),
            came=repr(value),
            do=f"leave {name}= out to observe everything" if not patterns else "",
        )
    )


def _steps(value: Optional[Iterable[int]]) -> Optional[Container[int]]:
    if value is None:
        return None
    if isinstance(value, Iterable) and not isinstance(value, str):
        wanted = value if isinstance(value, range) else tuple(value)
        ends = (wanted[:1], wanted[-1:]) if isinstance(wanted, range) else (wanted,)
        whole = all(type(step) is int for part in ends for step in part)
        if wanted and whole and min(min(part) for part in ends) >= 0:
            return wanted
    raise ConfigError(
        explain(
            "steps names no step",
            expected="a range, such as range(100, 110), or the numbers of steps, from 0",
            came=repr(value),
            do="leave steps= out to observe every step",
        )
    )


def _optimizers(value: Optimizers) -> Optional[tuple[torch.optim.Optimizer, ...]]:
    if value is None:
        return None
    given = (value,) if isinstance(value, torch.optim.Optimizer) else value
    optimizers = tuple(given) if isinstance(given, Iterable) else (given,)
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                explain(
                    "optimizer is not an optimizer",
                    expected="a torch.optim.Optimizer, or several",
                    came=f"{type(optimizer).__name__}: {optimizer!r}",
                    do="leave optimizer= out: the optimizers of the model's parameters are found "
                    "by themselves; for one of your own making call monitor.step() after each step",
                )
            )
    return optimizers


def _process_group(value: Any) -> Any:
    distributed = torch.distributed
    if value is None or (
        distributed.is_available() and isinstance(value, distributed.ProcessGroup)
    ):
        return value
    raise ConfigError(
        explain(
            "process_group is not a process group of this rank",
            expected="what torch.distributed.new_group() gives its members, or None: all ranks",
            came=f"{type(value).__name__}: {value!r}",
            do="leave process_group= out, or install() on the members of the group only",
        )
    )


def _scaler(value: ScalerLike) -> ScalerLike:
    if value is None or isinstance(value, GradScaler) or callable(value):
        return value
    if isinstance(value, Real) and not isinstance(value, bool) and float(value) > 0:
        return float(value)
    raise ConfigError(
        explain(
            "scaler is not a loss scale",
            expected="a torch.amp.GradScaler, a number above 0, or a callable that returns one",
            came=f"{type(value).__name__}: {value!r}",
            do="leave scaler= out: a GradScaler is found by itself",
        )
    )
