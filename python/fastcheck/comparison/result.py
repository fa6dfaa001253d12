"""Result: the outcome of a comparison as data, without its text; Compared: the pairs of one
step of one rank with what was found of each.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import numpy as np

from fastcheck.comparison.over_time import LossPair
from fastcheck.utils.text.numbers import to_json

from .block import Block
from .measure import PairState
from .questions import Answer
from .row import Row
from .tally import Found, Missing, StepError


class Compared(NamedTuple):
    """The pairs of one step of one rank. Arrays have one element a pair, in the order of the
    reference.

    ``step``: the reference's; ``before``: the step whose update the parameters of this one show;
    ``names``: numbers of the run's NameTable; ``phases``, ``states``: values of Phase and
    PairState; ``errors``: relative errors, and ``limits``: what is allowed of them; ``reasons``:
    indices of REASONS; ``records``: of actual and of reference, RECORD_DTYPE; ``blocks``: all
    tensors of either side.
    """

    step: int
    before: int
    rank: int
    names: np.ndarray
    phases: np.ndarray
    states: np.ndarray
    errors: np.ndarray
    reasons: np.ndarray
    limits: np.ndarray
    records: tuple[np.ndarray, np.ndarray]
    blocks: tuple[Block, Block]


@dataclass(frozen=True)
class Result:
    """The result of a comparison.

    ``verdict``: ``identical`` (equal to the bit, nothing missing), ``equal`` (within the
    thresholds; or nothing but what accept= names differs) or ``different``.

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
    #: What a difference is, as far as that is known, and which option accepts it.
    advice: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether the command line exits with 0."""
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
        made: dict[str, Any] = {
            "actual": self.actual,
            "reference": self.reference,
            "kind": self.kind,
            "verdict": self.verdict,
            "answers": [_answer(answer) for answer in self.answers],
            "first": _found(self.first),
            "first_inexact": _found(self.first_inexact),
            "expects_bits": self.expects_bits,
            "is_partial": self.is_partial,
            "growth": [step._asdict() for step in self.growth],
            "counts": self.counts,
            "missing": [
                {
                    "name": one.name,
                    "only_in": "actual" if one.state is PairState.ONLY_ACTUAL else "reference",
                    "count": one.count,
                    "first_step": one.first_step,
                }
                for one in self.missing
            ],
            "rows": [row.to_dict() for row in self.rows],
            "more_rows": self.more_rows,
            "steps": list(self.steps),
            "unchanged": list(self.unchanged),
            "losses": [{**loss._asdict(), "error": loss.error} for loss in self.losses],
            "drifts_from": self.drifts_from,
            "notes": list(self.notes),
            "advice": list(self.advice),
        }
        plain: dict[str, Any] = to_json(made)
        return plain


def _answer(answer: Answer) -> dict[str, Any]:
    return {
        "question": answer.question,
        "answer": answer.answer,
        "text": answer.text,
        "settings": [setting._asdict() for setting in answer.settings],
        "found": _found(answer.found),
    }


def _found(found: Optional[Found]) -> Optional[dict[str, Any]]:
    if found is None:
        return None
    made = found.row.to_dict()
    made["error_before"] = found.error_before
    made["exact_before"] = found.exact_before
    made["then"] = [{"name": row.name, "error": row.error} for row in found.trail]
    if found.row.elements is not None:
        made.update(dataclasses.asdict(found.row.elements))
    return made
