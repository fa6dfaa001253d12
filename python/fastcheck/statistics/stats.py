"""Stats and StatsList: the result of stats(), which stays on the tensor's device until a field is
read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, Optional, Union, overload

import numpy as np
import torch

from fastcheck.notebook import block_html, fields_html, guarded_html, table_html
from fastcheck.record.format import (
    COUNTS,
    RECORD_BYTES,
    RECORD_DTYPE,
    VALUE_BYTES,
    Depth,
    Order,
    extremes,
)
from fastcheck.record.statistics import RecordStatistics, statistics_of

# Rows of a list in a notebook.
_SHOWN = 20


def _of_record(name: str, doc: str) -> Any:
    """A property that is a field of the record's statistics."""
    return property(attrgetter(f"_statistics.{name}"), doc=doc)


class Stats:
    """The statistics of one tensor.

    Holds a uint8 tensor of 192 bytes on the tensor's device. The first field that is read fetches
    it: a synchronisation with that device, none on the CPU. ``==`` compares the value fields byte
    for byte, so that two Stats are equal on any machine when the tensors were.

    Non-finite elements are counted and left out of everything else. Complex tensors are counted by
    their real and imaginary parts. Fields that ``record=`` of the call left out are None.
    """

    __slots__ = ("_fetched", "_numbers", "_slot")

    def __init__(self, slot: torch.Tensor) -> None:
        self._slot = slot
        self._fetched: Optional[np.void] = None
        self._numbers: Optional[RecordStatistics] = None

    # ---- the record ----------------------------------------------------------------------------

    @property
    def tensor(self) -> torch.Tensor:
        """The record as it is: uint8, shape (192,), on the device. No synchronisation."""
        return self._slot

    @property
    def record(self) -> np.void:
        """The record as a NumPy scalar of ``RECORD_DTYPE``. Fetches it."""
        if self._fetched is None:
            self._fetched = self._slot.cpu().numpy().view(RECORD_DTYPE)[0].copy()
        return self._fetched

    # ---- counts --------------------------------------------------------------------------------

    numel: int = _of_record("numel", "Elements of the tensor, whatever they hold.")
    nan_count: int = _of_record(
        "nan_count", "NaN components: of a complex tensor, up to two per element."
    )
    posinf_count: int = _of_record("posinf_count", "Components that are +inf.")
    neginf_count: int = _of_record("neginf_count", "Components that are -inf.")
    zero_count: int = _of_record("zero_count", "Zeros of either sign.")
    subnormal_count: int = _of_record("subnormal_count", "Subnormals of the tensor's own dtype.")
    negative_count: int = _of_record("negative_count", "Finite elements below zero.")
    saturated_count: int = _of_record(
        "saturated_count",
        "Elements at the dtype's largest finite magnitude; at either limit of an integer.",
    )
    nonfinite_count: int = _of_record(
        "nonfinite_count", "``nan_count + posinf_count + neginf_count``."
    )
    finite_count: int = _of_record(
        "finite_count", "Finite components: of a complex tensor, two per element."
    )

    @property
    def positive_count(self) -> int:
        """Finite elements above zero."""
        return self.finite_count - self.zero_count - self.negative_count

    # ---- record="stats" and "full" -------------------------------------------------------------

    @property
    def min(self) -> Optional[float]:
        """Smallest finite element, exact; an int for integer dtypes; +inf when there is none."""
        return extremes(self.record)[0] if self._statistics.has_stats else None

    @property
    def max(self) -> Optional[float]:
        """Largest finite element, exact; an int for integer dtypes; -inf when there is none."""
        return extremes(self.record)[1] if self._statistics.has_stats else None

    sum: Optional[float] = _of_record("sum", "Sum of the finite elements, in the canonical order.")
    abs_sum: Optional[float] = _of_record(
        "abs_sum", "Sum of the finite magnitudes, in the canonical order."
    )
    sum_sq: Optional[float] = _of_record(
        "sum_sq", "Sum of the finite squares, in the canonical order."
    )

    @property
    def mean(self) -> Optional[float]:
        """``sum / finite_count``; NaN when nothing is finite."""
        return self._or_nan(self._statistics.mean)

    @property
    def rms(self) -> Optional[float]:
        """``sqrt(sum_sq / finite_count)``; NaN when nothing is finite."""
        return self._or_nan(self._statistics.rms)

    l2_norm: Optional[float] = _of_record(
        "l2_norm", "``sqrt(sum_sq)``: the norm of the finite elements."
    )

    @property
    def abs_max(self) -> Optional[float]:
        """Largest finite magnitude; 0 when nothing is finite."""
        statistics = self._statistics
        return 0 if statistics.has_stats and statistics.abs_max is None else statistics.abs_max

    # ---- record="full" -------------------------------------------------------------------------

    checksum: Optional[int] = _of_record(
        "checksum", "64 bits over the elements' bytes, sensitive to their order."
    )

    # ---- how it was read -----------------------------------------------------------------------

    dtype: str = _of_record("dtype", "The tensor's dtype, as ``float32``.")

    @property
    def order(self) -> str:
        """``"storage"`` or ``"logical"``: how the elements were traversed."""
        return Order(int(self.record["order"])).name.lower()

    # ---- whole ---------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """All fields that were computed, derived fields included, as plain Python numbers.
        ``record`` is ``"health"``, ``"stats"`` or ``"full"``.
        """
        names = [*COUNTS, "nonfinite_count", "finite_count", "positive_count"]
        names += ["min", "max", "sum", "abs_sum", "sum_sq", "mean", "rms", "l2_norm", "abs_max"]
        names += ["checksum", "dtype", "order"]
        values = {name: getattr(self, name) for name in names}
        values["record"] = Depth(int(self.record["depth"])).name.lower()
        return {name: value for name, value in values.items() if value is not None}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stats):
            return NotImplemented
        return self.record.tobytes()[:VALUE_BYTES] == other.record.tobytes()[:VALUE_BYTES]

    def __hash__(self) -> int:
        return hash(self.record.tobytes()[:VALUE_BYTES])

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self.record.tobytes(),)

    def __repr__(self) -> str:
        parts = [f"Stats({self.dtype}, numel={self.numel:,}"]
        bad = {"nan": self.nan_count, "+inf": self.posinf_count, "-inf": self.neginf_count}
        counts = [f"{name}={count:,}" for name, count in bad.items() if count]
        parts.append(" ".join(counts) if counts else "all finite")
        if self._statistics.has_stats:
            low, high = extremes(self.record)
            parts.append(f"min={_format(low)} max={_format(high)} mean={_format(self.mean)}")
            parts.append(f"rms={_format(self.rms)}")
        shares = {
            "zero": self.zero_count,
            "subnormal": self.subnormal_count,
            "saturated": self.saturated_count,
        }
        parts += [f"{name}={count:,}" for name, count in shares.items() if count]
        if self.checksum is not None:
            parts.append(f"checksum={self.checksum:016x}")
        return ", ".join(parts) + ")"

    def _repr_html_(self) -> str:
        """HTML for notebooks: every field. Fetches the record, as repr() does; never raises."""
        return guarded_html(self, lambda: _stats_html(self))

    @property
    def _statistics(self) -> RecordStatistics:
        if self._numbers is None:
            self._numbers = statistics_of(self.record)
        return self._numbers

    def _or_nan(self, value: Optional[float]) -> Optional[float]:
        """``value``; NaN where it was computed and nothing is finite."""
        return math.nan if self._statistics.has_stats and value is None else value


class StatsList(Sequence[Stats]):
    """The statistics of a list of tensors, one row of 192 bytes each, held on their device."""

    __slots__ = ("_rows",)

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    @property
    def tensor(self) -> torch.Tensor:
        """The records as they are: uint8, shape (n, 192), on the device. No synchronisation."""
        return self._rows

    def numpy(self) -> np.ndarray:
        """The records as a NumPy array of ``RECORD_DTYPE``, shape (n,). One fetch."""
        rows = self._rows.cpu().numpy()
        return np.frombuffer(rows.tobytes(), dtype=RECORD_DTYPE).copy()

    def __len__(self) -> int:
        return int(self._rows.shape[0])

    @overload
    def __getitem__(self, index: int) -> Stats: ...
    @overload
    def __getitem__(self, index: slice) -> StatsList: ...
    def __getitem__(self, index: Union[int, slice]) -> Union[Stats, StatsList]:
        if isinstance(index, slice):
            return StatsList(self._rows[index])
        if not -len(self) <= index < len(self):
            raise IndexError(f"expected an index within {len(self)} tensors, got {index}")
        return Stats(self._rows[index])

    def __iter__(self) -> Iterator[Stats]:
        return (Stats(row) for row in self._rows.unbind(0))

    def __repr__(self) -> str:
        return "[" + ",\n ".join(map(repr, self)) + "]"

    def _repr_html_(self) -> str:
        """HTML for notebooks: a row for each of the first tensors. One fetch; never raises."""
        return guarded_html(self, lambda: _list_html(self))


def _stats_html(stats: Stats) -> str:
    fields = stats.to_dict()
    kind, size = fields.pop("dtype"), fields.pop("numel")
    if "checksum" in fields:
        fields["checksum"] = f"{fields['checksum']:016x}"
    return block_html(f"{size:,} elements, {kind}", fields_html(list(fields.items())))


def _list_html(stats: StatsList) -> str:
    names = ("dtype", "numel", "nonfinite_count", "min", "max", "mean", "rms")
    shown = [statistics_of(record) for record in stats.numpy()[:_SHOWN]]
    rows = [[getattr(statistics, name) for name in names] for statistics in shown]
    bad = [statistics.nonfinite_count > 0 for statistics in shown]
    header = [name.replace("nonfinite_count", "NaN+Inf") for name in names]
    return block_html(f"{len(stats):,} tensors", table_html(header, rows, bad, len(stats)))


def _format(value: Optional[float]) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def _unpickle(record: bytes) -> Stats:
    assert len(record) == RECORD_BYTES
    return Stats(torch.frombuffer(bytearray(record), dtype=torch.uint8))
