"""Builds records, sites and reports from given values, for tests of the code that uses them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastcheck.record.event import Event
from fastcheck.record.format import DTYPES, RECORD_DTYPE, Flag, Verdict
from fastcheck.record.site import Site
from fastcheck.report.stop_report import StopReport


def record(
    dtype: str = "float32",
    numel: int = 1000,
    low: float = -1.0,
    high: float = 1.0,
    rms: float = 0.5,
    depth: int = 3,
    **fields: Any,
) -> np.void:
    """One record; ``fields`` are fields of RECORD_DTYPE."""
    made = np.zeros(1, RECORD_DTYPE)
    raw = made.view(np.uint8)
    info = next(row for row in DTYPES if row.name == dtype)
    values = {"version": 1, "dtype": info.code, "depth": depth, "numel": numel, **fields}
    for name, value in values.items():
        made[name] = value
    bad = sum(int(values.get(f"{kind}_count", 0)) for kind in ("nan", "posinf", "neginf"))
    if bad:
        made["flags"] |= int(Flag.NONFINITE)
    if depth >= 2:
        kind = np.dtype("<" + info.kind).type
        raw[64:72] = np.frombuffer(kind(low).tobytes(), np.uint8)
        raw[72:80] = np.frombuffer(kind(high).tobytes(), np.uint8)
        made["sum_sq"] = rms * rms * (numel - bad)
        made["abs_sum"] = rms * (numel - bad)
    result: np.void = made[0]
    return result


def records(*made: np.void) -> np.ndarray:
    return np.array(list(made), RECORD_DTYPE)


def healthy_records(step: int, count: int, first_seq: int = 0, sites: int = 4) -> np.ndarray:
    """``count`` healthy records of one step, each with its own checksum so that a mix-up shows."""
    made = np.zeros(count, RECORD_DTYPE)
    made["version"], made["depth"], made["dtype"] = 1, 3, 1
    made["numel"], made["step"] = 10, step
    made["seq"] = np.arange(first_seq, first_seq + count)
    made["site"] = np.arange(count) % sites
    made["checksum"] = made["seq"].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return made


def site(module: str = "layers.3.attn", module_type: str = "Attention", **fields: Any) -> Site:
    values: dict[str, Any] = {
        "direction": "forward",
        "role": "output",
        "index": 0,
        "label": "output[0]",
        **fields,
    }
    return Site(module=module, module_type=module_type, **values)


def event(
    where: Site,
    what: np.void,
    verdict: Verdict = Verdict.ORIGIN,
    reason: str = "all that it was computed from was finite",
    counted: bool = True,
    rank: int = 0,
) -> Event:
    return Event(
        site=where,
        record=what,
        step=int(what["step"]),
        verdict=verdict,
        reason=reason,
        counted=counted,
        rank=rank,
    )


def grown(dtype: str, start: float, factor: float, steps: int, last_step: int) -> list[np.void]:
    """Healthy records whose abs max is multiplied by ``factor`` every step, up to ``last_step``."""
    return [
        record(
            dtype,
            high=start * factor**i,
            low=-start * factor**i / 2,
            rms=start * factor**i / 9,
            step=last_step - steps + 1 + i,
            seq=i,
        )
        for i in range(steps)
    ]


def report(
    where: Site | None = None,
    what: np.void | None = None,
    verdict: Verdict = Verdict.ORIGIN,
    before: Sequence[np.void] = (),
    **fields: Any,
) -> StopReport:
    """A report on one event; ``before`` are the healthy records of its trend."""
    if where is None:
        where = site()
    if what is None:
        what = record(
            "float16",
            numel=65536,
            nan_count=12,
            posinf_count=4,
            step=41,
            seq=900,
            high=65504.0,
            low=-60000.0,
            rms=311.2,
        )
    reason = fields.pop("reason", "all that it was computed from was finite")
    culprit = event(where, what, verdict, reason)
    fields.setdefault("events", (culprit,))
    fields.setdefault("trend", records(*before, what))
    return StopReport(culprit=culprit, step=int(what["step"]), **fields)
