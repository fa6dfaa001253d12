"""Samples of sweeps (tests/support/sampling.py), and the processor time of files of tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from support import sampling
from support.file_times import FileTimes, processor_seconds
from support.processes import run_code


@pytest.fixture(autouse=True)
def _counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the run are as before."""
    for name in ("IS_WHOLE", "left_out", "total"):
        monkeypatch.setattr(sampling, name, 0)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 99, 100, 101])
def test_a_sample_is_fixed_and_has_both_ends(count: int) -> None:
    taken = sampling.sample(range(100), count)
    assert taken == sampling.sample(range(100), count) == sorted(set(taken))
    assert len(taken) == min(count, 100)
    assert taken[0] == 0 and (count == 1 or taken[-1] == 99)


def test_a_whole_run_takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "IS_WHOLE", True)
    assert sampling.sample("abcde", 2) == list("abcde")
    assert sampling.left_out == 0


def test_what_is_left_out_is_counted() -> None:
    sampling.sample(range(10), 4)
    sampling.sample(range(3), 4)
    assert (sampling.left_out, sampling.total) == (6, 13)


def test_time_of_forked_processes_counts() -> None:
    run_code("pass")  # the server has imported torch
    before = processor_seconds()
    done = run_code("import time\nwhile time.process_time() < 0.6: pass")
    assert done.returncode == 0
    assert processor_seconds() - before >= 0.5  # the kernel rounds each time down


def test_each_worker_counts_its_files_and_one_process_prints_the_sums() -> None:
    def times(**attributes: Any) -> Any:
        options = {"--slowest-files": 2, "tx": ["popen"] * 2}
        return FileTimes(
            SimpleNamespace(getoption=lambda name, _=None: options[name], **attributes)
        )

    lines: list[str] = []
    printer: Any = SimpleNamespace(section=lambda title: None, line=lines.append)
    controller = times()
    for seconds in (1.0, 2.0):
        worker = times(workeroutput={})
        worker._last -= seconds
        for each in (worker, controller):  # which hears of it too
            each.pytest_runtest_logfinish("tests/a.py::test")
        config = SimpleNamespace(workeroutput={})
        worker.pytest_sessionfinish(SimpleNamespace(config=config))
        controller.pytest_testnodedown(config)
    controller.pytest_testnodedown(SimpleNamespace())  # it crashed
    controller.pytest_terminal_summary(printer)
    assert [line.split()[1:] for line in lines] == [["tests/a.py"], ["all"]]
    assert all(3.0 <= float(line.split()[0]) < 4.0 for line in lines)
