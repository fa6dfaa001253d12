"""Collects the outcome of all blocks in bounded memory: counts and first differences."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import NamedTuple, Optional

from fastcheck.comparison.over_time import LossPair

from .batches import BatchOrder
from .block import Phase
from .measure import PairState
from .origin import Origin
from .row import Row

KEPT_ROWS = 1000
KEPT_STEPS = 100_000
#: The questions that are about what was computed, in the order in which a step computes it.
COMPUTED = (Phase.FORWARD, Phase.LOSS, Phase.GRADIENTS, Phase.UPDATE)

#: The place at which something was seen: step, question, place in the step, rank.
Key = tuple[int, int, int, int]


class Found(NamedTuple):
    """A row, when it was, and the largest error of what its step computed before it; whether all
    that was equal to the bit.
    """

    key: Key
    row: Row
    error_before: float
    exact_before: bool
    #: The next rows of that step.
    trail: tuple[Row, ...] = ()
    #: The number of computed pairs of its step that came before it.
    count_before: int = 0
    #: The names that actual alone, and reference alone, has before it in that step, of the same
    #: question.
    alone: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    #: The computed pair of its step that comes right before it.
    after: str = ""
    #: Where the outputs of its step come in another order before it: the last that is the same, and
    #: the next one of actual and of reference.
    calls: Optional[tuple[str, str, str]] = None


class StepError(NamedTuple):
    """The largest error of a step, and where."""

    step: int
    error: float
    name: str


@dataclass(frozen=True)
class Missing:
    """A name that one side has fewer of. ``is_explained``: it makes no difference. ``is_alone``: in
    the first of these steps that side has none of it. ``is_zero``: all elements are 0, each time.
    """

    state: PairState
    name: str
    phase: Phase
    count: int
    first_step: int
    is_explained: bool = False
    is_alone: bool = False
    is_zero: bool = False


class Unreduced(NamedTuple):
    """The first gradient of a parameter that this rank has as the lowest does, except on one side:
    0 is actual.
    """

    step: int
    rank: int
    name: str
    side: int


class Firsts(NamedTuple):
    """The first finds by question: what is different, not equal to the bit, not finite on one side;
    and the largest error.
    """

    different: dict[Phase, Found]
    inexact: dict[Phase, Found]
    nonfinite: dict[Phase, Found]
    worst: dict[Phase, Found]


class Tally:
    """Filled by the run over the blocks, read by the verdict."""

    def __init__(self) -> None:
        self.states: dict[Phase, Counter[PairState]] = {phase: Counter() for phase in Phase}
        self.firsts = Firsts({}, {}, {}, {})
        self.growth: dict[int, StepError] = {}
        self.origins: dict[int, Origin] = {}  # by rank
        self.missing: dict[tuple[PairState, str], Missing] = {}
        self.rows: list[Row] = []
        #: Numbers by what they count: of the notes of a report; ``rows`` that are not kept, pairs
        #: ``related`` to each other, pairs ``without_bits``, which can't be compared to the bit,
        #: and those of them ``without_statistics``.
        self.counts: Counter[str] = Counter()
        #: Texts and names in the order in which they were met, by the note of a report.
        self.noted: dict[str, dict[str, None]] = defaultdict(dict)
        self.lookalikes: dict[str, str] = {}
        #: The equal weight of reference by the name of a weight that differs; "" if none is equal.
        self.elsewhere: dict[str, str] = {}
        self.dtypes: Counter[tuple[str, str]] = Counter()
        #: By name, whether all compared pairs are equal to the bit; None: it is not asked.
        self.unchanged: Optional[dict[str, bool]] = None
        self.unreduced: Optional[Unreduced] = None
        self.losses: dict[int, LossPair] = {}
        self.batches: dict[int, BatchOrder] = defaultdict(BatchOrder)  # by rank
        #: Pairs of the same numbers in another order, by question about what was given.
        self.given_reordered: Counter[Phase] = Counter()

    def note(self, kind: str, *names: str) -> None:
        """Adds names to those of a note."""
        self.noted[kind].update(dict.fromkeys(names))

    def is_reordered(self, phase: Phase) -> bool:
        """True if the inputs of a run differ, but only in the order of their elements."""
        differing = self.states[phase][PairState.DIFFERENT]
        return bool(differing) and differing == self.given_reordered[phase]

    def keep(self, row: Row) -> None:
        if len(self.rows) < KEPT_ROWS:
            self.rows.append(row)
        else:
            self.counts["rows"] += 1

    def grow(self, step: int, error: float, name: str) -> None:
        before = self.growth.get(step)
        if before is None and len(self.growth) >= KEPT_STEPS:
            return
        if before is None or error > before.error:
            self.growth[step] = StepError(step, error, name)

    def miss(
        self,
        state: PairState,
        name: str,
        phase: Phase,
        step: int,
        is_explained: bool = False,
        is_alone: bool = False,
        is_zero: bool = False,
    ) -> None:
        new = Missing(state, name, phase, 0, step, is_explained, is_alone, is_zero)
        known = self.missing.get((state, name), new)
        self.missing[state, name] = replace(
            known,
            phase=phase,
            count=known.count + 1,
            is_explained=is_explained and known.is_explained,
            is_zero=is_zero and known.is_zero,
        )

    def first(self, table: dict[Phase, Found], phases: tuple[Phase, ...]) -> Optional[Found]:
        """The earliest of these questions' finds."""
        finds = (table[phase] for phase in phases if phase in table)
        return min(finds, key=lambda find: find.key, default=None)
