"""Tests that run the whole programs of docs/trainers.md, and hold the output to what is shown."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from support.processes import run_python

PAGE = Path(__file__).resolve().parents[2] / "docs" / "trainers.md"


@pytest.mark.parametrize(
    ("section", "package"),
    [("Hugging Face", "transformers"), ("Lightning", "lightning"), ("Accelerate", "accelerate")],
)
def test_the_program_stops_with_what_the_page_shows(
    section: str, package: str, tmp_path: Path
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2]
    blocks = re.findall(r"^```(?:python)?\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    program, shown = blocks[:2]
    (tmp_path / "train.py").write_text(program)
    done = run_python("train.py", cwd=tmp_path)
    first, *expected = shown.splitlines()[1:]
    assert first == "..." and len(expected) == 3
    assert done.returncode == 1 and "\n".join(expected) in done.stderr, done.stderr
    assert "fastcheck.callbacks." in program and len(program.splitlines()) < 40
