"""The trend of one tensor over the last steps, for the report and the advice."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastcheck.record.statistics import RecordStatistics, statistics_of
from fastcheck.utils.text.numbers import counted, format_fields, format_number, format_share

GROWN = 4.0
EXPLODED = 1000.0
JUMPED = 4.0
NEAR_LIMIT = 0.25
#: A weight that is so many times larger after one update was blown up by it.
BLOWN_UP = 10.0


@dataclass(frozen=True)
class Trend:
    """Readings of one site, oldest first; the last reading is the bad one."""

    readings: tuple[RecordStatistics, ...]

    @classmethod
    def of(cls, records: np.ndarray) -> Trend:
        return cls(tuple(statistics_of(record) for record in records))

    @property
    def healthy(self) -> list[RecordStatistics]:
        """The readings that show no overflow."""
        return [reading for reading in self.readings if not reading.overflow_count]

    @property
    def first_abs_max(self) -> float | None:
        return next((float(r.abs_max) for r in self.healthy if r.abs_max is not None), None)

    @property
    def last_abs_max(self) -> float | None:
        """abs max of the last healthy record."""
        return next(
            (float(r.abs_max) for r in reversed(self.healthy) if r.abs_max is not None), None
        )

    @property
    def growth(self) -> float | None:
        """The ratio of abs max at the last healthy record to that at the first."""
        first, last = self.first_abs_max, self.last_abs_max
        if first is None or last is None or first <= 0 or len(self.healthy) < 2:
            return None
        return last / first

    @property
    def has_grown(self) -> bool:
        return self.growth is not None and self.growth >= GROWN

    @property
    def has_exploded(self) -> bool:
        """True if it grew more than a healthy run does, in the steps in memory, and beyond 1: what
        began near 0 has room.
        """
        has_left = (self.last_abs_max or 0) > 1
        return has_left and self.growth is not None and self.growth >= EXPLODED

    @property
    def near_limit(self) -> bool:
        """The last healthy record was already close to the largest number of its dtype."""
        last = self.healthy[-1] if self.healthy else None
        return last is not None and last.range_used is not None and last.range_used >= NEAR_LIMIT

    @property
    def has_jumped(self) -> bool:
        """Steady before (five healthy records or more), and the bad record's finite part is far
        above it.
        """
        last, now = self.last_abs_max, self.readings[-1].abs_max if self.readings else None
        if last is None or now is None or self.has_grown or len(self.healthy) < 5:
            return False
        return last > 0 and float(now) / last >= JUMPED

    def sentence(self) -> str:
        """One sentence on how abs max developed."""
        healthy = self.healthy
        first, last, growth = self.first_abs_max, self.last_abs_max, self.growth
        if not healthy:
            return "no healthy record of this tensor is held."
        if first is None or last is None:
            return f"{len(healthy)} healthy records before this record."
        used = healthy[-1].range_used
        form = healthy[-1].float_format
        share = ""
        if used is not None and form is not None and used >= 0.01:
            share = f", {format_share(used, 1)} of what {healthy[-1].dtype} holds"
        start, end = healthy[0].step, healthy[-1].step
        during = f"in {counted(end - start, 'step')}"
        during = during if end > start else f"in {len(healthy):,} readings"
        span = f"from {format_number(first)} (step {start:,}) to {format_number(last)} "
        span += f"(step {end:,}){share}"
        if growth is None:
            return f"abs max was {format_number(last)} at step {end:,}{share}."
        if growth >= GROWN:
            return f"abs max grew {format_factor(growth)} {during}, {span}."
        if growth == 0:
            return f"abs max fell to 0 {during}, {span}."
        if growth <= 1 / GROWN:
            return f"abs max shrank {format_factor(1 / growth)} {during}, {span}."
        return f"abs max was steady: {span}."

    @property
    def has_stats(self) -> bool:
        return any(reading.abs_max is not None for reading in self.readings)

    @property
    def columns(self) -> list[str]:
        if self.has_stats:
            return ["abs max", "rms", "NaN+Inf"]
        return ["zeros", "subnormal", "NaN+Inf"]

    def cells(self, reading: RecordStatistics) -> list[str]:
        shown = ("abs_max", "rms") if self.has_stats else ("zero_count", "subnormal_count")
        return format_fields(reading, *shown, "nonfinite_count")

    @property
    def series_name(self) -> str:
        return "abs max" if self.has_stats else "zeros"

    def series(self) -> list[float | None]:
        if self.has_stats:
            return [None if r.abs_max is None else float(r.abs_max) for r in self.readings]
        return [float(r.zero_count) for r in self.readings]

    def picks(self, rows: int) -> list[int]:
        """The indices of the readings that the table shows: the first, some between, and the last
        few.
        """
        count = len(self.readings)
        if count <= rows:
            return list(range(count))
        late = rows - 3
        early_end = count - late
        return sorted({0, early_end // 3, 2 * early_end // 3, *range(early_end, count)})


def format_factor(factor: float) -> str:
    if factor >= 1e9:
        return f"{format_number(factor)} times"
    return f"{factor:,.0f} times" if factor >= 10 else f"{factor:.1f} times"
