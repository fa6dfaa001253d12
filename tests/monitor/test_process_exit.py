"""Stops among several ranks whose report is lost, or whose rank exits before the next boundary."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any, Optional

import pytest

import fastcheck
from fastcheck.monitor.distributed.channel import Agreed
from fastcheck.monitor.session.stop_handler import StopHandler
from support.paths import TESTS
from support.processes import run_python
from support.programs.training import Net


class Agreement:
    """What the other ranks say at the boundary."""

    world_size = 4

    def __init__(self, agreed: Optional[Agreed]) -> None:
        self.agreed = agreed

    def boundary(self) -> Optional[Agreed]:
        return self.agreed

    finish = boundary


def alarm_of(monitor: fastcheck.Monitor, agreed: Optional[Agreed]) -> StopHandler:
    agreement: Any = Agreement(agreed)
    meta = monitor._core.meta
    return StopHandler(monitor._session, meta, agreement, None, lambda *_: None, tuple, tuple)


@pytest.mark.parametrize("is_last", [False, True])
def test_a_stop_whose_report_was_lost_with_its_rank(is_last: bool) -> None:
    with fastcheck.install(Net()) as monitor:
        stop_handler = alarm_of(monitor, Agreed(7, 3, None, True))
        with pytest.raises(fastcheck.OverflowDetected) as stop:
            stop_handler.at_step_boundary(is_last)
    assert (stop.value.step, stop.value.report.rank) == (7, 3)
    assert stop.value.report.is_lost
    text = " ".join(str(stop.value).split())
    assert "rank 3" in text
    assert "did not reach this rank" in text
    assert "step 7" in text


def test_a_report_that_cannot_be_read_stops_too() -> None:
    with fastcheck.install(Net()) as monitor:
        stop_handler = alarm_of(monitor, Agreed(7, 3, b"nothing that was pickled", True))
        with (
            pytest.warns(fastcheck.FastcheckWarning, match="what another rank reports"),
            pytest.raises(fastcheck.OverflowDetected) as stop,
        ):
            stop_handler.at_step_boundary()
    assert stop.value.report.is_lost


def test_nothing_is_said_where_nobody_found_anything() -> None:
    with fastcheck.install(Net()) as monitor:
        stop_handler = alarm_of(monitor, None)
        stop_handler.at_step_boundary()
        stop_handler.report_at_exit()


def test_a_rank_that_ends_before_the_next_boundary(tmp_path: Path) -> None:
    """Rank 1 finds a NaN in a forward that no step follows, and ends."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys, torch, torch.distributed as dist
            import fastcheck
            dist.init_process_group("gloo")
            rank = dist.get_rank()
            sys.stderr = open(f"error{rank}", "w")
            model = torch.nn.Linear(4, 4)
            fastcheck.install(model)
            x = torch.ones(2, 4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                model(x).square().mean().backward()
                optimizer.step()
            if rank == 1:
                model(x * float("nan"))
            print("ended by itself")
            """
        )
    )
    torchrun = TESTS / "support/programs/torchrun.py"
    done = run_python(torchrun, "--nproc-per-node", 2, script, cwd=tmp_path)
    error, bad_error = ((tmp_path / f"error{rank}").read_text() for rank in range(2))
    assert done.returncode == 0, error + bad_error
    assert done.stdout == "ended by itself\n" * 2
    assert "OverflowDetected" not in error
    assert "fastcheck.OverflowDetected" in bad_error
    assert "16 NaN" in bad_error or "8 NaN" in bad_error, bad_error
