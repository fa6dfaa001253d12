"""Stats: one record, held where it was computed, read when a field is asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Optional, Union, overload

import numpy as np
import torch

from ._record import DTYPES, RECORD_BYTES, RECORD_DTYPE, VALUE_BYTES, Depth, Order, extremes

_COUNTS = (
    "numel",
    "nan_count",
    "posinf_count",
    "neginf_count",
    "zero_count",
    "subnormal_count",
    "negative_count",
    "saturated_count",
)


class Stats:
    """The statistics of one tensor.

    Holds a uint8 tensor of 192 bytes on the tensor's device. The first field that is read fetches
    it: a synchronisation with that device, none on the CPU. ``==`` compares the value fields byte
    for byte, so that two Stats are equal on any machine when the tensors were.

    Non-finite elements are counted and left out of everything else. Complex tensors are counted by
    their real and imaginary parts. Fields beyond the depth that was asked for are None.
    """

    __slots__ = ("_fetched", "_slot")

    def __init__(self, slot: torch.Tensor) -> None:
        self._slot = slot
        self._fetched: Optional[np.void] = None

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

    def numpy(self) -> np.void:
        """The record as a NumPy scalar of ``RECORD_DTYPE``. Fetches it."""
        return self.record

    # ---- counts: every depth -------------------------------------------------------------------

    @property
    def numel(self) -> int:
        return int(self.record["numel"])

    @property
    def nan_count(self) -> int:
        return int(self.record["nan_count"])

    @property
    def posinf_count(self) -> int:
        return int(self.record["posinf_count"])

    @property
    def neginf_count(self) -> int:
        return int(self.record["neginf_count"])

    @property
    def zero_count(self) -> int:
        """Zeros of either sign."""
        return int(self.record["zero_count"])

    @property
    def subnormal_count(self) -> int:
        """Subnormals of the tensor's own dtype."""
        return int(self.record["subnormal_count"])

    @property
    def negative_count(self) -> int:
        """Finite elements below zero."""
        return int(self.record["negative_count"])

    @property
    def saturated_count(self) -> int:
        """Elements at the largest finite magnitude of the dtype; at either limit of an integer."""
        return int(self.record["saturated_count"])

    @property
    def nonfinite_count(self) -> int:
        return self.nan_count + self.posinf_count + self.neginf_count

    @property
    def finite_count(self) -> int:
        """Finite components: of a complex tensor, two per element."""
        components = DTYPES[int(self.record["dtype"])].components
        return self.numel * components - self.nonfinite_count

    @property
    def positive_count(self) -> int:
        """Finite elements above zero."""
        return self.finite_count - self.zero_count - self.negative_count

    # ---- depth "stats" and "full" --------------------------------------------------------------

    @property
    def min(self) -> Optional[float]:
        """Smallest finite element, exact; an int for integer dtypes; +inf when there is none."""
        return extremes(self.record)[0] if self._has(Depth.STATS) else None

    @property
    def max(self) -> Optional[float]:
        """Largest finite element, exact; an int for integer dtypes; -inf when there is none."""
        return extremes(self.record)[1] if self._has(Depth.STATS) else None

    @property
    def sum(self) -> Optional[float]:
        """Sum of the finite elements, in the canonical order."""
        return float(self.record["sum"]) if self._has(Depth.STATS) else None

    @property
    def abs_sum(self) -> Optional[float]:
        """Sum of the finite magnitudes, in the canonical order."""
        return float(self.record["abs_sum"]) if self._has(Depth.STATS) else None

    @property
    def sum_sq(self) -> Optional[float]:
        """Sum of the finite squares, in the canonical order."""
        return float(self.record["sum_sq"]) if self._has(Depth.STATS) else None

    @property
    def mean(self) -> Optional[float]:
        """``sum / finite_count``; NaN when nothing is finite."""
        return self._per_finite(self.sum)

    @property
    def rms(self) -> Optional[float]:
        """``sqrt(sum_sq / finite_count)``; NaN when nothing is finite."""
        mean_square = self._per_finite(self.sum_sq)
        return None if mean_square is None else math.sqrt(mean_square)

    @property
    def l2_norm(self) -> Optional[float]:
        """``sqrt(sum_sq)``: the norm of the finite elements."""
        sum_sq = self.sum_sq
        return None if sum_sq is None else math.sqrt(sum_sq)

    @property
    def abs_max(self) -> Optional[float]:
        """Largest finite magnitude; 0 when nothing is finite."""
        low, high = self.min, self.max
        if low is None or high is None:
            return None
        return max(abs(low), abs(high)) if low <= high else 0

    # ---- depth "full" --------------------------------------------------------------------------

    @property
    def checksum(self) -> Optional[int]:
        """64 bits over the elements' bytes, sensitive to their order."""
        return int(self.record["checksum"]) if self._has(Depth.FULL) else None

    # ---- how it was read -----------------------------------------------------------------------

    @property
    def dtype(self) -> str:
        """The tensor's dtype, as ``float32``."""
        return DTYPES[int(self.record["dtype"])].name

    @property
    def depth(self) -> str:
        return Depth(int(self.record["depth"])).name.lower()

    @property
    def order(self) -> str:
        return Order(int(self.record["order"])).name.lower()

    # ---- whole ---------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Every field that the depth covers, derived ones included, as plain Python numbers."""
        names = [*_COUNTS, "nonfinite_count", "finite_count", "positive_count"]
        names += ["min", "max", "sum", "abs_sum", "sum_sq", "mean", "rms", "l2_norm", "abs_max"]
        names += ["checksum", "dtype", "depth", "order"]
        values = {name: getattr(self, name) for name in names}
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
        bad = {
            "nan": self.nan_count,
            "+inf": self.posinf_count,
            "-inf": self.neginf_count,
        }
        found = [f"{name}={count:,}" for name, count in bad.items() if count]
        parts.append(" ".join(found) if found else "all finite")
        if self._has(Depth.STATS):
            low, high = extremes(self.record)
            parts.append(f"min={_spell(low)} max={_spell(high)} mean={_spell(self.mean)}")
            parts.append(f"rms={_spell(self.rms)}")
        shares = {
            "zero": self.zero_count,
            "subnormal": self.subnormal_count,
            "saturated": self.saturated_count,
        }
        parts += [f"{name}={count:,}" for name, count in shares.items() if count]
        if self._has(Depth.FULL):
            parts.append(f"checksum={self.checksum:016x}")
        return ", ".join(parts) + ")"

    def _has(self, depth: Depth) -> bool:
        return bool(self.record["depth"] >= depth)

    def _per_finite(self, total: Optional[float]) -> Optional[float]:
        if total is None:
            return None
        count = self.finite_count
        return total / count if count else math.nan


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
        copied: np.ndarray = np.frombuffer(rows.tobytes(), dtype=RECORD_DTYPE).copy()
        return copied

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
            raise IndexError(f"expected an index within {len(self)} tensors, came {index}")
        return Stats(self._rows[index])

    def __iter__(self) -> Iterator[Stats]:
        return (Stats(row) for row in self._rows.unbind(0))

    def __repr__(self) -> str:
        return "[" + ",\n ".join(map(repr, self)) + "]"


def _spell(value: Optional[float]) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def _unpickle(record: bytes) -> Stats:
    assert len(record) == RECORD_BYTES
    return Stats(torch.frombuffer(bytearray(record), dtype=torch.uint8))
