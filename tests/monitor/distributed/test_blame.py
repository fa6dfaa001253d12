"""Which rank a stop names if a bad sample of one rank spreads to all of them."""

from __future__ import annotations

import pathlib

from fastcheck.log.reader import read_log
from fastcheck.log.view import first_event
from support.ranks import blame_workers as work
from support.ranks.ranks_harness import run_ranks, values

BATCH = ("", "input", "input[0]", "arrived")


def test_the_rank_of_a_bad_sample_is_named_on_all_ranks(tmp_path: pathlib.Path) -> None:
    first, second = values(run_ranks(work.a_bad_sample, 1, str(tmp_path), world_size=2))
    assert first == second
    for step, rank, place in first:
        assert (step, rank) == (2, 1), place
    assert [place for _, _, place in first] == [BATCH] * 4
    event = first_event(read_log(tmp_path).events)
    assert event is not None and event.rank == 1


def test_a_bad_weight_comes_before_what_other_ranks_make_of_it(tmp_path: pathlib.Path) -> None:
    found = values(run_ranks(work.a_bad_weight, 1, str(tmp_path), world_size=2))
    weight = ("1.part", "param", "weight", "arrived")
    assert found == [(2, 1, weight)] * 2
    event = first_event(read_log(tmp_path).events)
    assert event is not None and (event.rank, event.site.role) == (1, "param")


def test_torchs_default_optimizers_do_not_apply_what_the_ranks_stop_for() -> None:
    found = values(run_ranks(work.updates_are_held_back, "AdamW", world_size=2))
    assert found == [(2, 1, True, True)] * 2


def test_a_pipeline_that_asks_for_shapes_is_not_accused() -> None:
    first, second = values(run_ranks(work.train_in_pipelines, world_size=2))
    assert first == second
    assert first[0] == (3, 3, 0, ("", "input", "input[0]", "arrived"))
    assert first[1][:3] == (3, 3, 0)


def test_a_reduced_nan_arrives_where_no_stop_is_due() -> None:
    healthy, faulty = values(run_ranks(work.goes_on_without_a_stop, 1, world_size=2))
    for events in healthy:
        assert {verdict for _, _, verdict in events} == {"ARRIVED"}
        assert {role for _, role, _ in events} == {"param_grad"}
    for events in faulty:
        assert [(role, verdict) for _, role, verdict in events] == [("input", "ARRIVED")]


def test_what_a_stage_received_comes_after_where_it_was_made() -> None:
    first, second = values(run_ranks(work.a_received_activation, world_size=2))
    assert first == second and first[:2] == (1, 0)
