"""Result: the outcome of a comparison as data, without its text."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Optional

from fastcheck.comparison.over_time import LossPair
from fastcheck.utils.text.numbers import to_json

from .measure import PairState
from .questions import Answer
from .row import Row
from .tally import Found, Missing, StepError


@dataclass(frozen=True)
class Result:
    """The result of a comparison.

    ``verdict``: ``identical`` (equal to the bit, nothing missing in the steps and ranks that both
    have), ``equal`` (within the thresholds; or nothing but what accept= names differs) or
    ``different``.

    ``first`` is the first thing computed that differs beyond the thresholds, ``first_inexact`` the
    first that is not equal to the bit. ``expects_bits``: the environments are known and equal, and
    as many modules ran compiled, so that ``first_inexact`` is where to look.
    ``is_partial``: a side is a dump of chosen operators or modules; NaN and infinities of one side
    then come first.
    ``rows`` are details of what differs, at most 1000; ``growth`` the largest error of each step.
    ``losses`` are those of each step, ``drifts_from`` the first step where they differ by more than
    ``loss_drift=``. ``unchanged``, of two different steps: what is equal to the bit.
    """

    actual: str
    reference: str
    kind: str
    verdict: str
    answers: tuple[Answer, ...]
    first: Optional[Found]
    first_inexact: Optional[Found]
    expects_bits: bool
    is_partial: bool
    growth: tuple[StepError, ...]
    counts: dict[str, dict[str, int]]
    missing: tuple[Missing, ...]
    rows: tuple[Row, ...]
    more_rows: int
    steps: tuple[int, ...]
    unchanged: tuple[str, ...]
    losses: tuple[LossPair, ...]
    drifts_from: Optional[int]
    notes: tuple[str, ...]
    #: True if steps or ranks of one side were not compared, because the other has none of them.
    leaves_out: bool = False
    #: The kinds of the differences, as far as they are known, and the options that accept them.
    advice: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """True if the command line exits with 0."""
        return self.verdict != "different"

    @property
    def is_identical(self) -> bool:
        return self.verdict == "identical"

    def __bool__(self) -> bool:
        return self.agrees

    def __getitem__(self, question: str) -> Answer:
        """The answer to a question: ``comparison["batches"]``."""
        for answer in self.answers:
            if answer.question == question:
                return answer
        raise KeyError(
            f"{question!r}; expected one of {', '.join(a.question for a in self.answers)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for strict JSON."""
        made = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        made["answers"] = [
            {
                **vars(answer),
                "settings": [setting._asdict() for setting in answer.settings],
                "found": _found(answer.found),
            }
            for answer in self.answers
        ]
        made["first"], made["first_inexact"] = _found(self.first), _found(self.first_inexact)
        made["growth"] = [step._asdict() for step in self.growth]
        made["missing"] = [
            {
                "name": entry.name,
                "only_in": "actual" if entry.state is PairState.ONLY_ACTUAL else "reference",
                "count": entry.count,
                "first_step": entry.first_step,
            }
            for entry in self.missing
        ]
        made["rows"] = [row.to_dict() for row in self.rows]
        made["losses"] = [{**loss._asdict(), "error": loss.error} for loss in self.losses]
        return to_json(made)


def _found(difference: Optional[Found]) -> Optional[dict[str, Any]]:
    if difference is None:
        return None
    made = difference.row.to_dict()
    made["error_before"] = difference.error_before
    made["exact_before"] = difference.exact_before
    made["alone"] = dict(zip(("actual", "reference"), map(list, difference.alone)))
    made["then"] = [{"name": row.name, "error": row.error} for row in difference.trail]
    if difference.row.elements is not None:
        made.update(dataclasses.asdict(difference.row.elements))
    return made
