"""Runs of pytest that end as their tests do: with one that waits for ever, beside another run; and
of programs that support/processes.py runs.
"""

from __future__ import annotations

import getpass
import re
import shutil
import sys
from pathlib import Path

import pytest

from support.paths import ROOT
from support.processes import run_code, run_python

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


#: rmdir() as it fails where another run of pytest locks the folder that this one removes.
OTHER_RUN = """\
import errno, os

def rmdir(path, *, dir_fd=None):
    raise OSError(errno.ENOTEMPTY, "Directory not empty", path)

os.rmdir = rmdir
"""


def test_a_run_beside_it_fails_none(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_passes(tmp_path):\n    pass\n")
    (tmp_path / "other_run.py").write_text(OTHER_RUN)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    user = tmp_path / f"pytest-of-{getpass.getuser()}"
    left = user / "garbage-of-another"
    left.mkdir(parents=True)
    user.chmod(0o700)
    done = run_python(
        *("-m", "pytest", "-p", "other_run", str(tmp_path)),
        cwd=tmp_path,
        env={
            "PYTEST_ADDOPTS": "",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_DEBUG_TEMPROOT": str(tmp_path),
            "PYTHONPATH": str(tmp_path),
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not left.exists(), "pytest began to remove nothing: the test shows nothing"


def test_a_program_reads_what_its_spawned_processes_have_pickled() -> None:
    """Its classes are those of ``__mp_main__`` there."""
    code = """
import pickle
class Found:
    __module__ = "__mp_main__"
print(type(pickle.loads(pickle.dumps(Found()))) is Found)
"""
    done = run_code(code)
    assert (done.stdout, done.stderr) == ("True\n", "")
