"""A row of a comparison's details: a pair of tensors, or a tensor without a partner."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from fastcheck.record.format import DTYPES, NONFINITE_COUNTS, Depth
from fastcheck.record.statistics import statistics_of
from fastcheck.statistics.elements import Elements
from fastcheck.utils.text.numbers import counted

from .block import SIDES, Block, Phase
from .measure import ORDER, REASONS, UNREADABLE, PairState
from .names import NameTable


@dataclass(frozen=True)
class Row:
    """``step`` is that in which the difference came about: a parameter that is read in step 8 shows
    the update of step 7. ``error`` is compared with the threshold; ``elements`` is there
    where both sides' values were, and ``relation`` says how the two belong together where the
    values prove it, as transposed, a cast, a part of the other, or the statistics have a factor.
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
    sides = [None if side is None else _side(*side) for side in (actual, reference)]
    if not relation and state is PairState.DIFFERENT and (factor := factor_of(*sides)) != 1:
        relation = f"its statistics are {factor_text(factor)} times those of reference"
    elif not relation and state is PairState.DIFFERENT and elements is None:
        relation = _constant_text(*sides) or _moments_text(*sides)
    return Row(
        step=step,
        rank=block.rank,
        phase=phase,
        name=str(names[int(block.names[index])]),
        call=int(block.records[index]["call"]),
        state=state,
        error=error,
        reason=_reason_text(reason, actual, reference),
        actual=sides[0],
        reference=sides[1],
        elements=elements,
        relation=relation,
    )


def _constant_text(*sides: Optional[dict[str, Any]]) -> str:
    """The text on the first side whose elements are all equal; "" where there are others."""
    for name, side in zip(("actual", "reference"), sides):
        if side is not None and (side["numel"] or 0) > 1 and side["min"] is not None:
            is_finite = not any(side[column] for column in NONFINITE_COUNTS)
            if is_finite and side["min"] == side["max"]:
                each = f"each element is {side['min']:.6g}" if side["min"] else "all zeros"
                return f"{each} in {name}"
    return ""


def _moments_text(*sides: Optional[dict[str, Any]]) -> str:
    """The text on what the moments of the first side have in common with those of the second; ""
    where that is nothing.
    """
    actual, reference = sides
    if actual is None or reference is None:
        return ""
    mine, other = _moments(actual), _moments(reference)
    if mine is None or other is None:
        return ""
    sizes = actual["numel"], reference["numel"]
    if sizes[0] == sizes[1]:
        is_many = sizes[0] >= _MANY
        return _shifted_text(mine, other) or (_mapped_text(mine, other) if is_many else "")
    return _padded_text((mine, other), sizes) if "int" in reference["dtype"] else ""


def _shifted_text(mine: _Moments, other: _Moments) -> str:
    """The text on statistics that are those of reference plus a number; "" where they are not."""
    if other[0] == other[1]:
        return ""
    number, size = mine[0] - other[0], max(map(abs, (*mine[:2], *other[:2])))
    squares = other[3] + number * (2 * other[2] + number)
    apart = [(mine[i] - other[i] - number) / size for i in (1, 2)] + [(mine[3] - squares) / size**2]
    if max(map(abs, apart)) >= _SAME or abs(number) < _APART * size:
        return ""
    sign = "plus" if number > 0 else "minus"
    return f"its statistics are those of reference {sign} {abs(number):.6g}"


def _mapped_text(mine: _Moments, other: _Moments) -> str:
    """The text on statistics that are those of reference times a number plus another, as of data
    that are scaled to another range; "" where they are not.
    """
    spreads = [max(squares - mean * mean, 0.0) for _, _, mean, squares in (mine, other)]
    size = max(map(abs, mine[:2]))
    for sign in (1, -1) if all(spreads) else ():
        factor = sign * math.sqrt(spreads[0] / spreads[1])
        number = mine[2] - factor * other[2]
        ends = sorted(factor * end + number for end in other[:2])
        is_same = max(abs(mine[0] - ends[0]), abs(mine[1] - ends[1])) < _SAME * size
        if is_same and abs(factor - 1) > _APART and abs(number) > _APART * size:
            more = f"{'plus' if number > 0 else 'minus'} {abs(number):.5g}"
            return f"its statistics are those of reference times {factor:.5g} {more}"
    return ""


def _padded_text(sides: tuple[_Moments, _Moments], sizes: tuple[int, int]) -> str:
    """The text on elements of one side alone that all have one value, as far as the sums tell."""
    long = int(sizes[1] > sizes[0])
    count = sizes[long] - sizes[1 - long]
    wholes = [[side[i] * size for i in (2, 3)] for side, size in zip(sides, sizes)]
    sums = [more - less for more, less in zip(wholes[long], wholes[1 - long])]
    value = round(sums[0] / count)
    if any(abs(s - count * value**p) > _SAME * sizes[long] for s, p in zip(sums, (1, 2))):
        return ""
    name = SIDES[long]
    return f"{name} has {counted(count, 'element')} more, with the sums of as many of {value}"


_Moments = tuple[float, float, float, float]


def _moments(side: dict[str, Any]) -> Optional[_Moments]:
    """The smallest and largest element, the mean, and the mean of the squares."""
    is_known = all(side[key] is not None for key in ("min", "max", "mean", "l2_norm"))
    if not is_known or not side["numel"] or any(side[column] for column in NONFINITE_COUNTS):
        return None
    return side["min"], side["max"], side["mean"], side["l2_norm"] ** 2 / side["numel"]


def _reason_text(
    code: int, actual: tuple[Block, int] | None, reference: tuple[Block, int] | None
) -> str:
    if code == ORDER and reference is not None:
        block, index = reference
        if DTYPES[int(block.records[index]["dtype"])].kind != "f8":  # which have no last bits
            return "only the checksum differs: the same numbers in another order, or of equal sums"
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


# Statistics that differ by less than this, relative to what they belong to, are the same; and what
# is between these is no factor, but an error.
_SAME, _APART = 1e-5, 1e-3
# Fewer elements may have such statistics by chance.
_MANY = 64


def factor_of(actual: Optional[dict[str, Any]], reference: Optional[dict[str, Any]]) -> float:
    """The factor by which the statistics of ``actual`` are those of ``reference``; 1: none. Of
    one element a whole number, or one over one: any two numbers have some factor.
    """
    if actual is None or reference is None or actual["numel"] != reference["numel"]:
        return 1.0
    sides = (actual, reference)
    norms = [side["l2_norm"] for side in sides]
    is_finite = not any(side[column] for side in sides for column in NONFINITE_COUNTS)
    if not is_finite or not all(norm and math.isfinite(norm) for norm in norms):
        return 1.0
    factor, size = norms[0] / norms[1], actual["numel"]
    if size == 1:
        signed = math.copysign(factor, actual["max"] * reference["max"])
        is_known = _nearest(signed) is not None and "float16" not in reference["dtype"]
        return signed if is_known and abs(signed - 1) > _APART else 1.0
    peak = factor * max(abs(reference["min"]), abs(reference["max"]))
    for turned in (factor, -factor):
        ends = sorted((turned * reference["min"], turned * reference["max"]))
        apart = [abs(actual["min"] - ends[0]) / peak, abs(actual["max"] - ends[1]) / peak]
        mean = abs(actual["mean"] - turned * reference["mean"]) / (norms[0] / math.sqrt(size))
        if max(*apart, mean) < _SAME and abs(turned - 1) > _APART:
            return turned
    return 1.0


def factor_text(factor: float) -> str:
    """The factor as ``2``, ``1/8`` or ``5.657``."""
    nearest = _nearest(factor)
    if nearest is None:
        return f"{factor:.4g}"
    return f"{nearest:,.0f}" if abs(nearest) >= 1 else f"1/{1 / nearest:,.0f}"


def is_whole(factor: float) -> bool:
    """True if it is a whole number from 2 on, or one over one."""
    nearest = _nearest(factor)
    return nearest is not None and nearest > 0 and nearest != 1


def _nearest(factor: float) -> Optional[float]:
    """The whole number, or one over one, that it is; None: it is none."""
    size = abs(factor)
    whole = round(max(size, 1 / size))
    nearest = math.copysign(whole if size > 1 else 1 / whole, factor)
    return nearest if abs(nearest / factor - 1) < _SAME else None
