"""The records that a monitor holds, in memory or in its log."""

from __future__ import annotations

import numpy as np

from fastcheck.log.reader import read_log
from fastcheck.monitor.session.session import Session

__all__ = ["held_records"]


def held_records(session: Session, log_is_whole: bool) -> np.ndarray:
    """For Monitor.records(). ``log_is_whole``: the log was closed after all was written to it."""
    event_store = session.event_store
    with session.lock, event_store.lock:
        session.collect()
        log = event_store.log
        if not session.is_deferred or session.removed:
            event_store.store(session.step)
        if log is None or (log.failed and not log_is_whole):
            return event_store.history.all()
        return read_log(log.directory, rank=event_store.rank).records
