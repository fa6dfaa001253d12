"""Two runs of the same program compare as identical, whatever order threads work in, and in spite
of operations in place; and any single changed tensor makes them different.
"""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fastcheck
from fastcheck.log.writer import RecordLog
from fastcheck.record.format import RECORD_DTYPE, Flag
from fastcheck.record.site import Site, SiteTable
from support.programs.compare_runs import log_run


class Branch(nn.Module):
    """Works in place, on a copy of its own, so that threads don't change what others read."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.a(x)) + 0.0
        y *= 0.5
        return self.b(y).add_(1.0)


class Threaded(nn.Module):
    """Runs its branches in threads, each some times, and starts them in an order of its own."""

    def __init__(self, order: random.Random, branches: int = 4, calls: int = 3) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Branch() for _ in range(branches))
        self.shared = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)
        self.order, self.calls = order, calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * 2  # read by all branches: whichever comes first has it recorded as its input
        found: dict[tuple[int, int], torch.Tensor] = {}
        grad_mode = torch.is_grad_enabled()

        def work(index: int, call: int) -> None:
            with torch.set_grad_enabled(grad_mode):
                found[index, call] = self.branches[index](h) + self.shared(h * (index + call + 1))

        jobs = [(index, call) for index in range(len(self.branches)) for call in range(self.calls)]
        self.order.shuffle(jobs)
        threads = [threading.Thread(target=work, args=job) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.head(torch.stack([found[key] for key in sorted(found)]).sum(0))


def evaluate(directory: Path, order: int) -> str:
    """Forward only: autograd would add up the gradients of the branches in the threads' order."""
    torch.manual_seed(0)
    model = Threaded(random.Random(order))
    data = torch.Generator().manual_seed(1)
    with fastcheck.install(model, overflow_nums=-1, log_dir=directory) as monitor:
        for _ in range(3):
            with torch.no_grad():
                model(torch.randn(5, 8, generator=data))
            monitor.step()
    return os.fspath(directory)


def test_threads_in_another_order_change_nothing(tmp_path: Path) -> None:
    reference = evaluate(tmp_path / "reference", 0)
    moved = reordered = False
    for order in range(1, 6):
        actual = evaluate(tmp_path / str(order), order)
        comparison = fastcheck.compare(actual, reference)
        assert comparison.is_identical, str(comparison)
        moved |= any("read by another module first" in note for note in comparison.notes)
        reordered |= any("in another order" in note for note in comparison.notes)
    assert moved and reordered  # the runs did differ in their order


@pytest.mark.parametrize("seed", [0, 1])
def test_training_in_place_twice_is_identical(tmp_path: Path, seed: int) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.branch = nn.BatchNorm1d(8), Branch()
            self.drop, self.head = nn.Dropout(0.3, inplace=True), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.branch(self.norm(x))
            y += x
            return self.head(self.drop(y))

    runs = [
        log_run(tmp_path / name, model=InPlace, seed=seed, steps=5)
        for name in ("actual", "reference")
    ]
    comparison = fastcheck.compare(*runs)
    assert comparison.is_identical and comparison.agrees and bool(comparison)
    assert {answer.answer for answer in comparison.answers} == {"yes"}
    assert fastcheck.compare(*runs, exact=True).is_identical


# Logs made by hand

SITES = [
    Site(module, "Layer", direction, role, 0, label)
    for module in ("a", "b.c")
    for direction, role, label in (
        ("forward", "output", "output"),
        ("forward", "input", "input[0]"),
        ("backward", "grad_output", "output"),
        ("optimizer", "param", "weight"),
        ("optimizer", "param_grad", "weight"),
    )
]


def write(directory: Path, records: np.ndarray) -> str:
    table = SiteTable()
    for site in SITES:
        table.intern(site)
    log = RecordLog(directory, 0, None, table, {"environment": {}, "optimizers": []})
    for step in np.unique(records["step"]).tolist():
        log.append(records[records["step"] == step], step)
    log.close()
    return log.directory


def made(rng: np.random.Generator, count: int, steps: int) -> np.ndarray:
    records = np.zeros(count, RECORD_DTYPE)
    records["version"], records["depth"] = 1, 3
    records["dtype"] = rng.integers(0, 4, count)
    records["numel"] = rng.integers(1, 50, count)
    records["step"] = np.sort(rng.integers(0, steps, count))
    records["site"] = rng.integers(0, len(SITES), count)
    records["seq"] = np.arange(count)
    for field in ("sum", "abs_sum", "sum_sq", "min", "max"):
        records[field] = rng.standard_normal(count)
    records["sum_sq"] = records["sum_sq"] ** 2
    records["abs_sum"] = np.abs(records["abs_sum"])
    # Few values: calls of one module that are equal among each other are the hard case.
    records["checksum"] = rng.integers(0, 5, count)
    return records


@given(
    st.integers(0, 2**32), st.integers(1, 60), st.integers(1, 4), st.booleans(), st.integers(0, 59)
)
def test_any_order_of_the_calls_is_identical_and_any_change_is_not(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    count: int,
    steps: int,
    changes: bool,
    which: int,
) -> None:
    rng = np.random.default_rng(seed)
    records = made(rng, count, steps)
    shuffled = np.concatenate(
        [rng.permutation(records[records["step"] == step]) for step in range(steps)]
    )
    place = tmp_path_factory.mktemp("logs")
    if changes:
        changed = shuffled[which % count : which % count + 1]
        changed["checksum"] += 1000
        changed["sum"] += 1e-12
    actual, reference = write(place / "actual", shuffled), write(place / "reference", records)
    comparison = fastcheck.compare(actual, reference)
    assert comparison.is_identical == (not changes), str(comparison)
    assert fastcheck.compare(actual, actual).is_identical
    exact = fastcheck.compare(actual, reference, exact=True)
    assert exact.agrees == (not changes)


@given(st.integers(0, 2**32), st.integers(2, 60), st.sets(st.integers(0, 59), max_size=8))
def test_what_is_missing_is_counted_and_the_rest_is_put_together(
    tmp_path_factory: pytest.TempPathFactory, seed: int, count: int, dropped: set[int]
) -> None:
    rng = np.random.default_rng(seed)
    records = made(rng, count, 1)
    records["step"], records["checksum"] = 1, np.arange(count)
    gone = sorted(index for index in dropped if index < count - 1)
    kept = np.delete(records, gone)
    place = tmp_path_factory.mktemp("logs")
    actual, reference = write(place / "actual", kept), write(place / "reference", records)
    # One more step before it and after it on both sides: it has no first weights, and is no end.
    for directory in (actual, reference):
        ends = records[[-1, -1]]
        ends["step"] = [0, 2]
        with open(os.path.join(directory, "records-rank0-000000.bin"), "ab") as file:
            file.write(ends.tobytes())
    comparison = fastcheck.compare(actual, reference)
    assert sum(one.count for one in comparison.missing) == len(gone)
    pairs = sum(
        number
        for states in comparison.counts.values()
        for state, number in states.items()
        if state == "same"
    )
    assert pairs == len(kept) + 2  # each was found its own partner
    assert comparison.agrees == (not gone)


def test_sums_in_another_order_are_no_difference(tmp_path: Path) -> None:
    """A backend of determinism "sums" adds up in its own order; its checksums are everybody's."""
    records = made(np.random.default_rng(0), 40, 2)
    elsewhere = records.copy()
    for field in ("sum", "abs_sum", "sum_sq"):
        elsewhere[field] *= 1 + 1e-7
    actual, reference = (
        write(tmp_path / "actual", np.random.default_rng(1).permutation(elsewhere[:15])),
        write(tmp_path / "reference", records[:15]),
    )
    assert fastcheck.compare(actual, reference).is_identical
    elsewhere["zero_count"][3] += 1  # a checksum that agrees by chance is not enough
    other = write(tmp_path / "other", elsewhere[:15])
    assert not fastcheck.compare(other, reference).is_identical


def test_what_checkpointing_runs_again_is_not_missing(tmp_path: Path) -> None:
    records = made(np.random.default_rng(0), 40, 2)
    again = records[:5].copy()
    again["flags"] = int(Flag.RECOMPUTE)
    first = records["step"] == 0
    actual = write(tmp_path / "actual", np.concatenate([records[first], again, records[~first]]))
    reference = write(tmp_path / "reference", records)
    assert fastcheck.compare(actual, reference).is_identical


def test_ranks_are_compared_each_with_its_own(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sides: dict[str, Any] = {}
    for name in ("actual", "reference"):
        table = SiteTable()
        for site in SITES:
            table.intern(site)
        rng = np.random.default_rng(0)
        for rank in range(3):
            records = made(rng, 30, 3)
            if name == "actual" and rank == 2:
                changed = np.flatnonzero(records["step"] == 1)[:1]
                records["sum_sq"][changed] += 1.0
                records["checksum"][changed] += 77
            log = RecordLog(tmp_path / name, rank, None, table, {})
            for step in range(3):
                log.append(records[records["step"] == step], step)
            log.close()
        sides[name] = tmp_path / name
    comparison = fastcheck.compare(sides["actual"], sides["reference"], ask_all=True)
    different = [row for row in comparison.rows if row.state.name == "DIFFERENT"]
    assert len(different) == 1 and different[0].rank == 2
    assert "rank 2, step 1" in str(comparison) or different[0].phase.name == "UPDATE"
