"""The time and memory of comparing two logs of up to a million records each.

    python bench/compare_logs.py [--quick]

The logs are synthetic: 250 modules, 1,000 records a step. Each case runs in a process of its own.
CPU seconds are reported because other work on the machine changes them less. Memory is the peak of
the process (ru_maxrss) above its value after importing fastcheck and comparing a log of one step
with itself. Each verdict is checked.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import harness
from fastcheck.log.writer import RecordLog
from fastcheck.record.format import RECORD_DTYPE
from fastcheck.record.site import Site, SiteTable

MODULES = 250
ROLES = (
    ("forward", "output", "output"),
    ("backward", "grad_output", "output"),
    ("optimizer", "param", "weight"),
    ("optimizer", "param_grad", "weight"),
)
A_STEP = MODULES * len(ROLES)
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


def sites() -> SiteTable:
    table = SiteTable()
    for direction, role, label in ROLES:
        for module in range(MODULES):
            table.intern(Site(f"layers.{module}", "Layer", direction, role, 0, label))
    return table


def records_of(step: int) -> np.ndarray:
    rng = np.random.default_rng(step)
    made = np.zeros(A_STEP, RECORD_DTYPE)
    made["version"], made["depth"], made["dtype"] = 1, 3, 1
    made["numel"], made["step"] = 4096, step
    made["site"], made["seq"] = np.arange(A_STEP), np.arange(A_STEP) + step * A_STEP
    made["sum_sq"], made["abs_sum"] = rng.uniform(1, 2, (2, A_STEP))
    made["sum"], made["min"], made["max"] = 0.1, -made["abs_sum"], made["abs_sum"]
    made["checksum"] = rng.integers(0, 2**62, A_STEP)
    return made


def changed(made: np.ndarray, case: str, step: int, steps: int) -> np.ndarray:
    rng = np.random.default_rng(10**6 + step)
    if case == "other order in every step":
        return rng.permutation(made)
    if case == "other last bits everywhere":
        # Initial weights are given, not computed: they have to be equal to the bit.
        computed = made["site"] // MODULES != 2 if step == 0 else np.ones(A_STEP, bool)
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


def write(directory: Path, case: str, steps: int) -> str:
    log = RecordLog(directory, 0, None, sites(), {"environment": {}, "optimizers": []})
    for step in range(steps):
        log.append(changed(records_of(step), case, step, steps), step)
    log.close()
    return os.fspath(directory)


def measure(small: str, actual: str, reference: str, want: str, rounds: int) -> dict[str, Any]:
    runs = []
    for _ in range(rounds):
        done = subprocess.run(
            [sys.executable, "-c", CHILD, small, actual, reference],
            capture_output=True,
            text=True,
            check=True,
        )
        runs.append(json.loads(done.stdout))
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
    options = parser.parse_args()
    sizes = (10_000, 50_000) if options.quick else (10_000, 100_000, 1_000_000)
    sizes = harness.size(sizes, (4_000,))
    rows = []
    with tempfile.TemporaryDirectory() as place:
        small = write(Path(place) / "small", "identical", 1)
        for size in sizes:
            steps = size // A_STEP
            reference = write(Path(place) / f"reference-{size}", "identical", steps)
            for case, want in harness.few(CASES.items()):
                actual = write(Path(place) / f"actual-{size}", case, steps)
                rounds = harness.size(1 if size > 100_000 else 3, 1)
                found = measure(small, actual, reference, want, rounds)
                rows.append({"case": case, "numel": size, "rounds": rounds, **found})
                print(
                    f"{size:>9,} records  {case:<30} {found['seconds']['median']:7.2f} s"
                    f" ({found['cpu_seconds']['median']:.2f} of CPU)"
                    f"  {found['peak_mib']['median']:7.1f} MiB",
                    flush=True,
                )
                for file in Path(actual).iterdir():
                    file.unlink()
                Path(actual).rmdir()
    harness.write_results("compare_logs", rows, records_a_step=A_STEP, record_bytes=192)


if __name__ == "__main__":
    main()
