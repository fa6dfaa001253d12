"""A damaged file of a fleet is named, with exit code 2: code 1 is the accusation of a rank."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest

from fastcheck.cli.main import main
from fastcheck.errors import LogError
from fastcheck.fleet.schema import KEYS, RECORD_COLUMNS
from fastcheck.fleet.store import Folder
from fastcheck.log.writer import RecordLog
from fastcheck.record.format import NONFINITE_COUNTS
from support.logs import site_table
from support.records import record_builder as build
from support.sampling import sample

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("duckdb")
RUN = "run=r"


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logs of two nodes of a rank each, and their fleet; the first has two files of a span."""
    place = tmp_path_factory.mktemp("undamaged")
    logs = [RecordLog(place / f"log{rank}", rank, None, site_table()) for rank in range(2)]
    for first in (0, 6):
        for rank, log in enumerate(logs):
            for step in range(first, first + 6):
                assert log.append(build.healthy_records(step, 4, step * 4), step)
            if rank == 0 or first:
                assert collected(place, rank) == 0
    assert main(["fleet", str(place / "out")]) == 0
    return place


@pytest.fixture
def place(undamaged: Path, tmp_path: Path) -> Path:
    shutil.copytree(undamaged, tmp_path, dirs_exist_ok=True)
    return tmp_path / "out"


def collected(tmp_path: Path, rank: int) -> int:
    log, out = str(tmp_path / f"log{rank}"), str(tmp_path / "out")
    return main(["collect", log, "--out", out, "--run", "r", "--node", f"n{rank}"])


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def without_its_end(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def spoilt_data(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4 : len(data) // 2] = b"\xff" * (len(data) // 2 - 4)
    path.write_bytes(data)


def changed_table(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        parquet.write_table(change(parquet.read_table(path, partitioning=None)), path)

    return damage


def with_column(name: str, values: Callable[[int], Any]) -> Callable[[Path], None]:
    def change(table: Any) -> Any:
        at = table.schema.get_field_index(name)
        return table.set_column(at, name, values(table.num_rows))

    return changed_table(change)


def texts(rows: int) -> Any:
    return pyarrow.array(["x"] * rows)


def no_numbers(rows: int) -> Any:
    return pyarrow.array([None] * rows, pyarrow.int64())


# No question is about these columns.
UNASKED = RECORD_COLUMNS.keys() - {*KEYS, *NONFINITE_COUNTS, "verdict", "rms", "checksum"}
RECORDS = f"{RUN}/step=000000-000099/node=n1.parquet"
FILES = [truncated, without_its_end, emptied, zeros, spoilt_data]
TABLES = {
    **{one.__name__: one for one in FILES},
    "another table": lambda path: parquet.write_table(pyarrow.table({"x": [1]}), path),
}
RECORD_TABLES = {
    **TABLES,
    **{f"no {one}": changed_table(lambda t, one=one: t.drop([one])) for one in RECORD_COLUMNS},
    **{f"texts in {one}": with_column(one, texts) for one in ("step", "rank", "rms", "checksum")},
    **{f"no number in {one}": with_column(one, no_numbers) for one in ("step", "rank", "site")},
}


def check(
    place: Path, path: Path, capsys: pytest.CaptureFixture[str], is_needless: bool = False
) -> None:
    """All that reads the folder names the file, or does not need it."""
    capsys.readouterr()
    for name, *more in (["fleet"], ["fleet", "--html", str(place / "page.html")]):
        code = main([name, str(place), *more])
        out, err = capsys.readouterr()
        assert code == 2 or (code == 0 and is_needless), out
        assert code == 0 or path.name in err, err


@pytest.mark.parametrize("name", sample(RECORD_TABLES, 12))
def test_a_file_of_records(place: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    RECORD_TABLES[name](place / RECORDS)
    check(place, place / RECORDS, capsys, is_needless=name[len("no ") :] in UNASKED)


@pytest.mark.parametrize(("name", "kind"), sample(itertools.product(TABLES, ("sites", "ranks")), 6))
def test_a_small_table(
    place: Path, capsys: pytest.CaptureFixture[str], name: str, kind: str
) -> None:
    path = place / RUN / kind / "node=n1.parquet"
    TABLES[name](path)
    check(place, path, capsys)


def test_a_fleet_without_a_record(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (place / RUN).glob("step=*/*.parquet"):
        changed_table(lambda table: table.slice(0, 0))(path)
    assert main(["fleet", str(place)]) == 2
    assert "no record" in capsys.readouterr().err


def deep(levels: int) -> str:
    return '{"format":1,"files":' + "[" * levels + "]" * levels + "}"


MANIFESTS = [
    "",
    "null",
    "[]",
    "{}",
    '{"format":1}',
    '{"format":1,"files":null}',
    '{"format":1,"files":3}',
    '{"format":1,"files":[["a"]]}',
    '{"format":1,"files":"abc"}',
    '{"format":2,"files":{}}',
    "\udcff",
    deep(90),
    deep(900),
    deep(100_000),
]


@pytest.mark.parametrize("text", sample(MANIFESTS, 6), ids=itertools.count())
def test_a_manifest(place: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    path = place / RUN / "_nodes" / "node=n1.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    check(place, path, capsys)
    assert collected(place.parent, 1) == 2
    assert path.name in capsys.readouterr().err


def fields(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if path:
        yield path
    for key in value if isinstance(value, dict) else ():
        yield from fields(value[key], (*path, key))


@pytest.mark.parametrize(
    "value", sample((None, -1, 1.5, "x", [], {}, {"x": []}, float("inf"), 1 << 70), 4)
)
def test_a_field_of_a_manifest(
    place: Path, capsys: pytest.CaptureFixture[str], value: object
) -> None:
    path = place / RUN / "_nodes" / "node=n1.json"
    whole = json.loads(path.read_text())
    for *above, last in fields(whole):
        spoilt = json.loads(json.dumps(whole))
        at = spoilt
        for key in above:
            at = at[key]
        if at[last] == value or last == "identity":
            continue
        at[last] = value
        path.write_text(json.dumps(spoilt))
        capsys.readouterr()
        code = collected(place.parent, 1)
        # Without its ranks or files a manifest is that of a node that has not begun.
        assert code == 2 or value == {}, (above, last)
        assert code == 0 or path.name in capsys.readouterr().err
        path.write_text(json.dumps(whole))


@pytest.mark.parametrize("name", ["records-rank0-000001.bin", "records-rank0-000000.bin"])
def test_a_segment_of_the_log_that_is_no_file(
    place: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    log = place.parent / "log0"
    (log / name).unlink(missing_ok=True)
    (log / name).mkdir()
    for command in (
        ["show", str(log)],
        ["report", str(log)],
        ["top", str(log), "--once"],
        ["export", str(log), str(log / "table.csv")],
        ["compare", str(log), str(place.parent / "log1")],
        ["collect", str(log), "--out", str(place), "--run", "other"],
    ):
        capsys.readouterr()
        assert main(command) == 2
        assert name in capsys.readouterr().err


def test_numbers_of_a_log_that_no_column_holds(tmp_path: Path) -> None:
    RecordLog(tmp_path / "log", 0, None, site_table()).append(build.healthy_records(0, 4, 0), 0)
    path = tmp_path / "log" / "meta-rank0.json"
    meta = {**json.loads(path.read_text()), "pid": 1 << 40}
    meta["placement"] = {"world_size": -(1 << 50), "coordinates": {"dp": 1 << 31}}
    path.write_text(json.dumps(meta))
    sites = tmp_path / "log" / "sites-rank0.jsonl"
    lines = [json.loads(line) for line in sites.read_text().splitlines()]
    sites.write_text("".join(json.dumps({**line, "index": 1 << 40}) + "\n" for line in lines))
    assert main(["collect", str(tmp_path / "log"), "--out", str(tmp_path / "out")]) == 0
    assert main(["fleet", str(tmp_path / "out")]) == 0


# Options, links and pipes


def test_a_folder_of_an_odd_name_is_quoted(place: Path) -> None:
    odd = place.rename(place.with_name("o'; DROP"))
    assert main(["fleet", str(odd)]) == 0


def test_nothing_is_deleted_or_written_through_a_linked_folder(place: Path) -> None:
    (steps,) = (place / RUN).glob("step=*")
    steps.rename(place.parent / "elsewhere")
    steps.symlink_to(place.parent / "elsewhere")
    before = {one.name: one.read_bytes() for one in steps.iterdir()}
    assert main(["fleet", str(place)]) == 0
    folder, name = Folder(str(place)), f"{RUN}/{steps.name}/node=n1.parquet"
    with pytest.raises(LogError, match=f"{steps} is a link"):
        folder.delete(name)
    with pytest.raises(LogError, match=f"{steps} is a link"):
        folder.write(name, b"")
    assert {one.name: one.read_bytes() for one in steps.iterdir()} == before


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_what_was_planted_in_the_place_of_a_file_is_not_written_through(
    place: Path, kind: str
) -> None:
    other = place.parent / "other"
    other.write_text("mine")
    planted = place / RUN / "ranks" / "node=n0.parquet.part"
    if kind == "link":
        planted.symlink_to(other)
    else:
        os.mkfifo(planted)
    assert collected(place.parent, 0) == 0
    assert other.read_text() == "mine" and not planted.exists()


def test_a_manifest_that_is_a_fifo_is_not_waited_for(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = place / RUN / "_nodes" / "node=n0.json"
    path.unlink()
    os.mkfifo(path)
    assert collected(place.parent, 0) == 2
    assert path.name in capsys.readouterr().err
