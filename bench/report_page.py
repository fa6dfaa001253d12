"""The page of a log (fastcheck report): time to write it, its size, its first paint in a browser.

    python bench/report_page.py [--large]     writes bench/results/report_page.json

Synthetic logs (bench/synthetic_log.py) of 100 sites by 100 steps and of 1,000 by 1,000; with
--large also 10,000 by 10,000, which takes 19 GB of disk for some minutes. Each page is written in a
process of its own, three times (the large one once), and opened in headless Chromium where there is
one. Every site has one spike at a step of its own: the page must have it in that step's bucket.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import harness
import synthetic_log
from support.browser import PROGRAM, browser
from support.page_data import PageData

AXE = harness.ROOT / "frontend" / "node_modules" / "axe-core" / "axe.min.js"
READY = "document.documentElement.dataset.ready === 'true'"
CHILD = """
import json, resource, sys, time
from fastcheck.report.page.write import write_page
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start, cpu = time.perf_counter(), time.process_time()
size = write_page(sys.argv[1], sys.argv[2])
took = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps({**took, "bytes": size, "kib": kib}))
"""
# Of sites by steps: the bars of bytes, of seconds to write, and of milliseconds to the first paint.
BARS = {(1000, 1000): (1e6, 2.0, 1000.0), (10_000, 10_000): (10e6, None, None)}


def written(log: Path, page: Path, times: int) -> dict[str, Any]:
    """The medians of several runs."""
    runs = [json.loads(harness.output_of("-c", CHILD, log, page)) for _ in range(times)]
    return {name: float(np.median([run[name] for run in runs])) for name in runs[0]}


def spikes_lost(page: Path, sites: int, steps: int) -> int:
    """How many sites do not show their spike in its bucket."""
    data = PageData(page.read_text())
    starts, width = data.header["axis"]["starts"], data.header["axis"]["width"]
    high = data.arrays["abs_max.high"]
    lost = 0
    for row, site in enumerate(data.header["rows"]["site"]):
        role = data.header["sites"]["role"][site]
        if role in ("loss", "loss_scale"):
            continue
        step = int(synthetic_log.spike_steps(sites, steps)[site])
        column = (step - starts[0]) // width
        lost += not high[row, column] >= 2.0**synthetic_log.SPIKE * 2 ** (-1 / 16)
    return lost


def opened(page: Path) -> dict[str, Any]:
    """What Chromium makes of the page."""
    with browser() as tab:
        tab.size(1280, 900)
        tab.open(page, READY)
        # A busy machine may have the page ready before its first frame is drawn.
        first_paint = tab.value(
            "new Promise(done => new PerformanceObserver(list => "
            "done(list.getEntriesByName('first-paint')[0].startTime))"
            ".observe({type: 'paint', buffered: true}))"
        )
        ready = tab.value("performance.now()")
        found: dict[str, Any] = {
            "first_paint_ms": first_paint,
            "ready_before_ms": ready,
            "requests": len(tab.requests) - 1,  # the page itself
            "problems": len(tab.problems),
            "version": tab.call("Browser.getVersion")["product"],
        }
        if AXE.exists():
            tab.call("Runtime.evaluate", expression=AXE.read_text())
            found["axe_violations"] = len(tab.value("axe.run().then(r => r.violations)"))
        return found


def measure(sites: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        log, page = Path(scratch, "log"), Path(scratch, "report.html")
        synthetic_log.write_log(str(log), sites, steps, spikes=True)
        row: dict[str, Any] = {"sites": sites, "steps": steps}
        row["log_bytes"] = sum(path.stat().st_size for path in log.iterdir())
        row.update(written(log, page, harness.size(1 if sites * steps > 1e7 else 3, 1)))
        row["spikes_lost"] = spikes_lost(page, sites, steps)
        return {**row, **(opened(page) if PROGRAM is not None else {})}


def bars(row: dict[str, Any]) -> list[dict[str, Any]]:
    size, seconds, paint = BARS.get((row["sites"], row["steps"]), (None, None, None))
    what = f"{row['sites']:,} sites x {row['steps']:,} steps"
    found = [harness.bar(f"{what}: spikes lost", row["spikes_lost"], at_most=0)]
    limits = {"bytes": size, "seconds": seconds, "first_paint_ms": paint}
    limits |= dict.fromkeys(("requests", "problems", "axe_violations"), 0)
    for name, limit in limits.items():
        if limit is not None and name in row:
            found.append(harness.bar(f"{what}: {name}", row[name], at_most=limit))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="also 10,000 sites by 10,000 steps")
    options = parser.parse_args()
    sizes = [(100, 100), (1000, 1000), *([(10_000, 10_000)] if options.large else [])]
    rows = [measure(*size) for size in harness.few(sizes)]
    all_bars = [each for row in rows for each in bars(row)]
    harness.write_results("report_page", rows, bars=all_bars)
    header = ["sites", "steps", "log MB", "page KB", "write s", "memory MiB", "first paint ms"]
    print(
        harness.table(
            header,
            [
                [
                    f"{row['sites']:,}",
                    f"{row['steps']:,}",
                    f"{row['log_bytes'] / 1e6:,.0f}",
                    f"{row['bytes'] / 1e3:,.0f}",
                    f"{row['seconds']:.2f}",
                    f"{row['kib'] / 1024:,.0f}",
                    f"{row.get('first_paint_ms', float('nan')):.0f}",
                ]
                for row in rows
            ],
        )
    )
    harness.print_bars(all_bars)


if __name__ == "__main__":
    main()
