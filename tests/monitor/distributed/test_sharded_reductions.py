"""Tests of the watch over the reduction of gradients under fully_shard, each rank a process."""

from __future__ import annotations

import copy
import math
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.distributed.fsdp

import support.ranks.sharded_reduction_workers as work
from fastcheck.monitor.hooks.stored.reduced_flat import flat_modules
from fastcheck.monitor.hooks.stored.reduced_parts import BeforeForward
from fastcheck.monitor.hooks.stored.reduced_shards import sharded_modules
from support.ranks.ranks_harness import run_ranks, values
from support.ranks.sharded_reduction_workers import Run


def named(run: Run) -> str:
    """What is not as in Run()."""
    fields = [
        f"{key}={value}" for key, value in run._asdict().items() if value != getattr(Run(), key)
    ]
    return ",".join(fields) or "plain"


def runs(run: Run, ranks: int = 2) -> list[Any]:
    results = values(run_ranks(work.trains, run, world_size=ranks))
    if run.batches != "large" and not run.fails_in:  # of which the loss is a spike
        assert [one["others"] for one in results] == [[]] * ranks
    return results


@pytest.mark.parametrize(
    "run",
    [
        Run(reshard=False, keeps_gradients=True),
        Run(nested=False, clips=True),
        Run(passes=3),
        Run(reshard=True, passes=3, syncs_last=True),
    ],
    ids=named,
)
def test_the_ratio_of_the_norms_before_and_after(run: Run) -> None:
    for result in runs(run):
        read = result["read"]
        # Three rounds of four parameters, and then in one of eight steps; none in the first.
        assert len(read) > 12
        assert tuple(key for _, key, _, _ in read[:4]) == work.WATCHED
        assert all(math.isclose(value, known, rel_tol=1e-4) for _, _, value, known in read)
        assert all(value != 1 for _, _, value, _ in read)
        assert result["events"] == [] == result["warned"]


@pytest.mark.parametrize(
    "run",
    [
        Run(parameters=torch.bfloat16, reduces=torch.float32, passes=3),
        Run(parameters=torch.bfloat16),
    ],
    ids=named,
)
def test_the_ratio_with_mixed_precision(run: Run) -> None:
    for result in runs(run):
        assert len(result["read"]) > 12
        for _, _, value, known in result["read"]:
            assert math.isclose(value, known, rel_tol=0.02)
        assert result["events"] == [] == result["warned"]


def test_training_is_bit_identical_and_no_hook_is_left() -> None:
    run = Run(parameters=torch.bfloat16, reduces=torch.float32, passes=2, syncs_last=True)
    for watched, plain in zip(runs(run), runs(run._replace(watch=False))):
        assert watched["losses"] == plain["losses"]
        assert watched["weights"] == plain["weights"]
        assert watched["hooks"][0] == watched["hooks"][1]


@pytest.mark.parametrize(
    "run",
    [
        Run(batches="same", parameters=torch.bfloat16, reduces=torch.float32),
        Run(batches="same", passes=2, syncs_last=True),
    ],
    ids=named,
)
def test_the_same_batch_on_all_ranks(run: Run) -> None:
    for result in runs(run):
        (event,) = result["events"]
        assert event[1:3] == (1.0, True)
        assert "all ranks compute the same gradient" in event[3]
        assert "DistributedSampler" in result["warned"][0]


def test_the_same_batch_where_gradients_are_summed() -> None:
    for result in runs(Run(batches="same", sums=True)):
        (event,) = result["events"]
        assert event[1:3] == (0.5, True)
        assert "multiplies its norm by 2," in result["warned"][0]


def test_a_rank_whose_gradient_is_smaller_than_the_others() -> None:
    _, result = runs(Run(batches="small"))
    (event,) = result["events"]
    assert event[0] == work.SPOILT and not event[2]
    assert "smaller here than on the others" in event[3]


def test_a_rank_whose_gradient_is_larger_than_the_others() -> None:
    results = runs(Run(batches="large"), ranks=4)
    for rank, result in enumerate(results[:3]):
        (event,) = [one for one in result["events"] if one[0] == work.SPOILT]
        assert ("larger" if rank == 1 else "smaller") + " here than on the others" in event[3]
        assert not event[2]
    # Nine rows are three for each of three ranks, so that the fourth has no part of that weight.
    assert all(key != "2.2.weight" for _, key, _, _ in results[3]["read"])


def test_shards_of_replicas() -> None:
    for result in runs(Run(mesh=(2, 2)), ranks=4):
        assert len(result["read"]) > 12
        for _, _, value, known in result["read"]:
            assert math.isclose(value, known, rel_tol=1e-4)


@pytest.fixture(scope="module")
def without_watch() -> list[Any]:
    return runs(Run(watch=False))


@pytest.mark.parametrize(
    "place",
    [
        "reductions.sharded_modules",  # within install()
        "reduced_shards.shard_of",  # where a turn begins
        "reduced_shards.is_part",  # before a forward pass
        "reduced_parts.is_readable",  # in autograd
        "reduced_parts.norm_of",  # after a backward pass
    ],
)
def test_training_goes_on_where_the_reading_fails(place: str, without_watch: list[Any]) -> None:
    for broken, plain in zip(runs(Run(fails_in=place)), without_watch):
        assert broken["losses"] == plain["losses"] and broken["weights"] == plain["weights"]
        assert broken["hooks"][0] == broken["hooks"][1]
        assert broken["read"] == []
        (text,) = broken["warned"]
        assert "the reading of reductions" in text and "as if torch had changed" in text


@pytest.mark.parametrize(("kind", "count"), [("wrapped", 7), ("whole", 0)])
def test_compiled_code_is_compiled_once(kind: str, count: int) -> None:
    watched, plain = [
        values(run_ranks(work.trains_compiled, kind, watch, world_size=2))
        for watch in (True, False)
    ]
    assert [one[0] for one in watched] == [count, count]
    assert [one[1:] for one in watched] == [one[1:] for one in plain]


def test_without_the_modules_of_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch before 2.6."""
    model = torch.nn.Linear(2, 2)
    monkeypatch.delattr(torch.distributed.fsdp, "FSDPModule")
    assert list(sharded_modules([model])) == []
    monkeypatch.delattr(torch.distributed, "fsdp")
    assert list(sharded_modules([model])) == [] == list(flat_modules([model]))


def test_a_copy_of_the_hook_does_nothing() -> None:
    class Owner:
        calls = 0

        def method(self) -> None:
            self.calls += 1

    owner = Owner()
    hook = BeforeForward(weakref.WeakMethod(owner.method))
    model = torch.nn.Linear(2, 2)
    model.register_forward_pre_hook(hook)
    for module in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        module(torch.ones(1, 2))
    assert owner.calls == 1
    del owner
    model(torch.ones(1, 2))
