"""compare() of dumps of chosen operators: overflowing calls come first, and calls that were not
dumped are not judged.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fastcheck


def dump(directory: Path, dtype: torch.dtype, ops: object = ("aten.mul",)) -> str:
    """Two multiplications. In float16 the first rounds, the second overflows."""
    x = torch.linspace(0.5, 1.5, 512, dtype=torch.float64).reshape(8, 64)
    rounded = (x * (1.009 if dtype == torch.float16 else 1.0)).to(dtype)
    with fastcheck.Dumper(directory, ops=ops, tensors=True):
        (rounded.tanh() * 3).sum()
        (rounded.tanh() + 1) * 40_000
    return str(directory)


def test_infinities_on_one_side_lead(tmp_path: Path) -> None:
    half, single = dump(tmp_path / "half", torch.float16), dump(tmp_path / "single", torch.float32)
    comparison = fastcheck.compare(half, single, accept="dtype")
    first = comparison.first
    assert comparison.is_partial and first is not None
    assert first.row.reason == "NaN or infinities on one side" and first.row.call == 1
    assert comparison["forward"].answer == "no"
    report = " ".join(str(comparison).split())
    assert "+Inf" in report and "NaN/Inf on one side" in report
    # The rounding of the operator before it is a remark.
    assert "The first tensor that is not equal to the bit" in report


def test_nothing_is_claimed_of_what_was_not_dumped(tmp_path: Path) -> None:
    one, other = (
        dump(tmp_path / name, dtype, ops="aten.mul #1")
        for name, dtype in (("half", torch.float16), ("single", torch.float32))
    )
    comparison = fastcheck.compare(one, other, accept="dtype")
    assert comparison.first is not None and comparison["batches"].answer == "unknown"
    assert "everything computed before it" not in str(comparison)


@pytest.mark.parametrize("ops", [None, "aten.mul"])
def test_claims_name_what_they_are_of(tmp_path: Path, ops: object) -> None:
    def run(name: str, by: float) -> Path:
        x = torch.linspace(0.5, 1.5, 64)
        with fastcheck.Dumper(tmp_path / name, ops=ops):
            (x * 2) * by
        return tmp_path / name

    report = " ".join(str(fastcheck.compare(run("actual", 3.1), run("reference", 3.0))).split())
    said = "what was dumped" if ops else "everything computed"
    assert f"{said} before it in this step is equal to the bit" in report
