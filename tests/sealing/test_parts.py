"""Seals of weights that are spread over ranks: each rank reads its parts, one seal has all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.callbacks.seals import held_weights, is_spread
from fastcheck.sealing.seal import merged, seal_path
from fastcheck.utils.torch.sharding import LocalShard
from support.ranks import training_workers
from support.ranks.ranks_harness import run_ranks, values

pytestmark = pytest.mark.usefixtures("fresh_start")


def test_shards_of_all_ranks_are_in_one_seal(tmp_path: Path) -> None:
    """FSDP2 on three ranks, of which some hold nothing of the smaller tensors."""
    folder = str(tmp_path / "shards")
    found = values(run_ranks(training_workers.seals_shards, folder, world_size=3))
    verified = fastcheck.verify(folder)
    keys = sorted(nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 1), nn.BatchNorm1d(1)).state_dict())
    assert verified and verified.equal == len(keys) and verified.step == 3
    for one in found:
        assert one["keys"] == keys and one["unsealed"] == {}
        assert one["refused"] == f"1 of {len(keys)} weights are not finite"
    assert not Path(folder + "-bad.fastcheck.json").exists()
    alone = json.loads(Path(folder + "-alone.fastcheck.json").read_text())
    assert found[0]["alone"] == sorted(alone["unsealed"]) and "0.weight" in alone["unsealed"]


@pytest.fixture
def sealed() -> tuple[dict[str, torch.Tensor], Any]:
    """A file whose second tensor was sealed in two parts, and the seal's content."""
    state = {"a": torch.randn(3), "b": torch.randn(4, 3)}
    torch.save(state, "model.pt")
    fastcheck.seal("model.pt", state)
    path = Path(seal_path("model.pt"))
    content = json.loads(path.read_text())
    whole = content["tensors"]["b"]
    sums = [fastcheck.checksum(state["b"][n : n + 2], order="logical") for n in (0, 2)]
    whole["parts"] = [
        {"offsets": [n, 0], "sizes": [2, 3], "checksum": f"{one:016x}"}
        for n, one in zip((0, 2), sums)
    ]
    del whole["checksum"]
    content["format"] = 2
    path.write_text(json.dumps(content))
    return state, content


def test_parts_are_slices_of_what_the_checkpoint_holds(sealed: Any) -> None:
    state, content = sealed
    assert len(content["tensors"]["b"]["parts"]) == 2 and fastcheck.verify("model.pt")
    state["b"][2, 1] += 1
    torch.save(state, "model.pt")
    assert fastcheck.verify("model.pt").differing == {"b": "other values in the part [2:4, 0:3]"}
    torch.save({**state, "b": state["b"].reshape(12)}, "model.pt")
    assert "shape (12,)" in fastcheck.verify("model.pt").differing["b"]


@pytest.mark.parametrize("change", [{"sizes": [2, -3]}, {"offsets": "0"}, {"checksum": 3}])
def test_damaged_parts_are_a_clear_error(sealed: Any, change: dict[str, Any]) -> None:
    _, content = sealed
    content["tensors"]["b"]["parts"][1].update(change)
    Path(seal_path("model.pt")).write_text(json.dumps(content))
    with pytest.raises(fastcheck.CompareError, match="not a seal"):
        fastcheck.verify("model.pt")


@pytest.mark.parametrize("left", [0, 1])
def test_a_seal_that_lacks_parts_verifies_nothing_of_them(sealed: Any, left: int) -> None:
    _, content = sealed
    del content["tensors"]["b"]["parts"][left:]
    Path(seal_path("model.pt")).write_text(json.dumps(content))
    assert fastcheck.verify("model.pt").differing == {"b": "the seal lacks parts of it"}


def test_a_tensor_of_which_parts_are_missing_is_not_sealed() -> None:
    half = LocalShard(torch.ones(2, 3), (0, 0), (2, 3), 12)
    made = fastcheck.seal("model.pt", {"a": torch.ones(2), "b": half}, together=True)
    assert list(made.tensors) == ["a"] and "6 of its 12 elements" in made.unsealed["b"]


def test_the_parts_of_replicas_count_once() -> None:
    part = {"offsets": [0], "sizes": [2], "checksum": "0"}
    entry = {"dtype": "float32", "numel": 2, "nan": 1, "inf": 0, "parts": [part]}
    found, left_out = merged([{"a": entry}, {"a": entry}])
    assert found == {"a": entry} and left_out == {}


def test_a_seal_without_a_tensor_verifies_nothing() -> None:
    torch.save({"a": torch.ones(2)}, "model.pt")
    fastcheck.seal("model.pt", {"a": torch.ones(2, device="meta")})
    found = fastcheck.verify("model.pt")
    assert not found and found.equal == 0 and "a was not sealed" in found.notes[0]


def test_what_a_rank_holds_leaves_out_buffers_that_no_checkpoint_keeps() -> None:
    """A mask of infinities is often such a buffer."""
    model: Any = nn.Linear(2, 2)
    model.register_buffer("mask", torch.tensor(float("-inf")), persistent=False)
    model.register_buffer("kept", torch.ones(1))
    model.weight.ds_tensor, model.weight.ds_numel = torch.ones(3), 4
    model.weight.data = torch.empty(0)
    assert is_spread(model) and sorted(held_weights(model)) == ["bias", "kept", "weight"]
    assert held_weights(model)["weight"].shape == (3,)
