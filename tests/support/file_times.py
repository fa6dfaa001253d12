"""Processor time of each file of tests, for ``--slowest-files``: wall time says little on a machine
that does other work too.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    """A plugin that prints the files that took the most processor time.

    With ``-n`` each worker of pytest-xdist measures what it runs, and the process that started them
    adds that up: it hears of each test too, and counts nothing of its own.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._number = config.getoption("--slowest-files")
        self._is_measured_here = hasattr(config, "workeroutput") or not config.getoption("tx", None)
        self._seconds: collections.Counter[str] = collections.Counter()
        self._last = processor_seconds()

    def _add(self, name: str) -> None:
        if self._is_measured_here:
            now = processor_seconds()
            self._seconds[name] += now - self._last
            self._last = now

    def pytest_collection_finish(self) -> None:
        self._add("imports and collection")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._add(nodeid.partition("::")[0])

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        getattr(session.config, "workeroutput", {})["file_times"] = dict(self._seconds)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._seconds.update(getattr(node, "workeroutput", {}).get("file_times", {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("slowest files, in seconds of processor time")
        rows = [*self._seconds.most_common(self._number), ("all", sum(self._seconds.values()))]
        for name, seconds in rows:
            terminalreporter.line(f"{seconds:8.1f} {name}")
