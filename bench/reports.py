"""Programs in the manner of public bug reports: does the text that a user reads hold the answer?

    python bench/reports.py [NAME ...] [--show] [--level default|op] [--device cpu|fake|cuda]

writes bench/results/reports.json, or reports_<device>.json. ``report_programs/`` holds the
programs. Each runs with default options (``overflow_nums=1``) and at op level, in one process, with
its models and tensors on the device. ``fake`` is the fake accelerator of the tests, whose tensors
fastcheck's CUDA kernels read, and where a stop comes steps later as on a GPU; a program that can't
run there is counted apart. An answer names the place, the operator or the line, and the kind of
fault, in the exception or in a warning of fastcheck, and says nothing that is false there; "no
weight has been updated" is held to the weights. Whether one of the first two items to try is the
remedy is counted too. The fixed version of each has to run without a word at both levels, watched.
That the faulty version is faulty and the fixed one is not is checked first, without fastcheck. Exit
status 1 below the bars.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import fastcheck
import harness
from fastcheck.utils.torch.own_operators import unobserved
from report_programs import PROGRAMS, Program

BARS = {"default": 0.85, "op": 0.95}
#: On a device, where some of what a stop would name is gone.
BARS_ON_DEVICE = {"default": 0.8, "op": 0.95}
LEVELS: dict[str, dict[str, Any]] = {"default": {}, "op": {"level": "op"}}
#: Iterations of a fixed version on the CPU: as many as the watch needs for a past. On a device,
#: where each takes longer, it runs as many as the faulty one.
FIXED_STEPS = harness.size(40, 8)


class Ran(NamedTuple):
    """``text``: of the exception and of fastcheck's warnings. ``is_false``: a statement about
    the weights that is not so.
    """

    text: str
    is_finite: bool
    is_false: bool = False


def is_on_cpu() -> bool:
    return torch.get_default_device().type == "cpu"


def make(program: Program, fixed: bool) -> Any:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return program.make(fixed)


def run_bare(program: Program, fixed: bool) -> bool:
    """Whether the losses, weights and buffers stay finite without fastcheck."""
    modules, step = make(program, fixed)
    for i in range(program.steps):
        try:
            loss = step(i)
        except torch.linalg.LinAlgError:  # weights that are NaN already
            return False
        if loss is not None and not torch.isfinite(loss).all():
            return False
    held = [t for m in modules for t in (*m.parameters(), *m.buffers())]
    grads = [p.grad for m in modules for p in m.parameters() if p.grad is not None]
    return all(bool(torch.isfinite(t.to_dense()).all()) for t in (*held, *grads))


def run(program: Program, fixed: bool, options: dict[str, Any]) -> Ran:
    modules, step = make(program, fixed)
    weights: list[list[Tensor]] = []
    updates: list[int] = []
    counting = register_optimizer_step_post_hook(lambda *_: updates.append(len(weights)))
    stop: Optional[fastcheck.OverflowDetected] = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor = fastcheck.install(*modules, overflow_nums=1, **options)
        try:
            for i in range(FIXED_STEPS if fixed and is_on_cpu() else program.steps):
                weights.append(copies(modules))
                step(i)
            monitor.flush()
        except fastcheck.OverflowDetected as error:
            stop = error
        except torch.linalg.LinAlgError:
            pass
        finally:
            monitor.remove()
            counting.remove()
    weights.append(copies(modules))
    said = [str(one.message) for one in caught if "fastcheck" in one.category.__module__]
    text = "\n\n".join([*([str(stop)] if stop is not None else []), *said])
    has_updated = stop is not None and stop.step + 1 in updates
    return Ran(text, stop is None, stop is not None and has_updated and is_false(stop, weights))


def copies(modules: Sequence[nn.Module]) -> list[Tensor]:
    """The weights, copied where they are: the host waits for no device."""
    with unobserved():
        return [p.detach().reshape(-1).clone() for m in modules for p in m.parameters()]


def is_false(stop: fastcheck.OverflowDetected, weights: list[list[Tensor]]) -> bool:
    """Whether the stop says that its step has updated no weight, and an optimizer has."""
    if "No optimizer has updated a weight in this step" not in flat(str(stop)):
        return False
    if stop.step + 1 >= len(weights):
        return False
    pairs = zip(weights[stop.step], weights[stop.step + 1])
    return not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def flat(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def parts(text: str) -> tuple[str, list[str]]:
    """The text without the items to try, and these, by the layout of the report."""
    before, found, after = text.partition("\ntry ")
    if not found:
        return flat(text), []
    tried, _, rest = after.partition("\nlog ")
    items = re.split(r"(?m)^\s+(?=\d\. )", " " * 6 + tried.lstrip())
    return flat(before + rest), [flat(item) for item in items if item.strip()]


def with_operators(text: str) -> str:
    """The text with the operator beside each node: ``SqrtBackward0 (sqrt)``."""
    return re.sub(r"\b([A-Z][a-z0-9]+)Backward\d\b", lambda m: f"{m[0]} ({m[1].lower()})", text)


def judge(program: Program, ran: Ran) -> dict[str, bool]:
    text, items = parts(ran.text)
    # Where a branch or a loop leaves it open, each line is named.
    open_lines = r"(report_programs/\w+\.py:)((?:\d+ or )+)(?=\d)"
    text = re.sub(open_lines, lambda m: m[1] + m[2].replace(" or ", f" or {m[1]}"), text)
    at_line = any(re.search(rf"report_programs/{line}\b", text) for line in program.lines)
    found = {
        "place": at_line or re.search(program.place, text) is not None,
        "operator": at_line or re.search(program.operator, with_operators(text)) is not None,
        # A list of all that may go wrong names no kind: what is said, and the first thing to try.
        "kind": re.search(program.kind, " ".join([text, *items[:1]])) is not None,
        "true": not ran.is_false
        and not any(re.search(one, flat(ran.text)) for one in program.never),
    }
    found["answered"] = bool(text) and all(found.values())
    found["line"] = at_line
    near = " ".join(items[:2] if items else [text])
    found["remedy"] = re.search(program.advice, near) is not None
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--show", action="store_true", help="print the texts")
    parser.add_argument("--level", choices=list(LEVELS), help="this one only")
    parser.add_argument("--device", default="cpu", help="of models and tensors")
    options = parser.parse_args()
    unknown = set(options.names) - {program.name for program in PROGRAMS}
    if unknown:
        parser.error(f"no programs {', '.join(sorted(unknown))}")
    chosen = [p for p in PROGRAMS if not options.names or p.name in options.names]
    levels = {n: o for n, o in LEVELS.items() if options.level in (None, n)}
    torch.set_num_threads(1)
    if options.device == "fake":
        from fakes import cuda_on_fake, fake_device

        fake_device.load()
        if not harness.IS_SMOKE:  # its kernels are compiled for a minute
            cuda_on_fake.use()
    if options.device != "cpu":
        torch.set_default_device(options.device)
    begun, here = time.monotonic(), os.getcwd()
    with tempfile.TemporaryDirectory() as scratch:  # logs of the stops
        os.chdir(scratch)
        try:
            all_rows = [row(program, levels, options.show) for program in harness.few(chosen)]
        finally:
            os.chdir(here)
    seconds = time.monotonic() - begun
    rows = [one for one in all_rows if "not_run" not in one]
    print(harness.table(["program", *levels, "fixed"], [cells(one, levels) for one in rows]))
    bars = []
    for level in levels:
        answered = sum(one[level]["answered"] for one in rows) / len(rows)
        least = (BARS if is_on_cpu() else BARS_ON_DEVICE)[level]
        bars.append(harness.bar(f"answered, {level}", answered, at_least=least))
        remedies = sum(one[level]["remedy"] for one in rows)
        lines = sum(one[level]["line"] for one in rows)
        print(f"{level}: remedy in the first two items {remedies}, line {lines} of {len(rows)}")
    loud = sum(len(one["loud"]) for one in rows)
    bars.append(harness.bar("fixed versions that were not silent", loud, at_most=0))
    wrong = sum(not one["is_faulty"] or not one["is_mended"] for one in rows)
    bars.append(harness.bar("programs that are not what they say", wrong, at_most=0))
    for one in all_rows:
        if "not_run" in one:
            print(f"{one['program']} can't run on {options.device}: {one['not_run']}")
    print(f"{len(rows)} programs, {seconds:.0f} s")
    harness.print_bars(bars)
    if not options.names and options.level is None:
        name = "reports" if options.device == "cpu" else f"reports_{options.device}"
        harness.write_results(name, all_rows, bars=bars, seconds=round(seconds, 1))
    return 0 if harness.IS_SMOKE or all(bar["is_met"] for bar in bars) else 1


def row(program: Program, levels: dict[str, dict[str, Any]], show: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"program": program.name, "source": program.source}
    found["cause"], begun = program.cause, time.monotonic()
    try:
        found["is_faulty"] = run_bare(program, fixed=False) == program.is_finite
        found["is_mended"] = run_bare(program, fixed=True)
    except Exception as error:
        if is_on_cpu():
            raise
        found["not_run"] = f"{type(error).__name__}: {error}".partition("\n")[0]
        return found
    found["loud"] = []
    for level, options in levels.items():
        ran = run(program, False, options)
        found[level] = judge(program, ran)
        mended = run(program, True, {**options, "watch": True})
        if mended.text:
            found["loud"].append(level)
        if show:
            print(f"=== {program.name}, {level}: {program.cause}\n{ran.text}\n{found[level]}\n")
            print(f"--- fixed:\n{mended.text}\n" if mended.text else "")
    found["seconds"] = round(time.monotonic() - begun, 2)
    return found


def cells(found: dict[str, Any], levels: dict[str, dict[str, Any]]) -> list[str]:
    texts = []
    for level in levels:
        needed = ("place", "operator", "kind", "true")
        missing = [need for need in needed if not found[level][need]]
        said = "answered" if not missing else f"no {', '.join(missing)}"
        texts.append(said + ("" if found[level]["remedy"] else " (remedy is not first)"))
    last = "silent" if not found["loud"] else f"loud: {', '.join(found['loud'])}"
    if not found["is_faulty"] or not found["is_mended"]:
        last += ", not what it says"
    return [found["program"], *texts, last]


if __name__ == "__main__":
    sys.exit(main())
