"""``fastcheck top``: shows a log in the terminal while it grows."""

from __future__ import annotations

import argparse
import math
import os
import re
import select
import shutil
import sys
import time
from dataclasses import dataclass
from typing import Any, Optional

from fastcheck.errors import ConfigError, needed_module
from fastcheck.log.follow import LogFollower
from fastcheck.log.reader import no_log
from fastcheck.report.live.frame import Picture, View, picture, waiting_picture
from fastcheck.report.live.state import SORTS, LiveState
from fastcheck.utils.text.layout import paint, to_ascii, wants_ascii, wants_color

# A sequence after ESC [ or ESC O (ECMA-48; xterm's control sequences), or a character.
_KEY = re.compile(r"\x1b[\[O]([^@-~]*[@-~]?)|(.)", re.DOTALL)
_SEQUENCES = {"A": "up", "B": "down", "H": "home", "1~": "home", "5~": "pageup", "6~": "pagedown"}
_CONTROLS = {
    **dict.fromkeys("\r\n", "enter"),
    **dict.fromkeys("\x7f\x08", "backspace"),
    "\x1b": "escape",
}


class Keyboard:
    """The keys of standard input. Within a ``with`` statement its terminal hands over each key at
    once, and shows none. Where standard input is no terminal (or this system has no termios), there
    are no keys.
    """

    def __init__(self) -> None:
        self._descriptor: Optional[int] = None
        self._before: Optional[list[Any]] = None

    def __enter__(self) -> Keyboard:
        try:
            import termios
            import tty
        except ImportError:  # not a POSIX system
            return self
        try:
            if sys.stdin is None or not sys.stdin.isatty():
                return self
            descriptor = sys.stdin.fileno()
            self._before = termios.tcgetattr(descriptor)
            # DRAIN: keys that were pressed before stay.
            tty.setcbreak(descriptor, termios.TCSADRAIN)
            self._descriptor = descriptor
        except (OSError, ValueError, termios.error):
            self._before = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is None or self._descriptor is None:
            return
        import termios

        termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)
        self._before = self._descriptor = None

    @property
    def has_keys(self) -> bool:
        """True if keys are read."""
        return self._descriptor is not None

    def wait(self, seconds: float) -> list[str]:
        """The keys that are pressed within this time, as soon as there are some: characters, and
        ``up``, ``down``, ``pageup``, ``pagedown``, ``home``, ``enter``, ``backspace``, ``escape``.
        """
        if self._descriptor is None:
            time.sleep(seconds)
            return []
        ready, _, _ = select.select([self._descriptor], [], [], seconds)
        if not ready:
            return []
        data = os.read(self._descriptor, 1024)
        if not data:  # the terminal is gone
            self._before = self._descriptor = None
            return ["q"]
        return parse_keys(data.decode(errors="ignore"))


def parse_keys(text: str) -> list[str]:
    """The keys that a terminal sends as ``text``; those without a name are left out."""
    keys = (
        _CONTROLS.get(char, char if char.isprintable() else "") or _SEQUENCES.get(sequence, "")
        for sequence, char in _KEY.findall(text)
    )
    return [key for key in keys if key]


_INTERVAL = 1.0
_LEAST_INTERVAL = 0.1
_WIDTH = 100

HELP = "a log in the terminal, while it grows"

DESCRIPTION = """\
Shows a log in the terminal while a run writes it: step, loss, loss scale, learning rate, gradient
norm, what the log costs, the events, and the sites with the least headroom: bits between the
largest magnitude and the largest number of the dtype, with a line of the last steps. Reads what is
new, once a second, and starts no server. If there is no log yet, it waits for one."""

EPILOG = """\
keys: q quits; j k, arrows and page keys scroll; s sorts (headroom, abs max, name); / filters by a
part of the name or a pattern such as layers.*.attn, Enter keeps the filter, Esc shows all sites

examples:
  fastcheck top fastcheck_log                    the newest log, or the first one to come
  fastcheck top runs/new --interval 0.5          every half second
  fastcheck top LOG --once                       one picture as plain text, for a file or a pipe
  fastcheck top LOG --once --sort name --filter attn --rows 100

The live picture needs rich: pip install 'fastcheck[tools]'. --once needs nothing.

exit codes: 0 shown; 2 no log (with --once), no terminal, or wrong usage; 130 interrupted"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", help="log directory, or the fastcheck_log/ above it (the newest)")
    parser.add_argument("--once", action="store_true", help="print the state once, and exit")
    parser.add_argument(
        "--interval",
        type=float,
        default=_INTERVAL,
        metavar="S",
        help=f"seconds between updates; default: {_INTERVAL:g}",
    )
    parser.add_argument(
        "--rows",
        type=int,
        metavar="N",
        help="number of sites; default: as many as fit into the terminal",
    )
    parser.add_argument("--sort", choices=SORTS, default=SORTS[0], help="which sites come first")
    parser.add_argument(
        "--filter", default="", metavar="TEXT", help="only sites whose name has TEXT in it"
    )


def run(options: argparse.Namespace) -> int:
    """Exit code 0; what goes wrong is raised."""
    _check(options)
    follower, state = LogFollower(options.log), LiveState()
    view = View(sort=options.sort, pattern=options.filter)
    shower = _Shower(options, follower, state, view)
    if options.once:
        shower.poll()
        if follower.directory is None:
            raise no_log(options.log)
        # The terminal's width, or COLUMNS; 100 of a file or a pipe.
        columns = max(shutil.get_terminal_size((_WIDTH, 0)).columns, 20)
        _print(shower.draw(columns, None))
        return 0
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        raise ConfigError(
            "top needs a terminal for its output, and a TERM other than dumb; fastcheck top LOG "
            "--once prints the state once"
        )
    hint = "pip install 'fastcheck[tools]', or --once, which needs nothing"
    needed_module("rich", "the live picture", hint)
    shower.follow(options.interval)
    return 0


def _check(options: argparse.Namespace) -> None:
    if not math.isfinite(options.interval) or options.interval < _LEAST_INTERVAL:
        least = f"{_LEAST_INTERVAL} seconds or more"
        raise ConfigError(f"--interval must be {least}, got {options.interval:g}")
    if options.rows is not None and options.rows < 1:
        raise ConfigError(f"--rows must be 1 or more, got {options.rows}")
    if os.path.exists(options.log) and not os.path.isdir(options.log):
        raise no_log(options.log)


@dataclass(eq=False)
class _Shower:
    """A reader that follows a log and draws its state."""

    _options: argparse.Namespace
    _follower: LogFollower
    _state: LiveState
    _view: View

    def __post_init__(self) -> None:
        self._ascii_only = wants_ascii(sys.stdout)

    def poll(self) -> None:
        """Reads the records that were added since the last call."""
        self._state.take(self._follower.poll(), time.monotonic())

    def draw(self, width: int, height: Optional[int]) -> Picture:
        """The picture of everything that was read so far."""
        directory = self._follower.directory
        if directory is None:
            return waiting_picture(self._options.log, width)
        return picture(
            self._state,
            self._view,
            path=directory,
            width=width,
            rows=self._options.rows,
            height=height,
            wall=time.time(),
            ascii_only=self._ascii_only,
        )

    def follow(self, interval: float) -> None:
        """Draws until a key ends it."""
        from rich.console import Console
        from rich.live import Live

        console = Console(file=sys.stdout, markup=False, emoji=False, highlight=False)
        color = wants_color(sys.stdout)
        with (
            Keyboard() as keyboard,
            Live(
                console=console,
                screen=True,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            ) as live,
        ):
            self._view.has_keys = keyboard.has_keys
            due = 0.0
            while True:
                if time.monotonic() >= due:
                    self.poll()
                    due = time.monotonic() + interval
                size = console.size
                shown = self.draw(size.width, size.height)
                live.update(_rich_text(shown, color, self._ascii_only), refresh=True)
                keys = keyboard.wait(max(due - time.monotonic(), 0.0))
                if not all(self._view.press(key, max(shown.shown, 1)) for key in keys):
                    return


def _rich_text(shown: Picture, color: bool, ascii_only: bool) -> Any:
    from rich.text import Text

    text = Text(no_wrap=True, overflow="crop", end="")
    for number, line in enumerate(shown.lines):
        if number:
            text.append("\n")
        for piece, style in line:
            piece = to_ascii(piece) if ascii_only else piece
            text.append(piece, style.replace("red", "bold red") or None if color else None)
    return text


def _print(shown: Picture) -> None:
    if not wants_color(sys.stdout):
        print(shown.text(wants_ascii(sys.stdout)))
        return
    for line in shown.lines:
        print("".join(paint(text, style, True) for text, style in line))
