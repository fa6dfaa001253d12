"""``fastcheck report``: writes a log, or two against each other, as one HTML page."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from fastcheck.dump.storage.files import is_dump_directory
from fastcheck.errors import printable
from fastcheck.report.page.write import newest_log, write_page
from fastcheck.utils.names.style import STYLES

from .console import progress

_DESCRIPTION = """\
Writes a log as one HTML file to open in a browser: the verdict with what to try, a heat map of
all sites by steps, the curves of each site, loss and norms, how an overflow spread, a table of
sites, the ranks, weights that do not move, the environment. The file needs no network.

Of a dump (Dumper, Stop(dump=)) the operators around the culprit: inputs and outputs with
histograms of their values, the distance to the reference, the script that runs the call again.

With --against OTHER both runs: the first step where they part, a heat map of their difference,
settings that differ, the curves of both (`fastcheck compare` has more options, and --html too)."""

_EPILOG = """\
examples:
  fastcheck report fastcheck_log                 the newest log; writes report.html into it
  fastcheck report LOG -o run.html               under another name
  fastcheck report DUMP                          a dump, a step of it or a rank of a step
  fastcheck report LOG --against OTHER           both runs; writes difference.html into LOG

exit codes: 0 written; 2 no log, a file that can't be written, or wrong usage"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="a log as an HTML page",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "log", help="log directory, the fastcheck_log/ above it (the newest), or a dump"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="what to write, replaced if it is there; default: report.html in the log, or "
        "difference.html with --against",
    )
    parser.add_argument("--against", metavar="LOG", help="the log of the run to hold it against")
    parser.add_argument("--json", action="store_true", help="say what was written as JSON")
    parser.add_argument(
        "--style",
        choices=STYLES,
        default=STYLES[0],
        help="how the verdict names tensors; msprobe: Functional.softmax.7.backward.output.0",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Exit code 0; what goes wrong is raised."""
    if options.against is None and is_dump_directory(options.log):
        path = options.output or os.path.join(options.log, "report.html")
        return _report(options, options.log, path, _write_dump(options.log, path))
    log = newest_log(options.log)
    name = "report.html" if options.against is None else "difference.html"
    path = options.output or os.path.join(log, name)
    if options.against is None:
        size = write_page(log, path, options.style)
    else:
        size = _write_against(log, newest_log(options.against), path)
    return _report(options, log, path, size)


def _report(options: argparse.Namespace, log: str, path: str, size: int) -> int:
    if options.json:
        print(json.dumps({"log": log, "file": path, "bytes": size}))
    else:
        print(printable(f"{path}: {size:,} bytes, of {log}"))
    return 0


def _write_dump(dump: str, path: str) -> int:
    # Here: it imports torch, which `fastcheck --help` can do without.
    from fastcheck.dump.page.write import write_dump_page

    return write_dump_page(dump, path)


def _write_against(log: str, other: str, path: str) -> int:
    # Here: it imports torch, which `fastcheck --help` can do without.
    from fastcheck.comparison.compare import compare

    with progress("comparing", "blocks") as show_progress:
        compare(log, other, ask_all=True, html=path, progress=show_progress)
    return os.path.getsize(path)
