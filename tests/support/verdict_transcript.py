"""A pytest plugin that writes each change of a finding to the file named by ``EVDUMP``, one a line:

    EVDUMP=before.tsv PYTHONPATH=tests pytest -p support.verdict_transcript tests/verdict

Two versions of the rules give the same verdicts where their files are equal. Tests with threads of
their own differ from run to run. Changes in other processes are not written.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

_running = [""]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _running[0] = item.nodeid


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.get("EVDUMP")
    if not path:
        raise pytest.UsageError("set EVDUMP to the file that the transcript is written to")
    lines: list[str] = []
    config.add_cleanup(lambda: Path(path).write_text("".join(lines), encoding="utf-8") and None)
    # After the conftest, which chooses the device.
    from fastcheck.monitor.session.event_store import EventStore

    take_changes, process = EventStore._take_changes, os.getpid()

    def take(self: EventStore, step: Any) -> None:
        findings = step.findings if hasattr(step, "rules") else step.judge
        changed = list(findings.changed)
        take_changes(self, step)
        for finding in changed if os.getpid() == process else ():
            lines.append(_line(self, step.index, finding))

    EventStore._take_changes = take  # type: ignore[method-assign]  # it notes what was taken


def _line(store: Any, step: int, finding: Any) -> str:
    fields = (
        _running[0],
        step,
        finding.seq,
        finding.role,
        store.sites[finding.blamed.site],
        finding.verdict.name,
        *map(int, (finding.counted, finding.is_data, finding.is_allowed, finding.uses.is_absorbed)),
        finding.uses.ended_by,
        "" if finding.cause is None else finding.cause.seq,
        finding.reason,
    )
    return "\t".join(map(str, fields)).replace("\n", " ") + "\n"
