"""Proof: the result of computing a step in ways that must agree, as data, text and page."""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Optional, Union

from fastcheck._version import __version__
from fastcheck.errors import printable
from fastcheck.report.page import container as html
from fastcheck.utils.text.layout import Table, to_ascii, wants_ascii, wrap
from fastcheck.utils.text.numbers import to_json

HOLDS, DIFFERS, BY_DESIGN = "holds", "differs", "by design"
NOT_ASKED, FAILED = "not asked", "failed"
UNIT = (
    "A score is a difference over the noise of its tensor, measured by moving each weight by one "
    "ulp; up to 10 is noise."
)

_HEADER = ("relation", "state", "score", "seconds", "first place, or what was seen")
_ELSEWHERE = {
    "loss": "the loss: the step makes another one of what the model returns",
    "update": "the update of {}, which is another one of the same gradients",
    "reduction": "the reduction of gradients, of {} first: all that is compared before agrees",
    "step": "the step, which does not call the model once with all rows: it is not followed",
}


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
        if self.kind in _ELSEWHERE:
            name = ".".join(filter(None, (self.module, self.what)))
            return _ELSEWHERE[self.kind].format(name)
        called = f", {self.operator}" if self.operator else ""
        line = f" at {self.line}" if self.line else ""
        return f"{self.module or 'the model'} ({self.kind}): {self.what}{called}{line}"


@dataclass(frozen=True)
class Outcome:
    """The answer to one relation. ``state``: ``"holds"``, ``"differs"``, ``"by design"`` (the step
    may depend on what was changed; ``note`` says why), ``"not asked"`` (``note`` says why) or
    ``"failed"`` (the computation raised ``note``). ``score``: the largest difference, in units of
    the measured noise of its tensor; None where nothing was compared. ``worst``: that tensor.
    ``first``: where the two computations part, of a relation that differs.
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
        return asdict(self)


@dataclass(frozen=True)
class Proof:
    """The result of fastcheck.prove(); ``str()`` of it is a table, and it is true when no relation
    differs.

    ``outcomes``: an outcome for each relation. ``subject``: model, batch and format. ``seconds``:
    of all.
    """

    outcomes: tuple[Outcome, ...]
    subject: str
    seconds: float

    @property
    def holds(self) -> bool:
        """True if no relation differs."""
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
        return {outcome.relation: outcome for outcome in reversed(self.outcomes)}[name]

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, ready for JSON."""
        return {"holds": self.holds, **asdict(self)}

    def __str__(self) -> str:
        width = max([len(one.relation) for one in self.outcomes], default=0)
        lines = [self.subject, "", f"  {'relation':{width}}  {'':9}  {'score':>8}  {'time':>7}"]
        skipped = ["", "  not asked:"]
        for one in self.outcomes:
            name, below = f"  {one.relation:{width}}", one.text.splitlines()
            if one.state == NOT_ASKED:
                skipped.append(f"{name}  {one.note}")
                continue
            note = "" if one.state == DIFFERS else one.note
            row = f"{name}  {one.state:9}  {score_text(one.score):>8}  {one.seconds:5.1f} s  {note}"
            lines += [row.rstrip(), *(f"      {line}" for line in below if one.state == DIFFERS)]
        lines += skipped if len(skipped) > 2 else []
        lines += ["", *wrap(f"{self.headline}. {UNIT}", 78, "  ")]
        text = printable("\n".join(lines), keep="\n")
        return to_ascii(text) if wants_ascii(sys.stdout) else text


def score_text(score: Optional[float]) -> str:
    """A score in at most seven characters; ``""`` without a score."""
    return "" if score is None else f"{score:{'.1f' if score < 1000 else '.1e'}}"


def write_proof(path: Union[str, os.PathLike[str]], proof: Proof) -> int:
    """Writes one HTML file, which loads nothing, in the place of ``path``; returns its size.

    Raises:
        LogError: the file can't be written.
    """
    rows = [
        (one.relation, one.state, score_text(one.score), f"{one.seconds:.1f}", one.text)
        for one in proof.outcomes
    ]
    verdict = (
        html.headline_html(proof.headline, "good" if proof else "bad", ())
        + f"<p>{html.text_html(UNIT)}</p>"
        '<div class="scrolling" tabindex="0" role="region" aria-label="Relations">'
        f"{html.table_html(Table(_HEADER, rows, left=2, note=1), 'Relations')}</div>"
    )
    header = {"format": 1, "kind": "proof", "fastcheck": __version__, **proof.to_dict()}
    data = html.Container().to_text(to_json(header))
    title = f"fastcheck: {proof.subject}"
    return html.write_html(path, html.page_html(title, proof.subject, verdict, data))
