"""Whoever reaches the store of the ranks can write to it: nothing of it is run or stops a run."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.monitor.distributed.channel import Agreed, Channel, Lost
from fastcheck.report.message import packed
from support.ranks import hostile_workers as work
from support.ranks.ranks_harness import run_ranks, values
from support.reports import full_report


@pytest.mark.parametrize(
    "kind", ["a pickle", "of no rank", "no words", "huge numbers", "deep", "large"]
)
def test_a_message_in_the_store(kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "made")
    for done, is_made, warned in values(run_ranks(work.trains, kind, path, world_size=2)):
        assert done == 8 and not is_made
        assert any("left out" in one or "what another rank reports" in one for one in warned)


@pytest.mark.parametrize(
    "options",
    ["", "\x80\x04.", "[]", '{"a": {"b": 1}}', "[" * 100_000, '{"a": "' + "x" * 100_000 + '"}'],
    ids=["empty", "a pickle", "a list", "nested", "deep", "large"],
)
def test_options_in_the_store(options: str) -> None:
    assert values(run_ranks(work.meets, options, world_size=2)) == ["ended"] * 2


class Wire:
    """A channel whose other end says anything."""

    ranks = (0, 1)
    index = 0
    size = 0

    def _broadcast(self, tensor: torch.Tensor, index: int, timeout_seconds: float) -> None:
        tensor.fill_(self.size)


@pytest.mark.parametrize("size", [-1, 1 << 40])
def test_the_size_of_a_message_is_bounded(size: int) -> None:
    wire: Any = Wire()
    wire.size = size
    with pytest.raises(Lost, match="has a message of"):
        Channel.exchange(wire, b"", 1, 1.0)


def handler() -> Any:
    return fastcheck.install(nn.Linear(2, 2))._core.stops


@pytest.mark.parametrize("message", [b"{}", b"\x80\x04.", pickle.dumps(work.Evil("made"))])
def test_a_message_that_is_no_report(message: bytes, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.warns(fastcheck.FastcheckWarning, match="what another rank reports"):
        handler()._stop_if_agreed(Agreed(3, 1, message, together=False))
    # All ranks have agreed to stop, and would wait for this one.
    with (
        warnings.catch_warnings(),
        pytest.raises(fastcheck.OverflowDetected, match="did not reach"),
    ):
        warnings.simplefilter("ignore")
        handler()._stop_if_agreed(Agreed(3, 1, message, together=True))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("together", [False, True])
def test_a_report_writes_nowhere_else(together: bool, tmp_path: Path, monkeypatch: Any) -> None:
    """Neither the log that a rank keeps of the stop, nor the page."""
    monkeypatch.chdir(tmp_path)
    outside = tmp_path / "outside"
    report = full_report(rank=1, page=str(outside / "report.html"))
    message = packed(report).replace(
        b'"fastcheck_log/20250101-120000-77"', b'"%s"' % bytes(outside)
    )
    assert bytes(outside) in message
    stop = handler()
    stop.agreement = type("Alone", (), {"world_size": 2, "close": lambda self: None})()
    with pytest.raises(fastcheck.OverflowDetected):
        stop._stop_if_agreed(Agreed(3, 1, message, together=together))
    with pytest.warns(fastcheck.FastcheckWarning, match="what another rank reports"):
        own = message.replace(b'"rank": 1', b'"rank": 0')
        stop._stop_if_agreed(Agreed(3, 0, own, together=False))
    assert not outside.exists()


def test_what_ranks_gather_is_no_pickle(tmp_path: Path) -> None:
    path = str(tmp_path / "made")
    found = values(run_ranks(work.gathers, path, world_size=2))
    assert found == [("JSONDecodeError", False)] * 2


def test_what_ranks_gather_comes_back() -> None:
    found = values(run_ranks(work.gathers_all, world_size=3))
    long = [{"a": [rank, "b" * rank * 1000, float("inf")]} for rank in range(3)]
    expected = [[None] * 3, [True] * 3, long, [2**63 + rank for rank in range(3)]]
    assert found == [expected] * 3
