"""``fastcheck top``: the processor time that it takes beside a run that writes 10 steps a second.

    python bench/top.py [--seconds 60]     writes bench/results/top.json

A process appends the records of a synthetic log (bench/synthetic_log.py), a step every tenth of a
second; ``fastcheck top`` follows it in another process, on a terminal of 40 lines by 120 columns,
at its default refresh. Its processor time (user and system) is read from the operating system
before and after the measured time, which begins when the first pictures have been drawn.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path
from typing import Any

import harness
import synthetic_log

BAR_PERCENT = 2.0
STEPS_PER_SECOND = 10
LINES, COLUMNS = 40, 120
WARM_UP_SECONDS = harness.size(6.0, 0.0)


def write(log: Path, sites: int, seconds: float) -> None:
    """Appends steps at the pace of a run. Runs in a process of its own."""
    steps = synthetic_log.steps_of(sites, int(seconds * STEPS_PER_SECOND), event_step=-1)
    start = time.monotonic()
    with open(log / "records-rank0-000000.bin", "ab", buffering=0) as file:
        for number, made in enumerate(steps):
            due = start + number / STEPS_PER_SECOND
            time.sleep(max(due - time.monotonic(), 0))
            made["step"] += 1
            file.write(made.tobytes())


def begin(log: Path, sites: int) -> None:
    """The log of one step."""
    synthetic_log.write_log(str(log), sites, 1, event_step=-1)


def processor_seconds(pid: int) -> tuple[float, float]:
    """User and system time of a process until now (proc(5), fields 14 and 15)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    tick = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / tick, int(fields[12]) / tick


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def measure(sites: int, seconds: float, interval: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "log")
        begin(log, sites)
        whole = seconds + WARM_UP_SECONDS + 4
        arguments = ["--write", str(log), "--sites", str(sites), "--seconds", str(whole)]
        writer = subprocess.Popen([sys.executable, __file__, *arguments])
        user, program = pty.openpty()
        fcntl.ioctl(program, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        top = subprocess.Popen(
            [sys.executable, "-m", "fastcheck", "top", str(log), "--interval", str(interval)],
            stdin=program,
            stdout=program,
            env={**os.environ, "TERM": "xterm-256color"},
        )
        written = bytearray()
        threading.Thread(target=_drain, args=(user, written), daemon=True).start()
        try:
            while b"by headroom" not in written:
                time.sleep(0.05)
            time.sleep(WARM_UP_SECONDS)
            before, size, start = processor_seconds(top.pid), len(written), time.monotonic()
            time.sleep(seconds)
            after, took = processor_seconds(top.pid), time.monotonic() - start
            memory = resident_bytes(top.pid)
            drawn = len(written) - size
            os.write(user, b"q")
            ended = top.wait(30)
        finally:
            for process in (top, writer):
                if process.poll() is None:
                    process.send_signal(signal.SIGKILL)
                process.wait()
        used = [b - a for a, b in zip(before, after)]
        return {
            "sites": sites,
            "steps_per_second": STEPS_PER_SECOND,
            "interval_seconds": interval,
            "seconds": took,
            "user_seconds": used[0],
            "system_seconds": used[1],
            "percent_of_a_core": 100 * sum(used) / took,
            "resident_bytes": memory,
            "bytes_to_the_terminal": drawn,
            "exit_code": ended,
        }


def _drain(descriptor: int, into: bytearray) -> None:
    try:
        while data := os.read(descriptor, 65536):
            into += data
    except OSError:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="measured, of each case")
    parser.add_argument("--sites", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write is not None:
        write(options.write, options.sites, options.seconds)
        return
    seconds = harness.size(options.seconds, 0.5)
    rows = [measure(1000, *case) for case in harness.few([(seconds, 1.0), (seconds / 2, 0.25)])]
    bars = [
        harness.bar(
            "1,000 sites, 1 s: % of a core", rows[0]["percent_of_a_core"], at_most=BAR_PERCENT
        ),
        harness.bar("exit code after q", rows[0]["exit_code"], at_most=0),
    ]
    harness.write_results("top", rows, bars=bars)
    print(
        harness.table(
            ["sites", "steps/s", "refresh s", "% of a core", "memory MiB", "KB/s to the terminal"],
            [
                [
                    f"{row['sites']:,}",
                    str(row["steps_per_second"]),
                    f"{row['interval_seconds']:g}",
                    f"{row['percent_of_a_core']:.2f}",
                    f"{row['resident_bytes'] / 2**20:.0f}",
                    f"{row['bytes_to_the_terminal'] / row['seconds'] / 1e3:.1f}",
                ]
                for row in rows
            ],
        )
    )
    harness.print_bars(bars)


if __name__ == "__main__":
    main()
