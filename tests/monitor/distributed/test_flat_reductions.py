"""Tests of the watch over the reduction of gradients under FullyShardedDataParallel (FSDP1)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import ShardingStrategy

import support.ranks.flat_reduction_workers as work
from support.ranks.flat_reduction_workers import Run
from support.ranks.ranks_harness import run_ranks, values


def named(run: Run) -> str:
    """What is not as in Run()."""
    fields = [f"{key}={new}" for key, new in run._asdict().items() if new != getattr(Run(), key)]
    return ",".join(fields) or "plain"


def runs(run: Run, ranks: int = 2) -> list[Any]:
    results = values(run_ranks(work.trains, run, world_size=ranks))
    assert [one["others"] for one in results] == [[]] * ranks
    return results


@pytest.mark.parametrize(
    "run",
    [
        Run(strategy=ShardingStrategy.SHARD_GRAD_OP, keeps_gradients=True),
        Run(passes=3, syncs_last=True),
        Run(originals=False, passes=3),
    ],
    ids=named,
)
def test_the_ratio_of_the_norms_before_and_after(run: Run) -> None:
    results = runs(run)
    for result in results:
        # A step between two turns, and later seven; none in the first.
        assert len(result["read"]) > 6
        assert all(math.isclose(*pair, rel_tol=1e-4) for _, _, *pair in result["read"])
        assert result["events"] == [] == result["warned"]
    first, second = ({key for _, key, _, _ in result["read"]} for result in results)
    if run.originals:  # 2.0.weight has more than half of its unit
        assert first == {"0.weight", "2.0.weight"}
        assert second == {"0.weight", "2.0.weight", "2.0.bias", "2.2.weight"}
    else:
        assert first == second == {"_flat_param", "2._flat_param"}


def test_the_ratio_on_more_ranks() -> None:
    for result in runs(Run(strategy=ShardingStrategy.HYBRID_SHARD), ranks=4):
        assert len(result["read"]) > 6
        assert all(math.isclose(*pair, rel_tol=1e-4) for _, _, *pair in result["read"])


def test_the_ratio_with_mixed_precision() -> None:
    for result in runs(Run(parameters=torch.bfloat16)):
        assert len(result["read"]) > 6
        assert all(math.isclose(*pair, rel_tol=0.02) for _, _, *pair in result["read"])


def test_training_is_bit_identical_and_no_hook_is_left() -> None:
    run = Run(passes=2, syncs_last=True)
    for watched, plain in zip(runs(run), runs(run._replace(watch=False))):
        assert watched["losses"] == plain["losses"]
        assert watched["weights"] == plain["weights"]
        assert watched["hooks"][0] == watched["hooks"][1]


def test_the_same_batch_on_all_ranks() -> None:
    for result in runs(Run(batches="same")):
        (event,) = result["events"]
        assert event[1:3] == (1.0, True)
        assert "all ranks compute the same gradient" in event[3]


def test_what_is_not_in_pieces_is_left_out() -> None:
    for result in runs(Run(strategy=ShardingStrategy.NO_SHARD)):
        assert result["read"] == []
