"""Checks options of the old tools (one without a counterpart is an error or a warning), and dumps
one step after another between switches, as they did without a ``with`` block.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union

from fastcheck.comparison.compare import compare
from fastcheck.dump.dumper import Dumper
from fastcheck.errors import ConfigError, did_you_mean, warn

_warned: set[str] = set()


@dataclass(eq=False)
class Dumps:
    """``plans``: options of the Dumpers that are open at a time, by the directory below
    ``dump_path`` (``""``: that itself). A name in a list that no call of a step had causes one
    warning and no error. ``spellings``: the entries of the list that stand for one name;
    one of them has to occur.
    """

    _path: str
    _plans: Mapping[str, dict[str, Any]]
    _spellings: Mapping[str, tuple[str, ...]]

    def __post_init__(self) -> None:
        self._open: list[Dumper] = []
        self._parts: dict[int, int] = {}
        self._reported: set[str] = set()
        for place, plan in self._plans.items():
            # Options that can be known to be wrong are an error at once.
            Dumper(os.path.join(self._path, place), **plan)

    @property
    def is_open(self) -> bool:
        return bool(self._open)

    def open(self, step: int, models: Sequence[Any]) -> None:
        """Starts to dump calls, as ``step``. Another part of a step that was dumped already goes to
        ``part2`` and so on.
        """
        self.close()
        part = self._parts[step] = self._parts.get(step, 0) + 1
        more = "" if part == 1 else f"part{part}"
        for place, plan in self._plans.items():
            directory = os.path.join(self._path, place, more)
            dumper = Dumper(
                directory, step=step, model=list(models) or None, overwrite=True, **plan
            )
            try:
                dumper.__enter__()
            except BaseException:
                self.close(keeps=False)
                raise
            self._open.append(dumper)

    def close(self, keeps: bool = True) -> None:
        """Idempotent; never raises. ``keeps``: False for what is not worth it, such as what comes
        after the last step.
        """
        while self._open:
            dumper = self._open.pop()
            try:
                dumper.__exit__(None, None, None)
            except ConfigError as error:
                if keeps:
                    self._warn_unmet(dumper.unmet, str(error), str(dumper.path))
            if not keeps and dumper.path is not None:
                _remove(dumper.path)

    def _warn_unmet(self, unmet: Sequence[str], text: str, path: str) -> None:
        names = set(unmet)
        for names_of_one in self._spellings.values():
            if not names.issuperset(names_of_one):
                names.difference_update(names_of_one)
        if names <= self._reported:
            return
        self._reported |= names
        warn(f"fastcheck: {path} is incomplete\n{text}")


def _remove(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(path))  # unless another rank has written there


def warn_once(text: str) -> None:
    """Emits a FastcheckWarning, each text once in a process."""
    if text not in _warned:
        _warned.add(text)
        warn(f"fastcheck.compat: {text}")


def check_names(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises ConfigError for the first of the names that is not in ``known``."""
    names = sorted(known)
    for name in given:
        if name not in names:
            text = f"unknown {what} {name!r}; it may be {', '.join(names)}"
            hint = did_you_mean(str(name), names)
            raise ConfigError(f"{text}; {hint}" if hint else text)


def number_set(name: str, given: Any) -> Optional[frozenset[int]]:
    """``[0, 3, "5-8"]``; None where none is given, which is all of them."""
    if given is None or given == []:
        return None
    items = [given] if isinstance(given, (int, str)) and not isinstance(given, bool) else given
    numbers: set[int] = set()
    for item in items if isinstance(items, (list, tuple)) else (given,):
        span = re.fullmatch(r"(\d+)-(\d+)", item) if isinstance(item, str) else None
        if isinstance(item, int) and not isinstance(item, bool) and item >= 0:
            numbers.add(item)
        elif span and int(span.group(1)) <= int(span.group(2)):
            numbers.update(range(int(span.group(1)), int(span.group(2)) + 1))
        else:
            raise ConfigError(
                f'"{name}" must be a list of numbers from 0 on, and spans of them ([0, 3, "5-8"]), '
                f"got {item!r}"
            )
    return frozenset(numbers)


def compare_paths(
    given: Mapping[str, Any],
    *,
    actual: Sequence[str],
    reference: Sequence[str],
    unused: Sequence[str],
    output_path: Union[str, os.PathLike[str], None],
) -> Any:
    """The Comparison, which is printed too. ``actual`` and ``reference``: the keys of a side, the
    first that is there counts.
    """
    check_names("key of input_param", given, (*actual, *reference, *unused))
    sides = []
    for keys in (actual, reference):
        path = next((given[key] for key in keys if given.get(key)), None)
        if path is None:
            raise ConfigError(
                f"input_param has no path of one side, {' or '.join(keys)}: it has "
                f"{', '.join(given) or 'nothing'}"
            )
        sides.append(path)
    csv = None
    if output_path is not None:
        os.makedirs(output_path, exist_ok=True)
        csv = os.path.join(os.fspath(output_path), "compare_result.csv")
    comparison = compare(sides[0], sides[1], csv=csv)
    print(comparison)
    return comparison
