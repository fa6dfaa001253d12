"""Finds the operator that made the numbers of a stop, from what is still in memory."""

from __future__ import annotations

import weakref
from typing import Optional

from fastcheck.monitor.session.session import Session
from fastcheck.report.stop_report import MadeBy
from fastcheck.verdict.findings import Finding
from fastcheck.verdict.step import Step

from .loss_graph import search_graph

_FORWARD = frozenset(("input", "output", "loss"))


class Makers:
    """Of one session, to which it has a weak reference. Called outside all locks, in the thread
    that is about to raise the stop.
    """

    def __init__(self, session: Session) -> None:
        self._session = weakref.ref(session)

    def __call__(self, culprit: Finding, step: Step) -> Optional[MadeBy]:
        """None where nothing that could tell is left."""
        session = self._session()
        if session is None or step is not session.step:
            return None
        if culprit.role in _FORWARD:
            for root in session.backwards.roots:
                found = search_graph(root)
                if found is not None:
                    return found
        return None
