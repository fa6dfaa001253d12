"""``fastcheck report``: writes a log as one HTML page."""

from __future__ import annotations

import argparse
import os

from fastcheck.errors import printable
from fastcheck.log.reader import newest_log
from fastcheck.report.page.write import write_page
from fastcheck.utils.names.style import STYLES

from .console import print_json

HELP = "a log as an HTML page"

DESCRIPTION = """\
Writes a log as one HTML file to open in a browser: the verdict with what to try, a heat map of
all sites by steps, the curves of each site, loss and norms, how an overflow spread, a table of
sites, the ranks, weights that do not move, the environment. The file needs no network.

Two runs are a page of `fastcheck compare A B --html FILE`."""

EPILOG = """\
examples:
  fastcheck report fastcheck_log                 the newest log; writes report.html into it
  fastcheck report LOG -o run.html               under another name

exit codes: 0 written; 2 no log, a file that can't be written, or wrong usage"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", help="log directory, or the fastcheck_log/ above it (the newest)")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="what to write, replaced if it is there; default: report.html in the log",
    )
    parser.add_argument("--json", action="store_true", help="say what was written as JSON")
    parser.add_argument(
        "--style",
        choices=STYLES,
        default=STYLES[0],
        help="how the verdict names tensors; msprobe: Functional.softmax.7.backward.output.0",
    )


def run(options: argparse.Namespace) -> int:
    """Exit code 0; what goes wrong is raised."""
    log = newest_log(options.log)
    path = options.output or os.path.join(log, "report.html")
    size = write_page(log, path, options.style)
    if options.json:
        print_json("report", {"log": log, "file": path, "bytes": size})
    else:
        print(printable(f"{path}: {size:,} bytes, of {log}"))
    return 0
