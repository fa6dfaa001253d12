"""Proof: the result of computing a step in ways that must agree, as data and as text."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any, Optional

from fastcheck.errors import printable
from fastcheck.utils.text.layout import to_ascii, wants_ascii

HOLDS, DIFFERS, BY_DESIGN = "holds", "differs", "by design"
NOT_ASKED, FAILED = "not asked", "failed"


@dataclass(frozen=True)
class Place:
    """The first place at which two computations of a step part. ``module``: its path; ``""``: the
    model itself. ``kind``: ``"forward"``, ``"backward"``, ``"loss"`` where the model returns the
    same and the loss differs, ``"reduction"`` where ranks compute the same and their gradients
    differ, ``"update"`` where all is the same but the update, or ``"step"`` where the step does not
    call the model once with all rows. ``what``: which tensor. ``operator``: the function that was
    called there, ``line``: by which line of the program, where that is known.
    """

    module: str
    kind: str
    what: str
    score: float
    operator: str = ""
    line: str = ""

    def __str__(self) -> str:
        if self.kind == "loss":
            return "the loss: the step makes another one of what the model returns"
        if self.kind == "update":
            return f"the update of {self.what}, which is another one of the same gradients"
        if self.kind == "reduction":
            name = ".".join(filter(None, (self.module, self.what)))
            return (
                f"the reduction of gradients, of {name} first: all that is compared before agrees"
            )
        if self.kind == "step":
            return "the step, which does not call the model once with all rows: it is not followed"
        name = f"{self.module or 'the model'} ({self.kind}): {self.what}"
        called = f", {self.operator}" if self.operator else ""
        return f"{name}{called}" + (f" at {self.line}" if self.line else "")


@dataclass(frozen=True)
class Outcome:
    """The answer to one relation. ``state``: ``"holds"``, ``"differs"``, ``"by design"`` (the step
    may depend on what was changed; ``note`` says why), ``"not asked"`` (``note`` says why) or
    ``"failed"`` (the computation raised ``note``). ``score``: the largest difference, in units of
    the measured noise of its tensor; None where nothing was compared. ``worst``: that tensor.
    ``first``: where the two computations part, of one that differs.
    """

    relation: str
    state: str
    score: Optional[float] = None
    worst: str = ""
    first: Optional[Place] = None
    note: str = ""
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """The first place and the tensor that is farthest off, where it differs, or the note."""
        if self.state != DIFFERS:
            return self.note
        place = "" if self.first is None else f"first place: {self.first}\n"
        return f"{place}farthest: {self.worst}"

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, ready for JSON."""
        first = None if self.first is None else dict(vars(self.first))
        return {**vars(self), "first": first}


@dataclass(frozen=True)
class Proof:
    """The result of fastcheck.prove(); ``str()`` of it is a table, and it is true when no relation
    differs.

    ``outcomes``: one for each relation. ``subject``: model, batch and format. ``seconds``: of all.
    """

    outcomes: tuple[Outcome, ...]
    subject: str
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether no relation differs."""
        return not any(outcome.state == DIFFERS for outcome in self.outcomes)

    @property
    def headline(self) -> str:
        """The numbers of relations that hold, differ and failed."""
        states = Counter(outcome.state for outcome in self.outcomes)
        text = f"{states[HOLDS]} hold, {states[DIFFERS]} differ"
        return text + (f", {states[FAILED]} failed" if states[FAILED] else "")

    def __bool__(self) -> bool:
        return self.holds

    def __getitem__(self, name: str) -> Outcome:
        """The outcome of the relation of this name."""
        for outcome in self.outcomes:
            if outcome.relation == name:
                return outcome
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, ready for JSON."""
        return {
            "holds": self.holds,
            "subject": self.subject,
            "seconds": self.seconds,
            "outcomes": [outcome.to_dict() for outcome in self.outcomes],
        }

    def __str__(self) -> str:
        return render(self)


def render(proof: Proof) -> str:
    """The table: relation, state, score, time, and the first place or the reason."""
    shown = [outcome for outcome in proof.outcomes if outcome.state != NOT_ASKED]
    width = max([len(outcome.relation) for outcome in proof.outcomes], default=0)
    lines = [proof.subject, ""]
    lines.append(f"  {'relation':{width}}  {'':9}  {'score':>8}  {'time':>7}")
    for outcome in shown:
        score = score_text(outcome.score)
        note = outcome.note if outcome.state != DIFFERS else ""
        row = (
            f"  {outcome.relation:{width}}  {outcome.state:9}  {score:>8}"
            f"  {outcome.seconds:5.1f} s  {note}"
        )
        lines.append(row.rstrip())
        if outcome.state == DIFFERS:
            lines += [f"      {line}" for line in outcome.text.splitlines()]
    skipped = [outcome for outcome in proof.outcomes if outcome.state == NOT_ASKED]
    if skipped:
        lines += ["", "  not asked:"]
        lines += [f"  {outcome.relation:{width}}  {outcome.note}" for outcome in skipped]
    lines += ["", f"  {proof.headline}. A score is a difference over the noise of its tensor,"]
    lines += ["  measured by moving each weight by one ulp; up to 10 is noise."]
    text = printable("\n".join(lines), keep="\n")
    return to_ascii(text) if wants_ascii(sys.stdout) else text


def score_text(score: Optional[float]) -> str:
    """A score in at most seven characters; ``""`` without one."""
    if score is None:
        return ""
    return f"{score:.1f}" if score < 1000 else f"{score:.1e}"
