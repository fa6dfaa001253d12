"""Collects the outcome of all blocks in bounded memory: counts and first differences."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import NamedTuple, Optional

from fastcheck.comparison.over_time import LossPair

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


class StepError(NamedTuple):
    """The largest error of a step, and where."""

    step: int
    error: float
    name: str


@dataclass(frozen=True)
class Missing:
    """A name that one side has fewer of. ``is_explained``: it makes no difference."""

    state: PairState
    name: str
    phase: Phase
    count: int
    first_step: int
    is_explained: bool = False


class Tally:
    """Filled by the run over the blocks, read by the verdict."""

    def __init__(self) -> None:
        self.states: dict[Phase, Counter[PairState]] = {phase: Counter() for phase in Phase}
        self.different: dict[Phase, Found] = {}
        self.inexact: dict[Phase, Found] = {}
        self.nonfinite: dict[Phase, Found] = {}
        self.worst: dict[Phase, Found] = {}
        self.steps: dict[Phase, set[int]] = defaultdict(set)
        self.growth: dict[int, StepError] = {}
        self.origins: dict[int, Origin] = {}  # by rank
        self.missing: dict[tuple[PairState, str], Missing] = {}
        self.rows: list[Row] = []
        self.more_rows = 0
        #: Gradients that are whole on one side and a module's part on the other.
        self.parts = 0
        self.reordered = 0
        self.moved = 0
        #: Activations that one layout does not have.
        self.absent = 0
        #: Tensors of operators that differ, or are on one side alone, where all gradients agree.
        self.rescheduled = 0
        #: Gradients of what modules take and return that one side has in parts, and whether
        #: something tells the order of their elements.
        self.in_parts: dict[str, bool] = {}
        #: The tensors that pass between modules in another number of elements, while all gradients
        #: agree.
        self.resized: dict[str, None] = {}
        #: Tensors that activation checkpointing has not computed again as they were.
        self.recomputed: dict[str, None] = {}
        #: Parameters of which the ranks of a side do not have the same.
        self.strays: dict[str, None] = {}
        #: Names that are not deterministic.
        self.unsteady: dict[str, None] = {}
        #: Tensors in parts that are compared by sums of records.
        self.merged = 0
        #: Notes on fused tensors whose parts are divided into groups.
        self.grouped: dict[str, None] = {}
        #: Notes on rows that are left out behind those of a vocabulary.
        self.padded: dict[str, None] = {}
        self.lookalikes: dict[str, str] = {}
        #: The equal weight of reference by the name of a weight that differs; "" if none is equal.
        self.elsewhere: dict[str, str] = {}
        #: The tensors of one side alone that are parts of those of the other.
        self.parts_of: list[str] = []
        #: The number of pairs whose relation was looked for.
        self.related = 0
        #: Names of gradients whose terms cancel.
        self.cancelled: dict[str, None] = {}
        #: Names of gradients that are no larger than rounding beside the largest of their step.
        self.small: dict[str, None] = {}
        self.dtypes: Counter[tuple[str, str]] = Counter()
        #: Filled if ``keeps_unchanged``: by name, whether all compared pairs are equal to the bit.
        self.keeps_unchanged = False
        self.unchanged: dict[str, bool] = {}
        self.losses: dict[int, LossPair] = {}
        #: Pairs of the same numbers in another order, by question about what was given.
        self.given_reordered: Counter[Phase] = Counter()
        self.has_bits = True  # whether all pairs could be compared to the bit

    def is_reordered(self, phase: Phase) -> bool:
        """True if the inputs of a run differ, but only in the order of their elements."""
        differing = self.states[phase][PairState.DIFFERENT]
        return bool(differing) and differing == self.given_reordered[phase]

    @property
    def untold(self) -> list[str]:
        """Names of ``in_parts`` of which nothing tells the order of their elements."""
        return [name for name, is_told in self.in_parts.items() if not is_told]

    @property
    def room(self) -> int:
        """The number of rows that can still be kept; those beyond are counted."""
        return KEPT_ROWS - len(self.rows)

    def keep(self, row: Row) -> None:
        if len(self.rows) < KEPT_ROWS:
            self.rows.append(row)
        else:
            self.more_rows += 1

    def keep_unchanged(self, name: str, is_same: bool) -> None:
        if is_same:
            self.unchanged.setdefault(name, True)
        else:
            self.unchanged[name] = False

    def grow(self, step: int, error: float, name: str) -> None:
        before = self.growth.get(step)
        if before is None and len(self.growth) >= KEPT_STEPS:
            return
        if before is None or error > before.error:
            self.growth[step] = StepError(step, error, name)

    def miss(
        self, state: PairState, name: str, phase: Phase, step: int, is_explained: bool = False
    ) -> None:
        before = self.missing.get((state, name))
        count = 1 if before is None else before.count + 1
        first = step if before is None else before.first_step
        is_explained &= before is None or before.is_explained
        self.missing[state, name] = Missing(state, name, phase, count, first, is_explained)

    def first(self, table: dict[Phase, Found], phases: tuple[Phase, ...]) -> Optional[Found]:
        """The earliest of these questions' finds."""
        differences = [table[phase] for phase in phases if phase in table]
        return min(differences, key=lambda difference: difference.key) if differences else None
