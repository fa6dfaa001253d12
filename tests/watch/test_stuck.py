"""Tests of the rules for subnormal, zero and saturated tensors, and for functions at their ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastcheck.record.format import RECORD_DTYPE
from fastcheck.record.site import Site, SiteTable
from fastcheck.watch.options import Watch
from fastcheck.watch.watcher import Watcher
from support.watched import DTYPE_CODES, Run, tensor

SECOND, GRADIENT = 2, 3


def after_healthy_steps(place: int, later: dict[str, Any], **first: Any) -> list[tuple[str, bool]]:
    """Kind of each event of 80 steps and 30 that come after them, and whether it warns."""
    run = Run()
    events = [event for _ in range(80) for event in run.step({place: first})]
    events += [event for _ in range(30) for event in run.step({place: later})]
    return [(one.kind, one.is_warning) for one in events]


class TestSaturation:
    @pytest.mark.parametrize("place", [SECOND, GRADIENT])
    def test_a_tensor_that_is_cut_to_its_dtypes_largest_number(self, place: int) -> None:
        kind = {"dtype": DTYPE_CODES["float16"]}
        cut = {**kind, "saturated_count": 3, "max": 65504.0}
        assert ("precision", True) in after_healthy_steps(place, cut, **kind)

    def test_nine_steps_are_none(self) -> None:
        kind, run = {"dtype": DTYPE_CODES["float16"]}, Run()
        run.steps(80, {SECOND: kind})
        kinds = run.steps(9, {SECOND: {**kind, "saturated_count": 3}})
        assert "precision" not in kinds + run.steps(9, {SECOND: kind})

    def test_a_mask_that_always_holds_it_is_none(self) -> None:
        mask = {"saturated_count": 3}
        assert after_healthy_steps(SECOND, {"saturated_count": 500}, **mask) == []

    def test_one_that_holds_it_now_and_then_at_first_is_none(self) -> None:
        run = Run()
        for step in range(200):
            found = run.steps(1, {SECOND: {"saturated_count": int(step % 8 == 7 or step > 90)}})
            assert "precision" not in found

    @pytest.mark.parametrize("dtype", ["int8", "int64"])
    def test_integers_have_no_such_end(self, dtype: str) -> None:
        kind = {"dtype": DTYPE_CODES[dtype], "max": 0, "min": 0}
        found = after_healthy_steps(SECOND, {**kind, "saturated_count": 3}, **kind)
        assert "precision" not in [name for name, _ in found]


class TestSubnormals:
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    def test_a_gradient_of_which_most_becomes_subnormal(self, dtype: str) -> None:
        kind = {"dtype": DTYPE_CODES[dtype], "zero_count": 512}
        low = {**kind, "subnormal_count": 300}  # of the other half
        assert ("precision", False) in after_healthy_steps(GRADIENT, low, **kind)

    def test_one_that_was_so_from_the_start_is_none(self) -> None:
        low = {"subnormal_count": 600}
        assert after_healthy_steps(GRADIENT, {"subnormal_count": 700}, **low) == []

    def test_less_than_half_is_none(self) -> None:
        assert after_healthy_steps(GRADIENT, {"zero_count": 10, "subnormal_count": 480}) == []

    def test_activations_are_none(self) -> None:
        assert after_healthy_steps(SECOND, {"subnormal_count": 900}) == []


class TestUnderflow:
    @pytest.mark.parametrize("dtype", ["float16", "float32"])
    def test_most_is_zero_and_most_of_the_others_subnormal(self, dtype: str) -> None:
        kind = {"dtype": DTYPE_CODES[dtype], "zero_count": 100}
        low = {**kind, "zero_count": 1000, "subnormal_count": 20}
        assert ("precision", True) in after_healthy_steps(GRADIENT, low, **kind)

    def test_zeros_that_are_exact_are_none(self) -> None:
        """Of a hinge, a clamp, boxes that do not meet: the others are as large as before."""
        kind = {"dtype": DTYPE_CODES["float16"], "zero_count": 100}
        assert after_healthy_steps(GRADIENT, {**kind, "zero_count": 1000}, **kind) == []

    def test_a_gradient_that_was_zero_from_the_start_is_none(self) -> None:
        kind = {"dtype": DTYPE_CODES["float16"], "zero_count": 800, "subnormal_count": 200}
        low = {**kind, "zero_count": 1000, "subnormal_count": 24}
        assert after_healthy_steps(GRADIENT, low, **kind) == []


def function(name: str, first: tuple[float, float], later: tuple[float, float]) -> list[str]:
    """The texts of what is found in 120 steps of a function with these means and rms, the later
    ones from the 40th step on.
    """
    sites = SiteTable()
    sites.intern(Site("act", name, "forward", "output", 0, "output"))
    watcher, found = Watcher(Watch(), sites), []
    for step in range(120):
        mean, rms = later if step >= 40 else first
        records = np.zeros(1, RECORD_DTYPE)
        fields = {**tensor(rms=rms), "sum": 1024 * mean, "max": 1.0, "min": 0.0 if mean else -1.0}
        for key, value in fields.items():
            records[0][key] = value
        found += watcher.add((None, [records]))
    assert all(one.kind == "precision" and not one.is_warning for one in found)
    return [one.text for one in found]


@pytest.mark.parametrize(
    ("name", "first", "later"),
    [("Tanh", (0.0, 0.5), (0.0, 0.99)), ("Sigmoid", (0.5, 0.55), (0.5, 0.705))],
)
def test_a_function_that_comes_to_its_ends(
    name: str, first: tuple[float, float], later: tuple[float, float]
) -> None:
    (text,) = function(name, first, later)
    assert "at the ends of the function" in text
    assert function(name, later, later) == []  # it was never otherwise
    assert function(name, first, first) == []
    assert function("ReLU", first, later) == []
