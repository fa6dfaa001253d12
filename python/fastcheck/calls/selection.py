"""Selects the calls of a step to dump: by a list of names, or from one name to another.

Op level selects operators by ``monitor/op_level/sites.py`` instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional, Union

from fastcheck.errors import ConfigError, check_text, did_you_mean, explain, string_list
from fastcheck.record.site import OUTSIDE
from fastcheck.utils.names.msprobe import has_api_name
from fastcheck.utils.names.patterns import Wanted, matches_module, matches_op, read_module, read_op

Names = Union[str, Iterable[str], None]


class CallName(NamedTuple):
    """The names of a call. A call in backward has those of its op in the forward pass; ``ran`` is
    then the op that ran.
    """

    op: str
    module: Optional[str]
    call: int
    direction: str
    api: str = ""
    api_call: int = -1
    ran: str = ""


@dataclass(eq=False)
class Selection:
    """A selection of calls, which is asked once for each call, in order."""

    level: str
    _ops: Sequence[Wanted]
    _modules: Sequence[Wanted]
    _first: Optional[Wanted]
    _last: Optional[Wanted]

    def __post_init__(self) -> None:
        #: True if the last call given to wants() lies between first= and last=.
        self.is_within = True
        self._is_open = self._first is None
        self._is_over = False
        self._met: set[Wanted] = set()
        #: Names of the calls given to wants(), for messages.
        self._seen: dict[str, int] = {}
        self._paths: dict[str, None] = {}
        self.uses_apis = any(
            wanted.api or wanted.composite
            for wanted in (*self._ops, self._first, self._last)
            if wanted is not None
        )

    @property
    def is_all(self) -> bool:
        """True if nothing was named: the selection is all there is."""
        return not (self._ops or self._modules or self._first or self._last)

    def add_modules(self, paths: Iterable[str]) -> None:
        """Adds paths of modules that exist, called or not: lists may name these."""
        for path in paths:
            self._paths.setdefault(path)

    def wants(self, name: CallName, was_within: Optional[bool] = None) -> bool:
        """True if the call is dumped. ``was_within``: of a call of backward, whether the call that
        it is the backward of was between first= and last=; None where no such call is known.
        """
        self._note(name)
        self.is_within = self._is_within(name) if was_within is None else was_within
        return self.is_within and self.lists(name)

    def lists(self, name: CallName) -> bool:
        """Like wants(), for a call that is known to lie between first= and last=."""
        return self._listed(name) if self._ops or self._modules else True

    def wants_state(self, name: CallName) -> bool:
        """True if what a module stores is dumped: not where a list names ops, or calls."""
        if self._ops or self._first or self._last:
            return False
        return not self._modules or any(_is(wanted, name, is_op=True) for wanted in self._modules)

    def _listed(self, name: CallName) -> bool:
        chosen = not self._ops
        for wanted in self._ops:
            # Not any(): each name is marked as met.
            if _is(wanted, name):
                self._met.add(wanted)
                chosen = True
        if not self._modules:
            return chosen
        inside = False
        for wanted in self._modules:
            if _is(wanted, name, is_op=self.level != "module"):
                self._met.add(wanted)
                inside = True
        return chosen and inside

    def _is_within(self, name: CallName) -> bool:
        if self._is_over:
            return False
        if not self._is_open and self._first is not None and _is(self._first, name):
            self._is_open = True
            self._met.add(self._first)
        if not self._is_open:
            return False
        if self._last is not None and _is(self._last, name):
            self._is_over = True
            self._met.add(self._last)
        return True

    def _note(self, name: CallName) -> None:
        for op in filter(None, (name.op, name.ran)):
            self._seen[op] = max(self._seen.get(op, -1), name.call)
        if name.api:
            self._seen[name.api] = max(self._seen.get(name.api, -1), name.api_call)
        if name.module is not None:
            self._paths.setdefault(name.module)

    def check_modules(self) -> None:
        """Raises ConfigError for a name that means no module that is known now."""
        for wanted in (*self._ops, *self._modules, self._first, self._last):
            if wanted is None or wanted.module in (None, "", OUTSIDE):
                continue
            if not any(matches_module(wanted.module, path) for path in self._paths):
                raise ConfigError(self._complaint(wanted))

    def unmet(self) -> tuple[str, ...]:
        """The names that no call had."""
        return tuple(wanted.text for wanted in self._unmet())

    def unmet_text(self) -> str:
        """The text of an error about unmet(); empty where every name was met."""
        return "\n".join(map(self._complaint, self._unmet()))

    def _unmet(self) -> list[Wanted]:
        every = [*self._ops, *self._modules, self._first, self._last]
        return [wanted for wanted in every if wanted is not None and wanted not in self._met]

    def _complaint(self, missing: Wanted) -> str:
        hint = ""
        wanted = missing.op or missing.api
        if missing.module and not any(matches_module(missing.module, path) for path in self._paths):
            hint = (
                did_you_mean(missing.module, filter(None, self._paths))
                or "modules are named by their paths in model.named_modules()"
            )
        elif wanted is not None:
            met = [name for name in self._seen if _means(missing, name)]
            if met:
                last = max(self._seen[name] for name in met)
                hint = f"{met[0]} ran {last + 1} times, #0 to #{last}" + (
                    ", elsewhere" if missing.call is None or missing.call <= last else ""
                )
            elif missing.composite:
                hint = (
                    f"{missing.op} is made of other operators, and these are what runs: name the "
                    f'API ("Functional.{missing.composite}"), or the operators'
                )
            else:
                hint = did_you_mean(wanted, self._seen)
        return explain(
            f"no call in the block has the name {missing.text!r}",
            expected="the name of an op or module that runs in the block",
            got=repr(missing.text),
            hint=hint or f"{len(self._seen):,} other names ran; a Dumper without a list writes all",
        )


def _is(wanted: Wanted, name: CallName, is_op: bool = False) -> bool:
    if wanted.module is not None and (
        name.module is None or not _is_in(wanted.module, name.module)
    ):
        return False
    if wanted.api is not None:
        by_api = wanted.api == name.api and wanted.call in (None, name.api_call)
        if not by_api and not (
            has_api_name(name.op, wanted.api) and wanted.call in (None, name.call)
        ):
            return False
    elif wanted.op is not None:
        by_forward = matches_op(wanted.op, name.op) and wanted.call in (None, name.call)
        # A kernel that only backward uses has no name in the forward pass.
        by_itself = (
            "_backward" in name.ran and wanted.call is None and matches_op(wanted.op, name.ran)
        )
        by_api = wanted.is_made_by(name.api) and wanted.call in (None, name.api_call)
        if not by_forward and not by_itself and not by_api:
            return False
    elif not is_op and wanted.call not in (None, name.call):
        return False
    # The gradients of what is named belong to it, unless a direction is named too.
    return wanted.direction in (None, name.direction)


def _is_in(pattern: str, path: str) -> bool:
    # The model itself, and not all that is in it.
    return path == pattern if pattern in ("", OUTSIDE) else matches_module(pattern, path)


def _means(wanted: Wanted, name: str) -> bool:
    if wanted.api is not None:
        return name == wanted.api or has_api_name(name, wanted.api)
    return matches_op(wanted.op or "", name) or wanted.is_made_by(name)


def _names(option: str, names: Names) -> list[str]:
    found = string_list(option, names)
    if names is not None and not found:
        raise ConfigError(
            f"{option} holds no name",
            expected="a name, or several",
            got=repr(names),
            hint=f"leave {option}= out to choose all",
        )
    return found


def make_selection(
    level: str,
    ops: Names,
    modules: Names,
    first: Optional[str],
    last: Optional[str],
    logged: tuple[list[Wanted], list[Wanted]] = ([], []),
) -> Selection:
    """Makes a Selection. Raises ConfigError for names that can match nothing. ``logged``: operators
    and modules that a log names (dump/dumper.py).
    """
    wanted_ops = [read_op(name) for name in _names("ops", ops)]
    wanted_modules = [read_module(name) for name in _names("modules", modules)]
    more_ops, more_modules = logged
    if level == "module":
        more_modules = more_modules + [
            Wanted(wanted.text, module=wanted.module)
            for wanted in more_ops
            if wanted.module is not None
        ]
        more_ops = []
    wanted_ops += more_ops
    wanted_modules += more_modules
    if level == "module" and wanted_ops:
        raise ConfigError('ops= is for level="op": with level="module" give modules=')
    for wanted in wanted_modules if level != "module" else ():
        if wanted.call is not None:
            raise ConfigError(
                f'calls of modules have numbers with level="module" only, got {wanted.text!r}'
            )

    def end(option: str, name: Optional[str]) -> Optional[Wanted]:
        if name is None:
            return None
        check_text(option, name, "the name of a call")
        return read_module(name) if level == "module" else read_op(name, option)

    return Selection(level, wanted_ops, wanted_modules, end("first", first), end("last", last))
