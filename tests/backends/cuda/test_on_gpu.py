"""bench/on_gpu.sh, with stand-ins for Python, cmake and compute-sanitizer: a phase that fails keeps
no other from its turn.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

PYTHON = """#!/bin/sh
case "$*" in
  *is_available*) echo 1 ;;
  *get_device_capability*) echo 90 ;;
  "- "*) exec {python} "$@" ;;
  *) echo "$PYTEST_ADDOPTS | $*" >> {log}
    case "$*" in *test_gpu.py*) exit 1 ;; esac ;;
esac
"""
CMAKE = """#!/bin/sh
case "$1" in --install) mkdir -p build/gpu/site ;; esac
"""
SANITIZER = """#!/bin/sh
case "$1" in --help) echo "  --kernel-regex arg" ;; *) echo "sanitizer $*" >> {log} ;; esac
"""


def test_every_phase_has_its_turn(tmp_path: Path) -> None:
    for folder in ("bench", "bin", "python/fastcheck"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "python/fastcheck/__init__.py").touch()
    script = tmp_path / "bench/on_gpu.sh"
    script.write_text((ROOT / "bench/on_gpu.sh").read_text())
    log, out = tmp_path / "log", tmp_path / "out"
    for name, text in {"python": PYTHON, "cmake": CMAKE, "compute-sanitizer": SANITIZER}.items():
        stand_in = tmp_path / "bin" / name
        stand_in.write_text(text.format(python=sys.executable, log=log))
        stand_in.chmod(0o755)
    path = f"{tmp_path}/bin:/usr/bin:/bin"
    environment = {"PATH": path, "PYTHON": str(tmp_path / "bin/python"), "OUT": str(out)}
    done = subprocess.run(
        ["bash", str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr  # no bars were measured

    phases = json.loads((out / "summary.json").read_text())["phases"]
    states = {phase["name"]: phase["state"] for phase in phases}
    assert states.pop("tests on the GPU") == "failed"
    assert len(states) == 10 and set(states.values()) == {"passed"}, states
    lines = log.read_text().splitlines()
    assert any("bench/gpu_train.py" in line for line in lines)
    for line in lines:
        files = re.findall(r"(?:tests|bench)/\S+\.py", line.partition("|")[2] or line)
        assert all((ROOT / file).is_file() for file in files), files
        # pyproject.toml has options that not every pytest knows.
        assert "-m pytest" not in line or "sanitizer" in line or "-c /dev/null" in line
