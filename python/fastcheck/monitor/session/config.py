"""The options of install() in one dataclass, which checks them."""

from __future__ import annotations

import inspect
import os
from dataclasses import InitVar, dataclass, field, fields
from functools import cached_property
from typing import Any, Optional, Union

from fastcheck.errors import ConfigError, as_list, choice, unknown_option
from fastcheck.record.format import DEPTHS, Depth

from .options import Filter, Log, OnRequest, Patterns, Stop, Training, at_least_one, pattern_tuple

_GROUPS = {"stop": Stop, "log": Log, "filter": Filter, "training": Training}
#: The values of ``record=``: a depth, or all of a record and the exponents of some steps.
RECORDS = (*DEPTHS, "range")
_SYNCS = ("never", "step", "call")


@dataclass(frozen=True)
class Config:
    """The options of install(); its docstring and those of the groups describe them.

    Raises:
        ConfigError: an option, or two of them together, can't be used.
    """

    overflow_nums: int = 1
    level: str = "module"
    sync: str = "never"
    record: str = "full"
    log_dir: InitVar[Union[str, os.PathLike[str], None]] = None
    include: Patterns = None
    exclude: Patterns = None
    every: int = 1
    stats_every: int = 1
    stop: Stop = field(default_factory=Stop)
    log: Log = field(default_factory=lambda: Log(None))
    filter: Filter = field(default_factory=Filter)
    training: Training = field(default_factory=Training)
    on_request: Optional[OnRequest] = None

    def __post_init__(self, log_dir: Union[str, os.PathLike[str], None]) -> None:
        choice("level", self.level, ("module", "op"))
        choice("record", self.record, RECORDS)
        choice("sync", self.sync, _SYNCS)
        at_least_one(
            "overflow_nums",
            self.overflow_nums,
            "the number of overflow events to stop at, or -1 to never stop",
            "overflow_nums=1 stops at the first event; overflow_nums=-1 only records",
            beside=-1,
        )
        at_least_one("every", self.every, "observe every so many steps", "every=1 observes each")
        self._check_stats_every()
        for name in ("include", "exclude"):
            self._check_patterns(name)
        for name, kind in _GROUPS.items():
            _check_group(name, kind, getattr(self, name))
        self._check_request()
        if log_dir is not None:
            object.__setattr__(self, "log", _log_at(log_dir, self.log))
        self._check_filter()
        if self.stop.dump is not None:
            self._check_dump()

    def _check_patterns(self, name: str) -> None:
        value = getattr(self, name)
        value = value if value is None or isinstance(value, str) else as_list(value)
        if name == "exclude" and not value:
            value = ()
        elif value is not None:
            value = pattern_tuple(name, value, 'module paths or patterns such as "layers.*.attn"')
        object.__setattr__(self, name, value)

    def _check_stats_every(self) -> None:
        every, wanted = self.every, self.stats_every
        at_least_one(
            "stats_every",
            wanted,
            "read every so many steps whole",
            "stats_every=1 reads each whole",
        )
        if wanted == 1:
            return
        if self.record in ("health", "range"):
            raise ConfigError(
                f'stats_every= is not for record="{self.record}"',
                expected='record="stats" or record="full" with stats_every=',
                got=f"stats_every={wanted}, record={self.record!r}",
                hint='record="health" counts in each step anyway'
                if self.record == "health"
                else 'record="range" reads each step whole',
            )
        if wanted % every:
            raise ConfigError(
                "stats_every= has to be a multiple of every=",
                expected=f"a multiple of {every}, such as stats_every={10 * every}",
                got=f"stats_every={wanted}, every={every}",
            )

    def _check_request(self) -> None:
        if self.on_request is None:
            return
        _check_group("on_request", OnRequest, self.on_request)
        if self.on_request.level == self.level:
            raise ConfigError(
                f'OnRequest(level="{self.level}") asks for what is observed anyway',
                expected='OnRequest(level="op") of a monitor at module level',
                got=f"level={self.level!r}",
                hint='OnRequest(level="dump") writes dumps, at op level too',
            )

    def _check_filter(self) -> None:
        for name in ("ops", "roles"):
            value = getattr(self.filter, name)
            if value is not None and self.level != "op":
                raise ConfigError(
                    f"Filter({name}=) is for op level",
                    expected=f'level="op" with {name}=, or level="module" without',
                    got=f"{name}={value!r}, level={self.level!r}",
                    hint="at module level include= and exclude= choose modules",
                )

    def _check_dump(self) -> None:
        """Stop(dump=) where no stop could write a dump is an error."""
        if self.overflow_nums == -1:
            wrong, got = "has no effect with overflow_nums=-1", "overflow_nums=-1"
        elif self.level == "op" and self.sync != "call":
            wrong = 'at level="op" requires sync="call"'
            got = f'level="op", sync={self.sync!r}'
        elif self.level == "module" and self.stop.action != "raise":
            wrong = 'at level="module" requires action="raise"'
            got = f'level="module", action={self.stop.action!r}'
        else:
            return
        raise ConfigError(
            f"Stop(dump=) {wrong}",
            expected='a directory, with level="module" and monitor.run(step, batch), or with '
            'level="op" and sync="call"',
            got=got,
        )

    def observes(self, step: int) -> bool:
        """True if this step is read."""
        steps = self.filter.steps
        return step % self.every == 0 and (steps is None or step in steps)

    @cached_property
    def is_filtered(self) -> bool:
        """Operators, their tensors or steps are left out."""
        return self.every > 1 or self.filter != Filter()

    @cached_property
    def left_out_by(self) -> tuple[str, ...]:
        """The options that leave modules, operators or steps unread."""
        given = {
            "include": self.include is not None,
            "exclude": bool(self.exclude),
            "every": self.every > 1,
            "filter": self.filter != Filter(),
        }
        return tuple(name for name, is_given in given.items() if is_given)

    @cached_property
    def may_stop(self) -> bool:
        """True if events can end the run."""
        return self.overflow_nums > 0 and self.stop.action == "raise"

    @cached_property
    def finds_operators(self) -> bool:
        """True if a stop looks for the operator in the tensors and calls kept from the step."""
        return self.level == "module" and self.stop.find_operator and self.may_stop

    @cached_property
    def is_strict(self) -> bool:
        """True if a non-finite value is an event where it appears, whatever becomes of it."""
        return self.stop.count != "origin"

    @cached_property
    def may_wait(self) -> bool:
        """True if the host may wait for a device in the middle of a step."""
        return self.level == "op" and self.sync == "call"

    @cached_property
    def runs_again(self) -> bool:
        """True if a step of monitor.run() that is stopped is run again: a dump at module level
        needs the inputs of its calls.
        """
        return self.stop.replay or (self.stop.dump is not None and self.level == "module")

    def of_all_ranks(self) -> dict[str, object]:
        """The options that ranks which train together have to have in common."""
        stop = self.stop
        return {
            "overflow_nums": self.overflow_nums,
            "sync": self.sync,
            "every": self.every,
            "action": "a function" if callable(stop.action) else stop.action,
            "count": stop.count,
            "within": stop.within,
        }

    @cached_property
    def depth(self) -> Depth:
        return Depth.FULL if self.record == "range" else DEPTHS[self.record]

    def to_meta(self) -> dict[str, Any]:
        """The options that are written to a log's meta file, ready for JSON."""
        stop, wanted = self.stop, self.filter
        return {
            "overflow_nums": self.overflow_nums,
            "within": stop.within,
            "count": stop.count,
            "action": stop.action if isinstance(stop.action, str) else repr(stop.action),
            "level": self.level,
            "record": self.record,
            "include": self.include,
            "exclude": self.exclude,
            "every": self.every,
            **({"stats_every": self.stats_every} if self.stats_every > 1 else {}),
            **({"steps": str(wanted.steps)} if wanted.steps is not None else {}),
            **({"ops": wanted.ops} if wanted.ops else {}),
            **({"roles": wanted.roles} if wanted.roles else {}),
            "history": self.log.history,
            "max_skipped": stop.max_skipped,
        }


def option_of_install(name: str) -> str:
    """The text of the TypeError for a keyword of install() that is none of its options."""
    options = [*inspect.signature(Config).parameters, "sinks", "watch"]
    groups = {"on_request": OnRequest, **_GROUPS}  # of two with this name, the module below it
    moved = {option.name: group for group, kind in groups.items() for option in fields(kind)}
    renamed = {"log_limit": "limit", "dump_on_overflow": "dump"}.get(name, name)
    if renamed in moved:
        group = moved[renamed]
        first = "dir, " if group == "log" and renamed != "dir" else ""
        written = f"{group}=fastcheck.{groups[group].__name__}({first}{renamed}=...)"
        return f"install() has no option {name!r}; write {written}"
    return unknown_option("install", name, options, moved)


def _check_group(name: str, kind: type, value: object) -> None:
    if not isinstance(value, kind):
        raise ConfigError(
            f"{name} must be a fastcheck.{kind.__name__}",
            expected=f"{name}=fastcheck.{kind.__name__}(...)",
            got=repr(value),
            hint='log_dir="..." is short for log=fastcheck.Log("...")' if kind is Log else "",
        )


def _log_at(directory: Union[str, os.PathLike[str]], log: Log) -> Log:
    if log != Log(None):
        raise ConfigError(
            "log_dir= and log= are both given",
            expected='log_dir="..." alone, or log=fastcheck.Log("...", limit=..., history=...)',
            got=f"log_dir={directory!r}, log={log!r}",
        )
    return Log(directory)
