"""Which rank is accused, and of what: over small fleets with one fault, and with what is none."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastcheck.cli.main import main
from fastcheck.errors import ConfigError
from fastcheck.fleet import questions
from fastcheck.fleet.engines import DuckEngine
from fastcheck.fleet.findings import FleetReport
from fastcheck.fleet.judgement import examine, fewest_by_chance, usual_count
from fastcheck.fleet.schema import small_table, table_bytes
from fastcheck.fleet.store import Folder
from support.programs.synthetic_fleets import generator

pytest.importorskip("duckdb")
pytest.importorskip("pyarrow")
synthetic = generator()
SHAPE = synthetic.Shape(ranks=32, sites=20, steps=24, shards=2)


def judged(folder: Folder, run: str = "synthetic", **options: Any) -> FleetReport:
    engine = DuckEngine(folder, run, threads=1)
    try:
        return examine(engine, run, "duckdb", **options)
    finally:
        engine.close()


def fleet(place: Path, *faults: Any, seed: int = 5, shape: Any = SHAPE) -> Folder:
    folder = Folder(place)
    synthetic.write_fleet(folder, shape, faults, seed)
    return folder


KINDS = {
    "bitflip": "replicas",
    "scale": "outlier",
    "nan": "nonfinite",
    "drift": "outlier",
    "host": "host",
    "stuck": "stopped",
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_rank_of_a_fault(tmp_path: Path, kind: str) -> None:
    # Of a fleet of four hosts one is a quarter, and as much of the spread.
    shape = synthetic.Shape(64, 20, 24, 2) if kind == "host" else SHAPE
    fault = synthetic.choose_fault(shape, kind, 5)
    report = judged(fleet(tmp_path, fault, shape=shape))
    assert report.accused == fault.ranks
    (finding,) = [one for one in report.findings if one.is_accusation]
    assert finding.kind == KINDS[kind]
    assert fault.step <= finding.first_step <= fault.step + (23 if kind == "drift" else 2)
    suspect = finding.suspects[0]
    if kind != "stuck" and kind != "host":
        assert suspect.site.startswith(str(synthetic.sites_of(SHAPE)[fault.site]))
    rank = fault.ranks[0]
    assert f"rank {rank} (host host{rank // 8:04d}, synthetic, serial S{rank:05d})" in report.text()


def test_of_several_sites_the_first_one_is_named(tmp_path: Path) -> None:
    """Not the one that is furthest off: what comes behind a fault is off as well."""
    scaled = (synthetic.Fault("scale", (9,), site, 4) for site in (3, 7, 7))
    report = judged(fleet(tmp_path, *scaled))
    (suspect,) = report.findings[0].suspects
    assert (suspect.rank, suspect.first_step) == (9, 4)
    assert suspect.site == f"{synthetic.sites_of(SHAPE)[3]} and 1 more sites"
    assert "1.2 times the median" in suspect.evidence


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_healthy_fleet(tmp_path: Path, seed: int) -> None:
    report = judged(fleet(tmp_path, seed=seed))
    assert report.accused == ()
    assert "no rank is suspect" in report.text()
    # Its loss spike is named as what it is.
    assert [one.kind for one in report.findings if "a step, not a rank" in one.what] == ["step"]


def rewrite(folder: Folder, change: Any, kind: str = "ranks") -> None:
    """Replaces a small table by what ``change`` makes of its rows."""
    import pyarrow.parquet as parquet

    path = f"run=synthetic/{kind}/node=all.parquet"
    rows = [{**row, **change(row)} for row in parquet.read_table(folder.open(path)).to_pylist()]
    folder.write(path, table_bytes(small_table(kind, rows)))


@pytest.mark.parametrize("kind", ["scale", "nan"])
def test_forward_comes_before_backward(tmp_path: Path, kind: str) -> None:
    """Where a layer's sites are numbered together, that of its gradient is the smaller number."""
    folder = fleet(tmp_path, *(synthetic.Fault(kind, (9,), site, 4) for site in (3, 7)))
    rewrite(
        folder,
        lambda row: {"direction": "backward"} if row["position"] == 3 else {},
        kind="sites",
    )
    suspect = judged(folder).findings[0].suspects[0]
    assert suspect.site.startswith(str(synthetic.sites_of(SHAPE)[7]))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_rms_that_is_no_number_accuses_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    """As other programs may write it: collect has null there."""
    import pyarrow

    made = synthetic.record_table

    def spoilt(rows: Any) -> Any:
        rms = np.where(rows["rank"] == 9, np.float32(value), rows["rms"])
        table = made(rows)
        return table.set_column(table.schema.get_field_index("rms"), "rms", pyarrow.array(rms))

    monkeypatch.setattr(synthetic, "record_table", spoilt)
    assert judged(fleet(tmp_path / "healthy")).accused == ()
    # At the sites of a suspect all ranks are looked at.
    assert judged(fleet(tmp_path / "faulty", synthetic.Fault("scale", (4,), 3, 2))).accused == (4,)


@pytest.mark.parametrize("first", [-1, (1 << 20) - 31])
def test_ranks_that_cannot_be_told_apart_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    made = synthetic.record_table
    monkeypatch.setattr(
        synthetic,
        "record_table",
        lambda rows: made({**rows, "rank": rows["rank"] + np.int32(first)}),
    )
    folder = fleet(tmp_path)
    with pytest.raises(ConfigError, match=f"ranks from {first:,} to {first + 31:,}"):
        judged(folder)


@pytest.mark.parametrize("hosts", [1, 2, 3])
@pytest.mark.parametrize("faulty", [4, 8])
def test_few_hosts(tmp_path: Path, hosts: int, faulty: int) -> None:
    """Of two hosts that differ neither is known to be the faulty one."""
    shape = synthetic.Shape(ranks=8 * hosts, sites=20, steps=24, shards=1)
    ranks = tuple(range(faulty))
    report = judged(fleet(tmp_path, synthetic.Fault("host", ranks, 3, 2), shape=shape))
    assert set(report.accused) <= set(ranks)
    if hosts == 1 or 4 * faulty > 8 * hosts:
        assert report.accused == ()
    if hosts == 3 and faulty == 4:
        assert [one.host for one in report.findings if one.is_accusation] == ["host0000"]


@pytest.mark.parametrize(("known", "text"), [(0, "unknown hosts"), (8, "1 host and unknown hosts")])
def test_an_unknown_host_is_no_other_host(tmp_path: Path, known: int, text: str) -> None:
    shape = synthetic.Shape(ranks=24, sites=20, steps=24, shards=1)
    folder = fleet(tmp_path, synthetic.Fault("host", (0, 1, 2, 3), 3, 2), shape=shape)
    rewrite(folder, lambda row: {} if row["rank"] < known else {"host": None})
    report = judged(folder)
    assert f"24 ranks on {text}, " in report.extent
    assert report.to_dict()["hosts"] == bool(known)
    assert not any(one.kind == "host" for one in report.findings)


class TestReplicas:
    def test_of_two_it_is_one_of_these_two(self, tmp_path: Path) -> None:
        shape = synthetic.Shape(ranks=32, sites=20, steps=6, shards=16)
        fault = synthetic.Fault("bitflip", (5,), 17, 2)
        report = judged(fleet(tmp_path, fault, shape=shape))
        assert report.accused == (5, 21)
        assert "one of these two" in report.findings[0].what

    def test_without_a_majority_nobody_is_accused(self, tmp_path: Path) -> None:
        folder = fleet(tmp_path)
        rewrite(folder, lambda row: {"replica_group": "all"})  # halves hold other parts
        report = judged(folder)
        assert report.accused == ()
        assert any("without a majority" in one.what for one in report.findings)

    def test_unknown_groups_are_compared_on_request(self, tmp_path: Path) -> None:
        shape = synthetic.Shape(ranks=16, sites=20, steps=6, shards=1)
        folder = fleet(tmp_path, synthetic.Fault("bitflip", (5,), 17, 2), shape=shape)
        rewrite(folder, lambda row: {"replica_group": None})
        report = judged(folder)
        assert report.accused == ()
        assert "the weights of 16 ranks are not compared" in report.text()
        assert "not compared" not in judged(folder, are_replicas=True).text()
        assert judged(folder, are_replicas=True).accused == (5,)

    def test_a_weight_that_is_read_twice_has_one_vote(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A weight that holds NaN is read in the forward, and again at the update."""
        import pyarrow

        made = synthetic.record_table
        monkeypatch.setattr(
            synthetic,
            "record_table",
            lambda rows: pyarrow.concat_tables(
                [
                    made(rows),
                    made({name: column[rows["rank"] == 5] for name, column in rows.items()}),
                ]
            ),
        )
        shape = synthetic.Shape(ranks=32, sites=20, steps=6, shards=16)
        report = judged(fleet(tmp_path, synthetic.Fault("bitflip", (5,), 17, 2), shape=shape))
        assert "one of these two" in report.findings[0].what


class TestNonfinite:
    def test_on_all_ranks_at_once_it_is_a_step(self, tmp_path: Path) -> None:
        report = judged(fleet(tmp_path, synthetic.Fault("nan", tuple(range(32)), 3, 4)))
        assert report.accused == ()
        assert any("on 32 ranks at once" in one.what for one in report.findings)

    def test_the_first_of_several_in_a_step(self, tmp_path: Path) -> None:
        first, then = synthetic.Fault("nan", (9,), 3, 4), synthetic.Fault("nan", (2, 4), 6, 4)
        report = judged(fleet(tmp_path, then, first))
        assert report.accused == (9,)
        assert "2 other ranks had one later in that step" in report.findings[0].what

    def test_one_that_was_judged_harmless_is_none(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = synthetic.record_table

        def scaled(rows: Any) -> Any:
            return made({**rows, "verdict": rows["verdict"] * 7})

        monkeypatch.setattr(synthetic, "record_table", scaled)
        report = judged(fleet(tmp_path, synthetic.Fault("nan", (9,), 3, 4)))
        assert report.accused == ()


class TestStopped:
    def test_a_whole_node_may_not_have_been_collected(self, tmp_path: Path) -> None:
        report = judged(fleet(tmp_path, synthetic.Fault("stuck", tuple(range(8)), 0, 20)))
        assert report.accused == ()
        assert any("all ranks of a node end" in one.what for one in report.findings)

    def test_ranks_without_a_record(self, tmp_path: Path) -> None:
        report = judged(fleet(tmp_path, synthetic.Fault("stuck", (3, 4), 0, 0)))
        assert any("2 of 32 ranks have no records: 3, 4" in one.what for one in report.findings)

    def test_a_lag_is_allowed(self, tmp_path: Path) -> None:
        folder = fleet(tmp_path, synthetic.Fault("stuck", (3,), 0, 22))
        assert judged(folder).accused == () and judged(folder, lag=1).accused == (3,)


def test_the_work_is_divided_by_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastcheck.fleet.engines._CHUNK_ROWS", 2000)
    fault = synthetic.choose_fault(SHAPE, "scale", 5)
    assert judged(fleet(tmp_path, fault)).accused == fault.ranks


@pytest.mark.parametrize("mean", [0.001, 0.05, 0.7, 3.0, 20.0])
def test_how_many_are_no_chance(mean: float) -> None:
    def tail(number: int) -> float:
        terms = (
            math.exp(-mean + k * math.log(mean) - math.lgamma(k + 1))
            for k in range(number, number + 300)
        )
        return math.fsum(terms)

    for tries in (10.0, 1e6):
        number = fewest_by_chance(mean, tries)
        assert tail(number) * tries < 1e-4
        assert number == 3 or tail(number - 2) * tries > 1e-4


@pytest.mark.parametrize("mean", [0.001, 0.1, 0.25, 0.28, 0.35, 0.6, 1.0, 3.0, 20.0])
def test_what_is_usual_is_not_less_than_it_is_on_average(mean: float) -> None:
    """Of ranks that chance alone makes outliers. Where most of them never are, the others are not
    suspect for being it now and then.
    """
    counts = np.random.default_rng(3).poisson(mean, 10_000)
    assert usual_count(counts.tolist()) >= mean


class TestCommand:
    def test_the_exit_codes_and_json(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        fleet(tmp_path / "faulty", synthetic.Fault("bitflip", (5,), 17, 2))
        fleet(tmp_path / "healthy")
        assert main(["fleet", str(tmp_path / "healthy")]) == 0
        capsys.readouterr()
        assert main(["fleet", str(tmp_path / "faulty"), "--json"]) == 1
        found = json.loads(capsys.readouterr().out)
        assert found["accused"] == [5] and found["ranks"] == 32 and found["rows"] == 32 * 20 * 24
        assert found["findings"][0]["suspects"][0]["serial"] == "S00005"

    def test_which_run(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["fleet", str(tmp_path)]) == 2
        assert "there is no run here" in capsys.readouterr().err
        for run in ("a", "b"):
            (tmp_path / f"run={run}").mkdir()
            (tmp_path / f"run={run}" / "x").touch()
        assert main(["fleet", str(tmp_path)]) == 2
        assert "--run with one of: a, b" in capsys.readouterr().err
        assert main(["fleet", str(tmp_path), "--run", "c"]) == 2
        assert "there is no run c in" in capsys.readouterr().err
        assert main(["fleet", str(tmp_path), "--run", "a"]) == 2
        error = capsys.readouterr().err
        assert "this run is not complete" in error and "has no files of records" in error
        assert "hint:" in error

    def test_without_duckdb(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        fleet(tmp_path)
        monkeypatch.setitem(sys.modules, "duckdb", None)
        assert main(["fleet", str(tmp_path)]) == 2
        assert "pip install 'fastcheck[fleet]'" in capsys.readouterr().err
        monkeypatch.setitem(sys.modules, "pyspark.sql", None)
        assert main(["fleet", str(tmp_path), "--engine", "spark"]) == 2
        assert "pip install 'fastcheck[spark]'" in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 1, 7, (1 << 20) - 1])
@pytest.mark.parametrize("scale", [1e-44, 1e-38, 3e-7, 1.0, 1.9999999, 3e38])
def test_a_double_holds_a_value_and_its_rank(rank: int, scale: float) -> None:
    import duckdb

    connection = duckdb.connect()
    select = f"SELECT {questions._KEY} AS key FROM (SELECT ?::REAL AS rms, ?::INT AS rank) r"
    decoded = f"SELECT CAST(key AS REAL), {questions._rank_of('key')} FROM ({select})"
    value, found = connection.execute(decoded, [scale, rank]).fetchall()[0]
    assert (np.float32(value), found) == (np.float32(scale), rank)
    # A larger value has a larger key, whatever the ranks are.
    above = float(np.nextafter(np.float32(scale), np.float32(np.inf)))
    keys = [
        connection.execute(select, [one, number]).fetchall()[0][0]
        for one, number in ((scale, (1 << 20) - 1), (above, 0))
    ]
    assert keys[0] < keys[1]
