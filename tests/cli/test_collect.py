"""fastcheck collect: the options, what is printed, and following until a signal."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastcheck.cli import collect
from fastcheck.cli.main import main
from fastcheck.fleet.manifest import counted_files
from fastcheck.fleet.store import Folder
from support.programs import synthetic_logs

pytest.importorskip("pyarrow")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    synthetic_logs.write(tmp_path / "run7", 6, 4, ranks=2)
    return tmp_path / "run7"


def test_a_log_and_again(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "fleet")
    arguments = ["collect", str(log), "--out", out, "--node", "a.17", "--json"]
    assert main(arguments) == 0 and main(arguments) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["files"] == 1 and first["rows"] > 40 and second["rows"] == 0
    files = counted_files(Folder(out), "run7")  # the log's name
    assert files == ["step=000000-000099/node=a_17.parquet"]


def test_following_until_a_signal(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which comes while the command waits for more."""

    def sleep(seconds: float) -> None:
        signal.raise_signal(signal.SIGTERM)

    clock = SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
    monkeypatch.setattr(collect, "time", clock)
    out = str(tmp_path / "fleet")
    options = ["--run", "r", "--node", "n", "--follow", "--interval", "0.01"]
    assert main(["collect", str(log), "--out", out, *options]) == 0
    assert counted_files(Folder(out), "r") == ["step=000000-000099/node=n.parquet"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["{log}", "--out", "{out}", "--steps-per-file", "0"], "greater than 0"),
        (["{log}", "--out", "{out}", "--interval", "nan"], "greater than 0"),
        (["{log}", "--out", ""], "--out is empty"),
        (["{out}/nothing", "--out", "{out}"], "there is no log here"),
        (["{log}", "--out", "nothing://x"], "a fleet's files can't be opened"),
    ],
)
def test_wrong_usage(
    log: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    text: str,
) -> None:
    given = [one.format(log=log, out=tmp_path / "fleet") for one in arguments]
    assert main(["collect", *given]) == 2
    assert text in capsys.readouterr().err


def test_without_pyarrow(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.fs", None)
    assert main(["collect", str(log), "--out", "x"]) == 2
    assert "pip install 'fastcheck[fleet]'" in capsys.readouterr().err
