"""The numbers of a report's page are those of the log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastcheck.log.reader import read_log
from fastcheck.log.step_table import step_rows
from fastcheck.log.writer import RecordLog
from fastcheck.record.site import SiteTable
from fastcheck.record.statistics import statistics_columns
from fastcheck.report.page import grid, parts
from fastcheck.report.page.container import Container
from fastcheck.report.page.write import page_of_log
from support.page_data import PageData
from support.programs import synthetic_logs
from support.records import record_builder as build

NAMES = ("abs_max", "rms", "mean", "zero_share")


def page(directory: Path) -> PageData:
    return PageData(page_of_log(directory))


def values(directory: Path, rank: int = 0) -> dict[str, np.ndarray]:
    """Of a log with one record of each site in each step: planes of sites by steps."""
    view = read_log(directory, rank)
    records = view.records
    columns = statistics_columns(records)
    sites, steps = len(view.sites), len(np.unique(records["step"]))
    found = {
        "abs_max": np.fmax(np.abs(columns["min"]), np.abs(columns["max"])),
        "rms": columns["rms"],
        "mean": columns["mean"],
        "zero_share": records["zero_count"] / records["numel"],
    }
    order = np.lexsort((records["step"], records["site"]))
    return {name: column[order].reshape(sites, steps) for name, column in found.items()}


def test_a_small_log_is_there_in_full(tmp_path: Path) -> None:
    synthetic_logs.write(tmp_path, 12, 30)
    found, expected = page(tmp_path), values(tmp_path)
    assert found.header["exact"] and found.header["axis"]["width"] == 1
    assert found.header["axis"]["starts"] == list(range(30))
    assert np.array_equal(found.arrays["abs_max.high"], expected["abs_max"], equal_nan=True)
    for name in NAMES[1:]:
        assert np.allclose(found.arrays[f"{name}.high"], expected[name], rtol=1e-7, equal_nan=True)
    assert found.seen.all()


def test_the_rows_are_the_sites_with_their_last_and_largest_values(tmp_path: Path) -> None:
    synthetic_logs.write(tmp_path, 12, 30)
    rows, expected = page(tmp_path).header["rows"], values(tmp_path)["abs_max"]
    assert rows["site"] == list(range(12)) and rows["records"] == [30] * 12
    assert rows["peak"] == np.nanmax(expected, axis=1).tolist()
    assert rows["peak_step"] == np.nanargmax(expected, axis=1).tolist()
    last = [None if np.isnan(value) else value for value in expected[:, -1].tolist()]
    assert rows["last_abs_max"] == last and last.count(None) == 1
    records = read_log(tmp_path).records
    bad = (records["nan_count"] + records["posinf_count"]) > 0
    counts = [int((bad & (records["site"] == site)).sum()) for site in range(12)]
    assert rows["bad_records"] == counts and max(counts) == 3
    assert {s for s, count in zip(rows["first_bad_step"], counts) if count} == {27}
    assert {s for s, count in zip(rows["first_bad_step"], counts) if not count} == {-1}


def test_what_was_not_finite_has_its_counts(tmp_path: Path) -> None:
    synthetic_logs.write(tmp_path, 12, 30)
    found, records = page(tmp_path), read_log(tmp_path).records
    bad = records[(records["nan_count"] != 0) | (records["posinf_count"] != 0)]
    names = ("site", "step", "nan_count", "posinf_count", "neginf_count")
    assert found.header["bad"] == [bad[name].tolist() for name in names]
    marked = np.zeros((12, 30), int)
    marked[bad["site"], bad["step"]] = (bad["nan_count"] != 0) * grid.BAD_NAN
    marked[bad["site"], bad["step"]] |= (bad["posinf_count"] != 0) * grid.BAD_POSINF
    assert np.array_equal(found.arrays["bad"].astype(int) & ~grid.BAD_EVENT, marked)


def test_several_ranks_have_rows_of_their_own(tmp_path: Path) -> None:
    synthetic_logs.write(tmp_path, 8, 10, ranks=3)
    found = page(tmp_path)
    assert found.header["rows"]["rank"] == [0] * 8 + [1] * 8 + [2] * 8
    assert found.header["rows"]["site"] == list(range(8)) * 3
    for rank in range(3):
        mine = found.arrays["abs_max.high"][8 * rank : 8 * rank + 8]
        assert np.array_equal(mine, values(tmp_path, rank)["abs_max"], equal_nan=True)
    assert list(found.header["steps"]) == ["0", "1", "2"]


def test_the_steps_are_those_of_the_table_of_steps(tmp_path: Path) -> None:
    synthetic_logs.write(tmp_path, 12, 30)
    steps, rows = page(tmp_path).header["steps"]["0"], step_rows(read_log(tmp_path))
    assert steps["step"] == [row.step for row in rows] and steps["count"] == 30
    assert steps["scale"] == [row.scale for row in rows] == [65536.0] * 30
    assert steps["loss"][:27] == [row.loss for row in rows][:27]
    assert steps["loss"][27:] == ["nan"] * 3
    assert steps["gradient_norm"][:27] == [row.gradient_norm for row in rows][:27]


class TestThinning:
    @pytest.fixture
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Few buckets, as of a large log."""
        for name, number in {
            "_WHOLE_CELLS": 200,
            "_USUAL_BUCKETS": 20,
            "_FEWEST_BUCKETS": 8,
            "_COARSE_CELLS": 50,
            "_COARSE_BUCKETS": 5,
        }.items():
            monkeypatch.setattr(grid, name, number)
        for name in ("_EXACT_CELLS", "_FINE_CELLS"):
            monkeypatch.setattr(parts, name, 0)

    def test_no_spike_is_lost(self, tmp_path: Path, small: None) -> None:
        synthetic_logs.write(tmp_path, 10, 210, event_step=-1)
        found, expected = page(tmp_path), values(tmp_path)
        assert not found.header["exact"]
        for name, axis in (("abs_max", "axis"), ("rms", "coarse"), ("zero_share", "coarse")):
            starts, width = found.header[axis]["starts"], found.header[axis]["width"]
            assert width > 1 and starts == list(range(0, 210, width))
            for column, start in enumerate(starts):
                part = expected[name][:, start : start + width]
                for plane, right in (
                    (found.arrays[f"{name}.high"], np.fmax.reduce(part, axis=1)),
                    (found.low(name), np.fmin.reduce(part, axis=1)),
                ):
                    if name == "zero_share":
                        assert np.abs(plane[:, column] - right).max() <= 1 / 126
                    else:
                        ratio = plane[:, column] / right
                        assert ratio.max() <= 2 ** (1 / 16) + 1e-9
                        assert ratio.min() >= 2 ** (-1 / 16) - 1e-9

    def test_means_are_within_a_level_of_their_row(self, tmp_path: Path, small: None) -> None:
        synthetic_logs.write(tmp_path, 10, 210, event_step=-1)
        found, expected = page(tmp_path), values(tmp_path)["mean"]
        width = found.header["coarse"]["width"]
        high, low = found.arrays["mean.high"], found.low("mean")
        level = (expected.max(axis=1) - expected.min(axis=1)) / 62
        for column, start in enumerate(found.header["coarse"]["starts"]):
            part = expected[:, start : start + width]
            assert (np.abs(high[:, column] - part.max(axis=1)) <= 1.1 * level).all()
            assert (np.abs(low[:, column] - part.min(axis=1)) <= 1.1 * level).all()

    def test_what_is_not_finite_stays_in_its_bucket(self, tmp_path: Path, small: None) -> None:
        synthetic_logs.write(tmp_path, 10, 210, event_step=101)
        found = page(tmp_path)
        width, starts = found.header["axis"]["width"], found.header["axis"]["starts"]
        column = 101 // width
        assert starts[column] <= 101 < starts[column] + width
        bad = found.arrays["bad"] != 0
        assert not bad[:, :column].any() and bad[:, column].any()

    def test_the_steps_keep_their_extremes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(parts, "_MOST_STEP_ROWS", 40)
        monkeypatch.setattr(parts, "_STEP_BUCKETS", 10)
        synthetic_logs.write(tmp_path, 8, 200, event_step=-1)
        steps, rows = page(tmp_path).header["steps"]["0"], step_rows(read_log(tmp_path))
        assert steps["count"] == 200 and len(steps["step"]) < 90
        kept = dict(zip(steps["step"], steps["loss"]))
        for start in range(0, 200, 20):
            losses = [row.loss for row in rows[start : start + 20] if row.loss is not None]
            mine = [loss for step, loss in kept.items() if start <= step < start + 20]
            assert min(mine) == min(losses) and max(mine) == max(losses)


def log_of(directory: Path, *parts: np.ndarray, sites: int = 2, **meta: Any) -> None:
    """A log of these records, written one after the other."""
    table = SiteTable()
    for index in range(sites):
        table.intern(build.site(f"layers.{index}", role="param" if index else "output"))
    log = RecordLog(directory, 0, None, table, meta)
    for part in parts:
        log.append(part, int(part["step"][0]))
    log.close()


def of_step(step: int, high: float = 1.0, site: int = 0, **fields: Any) -> np.ndarray:
    made = build.record(high=high, low=-high / 2, step=step, seq=step * 10 + site, **fields)
    made["site"] = site
    return build.records(made)


def test_steps_that_were_not_recorded_take_no_column(tmp_path: Path) -> None:
    log_of(tmp_path, *(of_step(step) for step in range(1000, 1100, 10)))
    found = page(tmp_path)
    assert found.header["axis"]["starts"] == list(range(1000, 1100, 10))
    assert found.arrays["abs_max.high"].shape == (1, 10)


def test_a_step_outside_of_the_ends_of_a_segment_has_its_place(tmp_path: Path) -> None:
    log_of(tmp_path, of_step(50, 2.0), of_step(3, 7.0), of_step(90, 5.0), of_step(51, 1.0))
    found = page(tmp_path)
    assert found.header["axis"]["starts"] == [3, 50, 51, 90]
    assert found.arrays["abs_max.high"].tolist() == [[7.0, 2.0, 1.0, 5.0]]


def test_several_calls_in_a_step_give_both_extremes(tmp_path: Path) -> None:
    log_of(tmp_path, of_step(1, 2.0), of_step(1, 9.0, call=1), of_step(2, 4.0))
    found = page(tmp_path)
    assert found.arrays["abs_max.high"].tolist() == [[9.0, 4.0]]
    assert found.low("abs_max").tolist() == [[2.0, 4.0]]


def test_counts_how_often_a_weight_moved(tmp_path: Path) -> None:
    moved = [of_step(step, site=0, checksum=step) for step in range(5)]
    still = [of_step(step, site=1, checksum=77) for step in range(5)]
    log_of(tmp_path, *(np.concatenate(pair) for pair in zip(moved, still)))
    rows = page(tmp_path).header["rows"]
    assert rows["compared"] == [4, 4] and rows["changed"] == [4, 0]


def test_records_of_counts_only_have_no_values(tmp_path: Path) -> None:
    log_of(tmp_path, of_step(0, depth=1, zero_count=250))
    found = page(tmp_path)
    assert np.isnan(found.arrays["abs_max.high"]).all()
    assert found.arrays["zero_share.high"].tolist() == [[0.25]]
    assert found.header["rows"]["last_abs_max"] == [None]


def test_logarithms_round_trip() -> None:
    given = np.array([[0.0, 1.0, 1e-300, np.nan, 1e300, 5e-324], [np.nan, np.nan, 3.0, 0, 2, 1]])
    container = Container()
    container.add_log("x", given, 8)
    container.add_u8("seen", np.full((1, 2), 255))
    header, arrays = container.to_text({"axis": {"starts": [0] * 6}, "rows": {"site": [0, 1]}})
    text = "".join(
        f'<script type="text/plain" id="{name}">{data}</script>'
        for name, data in (("header", header), ("arrays", arrays))
    )
    found = PageData(text).arrays["x"]
    known = ~np.isnan(given)
    assert np.array_equal(np.isnan(found), ~known)
    with np.errstate(all="ignore"):
        ratio = np.where(given[known] == 0, found[known] + 1, found[known] / given[known])
    assert ratio.max() <= 2 ** (1 / 16) and ratio.min() >= 2 ** (-1 / 16)
