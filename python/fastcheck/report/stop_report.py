"""The stop report as data."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Optional, Union

import numpy as np

from fastcheck.record.format import RECORD_DTYPE
from fastcheck.utils.text.layout import wrap

# message.py reads the types of the fields, in Python 3.9 too: Optional[...], not ... | None.

if TYPE_CHECKING:
    from fastcheck.record.event import Event
    from fastcheck.record.site import Site


@dataclass(frozen=True)
class Dumped:
    """A dump of the culprit.

    ``path``: the directory; None when nothing was written. ``what``: what the directory holds.
    ``script``: a script that runs the dumped call again; None where there is none. ``notes``: what
    could not be dumped, and why.
    """

    path: Optional[str]
    what: str = ""
    script: Optional[str] = None
    notes: tuple[str, ...] = ()

    def lines(self, width: int) -> list[str]:
        """The dump section of the report."""
        lines: list[str] = []
        if self.path is not None:
            again = "" if self.script is None else ". To run it again:"
            lines = wrap(f"{self.path} holds {self.what}{again}", width)
        if self.path is not None and self.script is not None:
            script = os.path.join(self.path, self.script)
            lines.append("  python " + (f"'{script}'" if " " in script else script))
        return lines + [line for note in self.notes for line in wrap(note, width)]


@dataclass(frozen=True)
class ReplayOutcome:
    """The result of running a stopped step again at op level.

    ``report``: that of the stop at op level, with the operator and the line; None when nothing
    non-finite was found, or the step could not be run. ``notes``: which part of the state could not
    be restored, or why the step was not run. ``dump``: the dump that the replay wrote, if any.
    """

    report: Optional[StopReport]
    notes: tuple[str, ...] = ()
    dump: Optional[Dumped] = None

    @property
    def remarks(self) -> tuple[str, ...]:
        """The notes; of a replay that found nothing, that it was finite."""
        if self.notes or self.report is not None:
            return self.notes
        return ("run again, the step was finite: the cause is not part of the state that was kept",)


@dataclass(frozen=True)
class MadeBy:
    """The operator that made the culprit's numbers, as far as it could still be found when the run
    stopped.

    ``operator``: its name in torch's dispatcher (``aten.div.Tensor``) or in the graph of autograd
    (``DivBackward0``); empty where none was found. ``how``: what is known of it, and how, in a
    sentence; where none was found, why. ``line``: the line of Python that called it
    (``train.py:12 in forward``); empty where it is not known. ``inputs``: the tensors that it read,
    each by the name of the argument, with its record (dtype, elements, counts of zeros and
    non-finite values, extremes). ``result``: the record of its result, where that was held.
    ``variable``: a local variable of the program that held the result or, without an operator, the
    value that came from outside the graph, and the line that assigns it
    (``adv, assigned at train.py:9 in step: adv = adv / adv.std()``). ``written``: where the line is
    not known, those of the program's functions in which the operator is written, or one that may
    make such numbers, as far as they were found. ``is_backward``: the backward of the operator made
    them. ``site``: that of the operator in its module, where a call was run again.
    """

    operator: str
    how: str
    line: str = ""
    inputs: tuple[tuple[str, np.void], ...] = ()
    result: Optional[np.void] = None
    variable: str = ""
    written: tuple[str, ...] = ()
    is_backward: bool = False
    site: Optional[Site] = None


@dataclass(frozen=True)
class Outlier:
    """An input of the model, how large it was in a step, and was at most in so many steps: those
    before it, or, if it has been so large for a while (``has_grown``), the first that are known.
    """

    label: str
    now: float
    before: float
    steps: int
    has_grown: bool
    step: int


@dataclass(frozen=True)
class StopReport:
    """The contents of the stop message.

    ``events``: all events of the step in device order. ``inputs``: what the culprit's module read,
    its own parameters included where known, as (site, record); of a loss, gradient or optimizer's
    state the weight that the last update has blown up most; ``inputs_before``: the last healthy
    record of each, where a record is held. ``trend``: the records of the culprit's site in the last
    steps, oldest first, the culprit's last. ``scale``: the loss scale in use. ``rank``: the rank of
    the culprit, of ``world_size`` ranks that stop together. ``weights_intact``: True when it is
    certain that no update of this step has been applied, False when an update was, ``why_updated``
    for what reason; None when unknown. ``updated_since``: the steps from the culprit's on, or of a
    parameter from that on in which it was last read finite, whose update is known to have been
    applied; ``broken_weights``: the parameters that hold NaN or Inf now, None when they were not
    read. ``is_lost``: another rank found the culprit, and its report did not reach this rank.
    ``replay``: the result of running the step again at op level, if it was. ``dump``: the dump of
    the culprit, if any. ``style``: how tensors are named, ``"fastcheck"`` or ``"msprobe"``.
    ``learning_rates``: those of the optimizers' groups, by the optimizer's class, where they are
    numbers. ``fault``: a sentence on what an optimizer has stepped with, where training can't work,
    or on what the watch has seen that may have let the numbers grow.
    ``left_out_by``: the options that leave modules or steps unread. ``page``: the path of
    the log as an HTML page, if this rank has written it. ``batch``: what the step trains on, if
    ``monitor.batch()`` or ``monitor.step(batch_id=)`` named it. ``made_by``: the operator that made
    the culprit's numbers, of a module-level stop; None where nothing was looked for.
    ``silent_norms``: the norms beside the culprit's module, or beside what that lies in, that no
    call of was seen, though the module that holds them had a call that was over. ``not_updated``:
    the parameters among the inputs that no optimizer holds, though some of the model have stepped
    (of an operator: those of its module, if it has one, that have as many elements as an operand
    that was written in place). ``outlier``: an input of the model that is far larger than before.
    ``noticed``: another warning of the watch about what does not hold in a healthy training; empty
    if there was none. ``is_op_level``: the run was observed at op level.
    """

    culprit: Event
    step: int
    events: tuple[Event, ...] = ()
    event_count: int = 1
    overflow_nums: int = 1
    inputs: tuple[tuple[Site, np.void], ...] = ()
    inputs_before: tuple[Optional[np.void], ...] = ()
    trend: np.ndarray = field(default_factory=lambda: np.zeros(0, RECORD_DTYPE))
    log_path: Optional[str] = None
    scale: Optional[float] = None
    rank: int = 0
    world_size: int = 1
    weights_intact: Optional[bool] = None
    why_updated: str = ""
    updated_since: tuple[int, ...] = ()
    broken_weights: Optional[tuple[str, ...]] = None
    is_lost: bool = False
    style: str = "fastcheck"
    replay: Optional[ReplayOutcome] = None
    dump: Optional[Dumped] = None
    learning_rates: tuple[tuple[str, float], ...] = ()
    fault: str = ""
    left_out_by: tuple[str, ...] = ()
    page: Optional[str] = None
    batch: Optional[Union[int, str]] = None
    made_by: Optional[MadeBy] = None
    silent_norms: tuple[str, ...] = ()
    not_updated: tuple[str, ...] = ()
    outlier: Optional[Outlier] = None
    noticed: str = ""
    is_op_level: bool = False
