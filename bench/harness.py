"""Shared by all benches: interleaved timing, median and spread, the machine, JSON and Markdown.

Cases of one run are timed in rounds: each round runs every case once, in an order that rotates, so
that a change of the machine's speed affects all of them. A ratio is the median of the ratios within
a round, not the ratio of medians.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))  # the fake accelerator, and helpers of the tests

#: A run of one round with small inputs, which shows that all of a bench works and measures nothing
#: (``run.py --smoke``). What it writes is not kept with the results.
IS_SMOKE = os.environ.get("FASTCHECK_BENCH_SMOKE") == "1"
_DEFAULT = Path(tempfile.gettempdir(), "fastcheck-smoke") if IS_SMOKE else ROOT / "bench/results"
RESULTS = Path(os.environ.get("FASTCHECK_BENCH_RESULTS", _DEFAULT))

Case = Callable[[int], object]  # called with the round's number, to pick its input by


def size(whole: Any, smoke: Any) -> Any:
    """``whole``; ``smoke`` in a smoke run."""
    return smoke if IS_SMOKE else whole


def few(items: Iterable[Any]) -> list[Any]:
    """All of them; the first alone in a smoke run."""
    return list(items)[: 1 if IS_SMOKE else None]


def time_rounds(
    cases: Mapping[str, Case],
    rounds: int,
    *,
    warmup: int = 1,
    pause_seconds: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, np.ndarray]:
    """Seconds of each case in each round, by ``clock``.

    ``pause_seconds`` before each case: OpenMP's threads spin for some milliseconds after the work
    of one case, on a core that the next case needs.
    """
    rounds, warmup = size((rounds, warmup), (1, 0))
    names = list(cases)
    seconds = {name: np.empty(rounds) for name in names}
    for index in range(warmup + rounds):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            case = cases[name]
            if pause_seconds > 0:
                time.sleep(pause_seconds)
            start = clock()
            case(index)
            if index >= warmup:
                seconds[name][index - warmup] = clock() - start
    return seconds


def output_of(*arguments: object, python: str = sys.executable, cwd: Optional[Path] = None) -> str:
    """What ``python *arguments`` prints, a process of its own: in a smoke run one that is forked
    from a process with torch imported, which takes longer than most benches in small.
    """
    words = [str(argument) for argument in arguments]
    if IS_SMOKE:
        from support.processes import run_python

        done = run_python(*words, cwd=cwd)
    else:
        command = [python, "-W", "ignore", *words]
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def spread(values: np.ndarray) -> dict[str, float]:
    """Median, and the range that holds the middle 80% of the values."""
    low, median, high = np.percentile(values, [10, 50, 90])
    return {"median": float(median), "p10": float(low), "p90": float(high)}


def ratio(numerator: np.ndarray, denominator: np.ndarray) -> dict[str, float]:
    """The spread of the ratios within each round."""
    return spread(numerator / denominator)


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:  # a machine without git
        return ""
    return done.stdout.strip()


def _cpu_model() -> str:
    """The name, and the family and model, which tell generations of one name apart."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    pairs = (line.partition(":")[::2] for line in lines)
    found = {key.strip(): value.strip() for key, value in pairs}
    if "model name" not in found:
        return platform.processor() or platform.machine()
    return f"{found['model name']} (family {found.get('cpu family')}, model {found.get('model')})"


def machine() -> dict[str, Any]:
    """What a figure depends on: processor, memory, commit and versions."""
    import fastcheck
    from fastcheck import _kernels

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": _cpu_model(),
        "cores": cores,
        "isa": _kernels.cpu_isa(),
        "load_at_start": round(os.getloadavg()[0], 2),
        "commit": _git("rev-parse", "--short=12", "HEAD") or "none",
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", "csrc", "python")),
        "fastcheck": fastcheck.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "compiler": _kernels.compiler(),
        "system": f"{platform.system()} {platform.release()}",
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def write_results(bench: str, rows: Sequence[dict[str, Any]], **extra: Any) -> Path:
    """Writes ``bench/results/<bench>.json``: the machine, then one row per case."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{bench}.json"
    content = {"bench": bench, "machine": machine(), **extra, "rows": list(rows)}
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    return path


def bar(
    what: str,
    value: float,
    *,
    at_least: Optional[float] = None,
    at_most: Optional[float] = None,
) -> dict[str, Any]:
    """A figure and its limit, for print_bars() and the JSON."""
    is_met = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
    return {
        "what": what,
        "value": value,
        "at_least": at_least,
        "at_most": at_most,
        "is_met": is_met,
    }


def print_bars(bars: Sequence[dict[str, Any]]) -> None:
    """Met or missed, one line each; missed bars first."""
    for each in sorted(bars, key=lambda each: each["is_met"]):
        limits = [
            f"{sign} {each[key]:g}"
            for sign, key in ((">=", "at_least"), ("<=", "at_most"))
            if each[key] is not None
        ]
        verdict = "met   " if each["is_met"] else "MISSED"
        print(f"{verdict} {each['what']}: {each['value']:.4g} ({' and '.join(limits)})")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def with_spread(values: dict[str, float], digits: int = 2) -> str:
    """``median (p10-p90)``."""
    return f"{values['median']:.{digits}f} ({values['p10']:.{digits}f}-{values['p90']:.{digits}f})"


def threads_to_try() -> list[int]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    return few([1, 2] if cores >= 2 else [1])
