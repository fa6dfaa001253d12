"""The steps of a run as a table: loss, overflow, loss scale, learning rate and gradient norm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Optional

import numpy as np

from fastcheck.record.format import Depth, Flag, Verdict
from fastcheck.record.site import GIVEN_LOSS, GRAD_LOSS, Site, SiteTable

from .history import joined
from .view import LogView

_SCALED_NONFINITE = int(Flag.SCALED) | int(Flag.NONFINITE)
_NUMBERS = ("loss", "scale", "learning_rate", "gradient_norm")
_KEPT = np.dtype(
    [("step", "<i8"), ("overflow", "?"), ("known", "u1"), *((name, "<f8") for name in _NUMBERS)]
)
_MOST = 100_000
# Records, 192 bytes each.
_MOST_HELD = 1 << 16
_MOST_LATE = 16
_ROLES = ("loss", "loss_scale", "found_inf", "learning_rate", "param_grad", "grad_norm")
# Behind these: a shard of a gradient, the loss that monitor.step() and autograd.grad() were given.
_SHARD, _GIVEN, _GRAD = range(len(_ROLES) + 1, len(_ROLES) + 4)


@dataclass(frozen=True)
class StepRow:
    """One step of one rank. None: not observed, or not held by records of this depth.

    ``loss``: what backward() was called on, before it was scaled: the sum over the calls of the
    step whose gradients were not thrown away, as of parts of a batch or of several losses (with
    autograd.grad() alone its last one); or what monitor.step(loss=) was given. ``overflow``: the
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
        # The rows of the steps that are over, and how many there are.
        self._kept = np.zeros(64, _KEPT)
        self._count = 0
        # Steps that are over, whose rows nobody has asked for yet: the rows of many are made in a
        # fraction of the time.
        self._late: list[_LateRows] = []

    @property
    def rows(self) -> list[StepRow]:
        """The rows of the steps that are over, oldest first; the youngest 100,000."""
        self.settle()
        found = []
        for kept in self._kept[max(0, self._count - _MOST) : self._count]:
            values = {
                name: float(kept[name]) if kept["known"] >> bit & 1 else None
                for bit, name in enumerate(_NUMBERS)
            }
            found.append(
                StepRow(self._rank, int(kept["step"]), overflow=bool(kept["overflow"]), **values)
            )
        return found

    def add(self, chunks: Iterable[np.ndarray]) -> Sequence[StepRow]:
        """The steps of these records are over. Their rows."""
        rows = _LateRows(self, list(chunks))
        self._late.append(rows)
        is_much = sum(len(chunk) for one in self._late for chunk in one.chunks) > _MOST_HELD
        if is_much or len(self._late) >= _MOST_LATE:
            self.settle()
        return rows

    def settle(self) -> None:
        """Makes the rows of all steps that are over."""
        late, self._late = self._late, []
        for rows in late:
            rows.made = self.rows_of(rows.chunks)
            self._keep(rows.made)
            rows.chunks = ()

    def _keep(self, rows: Sequence[StepRow]) -> None:
        for row in rows:
            if self._count == len(self._kept):
                youngest = self._kept[-_MOST:]
                self._count = len(youngest)
                self._kept = np.concatenate([youngest, np.zeros(self._count, _KEPT)])
            values = [getattr(row, name) for name in _NUMBERS]
            known = sum((value is not None) << bit for bit, value in enumerate(values))
            numbers = (0.0 if value is None else value for value in values)
            self._kept[self._count] = (row.step, row.overflow, known, *numbers)
            self._count += 1

    def rows_of(self, chunks: Iterable[np.ndarray]) -> list[StepRow]:
        """One row for each step of these records."""
        known = len(self._codes)
        if known < len(self._sites):
            new = [_code(self._sites[number]) for number in range(known, len(self._sites))]
            self._codes = np.concatenate([self._codes, np.array(new, np.int8)])
        return _rows(chunks, self._codes, self._rank)


def step_rows(view: LogView) -> list[StepRow]:
    """The rows of all ranks of a log, by rank and step: those of its records and, of the steps
    before these, those that were written with a stop.
    """
    found: list[StepRow] = []
    for rank in sorted(view.meta):
        stream = StepStream(view.sites, view.meta[rank], rank)
        stream.add(view.records[view.ranks == rank])
        found += stream.rows()
    return found


class StepStream:
    """The rows of one rank of a log that is read in pieces, step after step. Of the records only
    those that the rows are made of are held, until enough of them have come.
    """

    def __init__(self, sites: Mapping[int, Site], meta: Mapping[str, Any], rank: int) -> None:
        self._codes = np.zeros(max(sites, default=-1) + 1, np.int8)
        for number, site in sites.items():
            self._codes[number] = _code(site)
        self._rank = rank
        self._rows = {row.step: row for row in _written(meta, rank)}
        self._held: list[np.ndarray] = []

    def add(self, records: np.ndarray) -> None:
        """Takes the next records in."""
        kept = records[(_kinds(records, self._codes) != 0) | _overflowed(records["flags"])]
        if len(kept):
            self._held.append(kept)
        if sum(map(len, self._held)) > _MOST_HELD:
            held = np.concatenate(self._held)
            is_last = held["step"] == held["step"].max()  # it may go on in the next piece
            self._take(held[~is_last])
            self._held = [held[is_last]]

    def rows(self) -> list[StepRow]:
        """The rows of all that was added and, of steps before these, of what was written with a
        stop; by step.
        """
        self._take(*self._held)
        self._held = []
        return [self._rows[step] for step in sorted(self._rows)]

    def _take(self, *chunks: np.ndarray) -> None:
        self._rows.update({row.step: row for row in _rows(chunks, self._codes, self._rank)})


class RecentSteps:
    """The rows of the youngest ``most`` steps of one rank of a log that grows."""

    def __init__(self, rank: int, most: int) -> None:
        self._rank = rank
        self._most = most
        self._codes = np.zeros(0, np.int8)
        self._rows: dict[int, StepRow] = {}
        # The records of the last step, which may go on.
        self._held: list[np.ndarray] = []

    def name(self, sites: Mapping[int, Site]) -> None:
        """Adds sites by number, before their first records."""
        more = max(sites, default=-1) + 1 - len(self._codes)
        self._codes = np.concatenate([self._codes, np.zeros(max(more, 0), np.int8)])
        for number, site in sites.items():
            self._codes[number] = _code(site)

    def add(self, records: np.ndarray) -> None:
        """The next records."""
        kept = records[(_kinds(records, self._codes) != 0) | _overflowed(records["flags"])]
        if not len(kept):
            return
        held = np.concatenate([*self._held, kept])
        is_last = held["step"] == held["step"].max()
        if not is_last.all():
            self._take(held[~is_last])
            held = held[is_last]
        self._held = [held[-_MOST_HELD:]]

    def rows(self) -> list[StepRow]:
        """The rows, in the order of the steps."""
        open_rows = {row.step: row for row in _rows(self._held, self._codes, self._rank)}
        rows = {**self._rows, **open_rows}
        return [rows[step] for step in sorted(rows)[-self._most :]]

    def _take(self, *chunks: np.ndarray) -> None:
        self._rows.update({row.step: row for row in _rows(chunks, self._codes, self._rank)})
        if len(self._rows) > self._most:
            self._rows = {step: self._rows[step] for step in sorted(self._rows)[-self._most :]}


def _code(site: Site) -> int:
    if site.role == "param_grad" and site.index:
        return _SHARD
    if site.role == "loss" and site.label.startswith((GIVEN_LOSS, GRAD_LOSS)):
        return _GIVEN if site.label.startswith(GIVEN_LOSS) else _GRAD
    return _ROLES.index(site.role) + 1 if site.role in _ROLES else 0


def _written(meta: Mapping[str, Any], rank: int) -> Iterator[StepRow]:
    """The rows of a meta file; what is no row is left out."""
    for key in ("scaling", "steps"):  # the first: by fastcheck 0.1
        rows = meta.get(key)
        for row in rows if isinstance(rows, list) else ():
            try:
                values = {name: row.get(name) for name in _NUMBERS}
                yield StepRow(
                    rank=rank,
                    step=int(row["step"]),
                    overflow=bool(row["overflow"]),
                    **{name: None if v is None else float(v) for name, v in values.items()},
                )
            except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
                continue


def _rows(chunks: Iterable[np.ndarray], codes: np.ndarray, rank: int) -> list[StepRow]:
    records = joined(list(chunks))
    # A mask as an index copies records field by field, in several times the time.
    records = records.compress((_kinds(records, codes) != 0) | _overflowed(records["flags"]))
    if not len(records):
        return []
    steps = records["step"]
    if (steps == steps[0]).all():
        return [_row(records, _kinds(records, codes), rank)]
    records = records[np.argsort(steps, kind="stable")]
    starts = np.flatnonzero(np.diff(records["step"], prepend=records["step"][:1] - 1))
    return [
        _row(part, _kinds(part, codes), rank)
        for part in np.split(records, starts[1:])[: len(starts)]
    ]


def _overflowed(flags: np.ndarray) -> np.ndarray:
    """A boolean array of the records: True for something that was scaled and is not finite."""
    if not flags.any():
        return np.zeros(len(flags), np.bool_)
    by_verdict: np.ndarray = ((flags >> 8) & 0xFF) == int(Verdict.SCALED)
    by_flag: np.ndarray = (flags & _SCALED_NONFINITE) == _SCALED_NONFINITE
    either: np.ndarray = by_verdict | by_flag
    return either


def _kinds(records: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """1 + the index in _ROLES of what each record is about, or _SHARD, _GIVEN or _GRAD; 0: another
    role.
    """
    sites = records["site"]
    if not len(codes) or not len(sites):
        return np.zeros(len(records), np.int8)
    if sites.min() >= 0 and sites.max() < len(codes):
        known: np.ndarray = codes[sites]
        return known
    inside = (sites >= 0) & (sites < len(codes))
    return np.where(inside, codes[np.where(inside, sites, 0)], 0)


def _row(records: np.ndarray, kinds: np.ndarray, rank: int) -> StepRow:
    counts = np.bincount(kinds, minlength=_GRAD + 1)
    loss, scale, found, rate, gradients, norm, shards, given, grad = (
        records.compress(kinds == number) if counts[number] else records[:0]
        for number in range(1, _GRAD + 1)
    )
    overflow = bool((found["zero_count"] == 0).any())
    overflow |= bool(_overflowed(records["flags"]).any())
    of_step = _last_value(scale)
    gradient_norm = _norm(gradients) if len(gradients) else _last_value(norm)
    rates = [v for v in map(_value, rate) if v is not None]
    return StepRow(
        rank=rank,
        step=int(records["step"][0]),
        loss=loss_of_step(loss, given, grad, of_step),
        overflow=overflow,
        scale=of_step,
        learning_rate=max(rates, default=None),
        gradient_norm=None if len(shards) else gradient_norm,
    )


def loss_of_step(
    parts: np.ndarray, given: np.ndarray, grad: np.ndarray, scale: Optional[float]
) -> Optional[float]:
    """The loss of a step, of the records of what its calls of backward() began at, of what
    monitor.step() was given and of what autograd.grad() began at, each in their order. ``scale``:
    of those that carry one of the user's own.
    """
    if len(given) or not len(parts):
        return _last_value(given if len(given) else grad)
    begins = np.flatnonzero(parts["flags"] & int(Flag.ANEW))
    total = 0.0
    for part in parts[begins[-1] if len(begins) else 0 :]:
        value = _value(part)
        if value is None:
            return None
        total += value / scale if scale and int(part["flags"]) & int(Flag.SCALED) else value
    return total


def _last_value(records: np.ndarray) -> Optional[float]:
    return _value(records[-1]) if len(records) else None


def _value(record: np.void) -> Optional[float]:
    """The largest element."""
    if record["nan_count"]:
        return math.nan
    if record["posinf_count"]:
        return math.inf
    if record["neginf_count"]:
        return -math.inf
    return float(record["max"]) if record["depth"] >= Depth.STATS else None


def _norm(gradients: np.ndarray) -> Optional[float]:
    """The norm over all of these records; None where one has no statistics."""
    # What was read twice, before and after a change: as the optimizer uses it.
    last = {site: at for at, site in enumerate(gradients["site"].tolist())}
    if len(last) < len(gradients):
        gradients = gradients[sorted(last.values())]
    if gradients["nan_count"].any():
        return math.nan
    if gradients["posinf_count"].any() or gradients["neginf_count"].any():
        return math.inf
    if (gradients["depth"] < Depth.STATS).any():
        return None
    return math.sqrt(float(gradients["sum_sq"].sum()))
