"""The steps of a run as a table: loss, overflow, loss scale, learning rate and gradient norm."""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Optional

import numpy as np

from fastcheck.record.format import Depth, Flag, Verdict
from fastcheck.record.site import GIVEN_LOSS, GRAD_LOSS, Site, SiteTable

from .history import joined
from .view import LogView

_SCALED, _ANEW = int(Flag.SCALED), int(Flag.ANEW)
_SCALED_NONFINITE = _SCALED | int(Flag.NONFINITE)
_VERDICT_SCALED = int(Verdict.SCALED)
_NONFINITE = (("neginf_count", -math.inf), ("posinf_count", math.inf), ("nan_count", math.nan))
STEP_NUMBERS = ("loss", "scale", "learning_rate", "gradient_norm")
# A row in memory: step, overflow, a bit for each of STEP_NUMBERS that is known, and these.
_KEPT = struct.Struct(f"<q?B{len(STEP_NUMBERS)}d")
_MOST = 100_000
# Records, 192 bytes each.
_MOST_HELD = 1 << 16
_MOST_LATE = 64
_ROLES = ("loss", "loss_scale", "found_inf", "learning_rate", "param_grad", "grad_norm")
_LOSS, _SCALE, _FOUND_INF, _RATE, _GRADIENT, _NORM = range(1, len(_ROLES) + 1)
# Behind these: a shard of a gradient, the loss that monitor.step() and autograd.grad() were given.
_SHARD, _GIVEN, _GRAD = range(len(_ROLES) + 1, len(_ROLES) + 4)
#: A number that was read by itself (None: the record does not hold it), and the record's flags.
Reading = tuple[Optional[float], int]


@dataclass(frozen=True)
class StepRow:
    """A step of one rank. None: not observed, or left out by ``record=``.

    ``loss``: what backward() was called on, before it was scaled: the sum over the calls of the
    step whose gradients were not thrown away, as of parts of a batch or of several losses (with
    autograd.grad() alone its last loss); or what monitor.step(loss=) was given. ``overflow``: the
    scaled gradients overflowed, and the update was skipped. ``scale``: what the loss of this step
    was multiplied by. ``learning_rate``: the largest of all groups. ``gradient_norm``: the 2-norm
    over the gradients of all parameters, before clipping; at op level what the clipping function
    has computed, where it clips all. None where gradients are shards, of which a rank holds a part.
    """

    rank: int
    step: int
    loss: Optional[float]
    overflow: bool
    scale: Optional[float]
    learning_rate: Optional[float]
    gradient_norm: Optional[float]

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


class _LateRows(Sequence[StepRow]):
    """The rows of one step, made when they are asked for."""

    def __init__(self, table: StepTable, chunks: Sequence[np.ndarray]) -> None:
        self._table = table
        self.chunks = chunks
        self.made: Optional[list[StepRow]] = None

    def _rows(self) -> list[StepRow]:
        if self.made is None:
            self._table.settle()
        assert self.made is not None
        return self.made

    def __len__(self) -> int:
        return len(self._rows())

    def __getitem__(self, index: Any) -> Any:
        return self._rows()[index]


class StepTable:
    """Makes rows of the records of one rank, whose sites are found in ``sites`` by number."""

    def __init__(self, sites: SiteTable, rank: int) -> None:
        self._sites = sites
        self._rank = rank
        self._codes = np.zeros(0, np.int8)
        # The rows of the steps that are over.
        self._kept = bytearray()
        # Steps that are over, whose rows nobody has asked for yet: the rows of many are made in a
        # fraction of the time.
        self._late: list[_LateRows] = []
        # The number of records that these hold.
        self._held = 0

    @property
    def rows(self) -> list[StepRow]:
        """The rows of the steps that are over, oldest first; the youngest 100,000."""
        self.settle()
        rows = []
        for step, overflow, known, *numbers in _KEPT.iter_unpack(bytes(self._kept)):
            values = (number if known >> bit & 1 else None for bit, number in enumerate(numbers))
            named = dict(zip(STEP_NUMBERS, values))
            rows.append(StepRow(self._rank, step, overflow=overflow, **named))
        return rows

    def add(self, chunks: Sequence[np.ndarray]) -> Sequence[StepRow]:
        """The steps of these records, which are kept, are over. Their rows."""
        rows = _LateRows(self, chunks)
        self._late.append(rows)
        self._held += sum(map(len, rows.chunks))
        if self._held > _MOST_HELD or len(self._late) >= _MOST_LATE:
            self.settle()
        return rows

    def settle(self) -> None:
        """Makes the rows of all steps that are over."""
        made = self._rows_of([rows.chunks for rows in self._late]) if self._late else []
        self._held = 0
        for settled in made:  # an interrupt loses no step that waits
            rows = self._late[0]
            rows.made, rows.chunks = settled, ()
            del self._late[0]
            self._keep(settled)

    def _keep(self, rows: Sequence[StepRow]) -> None:
        for row in rows:
            values = row.loss, row.scale, row.learning_rate, row.gradient_norm
            known, numbers = 0, []
            for bit, value in enumerate(values):
                known |= (value is not None) << bit
                numbers.append(0.0 if value is None else value)
            self._kept += _KEPT.pack(row.step, row.overflow, known, *numbers)
        del self._kept[: -_MOST * _KEPT.size]

    def rows_of(self, chunks: Iterable[np.ndarray]) -> list[StepRow]:
        """A row for each step of these records."""
        return self._rows_of([list(chunks)])[0]

    def _rows_of(self, parts: Sequence[Sequence[np.ndarray]]) -> list[list[StepRow]]:
        known = len(self._codes)
        if known < len(self._sites):
            new = [_code(self._sites[number]) for number in range(known, len(self._sites))]
            self._codes = np.concatenate([self._codes, np.array(new, np.int8)])
        return _rows(parts, self._codes, self._rank)


def step_rows(view: LogView) -> list[StepRow]:
    """The rows of all ranks of a log, by rank and step: those of its records and, of the steps
    before these, those that were written with a stop.
    """
    rows: list[StepRow] = []
    for rank in sorted(view.meta):
        stream = StepStream(view.sites, view.meta[rank], rank)
        stream.add(view.records[view.ranks == rank])
        rows += stream.rows()
    return rows


class StepStream:
    """The rows of one rank of a log that is read in pieces, or that grows, step after step; of the
    youngest ``most`` steps, or of all. Of the records only those that the rows are made of are
    held, until enough of them have come.
    """

    def __init__(
        self,
        sites: Mapping[int, Site],
        meta: Mapping[str, Any],
        rank: int,
        most: Optional[int] = None,
    ) -> None:
        self._rank = rank
        self._most = most
        self._codes = np.zeros(0, np.int8)
        self._rows = {row.step: row for row in _written(meta, rank)}
        self._held: list[np.ndarray] = []
        self.name(sites)

    def name(self, sites: Mapping[int, Site]) -> None:
        """Adds sites by number, before their first records."""
        more = max(sites, default=-1) + 1 - len(self._codes)
        self._codes = np.concatenate([self._codes, np.zeros(max(more, 0), np.int8)])
        for number, site in sites.items():
            self._codes[number] = _code(site)

    def add(self, records: np.ndarray) -> None:
        """Takes the next records in."""
        kept = records[(_kinds(records, self._codes) != 0) | _overflowed(records["flags"])]
        if len(kept):
            self._held.append(kept)
        if sum(map(len, self._held)) > _MOST_HELD:
            self._settle()

    def rows(self) -> list[StepRow]:
        """The rows of all that was added and, of steps before these, of what was written with a
        stop; by step.
        """
        self._settle()
        return list(self._rows.values())

    def _settle(self) -> None:
        """Makes the rows of the records in memory. The records of the last step stay, because it
        may continue.
        """
        held = joined(self._held)
        self._rows.update({row.step: row for row in _rows([[held]], self._codes, self._rank)[0]})
        steps = sorted(self._rows)
        youngest = steps if self._most is None else steps[-self._most :]
        self._rows = {step: self._rows[step] for step in youngest}
        self._held = [held[held["step"] == held["step"].max(initial=0)]]


def _code(site: Site) -> int:
    if site.role == "param_grad" and site.index:
        return _SHARD
    if site.role == "loss" and site.label.startswith((GIVEN_LOSS, GRAD_LOSS)):
        return _GIVEN if site.label.startswith(GIVEN_LOSS) else _GRAD
    return _ROLES.index(site.role) + 1 if site.role in _ROLES else 0


def _written(meta: Mapping[str, Any], rank: int) -> Iterator[StepRow]:
    """The rows of a meta file; invalid entries are left out."""
    rows = meta.get("steps")
    for row in rows if isinstance(rows, list) else ():
        try:
            values = {name: row.get(name) for name in STEP_NUMBERS}
            yield StepRow(
                rank=rank,
                step=int(row["step"]),
                overflow=bool(row["overflow"]),
                **{name: None if v is None else float(v) for name, v in values.items()},
            )
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            continue


def _rows(
    parts: Sequence[Sequence[np.ndarray]], codes: np.ndarray, rank: int
) -> list[list[StepRow]]:
    """The rows of each of these parts, which are chunks of records: a row for each step in them."""
    records = joined([chunk for chunks in parts for chunk in chunks])
    part_of = np.repeat(np.arange(len(parts)), [sum(map(len, chunks)) for chunks in parts])
    kinds, overflowed = _kinds(records, codes), _overflowed(records["flags"])
    is_used = (kinds != 0) | overflowed
    # A mask as an index copies records field by field, in several times the time.
    columns = [a.compress(is_used) for a in (records, part_of, kinds, overflowed)]
    rows: list[list[StepRow]] = [[] for _ in parts]
    if not len(columns[0]):
        return rows
    steps, part_of = columns[0]["step"], columns[1]
    is_other_part = part_of[1:] != part_of[:-1]
    if ((steps[1:] < steps[:-1]) & ~is_other_part).any():
        order = np.lexsort((steps, part_of))
        columns = [column[order] for column in columns]
        steps = columns[0]["step"]
    starts = np.flatnonzero(np.append(True, (steps[1:] != steps[:-1]) | is_other_part))
    records, part_of, kinds, overflowed = columns
    for part, row in zip(part_of[starts].tolist(), _made(starts, records, kinds, overflowed, rank)):
        rows[part].append(row)
    return rows


def _overflowed(flags: np.ndarray) -> np.ndarray:
    """A boolean array of the records: True for something that was scaled and is not finite."""
    if not flags.any():
        return np.zeros(len(flags), np.bool_)
    by_verdict: np.ndarray = ((flags >> 8) & 0xFF) == _VERDICT_SCALED
    by_flag: np.ndarray = (flags & _SCALED_NONFINITE) == _SCALED_NONFINITE
    return by_verdict | by_flag


def _kinds(records: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """1 + the index in _ROLES of what each record is about, or _SHARD, _GIVEN or _GRAD; 0: another
    role.
    """
    sites = records["site"]
    if not len(codes) or not len(sites):
        return np.zeros(len(records), np.int8)
    if sites.min() >= 0 and sites.max() < len(codes):
        return codes[sites]
    inside = (sites >= 0) & (sites < len(codes))
    return np.where(inside, codes[np.where(inside, sites, 0)], 0)


def _made(
    starts: np.ndarray, records: np.ndarray, kinds: np.ndarray, overflowed: np.ndarray, rank: int
) -> Iterator[StepRow]:
    """The rows of the steps whose records begin at these places."""
    is_gradient, is_shard = kinds == _GRADIENT, kinds == _SHARD
    at = np.flatnonzero(~(is_gradient | is_shard) & (kinds != 0))
    kinds_at, numbers = kinds[at].tolist(), numbers_in(records[at])
    ends = np.searchsorted(at, [*starts[1:].tolist(), len(records)]).tolist()
    is_found = kinds == _FOUND_INF
    is_set = is_found & (records["zero_count"] == 0)
    have_shards, have_overflowed, have_found, are_set = (
        np.logical_or.reduceat(mask, starts).tolist()
        for mask in (is_shard, overflowed, is_found, is_set)
    )
    counts = np.add.reduceat(is_gradient, starts, dtype=np.int64).tolist()
    norms = _norms(records.compress(is_gradient), counts)
    end = 0
    for at_step, step in enumerate(records["step"][starts].tolist()):
        begin, end = end, ends[at_step]
        of: defaultdict[int, list[Reading]] = defaultdict(list)
        for kind, number in zip(kinds_at[begin:end], numbers[begin:end]):
            of[kind].append(number)
        # A backward may make an Inf and mask it: where the scaler has said so, it knows best.
        overflow = are_set[at_step] if have_found[at_step] else have_overflowed[at_step]
        scale = _last_value(of[_SCALE])
        rates = [value for value, _ in of[_RATE] if value is not None]
        norm = norms[at_step] if counts[at_step] else _last_value(of[_NORM])
        yield StepRow(
            rank=rank,
            step=step,
            loss=loss_of_step(of[_LOSS], of[_GIVEN], of[_GRAD], scale),
            overflow=overflow,
            scale=scale,
            learning_rate=max(rates, default=None),
            gradient_norm=None if have_shards[at_step] else norm,
        )


def numbers_in(records: np.ndarray) -> list[Reading]:
    """The largest element of each tensor, and the flags of its record."""
    values, is_known = records["max"].copy(), records["depth"] >= Depth.STATS
    for name, value in _NONFINITE:  # NaN is the last
        is_in = records[name] > 0
        values[is_in] = value
        is_known |= is_in
    known = (v if k else None for v, k in zip(values.tolist(), is_known.tolist()))
    return list(zip(known, records["flags"].tolist()))


def loss_of_step(
    parts: Sequence[Reading],
    given: Sequence[Reading],
    grad: Sequence[Reading],
    scale: Optional[float],
) -> Optional[float]:
    """The loss of a step, of what its calls of backward() began at, of what monitor.step() was
    given and of what autograd.grad() began at, each in their order. ``scale``: of those that carry
    a scale of the user's own.
    """
    if given or not parts:
        return _last_value(given or grad)
    begins = [at for at, (_, flags) in enumerate(parts) if flags & _ANEW]
    total = 0.0
    for value, flags in parts[begins[-1] if begins else 0 :]:
        if value is None:
            return None
        total += value / scale if scale and flags & _SCALED else value
    return total


def _last_value(numbers: Sequence[Reading]) -> Optional[float]:
    return numbers[-1][0] if numbers else None


def _norms(gradients: np.ndarray, counts: Sequence[int]) -> list[Optional[float]]:
    """The norm over the records of each step in turn; None if a record has no statistics."""
    squares, is_unknown = gradients["sum_sq"].copy(), gradients["depth"] < Depth.STATS
    for name, value in _NONFINITE:
        squares[gradients[name] > 0] = abs(value)
    sites, has_unknown = gradients["site"].tolist(), bool(is_unknown.any())
    norms: list[Optional[float]] = []
    first = sites[: counts[0]]
    if not has_unknown and {*counts} == {len({*first})} and sites == first * len(counts):
        # The ordinary case: each step has read the same gradients once.
        norms += np.sqrt(np.add.reduce(squares.reshape(len(counts), len(first)), axis=1)).tolist()
        return norms
    end = 0
    for count in counts:
        begin, end = end, end + count
        used: Any = slice(begin, end)
        # A site was read twice, before and after a change: the number is that which the optimizer
        # uses.
        if len(set(sites[used])) < count:
            used = sorted({site: at for at, site in enumerate(sites[used], begin)}.values())
        norm = math.sqrt(float(np.add.reduce(squares[used])))
        is_known = not math.isfinite(norm) or not has_unknown or not is_unknown[used].any()
        norms.append(norm if is_known else None)
    return norms
