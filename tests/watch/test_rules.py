"""Tests of the table of rules: its kinds, its texts, and the rows of docs/watch.md."""

from __future__ import annotations

import dataclasses
import math
import string
from pathlib import Path

import numpy as np
import pytest

from fastcheck.watch.event import KINDS
from fastcheck.watch.invariants import (
    NUMBER_INVARIANTS,
    NUMBER_RULES,
    TENSOR_INVARIANTS,
    TENSOR_RULES,
)
from fastcheck.watch.numbers import Number
from fastcheck.watch.rules import NUMBER_RULES as RULES_OF_NUMBERS
from fastcheck.watch.rules import Rule, loss_spikes
from support.watched import FIRST_WEIGHT, SECOND_WEIGHT, Run

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "watch.md").read_text("utf-8")
RULES = (*NUMBER_RULES, *TENSOR_RULES)
INVARIANTS = (*NUMBER_INVARIANTS, *TENSOR_INVARIANTS)


def test_there_are_eleven_kinds_and_each_has_a_rule() -> None:
    assert len(KINDS) <= 11
    assert {rule.kind for rule in RULES} == set(KINDS)


def test_rules_are_data() -> None:
    for rule in RULES:
        with pytest.raises(dataclasses.FrozenInstanceError):
            rule.kind = "another"  # type: ignore[misc]  # wrong on purpose
        assert rule.steps >= 1
        assert rule.pause in ("event", "warning", "")


@pytest.mark.parametrize("rule", RULES, ids=[f"{one.kind}: {one.text[:40]}" for one in RULES])
def test_texts_use_what_there_is(rule: Rule) -> None:
    known = {"value", "usual"}
    known |= (
        {"name", "share", "most", "steps", "checks"}
        if rule in NUMBER_RULES
        else {"dtype", "count", "reaches"}
    )
    used = {name for _, name, _, _ in string.Formatter().parse(rule.text) if name}
    assert used <= known
    assert not rule.text.endswith(".") and not rule.advice.endswith(".")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "invariant"])
def test_the_page_has_a_row_for_each_rule(kind: str) -> None:
    table = PAGE.partition("## Events")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith(f"| `{kind}`")]
    rules = [rule for rule in RULES if rule.kind == kind]
    assert len(rows) == len(rules) - 2 * (kind == "batch")  # one row for its three levels


def test_its_page_has_a_row_for_each_invariant() -> None:
    """With whether it warns."""
    page = (DOCS / "invariants.md").read_text("utf-8")
    table = page.partition("## The table")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(INVARIANTS)
    assert [row.endswith("| yes |") for row in rows] == [rule.warns for rule in INVARIANTS]


def test_conditions_keep_nothing() -> None:
    """The same view gives the same answer."""
    run, views = Run(), []
    run.steps(80)
    take = run.watcher._past.take

    def kept(now: object) -> object:
        views.append(take(now))  # type: ignore[arg-type]  # what it takes is of no concern here
        return views[-1]

    run.watcher._past.take = kept  # type: ignore[assignment,method-assign]  # it notes what was taken
    run.steps(1, {1: 1e6})
    for rule in TENSOR_RULES:
        first, second = rule.condition(views[0]), rule.condition(views[0])
        assert first.shape == views[0].now.is_read.shape and np.array_equal(first, second)


class TestWhatAlwaysMovesOneWay:
    """A gain that starts as all ones: its spread is 0, and grows in each step."""

    @staticmethod
    def changed(step: int) -> dict[int, dict[str, float]]:
        deviation = 1.5e-5 * (step + 1)
        gain = {
            "sum": 1024.0,
            "sum_sq": 1024.0 * (1 + deviation**2),
            "max": 1 + 3 * deviation,
            "min": 1 - 3 * deviation,
        }
        return {FIRST_WEIGHT: gain, SECOND_WEIGHT: {"rms": 1e-4 * 1.02**step}}

    def run(self, steps: int) -> Run:
        run = Run()
        assert [kind for step in range(steps) for kind in run.steps(1, self.changed(step))] == []
        return run

    def test_it_is_no_event(self) -> None:
        self.run(200)

    @pytest.mark.parametrize("steps", [68, 80, 120])
    def test_it_is_not_what_moved_first(self, steps: int) -> None:
        (event,) = self.run(steps).step(self.changed(steps), loss=2000.0)
        assert event.cause == "loss" and len(event.movers) == 1


@pytest.mark.parametrize("first", [0.0, 1e-3])
def test_a_loss_that_was_always_0_does_not_spike(first: float) -> None:
    loss = Number("loss", 1.0, usual=0.0, score=1e9, most=0.0, recent=0.0, first=first)
    assert loss_spikes(loss) == bool(first)


@pytest.mark.parametrize("usual", [math.nan, 0.5])
def test_a_loss_that_has_no_usual_value_yet_is_compared_with_none(usual: float) -> None:
    loss = Number("loss", 200.0, usual=usual, most=0.6, recent=0.6, first=0.6, is_jump=True)
    texts = [
        rule.text.format(value=loss.value, usual=usual, most=loss.most)
        for rule in RULES_OF_NUMBERS
        if rule.names == ["loss"] and rule.steps == 1 and rule.condition(loss)
    ]
    assert len(texts) == 1 and "nan" not in texts[0]
    assert ("at most 0.6 before" in texts[0]) is math.isnan(usual)
