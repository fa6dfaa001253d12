"""fastcheck fleet over synthetic fleets: time and memory of one large one, and 200 small ones.

    python bench/fleet.py faults                       100 fleets with a fault, 100 healthy ones
    python bench/fleet.py large --directory DIR        10,000 ranks x 1,000 sites x 100 steps
    python bench/fleet.py collector                    rows a second, and 50 kills with SIGKILL

``large`` writes 12 GB first, unless the directory has them; --ranks, --sites and --steps make it
smaller. Each part adds its result to bench/results/fleet.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
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
from fleet_synthetic import FAULTS, NOISE, Shape, choose_fault, write_fleet
from harness import RESULTS, machine
from synthetic_log import write_log

_SMALL = Shape(ranks=64, sites=100, steps=50, shards=4)


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
    size = sum(folder.files("run=synthetic").values())
    code = f"import fleet; fleet._ask_and_print({str(place)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=True,
    )
    made: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    rows = shape.ranks * shape.sites * shape.steps
    return {
        "shape": vars(shape),
        "rows": rows,
        "bytes": size,
        "bytes_a_row": size / rows,
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
    """Rows a second of a core; then a collector that follows a growing log and is killed."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        for rank in range(8):
            write_log(str(place / "log"), 1000, 100, rank)
        start = time.process_time()
        done = Collector(str(place / "log"), Folder(place / "out"), "r", "n").take()
        seconds = time.process_time() - start
        start = time.process_time()
        idle = Collector(str(place / "log"), Folder(place / "out"), "r", "n")
        idle.take(is_final=False)
        before = time.process_time()
        for _ in range(20):
            idle.take(is_final=False)
        poll = (time.process_time() - before) / 20
        result: dict[str, Any] = {
            "rows": done.rows,
            "cpu_seconds": seconds,
            "rows_a_cpu_second": done.rows / seconds,
            "bytes_a_row": done.bytes / done.rows,
            "cpu_seconds_of_a_poll": poll,
            # Eight ranks of 1,000 sites, a step of 5 s, read every 10 s.
            "share_of_a_core": 8 * 1000 / 5 / (done.rows / seconds) + poll / 10,
        }
    result["kills"] = _killed(kills)
    return result


def _killed(kills: int) -> dict[str, Any]:
    """Kills ``fastcheck collect`` at random moments while the log grows, and counts the rows."""
    rng = random.Random(7)
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        write_log(str(place / "whole"), 400, 600, 0)
        (place / "log").mkdir()
        for path in (place / "whole").iterdir():
            if not path.name.startswith("records"):
                (place / "log" / path.name).write_bytes(path.read_bytes())
        (segment,) = sorted((place / "whole").glob("records*"))
        data = segment.read_bytes()
        records = len(data) // 192
        code = (
            "from fastcheck.fleet.collector import Collector\n"
            "from fastcheck.fleet.store import Folder\n"
            f"one = Collector({str(place / 'log')!r}, Folder({str(place / 'out')!r}), 'r', 'n', "
            "steps_per_file=20)\nprint('ready', flush=True)\nwhile True: one.take()\n"
        )
        at, done = 0, 0
        with open(place / "log" / segment.name, "ab") as log:
            while done < kills:
                child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
                assert child.stdout is not None
                child.stdout.readline()
                end = records * 192 * (done + 1) // kills
                until = time.monotonic() + rng.uniform(0.02, 0.4)
                while time.monotonic() < until:
                    step = min(192 * rng.randrange(1, 900), end - at)
                    log.write(data[at : at + step])
                    log.flush()
                    at += step
                    time.sleep(0.002)
                child.send_signal(signal.SIGKILL)
                child.wait()
                done += 1
            log.write(data[at:])
        Collector(str(place / "log"), Folder(place / "out"), "r", "n", steps_per_file=20).take()
        folder = Folder(place / "out")
        parquet = need("pyarrow.parquet")
        keys = []
        for path in counted_files(folder, "r"):
            table = parquet.read_table(folder.open(f"run=r/{path}"))
            keys.append(np.stack([table[name].to_numpy() for name in ("step", "site", "call")]))
        rows = np.concatenate(keys, axis=1)
        written = len([path for path in folder.files("run=r") if "step=" in path])
        return {
            "kills": done,
            "records": records,
            "rows": rows.shape[1],
            "distinct_rows": len(np.unique(rows, axis=1).T),
            "files": written,
            "files_that_count": len(keys),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("faults", "large", "collector"))
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--directory", type=Path)
    for name, size in (("ranks", 10_000), ("sites", 1000), ("steps", 100), ("shards", 80)):
        parser.add_argument(f"--{name}", type=int, default=size)
    options = parser.parse_args()
    if options.part == "faults":
        made = faults(options.count)
    elif options.part == "collector":
        made = collector(options.kills)
    else:
        shape = Shape(options.ranks, options.sites, options.steps, options.shards)
        with tempfile.TemporaryDirectory() as scratch:
            made = large(options.directory or Path(scratch), shape)
    path = RESULTS / "fleet.json"
    known = json.loads(path.read_text()) if path.exists() else {"bench": "fleet"}
    known[options.part] = {**made, "machine": machine()}
    path.write_text(json.dumps(known, indent=1) + "\n")
    print(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
