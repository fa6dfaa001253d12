"""Tests of the watch over the reduction of gradients, each rank a process of its own."""

from __future__ import annotations

import math
from typing import Any

import pytest

import support.ranks.reduction_workers as work
from support.ranks.ranks_harness import run_ranks, values


def runs(kind: str, ranks: int = 2, watch: bool = True) -> list[Any]:
    return values(run_ranks(work.trains, kind, watch, world_size=ranks))


@pytest.mark.parametrize("kind", ["own", "accumulated", "clipped"])
def test_the_ratio_of_the_norms_before_and_after(kind: str) -> None:
    for result in runs(kind):
        read = result["read"]
        # Three rounds of four parameters, and then in one of eight steps; none in the first.
        assert len(read) > 12
        assert {key for _, key, _, _ in read[:4]} == {
            f"module.{layer}.{name}" for layer in (0, 2) for name in ("weight", "bias")
        }
        assert all(math.isclose(value, known, rel_tol=1e-5) for _, _, value, known in read)
        assert all(value != 1 for _, _, value, _ in read)
        assert result["events"] == [] == result["warned"]


def test_training_is_bit_identical_and_no_hook_is_left() -> None:
    for watched, plain in zip(runs("own"), runs("own", watch=False)):
        assert watched["weights"] == plain["weights"]
        assert watched["hooks"][1] == plain["hooks"][1] == plain["hooks"][0] == 4


def test_the_same_batch_on_all_ranks() -> None:
    for result in runs("same"):
        (event,) = result["events"]
        assert event[1:3] == (1.0, True)
        assert "all ranks compute the same gradient" in event[3]
        assert "DistributedSampler" in result["warned"][0]


def test_gradients_that_are_not_reduced() -> None:
    assert ["no_sync()" in one["warned"][0] for one in runs("unreduced")] == [True, True]


def test_a_rank_whose_gradient_is_unlike_the_others() -> None:
    """In one step, in which one parameter has its turn on all of them."""
    results = runs("spoilt", ranks=4)
    for rank, result in enumerate(results):
        (event,) = [one for one in result["events"] if one[0] == work.SPOILT]
        assert ("larger" if rank == 1 else "smaller") + " here than on the others" in event[3]
        assert not event[2]


def test_without_a_wrapper_nothing_is_read() -> None:
    assert values(run_ranks(work.gradients_without_a_group, world_size=2)) == [set(), set()]
