"""Faults of a training step, each beside its fixed version: what prove() says of them.

    make accuracy SUITE="prove_faults [NAME ...]"
    writes bench/results/prove_faults.json

A fault is seen if a relation differs, and named if the first relation of the table that differs
names the module that has it. No relation of a fixed version may differ.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from typing import Any

import torch

import fastcheck
import harness
from accuracy.prove_loops import LOOPS
from accuracy.prove_programs import FAULTS, LOSS, REDUCTION, STEP, UPDATE, Fault
from accuracy.prove_ranks import RANK_FAULTS

#: The shares of faults that have to be seen, and whose module has to be named.
SEEN, NAMED = 0.95, 0.9


def proof_of(fault: Fault, is_faulty: bool) -> fastcheck.types.Proof:
    torch.manual_seed(0)
    program = fault.make(is_faulty)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reentrant checkpoints, softmax without dim=
        return fastcheck.prove(
            program.step,
            program.batch,
            model=program.model,
            optimizer=program.optimizer,
            relations=program.relations,
        )


def where(place: Any) -> str:
    """The module, or what stands for one in ``Fault.place``."""
    named = {"loss": LOSS, "step": STEP, "update": UPDATE, "reduction": REDUCTION}
    return named.get(place.kind, str(place.module))


def row_of(fault: Fault) -> dict[str, Any]:
    began = time.monotonic()
    found = [one for one in proof_of(fault, True).outcomes if one.state == "differs"]
    place = None if not found else found[0].first
    fixed = proof_of(fault, False).outcomes
    return {
        "fault": fault.name,
        "source": fault.source,
        "has_it": fault.place,
        "seen_by": [one.relation for one in found],
        "place": "" if place is None else str(place).split(" at /")[0],
        "is_named": place is not None and where(place) == fault.place,
        "accused": [f"{o.relation}: {o.first}" for o in fixed if o.state == "differs"],
        "failed": [f"{o.relation}: {o.note}" for o in fixed if o.state == "failed"],
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    faults = [
        f for f in (*FAULTS, *RANK_FAULTS, *LOOPS) if not options.names or f.name in options.names
    ]
    rows = []
    for fault in harness.few(faults):
        row = row_of(fault)
        rows.append(row)
        print(*row.values(), sep=" | ", flush=True)
    seen = sum(bool(row["seen_by"]) for row in rows)
    named = sum(row["is_named"] for row in rows)
    accused = sum(bool(row["accused"] or row["failed"]) for row in rows)
    print(f"{len(rows)} faults: {seen} seen, {named} named, {accused} fixed ones accused or failed")
    harness.write_results("prove_faults", rows, seen=seen, named=named, accused=accused)
    return int(seen < SEEN * len(rows) or named < NAMED * len(rows) or accused > 0)


if __name__ == "__main__":
    sys.exit(main())
