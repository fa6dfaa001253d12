"""Each guide begins with a program and its output: both are run, and what they print is compared.

The first block of Python of a page is the program, the next block what it prints: by itself, or by
the commands that follow ``$``. ``...`` stands for what is left out. Numbers may differ, as they
depend on the processor.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import ROOT, TESTS
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
    "fleet",
    "top",
    "trainers",
    "backends",
    "npu",
)
#: What runs a command of a page.
RUN: dict[str, tuple[object, ...]] = {
    "python": (),
    "torchrun": (TESTS / "support/programs/torchrun.py",),
    "fastcheck": ("-m", "fastcheck"),
}
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


def commands(shown: list[str]) -> Iterator[tuple[list[str], str]]:
    """The commands of a block, each with what it prints; the program comes first."""
    if not re.match(r"\$ .*\btrain\.py$", shown[0]):
        shown = ["$ python train.py", "...", *shown]
    for part in re.split(r"^\$ ", "\n".join(shown), flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield shlex.split(command), output


@pytest.mark.parametrize("page", PAGES)
def test_a_guide_begins_with_a_program_that_prints_what_is_shown(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page == "fleet":
        pytest.importorskip("duckdb")
    program, shown = blocks(page)
    assert len([line for line in program.splitlines() if line]) <= LONGEST
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "train.py").write_text(program)
    done = None
    for (name, *arguments), output in commands(shown):
        assert done is None or done.returncode == 0, done.stderr
        done = run_python(*RUN[name], *arguments, cwd=tmp_path)
        printed, place = masked(done.stdout + done.stderr), 0
        for part in filter(None, map(str.strip, masked(output).split("..."))):
            assert part in printed[place:], (part, printed)
            place = printed.index(part, place) + len(part)
