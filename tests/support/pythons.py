"""Other releases of Python than the one that runs the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def python_of(version: str) -> str:
    """An interpreter of a release such as "3.9", from PATH or pyenv; the test skips without one."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    of_pyenv = sorted(pyenv.glob(f"versions/{version}.*/bin/python"))
    # One in PATH may be a script of pyenv that finds nothing behind it.
    for python in (shutil.which(f"python{version}"), *map(str, of_pyenv)):
        if python and subprocess.run([python, "-V"], capture_output=True).returncode == 0:
            return python
    pytest.skip(f"no Python {version}")
