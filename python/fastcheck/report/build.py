"""Builds a StopReport: make_report() from the records of a running monitor, report_from_log() from
those of a log.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Optional, Union

import numpy as np

from fastcheck.log.history import History
from fastcheck.log.reader import read_batches
from fastcheck.log.view import LogView
from fastcheck.record.event import Event
from fastcheck.record.format import DTYPES
from fastcheck.record.site import Site, SiteTable
from fastcheck.utils.grouping import grouped

from .message import MOST_BYTES, unpacked
from .stop_report import Outlier, StopReport
from .trend import BLOWN_UP

# An input is an outlier if it is so many times as large as in at least so many steps before.
_OUTLYING, _BEFORE = 20.0, 5
# It has grown if it is so in the last steps, beside the first of at least so many.
_FIRST, _LAST, _MANY = 8, 4, 16
# Roles of tensors that are computed from weights of other modules, too.
_OF_WEIGHTS = ("loss", "param_grad", "grad_input", "grad_output", "optimizer_state")
#: Tensors that the culprit was computed from, with their records.
Evidence = list[tuple[Site, np.void]]


def make_report(
    records: History,
    culprit: Event,
    events: Iterable[Event],
    inputs: Evidence,
    sites: Iterable[Site] = (),
    **fields: Any,
) -> StopReport:
    """``events``: those of the culprit's step and rank; ``sites``: all, by number; ``fields``: the
    others of StopReport.
    """
    record = culprit.record
    if culprit.site.role in _OF_WEIGHTS and not culprit.site.op:
        inputs = [*inputs, *_blown_up(records, sites)]
    trend = records.of_site(int(record["site"]), int(record["call"]))
    return StopReport(
        culprit=culprit,
        step=culprit.step,
        events=tuple(sorted(events, key=lambda event: int(event.record["seq"]))),
        inputs=tuple(inputs),
        inputs_before=tuple(records.last_finite(input_record) for _, input_record in inputs),
        trend=trend[trend["seq"] <= record["seq"]],
        rank=culprit.rank,
        outlier=_outlier(records, sites, culprit.step),
        **fields,
    )


def _blown_up(records: History, sites: Iterable[Site]) -> Evidence:
    """The parameter that its last update has blown up most, if any has been."""
    named = {number: site for number, site in enumerate(sites) if site.role == "param"}
    most, found = BLOWN_UP, Evidence()
    for record in records.latest_of(set(named)):
        before = records.last_finite(record)
        now, then = (_peak(one) for one in (record, before if before is not None else record))
        if now > 1 and now >= most * then > 0:
            most, found = now / then, [(named[int(record["site"])], record)]
    return found


def _peak(record: np.void) -> float:
    return max(-float(record["min"]), float(record["max"]))


def argument_records(
    records: History, culprit: Event, sites: Union[SiteTable, Mapping[int, Site]]
) -> Evidence:
    """The records of what the culprit's operator read, under the names of its arguments."""
    evidence: Evidence = []
    for name, seq in _of_its_place(culprit):
        record = records.find(seq)
        if record is not None:
            source = sites[int(record["site"])]
            origin = source.op or source.tensor_name
            label = f"{name} ({origin})" if source.role != "input" else name
            # A parameter's own site is that of the update, too.
            by = source if source.op else culprit.site
            site = replace(culprit.site, role="input", label=label, direction=by.direction)
            evidence.append((site, record))
    return evidence


def _outlier(records: History, sites: Iterable[Site], step: int) -> Optional[Outlier]:
    found = None
    for label, levels, steps in _inputs(records, sites):
        first = levels[:_FIRST].max(initial=0.0)
        if len(levels) >= _MANY and levels[-_LAST:].min() >= _OUTLYING * first > 0:
            return Outlier(label, float(levels[-1]), float(first), _FIRST, True, step)
        # The update of an earlier step may have blown up the weights.
        for at in range(step, step - _LAST, -1):
            before, now = levels[steps < at], levels[steps == at]
            is_far = len(now) and len(before) >= _BEFORE and now[0] >= _OUTLYING * before.max() > 0
            if is_far and found is None:
                found = Outlier(label, float(now[0]), float(before.max()), len(before), False, at)
    return found


def _inputs(
    records: History, sites: Iterable[Site]
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """The label, the largest magnitudes and the steps of each input of the model that is of
    floating point.
    """
    for number, site in enumerate(sites):
        if site.role != "input" or site.module or site.op:
            continue
        of_it = records.of_site(number, 0)
        if len(of_it) and "float" in DTYPES[of_it["dtype"][-1]].name:
            yield site.label, np.maximum(-of_it["min"], of_it["max"]), of_it["step"]


def _of_its_place(culprit: Event) -> Iterable[tuple[str, int]]:
    """The arguments of the culprit's operator; of its lists the elements that made this tensor."""
    lists = grouped(culprit.inputs, lambda argument: argument[0])
    most = max(map(len, lists.values()), default=0)
    is_foreach = "_foreach_" in (culprit.site.op or "")
    if not is_foreach or any(len(elements) not in (1, most) for elements in lists.values()):
        return culprit.inputs
    return [elements[culprit.site.index % len(elements)] for elements in lists.values()]


def stop_path(directory: str, rank: int) -> str:
    """The file of a log with the report of the stop that a rank was the culprit of."""
    return os.path.join(directory, f"stop-rank{rank}.json")


def report_from_log(view: LogView, event: Optional[Event], style: str) -> Optional[StopReport]:
    """The report of a stop from its log; None without a counted event. What no record tells (what
    made the numbers, whether weights were updated) is known if the run has stopped for this event.
    """
    if event is None or not event.counted:
        return None
    stopped = _stopped(view.directory, event.rank)
    if stopped is not None and stopped.culprit.record["seq"] == event.record["seq"]:
        return replace(stopped, style=style, log_path=None, page=None)
    own = view.records[view.ranks == event.rank]
    records = History(1, is_logged=False)
    records.add(own[np.argsort(own["seq"], kind="stable")])
    inputs = argument_records(records, event, view.sites)
    events = [e for e in view.events if (e.step, e.rank) == (event.step, event.rank)]
    meta = view.meta.get(event.rank, {})
    left_out_by = [name for name in ("include", "exclude") if meta.get(name)]
    left_out_by += ["every"] if meta.get("every", 1) != 1 else []
    return make_report(
        records,
        event,
        events,
        inputs,
        style=style,
        left_out_by=tuple(left_out_by),
        batch=read_batches(view.directory, event.rank).get(event.step),
        is_op_level=meta.get("level") == "op",
    )


def _stopped(directory: str, rank: int) -> Optional[StopReport]:
    """The report that the stop has written; None: it wrote none, or none that can be read."""
    try:
        with open(stop_path(directory, rank), "rb") as file:
            return unpacked(file.read(MOST_BYTES + 1))
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None
