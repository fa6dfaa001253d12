"""Tests of the rules for the gradients of single parameters."""

from __future__ import annotations

from typing import Any, Optional

import numpy as np
import pytest

from fastcheck.record.format import RECORD_DTYPE
from fastcheck.record.site import Site
from support.watched import Run, tensor


class Gradients(Run):
    """A Run with the gradients of two parameters, of 1,024 elements each unless changed."""

    def __init__(self, eps: Optional[float] = None) -> None:
        super().__init__()
        self.numbers = [
            self.sites.intern(Site(name, "Linear", "optimizer", "param_grad", 0, "weight"))
            for name in ("first", "second")
        ]
        if eps is not None:
            self.watcher.set_epsilon(dict.fromkeys(self.numbers, eps))

    def read(self, first: Any = 1.0, second: Any = 1.0, **row: Any) -> list[Any]:
        """The events of a step with gradients of this rms, or with these fields."""
        more = np.zeros(2, RECORD_DTYPE)
        for place, given in enumerate((first, second)):
            fields = dict(given) if isinstance(given, dict) else {"rms": given}
            fields["rms"] = fields.get("rms", 1.0) * float(np.exp(self.random.normal(0, 0.05)))
            fields |= {"site": self.numbers[place], "step": self.count}
            for key, value in tensor(**fields).items():
                more[place][key] = value
        return self.take([np.concatenate([self.healthy(), more])], **row)

    def kinds(self, steps: int, *gradients: Any, **row: Any) -> list[str]:
        return [event.kind for _ in range(steps) for event in self.read(*gradients, **row)]


class TestRise:
    def test_of_one_parameter(self) -> None:
        run = Gradients()
        assert run.kinds(100) == []
        (event,) = run.read(1.0, 10.0)
        assert (event.kind, event.is_warning, event.cause) == ("gradient", False, "gradient")
        assert str(event.site) == "second (Linear) · optimizer · gradient of second.weight"
        assert event.value == pytest.approx(320, rel=0.2)
        assert event.reference == pytest.approx(32, rel=0.1)
        assert event.score > 6 and event.first_mover.site == event.site
        assert "other gradients" not in str(event)
        assert run.kinds(20, 1.0, 10.0) == ["shift"]  # and no other of this kind

    def test_of_both(self) -> None:
        run = Gradients()
        run.kinds(100)
        (event,) = run.read(30.0, 10.0)
        assert str(event.site).startswith("first")
        assert "1 other gradients of parameters" in str(event)

    def test_a_small_one_is_none(self) -> None:
        run = Gradients()
        run.kinds(100)
        assert run.read(4.0) == []


class TestEpsilon:
    def test_most_gradients_below_it(self) -> None:
        run = Gradients(eps=1e-8)
        assert run.kinds(30) == []
        assert run.kinds(19, 4e-9, 4e-9) == []
        (event,) = run.read(4e-9, 4e-9)
        assert (event.kind, event.is_warning, event.cause) == ("epsilon", True, "optimizer")
        assert (event.value, event.reference) == (pytest.approx(4e-9, rel=0.2), 1e-8)
        assert "2 of 2 gradients" in str(event) and "smaller eps" in str(event)
        assert "epsilon" not in run.kinds(100, 4e-9, 4e-9)

    def test_one_that_was_changed_is_judged_anew(self) -> None:
        run = Gradients(eps=1e-8)
        assert run.kinds(100) == []
        run.watcher.set_epsilon(dict.fromkeys(run.numbers, 10.0))
        assert run.kinds(25) == ["epsilon"]

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            (4e-9, 1.0),  # noise beside the other, which may be 0 in truth
            (8e-9, 8e-9),  # too near to eps
            ({"rms": 4e-9, "zero_count": 1008}, {"rms": 4e-9, "zero_count": 1008}),  # few rows used
            ({"rms": 0.0, "zero_count": 1024}, {"rms": 0.0, "zero_count": 1024}),
        ],
    )
    def test_what_is_none(self, first: Any, second: Any) -> None:
        assert Gradients(eps=1e-8).kinds(30, first, second) == []

    def test_fewer_than_half_of_the_elements_are_none(self) -> None:
        run = Gradients(eps=1e-3)
        large = {"rms": 1.0, "numel": 4096, "sum_sq": 4096.0}
        assert run.kinds(30, large, 1e-4) == []

    def test_a_gradient_that_no_eps_is_known_of(self) -> None:
        assert Gradients().kinds(30, 1e-20, 1e-20) == []
