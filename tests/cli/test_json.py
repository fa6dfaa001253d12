"""Each command's JSON has the keys of docs/json.md."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fastcheck
from fastcheck.cli import demo
from fastcheck.cli.main import main
from fastcheck.fleet.store import Folder
from support.paths import ROOT
from support.processes import run_python
from support.programs.command_line import shown_json
from support.programs.compare_runs import log_run
from support.programs.synthetic_fleets import generator

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
        "def leaking():\n"
        "    model = torch.nn.Linear(4, 4)\n"
        "    return model, torch.randn(2, 4), lambda x: model(x - x[0]).square().mean()\n"
        "def raising():\n"
        "    raise KeyError('its own')\n"
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
        "fleet": [f"{folder}/fleet"],
    }


def test_each_document_has_its_keys(
    capsys: pytest.CaptureFixture[str], places: dict[str, list[str]]
) -> None:
    pytest.importorskip("duckdb")
    assert set(documented()) == set(places)
    for command, arguments in places.items():
        found = shown_json(capsys, command, *arguments)
        assert list(found)[:2] == ["fastcheck", "format"] and found["fastcheck"] == command
        keys = set(found) - {"fastcheck", "format"}
        assert keys <= documented()[command] <= keys | SOMETIMES, command


def test_the_commands_without_json_are_named(
    capsys: pytest.CaptureFixture[str], places: dict[str, list[str]]
) -> None:
    text = (ROOT / "docs/json.md").read_text()
    without = set(re.findall(r"`(\w+)`", text.partition(" takes `--json`")[0]))
    assert not without & set(places)
    status("--help")
    listed = capsys.readouterr().out.partition("\ncommands:")[2]
    assert set(re.findall(r"^    ([a-z]+) ", listed, re.M)) == without | set(places)
    for command in without | set(places):
        status(command, "--help")
        assert ("--json" in capsys.readouterr().out) is (command not in without), command


def status(*arguments: str) -> object:
    try:
        return main(list(arguments))
    except SystemExit as stop:
        return stop.code


def interrupted(_: Any) -> int:
    raise KeyboardInterrupt


def test_the_exit_statuses_are_those_of_the_table(
    places: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("duckdb")
    pytest.importorskip("pyarrow")
    fleets = generator()
    for name in ("argv", "path"):  # which fastcheck run changes
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    monkeypatch.setattr(demo, "STEPS", 3)
    steps, model, ends = places["prove"][0][: -len(":step")], tmp_path / "m.pt", tmp_path / "e.py"
    torch.save({"weight": torch.ones(3)}, model)
    fastcheck.seal(model, {"weight": torch.ones(3)}, step=1)
    torch.save({"weight": torch.zeros(3)}, model)
    ends.write_text("raise SystemExit(7)\n")
    shape = fleets.Shape(ranks=32, sites=20, steps=24, shards=2)
    for name, faults in (("healthy", ()), ("faulty", (fleets.Fault("bitflip", (5,), 17, 2),))):
        fleets.write_fleet(Folder(tmp_path / name), shape, faults, 5)
    log = places["show"][0]
    yes = {**places, "compare": [log, log], "fleet": [f"{tmp_path}/healthy"]}
    no = {
        "compare": places["compare"],
        "prove": [f"{steps}:leaking", "--relations", "permuted"],
        "verify": [str(model)],
        "fleet": [f"{tmp_path}/faulty"],
        "show": [log, "--site", "nothing"],
        "demo": [],
    }
    again = {"export": ["--force"], "collect": ["--node", "other"]}  # where another test wrote
    commands = [*yes, "top", "run", "demo"]
    codes = {
        ("0", "all"): {status(name, *given, *again.get(name, [])) for name, given in yes.items()}
    }
    broken = run_python("-m", "fastcheck", "doctor", env={"FASTCHECK_CPU_ISA": "mmx"})
    codes |= {("1", f"`{name}`"): {status(name, *given)} for name, given in no.items()}
    codes["1", "`doctor`"] = {broken.returncode}
    codes["2", "all"] = {status(name, "--nonsense") for name in commands} | {
        status(name, f"{tmp_path}/nowhere", *yes.get(name, [])[1:])
        for name in commands
        if name not in ("doctor", "demo")
    }
    assert status("run", str(ends)) == 7, "that of the program"
    codes["2", "`prove`"] = {status("prove", f"{steps}:raising")}
    for name in commands:
        main_of = "main" if name == "demo" else "run"
        monkeypatch.setattr(importlib.import_module(f"fastcheck.cli.{name}"), main_of, interrupted)
    codes["130", "all"] = {status(name, *yes.get(name, [log])) for name in commands}
    table = (ROOT / "docs/json.md").read_text().partition("## Exit statuses")[2].partition("##")[0]
    rows = re.findall(r"^\| (\S.*?) \| (`\w+`|all) \|", table, re.MULTILINE)
    wanted = {(status, name): {int(status)} for status, name in rows if status.isdecimal()}
    assert codes == wanted and len(rows) == len(wanted) + 1
