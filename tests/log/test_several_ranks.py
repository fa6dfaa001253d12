"""fastcheck show, and read_log, over the logs of several ranks in one directory."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from fastcheck.cli.main import main
from fastcheck.log.reader import read_log
from fastcheck.log.view import first_event
from fastcheck.log.writer import RecordLog
from fastcheck.record.event import Event
from fastcheck.record.format import Flag, Verdict
from fastcheck.record.site import SiteTable
from support.records import record_builder as build

STEPS = 4
RANKS = 3
MODULES = ("layers.0", "layers.1", "head")


@pytest.fixture
def log(tmp_path: pathlib.Path) -> str:
    """Three ranks; rank 1 learns the sites in another order. In step 3 rank 2 overflows in
    layers.1, and rank 0 later, in head.
    """
    for rank in range(RANKS):
        order = [1, 0, 2] if rank == 1 else [0, 1, 2]
        sites = SiteTable()
        for index in order:
            sites.intern(build.site(MODULES[index]))
        writer = RecordLog(tmp_path, rank, None, sites)
        for step in range(STEPS):
            made = []
            for position, index in enumerate(range(len(MODULES))):
                bad = step == STEPS - 1 and (rank, MODULES[index]) in ((2, "layers.1"), (0, "head"))
                record = build.record(
                    step=step,
                    seq=step * len(MODULES) + position,
                    site=order.index(index),
                    posinf_count=2 * bad,
                    high=10.0 * (rank + 1) * 2.0**step,
                )
                if bad:
                    record["flags"] |= int(Flag.EVENT) | int(Verdict.ORIGIN) << 8
                    event = build.event(build.site(MODULES[index]), record, rank=rank)
                    writer.append_event(event)
                made.append(record)
            writer.append(build.records(*made), step)
        writer.close()
    return str(tmp_path)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["show", *arguments]) == 0
    return capsys.readouterr().out


def test_records_are_merged_by_step_then_rank_then_device_order(log: str) -> None:
    view = read_log(log)
    expected = [
        (step, rank, step * len(MODULES) + position)
        for step in range(STEPS)
        for rank in range(RANKS)
        for position in range(len(MODULES))
    ]
    steps, seqs = view.records["step"].tolist(), view.records["seq"].tolist()
    assert list(zip(steps, view.ranks.tolist(), seqs)) == expected
    modules = [view.sites[site].module for site in view.records["site"].tolist()]
    assert modules == list(MODULES) * (STEPS * RANKS)


def test_a_site_of_several_ranks_is_one_site(log: str) -> None:
    view = read_log(log)
    assert sorted(site.module for site in view.sites.values()) == sorted(MODULES)
    for event in view.events:
        assert view.sites[int(event.record["site"])].module == event.site.module


def test_one_rank_is_read_as_it_was_written(log: str) -> None:
    view = read_log(log, rank=1)
    assert set(view.ranks.tolist()) == {1} and sorted(view.meta) == [1]
    assert [view.sites[number].module for number in range(3)] == ["layers.1", "layers.0", "head"]
    assert view.records["site"].tolist() == [1, 0, 2] * STEPS
    assert view.records["seq"].tolist() == list(range(STEPS * len(MODULES)))


def test_the_first_event_is_the_earliest_in_device_order_not_the_lowest_rank(log: str) -> None:
    view = read_log(log)
    assert [event.rank for event in view.events] == [0, 2]
    first = first_event(view.events)
    assert first is not None and (first.rank, first.site.module) == (2, "layers.1")
    assert first_event([]) is None


def test_an_event_that_counts_is_first() -> None:
    early = build.event(
        build.site(), build.record(step=1), Verdict.PROPAGATED, counted=False, rank=1
    )
    late = build.event(build.site(), build.record(step=2), rank=3)
    assert first_event([early, late]) is late and first_event([early]) is early


def test_a_weight_was_not_finite_before_what_another_rank_has_read() -> None:
    def event(rank: int, seq: int, **site: str) -> Event:
        return build.event(build.site(**site), build.record(step=1, seq=seq), rank=rank)

    read, weight = event(0, 3), event(1, 9, role="param", label="weight")
    assert first_event([read, weight]) is weight
    # On its own rank it came after what was read there.
    before = event(1, 2)
    assert first_event([read, before, weight]) is before


def test_show_says_which_rank_was_first(capsys: pytest.CaptureFixture[str], log: str) -> None:
    out = shown(capsys, log)
    assert "ranks 0, 1, 2" in out
    first = out.index("first on rank 2, step 3: output[0] of layers.1")
    assert "(in the same step: rank 0)" in out
    assert first < out.index("rank 0, step 3: 2 +Inf") < out.index("rank 2, step 3: 2 +Inf")


def test_show_of_one_rank_has_no_first_rank_of_others(
    capsys: pytest.CaptureFixture[str], log: str
) -> None:
    out = shown(capsys, log, "--rank", "0")
    assert "first on rank 0, step 3: output[0] of head" in out and "rank 2, step" not in out


def test_trends_are_drawn_by_rank(capsys: pytest.CaptureFixture[str], log: str) -> None:
    out = shown(capsys, log, "--site", "layers.0")
    for rank in range(RANKS):
        assert f"layers.0 output[0], rank {rank}" in out
    # 10 * (rank + 1) * 2**step
    line = next(line for line in out.splitlines() if "layers.0 output[0], rank 2" in line)
    assert "30" in line and "240" in line


def test_json_names_the_ranks_and_the_first_event(
    capsys: pytest.CaptureFixture[str], log: str
) -> None:
    document: dict[str, Any] = json.loads(shown(capsys, log, "--json"))
    assert document["ranks"] == [0, 1, 2]
    assert (document["first"]["rank"], document["first"]["step"]) == (2, 3)
    assert [event["rank"] for event in document["events"]] == [0, 2]
    assert [r["rank"] for r in document["records"]] == [0] * 3 + [1] * 3 + [2] * 3
