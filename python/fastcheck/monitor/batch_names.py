"""NamedBatches: ``monitor.batch()``, and ``batch_id=`` of ``monitor.step()``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastcheck.log.step_table import StepRow
from fastcheck.monitor.session.batches import BatchId, BatchIds, batch_name
from fastcheck.monitor.session.listener import Listener
from fastcheck.monitor.session.session import Session
from fastcheck.verdict.step import Step


class _Ended(Listener):
    """Tells the names which step is over."""

    def __init__(self, batches: BatchIds) -> None:
        self._batches = batches

    def step_ended(self, step: Step, rows: Sequence[StepRow], chunks: Sequence[np.ndarray]) -> None:
        self._batches.ended(step.index, int(chunks[-1]["seq"].max()))


class NamedBatches:
    """What a Monitor adds for loops that name their batches."""

    _session: Session
    _names_batches = False

    def batch(self, batch_id: Any) -> None:
        """Names what the next forward pass trains on, so that a stop report and the events of
        ``watch=`` name it too: an index, or any small object with a short text. Of a step of
        several micro-batches each may be named. Does not end a step, and costs nothing more.

        ``monitor.step(batch_id=)`` names the batch of the step that it ends; a stop within that
        step has been raised by then.

        Raises:
            ConfigError: a tensor that is large, or not on the CPU.
        """
        name, session = batch_name(batch_id), self._session
        with session.lock:
            if not session.removed:
                self._name_batch(name, session.step.index + session.is_closed, session.next_seq)

    def _name_ended(self, batch_id: Any) -> None:
        """The batch of the step that is about to end."""
        name, session = batch_name(batch_id), self._session
        with session.lock:
            if not session.removed:
                self._name_batch(name, session.step.index, None)

    def _name_batch(self, name: BatchId, step: int, seq: Any) -> None:
        session = self._session
        if not self._names_batches:
            self._names_batches = True
            batches, store = session.batches, session.event_store

            def write(step: int, name: BatchId) -> None:
                with store.lock:
                    if store.log is not None:
                        store.log.append_line("batches", {"step": step, "batch": name})

            with store.lock:
                batches.on_change = write
                # Before those that ask for the name of the step.
                store.listeners = [_Ended(batches), *store.listeners]
        session.batches.add(step, name, seq)
