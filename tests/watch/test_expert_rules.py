"""Tests of the rule for experts that get no tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Optional

import numpy as np
import pytest

from fastcheck.record.format import RECORD_DTYPE
from fastcheck.record.site import Site, SiteTable
from fastcheck.watch.expert_rules import ExpertRules, expert_of
from fastcheck.watch.signals import SignalReader
from fastcheck.watch.update_rules import Found
from support.watched import tensor

EXPERTS = 4


@pytest.mark.parametrize(
    ("module", "expert"),
    [
        ("layers.1.experts.3", ("layers.1.experts.3", "layers.1.experts")),
        ("layers.1.experts.3.w1", ("layers.1.experts.3", "layers.1.experts")),
        ("mlp.experts.expert_12.act", ("mlp.experts.expert_12", "mlp.experts")),
        ("moe.local_experts.0", ("moe.local_experts.0", "moe.local_experts")),
        ("moe.expert0.fc", ("moe.expert0", "moe.expert")),
        ("moe.experts", None),
        ("moe.experts.act", None),
        ("moe.shared_experts.0", None),
        ("layers.3.fc", None),
        ("", None),
    ],
)
def test_which_modules_are_experts(module: str, expert: Optional[tuple[str, str]]) -> None:
    assert expert_of(module) == expert


def run(steps: int, has_tokens: Callable[[int, int], bool], experts: int = EXPERTS) -> list[Found]:
    """The findings of so many steps, in which the parameters of all experts are read, and the
    output of those that ``has_tokens(step, expert)``.
    """
    sites = SiteTable()
    numbers = []
    for name in [f"moe.experts.{number}" for number in range(experts)]:
        parameter = sites.intern(Site(name, "Linear", "optimizer", "param", 0, "weight"))
        numbers.append((parameter, sites.intern(Site(name, "Linear", "forward", "output", 0, "y"))))
    rules, reader, found = ExpertRules(sites), SignalReader(sites), []
    for step in range(steps):
        read = [output for e, (_, output) in enumerate(numbers) if has_tokens(step, e)]
        read += [parameter for parameter, _ in numbers]
        records = np.zeros(len(read), RECORD_DTYPE)
        for place, site in enumerate(read):
            for name, value in {"site": site, **tensor()}.items():
                records[place][name] = value
        signals = reader.read([records], None)
        assert signals is not None
        found += rules.add(step, signals)
    return found


def test_one_that_always_had_tokens_is_seen_after_four_steps_and_warned_of_after_fifty() -> None:
    assert run(103, lambda step, e: step < 100 or e != 2) == []
    noted = run(104, lambda step, e: step < 100 or e != 2)
    assert [(one.reading.value, one.reading.is_warning) for one in noted] == [(4, False)]
    _, warned = run(300, lambda step, e: step < 100 or e != 2)
    assert (warned.reading.value, warned.reading.is_warning) == (50, True)
    assert "no tokens for 50 steps, while 3 of 3 others beside it have some" in warned.text


def test_the_site_is_its_output() -> None:
    noted = run(104, lambda step, e: step < 100 or e != 2)
    assert noted[0].site == 5


def test_one_that_never_had_any_is_warned_of() -> None:
    found = run(300, lambda step, e: e != 0)
    assert [(one.reading.value, one.reading.is_warning) for one in found] == [(50, True)]


def test_several_are_one_event() -> None:
    _, warned = run(300, lambda step, e: step < 100 or e < 6, experts=8)
    assert "; so have 1 more" in warned.text


def test_chance_is_none() -> None:
    random = np.random.default_rng(0)
    assert run(1500, lambda step, e: bool(random.random() < 0.5)) == []


def test_steps_in_which_most_experts_are_idle_do_not_count() -> None:
    # An evaluation with few tokens, or a part of the network that is left out.
    assert run(400, lambda step, e: step < 100 or e == 0) == []
    assert run(400, lambda step, e: step < 100) == []
    # Nor after it.
    assert (
        run(202, lambda step, e: e == 0 or not (100 <= step < 200 or (step >= 200 and e == 2)))
        == []
    )


def test_one_that_comes_back_may_be_reported_again() -> None:
    found = run(400, lambda step, e: e != 1 or not (100 <= step < 110 or 200 <= step < 240))
    assert [one.reading.is_warning for one in found] == [False, False]


def test_without_experts_there_is_nothing() -> None:
    sites = SiteTable()
    sites.intern(Site("a", "Linear", "forward", "output", 0, "output"))
    records = np.zeros(1, RECORD_DTYPE)
    for name, value in tensor().items():
        records[0][name] = value
    signals = SignalReader(sites).read([records], None)
    assert signals is not None
    assert ExpertRules(sites).add(0, signals) == []
