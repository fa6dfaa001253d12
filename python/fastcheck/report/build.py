"""make_report(): builds a StopReport from records of a running monitor or of ``from_log.py``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Optional, Protocol, Union

import numpy as np

from fastcheck.record.event import Event
from fastcheck.record.site import Site, SiteTable

from .stop_report import StopReport

#: Tensors that the culprit was computed from, with their records.
Evidence = list[tuple[Site, np.void]]


class Records(Protocol):
    """The records of one rank."""

    def of_site(self, site: int, call: int, /) -> np.ndarray:
        """The records of one site and call index, oldest first."""

    def last_finite(self, record: np.void, /) -> Optional[np.void]:
        """The last finite record of the same site and call index in an earlier step."""

    def find(self, seq: int, /) -> Optional[np.void]:
        """The record with this sequence number."""


def make_report(
    records: Records, culprit: Event, events: Iterable[Event], inputs: Evidence, **fields: Any
) -> StopReport:
    """``events``: those of the culprit's step and rank; ``fields``: the others of StopReport."""
    record = culprit.record
    trend = records.of_site(int(record["site"]), int(record["call"]))
    return StopReport(
        culprit=culprit,
        step=culprit.step,
        events=tuple(sorted(events, key=lambda event: int(event.record["seq"]))),
        inputs=tuple(inputs),
        inputs_before=tuple(records.last_finite(input_record) for _, input_record in inputs),
        trend=trend[trend["seq"] <= record["seq"]],
        rank=culprit.rank,
        **fields,
    )


def argument_records(
    records: Records, culprit: Event, sites: Union[SiteTable, Mapping[int, Site]]
) -> Evidence:
    """The records of what the culprit's operator read, under the names of its arguments."""
    evidence: Evidence = []
    for name, seq in culprit.inputs:
        record = records.find(seq)
        if record is not None:
            source = sites[int(record["site"])]
            origin = source.op or source.tensor_name
            label = f"{name} ({origin})" if source.role != "input" else name
            evidence.append((replace(culprit.site, role="input", label=label), record))
    return evidence
