"""Each guide begins with a program and its output: both are run, and what they print is compared.

The first block of Python of a page is the program, the next block what it prints, or what
``$ fastcheck ...`` prints after it; ``...`` stands for what is left out. Numbers may differ, as
they depend on the processor.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from support.paths import ROOT
from support.processes import run_python

PAGES = (
    "guide",
    "op-level",
    "watch",
    "invariants",
    "dump",
    "compare",
    "override",
    "precision",
    "checkpoints",
    "report",
    "torch-compile",
    "compat",
)
LONGEST = 24


def blocks(page: str) -> tuple[str, list[str]]:
    """The program of a page, and the lines that it shows of what is printed."""
    text = (ROOT / "docs" / f"{page}.md").read_text("utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    first = next(place for place, (language, _) in enumerate(found) if language == "python")
    return found[first][1], found[first + 1][1].splitlines()


def masked(text: str) -> str:
    """Without numbers, bars, folders and line breaks."""
    text = re.sub("[▁-█×]+", "|", re.sub(r"\S*/train\.py", "train.py", text))
    return " ".join(re.sub(r"(?<![A-Za-z_])[-+]?\d[\d,.]*(?:e[-+]?\d+)?", "#", text).split())


@pytest.mark.parametrize("page", PAGES)
def test_a_guide_begins_with_a_program_that_prints_what_is_shown(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, shown = blocks(page)
    assert len([line for line in program.splitlines() if line]) <= LONGEST
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "train.py").write_text(program)
    done = run_python("train.py", cwd=tmp_path)
    if shown[0].startswith("$ fastcheck "):
        assert done.returncode == 0, done.stderr
        done = run_python("-m", *shlex.split(shown.pop(0)[2:]), cwd=tmp_path)
    printed, place = masked(done.stdout + done.stderr), 0
    for part in filter(None, map(str.strip, masked("\n".join(shown)).split("..."))):
        assert part in printed[place:], (part, printed)
        place = printed.index(part, place) + len(part)
