"""Tells of the NaN or infinity that the program held where an exception of its own ended it: a
distribution has checked its arguments, for example, or an assertion the loss, before any of it was
read here.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import traceback
import weakref
from typing import Optional

from fastcheck.errors import warn_of_fault
from fastcheck.record.event import Event
from fastcheck.record.format import Verdict
from fastcheck.record.site import Site
from fastcheck.report.advice.choose import advise
from fastcheck.report.advice.source import on_source, on_written
from fastcheck.report.error import OverflowDetected
from fastcheck.report.render import made_by_lines
from fastcheck.report.stop_report import StopReport
from fastcheck.statistics.functions import stats
from fastcheck.utils.text.layout import wrap
from fastcheck.utils.text.numbers import counted
from fastcheck.utils.torch.frames import past_frames

from .origin.loss_graph import search_held
from .origin.written_lines import with_lines
from .session.session import Session

_WIDTH = 86
_KINDS = (("nan_count", "NaN"), ("posinf_count", "+Inf"))
# Errors that may be about numbers: others end a run in which data are NaN on purpose.
_OF_NUMBERS = (ArithmeticError, AssertionError, RuntimeError, SystemExit, ValueError)
_live: weakref.WeakSet[Session] = weakref.WeakSet()


def follow(session: Session) -> None:
    """Tells of it at the exit of the process, too, where the session goes on until then."""
    _live.add(session)


def tell(error: Optional[BaseException], session: Session) -> None:
    """Warns of it, if ``error``, which ended the run, is one of the program's own."""
    is_exit = isinstance(error, SystemExit) and bool(error.code)
    if error is None or isinstance(error, OverflowDetected):
        return
    if is_exit or isinstance(error, Exception):
        text = ""
        with contextlib.suppress(Exception):  # the device may be lost
            text = _text(error, session.step.index)
        if text:
            warn_of_fault(text)


def _text(error: BaseException, step: int) -> str:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    with past_frames(frames[::-1]):
        held = search_held(frames, with_data=isinstance(error, _OF_NUMBERS))
        if held is None:
            return ""
        name, tensor, made = held
        made = None if made is None else with_lines(made)
    record = stats(tensor.detach()).record
    counts = (f"{int(record[field]):,} {kind}" for field, kind in _KINDS if record[field])
    head = f"{type(error).__name__} ended the run in step {step}, where {name} held "
    head += f"{' and '.join(counts)} among {counted(int(record['numel']), 'element')}."
    lines = wrap(head, _WIDTH)
    if made is not None:
        site = Site("", "", "forward", "output", 0, name)
        event = Event(site, record, step, Verdict.ORIGIN, "", counted=False)
        report = StopReport(event, step, made_by=made)
        lines += made_by_lines(report, _WIDTH)
        of_line = on_source(made.variable.partition(": ")[2]) or on_written(made.written)
        item = advise(report)[0] if made.operator else of_line
        lines += [] if item is None else wrap(f"try: {item.text}", _WIDTH)
    return "\n  ".join(lines)


@atexit.register
def _tell_at_exit() -> None:
    # At a prompt the program went on after its last exception.
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    session = next((s for s in list(_live) if not s.removed), None)
    if error is not None and session is not None:
        tell(error, session)
