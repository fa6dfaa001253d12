"""The public interface of a pure-Python install, with the portable backend for the extension.

Where the extension is there, the tests below run in a process of their own that switches it off;
`make test-old-torch` runs this file with an old torch. No new torch or Python API in it, then.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.extension import status
from fastcheck.utils.torch.seen_tensors import SeenTensors, make_seen
from support.programs.training import (
    Apply,
    Net,
    batches,
    nan_gradient,
    poison,
    stopped,
    train,
    where,
)
from support.records.reference import DTYPES, fields, pattern, record
from support.records.torch_dtypes import torch_dtype

IS_PURE = status.module is None


class TestInAProcessOfItsOwn:
    """The one test where the extension is installed."""

    __test__ = not IS_PURE

    def test_without_the_extension(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
            env={**os.environ, "FASTCHECK_NO_EXTENSION": "1", "PYTEST_ADDOPTS": ""},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=False,
        )
        last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.match(r"\d+ passed", last), done.stdout


class Pure:
    __test__ = IS_PURE

    @pytest.fixture(autouse=True)
    def in_a_folder_of_its_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)  # a stop writes its log there


def test_which_it_is() -> None:
    assert status.text.endswith("pure Python: portable backend") is IS_PURE
    assert isinstance(make_seen(), SeenTensors) is IS_PURE


# ---- stats ---------------------------------------------------------------------------------------

EXACT = ("numel", "nan_count", "posinf_count", "neginf_count", "zero_count", "subnormal_count")
EXACT += ("negative_count", "saturated_count", "min", "max", "checksum", "dtype", "order", "depth")


def assert_as_reference(x: torch.Tensor, depth: str = "full", **options: Any) -> None:
    got = fields(fastcheck.stats(x, record=depth, **options).record.tobytes())
    want = fields(record(x, depth=depth, **options))
    assert {name: got[name] for name in EXACT} == {name: want[name] for name in EXACT}
    for name, scale in (("sum", "abs_sum"), ("abs_sum", "abs_sum"), ("sum_sq", "sum_sq")):
        if math.isfinite(want[name]):
            assert abs(got[name] - want[name]) <= 1e-6 * want[scale], name


def tensor(kind: str, dtype: str, count: int) -> torch.Tensor:
    raw = np.frombuffer(pattern(kind, dtype, count), dtype=np.uint8).copy()
    return torch.from_numpy(raw).view(torch_dtype(dtype))


class TestStats(Pure):
    @pytest.mark.parametrize("dtype", [n for n in DTYPES if hasattr(torch, n)])
    def test_any_bits(self, dtype: str) -> None:
        for count in (2, 1026, 4098):
            assert_as_reference(tensor("random", dtype, count))

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
    def test_special_values(self, dtype: str) -> None:
        values = [0.0, -0.0, 1.0, -2.5, math.nan, math.inf, -math.inf, 1e-40, 65504.0]
        assert_as_reference(torch.tensor(values, dtype=torch_dtype(dtype)))

    @pytest.mark.parametrize("order", ["storage", "logical"])
    def test_layouts(self, order: str) -> None:
        x = torch.randn(6, 10, 8)
        for view in (x, x.transpose(0, 2), x[:, ::2], x[2:3, :1].expand(4, 5, 8), x[0, 0, 0]):
            assert_as_reference(view, order=order)
        assert_as_reference(torch.randn(0, 3), order=order)

    @pytest.mark.parametrize("depth", ["health", "stats", "full"])
    def test_depths(self, depth: str) -> None:
        assert_as_reference(torch.randn(5000), depth=depth)

    def test_lists_and_fields(self) -> None:
        xs = [torch.tensor([1.0, math.nan, 3.0]), torch.arange(5), torch.ones(2, 2).half()]
        for one, x in zip(fastcheck.stats(xs), xs):
            assert one == fastcheck.stats(x)
        s = fastcheck.stats(xs[0])
        assert (s.nan_count, s.min, s.max, s.sum) == (1, 1.0, 3.0, 4.0)
        assert "nan=1" in repr(s)
        assert fastcheck.checksum(xs[0]) == s.checksum

    def test_found_nonfinite(self) -> None:
        good = [torch.ones(3), torch.ones(2).bfloat16()]
        assert fastcheck.found_nonfinite(good).item() == 0.0
        assert fastcheck.found_nonfinite([*good, torch.tensor([math.inf])]).item() == 1.0

    def test_what_can_not_be_read_is_one_clear_error(self) -> None:
        with pytest.raises(fastcheck.UnsupportedTensorError, match="expected a strided tensor"):
            fastcheck.stats(torch.ones(3).to_sparse())


# ---- install -------------------------------------------------------------------------------------


def run(watched: bool, optimizer: str) -> list[torch.Tensor]:
    """Losses and weights of a model with dropout."""
    torch.manual_seed(0)
    model = Net(dropout=0.2)
    make = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    }[optimizer]
    stepper = make(model.parameters())
    monitor = (
        fastcheck.install(model, training=fastcheck.Training(optimizer=stepper))
        if watched
        else None
    )
    losses = train(model, 5, optimizer=stepper)
    if monitor is not None:
        assert monitor.records()["step"].max() == 4
        assert "5 steps" in monitor.summary()
        monitor.remove()
    return [torch.tensor(losses), *(p.detach() for p in model.parameters())]


class TestInstall(Pure):
    @pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
    def test_healthy_training_is_bit_identical(self, optimizer: str) -> None:
        assert all(map(torch.equal, run(False, optimizer), run(True, optimizer)))

    def test_records_are_those_of_stats(self) -> None:
        model = nn.Linear(3, 2)
        monitor = fastcheck.install(model)
        x = torch.randn(4, 3)
        out = model(x)
        monitor.step()
        wanted = {fastcheck.checksum(x), fastcheck.checksum(out)}
        assert wanted <= {int(one["checksum"]) for one in monitor.records()}
        monitor.remove()

    def test_a_tensor_with_two_readers_is_read_once(self) -> None:
        model = nn.Sequential(nn.Linear(3, 2), Apply(), Apply())
        monitor = fastcheck.install(model)
        with torch.no_grad():
            model(torch.ones(1, 3))
        monitor.step()
        # The weight, the bias, the input, and one output that three modules hand on.
        assert len(monitor.records()) == 4
        monitor.remove()

    def test_a_nan_is_named_where_it_is_made(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), Apply(), nn.Linear(8, 4))
        monitor = fastcheck.install(model)
        train(model, 2)
        model[1].function = poison
        stop = stopped(model, next(batches(1)))
        assert where(stop.culprit) == ("1", "output", "output", "origin")
        assert (stop.step, stop.culprit.record["nan_count"]) == (2, 1)
        assert "1 NaN" in str(stop)
        assert 'level="op"' not in str(stop)  # it needs the extension
        monitor.remove()

    def test_a_nan_in_backward(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), Apply(nan_gradient), nn.Linear(8, 4))
        monitor = fastcheck.install(model)
        before = [p.detach().clone() for p in model.parameters()]
        stop = stopped(train, model, 1)
        assert where(stop.culprit)[0] == "1"
        assert stop.culprit.site.direction == "backward"
        assert all(map(torch.equal, before, model.parameters()))
        monitor.remove()

    def test_an_overflow_in_float16(self) -> None:
        model = nn.Sequential(nn.Linear(1, 1), Apply(lambda x: x.half()), Apply(lambda x: x * 1000))
        monitor = fastcheck.install(model)
        with torch.no_grad():
            model[0].weight.fill_(1.0)
            model[0].bias.fill_(0.0)
        model(torch.ones(4, 1))
        stop = stopped(model, torch.tensor([[1.0], [100.0], [-70.0], [2.0]]))
        assert where(stop.culprit)[:2] == ("2", "output")
        assert (stop.culprit.record["posinf_count"], stop.culprit.record["neginf_count"]) == (1, 1)
        assert "float16" in str(stop)
        monitor.remove()

    def test_only_counting(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), Apply(poison), nn.Linear(8, 4))
        monitor = fastcheck.install(model, overflow_nums=-1)
        train(model, 2)
        assert "NaN" in monitor.summary()
        monitor.remove()

    def test_removed_without_a_trace(self) -> None:
        model = nn.Linear(2, 2)
        fastcheck.install(model).remove()
        assert not model._forward_hooks and not model._forward_pre_hooks
        with torch.no_grad():
            model.weight.fill_(math.nan)
        model(torch.ones(1, 2))

    def test_the_log_is_read_back(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        from fastcheck.cli.main import main

        model = nn.Sequential(nn.Linear(8, 2), Apply())
        monitor = fastcheck.install(model, log_dir=tmp_path / "log")
        train(model, 2)
        model[1].function = poison
        stopped(model, next(batches(1)))
        monitor.remove()
        main(["show", str(tmp_path / "log")])
        shown = capsys.readouterr().out
        assert "1 NaN" in shown and "output of 1 (Apply)" in shown
