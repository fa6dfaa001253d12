"""Silent faults, each beside its fixed version, and healthy programs: what the watch says of them.

    make accuracy SUITE="invariants [--only faults|healthy] [NAME ...]"
    writes bench/results/invariants.json

A fault is seen if the text of a warning or an event has what it must have; a fixed version, and a
healthy program, must give no warning.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch

import fastcheck
import harness
from accuracy.invariants_healthy import HEALTHY
from accuracy.invariants_programs import FAULTS
from support.ranks import replicas_workers
from support.ranks.ranks_harness import run_ranks, values

#: The share of faults that has to be seen.
SEEN = 0.95
#: Faults of four gloo ranks: the name in replicas_workers.by_itself, the source, and the text.
RANK_FAULTS = (
    ("bypassed", "x-jxmnop-ddp, pytorch-104336, trl#7245", "gradients were not reduced"),
    ("clipped on one rank", "deepspeed-1801 (BLOOM)", "replicas differ at step 10.*clipping"),
    ("lost", "pytorch-84803, pytorch-96600, baichuan2-86", "replicas differ at step 10"),
    ("left out on one rank", "an update that one rank skips", "replicas differ at step 10"),
    ("another rate on one rank", "a configuration of one rank", "replicas differ at step 1"),
    ("added to on one rank", "SkyRL: a gradient after its reduction", "replicas differ at step 1"),
    ("a flipped bit", "hardware", "replicas differ at step 10"),
    ("loaded on one rank", "a checkpoint that one rank loads", "replicas differ at step 1"),
)


def texts_of(program: Iterator[Any]) -> tuple[list[str], list[str]]:
    """What warned, and the events that did not."""
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = next(program)
        models = model if isinstance(model, tuple) else (model,)
        monitor = fastcheck.install(*models, overflow_nums=-1)
        for _ in program:
            pass
        monitor.remove()
    own = [str(w.message) for w in caught if issubclass(w.category, fastcheck.FastcheckWarning)]
    return own, [str(event) for event in monitor.watch.events if not event.is_warning]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--only", choices=["faults", "healthy"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    faults = [f for f in FAULTS if not options.names or f.name in options.names]
    for fault in harness.few(faults) if options.only != "healthy" else ():
        warned, told = texts_of(fault.program(True))
        seen = [text for text in (*warned, *told) if re.search(fault.text, text)]
        accused, _ = texts_of(fault.program(False))
        by = "warning" if seen and seen[0] in warned else "event" if seen else "nothing"
        rows.append({"fault": fault.name, "source": fault.source, "seen_by": by,
                     "others": [text for text in warned if text not in seen],
                     "accused": accused})  # fmt: skip
        print(fault.name, by, accused, seen[:1] or (warned, told), sep=" | ", flush=True)
    ranks = [f for f in RANK_FAULTS if not options.names or f[0] in options.names]
    for name, source, text in harness.few(ranks) if options.only != "healthy" else ():
        warned = values(run_ranks(replicas_workers.by_itself, name))[0][1]
        seen = [one for one in warned if re.search(text, one, re.DOTALL)]
        by = "warning" if seen else "nothing"
        rows.append({"fault": name, "source": source, "seen_by": by, "accused": []})
        print(name, by, seen[:1] or warned, sep=" | ", flush=True)
    if ranks and options.only != "healthy":
        accused = values(run_ranks(replicas_workers.by_itself, "none"))[0][1]
        rows.append({"healthy": "ranks", "accused": accused, "events": []})
    healthy = [p for p in HEALTHY if not options.names or p.__name__ in options.names]
    for program in harness.few(healthy) if options.only != "faults" else ():
        warned, told = texts_of(program())
        rows.append({"healthy": program.__name__, "accused": warned, "events": told})
        print(program.__name__, warned, told, sep=" | ", flush=True)
    seen_count = sum(row.get("seen_by", "nothing") != "nothing" for row in rows)
    accused_count = sum(bool(row["accused"]) for row in rows)
    count = sum("fault" in row for row in rows)
    print(f"seen {seen_count} of {count} faults, accused {accused_count} of {len(rows)}")
    harness.write_results("invariants", rows)
    return int(seen_count < SEEN * count or accused_count > 0)


if __name__ == "__main__":
    sys.exit(main())
