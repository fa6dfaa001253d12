"""Every ``fastcheck`` command of the pages, as it is printed: run where it ends by itself, on files
of the names that the page has; its arguments parsed where it does not, or needs a device.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import fastcheck
from fastcheck.cli.main import build_parser, main
from support.paths import ROOT
from support.programs.compare_runs import log_run

PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/trainers/*.md")]
LOGS = ("LOG", "ACTUAL", "REFERENCE", "A", "B", "run_log", "fastcheck_log/run")
DUMPS = ("actual", "reference", "fused", "plain")
#: Those that go on until they are interrupted, run a program, or need another device than the CPU.
PARSED = re.compile(r"top (?!.*--once)|run |.*--follow|doctor --device (?!cpu)")


class Command(NamedTuple):
    page: str
    line: str

    @property
    def arguments(self) -> list[str]:
        return shlex.split(self.line, comments=True)[1:]


def commands() -> list[Command]:
    found = []
    for page in sorted(PAGES):
        for block in re.findall(r"^```(?:\w*)\n(.*?)^```", page.read_text(), re.M | re.S):
            for line in re.findall(r"^(?:\$ )?(fastcheck [a-z].*)$", block, re.M):
                command = line.partition(" | ")[0].replace("<run>", "run")
                found.append(Command(str(page.relative_to(ROOT)), command))
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with logs, dumps and checkpoints of the names that the pages have."""
    folder = tmp_path_factory.mktemp("pages")
    log_run(folder / "a log", steps=3)
    model = torch.nn.Linear(2, 2)
    with fastcheck.Dumper(folder / "a dump", step=1, model=model):
        model(torch.ones(1, 2)).sum().backward()
    words = {word.strip("/") for one in commands() for word in one.arguments}
    steps = {word.rpartition("/")[0] for word in words if re.search(r"/step\d+$", word)}
    for name in words | steps | set(LOGS) | set(DUMPS):
        target = folder / name
        if name in LOGS or name.startswith("runs/"):
            shutil.copytree(folder / "a log", target)
        elif name in steps or name in DUMPS or name.startswith("dumps/"):
            shutil.copytree(folder / "a dump", target)
    weights = {"weight": torch.ones(3)}
    (folder / "backup").mkdir()
    (folder / "mindspore_arrays").mkdir()
    save_file(weights, folder / "step1000.safetensors")
    for name in ("backup/step1000.pt", "torch.pth", "model.pt", "checkpoint"):
        torch.save(weights, folder / name)
    np.save(folder / "mindspore_arrays" / "weight.npy", np.ones(3, np.float32))
    for name in ("model.pt", "checkpoint"):
        fastcheck.seal(folder / name, weights, step=1)
    (folder / "train.py").write_text(
        "import torch\n"
        "def step():\n"
        "    model = torch.nn.Linear(4, 4)\n"
        "    return model, torch.randn(2, 4), lambda x: model(x).square().mean()\n"
    )
    for fleet in ("fleet", "shared/fleet"):
        assert main(["collect", str(folder / "run_log"), "--out", str(folder / fleet)]) == 0
    return folder


def test_the_pages_have_commands_of_each_kind() -> None:
    names = {one.arguments[0] for one in commands()}
    assert {"run", "show", "compare", "report", "top", "fleet", "verify", "prove"} <= names


@pytest.mark.parametrize("command", commands(), ids=lambda one: f"{one.page}: {one.line}")
def test_the_command_is_as_it_is_printed(
    command: Command,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [re.sub("^/shared", f"{place}/shared", word) for word in command.arguments]
    if PARSED.match(" ".join(arguments)):
        build_parser().parse_args(arguments)
        return
    if arguments[0] == "fleet":
        pytest.importorskip("duckdb")
    monkeypatch.chdir(place)
    status = main(arguments)
    assert status in (0, 1), capsys.readouterr().err
