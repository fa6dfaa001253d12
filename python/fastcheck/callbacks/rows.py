"""Scalars for loggers that accept calls from the training thread only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Callable, Optional

from fastcheck.errors import warn
from fastcheck.monitor.monitor import Monitor

__all__ = ["WaitingRows"]


class WaitingRows:
    """A sink that keeps the youngest row until write() is called.

    Args:
        targets: functions that take the scalars and, as ``step``, their step. One that fails is
            left out from then on, with a warning.
    """

    def __init__(self, targets: Sequence[Callable[..., object]]) -> None:
        self._targets = list(targets)
        self._row: Optional[tuple[dict[str, float], int]] = None

    def end_with(self, monitor: Monitor) -> None:
        """The last row is written when the monitor is removed and its sinks are closed."""
        ends = monitor._boundary.at_end
        earlier = ends.pop_all()  # what was added last is called first
        ends.callback(self.write)
        ends.push(earlier)

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._row = dict(scalars), step

    def write(self) -> None:
        """Writes the row that came last, unless that was done."""
        row, self._row = self._row, None
        if row is None:
            return
        for target in list(self._targets):
            try:
                target(row[0], step=row[1])
            except Exception as error:
                self._targets.remove(target)
                name = getattr(target, "__qualname__", repr(target))
                warn(f"fastcheck no longer calls {name}: {type(error).__name__}: {error}")
