"""``fastcheck compare`` and ``fastcheck export``: what they print, write and return."""

from __future__ import annotations

import csv
import importlib
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastcheck
from fastcheck.cli.main import main
from fastcheck.comparison.row import COLUMNS
from fastcheck.log import table
from fastcheck.log.reader import read_log
from fastcheck.log.writer import RecordLog
from fastcheck.record.format import Flag, Verdict
from fastcheck.record.site import SiteTable
from support.programs.command_line import strict
from support.programs.compare_runs import log_run
from support.records import record_builder as build


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The second differs from the first in the batch of step 1."""
    place = tmp_path_factory.mktemp("runs")
    reference = log_run(place / "reference", steps=3)
    actual = log_run(place / "actual", steps=3, batch=lambda step, x: x.flip(0) if step == 1 else x)
    return actual, reference


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    code = main([os.fspath(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


# compare


def test_exit_codes(
    capsys: pytest.CaptureFixture[str], runs: tuple[str, str], tmp_path: Path
) -> None:
    actual, reference = runs
    assert run(capsys, "compare", reference, reference)[0] == 0
    assert run(capsys, "compare", actual, reference)[0] == 1
    for wrong in (
        ("compare", actual, tmp_path / "nothing"),
        ("compare", actual, reference, "--accept", "batch"),
        ("compare", actual, reference, "--threshold", "float32"),
        ("compare", actual, reference, "--rename", tmp_path / "none.json"),
        ("compare", actual, reference, "--csv", tmp_path / "no" / "such" / "place.csv"),
        ("compare", actual),
    ):
        code, out, err = run(capsys, *wrong)
        assert code == 2 and out == "" and err, wrong


def test_the_report_is_plain_off_a_terminal(
    capsys: pytest.CaptureFixture[str], runs: tuple[str, str]
) -> None:
    code, out, err = run(capsys, "compare", *runs)
    assert code == 1 and err == "" and "\x1b" not in out
    lines = out.splitlines()
    assert lines[0].startswith("compare   actual     ")
    answers = {line[10:28].strip(): line[28:38].strip() for line in lines if len(line) > 28}
    assert answers["environment"] == "yes" and answers["batches"] == "NO"
    assert answers["forward"] == "-"
    assert "first at step 1: the model · forward · input[0]" in out
    assert "different: batches." in out
    assert all(len(line) <= 100 for line in lines if "/" not in line)


def test_all_goes_on_after_the_first_no(
    capsys: pytest.CaptureFixture[str], runs: tuple[str, str]
) -> None:
    code, out, _ = run(capsys, "compare", *runs, "--all", "--json")
    document = strict(out)
    answers = {answer["question"]: answer["answer"] for answer in document["answers"]}
    assert code == 1 and answers["batches"] == answers["forward"] == answers["update"] == "no"
    assert document["first"]["step"] == 1
    assert document["first"]["name"] == "blocks.0.a · forward · output[0]"
    assert document["growth"][0] == {
        "step": 0,
        "error": 0.0,
        "name": document["growth"][0]["name"],
    }
    _, text, _ = run(capsys, "compare", *runs, "--all")
    assert "largest error of each step, 0 to 2" in text
    assert "blocks.0.a · forward · output[0]" in text


def test_json_is_strict_and_whole(
    capsys: pytest.CaptureFixture[str], runs: tuple[str, str]
) -> None:
    code, out, _ = run(capsys, "compare", *runs, "--json")
    document = strict(out)
    assert code == 1 and document["verdict"] == "different" and document["steps"] == [0, 1, 2]
    batches = next(a for a in document["answers"] if a["question"] == "batches")
    assert batches["found"]["step"] == 1 and batches["found"]["state"] == "different"
    assert len(batches["found"]["actual_checksum"]) == 16
    assert document["counts"]["batches"] == {"same": 5, "different": 1}
    torch.save({"w": torch.tensor([1.0, float("inf")])}, Path(runs[0]) / "a.pt")
    torch.save({"w": torch.tensor([1.0, 2.0])}, Path(runs[0]) / "b.pt")
    sides = [Path(runs[0]) / name for name in ("a.pt", "b.pt")]
    assert strict(run(capsys, "compare", *sides, "--json")[1])["rows"][0]["error"] == "inf"


def test_csv_has_every_pair_that_is_not_equal(
    capsys: pytest.CaptureFixture[str], runs: tuple[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "all.csv"
    assert run(capsys, "compare", *runs, "--csv", path)[0] == 1
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    counts = fastcheck.compare(*runs).counts
    unequal = sum(n for states in counts.values() for state, n in states.items() if state != "same")
    assert len(rows) == unequal > 20
    first = rows[0]
    assert first["question"] == "batches" and first["step"] == "1"
    assert first["actual_checksum"] != first["reference_checksum"]
    assert first["actual_dtype"] == "float32" and first["cosine"] == ""


def test_tensors_have_their_measures_in_the_report(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    torch.save({"w": x}, tmp_path / "a.pt")
    torch.save({"w": x + 0.1}, tmp_path / "b.pt")
    code, out, _ = run(
        capsys, "compare", tmp_path / "a.pt", tmp_path / "b.pt", "--csv", tmp_path / "c.csv"
    )
    assert code == 1 and "weights" in out and "first at step" not in out
    assert "the elements differ" in out
    for word in ("cosine", "max abs", "1/1000", "max ULP", "4x8"):
        assert word in out, out
    with (tmp_path / "c.csv").open(newline="", encoding="utf-8") as file:
        row = next(csv.DictReader(file))
    assert float(row["max_abs"]) == pytest.approx(0.1, rel=1e-5)
    assert row["actual_shape"] == "4x8"


def test_ascii_terminals_get_ascii(
    capsys: pytest.CaptureFixture[str], runs: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("compare", "console"):
        monkeypatch.setattr(f"fastcheck.cli.{module}.wants_ascii", lambda stream: True)
    _, out, _ = run(capsys, "compare", *runs, "--all")
    assert out.isascii()


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("compare", "export"):
        code, out, _ = run(capsys, command, "--help")
        assert code == 0 and "examples:" in out and "exit codes:" in out
        assert all(len(line) <= 100 for line in out.splitlines())
    _, out, _ = run(capsys, "--help")
    assert "compare" in out and "export" in out


# export


@pytest.fixture
def log(tmp_path: Path) -> str:
    """Two ranks, several dtypes, an event, a health record."""
    for rank in range(2):
        sites = SiteTable()
        numbers = [
            sites.intern(build.site("layers.0", "Block")),
            sites.intern(build.site("", "Net", role="loss", label="loss")),
        ]
        writer = RecordLog(tmp_path / "log", rank, None, sites, {})
        bad = int(Flag.EVENT) | int(Verdict.ORIGIN) << 8
        made = build.records(
            build.record("float16", site=numbers[0], step=0, seq=0, checksum=2**64 - 1, numel=10),
            build.record("int64", site=numbers[0], low=-5, high=2**40, step=0, seq=1, numel=4),
            build.record("uint8", site=numbers[1], low=3, high=250, step=1, seq=2, numel=4),
            build.record(
                "float32", site=numbers[1], step=1, seq=3, depth=1, nan_count=3, flags=bad
            ),
            build.record("float32", site=99, step=2, seq=4),
        )
        for step in range(3):
            writer.append(made[made["step"] == step], step)
        writer.close()
    return str(tmp_path / "log")


def rows_of(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    pytest.importorskip("pyarrow")
    if path.suffix == ".parquet":
        import pyarrow.parquet as parquet

        found: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
        return found
    import pyarrow.ipc as ipc

    with ipc.open_file(path) as reader:
        read: list[dict[str, Any]] = reader.read_all().to_pylist()
        return read


@pytest.mark.parametrize("suffix", ["csv", "parquet", "arrow"])
@pytest.mark.parametrize("piece", [2, 1 << 16])
def test_every_record_is_a_row(
    capsys: pytest.CaptureFixture[str],
    log: str,
    tmp_path: Path,
    suffix: str,
    piece: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if suffix != "csv":
        pytest.importorskip("pyarrow")
    monkeypatch.setattr("fastcheck.log.record_file._RECORDS", piece)
    path = tmp_path / f"records.{suffix}"
    code, out, _ = run(capsys, "export", log, path)
    assert code == 0 and "10 rows" in out
    rows = rows_of(path)
    assert len(rows) == 10 and tuple(rows[0]) == table.COLUMNS
    view = read_log(log)
    expected = sorted(zip(view.ranks.tolist(), view.records["seq"].tolist()))
    assert [(int(row["rank"]), int(row["seq"])) for row in rows] == expected
    first, integers, small, health, lost = rows[:5]
    assert first["module"] == "layers.0" and first["dtype"] == "float16"
    checksum = first["checksum"]
    assert (int(checksum, 16) if suffix == "csv" else checksum) == 2**64 - 1
    assert float(first["l2_norm"]) == pytest.approx(math.sqrt(2.5))
    assert float(integers["min"]) == -5 and float(integers["max"]) == 2**40
    assert float(small["max"]) == 250
    assert health["min"] in ("", None) and int(health["nan_count"]) == 3
    assert health["verdict"] == "origin" and health["event"] in ("1", True)
    assert lost["module"] == "" and lost["verdict"] == "none"


def test_what_was_kept_of_evicted_segments_is_there_once(tmp_path: Path) -> None:
    sites = SiteTable()
    number = sites.intern(build.site())
    writer = RecordLog(tmp_path / "log", 0, 64 * 1024, sites, {})
    for step in range(40):
        made = build.healthy_records(step, 20, first_seq=20 * step, sites=1)
        made["site"] = number
        if step in (1, 39):
            made["flags"][3] = int(Flag.EVENT)
        writer.append(made, step)
    writer.close()
    exported = np.concatenate([piece["seq"] for piece in table.log_table(writer.directory)])
    assert sorted(exported.tolist()) == sorted(read_log(writer.directory).records["seq"].tolist())
    assert 23 in exported and len(set(exported.tolist())) == len(exported) < 800


def test_export_says_what_it_cannot_do(
    capsys: pytest.CaptureFixture[str], log: str, tmp_path: Path
) -> None:
    path = tmp_path / "records.csv"
    assert run(capsys, "export", log, tmp_path / "records.xlsx")[0] == 2
    assert run(capsys, "export", tmp_path / "nothing", path)[0] == 2
    assert run(capsys, "export", log, tmp_path / "no" / "records.csv")[0] == 2
    assert not path.exists()
    assert run(capsys, "export", log, path)[0] == 0
    code, _, err = run(capsys, "export", log, path)
    assert code == 2 and "--force" in err
    before = path.read_bytes()
    code, out, _ = run(capsys, "export", log, path, "--force", "--json")
    document = strict(out)
    assert code == 0 and document["rows"] == 10 and document["columns"] == list(table.COLUMNS)
    assert path.read_bytes() == before and sorted(os.listdir(tmp_path)) == ["log", "records.csv"]


def test_a_full_disk_leaves_no_half_table(
    capsys: pytest.CaptureFixture[str], log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        yield next(table.log_table(log))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fastcheck.cli.export.log_table", fail)
    code, _, err = run(capsys, "export", log, tmp_path / "records.csv")
    assert code == 2 and "No space left" in err
    assert sorted(os.listdir(tmp_path)) == ["log"]


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_without_pyarrow_there_is_a_hint(
    capsys: pytest.CaptureFixture[str],
    log: str,
    tmp_path: Path,
    suffix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = importlib.import_module

    def without(name: str, package: str | None = None) -> Any:
        if name.split(".")[0] == "pyarrow":
            raise ImportError("No module named 'pyarrow'")
        return real(name, package)

    monkeypatch.setattr("fastcheck.errors.importlib.import_module", without)
    code, _, err = run(capsys, "export", log, tmp_path / f"records.{suffix}")
    assert code == 2 and "pip install 'fastcheck[tools]'" in err
    assert not (tmp_path / f"records.{suffix}").exists()
