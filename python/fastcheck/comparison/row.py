"""A row of a comparison's details: a pair of tensors, or a tensor without a partner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from fastcheck.record.format import DTYPES, NONFINITE_COUNTS, Depth
from fastcheck.record.statistics import statistics_of
from fastcheck.statistics.elements import Elements

from .block import Block, Phase
from .measure import REASONS, UNREADABLE, PairState
from .names import NameTable


@dataclass(frozen=True)
class Row:
    """``step`` is that in which the difference came about: a parameter that is read in step 8 shows
    the update of step 7. ``error`` is compared with the threshold; ``elements`` is there
    where both sides' values were, and ``relation`` says how the two belong together where the
    values prove it: transposed, a cast, a part of the other.
    """

    step: int
    rank: int
    phase: Phase
    name: str
    call: int
    state: PairState
    error: float
    reason: str
    actual: Optional[dict[str, Any]]
    reference: Optional[dict[str, Any]]
    elements: Optional[Elements] = None
    relation: str = ""

    @property
    def why(self) -> str:
        """The reason, and the relation."""
        return ": ".join(filter(None, [self.reason, self.relation]))

    def to_dict(self) -> dict[str, Any]:
        """The row by column (COLUMNS); None where a column doesn't apply."""
        made: dict[str, Any] = {name: getattr(self, name, None) for name in _FIRST}
        made.update(question=self.phase.name.lower(), state=self.state.name.lower())
        for column in _MEASURES:
            made[column] = None if self.elements is None else getattr(self.elements, column)
        for side, values in (("actual", self.actual), ("reference", self.reference)):
            for column in _SIDE:
                made[f"{side}_{column}"] = None if values is None else values[column]
        return made


_MEASURES = (
    *("cosine", "max_abs", "max_rel", "within_1000", "within_200"),
    *("euclidean", "max_ulp", "nonfinite", "differing"),
)
_SIDE = (
    *("dtype", "shape", "numel", "requires_grad", *NONFINITE_COUNTS),
    *("min", "max", "mean", "l2_norm", "checksum", "crc32"),
)
_FIRST = ("step", "rank", "question", "name", "call", "state", "error", "reason", "relation")
#: The columns of the CSV, in order.
COLUMNS = (*_FIRST, *_MEASURES, *(f"{s}_{c}" for s in ("actual", "reference") for c in _SIDE))


def make_row(
    names: NameTable,
    step: int,
    phase: Phase,
    state: PairState,
    error: float,
    reason: int,
    actual: tuple[Block, int] | None,
    reference: tuple[Block, int] | None,
    elements: Optional[Elements] = None,
    relation: str = "",
) -> Row:
    """Makes a row of the records at these positions of the two blocks. ``relation``: how the two
    tensors belong together.
    """
    given = reference or actual
    assert given is not None
    block, index = given
    return Row(
        step=step,
        rank=block.rank,
        phase=phase,
        name=str(names[int(block.names[index])]),
        call=int(block.records[index]["call"]),
        state=state,
        error=error,
        reason=_reason_text(reason, actual, reference),
        actual=None if actual is None else _side(*actual),
        reference=None if reference is None else _side(*reference),
        elements=elements,
        relation=relation,
    )


def _reason_text(
    code: int, actual: tuple[Block, int] | None, reference: tuple[Block, int] | None
) -> str:
    if code != UNREADABLE:
        return REASONS[code]
    sides = {"actual": actual, "reference": reference}
    problems = {name: place[0].extra(place[1]).problem for name, place in sides.items() if place}
    reasons = "; ".join(f"{name}: {problem}" for name, problem in problems.items() if problem)
    return f"{REASONS[code]} ({reasons})" if reasons else REASONS[code]


def _side(block: Block, index: int) -> dict[str, Any]:
    record, extra = block.records[index], block.extra(index)
    made: dict[str, Any] = dict.fromkeys(_SIDE)
    made["shape"] = None if extra.shape is None else list(extra.shape)
    made["requires_grad"] = extra.requires_grad
    made["crc32"] = extra.crc32
    if not record["version"]:
        return made  # it could not be read
    made["dtype"] = DTYPES[int(record["dtype"])].name
    made["numel"] = int(record["numel"])
    for field in NONFINITE_COUNTS:
        made[field] = int(record[field]) if record[field] >= 0 else None
    made.update(_summary(record))
    if record["depth"] >= Depth.FULL:
        made["checksum"] = f"{int(record['checksum']):016x}"
    return made


def _summary(record: np.void) -> dict[str, Any]:
    if record["nan_count"] < 0:
        record = record.copy()
        for field in NONFINITE_COUNTS:
            record[field] = 0
    statistics = statistics_of(record)
    return {name: getattr(statistics, name) for name in ("min", "max", "mean", "l2_norm")}
