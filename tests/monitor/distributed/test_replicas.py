"""check_replicas() on four gloo ranks, of which one holds different values."""

from __future__ import annotations

import itertools
import re

import pytest

from support.ranks import replicas_workers as work
from support.ranks.ranks_harness import run_ranks, values
from support.sampling import sample

NAMES = ("first.weight", "first.bias", "second.weight", "second.bias")


@pytest.mark.parametrize("every", [1, 4])
def test_replicas_that_agree_are_not_reported(every: int) -> None:
    assert values(run_ranks(work.healthy, every)) == [([], [], NAMES)] * 4


@pytest.mark.parametrize(("odd", "bit"), sample(itertools.product((0, 3), (0, 31)), 1))
def test_a_flipped_bit_is_found_and_named(odd: int, bit: int) -> None:
    for found, said, _ in values(run_ranks(work.bit_flips, odd, bit)):
        [(when, what, text)] = found
        # As soon as the gather is there, which takes a step or two.
        assert 5 < when <= 8 and said == []
        assert what == (5, "second.weight", False, (odd,), True, 2, ())
        assert "replicas differ at step 5: second.weight" in text
        assert f"differs on: rank {odd}; all others agree" in text
        assert f"suspect the memory or the device of rank {odd}" in text


def test_gradients_are_compared_on_request() -> None:
    for found, _, _ in values(run_ranks(work.flip_in_a_gradient, True)):
        [(when, what, text)] = found
        assert when > 3 and what == (3, "first.bias", True, (2,), True, 2, ())
        assert "the gradient of first.bias" in text
    assert values(run_ranks(work.flip_in_a_gradient, False)) == [([], [], NAMES)] * 4


def test_a_gradient_that_one_rank_does_not_have() -> None:
    for found, _, _ in values(run_ranks(work.missing_gradient)):
        [(_, what, text)] = found
        assert what == (2, "first.bias", True, (1,), True, 2, ())
        assert "no gradient on rank 1" in text


def test_of_two_ranks_neither_is_called_wrong() -> None:
    results = values(run_ranks(work.in_pairs))
    assert [found for found, _, _ in results[:2]] == [[], []]
    for found, _, _ in results[2:]:
        _, what, text = found[0]
        assert what[:5] == (1, "first.weight", False, (2, 3), False)
        assert "ranks 2, 3, without a majority" in text


def test_models_with_different_parameters_are_said_so_once() -> None:
    for found, said in values(run_ranks(work.different_models)):
        assert found == [None] * 3
        [warning] = said
        assert "number by rank: [2, 1, 2, 2]" in warning


def test_a_check_on_one_rank_alone_warns_and_ends() -> None:
    [said, *others] = values(run_ranks(work.on_one_rank))
    assert len(said) == 1 and "ranks 1, 2, 3" in said[0]
    assert others == [[]] * 3


def test_shards_are_compared_where_they_are_replicated() -> None:
    results = values(run_ranks(work.sharded))
    for rank, (found, compared, compared_of_all) in enumerate(results):
        assert compared == NAMES and compared_of_all == []
        mine = [one for one, _ in found if one is not None]
        assert [one for _, one in found] == [None] * 4
        # Rank 3 holds the same shard as rank 1.
        assert [one[:5] for one in mine] == (
            [(1, "second.weight", False, (1, 3), False)] if rank in (1, 3) else []
        )


WITHOUT_A_CALL = {
    "bypassed": ("step 1: module.first.weight", "gradients were not reduced: the model was called"),
    "bypassed by a method": ("step 1: module.first.weight", "gradients were not reduced"),
    "clipped on one rank": ("step 10: module.second.weight", "left out, clipping"),
    "lost": ("step 10: module.second.weight", "several tensors"),
}


@pytest.mark.parametrize("fault", sample(WITHOUT_A_CALL, 1))
def test_replicas_are_compared_by_themselves(fault: str) -> None:
    place, cause = WITHOUT_A_CALL[fault]
    for found, said, _ in values(run_ranks(work.by_itself, fault)):
        assert len(found) == 1 and len(said) == 1
        assert f"replicas differ at {place}" in said[0] and cause in said[0]


LAID_OUT = {
    ("hsdp", "a flipped bit"): ("step 10", "up.weight", (1, 3), "suspect|go on from it"),
    ("hybrid", "a flipped bit"): (
        "step 10",
        "_fsdp_wrapped_module.up._fsdp_wrapped_module.weight",
        (1, 3),
        "go on from it",
    ),
    ("tensor parallel", "clipped on one rank"): ("step 10", "norm.weight", (0, 1), "clipping"),
    ("megatron", "clipped on one rank"): ("step 10", "norm.weight", (0, 1), "clipping"),
}
WHY = {
    "hsdp": "replicated over dimension replica of the device mesh",
    "hybrid": "hybrid shards of FSDP",
    "tensor parallel": "replicated over dimension tp of the device mesh",
    "megatron": "not split over the tensor parallel group",
}


@pytest.mark.parametrize("layout, fault", sample(LAID_OUT, 1))
def test_replicas_of_a_layout_are_compared_by_themselves(layout: str, fault: str) -> None:
    place, parameter, odd, cause = LAID_OUT[layout, fault]
    for rank, (found, said, _) in enumerate(values(run_ranks(work.laid_out, layout, fault))):
        if rank not in odd:
            assert not said
            continue
        assert found[0][1] == parameter and found[0][3:5] == (odd, False)
        assert f"replicas differ at {place}: {parameter}" in said[0]
        assert f"ranks {odd[0]}, {odd[1]}, {WHY[layout]}" in said[0]
        assert re.search(cause, said[0])


def test_an_optimizer_that_was_made_before_fully_shard() -> None:
    for said in values(run_ranks(work.optimizer_of_the_whole)):
        assert len(said) == 1 and "holds none of the model's parameters" in said[0]


ONE_BATCH = "trained on the same batch, bit for bit, in each of 8 steps"


@pytest.mark.parametrize("layout", sample(["hsdp", "fsdp"], 1))
def test_one_batch_for_all_ranks(layout: str) -> None:
    for _, said, _ in values(run_ranks(work.laid_out, layout, "one batch for all")):
        assert len(said) == 1 and ONE_BATCH in said[0]


@pytest.mark.parametrize(
    "layout",
    sample(["hsdp", "fsdp", "hybrid", "own norm", "megatron", "tensor parallel"], 1),
)
def test_nothing_is_said_of_a_layout(layout: str) -> None:
    """Ranks of one tensor parallel group have one batch."""
    assert values(run_ranks(work.laid_out, layout, "none")) == [([], [], [])] * 4


@pytest.mark.parametrize("fault, factor", [("reduced twice", "4"), ("divided twice", "1/4")])
def test_gradients_that_are_reduced_twice(fault: str, factor: str) -> None:
    for found, said, [event] in values(run_ranks(work.by_itself, fault)):
        assert found == said == []
        assert f"multiplied by {factor} (seen at module.first.weight), in 10 updates" in event


def test_one_batch_for_all_ranks_of_ddp() -> None:
    for found, said, _ in values(run_ranks(work.by_itself, "one batch for all")):
        assert found == [] and len(said) == 1 and ONE_BATCH in said[0]
        assert "ranks 0, 1, 2, 3 trained" in said[0]


QUIET = ("none", "local sgd", "not watched", "one batch again and again", "averaged twice")


@pytest.mark.parametrize("fault", sample(QUIET, 1))
def test_nothing_is_said_by_itself(fault: str) -> None:
    assert values(run_ranks(work.by_itself, fault)) == [([], [], [])] * 4


def test_no_rank_waits_for_another_by_itself() -> None:
    """One that did would have given up."""
    first, *others = values(run_ranks(work.ahead_of_the_others))
    assert first == (False, True, None, [])  # at the end it has waited
    assert others == [(False, False, None, [])] * 3


def test_the_monitor_warns_of_it_once_on_every_rank() -> None:
    for found, said, summary in values(run_ranks(work.through_the_monitor)):
        assert found[0][:5] == (6, "module.second.bias", False, (2,), True)
        assert len(said) == len(found)
        assert said[0] == "replicas differ at step 6: module.second.bias"
        assert "differs on: rank 2" in summary
