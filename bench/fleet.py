"""fastcheck fleet over synthetic fleets: time and memory of one large one, and 200 small ones.

    python bench/fleet.py faults                       100 fleets with a fault, 100 healthy ones
    python bench/fleet.py large --directory DIR        10,000 ranks x 1,000 sites x 100 steps
    python bench/fleet.py collector                    the command's share of a core, and 50 kills

``large`` writes 12 GB first, unless the directory has them; --ranks, --sites and --steps make it
smaller. Each part adds its result to bench/results/fleet.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from fastcheck.fleet.collector import Collector
from fastcheck.fleet.engines import DuckEngine
from fastcheck.fleet.judgement import examine
from fastcheck.fleet.manifest import counted_files
from fastcheck.fleet.schema import need
from fastcheck.fleet.store import Folder
from fastcheck.record.format import RECORD_BYTES
from fleet_synthetic import FAULTS, NOISE, Shape, choose_fault, write_fleet
from harness import RESULTS, machine, output_of, size
from synthetic_log import write_log

_SMALL = size(Shape(64, 100, 50, shards=4), Shape(8, 20, 20, shards=2))


def _examined(folder: Folder, threads: int | None = None) -> Any:
    engine = DuckEngine(folder, "synthetic", threads=threads)
    try:
        return examine(engine, "synthetic", "duckdb")
    finally:
        engine.close()


def faults(count: int) -> dict[str, Any]:
    """``count`` fleets with one fault each, kinds in turn, and as many healthy ones."""
    found: Counter[str] = Counter()
    missed: list[dict[str, Any]] = []
    accused: list[dict[str, Any]] = []
    for number in range(2 * count):
        kind = FAULTS[number % len(FAULTS)] if number < count else "healthy"
        seed = 1000 + number
        planted = [] if kind == "healthy" else [choose_fault(_SMALL, kind, seed)]
        with tempfile.TemporaryDirectory() as place:
            folder = Folder(place)
            write_fleet(folder, _SMALL, planted, seed)
            report = _examined(folder, threads=1)
        expected = planted[0].ranks if planted else ()
        is_right = report.accused == expected
        found[kind] += is_right
        if not is_right:
            case = {"kind": kind, "seed": seed, "expected": expected, "accused": report.accused}
            (missed if planted else accused).append(case)
        print(number, kind, "right" if is_right else f"WRONG {report.accused}", flush=True)
    return {
        "shape": vars(_SMALL),
        "noise_log2": NOISE,
        "fleets_with_a_fault": count,
        "right_ranks": sum(found[kind] for kind in FAULTS),
        "right_by_kind": dict(found),
        "missed": missed,
        "healthy_fleets": count,
        "healthy_accused": accused,
    }


def large(place: Path, shape: Shape) -> dict[str, Any]:
    """Time and peak memory of the questions, in a process of its own."""
    folder = Folder(place)
    planted = [choose_fault(shape, kind, 2) for kind in ("bitflip", "scale")]
    if not (place / "run=synthetic").exists():
        write_fleet(folder, shape, planted, 2)
    stored = sum(folder.files("run=synthetic").values())
    code = f"import fleet; fleet._ask_and_print({str(place)!r})"
    told = output_of("-c", code, cwd=Path(__file__).parent)
    made: dict[str, Any] = json.loads(told.splitlines()[-1])
    rows = shape.ranks * shape.sites * shape.steps
    return {
        "shape": vars(shape),
        "rows": rows,
        "bytes": stored,
        "bytes_a_row": stored / rows,
        "planted": [{"kind": one.kind, "ranks": one.ranks, "step": one.step} for one in planted],
        **made,
    }


def _ask_and_print(place: str) -> None:
    seconds: dict[str, float] = defaultdict(float)

    class Timed(DuckEngine):
        def make(self, name: str, select: str, is_more: bool = False) -> None:
            start = time.perf_counter()
            super().make(name, select, is_more)
            seconds[name] += time.perf_counter() - start

    start, cpu = time.perf_counter(), time.process_time()
    engine = Timed(Folder(place), "synthetic", threads=2)
    report = examine(engine, "synthetic", "duckdb")
    engine.close()
    made = {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "seconds_by_table": {name: round(value, 2) for name, value in seconds.items()},
        "accused": report.accused,
        "duckdb": need("duckdb").__version__,
        "load_average": os.getloadavg()[0],
    }
    print(json.dumps(made))


def collector(kills: int) -> dict[str, Any]:
    """Rows a second of a core; what the command takes beside a training; and 50 kills of it."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        for rank in range(8):
            write_log(str(place / "log"), size(1000, 20), size(100, 10), rank)
        start = time.process_time()
        done = Collector(str(place / "log"), Folder(place / "out"), "r", "n").take()
        seconds = time.process_time() - start
    result: dict[str, Any] = {
        "rows": done.rows,
        "cpu_seconds": seconds,
        "rows_a_cpu_second": done.rows / seconds,
        "bytes_a_row": done.bytes / done.rows,
        "follow": _followed(),
    }
    result["kills"] = _killed(kills)
    return result


def _command(log: Path, out: Path, *options: str) -> list[str]:
    words = ["collect", str(log), "--out", str(out), "--run", "r", "--node", "n", *options]
    return [sys.executable, "-m", "fastcheck", *words]


class _Growing:
    """A log that is written again, step by step, from a whole one."""

    def __init__(self, whole: Path, log: Path, records_a_step: int) -> None:
        log.mkdir()
        self._bytes_a_step = records_a_step * RECORD_BYTES
        self._parts: dict[str, list[Path]] = defaultdict(list)
        for path in sorted(whole.iterdir()):
            if path.name.startswith("records"):
                self._parts[path.name.rpartition("-")[0]].append(path)
            else:
                shutil.copy(path, log)
        self._at = dict.fromkeys(self._parts, (0, 0))
        self._log = log

    def grow(self, share: float = 1.0) -> None:
        """Adds so much of a step to the log of each rank."""
        for rank, parts in self._parts.items():
            part, offset = self._at[rank]
            if part == len(parts):
                continue
            with open(parts[part], "rb") as file:
                file.seek(offset)
                data = file.read(int(self._bytes_a_step * share))
            with open(self._log / parts[part].name, "ab") as file:
                file.write(data)
            is_over = offset + len(data) == parts[part].stat().st_size
            self._at[rank] = (part + 1, 0) if is_over else (part, offset + len(data))

    def is_whole(self) -> bool:
        return all(part == len(self._parts[rank]) for rank, (part, _) in self._at.items())


def _followed(ranks: int = 8, sites: int = 1000, steps: int = size(600, 10)) -> dict[str, Any]:
    """Processor time of ``fastcheck collect --follow``, its start included, for a training with a
    step of 5 s and a look at the log each 10 s. Steps and looks come a hundred times as fast here.
    """
    fast, step_seconds, interval_seconds = 100, 5.0, 10.0
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        for rank in range(ranks):
            write_log(str(place / "whole"), sites, steps, rank)
        growing = _Growing(place / "whole", place / "log", sites)
        growing.grow()
        command = _command(
            place / "log", place / "out", "--follow", "--interval", str(interval_seconds / fast)
        )
        start = time.monotonic()
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        for step in range(1, steps):
            time.sleep(max(start + step * step_seconds / fast - time.monotonic(), 0))
            growing.grow()
        wall = time.monotonic() - start
        while not any((place / "out").rglob("*.parquet")) and child.poll() is None:
            time.sleep(0.1)  # a run shorter than the command's start
        child.send_signal(signal.SIGTERM)
        _, status, usage = os.wait4(child.pid, 0)
        assert status == 0 and growing.is_whole()
        rows, distinct, _, _ = _rows_of(place / "out")
        assert rows == distinct == ranks * sites * steps
    cpu = usage.ru_utime + usage.ru_stime
    return {
        "ranks": ranks,
        "sites": sites,
        "steps": steps,
        "step_seconds": step_seconds,
        "interval_seconds": interval_seconds,
        "times_as_fast": fast,
        "wall_seconds": wall,
        "cpu_seconds": cpu,
        "share_of_a_core": cpu / (steps * step_seconds),
        "peak_rss_bytes": usage.ru_maxrss * 1024,
    }


def _killed(kills: int) -> dict[str, Any]:
    """Kills ``fastcheck collect --follow`` at random moments while the log grows, and counts the
    rows.
    """
    rng = random.Random(7)
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        write_log(str(place / "whole"), 400, 280 * kills, 0)
        growing = _Growing(place / "whole", place / "log", 400)
        growing.grow()
        options = "--steps-per-file", "20"
        follow = _command(place / "log", place / "out", *options, "--follow", "--interval", "0.01")
        with_output = 0
        for _ in range(kills):
            child = subprocess.Popen(follow, stdout=subprocess.PIPE)
            assert child.stdout is not None
            os.set_blocking(child.stdout.fileno(), False)
            # It takes about 2 s to start. A file is of 20 steps, and there are some 100 a second.
            until = time.monotonic() + rng.uniform(1.5, 3.5)
            while time.monotonic() < until:
                growing.grow(4 * rng.random())
                time.sleep(0.02)
            child.send_signal(signal.SIGKILL)
            child.wait()
            with_output += bool(child.stdout.read())
        while not growing.is_whole():
            growing.grow()
        subprocess.run(_command(place / "log", place / "out", *options), check=True)
        rows, distinct, files, counted = _rows_of(place / "out")
        return {
            "kills": kills,
            "that_had_written_a_file": with_output,
            "records": 400 * 280 * kills,
            "rows": rows,
            "distinct_rows": distinct,
            "files": files,
            "files_that_count": counted,
        }


def _rows_of(out: Path) -> tuple[int, int, int, int]:
    """Rows that count, how many of them are distinct; files, and those that count."""
    folder, parquet = Folder(out), need("pyarrow.parquet")
    keys, counted = [], counted_files(folder, "r")
    for path in counted:
        table = parquet.read_table(folder.open(f"run=r/{path}"))
        columns = [table[name].to_numpy() for name in ("step", "site", "rank", "call")]
        keys.append(np.rec.fromarrays(columns))
    rows = np.concatenate(keys)
    written = len([path for path in folder.files("run=r") if "step=" in path])
    return len(rows), len(np.unique(rows)), written, len(counted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("faults", "large", "collector"))
    parser.add_argument("--count", type=int, default=size(100, len(FAULTS)))
    parser.add_argument("--kills", type=int, default=size(50, 1))
    parser.add_argument("--directory", type=Path)
    shape = size(Shape(10_000, 1000, 100, shards=80), _SMALL)
    for name in ("ranks", "sites", "steps", "shards"):
        parser.add_argument(f"--{name}", type=int, default=getattr(shape, name))
    options = parser.parse_args()
    if options.part == "faults":
        made = faults(options.count)
    elif options.part == "collector":
        made = collector(options.kills)
    else:
        shape = Shape(options.ranks, options.sites, options.steps, options.shards)
        with tempfile.TemporaryDirectory() as scratch:
            made = large(options.directory or Path(scratch), shape)
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / "fleet.json"
    known = json.loads(path.read_text()) if path.exists() else {"bench": "fleet"}
    known[options.part] = {**made, "machine": machine()}
    path.write_text(json.dumps(known, indent=1) + "\n")
    print(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
