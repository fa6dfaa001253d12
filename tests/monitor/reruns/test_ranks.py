"""rerun() among several ranks: all name the one on which the difference began."""

from __future__ import annotations

from support.ranks import rerun_workers as work
from support.ranks.ranks_harness import run_ranks, values


def test_every_rank_names_the_first_one_that_differs() -> None:
    found = values(run_ranks(work.a_flipped_bit, 1, world_size=2))
    for one in found:
        assert one["first"] == (1, "module.1", "output")
        assert one["report"] == ("hardware", (2,), 3, 2, False)
        assert "on rank 1, in the forward pass: module.1 (Middle)" in one["text"]
        assert one["again"] and one["is_back"]
    # To rank 0 it came with the reduced gradients.
    assert [one["own"] for one in found] == ["param_grad", "output"]
