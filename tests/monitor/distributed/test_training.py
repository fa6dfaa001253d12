"""fastcheck.install() on four ranks: after a fault on one of them all stop with the same report."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from fastcheck.log.reader import read_log
from fastcheck.log.view import first_event
from support.ranks import training_workers as training_work
from support.ranks.ranks_harness import run_ranks, values


@pytest.mark.parametrize("faulty", [0, 3])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_all_ranks_stop_with_the_report_of_the_one_that_overflowed(
    kind: str, faulty: int, tmp_path: pathlib.Path
) -> None:
    results = values(run_ranks(training_work.trains, kind, faulty, str(tmp_path), {}))
    assert len({said for said, _ in results}) == 1
    step, text, of_step, culprit, rank, is_intact = results[0][0]
    module = "module.1" if kind == "ddp" else "1"
    # One boundary later; meanwhile the bad gradients were kept out of the weights.
    assert (step, of_step, is_intact) == (8, 7, True)
    assert (rank, culprit) == (faulty, (module, "output", "output", "origin"))
    assert f"output of {module} (Apply) at step 7 on rank {faulty}" in text
    assert f"rank      {faulty} of 4: all ranks stop together" in text
    for rank, (_, gradients) in enumerate(results):
        [(verdict, reason)] = gradients
        if rank == faulty:
            assert verdict == "PROPAGATED"
        else:
            assert verdict == "ARRIVED" and "came with the reduction over the ranks" in reason
    view = read_log(tmp_path)
    assert sorted(view.meta) == [0, 1, 2, 3]
    first = first_event(view.events)
    assert first is not None and (first.rank, first.site.module) == (faulty, module)


@pytest.mark.parametrize("sync", ["step", "call"])
def test_with_sync_no_rank_applies_the_bad_gradient(sync: str, tmp_path: pathlib.Path) -> None:
    results = values(run_ranks(training_work.trains, "ddp", 2, str(tmp_path), {"sync": sync}))
    assert len({said for said, _ in results}) == 1
    step, text, of_step, _, rank, is_intact = results[0][0]
    assert (step, of_step, rank, is_intact) == (7, 7, 2, True)
    assert "No optimizer has updated a weight in this step." in text


@pytest.mark.parametrize(
    ("sync", "kind", "bad", "evaluations"),
    [
        ("never", "SGD", 3, 4),
        ("never", "AdamW fused", 3, 4),
        ("step", "SGD", 3, 3),
        # Its second evaluation: in the step after it the ranks meet.
        ("step", "LBFGS", 4, 5),
    ],
)
def test_gradients_that_a_closure_makes_are_judged_before_they_are_used(
    sync: str, kind: str, bad: int, evaluations: int
) -> None:
    results = values(
        run_ranks(training_work.trains_with_closures, {"sync": sync}, kind, bad, world_size=2)
    )
    for step, rank, role, count, is_intact, weights in results:
        assert (step, rank, role) == (2 if kind != "LBFGS" else 1, 1, "input")
        assert count == evaluations, "where the ranks stop"
        assert is_intact
        assert weights == results[0][-1]


def test_without_log_dir_all_ranks_write_to_one_directory(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    results = values(run_ranks(training_work.trains, "ddp", 1, None, {}))
    assert len({said for said, _ in results}) == 1
    [directory] = (tmp_path / "fastcheck_log").iterdir()
    assert sorted(read_log(directory).meta) == [0, 1, 2, 3]
    # One of them writes the page that all of them name.
    page = (directory / "report.html").read_text()
    assert f"{directory.name}/report.html" in results[0][0][1]
    assert f"on rank {results[0][0][4]}" in page and list(directory.glob("*.part")) == []


def test_a_stop_that_is_caught_is_not_the_last() -> None:
    expected: Any = [(4, (3, 1, "1")), (8, (7, 2, "1")), ("end", (11, 3, "1"))]
    assert values(run_ranks(training_work.goes_on)) == [expected] * 4


def test_an_error_of_ones_own_waits_for_nobody_and_stops_nobody() -> None:
    results = values(run_ranks(training_work.leaves_by_an_exception))
    assert results == ["KeyError(2)", "all steps", "all steps", "all steps"]


def test_no_rank_applies_an_update_of_which_one_shard_is_bad() -> None:
    results = values(run_ranks(training_work.a_shard_goes_bad, 2))
    assert results == [(4, 3, 2, "weight", [True] * 4)] * 4


def test_a_process_group_stops_by_itself() -> None:
    stop = (4, 3, 1, 2)
    assert values(run_ranks(training_work.in_a_subgroup)) == [stop, stop, None, None]


def test_at_op_level_a_collective_is_where_it_came_from() -> None:
    received, sent, *others = values(run_ranks(training_work.a_nan_through_a_collective))
    arrival = (None, "ARRIVED", "it came through a collective")
    assert [received, *others] == [[arrival]] * 3
    assert sent[0][0] in ("aten.div.Tensor", "aten.mul.Tensor") and sent[0][1] == "ORIGIN"


@pytest.mark.parametrize("why", ["not installed", "at an update", "at an evaluation"])
def test_no_rank_waits_for_one_that_does_not_decide_on_an_update_of_shards(why: str) -> None:
    results = values(run_ranks(training_work.shards_that_one_rank_leaves, why, world_size=2))
    for rank, ((plain, with_fastcheck), warned) in enumerate(results):
        assert with_fastcheck == plain and len(plain) == 6
        expected = ["no longer observes optimizer steps"] if rank == 1 else []
        if why == "not installed":
            expected = ["did not call fastcheck.install()", "can't agree"] if rank == 0 else []
        assert len(warned) == len(expected)
        assert all(text in warning for text, warning in zip(expected, warned))


def test_an_error_after_the_decision_on_an_update_of_shards_is_not_one_of_it() -> None:
    for warned in values(run_ranks(training_work.fails_to_decide, True, world_size=2)):
        (text,) = [each for each in warned if "weights" in each]
        assert "no longer observes the protection of the weights" in text


def test_a_decision_on_an_update_of_shards_that_fails_says_what_it_needs() -> None:
    for warned in values(run_ranks(training_work.fails_to_decide, False, world_size=2)):
        (text,) = [each for each in warned if "update" in each]
        assert "leaves out an update" in text and "protect_weights=False" in text
        assert "Connection closed by peer" in text and "not affected" not in text


@pytest.mark.parametrize(
    ("part", "told", "elsewhere"),
    [
        ("build_report", "no longer observes", "rank 1 prints the report"),
        ("save_held", "module.1 (Apply)", "rank 1 prints the report"),
        ("packed", "module.1 (Apply)", "rank 1 stopped at step 2; its report did not reach"),
        ("_priority", "module.1 (Apply)", "rank 1 stopped at step 2; its report did not reach"),
    ],
)
def test_all_ranks_stop_in_spite_of_an_error_of_one(part: str, told: str, elsewhere: str) -> None:
    of_ranks = run_ranks(training_work.stops_in_spite_of_an_error, part, world_size=2)
    other, failed = values(of_ranks)
    assert "at step 2 on rank 1" in failed and told in failed
    assert elsewhere in other


@pytest.mark.parametrize("keeps_parameters", [False, True])
def test_fsdp1_clips_by_a_method_of_its_own(keeps_parameters: bool) -> None:
    results = values(run_ranks(training_work.fsdp1_clips, 1, keeps_parameters, world_size=2))
    for rank, (step, of_rank, (module, role), (gradients, norms), events) in enumerate(results):
        assert (step, of_rank, role) == (3, 1, "param_grad")
        assert ".1." in module
        assert norms == 1
        assert gradients <= 6  # each once
        if rank == 0:
            assert ("grad_norm", "ARRIVED") in events


def test_a_norm_is_never_that_of_a_shard() -> None:
    """Each rank has a part of every gradient: no number is better than one that is too small."""
    for rows, norms, gradients, norm in values(run_ranks(training_work.norms_under_fsdp)):
        assert rows == [None] and norms == [] and norm > 0
        assert [key for key, _ in gradients] == ["0.weight", "0.bias", "2.weight", "2.bias"]
        assert gradients[0][1] == "0 (Linear) · optimizer · gradient of 0.weight"
