"""Dumps one step after another between switches, as the old tools did without a ``with`` block."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from fastcheck.dump.dumper import Dumper
from fastcheck.errors import ConfigError, warn


class Dumps:
    """``plans``: options of the Dumpers that are open at a time, by the directory below
    ``dump_path`` (``""``: that itself). A name in a list that no call of a step had causes one
    warning and no error. ``spellings``: the entries of the list that stand for one name;
    one of them has to occur.
    """

    def __init__(
        self,
        dump_path: str,
        plans: Mapping[str, dict[str, Any]],
        spellings: Mapping[str, tuple[str, ...]],
    ) -> None:
        self._path = dump_path
        self._plans = plans
        self._spellings = spellings
        self._open: list[Dumper] = []
        self._parts: dict[int, int] = {}
        self._reported: set[str] = set()
        for place, plan in plans.items():
            # What can be known to be wrong is an error at once.
            Dumper(os.path.join(dump_path, place), **plan)

    @property
    def is_open(self) -> bool:
        return bool(self._open)

    def open(self, step: int, models: Sequence[Any]) -> None:
        """From now on calls are dumped, as ``step``. Another part of a step that was dumped
        already goes to ``part2`` and so on.
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
