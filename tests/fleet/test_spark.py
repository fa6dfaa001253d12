"""Spark finds what DuckDB finds. `make test-spark` runs this; it skips without PySpark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastcheck.fleet.engines import open_engine
from fastcheck.fleet.judgement import examine
from fastcheck.fleet.store import Folder
from support.programs.synthetic_fleets import generator

pytest.importorskip("duckdb")
pytest.importorskip("pyspark")
pytestmark = pytest.mark.filterwarnings("default")
synthetic = generator()
SHAPE = synthetic.Shape(ranks=32, sites=20, steps=24, shards=2)


def report_of(kind: str, folder: Folder) -> dict[str, Any]:
    engine = open_engine(kind, folder, "synthetic")
    try:
        return examine(engine, "synthetic", kind).to_dict()
    finally:
        engine.close()


@pytest.fixture(scope="module")
def session() -> Any:
    """One for all tests: open_engine() takes the one that is there, and leaves it."""
    from pyspark.sql import SparkSession

    made = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    made = made.config("spark.sql.shuffle.partitions", "4").getOrCreate()
    yield made
    made.stop()


@pytest.mark.parametrize(
    "kinds",
    [(), ("bitflip", "stuck"), ("scale",), ("drift", "nan"), ("host",)],
    ids=lambda kinds: " and ".join(kinds) or "healthy",
)
def test_the_verdicts_are_equal(tmp_path: Path, session: Any, kinds: tuple[str, ...]) -> None:
    shape = synthetic.Shape(64, 20, 24, 2) if "host" in kinds else SHAPE
    faults = [synthetic.choose_fault(shape, kind, 5) for kind in kinds]
    synthetic.write_fleet(Folder(tmp_path), shape, faults, 5)
    by_duck, by_spark = (report_of(kind, Folder(tmp_path)) for kind in ("duckdb", "spark"))
    assert by_spark.pop("engine") == "spark" and by_duck.pop("engine") == "duckdb"
    assert by_spark == by_duck
    assert bool(by_duck["accused"]) == bool(kinds)


def test_an_rms_that_is_no_number_is_left_out(
    tmp_path: Path, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow

    made = synthetic.record_table

    def spoilt(rows: Any) -> Any:
        rms = np.where(rows["rank"] == 9, np.float32(np.nan), rows["rms"])
        rms = np.where(rows["rank"] == 11, np.float32(np.inf), rms)
        table = made(rows)
        return table.set_column(table.schema.get_field_index("rms"), "rms", pyarrow.array(rms))

    monkeypatch.setattr(synthetic, "record_table", spoilt)
    fault = synthetic.Fault("scale", (4,), 3, 2)
    synthetic.write_fleet(Folder(tmp_path), SHAPE, [fault], 5)
    by_duck, by_spark = (report_of(kind, Folder(tmp_path)) for kind in ("duckdb", "spark"))
    assert by_spark.pop("engine") == "spark" and by_duck.pop("engine") == "duckdb"
    assert by_spark == by_duck
    assert by_duck["accused"] == [4]
