"""Processor time of each file of tests, for ``--slowest-files``: wall time says little on a machine
that does other work too.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["FileTimes"]


def processor_seconds() -> float:
    """User and system time of this process and of all that it started: what has ended, and the
    servers that fork the processes of tests (tests/support/processes.py, tests/support/ranks),
    which still run.
    """
    times = os.times()
    ended = times.user + times.system + times.children_user + times.children_system
    return ended + sum(_of_running(child) for child in _children(os.getpid()))


def _of_running(pid: int) -> float:
    try:
        # After the name, which may contain anything: proc(5), fields 14 to 17.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
    except OSError:  # it has just ended
        return 0.0
    own = sum(map(int, fields)) / os.sysconf("SC_CLK_TCK")
    return own + sum(_of_running(child) for child in _children(pid))


def _children(pid: int) -> Iterator[int]:
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            yield from map(int, path.read_text().split())
        except OSError:
            continue


class FileTimes:
    """A plugin that prints the files that took the most processor time."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._seconds: collections.Counter[str] = collections.Counter()
        self._last = processor_seconds()

    def _add(self, name: str) -> None:
        now = processor_seconds()
        self._seconds[name] += now - self._last
        self._last = now

    def pytest_collection_finish(self) -> None:
        self._add("imports and collection")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._add(nodeid.partition("::")[0])

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("slowest files, in seconds of processor time")
        rows = [*self._seconds.most_common(self._number), ("all", sum(self._seconds.values()))]
        for name, seconds in rows:
            terminalreporter.line(f"{seconds:8.1f} {name}")
