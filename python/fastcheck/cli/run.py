"""``fastcheck run``: runs a Python program with its models observed, without a line in it."""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import sys
from types import TracebackType
from typing import Optional

from fastcheck.errors import ConfigError
from fastcheck.extension import extension
from fastcheck.log.writer import unwritable
from fastcheck.monitor.auto_install import AutoInstall
from fastcheck.monitor.precision import check_level
from fastcheck.monitor.session.config import Config
from fastcheck.monitor.sinks.sink import open_sinks, sinks_of_environment
from fastcheck.utils.private import make_private_folders
from fastcheck.utils.reading import why_missing

HELP = "run a Python program with its models observed, without changing it"

DESCRIPTION = """\
Runs a Python program. Each model gets a monitor when an optimizer of its parameters is made, with
the options given here, as fastcheck.install(model, ...) would; the program needs no change.
Options of fastcheck come before the program, the program's own after it."""

EPILOG = """\
examples:
  fastcheck run train.py --lr 0.1
  fastcheck run --level op --sync call train.py
  fastcheck run --log-dir log -m package.train
  torchrun --nproc-per-node 4 -m fastcheck run train.py

exit codes: those of the program; 2 if an option can't be used. A stop is an uncaught
OverflowDetected: 1, with the stop report on standard error."""


_OPTIONS = (
    *("overflow_nums", "level", "sync", "record", "every", "stats_every", "include", "exclude"),
    *("log_dir", "sinks"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--overflow-nums", type=int, metavar="N", help="stop at event N (1)")
    parser.add_argument("--level", help='"module" (default) or "op"')
    parser.add_argument("--sync", help='"never" (default), "step" or "call"')
    parser.add_argument("--record", help='"health", "stats", "full" (default) or "range"')
    parser.add_argument("--every", type=int, metavar="N", help="observe every N-th step (1)")
    parser.add_argument("--stats-every", type=int, metavar="N", help="read every N-th whole (1)")
    parser.add_argument("--include", action="append", metavar="PATTERN", help="modules to observe")
    parser.add_argument(
        "--exclude", action="append", metavar="PATTERN", help="modules not to observe"
    )
    parser.add_argument("--log-dir", metavar="DIR", help="write all records there")
    parser.add_argument(
        "--sinks", action="append", metavar="SINK", help="write scalars, stops and warnings there"
    )
    parser.add_argument(
        "--watch",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="warnings of spikes and invariants (on)",
    )
    parser.add_argument(
        "--summary", action="store_true", help="print each monitor's summary at the end"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module")
    parser.add_argument("program", metavar="PROGRAM", help="a Python file, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def run(options: argparse.Namespace) -> int:
    """Runs a program under fastcheck. Lets through what the program raises, SystemExit included."""
    read = ((name, getattr(options, name)) for name in _OPTIONS)
    given = {name: value for name, value in read if value is not None}
    # An error before the program begins.
    config = Config(**{name: value for name, value in given.items() if name != "sinks"})
    check_level(config.record, config.level)
    open_sinks(options.sinks, is_trial=True)
    sinks_of_environment(is_trial=True)
    if config.level == "op":
        extension.op_observer()  # raises where it is missing
    if not options.module and not os.path.isfile(options.program):
        raise ConfigError(
            "there is no such program",
            expected="a Python file, or with -m a module's name",
            got=options.program,
            hint="" if os.path.exists(options.program) else why_missing(options.program),
        )
    sys.argv = [options.program, *options.arguments]
    # Python does the same for a program: its folder for a file, the current one for a module.
    folder = os.getcwd() if options.module else os.path.dirname(os.path.abspath(options.program))
    sys.path.insert(0, folder)
    if options.module:
        package = options.program.partition(".")[0]
        if not package or importlib.util.find_spec(package) is None:
            raise ConfigError(f"there is no such module: {options.program}; without -m: a file")
    if options.log_dir is not None:
        try:
            make_private_folders(options.log_dir)
        except OSError as error:
            raise unwritable(options.log_dir, error) from error
    auto = AutoInstall(**given, **({} if options.watch else {"watch": False}))
    try:
        with auto:
            try:
                _run(options.program, options.module)
            finally:
                _report(auto, options.summary)
    except Exception as error:
        # The interpreter reports what a program raises like this, without the frames of this
        # command.
        error.__traceback__ = _of_program(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _run(program: str, is_module: bool) -> None:
    if is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")


def _report(auto: AutoInstall, with_summary: bool) -> None:
    if not auto.has_found:
        print(
            "fastcheck run: nothing was observed: no optimizer was given a module's parameters; "
            "fastcheck.install(model) in the program names the model",
            file=sys.stderr,
        )
    for monitor in auto.monitors if with_summary else ():
        print(monitor.summary(), file=sys.stderr)


def _of_program(traceback: Optional[TracebackType]) -> Optional[TracebackType]:
    """The traceback from the program's first frame on; the whole traceback if it has none."""
    own = {__file__, runpy.__file__, "<frozen runpy>"}
    inner = traceback
    while inner is not None and inner.tb_frame.f_code.co_filename in own:
        inner = inner.tb_next
    return inner or traceback
