"""Tests of the signals of a step: several calls, recomputation, scaled gradients, masks."""

from __future__ import annotations

from typing import Any, Optional

import numpy as np
import pytest

from fastcheck.log.step_table import StepRow
from fastcheck.record.format import RECORD_DTYPE, Flag
from fastcheck.record.site import OUTSIDE, Site, SiteTable
from fastcheck.watch.signals import (
    ACTIVATION,
    BUFFER,
    GRADIENT,
    INPUT,
    WEIGHT,
    SignalReader,
    Signals,
    phase_of,
)
from support.watched import DTYPE_CODES, SCALED, tensor

OUTPUT, PARAMETER = 0, 1


def signals(*records: dict[str, Any], scale: Optional[float] = None) -> Optional[Signals]:
    sites = SiteTable()
    sites.intern(Site("a", "Linear", "forward", "output", 0, "output"))
    sites.intern(Site("a", "Linear", "optimizer", "param_grad", 0, "weight"))
    found = np.zeros(len(records), RECORD_DTYPE)
    for place, fields in enumerate(records):
        for name, value in {"site": OUTPUT, **tensor(**fields)}.items():
            found[place][name] = value
    return SignalReader(sites).read([(StepRow(0, 0, None, False, scale, None, None), [found])])


def test_the_three_signals_of_a_tensor() -> None:
    found = signals({"rms": 2.0, "sum": 1024.0, "max": 7.0, "min": -9.0})
    assert found is not None
    assert np.exp2(found.levels[:, 0, 0]) == pytest.approx([9.0, 2.0, np.sqrt(3.0)])
    assert found.headroom[0, 0] == pytest.approx(np.log2(3.4028235e38 / 9))


def test_of_several_calls_the_largest_and_all_together() -> None:
    found = signals({"rms": 2.0}, {"rms": 4.0})
    assert found is not None and len(found.sites) == 1
    assert found.abs_max[0, 0] == 12.0
    assert np.exp2(found.levels[:2, 0, 0]) == pytest.approx([12.0, np.sqrt(10.0)])
    assert found.numel[0, 0] == 2048


def test_what_checkpointing_computes_again_is_left_out() -> None:
    found = signals({"rms": 2.0}, {"rms": 100.0, "flags": int(Flag.RECOMPUTE)})
    assert found is not None and found.abs_max[0, 0] == 6.0


def test_a_gradient_is_read_scaled_and_not_scaled() -> None:
    found = signals(
        {"site": PARAMETER, "rms": 512.0, "flags": SCALED}, {"site": PARAMETER}, scale=512.0
    )
    assert found is not None
    assert np.exp2(found.levels[1, 0, 0]) == pytest.approx(1.0)
    assert found.abs_max[0, 0] == 3 * 512.0 and not found.is_scaled[0, 0]


def test_a_mask_has_no_headroom() -> None:
    found = signals({"dtype": DTYPE_CODES["float16"], "min": -65504.0})
    assert found is not None and np.isnan(found.headroom[0, 0])


def test_finite_elements_alone_count() -> None:
    found = signals({"nan_count": 1023, "sum_sq": 4.0, "zero_count": 1})
    assert found is not None
    assert np.exp2(found.levels[1, 0, 0]) == 2.0 and found.zero_share[0, 0] == 1.0


@pytest.mark.parametrize("fields", [{"depth": 1}, {"numel": 0}, {"nan_count": 1024}])
def test_without_statistics_there_is_none(fields: dict[str, int]) -> None:
    found = signals(fields)
    assert found is None or np.isnan(found.levels).all()


@pytest.mark.parametrize(
    ("module", "role", "phase"),
    [
        ("", "input", INPUT),
        ("layer", "input", ACTIVATION),
        ("layer", "output", ACTIVATION),
        ("layer", "param", WEIGHT),
        ("layer", "buffer", BUFFER),
        ("layer", "param_grad", GRADIENT),
        ("layer", "grad_input", GRADIENT),
        ("layer", "optimizer_state", 0),
        ("", "loss", 0),
        ("", "learning_rate", 0),
    ],
)
def test_phases(module: str, role: str, phase: int) -> None:
    assert phase_of(Site(module, "Linear", "forward", role, 0, role)) == phase


def test_what_a_loss_and_an_optimizer_compute_is_no_activation() -> None:
    """At op level; a function of the model itself is one."""
    for kind, direction, phase in (
        (OUTSIDE, "forward", 0),
        (OUTSIDE, "optimizer", 0),
        ("Net", "forward", ACTIVATION),
    ):
        site = Site("", kind, direction, "output", 0, "output", op="aten.mul.Tensor")
        assert phase_of(site) == phase


def test_steps_may_have_other_tensors_or_another_order() -> None:
    sites = SiteTable()
    for name in "abc":
        sites.intern(Site(name, "Linear", "forward", "output", 0, "output"))
    reader = SignalReader(sites)

    def step(*read: int) -> tuple[list[int], list[float]]:
        records = np.zeros(len(read), RECORD_DTYPE)
        for place, site in enumerate(read):
            for name, value in {"site": site, **tensor(rms=2.0**site)}.items():
                records[place][name] = value
        found = reader.read([(None, [records[:1], records[1:1], records[1:]])])
        assert found is not None
        return found.sites.tolist(), found.levels[1, 0].round(6).tolist()

    assert step(2, 0, 1) == ([2, 0, 1], [2.0, 0.0, 1.0])
    assert step(2, 0, 1) == ([2, 0, 1], [2.0, 0.0, 1.0])
    assert step(0, 1, 2) == ([0, 1, 2], [0.0, 1.0, 2.0])
    assert step(1, 2) == ([1, 2], [1.0, 2.0])
    assert step(2, 0, 2, 2) == ([2, 0], [2.0, 0.0])
    assert step(2, 0, 2, 2) == ([2, 0], [2.0, 0.0])


@pytest.mark.parametrize(
    ("called", "is_whole", "batch"),
    [
        # Of a LightningModule, whose training_step calls its parts.
        (["a", "b"], True, ["a"]),
        (["", "a"], True, [""]),
        # What include= leaves out may have read the batch.
        (["a", "b"], False, []),
    ],
)
def test_the_batch_is_the_input_of_the_first_module(
    called: list[str], is_whole: bool, batch: list[str]
) -> None:
    sites = SiteTable()
    for module in called:
        sites.intern(Site(module, "Linear", "forward", "input", 0, "input[0]"))
        sites.intern(Site(module, "Linear", "forward", "output", 0, "output"))
    records = np.zeros(len(sites), RECORD_DTYPE)
    for place in range(len(sites)):
        for name, value in {"site": place, **tensor()}.items():
            records[place][name] = value
    reader = SignalReader(sites, is_whole)
    for order in (slice(None), slice(2, None)):  # then a step without the first one
        found = reader.read([(None, [records[order]])])
        assert found is not None
    assert [sites[n].module for n in np.flatnonzero(reader._of["phase"] == INPUT)] == batch


def test_several_steps_at_once_have_a_row_each() -> None:
    sites = SiteTable()
    for name in "abc":
        sites.intern(Site(name, "Linear", "forward", "output", 0, "output"))
    steps = []
    for step, read in enumerate([(2, 0), (0, 1, 1), (), (1,)]):
        records = np.zeros(len(read), RECORD_DTYPE)
        for place, site in enumerate(read):
            for name, value in {"site": site, "step": step, **tensor(rms=2.0**site)}.items():
                records[place][name] = value
        steps.append((None, [records]))
    found = SignalReader(sites).read(steps)
    assert found is not None and found.sites.tolist() == [2, 0, 1]
    assert found.is_read.tolist() == [[1, 1, 0], [0, 1, 1], [0, 0, 0], [0, 0, 1]]
    assert found.levels[1].round(6).tolist()[0][:2] == [2.0, 0.0]
    assert np.isnan(found.levels[1][~found.is_read]).all()
    assert found.numel[1].tolist()[1:] == [1024, 2048]


@pytest.mark.parametrize(
    ("kind", "numel", "has_gradient", "is_batch"),
    [
        ("MSELoss", 8, False, True),  # reduction="none"
        ("MSELoss", 8, True, False),  # what the model returned, by way of code between them
        ("Criterion", 1, False, True),
        ("Linear", 8, False, False),  # such as a mask
    ],
)
def test_the_targets_of_a_criterion_are_the_batch(
    kind: str, numel: int, has_gradient: bool, is_batch: bool
) -> None:
    sites = SiteTable()
    sites.intern(Site("", "Model", "forward", "input", 0, "input[0]"))
    target = sites.intern(Site(kind, kind, "forward", "input", 1, "input[1]"))
    sites.intern(Site(kind, kind, "forward", "output", 0, "output"))
    if has_gradient:
        sites.intern(Site(kind, kind, "backward", "grad_input", 1, "input[1]"))
    records = np.zeros(3, RECORD_DTYPE)
    for place in range(3):
        for name, value in {"site": place, **tensor(numel=numel if place == 2 else 64)}.items():
            records[place][name] = value
    found = SignalReader(sites).read([(None, [records])])
    assert found is not None
    assert found.phases[target] == (INPUT if is_batch else ACTIVATION)
