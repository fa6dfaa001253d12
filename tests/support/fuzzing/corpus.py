"""Small valid files of every kind that fastcheck reads, and the commands that read them."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed.checkpoint

import fastcheck
from fastcheck.cli.main import main
from support.paths import TESTS
from support.programs.compare_runs import log_run
from support.programs.dumping import dumped_run
from support.programs.training import Net

from .mutations import Choose, mutate

__all__ = ["Case", "cases", "run_mutated"]


class Case(NamedTuple):
    """``files`` are mutated one at a time, then the ``commands`` run."""

    name: str
    files: list[Path]
    commands: list[list[str]]


def cases(place: Path) -> list[Case]:
    """Writes the files below ``place``."""
    made = [*_logs(place), *_dumps(place), *_checkpoints(place), _seal(place), *_msprobe(place)]
    return [*made, _settings(place)]


def run_mutated(case: Case, choose: Choose) -> list[int]:
    """Mutates one file, runs the commands, and puts the file back; the exit codes."""
    path = case.files[choose(len(case.files))]
    before = path.read_bytes()
    path.write_bytes(mutate(before, choose))
    try:
        return [main(command) for command in case.commands]
    finally:
        path.write_bytes(before)


def _below(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file())


def _compared(name: str, path: Path, *more: list[str]) -> Case:
    """With an untouched copy as the other side."""
    other = path.with_name(f"whole-{path.name}")
    if path.is_dir():
        shutil.copytree(path, other)
    else:
        shutil.copy(path, other)
    files = _below(path) if path.is_dir() else [path]
    return Case(name, files, [["compare", str(path), str(other), "--all"], *more])


def _shown(path: Path) -> list[list[str]]:
    table = str(path.with_name("table.csv"))
    return [
        ["show", str(path)],
        ["show", str(path), "--site", "*", "--limit", "0"],
        ["show", str(path), "--json"],
        ["export", str(path), table, "--force"],
    ]


def _logs(place: Path) -> list[Case]:
    def spoil(step: int, x: torch.Tensor) -> torch.Tensor:
        return x * float("nan") if step == 1 else x

    path = Path(log_run(place / "log", steps=2, batch=spoil, level="op"))
    page, steps = (str(place / f"log.{end}") for end in ("html", "csv"))
    pages = [
        ["report", str(path), "-o", page],
        ["export", str(path), steps, "--steps", "--force"],
    ]
    shown = _compared("log", path, *_shown(path))
    return [shown, Case("log-pages", shown.files, pages)]


def _dumps(place: Path) -> list[Case]:
    made = []
    for name, options in (("records", {}), ("values", {"tensors": True})):
        path = place / f"dump-{name}"
        dumped_run(path, steps=1, model=Net, **options)
        made.append(_compared(f"dump-{name}", path, *_shown(path)))
    return made


def _checkpoints(place: Path) -> list[Case]:
    state = {"a.weight": torch.arange(12.0).reshape(3, 4), "a.bias": torch.ones(3).half()}
    torch.save({"model": state, "epoch": 3}, place / "new.pt")
    torch.save(state, place / "old.pt", _use_new_zipfile_serialization=False)
    arrays = {name: tensor.numpy() for name, tensor in state.items()}
    np.save(place / "one.npy", arrays["a.weight"])
    np.savez(place / "plain.npz", **arrays)
    np.savez_compressed(place / "packed.npz", **arrays)
    header = json.dumps({"w": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}}).encode()
    raw = arrays["a.weight"].tobytes()
    (place / "w.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + raw)
    with warnings.catch_warnings():  # of a process without other ranks
        warnings.simplefilter("ignore")
        torch.distributed.checkpoint.save(state, checkpoint_id=place / "shards", no_dist=True)
    names = ("new.pt", "old.pt", "one.npy", "plain.npz", "packed.npz", "w.safetensors", "shards")
    return [_compared(name, place / name) for name in names]


def _seal(place: Path) -> Case:
    model = Net()
    path = place / "sealed.pt"
    torch.save(model.state_dict(), path)
    seal = fastcheck.seal(path, model, step=3)
    return Case("seal", [Path(seal.path)], [["verify", str(path)], ["verify", str(path), "--json"]])


def _msprobe(place: Path) -> list[Case]:
    made = []
    for name in ("statistics", "tensors"):
        path = place / f"msprobe-{name}"
        shutil.copytree(TESTS / "support" / "msprobe" / name, path)
        made.append(_compared(path.name, path))
    return made


def _settings(place: Path) -> Case:
    path = place / "environment.json"
    path.write_text(json.dumps(fastcheck.environment(), default=os.fspath))
    return _compared("settings", path)
