"""The scalars of one step, from its records: the same few names whatever the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Optional

import numpy as np

from fastcheck.log.step_table import StepRow
from fastcheck.record.format import DTYPES, Depth, DeviceMode, nonfinite
from fastcheck.record.statistics import LARGEST_FINITE

_BYTES = np.array([one.components * one.component_bytes for one in DTYPES], np.int64)


@dataclass(frozen=True)
class StepFacts:
    """A step that is over. ``chunks``: its records. The numbers of the run until then: ``skipped``
    steps, counted ``events``, ``findings`` of any verdict, ``waits`` of the host for a device,
    ``lost`` tensors; ``watched``: the numbers of the watch by name. ``lag``: how many steps the
    training was further when the records arrived.
    """

    row: StepRow
    chunks: Sequence[np.ndarray]
    skipped: int
    events: int
    findings: int
    lag: int
    waits: int
    lost: int
    watched: Mapping[str, float] = field(default_factory=dict)


def step_scalars(facts: StepFacts) -> tuple[dict[str, float], Optional[int]]:
    """The scalars by name, and the number of the site with the least headroom."""
    row, bits, site = facts.row, np.inf, None
    tensors, read, bad = 0, 0, 0
    for records in facts.chunks:
        tensors += len(records)
        read += int((records["numel"] * _BYTES[records["dtype"]]).sum())
        bad += int(nonfinite(records).sum())
        left = _headroom(records)
        least = int(np.argmin(left))
        if left[least] < bits:
            bits, site = float(left[least]), int(records["site"][least])
    values = {
        "loss": row.loss,
        "loss_scale": row.scale,
        "learning_rate": row.learning_rate,
        "gradient_norm": row.gradient_norm,
        "skipped_steps": facts.skipped,
        "events": facts.events,
        "findings": facts.findings,
        "nonfinite_tensors": bad,
        "headroom_bits": bits if site is not None else None,
        "lag_steps": facts.lag,
        "tensors_read": tensors,
        "gigabytes_read": read / 1e9,
        "host_waits": facts.waits,
        "tensors_lost": facts.lost,
        **facts.watched,
    }
    found = {f"fastcheck/{name}": float(v) for name, v in values.items() if v is not None}
    return found, site


def _headroom(records: np.ndarray) -> np.ndarray:
    """How many times each tensor could be doubled before it overflows; inf: not known. A tensor
    that holds the largest number itself is left out as a mask, unless its device saturates.
    """
    largest = LARGEST_FINITE[records["dtype"]]
    with np.errstate(all="ignore"):  # of integers min and max are other types' bits
        reached = np.maximum(np.abs(records["min"]), np.abs(records["max"]))
        known = (records["depth"] >= Depth.STATS) & (reached > 0) & (reached <= largest)
        saturates = records["device_mode"] == int(DeviceMode.SATURATING)
        known &= (reached < largest) | saturates
        bits: np.ndarray = np.where(known, np.log2(largest / reached), np.inf)
    return bits
