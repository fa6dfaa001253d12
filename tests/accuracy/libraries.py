"""Trains models of public libraries with fastcheck and without: losses have to be the same to the
bit, no event may be counted, and what is warned of has to be so.

    make accuracy SUITE="libraries [--steps N] [--level LEVEL] [--only TEXT]"

Writes bench/results/libraries.json. A model whose library isn't installed is left out, and said to
be. Where two runs without fastcheck differ from each other, losses are not compared. The exit
status is 1 if a loss differs, an event was counted, or anything was warned of that is not in
library_models.TRUE_WARNINGS.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re
import sys
from typing import Any, Optional

import torch

import fastcheck
import harness
from accuracy.library_models import MODELS, TRUE_WARNINGS, Make
from support.warned import warned


def train(make: Make, steps: int, level: Optional[str]) -> tuple[list[float], int, list[str]]:
    """The losses, the number of counted events, and the warnings. ``level``: None: without
    fastcheck.
    """
    torch.manual_seed(0)
    trained, counted = make(), 0
    with warned() as texts:
        observed: Any = contextlib.nullcontext()
        if level is not None:
            observed = fastcheck.install(trained.model, level=level, overflow_nums=-1)
        with observed as monitor:
            losses = [trained.step(i) for i in range(steps)]
            counted = 0 if monitor is None else monitor.event_count
    return losses, counted, texts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--level", choices=("module", "op"), default="module")
    parser.add_argument("--only", default="", help="those whose name has this text")
    options = parser.parse_args()
    rows, faults, missing = [], [], []
    for name, make in MODELS.items():
        if options.only not in name:
            continue
        try:
            plain, _, _ = train(make, options.steps, None)
        except ImportError as error:
            missing.append(f"{name}: {error}")
            continue
        again, _, _ = train(make, options.steps, None)
        losses, counted, texts = train(make, options.steps, options.level)
        expected = TRUE_WARNINGS.get(name)
        wrong = [text for text in texts if expected is None or not re.match(expected, text)]
        if plain == again != losses:
            wrong.append("the losses differ from those without fastcheck")
        if counted:
            wrong.append(f"{counted} events were counted")
        faults += [f"{name}: {text}" for text in wrong]
        rows.append(
            {"model": name, "level": options.level, "is_repeatable": plain == again}
            | {"is_same": plain == losses, "counted": counted, "warnings": texts}
        )
        print(f"{name:48} {'wrong' if wrong else 'as expected'}", flush=True)
    for text in (*missing, *faults):
        print(text)
    told = sum(bool(row["warnings"]) for row in rows)
    print(
        f"{len(rows)} models, {len(missing)} left out: {told} are warned of, {len(faults)} wrong "
        f"events, warnings and losses"
    )
    libraries = {row["model"].partition(":")[0] for row in rows}
    versions = {name: importlib.import_module(name).__version__ for name in sorted(libraries)}
    harness.write_results(
        "libraries", rows, steps=options.steps, level=options.level, versions=versions
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
