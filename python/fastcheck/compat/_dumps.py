"""Dumps step after step as the old tools did, between switches rather than in a ``with`` block."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from .._errors import ConfigError, FastcheckWarning
from ..dump import Dumper

__all__ = ["Dumps"]

_UNMET = re.compile(r"^nothing that ran goes by the name (['\"])(?P<name>.*)\1$", re.MULTILINE)


class Dumps:
    """``plans``: options of the Dumpers that are open at a time, by the directory below
    ``dump_path`` (``""``: that itself). A name in a list that nothing went by in a step is warned
    of, once: training is not ended for it. ``spellings``: of some names, those of the list that
    stand for it, of which one is enough.
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
        self._complained: set[str] = set()
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
                    self._complain(str(error), str(dumper.path))
            if not keeps and dumper.path is not None:
                _remove(dumper.path)

    def _complain(self, text: str, path: str) -> None:
        names = {match.group("name") for match in _UNMET.finditer(text)}
        for spelt in self._spellings.values():
            if not names.issuperset(spelt):
                names.difference_update(spelt)
        if names <= self._complained:
            return
        self._complained |= names
        warnings.warn(f"fastcheck: {path} lacks something\n{text}", FastcheckWarning, stacklevel=3)


def _remove(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(path))  # unless another rank has written there
