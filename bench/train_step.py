"""A training step of a small float32 transformer under each tool, and the same step without one.

    python bench/train_step.py [--rounds N] [--only-fastcheck]

Writes bench/results/train_step.json (or train_step_fastcheck.json), prints a Markdown table. Other
tools run in environments of their own (environments.py), each beside its own "none": a ratio is
always within one process.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import environments
import harness

WORKER = Path(__file__).with_name("step_worker.py")
HERE = ["none again (A/A)", "fastcheck full", "fastcheck stats", "fastcheck health"]
ELSEWHERE = {
    "HF DebugUnderflowOverflow": environments.TRANSFORMERS,
    "msprobe L0 statistics": environments.MSPROBE,
}
FULL_BAR = 1.04  # fastcheck full, times a step without


def work(python: str, threads: int, rounds: int, tools: list[str]) -> list[dict[str, Any]]:
    told = harness.output_of(WORKER, threads, rounds, "none", *tools, python=python)
    result = json.loads(told.splitlines()[-1])
    base = np.array(result["seconds"]["none"])
    rows = []
    for tool, values in result["seconds"].items():
        seconds = np.array(values)
        rows.append(
            {
                "tool": tool,
                "beside": tools[0] if python != sys.executable else "fastcheck",
                "version": result["packages"].get(tool),
                "threads": threads,
                "rounds": rounds,
                "seconds": harness.spread(seconds),
                "times_none": harness.ratio(seconds, base),
                "times_none_fastest": float(seconds.min() / base.min()),
                "identical_weights": result["identical"][tool],
            }
        )
    return rows


def missed_bars(rows: list[dict[str, Any]]) -> list[str]:
    missed = [
        f"{row['tool']}, {row['threads']} thread(s): {row['times_none']['median']:.3f} > {FULL_BAR}"
        for row in rows
        if row["tool"] == "fastcheck full" and row["times_none"]["median"] > FULL_BAR
    ]
    changed = {
        row["tool"]
        for row in rows
        if row["tool"].startswith("fastcheck") and not row["identical_weights"]
    }
    return missed + [f"{tool} changed the weights" for tool in sorted(changed)]


def as_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        [
            row["tool"] + (f" {row['version']}" if row["version"] else ""),
            str(row["threads"]),
            harness.with_spread(row["times_none"], 3),
            f"{row['times_none_fastest']:.3f}",
            f"{row['seconds']['median']:.2f}",
            "yes" if row["identical_weights"] else "no",
        ]
        for row in rows
        if row["tool"] != "none"
    ]
    header = ["tool", "threads", "times a step without", "fastest steps", "seconds a step"]
    return harness.table([*header, "same weights to the bit"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--only-fastcheck", action="store_true", help="writes train_step_fastcheck.json"
    )
    arguments = parser.parse_args()
    rows, rounds = [], harness.size(arguments.rounds, 1)
    for threads in harness.threads_to_try():
        tools = HERE if arguments.only_fastcheck else [*HERE, "detect_anomaly"]
        rows += work(sys.executable, threads, rounds, tools)
        for tool, environment in ({} if arguments.only_fastcheck else ELSEWHERE).items():
            try:
                python = environments.python(environment)
            except environments.MissingToolError as missing:
                print(f"{tool} is left out: {missing}")
                continue
            rows += work(python, threads, harness.size(max(4, rounds // 2), 1), [tool])
    print(as_table(rows))
    missed = missed_bars(rows)
    print("\n" + ("Bars missed: " + "; ".join(missed) if missed else "All bars reached."))
    name = "train_step_fastcheck" if arguments.only_fastcheck else "train_step"
    harness.write_results(name, rows, missed_bars=missed)


if __name__ == "__main__":
    main()
