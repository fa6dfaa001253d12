"""Tests that run the whole programs of docs/trainers, and hold the output to what is shown.

CI runs those of one process whose trainers it installs, in this process. With FASTCHECK_TRAINERS=1
(`make test-trainers`) all run whose trainers are installed, by the commands that the pages show.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import re
import runpy
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import fastcheck
from fastcheck.monitor.monitor import Monitor
from support.paths import ROOT
from support.trainers import IS_LAB

TESTS = ROOT / "tests"
PAGES = ROOT / "docs" / "trainers"
OF_ONE_PROCESS = ("huggingface", "lightning", "accelerate", "megatron")
NEEDS = {
    "huggingface": ("transformers", "accelerate"),
    "trl": ("trl",),
    "lightning": ("lightning",),
    "accelerate": ("accelerate",),
    "deepspeed": ("deepspeed",),
    "composer": ("composer",),
    "ray": ("ray",),
    "megatron": (),
    "fsdp2": (),
    "torchtitan": (),
}
# Two of Composer's imports do not fit this torch.
COMPOSER = (
    "import sys\nfrom support.composer_imports import finder\nsys.meta_path.insert(0, finder())"
)

pytestmark = [
    pytest.mark.usefixtures("fresh_start"),
    pytest.mark.filterwarnings("default:::(?!fastcheck)"),
]


class Program(NamedTuple):
    page: str
    text: str
    command: str
    shown: list[str]


def programs() -> Iterator[Program]:
    """Those that stop have the command in what is shown; others end."""
    block = r"^```(python)?\n(.*?)^```$"
    for page in sorted(PAGES.glob("*.md")):
        found = re.findall(block, page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        for (language, text), (is_program, output) in zip(found, found[1:]):
            if language and output.startswith("$ "):
                command, dots, *shown = output.splitlines()
                assert dots == "..." and len(shown) >= 2, page
                yield Program(page.stem, text, command[2:], shown)
            elif language and not is_program:
                yield Program(page.stem, text, "", output.splitlines())


PROGRAMS = [one for one in programs() if one.command]
ENDING = [one for one in programs() if not one.command]


def test_each_trainer_has_a_page_with_a_program() -> None:
    assert {one.page for one in PROGRAMS} == set(NEEDS)
    for one in PROGRAMS:
        assert "fastcheck" in one.text + one.command and len(one.text.splitlines()) < 60
        assert f"(trainers/{one.page}.md)" in (PAGES.parent / "trainers.md").read_text()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.page)
def test_the_program_stops_with_what_the_page_shows(program: Program, tmp_path: Path) -> None:
    if not IS_LAB and program.page not in OF_ONE_PROCESS:
        pytest.skip("only in make test-trainers")
    for package in NEEDS[program.page]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    Path("train.py").write_text(program.text)
    output = run(program, tmp_path) if IS_LAB else stop_of("train.py")
    for line in filter(None, program.shown):
        assert line in output, output


@pytest.mark.parametrize("program", ENDING, ids=lambda one: one.page)
@pytest.mark.filterwarnings("ignore::fastcheck.WatchWarning")
def test_the_program_prints_what_the_page_shows(
    program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in NEEDS[program.page]:
        pytest.importorskip(package)
    Path("train.py").write_text(program.text)
    runpy.run_path("train.py", run_name="__main__")
    output = capsys.readouterr().out.splitlines()
    assert [line for line in output if line in program.shown] == program.shown


def stop_of(path: str) -> str:
    """What the program, run in this process, raises in the end. The trainers keep its model: its
    monitor is removed, as it would be with the process.
    """
    with pytest.raises(fastcheck.OverflowDetected) as caught:
        runpy.run_path(path, run_name="__main__")
    for one in gc.get_objects():
        if type(one) is Monitor:
            with contextlib.suppress(fastcheck.OverflowDetected):
                one.remove()
    return "".join(traceback.format_exception_only(caught.type, caught.value))


def run(program: Program, folder: Path) -> str:
    words = program.command.split()
    assert words.pop(0) in ("python", "torchrun")
    if program.command.startswith("torchrun"):
        words = ["-m", "torch.distributed.run", *words]
    paths = [str(ROOT / "python"), str(TESTS)]
    if program.page == "composer":
        Path(folder, "sitecustomize.py").write_text(COMPOSER)
        paths.insert(0, str(folder))
    env = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, *words], env={**os.environ, **env}, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    # Of Ray's workers: the number of the process, and colours.
    return re.sub(
        r"\x1b\[\d+m|(?<=[a-z]) pid=\d+(?=\))|\S+\.py:\d+: ", "", done.stdout + done.stderr
    )


@pytest.fixture(autouse=True)
def precision_of_its_own() -> Iterator[None]:
    """That of Accelerate is the first Accelerator's of a process."""
    yield
    module = sys.modules.get("accelerate.state")
    if module is not None:
        module.AcceleratorState._reset_state(True)
