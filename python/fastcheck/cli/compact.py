"""``fastcheck compact``: merges the small files of a fleet."""

from __future__ import annotations

import argparse

from fastcheck.errors import ConfigError, printable
from fastcheck.fleet.compaction import merge_run, naming_damage
from fastcheck.fleet.engines import run_of
from fastcheck.fleet.store import Folder

from .console import print_json

HELP = "merge the small files of a fleet"

DESCRIPTION = """\
Merges the files that fastcheck collect wrote for each span of steps, one or more of each node,
into few sorted files, which are read several times as fast. Each row counts once, also where
the command was killed: run it again. Collectors may run meanwhile."""

EPILOG = """\
examples:
  fastcheck compact fleet
  fastcheck compact s3://bucket/fleet --run 7b-3

exit codes: 0 done; 2 no run, a place that can't be written, or wrong usage"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", help="what fastcheck collect --out wrote to")
    parser.add_argument("--run", dest="run_name", help="which run; default: the only one")
    parser.add_argument(
        "--rows-per-file", type=int, default=1 << 23, metavar="N", help="default 8388608"
    )
    parser.add_argument("--json", action="store_true", help="say what was merged as JSON")


def run(options: argparse.Namespace) -> int:
    """Exit code 0; what goes wrong is raised."""
    if options.rows_per_file < 1:
        raise ConfigError("--rows-per-file must be greater than 0")
    folder = Folder(options.folder)
    name = run_of(folder, options.run_name)
    with naming_damage(folder, name):
        done = merge_run(folder, name, rows_per_file=options.rows_per_file)
    if options.json:
        print_json("compact", vars(done))
        return 0
    text = (
        f"{options.folder}: {done.files_before:,} files of {done.spans:,} spans of steps became "
        f"{done.files_after:,}, {done.bytes_before:,} bytes became {done.bytes_after:,}"
    )
    print(printable(text))
    return 0
