"""What an adapter does with the checkpoints of weights that are spread over ranks."""

from __future__ import annotations

import pytest

from support.ranks import training_workers
from support.ranks.ranks_harness import run_ranks, values

pytestmark = pytest.mark.usefixtures("fresh_start")


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_weights_of_fsdp_are_checked_on_all_ranks_and_not_gathered(kind: str) -> None:
    """The state_dict of FSDP1 waits for all ranks, and a seal is written by one."""
    one, other = values(run_ranks(training_workers.saves_in_parts, kind, world_size=2))
    (warning,) = one["warnings"]
    assert warning.startswith("first is not sealed: its weights are spread over the ranks")
    assert other["warnings"] == [] and not one["sealed"]
    assert one["refused"] == other["refused"] == "third is not written"
