"""The command line ``fastcheck <command>``: parses arguments and calls the file of the command."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from fastcheck._version import __version__
from fastcheck.errors import FastcheckError, did_you_mean, printable

# The commands in the order of the help; each is a file beside this file.
_COMMANDS = (
    *("doctor", "show", "report", "top", "compare", "export"),
    *("collect", "fleet", "verify", "prove", "run"),
)

EXIT_OK = 0
EXIT_USAGE = 2

_DESCRIPTION = """\
fastcheck finds the first tensor of a training run that holds NaN or Inf, and stops the run there.

In your program:

    import fastcheck
    monitor = fastcheck.install(model, overflow_nums=1)

This command shows what a run has left behind, and what this machine can do."""

_EPILOG = """\
first steps:
  fastcheck demo                    see it stop a small float16 training run (about a minute)
  fastcheck run train.py            run a program with its models observed, without changing it
  fastcheck doctor                  what is installed here, and which kernels are used
  fastcheck doctor --device cuda    whether fastcheck works on a device
  fastcheck show fastcheck_log      the newest log: what overflowed, where, and the last step
  fastcheck report fastcheck_log    the same as a page for the browser: heat map, curves, tables
  fastcheck top fastcheck_log       a run that is under way: loss, events, the sites near overflow
  fastcheck compare LOG OTHER       two runs: what differs first, from the environment to the update
  fastcheck export LOG log.parquet  the records as a table
  fastcheck collect LOG --out DIR   a node's log as Parquet files, for many ranks
  fastcheck fleet DIR               which of these ranks is faulty
  fastcheck verify checkpoint-100   whether a sealed checkpoint holds the weights that were sealed
  fastcheck prove train.py:step     whether a step agrees with itself: padded, permuted, ...

exit codes:
  0  done
  1  done, and the answer is no: nothing matches the filters, doctor found something missing or
     a device that fails a check, the two sides of compare differ, a relation of prove does,
     a checkpoint is not as it was sealed, a rank is faulty
  2  wrong usage, or a path that can't be read as what it should be
  130  interrupted"""


class _Parser(argparse.ArgumentParser):
    """A parser whose description and epilog are printed as they are; so are its commands'. Its
    errors name the option or command that is near what was given.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:  # a command's own error, before that of the parser above it
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        given = re.search(r"unrecognized arguments: (-[^ =]+)|invalid choice: '([^']+)'", message)
        if given is not None:
            known = [flag for action in self._actions for flag in action.option_strings]
            known += re.findall(r"[\w ]+", message.partition("(choose from ")[2])
            message += f"; {near}" if (near := did_you_mean(given[1] or given[2], known)) else ""
        super().error(printable(message, keep="\n"))


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; each command's module has its part."""
    parser = _Parser(prog="fastcheck", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="command", title="commands")
    for name in _COMMANDS:
        command = importlib.import_module(f".{name}", __package__)
        added = commands.add_parser(
            name, help=command.HELP, description=command.DESCRIPTION, epilog=command.EPILOG
        )
        command.add_options(added)
        added.set_defaults(run=command.run)
    # The demo parses its own options (it needs torch, which takes seconds to import).
    demo = commands.add_parser(
        "demo",
        help="train a small model in float16 until it overflows, then fix it",
        add_help=False,
    )
    demo.set_defaults(run=None)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code (see ``fastcheck --help``)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except BrokenPipeError:
        # The reader (head, less) went away. Python would complain once more when it flushes at
        # exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except KeyboardInterrupt:
        return 130
    except FastcheckError as error:
        print(printable(f"fastcheck: {error}", keep="\n"), file=sys.stderr)
        return EXIT_USAGE


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["demo"]:
        from .demo import main as demo_main

        code = demo_main(arguments[1:])
        return int(code or 0)
    parser = build_parser()
    try:
        options = parser.parse_args(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_USAGE
    if options.version:
        print(f"fastcheck {__version__}")
        return EXIT_OK
    if options.command is None:
        parser.print_help()
        return EXIT_USAGE
    code = options.run(options)
    sys.stdout.flush()
    return int(code)
