"""``fastcheck collect``: converts the log of a node to Parquet, while it grows or afterwards."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any, Callable

from fastcheck.errors import ConfigError, printable
from fastcheck.fleet.collector import Collector, Written, attempts, follow
from fastcheck.fleet.store import Folder
from fastcheck.log.reader import find_logs, log_parts, newest_log, read_sites_and_meta
from fastcheck.utils.text.numbers import counted

from .console import print_json

HELP = "the log of a node as Parquet files of a fleet"

DESCRIPTION = """\
Converts a node's log to Parquet files of about 16 bytes a record, for fastcheck fleet. Runs beside
the training, in a process of its own, or after it. Each record is written exactly once, even if the
command is killed: run it again, and it continues where it stopped."""

EPILOG = """\
examples:
  fastcheck collect run_log --out fleet                       what is there now
  fastcheck collect run_log --out s3://bucket/fleet --follow  while it grows, until Ctrl-C
  fastcheck collect run_log --out fleet --run 7b-3 --node 0041

Files:  OUT/run=RUN/step=000100-000199/node=NODE.parquet, and the tables sites, ranks, events, meta.
needs pyarrow: pip install 'fastcheck[fleet]'

exit codes: 0 done; 2 no log, a place that can't be written, or wrong usage"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", help="log directory, or the fastcheck_log/ above it (the newest)")
    parser.add_argument(
        "--out",
        required=True,
        metavar="DIR",
        help="a directory, or a URL such as s3://bucket/fleet",
    )
    parser.add_argument(
        "--run",
        dest="run_name",
        help="name of the run, the same on all nodes; default: that of the launcher's job "
        "(TORCHELASTIC_RUN_ID, SLURM_JOB_ID), or the name of the log directory",
    )
    parser.add_argument("--node", help="name of this node; default: the machine's host name")
    parser.add_argument(
        "--follow",
        action="store_true",
        help="continue while the log grows, until SIGINT or SIGTERM",
    )
    parser.add_argument(
        "--interval", type=float, default=10.0, metavar="SECONDS", help="of --follow: default 10"
    )
    parser.add_argument("--steps-per-file", type=int, default=100, metavar="N", help="default 100")
    parser.add_argument("--json", action="store_true", help="say what was written as JSON lines")


def run(options: argparse.Namespace) -> int:
    """Exit code 0; what goes wrong is raised."""
    if options.steps_per_file < 1 or not 0 < options.interval < math.inf:
        raise ConfigError("--steps-per-file and --interval must be numbers greater than 0")
    if not options.out:
        raise ConfigError("--out is empty", expected="a folder or a URL", got="''")
    log = _log_of(options.log, options.follow)
    folder = Folder(options.out)
    made: dict[str, Collector] = {}

    def collectors() -> list[Collector]:
        for number, place in enumerate(attempts(log), 1):
            if place not in made:
                tail = "" if number == 1 else f"-{number}"
                made[place] = Collector(
                    place,
                    folder,
                    (options.run_name or _run_of(place)) + tail,
                    options.node or socket.gethostname(),
                    steps_per_file=options.steps_per_file,
                )
        return list(made.values())

    if not options.follow:
        for collector in collectors():
            _show(collector, collector.take(), options)
        return 0
    with _until_signal() as is_signalled:
        follow(
            collectors,
            interval_seconds=options.interval,
            is_over=is_signalled,
            on_written=lambda done: _show(None, done, options),
            sleep=lambda seconds: _sleep(seconds, is_signalled),
        )
    return 0


def _log_of(path: str, may_come: bool) -> str:
    if os.path.isdir(path) and log_parts(path):
        return path
    return path if may_come and not find_logs(path) else newest_log(path)


def _run_of(log: str) -> str:
    for rank in log_parts(log):
        placed = read_sites_and_meta(log, rank)[1].get("placement")
        if isinstance(placed, dict) and placed.get("run"):
            return str(placed["run"])
    return os.path.basename(os.path.abspath(log))


def _show(collector: Any, done: Written, options: argparse.Namespace) -> None:
    if options.json:
        print_json("collect", vars(done), indent=None)
        return
    each = f", {done.bytes / done.rows:.1f} bytes a row" if done.rows else ""
    print(
        printable(
            f"{options.out}: {counted(done.rows, 'row')} in {counted(done.files, 'file')}{each}"
        ),
        flush=True,
    )
    if done.lost_segments:
        print(
            f"{done.lost_segments:,} segments of the log were deleted before they were seen to be "
            "read to their end: their events are there. Raise the log's limit, or collect earlier."
        )
    if done.damaged:
        print(f"{done.damaged:,} damaged records of the log are left out")


@contextlib.contextmanager
def _until_signal() -> Iterator[Callable[[], bool]]:
    caught: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: caught.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield lambda: bool(caught)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _sleep(seconds: float, is_over: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while not is_over() and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 1.0))
