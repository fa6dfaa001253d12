"""A program that changes its working directory, or deletes it: what was given relative to the first
one stays there, and messages name it as it is found.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import torch

import fastcheck
from fastcheck.log.writer import found_at
from support.programs.op_level import model_with, train
from support.programs.stops_with_dumps import FOLDER, roots, watch
from support.programs.training import stopped

pytestmark = pytest.mark.usefixtures("op_observer")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("start", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "start")
    return tmp_path / "elsewhere"


@pytest.mark.parametrize("log_dir", ["log", None])
def test_what_is_written_lies_below_the_first_and_is_named_as_found(
    elsewhere: Path, log_dir: str | None
) -> None:
    start, model = Path.cwd(), model_with(roots)
    with watch(model, log_dir=log_dir):
        os.chdir(elsewhere)
        stop = stopped(train, model, 1)
    assert list(elsewhere.iterdir()) == []
    assert {path.name for path in start.iterdir()} == {log_dir or "fastcheck_log", str(FOLDER)}
    named = re.findall(r"fastcheck show (\S+)", str(stop))
    assert named and all(Path(one).is_dir() for one in named)
    assert f"{start / FOLDER}{os.sep}" in str(stop)


def test_paths_stay_as_they_were_given_where_nothing_changed(elsewhere: Path) -> None:
    assert found_at("log", os.getcwd()) == "log"
    assert found_at(str(elsewhere), "/usr") == str(elsewhere)


def test_a_working_directory_that_is_gone(elsewhere: Path) -> None:
    os.chdir(elsewhere)
    shutil.rmtree(elsewhere)
    model = torch.nn.Linear(2, 2)
    with fastcheck.install(model, overflow_nums=1) as monitor:
        model(torch.ones(1, 2)).sum().backward()
        assert monitor.summary()
