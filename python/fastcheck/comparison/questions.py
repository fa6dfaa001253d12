"""Turns the outcome of a comparison into answers to a fixed list of questions.

The inputs of a run (environment, hyper-parameters, batches, first weights) do not cause one
another, so all differences among them are listed. If there is a difference, the questions end
there. Questions about computed tensors follow in the order of computation, up to the first "no".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Optional

from .block import Kind, Phase
from .measure import PairState
from .nested_diff import Setting
from .origin import Cause, Origin
from .tally import COMPUTED, Found, Missing, Tally

#: The names that accept= takes, what is given first.
ACCEPTABLE = (
    *("environment", "hyper-parameters", "batches", "weights"),
    *("dtype", "order", "missing"),
)
GIVEN_PHASES = (Phase.ENVIRONMENT, Phase.HYPERPARAMETERS, Phase.BATCHES, Phase.WEIGHTS)
_ACCEPTED_AS = dict(zip(GIVEN_PHASES, ACCEPTABLE))
#: The questions about two runs.
IN_A_RUN = {
    Phase.ENVIRONMENT: "environment",
    Phase.HYPERPARAMETERS: "hyper-parameters",
    Phase.BATCHES: "batches",
    Phase.WEIGHTS: "initial weights",
    Phase.FORWARD: "forward",
    Phase.LOSS: "loss",
    Phase.GRADIENTS: "gradients",
    Phase.UPDATE: "update",
}
_ELSEWHERE = {
    Kind.CHECKPOINT: {
        Phase.HYPERPARAMETERS: "other values",
        Phase.WEIGHTS: "weights",
        Phase.UPDATE: "optimizer states",
    },
    Kind.ENVIRONMENT: {Phase.ENVIRONMENT: "environment"},
    Kind.INVENTORY: {Phase.HYPERPARAMETERS: "model and optimizer"},
}


@dataclass(frozen=True)
class Answer:
    """``answer``: ``yes`` (they agree), ``no``, ``accepted`` (no, but named in accept=), ``partly``
    (what both sides have agrees), ``unknown`` (a side has no such data) or ``not asked``.
    """

    question: str
    answer: str
    text: str
    settings: tuple[Setting, ...] = ()
    found: Optional[Found] = None


@dataclass(eq=False)
class Questions:
    """Turns a tally and the differing settings into answers."""

    kind: Kind
    tally: Tally
    settings: Mapping[Phase, Optional[Sequence[Setting]]]
    _accept: frozenset[str]
    _exact: bool
    _ask_all: bool
    expects_bits: bool
    is_partial: bool = False
    is_split: bool = False

    def __post_init__(self) -> None:
        self._labels = _ELSEWHERE.get(self.kind, IN_A_RUN)
        self._in_order = self.kind.family == "run"
        firsts = self.tally.firsts
        self._finds = firsts.inexact if self._exact else firsts.different
        self._missing: dict[Phase, list[Missing]] = {}
        for missing in self.tally.missing.values():
            if not missing.is_explained:
                self._missing.setdefault(missing.phase, []).append(missing)

    @property
    def first(self) -> Optional[Found]:
        """The first thing computed that counts as different."""
        tally = self.tally
        inexact = tally.first(tally.firsts.inexact, COMPUTED)
        if self._exact:
            return inexact
        different = tally.first(tally.firsts.different, COMPUTED)
        nonfinite = tally.first(tally.firsts.nonfinite, COMPUTED)
        if self.is_partial and nonfinite is not None:
            # The first of chosen operators is not the cause of the others: what overflows leads.
            return nonfinite
        origin = self.origin
        if (
            inexact is not None
            and origin is not None
            and self.expects_bits
            and "order" not in self._accept
            and (different is None or inexact.key < different.key)
            and origin.cause is not Cause.ROUNDING
            and (inexact.row.state is PairState.REORDERED or origin.is_beyond)
        ):
            # Until here the runs were equal to the bit, and their machines compute alike.
            return inexact
        return different

    @property
    def origin(self) -> Optional[Origin]:
        """The first computed tensor that is not equal to the bit, with what follows from it."""
        return min(self.tally.origins.values(), key=lambda origin: origin.key, default=None)

    def answers(self) -> tuple[Answer, ...]:
        answers: list[Answer] = []
        stopped = False
        for phase in GIVEN_PHASES:
            if phase in self._labels:
                answer = self._given(phase)
                stopped = stopped or answer.answer == "no"
                answers.append(answer)
        # A checkpoint's states don't follow from its weights.
        stopped = stopped and not self._ask_all and self._in_order
        first = self.first
        for phase in COMPUTED:
            if phase not in self._labels:
                continue
            if stopped:
                answers.append(Answer(self._labels[phase], "not asked", ""))
                continue
            answer = self._computed(phase, first)
            answers.append(answer)
            stopped = answer.answer == "no" and not self._ask_all and self._in_order
        return tuple(answers)

    def _given(self, phase: Phase) -> Answer:
        label = self._labels[phase]
        if phase in (Phase.ENVIRONMENT, Phase.HYPERPARAMETERS):
            settings = self.settings.get(phase)
            if settings is None:
                return Answer(label, "unknown", "not known for both sides")
            if not settings:
                return Answer(label, "yes", "")
            count = len(settings)
            text = f"{count} setting{'s' if count > 1 else ''} differ{'' if count > 1 else 's'}"
            return Answer(label, self._no(phase), text, tuple(settings))
        difference = self._finds.get(phase)
        reordered = self.tally.given_reordered[phase]
        if difference is None and reordered:
            return Answer(label, "accepted", f"{reordered:,} in another order")
        if difference is None:
            return self._agrees(phase, label)
        return Answer(label, self._no(phase), self._how_many(phase), found=difference)

    def _no(self, phase: Phase) -> str:
        return "accepted" if _ACCEPTED_AS[phase] in self._accept else "no"

    def _computed(self, phase: Phase, first: Optional[Found]) -> Answer:
        label = self._labels[phase]
        if not self._in_order or self._ask_all or self.is_partial:
            own = self._finds.get(phase)
            if (self.is_partial or own is None) and first is not None and first.key[1] == phase:
                own = first
            if own is not None:
                return Answer(label, "no", self._how_many(phase), found=own)
        elif first is not None and first.key[1] == phase:
            return Answer(label, "no", self._how_many(phase), found=first)
        return self._agrees(phase, label, first)

    def _agrees(self, phase: Phase, label: str, first: Optional[Found] = None) -> Answer:
        counts = self.tally.states[phase]
        compared = counts[PairState.SAME] + counts[PairState.CLOSE] + counts[PairState.REORDERED]
        missing = self._missing.get(phase, [])
        unreadable = counts[PairState.UNREADABLE]
        if not compared and not missing and not unreadable and not counts[PairState.DIFFERENT]:
            why = "nothing that both sides have"
            if self.is_split and phase is Phase.FORWARD:
                why = "depends on how the batch is split: not compared"
            return Answer(label, "unknown", why)
        text = self._how_well(phase) if first is None else self._until(first, phase)
        if (missing or unreadable) and "missing" not in self._accept:
            parts = [text] if text and compared else []
            for state, side in (
                (PairState.ONLY_ACTUAL, "actual"),
                (PairState.ONLY_REFERENCE, "reference"),
            ):
                count = sum(entry.count for entry in missing if entry.state is state)
                if count:
                    parts.append(f"{count:,} only in {side}")
            if unreadable:
                parts.append(f"{unreadable:,} can't be read")
            return Answer(label, "partly", "; ".join(parts))
        return Answer(label, "yes", text)

    def _how_well(self, phase: Phase) -> str:
        counts = self.tally.states[phase]
        inexact = self.tally.firsts.inexact.get(phase)
        if inexact is None:
            known = counts[PairState.CLOSE] == 0
            return "to the bit" if known else "as far as the statistics tell"
        worst = self.tally.firsts.worst.get(phase)
        error = 0.0 if worst is None else worst.row.error
        return f"within the thresholds (largest error {error:.2g})"

    def _until(self, first: Found, phase: Phase) -> str:
        """Text on the step up to which the answer is yes, and how exactly."""
        step, culprit = first.key[0], first.key[1]
        last = step if phase < culprit else step - 1
        if last < 0:
            return "before the first step"
        inexact = self.tally.firsts.inexact.get(phase)
        is_exact = not self.tally.counts["without_bits"] and (
            inexact is None or inexact.key[0] > last
        )
        return f"up to step {last:,}, {'to the bit' if is_exact else 'within the thresholds'}"

    def _how_many(self, phase: Phase) -> str:
        counts = self.tally.states[phase]
        different = counts[PairState.DIFFERENT]
        if self._exact or not different:
            different += counts[PairState.REORDERED] + (
                counts[PairState.CLOSE] if self._exact else 0
            )
        total = sum(counts[state] for state in PairState if state <= PairState.DIFFERENT)
        count = f"{different:,}" if different else "some"  # by less than the thresholds
        return f"{count} of {total:,} tensors differ"
