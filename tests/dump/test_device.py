"""Dumper on the fake accelerator: backward on the device's own thread, records fetched together,
and the CPU as the reference of another device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from fakes import fake_device
from fastcheck.record.format import Flag
from support.programs.dumping import calls, index, log, ops, record_of, values

pytestmark = pytest.mark.fake_accelerator


fake: Any = fake_device.load()
NAME = fake.name()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).to(NAME)


def step(net: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 8, generator=generator).to(NAME)
    net(x).square().mean().backward()


@pytest.mark.parametrize("options", [{}, {"tensors": True}, {"order": "logical"}])
def test_forward_and_backward_are_seen_and_unchanged(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    plain, dumped = model(), model()
    step(plain)
    with fastcheck.Dumper(tmp_path, **options) as dumper:
        step(dumped)
    assert not dumper.problem
    for one, other in zip(plain.parameters(), dumped.parameters()):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad.cpu(), other.grad.cpu())
    assert "aten.addmm" in ops(tmp_path)
    backward = [line for line in calls(tmp_path) if line["direction"] == "backward"]
    assert {"aten.addmm", "aten.relu"} <= {line["op"] for line in backward}
    assert {"0", "1", "2"} <= {line["module"] for line in backward}
    assert any(entry.get("device") == f"{NAME}:0" for entry in backward[0]["in"])


def test_what_a_monitor_reads_is_not_dumped(tmp_path: Path) -> None:
    """But for the memory that it takes in its first step."""
    plain, observed = model(), model()
    with fastcheck.Dumper(tmp_path / "alone"):
        step(plain)
    with fastcheck.install(observed), fastcheck.Dumper(tmp_path / "beside"):
        step(observed)
    added = set(ops(tmp_path / "beside")) - set(ops(tmp_path / "alone"))
    made = {"aten.zeros", "aten.zero_", "aten.empty.memory_format"}
    assert added <= made | {"aten.is_pinned", "aten._pin_memory"}


def test_records_are_those_of_the_cpu(tmp_path: Path) -> None:
    with fastcheck.Dumper(tmp_path / "fetched"):
        step(model())
    with fastcheck.Dumper(tmp_path / "values", tensors=True):
        step(model())
    here, there = log(tmp_path / "fetched").records, log(tmp_path / "values").records
    assert len(here) == len(there) > 20
    for field in ("numel", "checksum", "min", "max", "zero_count", "site", "seq", "step", "dtype"):
        assert here[field].tolist() == there[field].tolist(), field
    assert not (here["flags"] & int(Flag.NONFINITE)).any()
    view, load = log(tmp_path / "values"), values(tmp_path / "values")
    for line in calls(tmp_path / "values"):
        for entry in line["out"]:
            if "value" in entry and "stride" not in entry:
                checksum = int(record_of(view, entry)["checksum"])
                assert fastcheck.checksum(load(entry)) == checksum
    assert fastcheck.compare(tmp_path / "fetched", tmp_path / "values").agrees


def test_a_nonfinite_record_is_flagged(tmp_path: Path) -> None:
    x = torch.tensor([1.0, float("nan")]).to(NAME)
    with fastcheck.Dumper(tmp_path):
        x + 1
    assert (log(tmp_path).records["flags"] & int(Flag.NONFINITE)).all()


def test_a_kernel_of_the_device_is_held_against_that_of_the_cpu(tmp_path: Path) -> None:
    """One op, two kernels, of which the device's is off: the same dtype finds it."""
    with torch.library._scoped_library("fastcheck_test", "FRAGMENT") as library:
        library.define("scale(Tensor x) -> Tensor")
        library.impl("scale", lambda x: x * 2, "CPU")
        library.impl("scale", lambda x: x * 2.006, "PrivateUse1")
        dumper = fastcheck.Dumper(tmp_path, reference="cpu")
        with pytest.warns(fastcheck.FastcheckWarning, match="fastcheck_test.scale #0"), dumper:
            torch.ops.fastcheck_test.scale(torch.ones(4).to(NAME) + 1)
    (found,) = dumper.differences
    assert found["error"] == pytest.approx(3e-3, rel=1e-3)
    assert index(tmp_path)["reference"]["outputs"] >= 2
