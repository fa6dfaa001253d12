"""The time and memory of comparing two logs, and two dumps, of up to a million records each.

    python bench/compare_logs.py [--quick] [--only dump]

The logs are synthetic: 250 modules, 1,000 records a step. The dumps have 100,000 records a step,
each of a name of its own, in calls of three inputs and an output. Each case runs in a process of
its own. CPU seconds are reported because other work on the machine changes them less. Memory is the
peak of the process (ru_maxrss) above its value after importing fastcheck and comparing a log of one
step with itself. Each verdict is checked.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import harness
from fastcheck.log.writer import RecordLog
from fastcheck.record.format import RECORD_DTYPE
from fastcheck.record.site import Site, SiteTable

A_STEP = {"log": 1_000, "dump": 100_000}
ROLES = (
    ("forward", "output", "output"),
    ("backward", "grad_output", "output"),
    ("optimizer", "param", "weight"),
    ("optimizer", "param_grad", "weight"),
)
# How the actual side differs from the reference, and the expected verdict of compare().
CASES = {
    "identical": "identical",
    "other order in every step": "identical",
    "other last bits everywhere": "equal",
    "different from the middle on": "different",
    "one call more in every step": "different",
}
CHILD = """
import json, resource, sys, time
import fastcheck
import fastcheck.comparison
fastcheck.compare(sys.argv[1], sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start, cpu = time.perf_counter(), time.process_time()
found = fastcheck.compare(sys.argv[2], sys.argv[3])
seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
said = {"seconds": seconds, "cpu_seconds": cpu, "kib": after - before}
print(json.dumps({**said, "verdict": found.verdict}))
"""


def sites(count: int) -> SiteTable:
    table = SiteTable()
    for direction, role, label in ROLES:
        for module in range(count // len(ROLES)):
            table.intern(Site(f"layers.{module}", "Layer", direction, role, 0, label))
    return table


def records_of(step: int, count: int) -> np.ndarray:
    rng = np.random.default_rng(step)
    made = np.zeros(count, RECORD_DTYPE)
    made["version"], made["depth"], made["dtype"] = 1, 3, 1
    made["numel"], made["step"] = 4096, step
    made["site"], made["seq"] = np.arange(count), np.arange(count) + step * count
    made["sum_sq"], made["abs_sum"] = rng.uniform(1, 2, (2, count))
    made["sum"], made["min"], made["max"] = 0.1, -made["abs_sum"], made["abs_sum"]
    made["checksum"] = rng.integers(0, 2**62, count)
    return made


def changed(made: np.ndarray, case: str, step: int, steps: int) -> np.ndarray:
    rng = np.random.default_rng(10**6 + step)
    if case == "other order in every step":
        return rng.permutation(made)
    if case == "other last bits everywhere":
        # Initial weights are given, not computed: they have to be equal to the bit.
        computed = (
            made["site"] // (len(made) // len(ROLES)) != 2
            if step == 0
            else np.ones(len(made), bool)
        )
        made["checksum"][computed] += 1
        made["max"][computed] *= 1 + 1e-6
        made["sum_sq"][computed] *= 1 + 1e-6
    elif case == "different from the middle on" and step >= steps // 2:
        made["checksum"] += 1
        made["sum_sq"] *= 1.5
    elif case == "one call more in every step":
        extra = made[:1].copy()
        extra["checksum"] += 1
        return np.concatenate([made, extra])
    return made


def write(directory: Path, of: str, case: str, records: int) -> str:
    size = min(A_STEP[of], records)
    steps = records // size
    meta: dict[str, Any] = {"environment": {}, "optimizers": []}
    if of == "log":
        log = RecordLog(directory, 0, None, sites(size), meta)
        for step in range(steps):
            log.append(changed(records_of(step, size), case, step, steps), step)
        log.close()
        return os.fspath(directory)
    for step in range(steps):
        place = directory / f"step{step}" / "rank0"
        log = RecordLog(place, 0, None, sites(size), meta)
        made = changed(records_of(step, size), case, step, steps)
        made["seq"] = np.arange(len(made))
        log.append(made, step)
        log.close()
        entry = {"label": "x", "dtype": "float32", "shape": [64, 64], "requires_grad": True}
        with open(place / "calls.jsonl", "w") as file:
            for seq in range(0, len(made), 4):
                tensors = [{**entry, "seq": seq + one} for one in range(4)]
                line = {"n": seq // 4, "kind": "op", "in": tensors[:3], "out": tensors[3:]}
                file.write(json.dumps(line) + "\n")
        index = {"fastcheck": "dump", "format": 1, "step": step, "is_complete": True}
        (place / "index.json").write_text(json.dumps(index))
    return os.fspath(directory)


def measure(small: str, actual: str, reference: str, want: str, rounds: int) -> dict[str, Any]:
    runs = []
    for _ in range(rounds):
        runs.append(json.loads(harness.output_of("-c", CHILD, small, actual, reference)))
        if runs[-1]["verdict"] != want:
            raise SystemExit(f"{actual}: expected {want}, compare() says {runs[-1]['verdict']}")
    return {
        "seconds": harness.spread(np.array([run["seconds"] for run in runs])),
        "cpu_seconds": harness.spread(np.array([run["cpu_seconds"] for run in runs])),
        "peak_mib": harness.spread(np.array([run["kib"] / 1024 for run in runs])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="up to 50,000 records")
    parser.add_argument("--only", default="", choices=("", *A_STEP))
    options = parser.parse_args()
    sizes = (10_000, 50_000) if options.quick else (10_000, 100_000, 1_000_000)
    sizes = harness.size(sizes, (4_000,))
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        small = write(Path(temporary) / "small", "log", "identical", 1_000)
        given = [(of, size) for of in A_STEP if options.only in of for size in sizes]
        for of, size in given:
            reference = write(Path(temporary) / f"reference-{of}-{size}", of, "identical", size)
            for case, want in harness.few(CASES.items()):
                actual = Path(temporary) / f"actual-{of}-{size}"
                write(actual, of, case, size)
                rounds = harness.size(1 if size > 100_000 else 3, 1)
                found = measure(small, os.fspath(actual), reference, want, rounds)
                rows.append({"of": of, "case": case, "numel": size, "rounds": rounds, **found})
                print(
                    f"{of} of {size:>9,} records  {case:<30} {found['seconds']['median']:7.2f} s"
                    f" ({found['cpu_seconds']['median']:.2f} of CPU)"
                    f"  {found['peak_mib']['median']:7.1f} MiB",
                    flush=True,
                )
                shutil.rmtree(actual)
    harness.write_results("compare_logs", rows, records_a_step=A_STEP, record_bytes=192)


if __name__ == "__main__":
    main()
