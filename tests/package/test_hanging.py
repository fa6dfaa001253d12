"""A test that waits for ever fails, and the others of ``make test`` run."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from support.paths import ROOT
from support.processes import run_python

HANGING = "import threading\ndef test_waits():\n    threading.Event().wait()\n"
LIMIT = "[pytest]\nfaulthandler_timeout = 3\nfaulthandler_exit_on_timeout = true\n"


@pytest.mark.skipif(sys.platform == "win32", reason="make test is for Linux and macOS")
def test_the_run_ends_and_says_where(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(HANGING)
    (tmp_path / "test_b.py").write_text("def test_passes():\n    pass\n")
    (tmp_path / "pytest.ini").write_text(LIMIT)
    options = re.search(r"^IN_PROCESSES = (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert options is not None
    done = run_python(
        *("-m", "pytest", "-n", "2", *options[1].split(), str(tmp_path)),
        cwd=tmp_path,
        env={"PYTEST_ADDOPTS": "", "COLUMNS": "200"},
    )
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout
    assert "crashed while running 'test_a.py::test_waits'" in done.stdout
    assert 'threading.py", line' in done.stderr + done.stdout and "in wait" in done.stderr
