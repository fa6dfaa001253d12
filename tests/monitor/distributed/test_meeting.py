"""install() on several ranks: different options are refused, and a late rank is named."""

from __future__ import annotations

from support.ranks import blame_workers as work
from support.ranks.ranks_harness import run_ranks, values


def test_ranks_meet_in_install() -> None:
    first, second = values(run_ranks(work.meets, world_size=2))
    begin = "install() was not given the same on all ranks: "
    assert first[0] == second[0]
    assert first[0] == [
        begin + "overflow_nums is 1 on rank 0 and -1 on rank 1",
        begin + "action is 'warn' on rank 0 and 'raise' on rank 1",
        begin + "overflow_nums is 2 on rank 0 and 3 on rank 1",
    ]
    assert first[1] == second[1] == 0
    (warning,) = first[2]
    assert warning.startswith(
        "rank 1 did not call fastcheck.install() within 0.3 seconds of rank 0"
    )
    assert second[2] == []
    assert first[3] == second[3] == (2, 1)


def test_a_removed_monitor_of_ranks_is_freed() -> None:
    assert values(run_ranks(work.removes_its_monitor, world_size=2)) == [(True, True, True)] * 2
