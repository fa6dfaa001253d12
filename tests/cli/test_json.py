"""Each command's JSON has the keys of docs/json.md."""

from __future__ import annotations

import re

import pytest
import torch

import fastcheck
from support.paths import ROOT
from support.programs.command_line import shown_json
from support.programs.compare_runs import log_run

#: Keys that are there in some documents only.
SOMETIMES = {"watch", "precision", "page"}


def documented() -> dict[str, set[str]]:
    text = (ROOT / "docs/json.md").read_text().partition("## Keys")[2]
    keys: dict[str, set[str]] = {}
    command = ""
    for row in re.findall(r"^\|(.*?)\| (`.*?)\|", text, re.MULTILINE):
        command = row[0].strip("`| ") or command
        keys.setdefault(command, set()).update(re.findall(r"`(\w+)`", row[1]))
    return keys


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Arguments of each command."""
    folder = tmp_path_factory.mktemp("documents")
    log, other = str(folder / "log"), str(folder / "other")
    log_run(folder / "log", steps=3)
    log_run(folder / "other", steps=3, batch=lambda step, x: x + 1)
    torch.save({"weight": torch.ones(3)}, folder / "model.pt")
    fastcheck.seal(folder / "model.pt", {"weight": torch.ones(3)}, step=1)
    (folder / "steps.py").write_text(
        "import torch\n"
        "def step():\n"
        "    model = torch.nn.Linear(4, 4)\n"
        "    return model, torch.randn(2, 4), lambda x: model(x).square().mean()\n"
    )
    return {
        "show": [log],
        "compare": [log, other],
        "prove": [f"{folder}/steps.py:step", "--relations", "again"],
        "verify": [f"{folder}/model.pt"],
        "doctor": [],
        "report": [log],
        "export": [log, f"{folder}/log.csv"],
        "collect": [log, "--out", f"{folder}/fleet", "--run", "one"],
        "compact": [f"{folder}/fleet"],
        "fleet": [f"{folder}/fleet"],
    }


def test_each_document_has_its_keys(
    capsys: pytest.CaptureFixture[str], places: dict[str, list[str]]
) -> None:
    pytest.importorskip("duckdb")
    assert set(documented()) - {"demo"} == set(places)  # the demo's: test_demo.py
    for command, arguments in places.items():
        found = shown_json(capsys, command, *arguments)
        assert list(found)[:2] == ["fastcheck", "format"] and found["fastcheck"] == command
        keys = set(found) - {"fastcheck", "format"}
        assert keys <= documented()[command] <= keys | SOMETIMES, command


def test_each_command_that_answers_has_an_exit_status() -> None:
    text = (ROOT / "docs/json.md").read_text()
    answers = set(re.findall(r"^\| 1 \| `(\w+)` \|", text, re.MULTILINE))
    assert answers == set(documented()) - {"report", "export", "collect", "compact"}
