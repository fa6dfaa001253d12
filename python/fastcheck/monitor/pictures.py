"""Pictures of a Monitor: HTML in a notebook, and a page."""

from __future__ import annotations

import os
from typing import Optional, Union

import numpy as np

from fastcheck.notebook import (
    MOST_ROWS,
    block_html,
    fields_html,
    guarded_html,
    lines_html,
    table_html,
)
from fastcheck.record.site import NUMBER_ROLES
from fastcheck.record.statistics import RecordStatistics, statistics_of
from fastcheck.report.live.trends import SiteTrends
from fastcheck.utils.names.style import check_style, row_name, tensor_place
from fastcheck.utils.text.layout import sparkline

from .core import Core
from .results import write_report
from .session.session import Session

_EVENTS = 5
# In the table of steps.
_NUMBERS = ("loss_scale", "learning_rate", "found_inf", "grad_norm", *NUMBER_ROLES)


class Pictures:
    """The part of Monitor that shows it."""

    _core: Core
    _session: Session
    _log_is_whole: bool

    def _watched_lines(self) -> list[str]:
        """The events of ``watch=`` as text."""
        raise NotImplementedError

    def report(
        self,
        path: Union[str, os.PathLike[str]],
        style: Optional[str] = None,
    ) -> None:
        """Writes the run until now as one HTML page to ``path``, as ``fastcheck report`` writes a
        log: what the log holds or, without one, what is held in memory. Waits for nothing.

        ``style``: as in summary(). Raises LogError when the log can't be read or ``path`` written.
        """
        style = self._session.config.stop.style if style is None else check_style(style)
        write_report(self._session, self._core.meta, path, self._log_is_whole, style)

    def _repr_html_(self) -> str:
        """HTML for notebooks: the state of the run, its events, and the twenty tensors of the last
        step with the least headroom. Waits for no device: what it has not finished is not shown
        yet. Takes the records in that have arrived, as summary() does. Never raises.
        """
        return guarded_html(
            self, lambda: _monitor_html(self._session, repr(self), self._watched_lines())
        )


def _monitor_html(session: Session, title: str, watched: list[str]) -> str:
    event_store = session.event_store
    with session.lock, event_store.lock:
        session.collect()
        rows = event_store.archive.all_steps()
        last = event_store.archive.history.last_step()
        history = event_store.archive.history.all()
        events = [event for event in event_store.events if event.counted]
    numbers = rows[-1] if rows else None
    log = event_store.archive.log
    fields: list[tuple[str, object]] = [
        ("steps", session.step.index + 1 if session.next_seq else 0),
        ("records", session.next_seq),
        ("tensors", len(session.sites)),
        ("counted events", event_store.counter.total),
        ("log", None if log is None else log.directory),
    ]
    if numbers is not None:
        fields += [
            (f"loss, step {numbers.step:,}", numbers.loss),
            ("loss scale", numbers.scale),
            ("learning rate", numbers.learning_rate),
            ("gradient norm", numbers.gradient_norm),
        ]
    found = [
        f"step {event.step:,}: {event.verdict.name.lower()}, "
        f"{tensor_place(event.site, int(event.record['call']), session.config.stop.style)}"
        for event in events[:_EVENTS]
    ]
    more = [f"and {len(events) - _EVENTS:,} more events"] if len(events) > _EVENTS else []
    return block_html(
        title,
        fields_html(fields),
        lines_html([*found, *more, *watched]),
        _sites(session, last, history),
    )


def _sites(session: Session, last: np.ndarray, history: np.ndarray) -> str:
    """The tensors of the last step with the least headroom, what is not finite before all."""
    numbers = [n for n, site in enumerate(session.sites) if site.role in _NUMBERS]
    last = last[~np.isin(last["site"], numbers)]
    if not len(last):
        return ""
    now = SiteTrends()
    now.add(last)
    trends = SiteTrends()
    trends.add(history)
    bits = now.headroom()
    seen = np.flatnonzero(now.seen)
    order = seen[np.argsort(np.where(np.isnan(bits[seen]), np.inf, bits[seen]), kind="stable")]
    shown = [(int(n), statistics_of(now.last[n])) for n in order[:MOST_ROWS]]
    cells = [
        [
            row_name(session.sites[number], None, session.config.stop.style),
            reading.dtype,
            reading.nonfinite_count,
            reading.abs_max,
            reading.rms,
            _bits(float(bits[number]), reading),
            _spark(trends, number),
        ]
        for number, reading in shown
    ]
    bad = [reading.overflow_count > 0 for _, reading in shown]
    header = ["tensor", "dtype", "NaN+Inf", "abs max", "rms", "headroom, bits", "last steps"]
    return table_html(header, cells, bad, len(order))


def _bits(bits: float, reading: RecordStatistics) -> Optional[float]:
    return None if reading.overflow_count or not np.isfinite(bits) else round(bits, 1)


def _spark(trends: SiteTrends, number: int) -> str:
    values, bad = trends.series(number)
    return sparkline(values, bad, len(values)).strip()
