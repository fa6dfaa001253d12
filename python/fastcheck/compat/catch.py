"""The Dumper of Cambricon Catch: ``from fastcheck.compat.catch import Dumper`` replaces Catch's.

``docs/compat.md`` lists the differences.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Optional, Union

from fastcheck.dump import dumper as dump
from fastcheck.errors import ConfigError

# The number of Dumpers that were made for a directory: one for each iteration.
_made: Counter[str] = Counter()


class Dumper:
    """Dumps what each operator within the ``with`` block reads and makes, forward and backward.

        for i, batch in enumerate(data):
            with Dumper(dump_dir="dump", enable=i < 2, use_cpu=True, level=0):
                ...

    Each Dumper made for a directory, enabled or not, is the next step there: ``dump/step0/rank0``.

    Args:
        dump_dir: of all steps.
        enable: False: this does nothing and costs nothing.
        use_cpu: run each operator on the CPU too, on the same inputs, and report which outputs
            differ (``reference="cpu"``); operators that work in place too.
        level: 0: values, as safetensors; 1: records alone, with ``abs_sum`` among them.
    """

    def __init__(
        self,
        dump_dir: Union[str, os.PathLike[str]] = "./dump",
        enable: bool = True,
        use_cpu: bool = False,
        level: int = 0,
    ) -> None:
        if isinstance(level, bool) or level not in (0, 1):
            raise ConfigError(
                f"level must be 0 (values) or 1 (records, abs_sum among them), got {level!r}"
            )
        self._directory = os.fspath(dump_dir)
        self._enable = bool(enable)
        self._use_cpu = bool(use_cpu)
        self._level = level
        self._inner: Optional[dump.Dumper] = None
        self._step = self._next_step()
        self._was_used = False

    def _next_step(self) -> int:
        key = os.path.abspath(self._directory)
        _made[key] += 1
        return _made[key] - 1

    @property
    def dumper(self) -> Optional[dump.Dumper]:
        """fastcheck's own, which has ``.differences``; None before the first ``with``."""
        return self._inner

    def __enter__(self) -> Dumper:
        if self._was_used:
            self._step = self._next_step()
        self._was_used = True
        self._inner = dump.Dumper(
            self._directory,
            step=self._step,
            enable=self._enable,
            tensors=self._level == 0,
            reference="cpu" if self._use_cpu else None,
            overwrite=True,
        )
        self._inner.__enter__()
        return self

    def __exit__(self, kind: Optional[type[BaseException]], *rest: object) -> None:
        if self._inner is not None:
            self._inner.__exit__(kind, *rest)
