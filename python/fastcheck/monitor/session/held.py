"""Writes what a monitor holds in memory as a log."""

from __future__ import annotations

from typing import Optional

from fastcheck.log.writer import save_log
from fastcheck.record.site import SiteTable

from .batches import BatchIds
from .event_store import EventStore


def save_held(
    event_store: EventStore,
    sites: SiteTable,
    directory: str,
    batches: Optional[BatchIds] = None,
) -> Optional[str]:
    """The records of the last steps, the events, the rows of all steps, and the names of their
    batches. Returns the directory of the log; never raises: warns and returns None when it can't be
    written. The caller holds the store's lock.
    """
    named = {"batches": batches.lines()} if batches else {}
    rows = [row.to_dict() for row in event_store.all_steps()]
    steps = {"steps": rows} if rows else {}
    return save_log(
        directory,
        event_store.rank,
        event_store.history.all(),
        event_store.events,
        sites,
        {**event_store.describe(), **steps, **named},
    )
