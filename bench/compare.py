"""Compares two results of one bench: lists changes larger than both spreads.

    python bench/compare.py OLD.json NEW.json [--all]

Exit status 1 when something became slower. Ratios within a run (to a pure read, to a step without a
tool) are compared where the result has them, because the machine's load changes them less than
times.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Optional

from harness import table, with_spread

# Keys that identify a row; measures, of which a row's first is compared; whether more is better.
IDENTITY = ("dtype", "data", "numel", "threads", "case", "tool", "beside", "depth", "counts")
MEASURES = {
    "fraction_of_pure_read": True,
    "times_none": False,
    "microseconds": False,
    "slots": False,
    "seconds": False,
}


def identity(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(row[key]) for key in IDENTITY if key in row)


def as_spread(value: Any) -> dict[str, float]:
    return value if isinstance(value, dict) else {"median": value, "p10": value, "p90": value}


def compare_row(old: dict[str, Any], new: dict[str, Any]) -> Optional[tuple[str, list[str], bool]]:
    """(verdict, cells, whether the verdict is "slower"); None where there is nothing to compare."""
    measure = next((m for m in MEASURES if m in old and m in new), None)
    if measure is None:
        return None
    before, after = as_spread(old[measure]), as_spread(new[measure])
    verdict = ""
    if after["p10"] > before["p90"] or after["p90"] < before["p10"]:
        went_up = after["median"] > before["median"]
        verdict = "faster" if went_up == MEASURES[measure] else "slower"
    change = after["median"] / before["median"] - 1 if before["median"] else 0.0
    cells = [measure, with_spread(before), with_spread(after), f"{change:+.1%}", verdict]
    return verdict, cells, verdict == "slower"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--all", action="store_true", help="also what did not change")
    arguments = parser.parse_args()
    old, new = (json.loads(path.read_text()) for path in (arguments.old, arguments.new))
    if "rows" not in old or "rows" not in new:
        parser.error("expected results with timed rows; the collision search has none")
    if old["bench"] != new["bench"]:
        parser.error(f"expected two results of one bench, got {old['bench']} and {new['bench']}")
    for key in ("cpu", "cores", "isa", "torch", "numpy", "compiler", "python"):
        if old["machine"][key] != new["machine"][key]:
            print(f"not the same {key}: {old['machine'][key]} -> {new['machine'][key]}")
    before = {identity(row): row for row in old["rows"]}
    lines, slower = [], 0
    for row in new["rows"]:
        if identity(row) not in before:
            continue
        result = compare_row(before[identity(row)], row)
        if result is not None and (result[0] or arguments.all):
            lines.append([" · ".join(identity(row)), *result[1]])
            slower += result[2]
    if lines:
        print(table(["case", "measure", "old", "new", "change", ""], lines))
    else:
        print("nothing changed by more than the spread")
    return 1 if slower else 0


if __name__ == "__main__":
    raise SystemExit(main())
