"""A run of which only the records exist, for tests of the watch."""

from __future__ import annotations

from typing import Any, Optional

import numpy as np

from fastcheck.log.step_table import StepRow
from fastcheck.record.format import DTYPES, RECORD_DTYPE, Flag
from fastcheck.record.site import Site, SiteTable
from fastcheck.watch.event import WatchEvent
from fastcheck.watch.options import Watch
from fastcheck.watch.watcher import Watcher

__all__ = ["DTYPE_CODES", "Run", "tensor"]

DTYPE_CODES = {info.name: info.code for info in DTYPES}
#: Name, role and direction of each tensor, in the order of a step.
TENSORS = [
    ("", "input", "forward"),
    ("first", "output", "forward"),
    ("second", "output", "forward"),
    ("second", "grad_output", "backward"),
    ("first", "param", "optimizer"),
    ("second", "param", "optimizer"),
]


def tensor(**fields: Any) -> dict[str, Any]:
    """The fields of a record of 1,024 float32 elements with this ``rms``, and others changed."""
    rms = fields.pop("rms", 1.0)
    plain = {
        "numel": 1024,
        "depth": 3,
        "dtype": DTYPE_CODES["float32"],
        "max": 3 * rms,
        "min": -3 * rms,
        "abs_sum": 800 * rms,
        "sum_sq": 1024 * rms**2,
    }
    return {**plain, **fields}


#: Places in a step of a Run.
INPUT, FIRST, SECOND, GRADIENT, FIRST_WEIGHT, SECOND_WEIGHT = range(6)


class Run:
    """Steps of the tensors of TENSORS, whose rms varies by two percent. One step in ``every`` is
    observed.
    """

    def __init__(self, every: int = 1, **options: Any) -> None:
        self.every = every
        self.sites = SiteTable()
        for module, role, direction in TENSORS:
            label = "weight" if role == "param" else role
            self.sites.intern(Site(module, "Linear", direction, role, 0, label))
        self.watcher = Watcher(Watch(**options), self.sites)
        self.random = np.random.default_rng(0)
        self.count = 0

    def step(self, changed: Optional[dict[int, Any]] = None, **row: Any) -> list[WatchEvent]:
        """One step. ``changed``: by place in TENSORS, the fields of the record, or its rms."""
        return self.take([self.healthy(changed)], **row)

    def healthy(self, changed: Optional[dict[int, Any]] = None) -> np.ndarray:
        """The records of the next step."""
        records = np.zeros(len(TENSORS), RECORD_DTYPE)
        for place in range(len(TENSORS)):
            fields = (changed or {}).get(place, {})
            if not isinstance(fields, dict):
                fields = {"rms": fields * float(np.exp(self.random.normal(0, 0.02)))}
            elif "rms" not in fields:
                fields = {"rms": float(np.exp(self.random.normal(0, 0.02))), **fields}
            values = {"site": place, "seq": self.count * 100 + place, "step": self.count}
            for name, value in {**tensor(**fields), **values}.items():
                records[place][name] = value
        return records

    def take(self, chunks: list[np.ndarray], **row: Any) -> list[WatchEvent]:
        """One step with these records."""
        numbers = {
            "loss": 2.0 + float(self.random.normal(0, 0.05)),
            "overflow": False,
            "scale": None,
            "learning_rate": 0.001,
            "gradient_norm": float(np.exp(self.random.normal(0, 0.05))),
        }
        found = self.watcher.add((StepRow(0, self.count, **{**numbers, **row}), chunks))
        self.count += self.every
        return found

    def steps(self, count: int, changed: Optional[dict[int, Any]] = None, **row: Any) -> list[str]:
        """So many steps; the kinds of their events."""
        return [event.kind for _ in range(count) for event in self.step(changed, **row)]


SCALED = int(Flag.SCALED)


def warmed_up(**options: Any) -> Run:
    run = Run(**options)
    assert run.steps(100) == []
    return run
