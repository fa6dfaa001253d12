"""verify() of checkpoints of torch.distributed.checkpoint, whole or in shards."""

from __future__ import annotations

import enum
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import planner
from torch.distributed.checkpoint.metadata import MetadataIndex

import fastcheck
from support.ranks import training_workers
from support.ranks.ranks_harness import run_ranks, values

pytestmark = pytest.mark.usefixtures("fresh_start")


def save(model: nn.Module, folder: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process alone
        dcp.save({"model": model.state_dict(), "epoch": 3}, checkpoint_id=folder)


def test_a_checkpoint_is_held_to_its_seal() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    save(model, "saved")
    fastcheck.seal("saved", model, step=7)
    found = fastcheck.verify("saved")
    assert found and found.step == 7 and found.equal == len(model.state_dict())
    with torch.no_grad():
        model[0].weight[1, 1] += 1
        model[1].bias[0] = float("nan")
    save(model, "saved")
    found = fastcheck.verify("saved")
    assert list(found.differing) == ["0.weight", "1.bias"] and found.nonfinite == {"1.bias": 1}


def test_shards_of_ranks_are_put_together(tmp_path: Path) -> None:
    folder = str(tmp_path / "shards")
    (whole, *_) = values(run_ranks(training_workers.saves_shards, folder, world_size=2))
    fastcheck.seal(folder, whole)
    found = fastcheck.verify(folder)
    assert found and found.equal == len(whole)


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (Path("touched"),))


def test_metadata_that_would_run_code_is_refused() -> None:
    model = nn.Linear(4, 4)
    save(model, "saved")
    fastcheck.seal("saved", model)
    Path("saved/.metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(fastcheck.CompareError, match="names something unknown"):
        fastcheck.verify("saved")
    assert not Path("touched").exists()


def test_plans_in_the_metadata_are_no_code() -> None:
    """Megatron Core keeps those of its ranks there."""
    model = nn.Linear(4, 4)
    save(model, "saved")
    fastcheck.seal("saved", model)
    path = Path("saved/.metadata")
    metadata = pickle.loads(path.read_bytes())
    index = MetadataIndex("model.weight")
    metadata.planner_data = planner.SavePlan(
        [planner.WriteItem(index, planner.WriteItemType.TENSOR)]
    )
    path.write_bytes(pickle.dumps(metadata))
    assert fastcheck.verify("saved")


class ByName(pickle.Pickler):
    """Members of enums are pickled as Python 3.11.2 does it."""

    def reducer_override(self, obj: object) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, enum.Enum) else NotImplemented


def test_members_of_enums_may_be_pickled_by_name() -> None:
    model = nn.Linear(4, 4)
    save(model, "saved")
    fastcheck.seal("saved", model)
    path = Path("saved/.metadata")
    metadata = pickle.loads(path.read_bytes())
    with path.open("wb") as file:
        ByName(file).dump(metadata)
    assert b"getattr" in path.read_bytes() and fastcheck.verify("saved")


def test_damaged_metadata_is_an_error() -> None:
    model = nn.Linear(4, 4)
    save(model, "saved")
    fastcheck.seal("saved", model)
    whole = Path("saved/.metadata").read_bytes()
    Path("saved/.metadata").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(fastcheck.CompareError, match="metadata"):
        fastcheck.verify("saved")


def test_metadata_that_asks_for_too_much_memory_is_not_followed() -> None:
    model = nn.Linear(4, 4)
    save(model, "saved")
    fastcheck.seal("saved", model)
    metadata = dcp.FileSystemReader("saved").read_metadata()
    metadata.state_dict_metadata["model.weight"].size = torch.Size([1 << 40])
    Path("saved/.metadata").write_bytes(pickle.dumps(metadata))
    found = fastcheck.verify("saved")
    assert not found and "more bytes" in found.differing["weight"]


def test_tensors_of_a_damaged_shard_are_named() -> None:
    model = nn.Linear(4, 4)
    save(model, "saved")
    fastcheck.seal("saved", model)
    (shard,) = Path("saved").glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:40].ljust(4000, b"x"))
    found = fastcheck.verify("saved")
    assert not found and set(found.differing) | set(found.missing) == {"weight", "bias"}
