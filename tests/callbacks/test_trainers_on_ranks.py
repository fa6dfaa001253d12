"""The adapters in real trainers on several gloo ranks with DistributedDataParallel, and with FSDP2
where a CPU runs it.
"""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import pytest

from support.ranks import trainers_workers
from support.ranks.ranks_harness import run_ranks, values
from support.trainers import in_lab

pytestmark = [pytest.mark.usefixtures("fresh_start"), in_lab]


def skip_without(trainer: str) -> None:
    package = {"huggingface": "transformers"}.get(trainer, trainer.partition("-")[0])
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def trained(
    trainer: str, world_size: int, is_observed: bool = True, is_bad: bool = False
) -> list[Any]:
    options = (is_observed, is_bad)
    if trainer == "trl":
        return values(run_ranks(trainers_workers.trains_trl, *options, world_size=world_size))
    return values(run_ranks(trainers_workers.trains, trainer, *options, world_size=world_size))


SHARDED = ("lightning-fsdp2",)
each_trainer_and_size = pytest.mark.parametrize(
    ("trainer", "world_size"),
    [
        *itertools.product(["huggingface", "lightning", "accelerate", "composer", "trl"], [2, 4]),
        ("lightning-fsdp2", 2),
    ],
)


@each_trainer_and_size
def test_losses_and_weights_are_the_same(trainer: str, world_size: int) -> None:
    skip_without(trainer)
    plain, observed = (
        trained(trainer, world_size, is_observed=is_observed) for is_observed in (False, True)
    )
    for one, other in zip(plain, observed, strict=True):
        assert one["stop"] is None is other["stop"]
        assert len(one["losses"]) == trainers_workers.STEPS
        assert (one["losses"], one["weights"]) == (other["losses"], other["weights"])
        assert other["monitor"] == (trainers_workers.STEPS - 1, 0, one["names"])
    losses = {tuple(one["losses"]) for one in plain}
    assert len(losses) == world_size, "each rank has batches of its own"
    if trainer in SHARDED:
        assert plain[0]["weights"] != plain[1]["weights"], "each rank has shards of its own"
    else:
        assert all(one["weights"] == plain[0]["weights"] for one in plain)


@each_trainer_and_size
def test_a_bad_batch_of_one_rank_stops_all_at_its_step(trainer: str, world_size: int) -> None:
    skip_without(trainer)
    ranks = trained(trainer, world_size, is_bad=True)
    for rank, one in enumerate(ranks):
        assert one["stop"] == (trainers_workers.BAD_STEP, trainers_workers.BAD_RANK, "input"), rank
        assert one["is_intact"], rank
        assert trainer in SHARDED or one["weights"] == ranks[0]["weights"], rank
