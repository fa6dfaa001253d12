"""Pairs the steps of two sides; compares their losses, and finds where these drift apart, and the
step from which learning rates, weight decays or clip thresholds differ.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Optional, Union

import numpy as np

from fastcheck.comparison.block import Block, Kind, Phase, Source
from fastcheck.comparison.names import NameTable, Renaming
from fastcheck.comparison.nested_diff import NOT_THERE, Setting, setting_of
from fastcheck.comparison.split import has_role
from fastcheck.errors import CompareError, ConfigError
from fastcheck.record.format import NONFINITE_COUNTS, Depth
from fastcheck.utils.text.numbers import format_steps

#: The types that compare(steps=) takes.
Steps = Union[str, Iterable[tuple[int, int]], None]

#: Two losses that differ by more than this have drifted apart.
LOSS_DRIFT = 0.01
#: The relative difference of two losses that are equal but for rounding.
SAME_LOSS = 1e-5
_SHOWN = 12

#: (step, value from there on) by name, in the order of the steps.
Schedules = Mapping[str, Sequence[tuple[int, float]]]


def schedules_of(lines: Sequence[Mapping[str, Any]], optimizers: Any) -> Schedules:
    """The schedules of a log's lines, and of its description of the optimizers, which has their
    first values.
    """
    schedules: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        step, name, value = (line.get(key) for key in ("step", "name", "value"))
        if isinstance(step, int) and isinstance(name, str) and isinstance(value, (int, float)):
            if name not in schedules:
                schedules[name] = _constant(optimizers, name)
            schedules[name].append((step, float(value)))
    return schedules


def parted(
    actual: Schedules, reference: Schedules, bases: tuple[Any, Any], last_step: int
) -> list[Setting]:
    """The first step at which each differs, unless the first values do, which is known already.
    ``bases``: both sides' descriptions of optimizers, for names that one side never changes.
    """
    settings = []
    for name in dict.fromkeys([*reference, *actual]):
        sides = [
            schedule.get(name) or _constant(base, name)
            for schedule, base in zip((actual, reference), bases)
        ]
        steps = sorted({step for side in sides for step, _ in side if step <= last_step})
        for step in steps:
            mine, other = (_value(side, step) for side in sides)
            if not _equal(mine, other):
                if step >= 0:
                    values = (NOT_THERE if value is None else value for value in (mine, other))
                    settings.append(setting_of(f"{name} from step {step:,} on", *values))
                break
    return settings


_GROUP = re.compile(r"optimizers\[(\d+)\]\.groups\[(\d+)\]\.(.+)")
#: The groups of actual and of reference that hold the same parameters, for each optimizer.
CommonGroups = list[list[tuple[int, int]]]


def common_groups(
    actual: Any, reference: Any, names: tuple[Callable[[str], str], Callable[[str], str]]
) -> Optional[CommonGroups]:
    """The groups of two descriptions of optimizers whose parameters, by these names, are divided or
    ordered in another way; None where they are not, or one side has other parameters.
    """
    try:
        sides = [
            [
                [{rename(str(n)) for n in g["parameters"]} for g in optimizer["groups"]]
                for optimizer in optimizers
            ]
            for optimizers, rename in zip((actual, reference), names)
        ]
    except (KeyError, TypeError):  # by rank, or of an earlier version
        return None
    if sides[0] == sides[1] or len(sides[0]) != len(sides[1]):
        return None
    groups = []
    for mine, others in zip(*sides):
        held = [sum(map(len, side)) for side in (mine, others)]
        pairs = [(i, k) for k, b in enumerate(others) for i, a in enumerate(mine) if a & b]
        common = sum(len(mine[i] & others[k]) for i, k in pairs)
        if held != [common, common]:
            return None
        groups.append(pairs)
    return groups


def regrouped(optimizers: Any, groups: CommonGroups, side: int) -> Any:
    """The description of optimizers in these groups, without their parameters."""
    return [
        {
            **optimizer,
            "groups": [
                {k: v for k, v in optimizer["groups"][pair[side]].items() if k != "parameters"}
                for pair in pairs
            ],
        }
        for optimizer, pairs in zip(optimizers, groups)
    ]


def regrouped_schedules(schedules: Schedules, groups: CommonGroups, side: int) -> Schedules:
    """The schedules under the numbers of these groups."""
    renumbered: dict[str, Sequence[tuple[int, float]]] = {}
    for name, values in schedules.items():
        match = _GROUP.fullmatch(name)
        if match is None or int(match[1]) >= len(groups):
            renumbered[name] = values
            continue
        for place, pair in enumerate(groups[int(match[1])]):
            if pair[side] == int(match[2]):
                renumbered[f"optimizers[{match[1]}].groups[{place}].{match[3]}"] = values
    return renumbered


def described_at(optimizers: Any, schedules: Schedules, step: int) -> Any:
    """The description of optimizers as it is at a step."""
    description = copy.deepcopy(optimizers)
    for name, schedule in schedules.items():
        *keys, last = _keys(name)
        value = _value(schedule, step)
        if _at(description, name) is None or value is None:
            continue
        place: Any = {"optimizers": description}
        for key in keys:
            place = place[key]
        place[last] = value
    return description


def shifted(schedules: Schedules, start: int, apart: int) -> Schedules:
    """The schedules from step ``start`` on, with ``apart`` added to the numbers of the steps."""
    moved = {}
    for name, schedule in schedules.items():
        value = _value(schedule, start)
        begins = [] if value is None else [(-1, value)]
        moved[name] = begins + [(step + apart, v) for step, v in schedule if step > start]
    return moved


def _constant(base: Any, name: str) -> list[tuple[int, float]]:
    value = _at(base, name)
    return [] if value is None else [(-1, value)]


def _value(schedule: Sequence[tuple[int, float]], step: int) -> Optional[float]:
    return next((value for start, value in reversed(schedule) if start <= step), None)


def _equal(mine: Optional[float], other: Optional[float]) -> bool:
    if mine is None or other is None:
        return mine is other
    return mine == other or math.isclose(mine, other, rel_tol=1e-9)


def _at(optimizers: Any, name: str) -> Optional[float]:
    """The value under a name such as ``optimizers[0].groups[1].lr``; None where there is none."""
    value: Any = {"optimizers": optimizers}
    for key in _keys(name):
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number else None


def _keys(name: str) -> Iterator[Any]:
    for part in name.replace("]", "").replace("[", ".").split("."):
        yield int(part) if part.isdigit() else part


class LossPair(NamedTuple):
    """The losses of one step. ``error``: their difference relative to the reference."""

    step: int
    actual: float
    reference: float

    @property
    def error(self) -> float:
        apart = abs(self.actual - self.reference)
        if self.actual == self.reference:
            return 0.0
        return apart / abs(self.reference) if self.reference and math.isfinite(apart) else math.inf


def loss_of(record: np.void) -> Optional[float]:
    """The value of a record of one number; None of any other, or of one without statistics."""
    if record["numel"] != 1 or not record["version"]:
        return None
    nan, positive, negative = (record[field] > 0 for field in NONFINITE_COUNTS)
    if nan or positive or negative:
        return math.nan if nan else math.inf if positive else -math.inf
    return float(record["sum"]) if record["depth"] >= Depth.STATS else None


def shown_losses(losses: list[LossPair], start: Optional[int]) -> list[LossPair]:
    """The losses to show, at most a dozen: the first that differs, where the drift starts, and a
    regular rest.
    """
    if len(losses) <= _SHOWN:
        return losses
    chosen = {round(place * (len(losses) - 1) / (_SHOWN - 3)) for place in range(_SHOWN - 2)}
    for place, loss in enumerate(losses):
        if loss.error > 0:
            chosen.add(place)
            break
    chosen |= {place for place, loss in enumerate(losses) if loss.step == start}
    return [losses[place] for place in sorted(chosen)]


@dataclass(frozen=True)
class Pairing:
    """``places``: (step of actual, step of reference, rank). ``is_shifted``: some of them pair two
    different steps, which are not expected to agree. ``notes``: what is not compared,
    ``other_ranks`` of ranks that one side alone has. ``leaves_out_steps``: one side alone has some.
    """

    places: list[tuple[int, int, int]]
    is_shifted: bool
    notes: list[str]
    other_ranks: Sequence[str] = ()
    leaves_out_steps: bool = False

    @property
    def starts(self) -> tuple[int, int]:
        """The first steps that are compared, of actual and of reference."""
        return self.places[0][:2] if self.places else (0, 0)


def pair_steps(actual: Source, reference: Source, wanted: Steps) -> Pairing:
    """The same steps; those that ``wanted`` names; or the only steps, where each side has one step.
    Of a run that continues another, the steps with the same weights or batches.

    Raises ConfigError for text that names no steps, CompareError for steps that are not there.
    """
    ours, theirs = set(actual.places()), set(reference.places())
    ranges = _ranges(wanted)
    if ranges is not None:
        return _pair_ranges(ours, theirs, *ranges)
    steps = _parsed(wanted)
    only = [sorted({step for step, _ in side}) for side in (ours, theirs)]
    notes = []
    if not steps and len(only[0]) == len(only[1]) == 1 and only[0] != only[1]:
        steps = [(only[0][0], only[1][0])]
        notes.append(f"step {only[0][0]:,} of actual is compared with step {only[1][0]:,}")
    shift = None if steps else find_shift(actual, reference)
    if shift is not None:
        first = min(step for step, _ in ours if (step + shift.steps) in only[1])
        pairing = _pair_ranges(ours, theirs, (first, None), (first + shift.steps, None))
        pairing.notes.insert(
            0,
            f"step {first:,} of actual is compared with step {first + shift.steps:,} of reference, "
            f"where {shift.reason}, and so on; the report has the steps of reference. --steps "
            "0-:0- compares those of the same number",
        )
        return pairing
    if not steps:
        common = [(step, step, rank) for step, rank in sorted(ours & theirs)]
        return _with_notes(ours, theirs, common, 0)
    places = []
    for mine, other in steps:
        ranks = sorted(
            {rank for step, rank in ours if step == mine}
            & {rank for step, rank in theirs if step == other}
        )
        if not ranks:
            raise CompareError(
                f"step {mine} of actual and step {other} of reference can't be paired",
                expected="steps that the two have, of a rank that both have",
                got=f"{format_steps(only[0])} in actual and {format_steps(only[1])} in reference",
            )
        places += [(mine, other, rank) for rank in ranks]
    return Pairing(places, any(mine != other for mine, other in steps), notes)


def _pair_ranges(
    ours: set[tuple[int, int]],
    theirs: set[tuple[int, int]],
    mine: tuple[int, Optional[int]],
    other: tuple[int, Optional[int]],
) -> Pairing:
    """Steps of a range of each side, from its beginning on; None: to the end."""
    apart = other[0] - mine[0]
    ends = [math.inf if end is None else end for _, end in (mine, other)]
    places = [
        (step, step + apart, rank)
        for step, rank in sorted(ours)
        if mine[0] <= step <= ends[0] and step + apart <= ends[1] and (step + apart, rank) in theirs
    ]
    if not places:
        sides = (format_steps(sorted({step for step, _ in side})) for side in (ours, theirs))
        both = " in actual and ".join(sides)
        raise CompareError(f"no steps of these ranges are on both sides: {both} in reference")
    return _with_notes(ours, theirs, places, apart)


def _with_notes(
    ours: set[tuple[int, int]],
    theirs: set[tuple[int, int]],
    places: list[tuple[int, int, int]],
    apart: int,
) -> Pairing:
    shifted = {(step + apart, rank) for step, rank in ours}
    common = {rank for _, rank in shifted & theirs}
    notes, other_ranks = [], []
    for side, left, back in (
        ("actual", shifted - theirs, apart),
        ("reference", theirs - shifted, 0),
    ):
        if steps := sorted({step - back for step, rank in left if rank in common}):
            notes.append(f"only {side} has {format_steps(steps)}: not compared")
        if ranks := sorted({rank for _, rank in left} - common):
            span = format_steps(sorted({step - back for step, rank in left if rank in ranks}))
            other_ranks.append(f"only {side} has {span} of ranks {ranks}: not compared")
    return Pairing(places, False, notes, other_ranks, bool(notes))


_RANGE = re.compile(r"(\d+)-(\d*):(\d+)-(\d*)")


def _ranges(wanted: Steps) -> Optional[tuple[tuple[int, Optional[int]], ...]]:
    """``"6-:0-"`` or ``"6-9:0-3"``: (first, last) of actual and of reference."""
    match = _RANGE.fullmatch(wanted.strip()) if isinstance(wanted, str) else None
    if match is None:
        return None
    first, last, other, end = match.groups()
    return (int(first), int(last) if last else None), (int(other), int(end) if end else None)


def _parsed(wanted: Steps) -> list[tuple[int, int]]:
    """``"3:7,4:8"``, ``"3"``, or pairs of numbers."""
    if wanted is None:
        return []
    try:
        if not isinstance(wanted, str):
            return [(int(mine), int(other)) for mine, other in wanted]
        halves = [part.split(":") for part in wanted.split(",")]
        if any(len(half) > 2 for half in halves):
            raise ValueError(wanted)
        return [(int(half[0]), int(half[-1])) for half in halves]
    except (TypeError, ValueError):
        raise ConfigError(
            "steps= is not a list of pairs of steps",
            expected='a step of actual and one of reference: "3:7", "3:7,4:8" or [(3, 7)]; or '
            'where each begins: "6-:0-"',
            got=repr(wanted),
        ) from None


# ---- a run that continues another ---------------------------------------------------------------
# The steps of a run are paired from the step whose weights, or batch, it begins with.

#: The part of the weights that has to be equal to the bit: one tensor may not have been restored.
_ENOUGH = 0.5


class Shift(NamedTuple):
    """``steps``: the step of the reference minus that of actual. ``reason``: how that is known."""

    steps: int
    reason: str


class _Side:
    """Checksums of the steps of the lowest rank."""

    def __init__(self, source: Source) -> None:
        self._source, self._names, self._renaming = source, NameTable(), Renaming.of(None)
        self.rank = min(rank for _, rank in source.places())
        self.steps = [step for step, rank in source.places() if rank == self.rank]

    def read(self, step: int) -> tuple[frozenset[int], frozenset[int]]:
        """The checksums of the weights, and of the batch."""
        block = self._source.block(step, self.rank, self._names, self._renaming, step == 0)
        weights = has_role(block, "param", self._names) & (block.records["numel"] > 1)
        return _checksums(block, weights), _checksums(block, block.phases == Phase.BATCHES)


def _checksums(block: Block, which: np.ndarray) -> frozenset[int]:
    which = which & (block.records["depth"] == Depth.FULL)
    return frozenset(block.records["checksum"][which].tolist())


def find_shift(actual: Source, reference: Source) -> Optional[Shift]:
    """The shift of the steps of one side; None where steps of one number belong together, or
    nothing tells which do.
    """
    if actual.kind is not Kind.LOG or reference.kind is not Kind.LOG:
        return None
    ours, theirs = _Side(actual), _Side(reference)
    for mine, other, sign in ((ours, theirs, 1), (theirs, ours, -1)):
        place = _place_of(mine, other)
        if place is not None:
            step, reason = place
            return Shift(sign * (step - mine.steps[0]), reason)
    return None


def _place_of(mine: _Side, other: _Side) -> Optional[tuple[int, str]]:
    """The step of ``other`` at which ``mine`` begins."""
    start = mine.steps[0]
    weights, batch = mine.read(start)
    before = other.read(start) if start in other.steps else (frozenset(), frozenset())
    # A step with two updates has the weights between them too.
    is_same = bool(before[0]) and (weights <= before[0] or before[0] <= weights)
    if batch == before[1] and is_same:
        return None
    best, same_batch = (len(weights & before[0]), start), []
    for step in other.steps:
        contents = other.read(step)
        if len(weights & contents[0]) > best[0]:
            best = (len(weights & contents[0]), step)
        if batch and batch == contents[1]:
            same_batch.append(step)
        if weights and weights == contents[0]:
            break
    count, step = best
    if not is_same and step != start and count >= _ENOUGH * len(weights):
        whole = "the weights are" if count == len(weights) else f"{count:,} weights are"
        return step, f"{whole} equal to the bit"
    if is_same:
        same_batch = [step for step in other.steps if batch and other.read(step)[1] == batch]
    if len(same_batch) == 1 and same_batch[0] != start:
        follows = [(s.steps.index(n) + 1, s) for s, n in ((mine, start), (other, same_batch[0]))]
        after = [side.read(side.steps[at])[1] for at, side in follows if at < len(side.steps)]
        # One batch alone may be the same by chance, of data in another order.
        if len(after) == 2 and after[0] == after[1]:
            also = (
                f" (the weights are equal in step {start:,} of both: they were not loaded, or the "
                "data alone begin elsewhere)"
            ) * is_same
            return same_batch[0], f"the batch is equal to the bit, and the next batch{also}"
    return None
