"""Damaged and malicious logs: no hang, and no allocation of a size that a file gives."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastcheck
from fastcheck.cli.main import main
from fastcheck.errors import CompareError, LogError
from fastcheck.log.reader import read_log
from fastcheck.log.table import log_table
from fastcheck.log.writer import RecordLog
from fastcheck.record.format import RECORD_DTYPE, offset_of
from fastcheck.record.site import is_valid
from support.fuzzing.limits import limited_memory
from support.logs import site_table
from support.records import record_builder as build
from support.sampling import sample

SIZE = RECORD_DTYPE.itemsize
FILES = ("records-rank0-000000.bin", "events-rank0.bin", "events-rank0.jsonl", "sites-rank0.jsonl")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Two steps of six records, and an event."""
    writer = RecordLog(tmp_path / "log", 0, None, site_table(), {"fastcheck": "1"})
    for step in range(2):
        writer.append(build.healthy_records(step, 6, 6 * step), step)
    bad = build.record(nan_count=3, step=1, seq=12, site=2)
    writer.append(build.records(bad), 1)
    writer.append_event(build.event(build.site("layers.2"), bad))
    writer.close()
    return tmp_path / "log"


def damage(log: Path, index: int, field: str, value: Any) -> None:
    path = log / FILES[0]
    records = np.fromfile(path, RECORD_DTYPE)
    records[field][index] = value
    path.write_bytes(records.tobytes())


# Not a regular file


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["fifo", "device", "directory"])
def test_what_is_no_regular_file_is_an_error_at_once(log: Path, name: str, kind: str) -> None:
    path = log / name
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(LogError, match=name):
        read_log(log)
    for command in (["show", str(log)], ["export", str(log), str(log.parent / "t.csv")]):
        assert main(command) in (0, 2)
    if name.startswith("events"):  # compare() reads no events
        assert fastcheck.compare(log, log).is_identical
        return
    with pytest.raises((LogError, CompareError), match=name):
        fastcheck.compare(log, log)


def test_a_fifo_as_the_log_or_as_its_meta_file(log: Path) -> None:
    os.mkfifo(log.parent / "pipe")
    with pytest.raises(LogError, match="which is no directory"):
        read_log(log.parent / "pipe")
    with pytest.raises(CompareError, match="not a regular file"):
        fastcheck.compare(log.parent / "pipe", log)
    (log / "meta-rank0.json").unlink()
    os.mkfifo(log / "meta-rank0.json")
    assert len(read_log(log).records) == 13


# Records


IMPOSSIBLE = [
    ("site", 1 << 30),
    ("site", -1),
    ("dtype", 200),
    ("depth", 0),
    ("depth", 9),
    ("order", 7),
    ("device_mode", 77),
    ("flags", 0xF00),
    ("numel", -1),
    ("numel", 1 << 62),
    ("nan_count", 11),
    ("zero_count", -4),
    ("call", -1),
]


@pytest.mark.parametrize(("field", "value"), IMPOSSIBLE)
def test_a_damaged_record_is_left_out_and_counted(
    log: Path, field: str, value: int, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(log, 3, field, value)
    with limited_memory(1 << 28):
        view = read_log(log)
        assert view.damaged_records == 1 and len(view.records) == 12
        assert view.dropped_bytes == 0
        damaged: list[int] = []
        pieces = list(log_table(str(log), damaged.append))
        assert sum(len(piece["seq"]) for piece in pieces) == 12 and damaged == [1]
        comparison = fastcheck.compare(log, log)
    assert comparison.is_identical
    assert any("1 damaged record" in note for note in comparison.notes)
    assert main(["show", str(log)]) == 0
    assert "1 damaged record left out" in capsys.readouterr().out
    assert main(["export", str(log), str(log.parent / "t.csv")]) == 0
    assert "1 damaged record" in capsys.readouterr().out


def test_any_flipped_bit_leaves_a_result_or_a_documented_error(log: Path) -> None:
    path = log / FILES[0]
    whole = path.read_bytes()
    errors = 0
    version = offset_of("version")
    for byte in {*sample(range(SIZE), 48), version, version + 1}:
        for bit in (0, 7):
            broken = bytearray(whole)
            broken[3 * SIZE + byte] ^= 1 << bit
            path.write_bytes(bytes(broken))
            with limited_memory(1 << 28):
                try:
                    read_log(log)
                    list(log_table(str(log)))
                    fastcheck.compare(log, log)
                except LogError:
                    assert version <= byte < version + 2
                    errors += 1
    assert errors == 3  # the other flip of these makes it 0: bytes that were never written


def test_all_that_is_written_is_valid() -> None:
    records = build.healthy_records(0, 9)
    assert is_valid(records).all()
    assert is_valid(build.records(build.record("complex64", numel=5, nan_count=10))).all()
    assert not is_valid(np.zeros(2, RECORD_DTYPE)).any()


def test_a_sparse_file_takes_the_memory_of_its_records(log: Path) -> None:
    path = log / FILES[0]
    os.truncate(path, SIZE << 22)  # 800 MB of zeros
    with limited_memory(1 << 29):
        view = read_log(log)
    assert len(view.records) == 13


# Lines


@pytest.mark.parametrize(
    "line",
    [
        {"id": 1 << 40, **build.site("far").to_dict()},
        {"id": -1, **build.site("far").to_dict()},
        {"id": 1, **build.site("x").to_dict(), "module": 7},
        {"id": 1, **build.site("x").to_dict(), "index": "x"},
        {"id": [1], "module": "x"},
        {"id": 1},
    ],
)
def test_a_line_that_is_no_site_is_left_out(log: Path, line: dict[str, Any]) -> None:
    path = log / "sites-rank0.jsonl"
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")
    with limited_memory(1 << 28):
        view = read_log(log)
        assert [view.sites[n].module for n in range(4)] == [f"layers.{n}" for n in range(4)]
        assert len(list(log_table(str(log)))) == 1
        assert fastcheck.compare(log, log).is_identical


@pytest.mark.parametrize("field", ["step", "seq", "site", "verdict", "inputs", "blamed", "reason"])
@pytest.mark.parametrize("value", [1 << 70, -(1 << 70), "x", [1], [[1, 2, 3]], {"a": 1}, None, 0.5])
def test_a_strange_event_is_left_out_or_shown(
    log: Path, field: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = log / "events-rank0.jsonl"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}) + "\n")
    assert len(read_log(log).events) <= 1
    assert main(["show", str(log)]) == 0
    assert main(["show", str(log), "--json"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize("meta", ["[", "[" * 100_000, "7", '{"steps": [{"step": 1e999}, 7]}'])
def test_a_strange_meta_file_leaves_the_records(
    log: Path, meta: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (log / "meta-rank0.json").write_text(meta)
    assert main(["show", str(log)]) == 0
    assert "layers.2" in capsys.readouterr().out


def test_a_rank_that_no_number_holds_is_no_log(log: Path) -> None:
    (log / f"meta-rank{10**30}.json").write_text("{}")
    assert sorted(read_log(log).meta) == [0]
