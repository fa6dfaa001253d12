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

import accuracy.invariants_examples  # noqa: F401  # adds to HEALTHY
import fastcheck
import harness
from accuracy.invariants_healthy import HEALTHY
from accuracy.invariants_loops import LOOPS
from accuracy.invariants_objectives import OBJECTIVES
from accuracy.invariants_programs import FAULTS
from accuracy.invariants_reports import REPORTS
from accuracy.invariants_threads import THREADS
from support.ranks import replicas_workers
from support.ranks.ranks_harness import run_ranks, values

#: The share of faults that has to be seen.
SEEN = 0.95
#: Faults of four gloo ranks: the layout of the model and the name in replicas_workers, the source,
#: and the text.
RANK_FAULTS = (
    ("ddp", "bypassed", "x-jxmnop-ddp, pytorch-104336, sd-scripts#924", "were not reduced"),
    ("ddp", "bypassed by a method", "openvla-oft#160, icefall#226", "were not reduced"),
    ("ddp", "synchronised too late", "build-nanogpt#30", "replicas differ at step 1.*reduction"),
    ("ddp", "clipped on one rank", "deepspeed-1801", "replicas differ at step 10.*clipping"),
    ("ddp", "lost", "pytorch-84803, pytorch-96600, baichuan2-86", "replicas differ at step 10"),
    ("ddp", "left out on one rank", "an update that one rank skips", "replicas differ at step 10"),
    ("ddp", "another rate on one rank", "a configuration of a rank", "replicas differ at step 1"),
    ("ddp", "added to on one rank", "SkyRL: after the reduction", "replicas differ at step 1"),
    ("ddp", "a flipped bit", "hardware", "replicas differ at step 10"),
    ("ddp", "loaded on one rank", "a checkpoint that a rank loads", "replicas differ at step 1"),
    ("ddp", "reduced twice", "all_reduce() after DDP", "multiplied by 4 .*all_reduce"),
    ("ddp", "divided twice", "averaging by hand after DDP", "multiplied by 1/4 .*division"),
    ("ddp", "one batch for all", "no DistributedSampler", "trained on the same batch"),
    ("fsdp", "one batch for all", "no DistributedSampler", "trained on the same batch"),
    ("hsdp", "a flipped bit", "hardware", "replicas differ at step 10: up.weight"),
    ("tensor parallel", "clipped on one rank", "BLOOM-176B",
     "replicas differ at step 10: norm.weight.*dimension tp.*clipping"),
    ("megatron", "clipped on one rank", "BLOOM-176B",
     "replicas differ at step 10: norm.weight.*tensor parallel group.*clipping"),
)  # fmt: skip
LAYOUTS = ("ddp", "fsdp", "hsdp", "tensor parallel", "megatron")


def texts_of_ranks(layout: str, fault: str) -> tuple[list[str], list[str]]:
    """What warned on the second rank, and the events that did not."""
    if layout == "ddp":
        _, warned, told = values(run_ranks(replicas_workers.by_itself, fault))[1]
    else:
        _, warned, told = values(run_ranks(replicas_workers.laid_out, layout, fault))[1]
    return warned, told


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
    known = (*FAULTS, *THREADS, *LOOPS, *REPORTS, *OBJECTIVES)
    faults = [f for f in known if not options.names or f.name in options.names]
    for fault in harness.few(faults) if options.only != "healthy" else ():
        warned, told = texts_of(fault.program(True))
        seen = [text for text in (*warned, *told) if re.search(fault.text, text)]
        accused, _ = texts_of(fault.program(False))
        by = "warning" if seen and seen[0] in warned else "event" if seen else "nothing"
        rows.append({"fault": fault.name, "source": fault.source, "seen_by": by,
                     "others": [text for text in warned if text not in seen],
                     "accused": accused})  # fmt: skip
        print(fault.name, by, accused, seen[:1] or (warned, told), sep=" | ", flush=True)
    ranks = [f for f in RANK_FAULTS if not options.names or f[1] in options.names]
    for layout, name, source, text in harness.few(ranks) if options.only != "healthy" else ():
        warned, told = texts_of_ranks(layout, name)
        seen = [one for one in (*warned, *told) if re.search(text, one, re.DOTALL)]
        by = "warning" if seen and seen[0] in warned else "event" if seen else "nothing"
        others = [one for one in warned if one not in seen]
        rows.append({"fault": f"{layout}: {name}", "source": source, "seen_by": by,
                     "others": others, "accused": []})  # fmt: skip
        print(layout, name, by, seen[:1] or (warned, told), sep=" | ", flush=True)
    for layout in harness.few(LAYOUTS) if options.only != "faults" and not options.names else ():
        accused, told = texts_of_ranks(layout, "none")
        rows.append({"healthy": f"{layout} on four ranks", "accused": accused, "events": told})
        print(layout, accused, told, sep=" | ", flush=True)
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
