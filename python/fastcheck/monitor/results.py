"""The records that a monitor holds, in memory or in its log, and the page of them."""

from __future__ import annotations

import os
import tempfile
from typing import Union

import numpy as np

from fastcheck.errors import LogError
from fastcheck.log.reader import read_log
from fastcheck.monitor.session.run_meta import RunMeta
from fastcheck.monitor.session.session import Session
from fastcheck.monitor.session.stop_handler import save_held
from fastcheck.report.page.write import write_page


def held_records(session: Session, log_is_whole: bool) -> np.ndarray:
    """The records of Monitor.records(). ``log_is_whole``: the log was closed after all was written
    to it.
    """
    event_store = session.event_store
    with session.lock, event_store.lock:
        session.collect()
        log = event_store.archive.log
        if not session.rings.is_deferred or session.removed:
            event_store.store(session.step)
        if log is None or (log.failed and not log_is_whole):
            return event_store.archive.history.all()
        return read_log(log.directory, rank=event_store.ranks.own).records


def write_report(
    session: Session,
    meta: RunMeta,
    path: Union[str, os.PathLike[str]],
    log_is_whole: bool,
    style: str,
) -> None:
    """Writes the page of Monitor.report(). ``log_is_whole``: as in held_records()."""
    event_store = session.event_store
    with session.lock, event_store.lock:
        session.collect()
        log = event_store.archive.log
        if not session.rings.is_deferred or session.removed:
            event_store.store(session.step)
        if log is not None and (not log.failed or log_is_whole):
            write_page(log.directory, path, style)
            return
        with tempfile.TemporaryDirectory() as directory:
            saved = save_held(session, meta, os.path.join(directory, "memory"))
            if saved is None:
                raise LogError("the records in memory could not be written to a temporary folder")
            write_page(saved, path, style, "held in memory")
