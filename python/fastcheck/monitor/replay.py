"""Replay: runs a stopped step again at op level, to find the operator and the line."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Callable, Optional

import torch

from fastcheck.errors import FastcheckError
from fastcheck.monitor.session.options import Stop, Training
from fastcheck.monitor.session.session import Session
from fastcheck.record.event import Event
from fastcheck.report.error import OverflowDetected
from fastcheck.report.stop_report import Dumped, ReplayOutcome
from fastcheck.utils.torch.flatten import flatten
from fastcheck.utils.torch.training_state import Generators, SavedTensors, TrainingState
from fastcheck.utils.torch.versions import GradScaler


class Replay(ReplayOutcome):
    """The outcome of running a step again, with its stop."""

    @property
    def stop(self) -> Optional[OverflowDetected]:
        """The stop at op level; None when there was none."""
        return None if self.report is None else OverflowDetected(self.report)


@dataclass
class _Capture:
    """The state that a step began with."""

    generators: Generators
    buffers: SavedTensors
    #: The arguments of run(), and the versions of the tensors among them, by label.
    batch: Any
    versions: dict[str, int]
    #: The index of the step, the first of those that it runs.
    step: int


class Replayer:
    """Runs a step of a monitor again. ``install`` is called with the models and options to observe
    them anew.
    """

    def __init__(
        self, session: Session, models: Sequence[torch.nn.Module], install: Callable[..., Any]
    ) -> None:
        self._session = session
        self._models = [weakref.ref(model) for model in models]
        self._install = install
        # The scaler of the steps before: this step may stop before it scales its loss.
        self._scaler: Optional[weakref.ref[GradScaler]] = None

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Returns ``function(*args, **kwargs)``, kept so that it can be run again; a stop within it
        comes with its replay.
        """
        capture = _Capture(
            Generators(),
            SavedTensors(b for model in self.alive() for b in model.buffers()),
            (args, kwargs),
            _versions((args, kwargs)),
            self._session.step.index + self._session.is_closed,
        )
        try:
            result = function(*args, **kwargs)
            self._scaler = self._session.step.update.scaler or self._scaler
            return result
        except OverflowDetected as stop:
            replay, cause = self._replay(lambda: function(*args, **kwargs), capture, stop)
            stop.report = replace(stop.report, replay=replay, dump=replay.dump or stop.report.dump)
            stop.args = (stop.report,)
            raise stop from cause

    def _replay(
        self, step: Callable[[], Any], capture: _Capture, stop: OverflowDetected
    ) -> tuple[Replay, Optional[OverflowDetected]]:
        """The replay, and the stop within it with its traceback."""
        session, options = self._session, self._session.config.stop
        dumps = options.dump is not None and session.config.level == "module"
        reason = self._why_not(stop)
        if reason:
            dump = Dumped(None, notes=(f"nothing was dumped: {reason}",)) if dumps else None
            return Replay(None, (f"the step was not run again: {reason}",), dump), None
        notes = list(self._differences(capture, stop))
        overflow: Optional[OverflowDetected] = None
        none_found = "nothing was dumped: no operator was found that made it"
        dump = Dumped(None, notes=(none_found,)) if dumps else None
        with self._as_it_began(capture):
            try:
                with self._install(
                    *self.alive(),
                    level="op",
                    sync="call",
                    record="stats",
                    stop=Stop(
                        max_skipped=options.max_skipped,
                        style=options.style,
                        dump=options.dump,
                        report=False,
                    ),
                    training=Training(scaler=session.config.training.scaler),
                ) as monitor:
                    monitor.begin_at(capture.step)
                    step()
                    notes += _passing(monitor.events)
            except OverflowDetected as caught:
                overflow, site, dump = caught, caught.culprit.site, caught.report.dump
                if site.role == "param" and notes:
                    # The update has made it, which has been applied since.
                    notes.append(f"run again, {site.key} was non-finite before the step began")
                    overflow = None
            except FastcheckError as error:
                notes = [f"the step was not run again at op level: {error}"]
            except Exception as error:
                notes.append(f"run again, the step failed: {type(error).__name__}: {error}")
        return Replay(None if overflow is None else overflow.report, tuple(notes), dump), overflow

    @contextmanager
    def _as_it_began(self, capture: _Capture) -> Iterator[None]:
        """Puts all back to the beginning of the step within a ``with`` statement, as far as that is
        known; after it all is as before.
        """
        session = self._session
        given = session.step.update.scaler or self._scaler
        own = session.config.training.scaler if given is None else given()
        scaler = own if isinstance(own, GradScaler) else None
        with TrainingState(self.alive(), scaler), self._session.aside():
            capture.buffers.put_back()
            capture.generators.put_back()
            yield

    def alive(self) -> list[torch.nn.Module]:
        """The models that there are still."""
        return [model for ref in self._models if (model := ref()) is not None]

    def _why_not(self, stop: OverflowDetected) -> str:
        if not self.alive():
            return "the model is gone"
        if self._session.config.level == "op":
            return "this monitor is at op level itself: its report has the operator and the line"
        if self._session.event_store.ranks.together > 1:
            return "several ranks train together: a rank that stops would leave the others waiting"
        if stop.culprit.site.role in ("param", "optimizer_state"):
            return "what was found is stored, and what was there before it is gone"
        return ""

    def _differences(self, capture: _Capture, stop: OverflowDetected) -> Iterator[str]:
        """Sentences on what has changed since the step began."""
        now = self._session.step.index
        if now > stop.step:
            yield f"step {now} has begun since step {stop.step}: the batch is another"
        if capture.step < stop.step or not stop.report.weights_intact:
            yield "the weights of the step are gone: an update has been applied since it began"
        versions = _versions(capture.batch)
        if any(
            versions.get(label, version) != version for label, version in capture.versions.items()
        ):
            yield "the batch of the step is gone: it was written in place"


def _passing(events: Sequence[Event]) -> Iterator[str]:
    """A line on the non-finite tensors of a step that was run again without a stop."""
    first = min(events, key=lambda event: int(event.record["seq"]), default=None)
    if first is not None:
        line = f" ({first.line})" if first.line else ""
        yield (
            f"run again at op level, the first non-finite tensor was {first.site}{line}, and "
            "nothing that counts was made of it within the step"
        )


def _versions(batch: Any) -> dict[str, int]:
    tensors = flatten(batch, "batch")
    return {label: tensor._version for label, tensor in tensors if not tensor.is_inference()}
