"""monitor.plot() and comparison.plot(): what is drawn, held to the records."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.log.reader import read_log
from fastcheck.log.step_table import StepRow, step_rows
from fastcheck.record.site import Site
from fastcheck.report.figures import run
from fastcheck.report.figures.canvas import Mark, new_figure, plain
from fastcheck.report.figures.errors import TensorError, errors_figure, growth_figure
from fastcheck.report.figures.run import heat_map, run_figure
from fastcheck.report.figures.tensors import tensors_figure
from support.programs import synthetic_logs
from support.records import record_builder as build


def drawn(figure: Any) -> bytes:
    """The picture. Nothing of it may warn, or be pyplot's."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=50)
    pyplot = sys.modules.get("matplotlib.pyplot")  # other libraries import it
    assert pyplot is None or pyplot.get_fignums() == []
    return file.getvalue()


def a_log(path: Path, sites: int, steps: int) -> tuple[list[StepRow], np.ndarray, list[Site]]:
    synthetic_logs.write(path, sites, steps)
    view = read_log(path)
    return step_rows(view), view.records, [view.sites[n] for n in range(len(view.sites))]


class TestHeatMap:
    def test_the_least_headroom_of_each_layer(self) -> None:
        sites = [
            build.site("b"),
            build.site("a"),
            build.site("b", role="input", label="input[0]"),
            build.site("", "GradScaler", role="loss_scale"),
        ]
        highs = [65504 / 2**bits for bits in (3, 5, 2, 0)]
        made = [build.record("float16", site=n, high=high) for n, high in enumerate(highs)]
        made = [made[1], made[0], *made[2:]]  # as the device has computed them
        late = [
            build.record("float16", site=0, step=2, posinf_count=1),
            build.record("int64", site=1, step=2, low=0, high=5),
        ]
        found = heat_map(build.records(*made, *late), sites)
        assert found.names == ["a", "b"] and (found.first, found.width, found.layers) == (0, 1, 2)
        assert found.bits[:, 0] == pytest.approx([5, 2])
        assert found.bits[1, 2] == -math.inf
        assert np.isnan(found.bits[:, 1]).all() and np.isnan(found.bits[0, 2])

    def test_no_spike_is_lost_where_there_are_many(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(run, "_MOST_ROWS", 4)
        monkeypatch.setattr(run, "_MOST_COLUMNS", 5)
        sites = [build.site(f"layer.{n}") for n in range(10)]
        made = [
            build.record("float16", site=n, step=step, high=1.0 if step != 3 * n else 60000.0)
            for step in range(1, 40)
            for n in range(10)
        ]
        found = heat_map(build.records(*made), sites)
        assert found.bits.shape == (4, 5) and found.width == 8 and found.layers == 10
        assert found.names == ["layer.0", "layer.3", "layer.6", "layer.9"]
        hot = {(n // 3, (3 * n - 1) // 8) for n in range(1, 10)}
        assert set(map(tuple, np.argwhere(found.bits < 1).tolist())) == hot

    def test_nothing(self) -> None:
        assert heat_map(build.records(build.record("int64")), [build.site()]).names == []


def panels(figure: Any) -> dict[str, Any]:
    return {axes.get_ylabel(): axes for axes in figure.axes}


def test_a_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows, records, sites = a_log(tmp_path, 40, 30)
    figure = run_figure(rows, records, sites, [Mark(27, True), Mark(9, False)])
    found = panels(figure)
    assert set(found) == {"loss", "loss scale", "gradient norm", "", "headroom, bits"}
    line = found["loss"].lines[0]
    assert line.get_xdata().tolist() == list(range(30))
    losses = [row.loss for row in rows]
    assert np.array_equal(line.get_ydata()[:27], losses[:27])
    assert np.isnan(line.get_ydata()[27:]).all() and math.isnan(losses[28] or 0)
    crosses = found["loss"].lines[1]
    assert crosses.get_marker() == "x" and crosses.get_xdata().tolist() == [27, 28, 29]
    marked = {axes_line.get_xdata()[0] for axes_line in found["loss"].lines[2:]}
    assert marked == {27, 9}
    [image] = found[""].images
    assert image.get_array().shape == (len(heat_map(records, sites).names), 30)
    assert image.get_extent() == [-0.5, 29.5, image.get_array().shape[0] - 0.5, -0.5]
    assert drawn(figure).startswith(b"\x89PNG")


def test_tensors(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    _, records, sites = a_log(tmp_path, 40, 30)
    figure = tensors_figure(records, sites, [4, 7], [Mark(27, True)])
    found = panels(figure)
    assert list(found) == ["abs max", "rms", "mean", "zeros, %"]
    mine = records[records["site"] == 4]
    [line] = [one for one in found["abs max"].lines if one.get_label().startswith("blocks.0.norm")]
    assert line.get_ydata()[:27] == pytest.approx(np.maximum(mine["max"], -mine["min"])[:27])
    assert np.isnan(line.get_ydata()[27:]).all()  # the overflow has crosses
    shares = 100 * mine["zero_count"] / mine["numel"]
    assert np.allclose(found["zeros, %"].lines[0].get_ydata(), shares)
    assert any(one.get_ydata()[0] == 65504.0 for one in found["abs max"].lines)
    assert found["abs max"].get_yscale() == "log" and found["mean"].get_yscale() == "linear"
    drawn(figure)


def train(model: nn.Module, steps: int) -> fastcheck.Monitor:
    monitor = fastcheck.install(model, overflow_nums=-1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        x = torch.ones(2, 3)
        if step == 2:
            x[0] = math.nan
        model(x).sum().backward()
        optimizer.step()
    return monitor


@pytest.mark.usefixtures("fresh_start")
class TestMonitor:
    def test_the_run_and_a_tensor(self) -> None:
        pytest.importorskip("matplotlib")
        monitor = train(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), 3)
        before = monitor.records().tobytes()
        found = panels(monitor.plot())
        assert {"loss", "learning rate", "gradient norm"} <= set(found)
        assert any(one.get_xdata()[0] == 2 for one in found["learning rate"].lines[1:])
        names = (("1", 6), ("parameter 1.bias", 1), ("1 (Linear) · forward · output", 1))
        for name, count in names:
            labels = panels(monitor.plot(site=name))["abs max"].get_legend().get_texts()
            assert len(labels) == count, name
        assert monitor.records().tobytes() == before
        monitor.remove()

    def test_a_name_that_nothing_has(self) -> None:
        monitor = train(nn.Sequential(nn.Linear(3, 3)), 1)
        with pytest.raises(fastcheck.ConfigError, match=r"did you mean 'parameter 0\.weight'"):
            monitor.plot(site="parameter 0.weigth")
        monitor.remove()

    def test_before_anything_has_run(self) -> None:
        pytest.importorskip("matplotlib")
        with fastcheck.install(nn.Linear(2, 2)) as monitor:
            drawn(monitor.plot())


class TestComparison:
    def test_the_error_of_each_tensor(self) -> None:
        pytest.importorskip("matplotlib")
        reference = {f"layer.{n}": torch.ones(4) for n in range(6)}
        actual = {
            name: tensor * (1 + n / 100) for n, (name, tensor) in enumerate(reference.items())
        }
        actual["layer.3"][0] = math.nan
        found = fastcheck.compare(actual, reference)
        figure = found.plot()
        [axes] = figure.axes
        labels = [text.get_text() for text in axes.get_xticklabels()]
        assert labels == [row.name for row in found.rows] and len(labels) == 5
        legend = {text.get_text() for text in axes.get_legend().get_texts()}
        assert legend == {"different", "no finite error", "threshold"}
        drawn(figure)

    @pytest.mark.parametrize("count", [0, 1, 1000])
    def test_any_number_of_tensors(self, count: int) -> None:
        pytest.importorskip("matplotlib")
        errors = [
            TensorError(f"${n}", n / 1e6, None if n % 3 else 1e-4, n > 100) for n in range(count)
        ]
        drawn(errors_figure("a $ b", errors))

    def test_over_time(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        for seed, name in enumerate(("a", "b")):
            synthetic_logs.write(tmp_path / name, 12, 6, event_step=-1 if seed else 5)
        found = fastcheck.compare(tmp_path / "a", tmp_path / "b")
        assert len(found.growth) > 1
        axes = found.plot().axes[0]
        assert axes.lines[0].get_xdata().tolist() == [one.step for one in found.growth]
        losses = [(0, 1.0, 1.0), (1, 0.5, math.nan)]
        figure = growth_figure("t", [0, 1], [0.0, math.inf], losses, 1)
        assert len(figure.axes) == 2
        drawn(figure)


def test_without_matplotlib_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'fastcheck\[plot\]'"):
        new_figure(1, 1)


def test_names_are_drawn_as_they_are() -> None:
    assert plain("a$b$\x1b[2J") == r"a\$b\$\x1b[2J"
