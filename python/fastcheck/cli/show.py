"""``fastcheck show``: prints the contents of a log as text or strict JSON."""

from __future__ import annotations

import argparse
import fnmatch
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fastcheck.dump.storage.files import places_in
from fastcheck.errors import ConfigError, did_you_mean, explain
from fastcheck.log.reader import find_logs, read_log, read_logs
from fastcheck.log.view import LogView
from fastcheck.utils.names.msprobe import is_name, parse
from fastcheck.utils.names.style import STYLES
from fastcheck.utils.text.numbers import to_json

from .console import show_sections
from .show_json import document
from .show_text import Shown, text_sections

if TYPE_CHECKING:
    from fastcheck.record.site import Site

_LIMIT = 40

_DESCRIPTION = """\
Shows a log: the directory that a stop message names, the fastcheck_log/ above it (then the newest
log in it), or one file of it. Or a dump: all of it, a step, or a rank of a step. Without filters:
the events, and the records of the last step."""

_EPILOG = """\
examples:
  fastcheck show fastcheck_log                    the newest log
  fastcheck show LOG --step 41                    the records of step 41, in device order
  fastcheck show LOG --site layers.3.attn         one module's tensors over the steps, with a trend
  fastcheck show LOG --site 'layers.*' --step 41  patterns as in a shell; quote them
  fastcheck show LOG --site Functional.softmax    an operator (level="op"), as msprobe names it
  fastcheck show LOG --events                     only what overflowed, with the reasons
  fastcheck show dump --step 3                    what a Dumper has read in step 3, in order
  fastcheck show LOG --rank 2                     one rank; without it all, by step, then rank
  fastcheck show LOG --json | python -m json.tool  strict JSON: "nan" and "inf" are strings

exit codes: 0 shown; 1 nothing matches the filters; 2 no log or dump, or wrong usage"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "show",
        help="show a log: events, records, trends",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", help="log directory, a file in it, or a dump")
    parser.add_argument("--step", type=int, metavar="N", help="only step N (-1: the last one held)")
    parser.add_argument(
        "--site",
        metavar="PATTERN",
        help="only tensors whose module path or name matches; a plain path includes its submodules",
    )
    parser.add_argument("--events", action="store_true", help="only events")
    parser.add_argument("--rank", type=int, metavar="R", help="only rank R")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")
    parser.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help=f"at most N records and N events (0: all; text: default {_LIMIT}, JSON: all)",
    )
    parser.add_argument(
        "--style",
        choices=STYLES,
        default=STYLES[0],
        help="how tensors are named; msprobe: Functional.softmax.7.backward.output.0",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Exit code 0 when something was shown, 1 when the filters leave nothing."""
    path, others, view = _open_log(options.path)
    if options.limit is not None and options.limit < 0:
        raise ConfigError(
            explain("--limit is negative", expected="0 (all) or more", got=str(options.limit))
        )
    wanted = _filter(view, options)
    limit = options.limit if options.limit is not None else (0 if options.json else _LIMIT)
    if options.json:
        shown = document(path, view, wanted.records, wanted.events, limit or None)
        print(json.dumps(to_json(shown), allow_nan=False, indent=1))
    else:
        show_sections(text_sections(path, others, view, wanted, limit or None, options))
    return 0 if wanted.found else 1


def _open_log(path: str) -> tuple[str, list[str], LogView]:
    """The dump at ``path``, all steps and ranks of it; or the newest log at or right below it, and
    the older ones.
    """
    places = [place for _, _, place in sorted(places_in(path))]
    if places:
        return path, [], read_logs(path, places)
    logs = find_logs(path) or [path]
    return logs[-1], logs[:-1], read_log(logs[-1])


def _filter(view: LogView, options: argparse.Namespace) -> Shown:
    keep = np.ones(len(view.records), bool)
    events = list(view.events)
    problem = ""
    step: int | None = options.step
    if step is not None:
        steps = np.unique(view.records["step"])
        if step < 0 and len(steps):
            step = int(steps[max(step, -len(steps))])
        keep &= view.records["step"] == step
        events = [event for event in events if event.step == step]
        if not keep.any() and not events:
            held = f"{steps[0]:,} to {steps[-1]:,}" if len(steps) else "none"
            problem = f"step {step} is not in this log; steps held: {held}"
    if options.rank is not None:
        keep &= view.ranks == options.rank
        events = [event for event in events if event.rank == options.rank]
        if options.rank not in view.meta:
            problem = f"rank {options.rank} is not in this log; ranks: {sorted(view.meta)}"
    if options.site is not None:
        matching = {index for index, site in view.sites.items() if matches(site, options.site)}
        if not matching:
            names = {site.module or site.module_type for site in view.sites.values()}
            problem = (
                f"no tensor matches {options.site!r}. {did_you_mean(options.site, sorted(names))}"
            )
        keep &= np.isin(view.records["site"], sorted(matching))
        events = [event for event in events if matches(event.site, options.site)]
    filtered = step is not None or options.site is not None or options.rank is not None
    if options.events:
        keep &= False
    elif not filtered and len(view.records):
        keep &= view.records["step"] == view.records["step"].max()
    if filtered and not problem and not keep.any() and not events:
        problem = "nothing in this log matches all of these filters"
    return Shown(np.flatnonzero(keep), events, problem.strip(), filtered)


def matches(site: Site, pattern: str) -> bool:
    """Whether a ``--site`` pattern means this site, by module path, type or whole name.

    ``*`` and ``?`` are wild; brackets are not, since labels have them. A plain path includes what
    is below it. Names in msprobe's style mean any call, since calls belong to records.
    """
    if is_name(pattern):
        name = replace(parse(pattern), call=None)
        return name.matches(site, 0)
    module = site.module or site.module_type
    names = (module, site.module_type, f"{module}.{site.label}", site.key, str(site))
    literal = pattern.replace("[", "[[]")
    below = module.startswith(pattern + ".")
    return below or any(fnmatch.fnmatchcase(name, literal) for name in names)
