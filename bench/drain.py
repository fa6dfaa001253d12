"""Records per second through the drain: decoded, judged, kept, and written to the log.

    python bench/drain.py [--rounds N]     writes bench/results/drain.json, prints a Markdown table

A step of 4096 finite records in four segments, filled through the ring of the fake accelerator of
the tests (built on first use, needs g++), with a stub of the backend that writes nothing. The timed
part begins when the copies are complete: the drain's own code, in one thread, from the segments to
the event store and a log in a temporary directory. Hooks leave a journal entry for each call; lists
of parameters leave one entry for many records. The garbage collector runs between the steps, so
that its time is not counted."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from torch import nn

import fastcheck
import harness
from fastcheck.backends.portable.traversal import dtype_and_order
from fastcheck.calls.module_calls import ModuleNode, new_call
from fastcheck.monitor.session.drain import StepPart
from fastcheck.monitor.session.session import Session
from fastcheck.record.format import RECORD_BYTES
from fastcheck.verdict.entries import Journal, Moment, Stored

RECORDS = 4096  # a step
STEPS = harness.size(25, 2)  # a round
LIST_LENGTH = 200
HISTORY = 10

# The project's bar, in records a second.
BAR = 1e6


def nothing(*args: Any) -> None:
    pass


class Steps:
    """A monitor without hooks, and steps that are handed to its drain complete."""

    def __init__(self, device: torch.device, log_dir: Optional[str]) -> None:
        model = nn.Linear(2, 2).to(device)
        self.monitor = fastcheck.install(model, log=fastcheck.Log(log_dir, history=HISTORY))
        self.session: Session = self.monitor._session
        self.ring = ring = self.session.rings.ring_of(device)
        ring.backend = dataclasses.replace(ring.backend, observe=nothing)
        for segment in ring._free:
            segment.slots.zero_()  # not written by a kernel: empty records, all finite
        self.node = ModuleNode("", model, self.session.sites, is_primary=True)
        self.sites = [self.node.site("output", f"output[{k}]", k) for k in range(512)]
        self.tensor = torch.ones(1).to(device)
        self.kind = dtype_and_order(self.tensor)
        self.count = 0

    def fill(self, entries_of: str) -> None:
        """Puts the next step into the drain's queue, with all of its copies complete."""
        session, count = self.session, self.count
        step = session.event_store.new_step(count)
        journal = Journal()
        for k in range(RECORDS):
            seq = count * RECORDS + k
            site = self.sites[k % len(self.sites)]
            self.ring.observe(self.tensor, (seq, count, k // len(self.sites), site, 0, *self.kind))
            if entries_of == "hooks":
                call = new_call(self.node, k, None, 0, seq, False)
                call.add_output(seq)
                journal.entries.append(call)
            elif k % LIST_LENGTH == 0:
                roles = ["param"] * min(LIST_LENGTH, RECORDS - k)
                journal.entries.append(Stored(seq, roles, 0))
        journal.add_due(Moment.CLOSED)
        journal.add_due(Moment.ENDED)
        records, segments = self.ring.cut()
        part = StepPart(step, journal, records, [(self.ring, s) for s in segments], True)
        part.wait()
        session.drain._parts.append(part)  # not submit(): the thread is left out of it
        self.count = count + 1

    def take(self) -> float:
        """Seconds for the drain to take in what fill() has queued."""
        gc.collect(1)
        gc.disable()
        start = time.perf_counter()
        left = self.session.drain.process()
        seconds = time.perf_counter() - start
        gc.enable()
        assert left == 0
        return seconds

    def check(self) -> None:
        """All records are there, once each and in order."""
        held = self.monitor.records()
        steps = self.count if self.session.config.log.dir else min(self.count, HISTORY)
        first = (self.count - steps) * RECORDS
        assert np.array_equal(held["seq"], np.arange(first, self.count * RECORDS))
        assert np.array_equal(held["step"], held["seq"] // RECORDS)
        assert not self.monitor.events


def written(directory: str, block: bytes) -> float:
    """Seconds to write as many bytes as a round of steps has, without fastcheck."""
    path = os.path.join(directory, "plain")
    start = time.perf_counter()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for _ in range(STEPS):
        os.write(file, block)
    os.close(file)
    return time.perf_counter() - start


def measure(device: torch.device, rounds: int, directory: str) -> list[dict[str, Any]]:
    cases = {
        (entries_of, is_logged): Steps(
            device, os.path.join(directory, entries_of) if is_logged else None
        )
        for entries_of in ("hooks", "lists")
        for is_logged in (False, True)
    }
    keys = list(cases)
    seconds = {key: np.empty(rounds) for key in keys}
    plain = np.empty(rounds)
    block = np.random.default_rng(0).bytes(RECORDS * RECORD_BYTES)
    for index in range(-1, rounds):  # one to warm up; the order rotates
        shift = index % len(keys)
        plain[max(index, 0)] = written(directory, block)
        for key in keys[shift:] + keys[:shift]:
            total = 0.0
            for _ in range(STEPS):
                cases[key].fill(key[0])
                total += cases[key].take()
            seconds[key][max(index, 0)] = total
    for steps in cases.values():
        steps.check()
        steps.monitor.remove()
    rows = [
        {
            "case": f"entries of {entries_of}, log {'on' if is_logged else 'off'}",
            "records_per_second": harness.spread(RECORDS * STEPS / values),
            "microseconds": harness.spread(1e6 * values / (RECORDS * STEPS)),
            "bar": BAR,
            "is_met": bool(RECORDS * STEPS / np.median(values) >= BAR),
        }
        for (entries_of, is_logged), values in seconds.items()
    ]
    return [
        *rows,
        {
            "case": "the same bytes written to the same directory, no fastcheck",
            "records_per_second": harness.spread(RECORDS * STEPS / plain),
            "microseconds": harness.spread(1e6 * plain / (RECORDS * STEPS)),
            "bar": None,
            "is_met": None,
        },
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = harness.size(parser.parse_args().rounds, 1)
    from fakes import fake_device

    device = torch.device(fake_device.load().name(), 0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(device, rounds, str(Path(directory)))
    lines = [
        [
            row["case"],
            f"{row['records_per_second']['median'] / 1e6:.2f}",
            harness.with_spread(row["microseconds"]),
            "" if row["bar"] is None else "met" if row["is_met"] else "missed",
        ]
        for row in rows
    ]
    header = ["case", "million records a second", "us each", f"bar {BAR / 1e6:g} million"]
    print(harness.table(header, lines))
    harness.write_results("drain", rows, rounds=rounds, records=RECORDS, steps=STEPS)


if __name__ == "__main__":
    main()
