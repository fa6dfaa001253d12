"""Tests for a loop of torchtitan's shape on gloo ranks: FSDP2, its clipping, its checkpoints. Its
own trainer can't be imported without Triton, and needs a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.programs.training import Net
from support.ranks import torchtitan_workers
from support.ranks.ranks_harness import run_ranks, values
from support.trainers import in_lab

pytestmark = pytest.mark.usefixtures("fresh_start")


@in_lab
@pytest.mark.parametrize("world_size", [2, 4])
def test_losses_are_the_same_and_all_gradients_are_read(tmp_path: Path, world_size: int) -> None:
    plain, observed = (
        values(run_ranks(torchtitan_workers.trains, on, -1, folder, world_size=world_size))
        for on, folder in ((False, str(tmp_path / "plain")), (True, str(tmp_path / "observed")))
    )
    names = sorted(name for name, _ in Net().named_parameters())
    for one, other in zip(plain, observed, strict=True):
        assert one["losses"] == other["losses"] and len(one["losses"]) == 12
        assert one["norms"] == other["norms"] and other["stop"] is None
        assert other["keys"] == names and len(other["rows"]) == 6
    # The norm over all shards, which the loop has, or none: not that of one rank's shards.
    assert observed[0]["norms"] == observed[1]["norms"]
    for one in observed:
        assert all(r is None or r == pytest.approx(n) for r, n in zip(one["rows"], one["norms"]))


def test_a_fault_of_one_rank_stops_all_before_the_update_and_the_checkpoint(tmp_path: Path) -> None:
    one, other = values(run_ranks(torchtitan_workers.trains, True, 3, str(tmp_path), world_size=2))
    assert one["stop"] == other["stop"] == (3, 1, "input")
    assert one["is_intact"] and other["is_intact"]
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-1"]
