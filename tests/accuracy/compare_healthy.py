"""Compares runs that differ in the machine alone, and runs with one wrong operator.

    make accuracy SUITE="compare_healthy [--seed S]"

Writes bench/results/compare_healthy.json. Machines are simulated by the instruction sets that
torch, oneDNN and MKL may use, by the number of threads, and by torch.compile. No tensor of a
healthy pair may be called different; of the others the first must belong to the module that is
wrong. The exit status is 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fastcheck
import harness
from accuracy.compare_programs import FAULTS, PROGRAMS
from accuracy.compare_worker import save

AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
OLD = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
}
MACHINES = {
    "this": {"OMP_NUM_THREADS": "1"},
    "AVX2": {"OMP_NUM_THREADS": "1", **AVX2},
    "SSE4": {"OMP_NUM_THREADS": "1", **OLD},
    "2 threads": {"OMP_NUM_THREADS": "2"},
}
#: Those that tests/comparison/test_machines.py runs.
CHECKED = ("conv BatchNorm", "attention", "attention bfloat16", "LSTM", "residual", "MLP bfloat16")
COMPILED = ("conv GroupNorm", "attention", "MLP bfloat16")


def run_on(machine: str, directory: Path, jobs: list[list[Any]]) -> None:
    file = directory / f"{machine}.json"
    file.write_text(json.dumps(jobs))
    subprocess.run(
        [sys.executable, "-m", "accuracy.compare_worker", str(directory), str(file)],
        cwd=Path(__file__).parents[1],
        env={**os.environ, **MACHINES[machine]},
        check=True,
    )


def compare(directory: Path, actual: str, reference: str) -> Any:
    return fastcheck.compare(
        directory / actual, directory / reference, accept=["environment", "hyper-parameters"]
    )


def described(comparison: Any) -> dict[str, Any]:
    first = comparison.first
    if first is None:
        return {"verdict": comparison.verdict, "named": None, "error": None}
    return {
        "verdict": comparison.verdict,
        "named": f"step {first.row.step}: {first.row.name}",
        "error": first.row.error,
    }


def is_named(name: str, module: str) -> bool:
    return name.split(" · ")[0] == module


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, help="a directory for the logs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare-only", action="store_true", help="the logs are there already")
    options = parser.parse_args()
    programs = harness.few(PROGRAMS)
    with tempfile.TemporaryDirectory() as temporary:
        directory = (options.keep or Path(temporary)).absolute()
        directory.mkdir(exist_ok=True)
        if not options.compare_only:
            record(directory, programs=programs, compiled=COMPILED, seed=options.seed)
        healthy, wrong = results(directory, programs=programs, compiled=COMPILED)
    accused = [row for row in healthy if row["verdict"] == "different"]
    missed = [row for row in wrong if not row["is_named"]]
    for row in accused:
        print(f"accused: {row['program']}, {row['machine']}: {row['named']} ({row['error']})")
    for row in missed:
        print(f"not named: {row['fault']} in {row['program']}: {row['named']} ({row['error']})")
    print(f"{len(accused)} of {len(healthy)} healthy pairs accused")
    print(f"{len(wrong) - len(missed)} of {len(wrong)} wrong operators named")
    harness.write_results("compare_healthy", [*healthy, *wrong], seed=options.seed)
    return 1 if accused or missed else 0


def record(
    directory: Path,
    machines: Sequence[str] = tuple(MACHINES),
    programs: Sequence[str] = tuple(PROGRAMS),
    compiled: Sequence[str] = (),
    seed: int = 0,
) -> None:
    """Trains on each of the machines: the first is the reference, the second has the faults."""
    for program in programs:
        save(program, directory / f"{program}.pt", seed)
    for machine in machines:
        jobs: list[list[Any]] = [
            [f"{program}, {machine}", program, None, "eager"] for program in programs
        ]
        if machine == machines[1]:
            jobs += [
                [f"fault {number}", program, number, "eager"]
                for number, (program, _, _) in enumerate(FAULTS)
                if program in programs
            ]
        if machine == "this":
            jobs += [
                [f"{program}, compile", program, None, "compile"]
                for program in compiled
                if program in programs
            ]
        run_on(machine, directory, jobs)


def results(
    directory: Path,
    machines: Sequence[str] = tuple(MACHINES),
    programs: Sequence[str] = tuple(PROGRAMS),
    compiled: Sequence[str] = (),
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The healthy pairs, and those with a fault, compared."""
    healthy, wrong = [], []
    for program in programs:
        others = [machine for machine in machines if machine != "this"]
        if program in compiled:
            others.append("compile")
        for machine in others:
            found = compare(directory, f"{program}, {machine}", f"{program}, this")
            healthy.append({"program": program, "machine": machine, **described(found)})
    for number, (program, module, _) in enumerate(FAULTS):
        if program in programs:
            found = described(compare(directory, f"fault {number}", f"{program}, this"))
            named = is_named(str(found["named"]).partition(": ")[2], module)
            wrong.append({"program": program, "fault": module, "is_named": named, **found})
    return healthy, wrong


if __name__ == "__main__":
    sys.exit(main())
