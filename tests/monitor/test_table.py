"""monitor.table(): the records as named columns; and a cell of a notebook that runs twice."""

from __future__ import annotations

import os
import pathlib

import numpy as np
import pytest
import torch
from torch import nn

import fastcheck
from support.programs.training import poison, stopped, train

pytestmark = pytest.mark.usefixtures("fresh_start")


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.fc(x), labels)


@pytest.mark.parametrize("with_log", [False, True])
def test_the_columns_are_numbers_and_names(tmp_path: pathlib.Path, with_log: bool) -> None:
    model = Classifier()
    monitor = fastcheck.install(model, log_dir=tmp_path if with_log else None)
    x, labels = torch.full((5, 4), -7.5), torch.tensor([2, 1, 0, 2, 1])
    model(x, labels).backward()
    monitor.flush()
    table, records = monitor.table(), monitor.records()
    assert {len(column) for column in table.values()} == {len(records)}
    rows = dict(zip(table["name"], range(len(records))))
    batch = rows["Classifier · forward · input[0]"]
    assert table["abs_max"][batch] == 7.5 and table["rms"][batch] == 7.5
    assert table["l2_norm"][batch] == pytest.approx(7.5 * 20**0.5)
    assert table["dtype"][batch] == "float32" and table["numel"][batch] == 20
    given = rows["Classifier · forward · input[1]"]
    assert np.isnan(table["abs_max"][given]) and table["max"][given] == 2
    worst = int(np.nanargmax(table["abs_max"]))
    assert table["name"][worst] == "Classifier · forward · input[0]"
    monitor.remove()


def test_pandas_takes_it() -> None:
    pandas = pytest.importorskip("pandas")
    model = Classifier()
    with fastcheck.install(model) as monitor:
        model(torch.ones(2, 4), torch.tensor([0, 1]))
        frame = pandas.DataFrame(monitor.table())
    assert len(frame) == len(monitor.records()) and "abs_max" in frame


def test_a_cell_that_runs_twice_warns() -> None:
    model = Classifier()
    monitor = fastcheck.install(model)
    with pytest.warns(fastcheck.FastcheckWarning, match="a monitor with the same options already"):
        second = fastcheck.install(model)
    for one in (monitor, second):
        one.remove()
    fastcheck.install(model)  # healthy: the others are removed
    fastcheck.install(model, overflow_nums=2)  # other options: on purpose
    fastcheck.install(next(model.children()))  # a part is another model


def test_a_report_is_as_wide_as_columns_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    monitor = fastcheck.install(model)
    model[0].register_forward_hook(lambda module, args, output: poison(output))
    stop = stopped(train, model, 1, data=iter([torch.ones(2, 4)]))

    def widest(text: object) -> int:
        # A path stays whole.
        return max(len(line) for line in str(text).splitlines() if os.sep not in line)

    summary = monitor.summary()
    assert 60 < widest(stop) <= 88 and 60 < widest(summary) <= 88
    for columns in ("50", "60"):
        monkeypatch.setenv("COLUMNS", columns)
        assert widest(stop) <= int(columns) and widest(monitor.summary()) <= int(columns)
    monkeypatch.setenv("COLUMNS", "140")
    assert 100 < widest(stop) <= 140
