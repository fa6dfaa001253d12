"""The adapters in real trainers on several gloo ranks with DistributedDataParallel."""

from __future__ import annotations

import importlib.util

import pytest

from support.programs.training import Net
from support.ranks import trainers_workers
from support.ranks.ranks_harness import run_ranks, values
from support.trainers import in_lab

pytestmark = [pytest.mark.usefixtures("fresh_start"), in_lab]


def skip_without(trainer: str) -> None:
    package = {"huggingface": "transformers"}.get(trainer, trainer)
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


each_trainer = pytest.mark.parametrize("trainer", ["huggingface", "lightning", "accelerate"])
each_size = pytest.mark.parametrize("world_size", [2, 4])


@each_size
@each_trainer
def test_losses_and_weights_are_the_same(trainer: str, world_size: int) -> None:
    skip_without(trainer)
    plain, observed = (
        values(run_ranks(trainers_workers.trains, trainer, on, False, world_size=world_size))
        for on in (False, True)
    )
    names = {name for name, _ in Net().named_parameters()}
    for one, other in zip(plain, observed, strict=True):
        assert one["stop"] is None is other["stop"]
        assert len(one["losses"]) == trainers_workers.STEPS
        assert (one["losses"], one["weights"]) == (other["losses"], other["weights"])
        assert other["monitor"] == (trainers_workers.STEPS - 1, 0, names)
    losses = {tuple(one["losses"]) for one in plain}
    assert len(losses) == world_size, "each rank has batches of its own"
    assert all(one["weights"] == plain[0]["weights"] for one in plain)


@each_size
@each_trainer
def test_a_bad_batch_of_one_rank_stops_all_at_its_step(trainer: str, world_size: int) -> None:
    skip_without(trainer)
    ranks = values(run_ranks(trainers_workers.trains, trainer, True, True, world_size=world_size))
    for rank, one in enumerate(ranks):
        assert one["stop"] == (trainers_workers.BAD_STEP, trainers_workers.BAD_RANK, "input"), rank
        assert one["is_intact"], rank
        assert one["weights"] == ranks[0]["weights"], rank
