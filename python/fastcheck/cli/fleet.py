"""``fastcheck fleet``: which rank of many is faulty, from when on, and by what evidence."""

from __future__ import annotations

import argparse
import os

from fastcheck.errors import ConfigError, printable
from fastcheck.fleet.engines import ENGINES, naming_damage, open_engine, run_of
from fastcheck.fleet.judgement import examine
from fastcheck.fleet.page import write_fleet_page
from fastcheck.fleet.store import Folder

from .console import print_json

HELP = "which rank of many is faulty"

DESCRIPTION = """\
Finds the faulty rank in the files of fastcheck collect: replicas whose weights differ, the first
NaN or infinity, ranks and hosts that are repeatedly far from their peers, ranks that stopped.
A change that all ranks have in common is reported as a step, not a rank. The queries are SQL."""

EPILOG = """\
examples:
  fastcheck fleet fleet                           the only run there
  fastcheck fleet s3://bucket/fleet --run 7b-3 --json
  fastcheck fleet fleet --html                    and a page with a heat map of ranks by steps
  fastcheck fleet fleet --engine spark            the same questions, by Spark

needs DuckDB: pip install 'fastcheck[fleet]', or PySpark and Java: pip install 'fastcheck[spark]'

exit codes: 0 no rank is suspect; 1 a rank is; 2 no run, or wrong usage"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", help="what fastcheck collect --out wrote to")
    parser.add_argument("--run", dest="run_name", help="which run; default: the only one")
    parser.add_argument("--engine", choices=ENGINES, default=ENGINES[0], help="default: duckdb")
    parser.add_argument(
        "--replicas",
        choices=("known", "all"),
        default="known",
        help="all: treat ranks whose replica group is unknown as replicas (plain DDP)",
    )
    parser.add_argument(
        "--lag",
        type=int,
        default=2,
        metavar="STEPS",
        help="how far a rank may be behind; default 2",
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    parser.add_argument(
        "--html",
        nargs="?",
        const="",
        metavar="FILE",
        help="also write a page: the findings, and a heat map of ranks by steps; default: "
        "fleet-RUN.html in the folder, or here where the folder is a URL",
    )


def run(options: argparse.Namespace) -> int:
    """Exit code 0 or 1; what goes wrong is raised."""
    if options.lag < 0:
        raise ConfigError("--lag is negative", expected="0 or more", got=str(options.lag))
    folder = Folder(options.folder)
    name = run_of(folder, options.run_name)
    with naming_damage(folder, name):
        engine = open_engine(options.engine, folder, name)
        try:
            report = examine(
                engine,
                name,
                options.engine,
                are_replicas=options.replicas == "all",
                lag=options.lag,
                with_cells=options.html is not None,
            )
        finally:
            engine.close()
    document = report.to_dict()
    text = report.text()
    if options.html is not None:
        page = options.html or os.path.join(
            folder.url("") if folder.is_local else ".", f"fleet-{name}.html"
        )
        size = write_fleet_page(report, page)
        document["page"] = page
        text += f"\n\npage      {page}: {size:,} bytes"
    if options.json:
        print_json("fleet", document)
    else:
        print(printable(text, keep="\n"))
    return 1 if report.accused else 0
