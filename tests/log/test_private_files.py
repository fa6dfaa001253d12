"""Logs and dumps hold a run's values: their owner alone can read them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fastcheck
from support.programs.op_level import model_with
from support.programs.training import Net, stopped, train

pytestmark = [
    pytest.mark.usefixtures("op_observer"),
    pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's"),
]


@pytest.fixture(autouse=True, params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def readable_by_others(place: Path, umask: int) -> list[str]:
    """Files and folders with a right of others, or one that the umask takes away."""
    found = [place, *place.rglob("*")]
    assert len([path for path in found if path.is_file()]) >= 3
    return [
        f"{path}: {path.stat().st_mode & 0o777:o}"
        for path in found
        if path.stat().st_mode & 0o777 & (0o077 | umask)
    ]


def test_of_a_log(umask: int, tmp_path: Path) -> None:
    model = Net()
    with fastcheck.install(model, log_dir=tmp_path / "logs" / "mine"):
        train(model, 2)
    assert readable_by_others(tmp_path / "logs", umask) == []


def test_of_a_dump(umask: int, tmp_path: Path) -> None:
    with fastcheck.Dumper(tmp_path / "dumps" / "mine", tensors=True):
        Net()(torch.ones(2, 8))
    assert readable_by_others(tmp_path / "dumps", umask) == []


def test_of_what_a_stop_leaves(umask: int, tmp_path: Path) -> None:
    model = model_with(lambda x: torch.sqrt(-x.abs() - 1))
    stop = fastcheck.Stop(dump=tmp_path / "dumps")
    fastcheck.install(model, level="op", sync="call", stop=stop)
    with torch.no_grad():
        stopped(model, torch.ones(2, 8))
    assert readable_by_others(tmp_path, umask) == []


def test_a_folder_of_the_users_is_left_as_it_is(umask: int, tmp_path: Path) -> None:
    os.umask(0o022)
    place = tmp_path / "shared"
    place.mkdir(mode=0o755)
    model = Net()
    with fastcheck.install(model, log_dir=place):
        train(model, 2)
    assert place.stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in place.iterdir()} == {0o600}
