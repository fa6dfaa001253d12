"""Injects faults into random operators of 26 programs, and counts how many are named exactly.

    make accuracy SUITE="fault_injection [--faults N] [--seed S]"

Writes bench/results/fault_injection.json. The programs are those of healthy.py. A fault sets
one element of the first output of one operator call, in forward, backward or the optimizer, to NaN
or an infinity, by a write to memory that no operator sees. Each fault is run three times: without
fastcheck, which decides whether it has a consequence (a loss, gradient, parameter, buffer or
optimizer state that is not finite), at op level and at module level. Module level does not read
what an optimizer keeps: there its state is no consequence.

A fault without a consequence is to be silent: no event is counted. One with a consequence is named
exactly when the first event has its step and, at op level, that operator call; at module level,
that tensor, the module that ran the operator or the next one that its result reached, or the
parameter that an update wrote (fault_places.py). The exit status is 1 where fewer than 99 % at op
level or 98 % at module level are exact or silent. The misses are in the results, one by one.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from typing import Any

import numpy as np

import harness
from accuracy.fault_places import Expected, expected_places, how_named, nearest_modules
from accuracy.fault_programs import PROGRAMS, STEPS, Fault, consequences, observed

KINDS = {"NaN": float("nan"), "+Inf": float("inf"), "-Inf": float("-inf")}
NAMES = harness.few(PROGRAMS)
BARS = {"op": 0.99, "module": 0.98}


def healthy_places() -> dict[str, list[Expected]]:
    """Of each program: the operator calls of its last step, each with the places of its record."""
    found = {}
    for name in NAMES:
        monitor, calls = observed(name, None, "op")
        assert monitor.event_count == 0, f"{name} is not healthy"
        found[name] = list(expected_places(monitor, STEPS - 1, calls).values())
        assert found[name], f"{name} has no operator to put a fault into"
    return found


def draw(places: dict[str, list[Expected]], choose: Any) -> tuple[str, str, Fault]:
    name = str(choose.choice(NAMES))
    call = places[name][int(choose.integers(len(places[name])))].call
    kind = str(choose.choice(list(KINDS)))
    step, element = int(choose.integers(1, STEPS - 1)), int(choose.integers(1 << 20))
    return name, kind, Fault(call, KINDS[kind], step, element)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    choose = np.random.default_rng(options.seed)
    places = healthy_places()
    tally: Counter[tuple[str, str, str]] = Counter()
    misses = []
    for _ in range(options.faults):
        name, kind, fault = draw(places, choose)
        found = consequences(name, fault)
        monitor, calls = observed(name, fault, "op")
        expected = expected_places(monitor, fault.step, calls)[fault.call]
        nearest = nearest_modules(monitor, expected, found)
        seen = {"op": found, "module": [what for what in found if what.kind != "state"]}
        for level in BARS:
            if level == "module":
                monitor, _ = observed(name, fault, "module")
            result = how_named(monitor, level, expected, nearest, bool(seen[level]))
            is_right = result in ("exact", "silent")
            tally[level, name, result if is_right else "missed"] += 1
            if not is_right:
                misses.append(
                    {"level": level, "program": name, "kind": kind, "step": fault.step}
                    | {**fault.call._asdict(), "module": expected.module, "result": result}
                )
    for miss in misses:
        print(miss)
    return report(tally, misses, options)


def report(tally: Any, misses: list[Any], options: argparse.Namespace) -> int:
    results = ("exact", "silent", "missed")
    heads = [f"{level}: {result}" for level in BARS for result in results]
    rows = [
        [name, *(str(tally[level, name, result]) for level in BARS for result in results)]
        for name in NAMES
    ]
    print(harness.table(["program", *heads], rows))
    shares = {}
    for level, bar in BARS.items():
        missed = sum(tally[level, name, "missed"] for name in NAMES)
        shares[level] = 1 - missed / options.faults
        print(f"{level} level: {shares[level]:.1%} exact or silent (bar {bar:.0%})")
    harness.write_results(
        "fault_injection",
        [
            {"level": level, "program": name, "result": result, "count": count}
            for (level, name, result), count in sorted(tally.items())
        ],
        faults=options.faults,
        seed=options.seed,
        shares=shares,
        misses=misses,
    )
    return 0 if all(shares[level] >= bar for level, bar in BARS.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
