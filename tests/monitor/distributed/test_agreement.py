"""Several ranks stop together: four gloo processes, an event on one, and failures among them.

What each rank does is in ranks_workers; here is what has to come out.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

import pytest

from fastcheck.monitor.distributed.channel import decode, encode
from fastcheck.monitor.distributed.join import agreement_for
from support.ranks import ranks_workers as work
from support.ranks.ranks_harness import GUARD_SECONDS, run_ranks, values
from support.sampling import sample

RANKS = range(4)


def report(step: int, rank: int, together: bool = True) -> Any:
    """The report on a rank of an event of ``step`` on ``rank``."""
    return step, rank, f"report of rank {rank}, step {step}"[:40].ljust(40, "."), together


# The code


def test_the_largest_code_is_the_earliest_step_then_the_lowest_rank() -> None:
    places = [(0, 0), (0, 1), (0, 1048575), (1, 0), (1, 5), (2, 3), (10**9, 0), (10**12, 1048575)]
    codes = [encode(*place) for place in places]
    assert codes == sorted(codes, reverse=True) and len(set(codes)) == len(codes)
    assert all(0 < code < 2**63 for code in codes)
    assert [decode(code) for code in codes] == places


def test_without_a_process_group_there_is_nothing_to_agree() -> None:
    assert agreement_for() is None


# Together


@pytest.mark.parametrize(("rank", "lag"), sample(itertools.product((0, 2), (0, 1, 2)), 1))
def test_all_stop_at_the_same_boundary_with_the_same_report(rank: int, lag: int) -> None:
    assert values(run_ranks(work.stops, {rank: 5}, lag)) == [(5 + lag, report(5, rank))] * 4


def test_nothing_stops_a_healthy_run() -> None:
    assert values(run_ranks(work.stops, {}, 1)) == [None] * 4


@pytest.mark.parametrize(
    ("faults", "winner"),
    [
        # In the next boundary, while the first one is under way.
        ({3: 4, 1: 5}, (4, 3)),
        ({3: 5, 1: 5, 2: 5}, (5, 1)),
        ({0: 5, 1: 5, 2: 5, 3: 5}, (5, 0)),
    ],
)
def test_the_earliest_step_wins_then_the_lowest_rank(
    faults: work.Faults, winner: tuple[int, int]
) -> None:
    assert values(run_ranks(work.stops, faults, 1)) == [(winner[0] + 1, report(*winner))] * 4


def test_where_it_began_comes_before_where_it_arrived() -> None:
    assert values(run_ranks(work.stops_where_it_began, 3)) == [(5, (4, 3, "began", True))] * 4


def test_a_run_that_goes_on_after_a_stop_is_stopped_again() -> None:
    assert (
        values(run_ranks(work.stops_twice)) == [((5, report(4, 1)), (32, report(31, 2)), None)] * 4
    )


def test_ranks_that_nothing_else_keeps_in_step() -> None:
    assert values(run_ranks(work.stops_without_a_collective)) == [(8, report(7, 2))] * 4


def test_ddp_is_not_disturbed() -> None:
    assert values(run_ranks(work.with_ddp, {2: 6})) == [(7, (6, 2, "bad", True), True)] * 4


def test_fsdp2_decides_over_all_shards() -> None:
    results = values(run_ranks(work.with_fsdp, 3))
    for rank, (sharded, plain_is_sharded, words, stop) in enumerate(results):
        assert sharded and not plain_is_sharded
        assert words == [(0.0, 0.0), (0.0, 0.0), (float(rank == 3), 1.0), (0.0, 0.0)]
        assert stop == (3, (2, 3, "bad", True))


def test_subgroups_agree_by_themselves() -> None:
    low, high = (2, None, None), (2, (5, report(4, 3)), None)
    assert values(run_ranks(work.in_subgroups)) == [low, low, high, high]


def test_two_monitors_have_a_channel_each() -> None:
    other = (5, 2, "other", True)
    expected = [(None, other if step == 6 else None) for step in range(10)]
    assert values(run_ranks(work.two_agreements)) == [expected] * 4


# At the end


def test_an_event_in_the_last_step_is_told_at_the_end() -> None:
    assert values(run_ranks(work.event_in_the_last_step)) == [(None, report(4, 2), None)] * 4


def test_a_rank_that_ends_first_agrees_with_those_that_have_one_more_step() -> None:
    first, *others = values(run_ranks(work.ends_one_step_before_the_others))
    assert first == (None, report(4, 2), False)
    assert others == [(None, (5, report(4, 2)), False)] * 3


def test_an_event_after_the_last_boundary_is_told_where_it_was() -> None:
    results = values(run_ranks(work.event_after_the_last_boundary))
    assert [alone for _, alone in results] == [False] * 4
    assert results[1][0] == (5, 1, "late", True)


def test_closing_on_every_rank_ends_the_thread_and_gives_the_group_back() -> None:
    assert values(run_ranks(work.closes)) == [(None, False)] * 4


def test_an_agreement_goes_with_its_model() -> None:
    assert values(run_ranks(work.goes_with_its_model)) == [True] * 4


# Uneven


@pytest.mark.parametrize("closes", [False, True])
def test_a_rank_with_fewer_steps_is_stood_in_for(closes: bool) -> None:
    *others, last = values(run_ranks(work.ends_early, closes))
    assert others == [((9, report(8, 1)), None, False)] * 3
    # It waited at a barrier when the others stopped, and stops at the next boundary.
    assert last == (None, None if closes else report(8, 1), False)


def test_a_rank_that_is_busy_is_in_step_again_afterwards() -> None:
    expected = ((13, report(12, 2)), (46, report(45, 0)), False, 0)
    assert values(run_ranks(work.is_busy)) == [expected] * 4


def test_join_with_no_event() -> None:
    results = values(run_ranks(work.in_join, (0, 99, 0)))
    counts = results[0][0]
    # As many as the longest rank has, or one more where it was needed at the end.
    assert len(counts) == 3 and counts[0] >= 9
    assert results == [(counts, None, False)] * 4


@pytest.mark.parametrize("fault", sample([(2, 0, 5), (3, 1, 1), (3, 2, 7)], 1))
def test_join_with_an_event(fault: tuple[int, int, int]) -> None:
    """Also on a rank that has no steps left, and sits in a collective of the Join by then."""
    rank, epoch, step = fault
    for counts, stop, is_alone in values(run_ranks(work.in_join, fault)):
        assert len(counts) == epoch and not is_alone
        assert stop == (10 * epoch + step, rank, "bad", True)


# Broken


@pytest.mark.parametrize(("victim", "how"), [(3, "killed"), (0, "killed"), (3, "stopped")], ids=str)
def test_when_a_rank_dies_the_others_go_on_and_still_stop_with_one_report(
    victim: int, how: str
) -> None:
    ranks = run_ranks(work.dies, victim, how, dead=(victim,))
    for rank in RANKS:
        if rank == victim:
            continue
        (_, told), warnings, is_alone = ranks[rank].value
        assert told == report(12, 1, together=False) and is_alone
        [warning] = warnings
        assert f"rank {rank} can't agree with the other ranks" in warning
        assert ("no answer for 3 seconds" in warning) == (how == "stopped")
        assert "watches alone" in warning


def test_when_the_store_is_gone_too_each_rank_is_alone() -> None:
    ranks = run_ranks(work.store_server_dies, dead=(0,), store="tcp")
    assert ranks[1].value == ((50, report(50, 1, together=False)), 1, True)
    assert [rank.value for rank in ranks[2:]] == [(None, 1, True)] * 2


def test_installed_on_one_rank_only() -> None:
    alone, *others = values(run_ranks(work.installed_on_one))
    stop, [warning], total = alone
    assert stop == (3, report(3, 0, together=False)) and total == 6.0
    assert "ranks 1, 2, 3 did not call fastcheck.install()" in warning
    assert others == [(None, [], 6.0)] * 3


#: Forks the ranks when torch is imported; each runs to the end of the interpreter. A line of the
#: output has how the first three ended, and whether the fourth was there then.
RANKS_THAT_END = """
import os, signal, sys, time, torch.distributed as dist
from fastcheck.monitor.distributed.agreement import RankAgreement
children = []
while len(children) < 4:
    rank, child = len(children), os.fork()
    if child == 0:
        break
    children.append(child)
else:
    statuses = [os.waitpid(child, 0)[1] for child in children[:3]]
    is_there = os.waitpid(children[3], os.WNOHANG) == (0, 0)
    print(*map(os.waitstatus_to_exitcode, statuses), is_there, flush=True)
    os._exit(0)
dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=4)
agreement = RankAgreement(timeout_seconds=600)
for step in range(3):
    agreement.boundary()
if rank == 3:
    signal.pause()
agreement.boundary()
assert agreement._reductions.pending
# Long enough for the thread to look.
time.sleep(1.5)
if rank == 1:
    raise ValueError("on purpose")
if rank == 2:
    sys.exit(5)
"""


def test_a_process_ends_although_a_reduction_is_under_way(tmp_path: pathlib.Path) -> None:
    """Interpreters to their end: rank 1 raises, rank 2 exits, rank 0 ends, while rank 3 is a step
    behind and sleeps: nobody's end waits for it, and none is by a signal.
    """
    script, output = tmp_path / "script.py", tmp_path / "output"
    script.write_text(RANKS_THAT_END)
    with open(output, "w") as file:
        process = subprocess.Popen(
            [sys.executable, str(script), f"file://{tmp_path}/store"],
            stdout=file,
            stderr=file,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    try:
        process.wait(GUARD_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):  # rank 3 should be there
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert "0 1 5 True" in output.read_text().splitlines(), output.read_text()
