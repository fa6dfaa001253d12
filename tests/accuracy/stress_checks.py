"""Checks of the stress test: each record equals that of its tensor's copy, and nothing is left."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import torch

import fastcheck
from accuracy.stress_models import Book, Key
from fastcheck.backends import complete_records
from fastcheck.backends.portable import checksum, constants, values
from fastcheck.backends.portable import many as portable_many
from fastcheck.monitor.hooks import optimizers
from fastcheck.monitor.session.session import Session
from fastcheck.record.format import RECORD_DTYPE, VALUE_BYTES, Depth, nonfinite
from fastcheck.ring.device import DeviceRing
from fastcheck.ring.segments import Reserve, Segment

#: The fields of a record that do not depend on the order of sums.
EXACT = tuple(
    name
    for name, (_, offset, *_) in (RECORD_DTYPE.fields or {}).items()
    if offset < VALUE_BYTES and name not in ("sum", "abs_sum", "sum_sq")
)


class Failures:
    """What went wrong, from any thread: the first of each kind, and how many there were."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, kind: str, detail: object = "") -> None:
        self.counts[kind] += 1
        if self.counts[kind] == 1:
            print(f"FAILED: {kind}: {detail}", flush=True)


def value_bytes(record: np.void) -> bytes:
    return b"".join(record[name].tobytes() for name in EXACT)


def reference(copy: torch.Tensor, depth: int) -> np.void:
    """The CPU kernel's record of a copy."""
    s = fastcheck.stats(copy.cpu(), record=Depth(depth).name.lower())
    record: np.void = np.frombuffer(s.record.tobytes(), RECORD_DTYPE)[0]
    return record


def key_of(monitor: fastcheck.Monitor, record: np.void) -> Key:
    site = monitor.sites[int(record["site"])]
    return site.role, site.module, site.label, int(record["step"]), int(record["call"])


def check_count(monitor: fastcheck.Monitor, failures: Failures) -> tuple[np.ndarray, int]:
    """All records of a monitor, and how many are missing: only those that it counts as lost."""
    session = monitor._session
    with session.lock:
        records = monitor.records()
        lost = sum(ring.lost_count for ring in session.rings.of.values())
        missing = session.next_seq - len(records)
    if len(set(records["seq"].tolist())) != len(records):
        failures.add("a record is there twice")
    # A full ring still keeps the first non-finite ones, which it has counted as lost.
    kept = min(lost, int(nonfinite(records).sum()))
    if not lost - kept <= missing <= lost:
        removed = ", after remove()" if session.removed else ""
        failures.add("records are missing", f"{missing}; counted as lost: {lost}{removed}")
    return records, missing


def check_records(
    monitor: fastcheck.Monitor, records: np.ndarray, book: Book, failures: Failures
) -> None:
    """Each record equals that of its copy."""
    for record in records:
        key = key_of(monitor, record)
        copy = book.copies.get(key)
        if copy is None:
            failures.add("a record of a tensor that there was not", key)
            continue
        wanted = reference(copy, int(record["depth"]))
        differing = [
            f"{name} {record[name]} for {wanted[name]}"
            for name in EXACT
            if record[name].tobytes() != wanted[name].tobytes()
        ]
        if differing:
            what = f"{key}, number {record['seq']}, {copy.dtype} {tuple(copy.shape)}"
            failures.add("a record that is not its tensor's", f"{what}: {', '.join(differing)}")


def held_bytes(fake: Any) -> list[int]:
    """Allocated bytes of each device, without what is cached: constants, and the identities of the
    records that stats() makes, of a stop's operands too.
    """
    for module in (checksum, complete_records, constants, portable_many, values):
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()
    gc.collect()
    held = []
    for index in range(fake.device_count()):
        fake.synchronize(index)
        held.append(int(fake.memory_allocated(index)))
    return held


def left_over() -> dict[str, int]:
    """Live objects of fastcheck by kind; all zero when nothing is installed."""
    deadline = time.monotonic() + 5  # for threads to end when they are not needed
    while True:
        gc.collect()
        kinds = Counter(map(type, gc.get_objects()))
        found = {kind.__name__: kinds[kind] for kind in (Segment, Reserve, DeviceRing, Session)}
        names = [thread.name for thread in threading.enumerate()]
        found["drain threads"] = names.count("fastcheck-drain")
        found["watchers"] = len(list(optimizers.watchers))
        found["process hooks"] = int(optimizers.watchers._has_begun)
        if not any(found.values()) or time.monotonic() > deadline:
            return found
        time.sleep(0.05)
