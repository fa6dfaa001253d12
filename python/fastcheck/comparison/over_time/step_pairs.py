"""Pairs the steps of two sides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Union

from fastcheck.comparison.block import Source
from fastcheck.errors import CompareError, ConfigError, explain
from fastcheck.utils.text.numbers import format_steps

#: What compare(steps=) takes.
Steps = Union[str, Iterable[tuple[int, int]], None]


@dataclass(frozen=True)
class Pairing:
    """``places``: (step of actual, step of reference, rank). ``is_shifted``: some of them pair two
    different steps, which are not expected to agree. ``notes``: what is not compared.
    """

    places: list[tuple[int, int, int]]
    is_shifted: bool
    notes: list[str]


def pair_steps(actual: Source, reference: Source, wanted: Steps) -> Pairing:
    """The same steps; those that ``wanted`` names; or the only ones, where each side has one.

    Raises ConfigError for text that names no steps, CompareError for steps that are not there.
    """
    ours, theirs = set(actual.places()), set(reference.places())
    steps = _parsed(wanted)
    only = [sorted({step for step, _ in side}) for side in (ours, theirs)]
    notes = []
    if not steps and len(only[0]) == len(only[1]) == 1 and only[0] != only[1]:
        steps = [(only[0][0], only[1][0])]
        notes.append(f"step {only[0][0]:,} of actual is compared with step {only[1][0]:,}")
    if not steps:
        common = [(step, step, rank) for step, rank in sorted(ours & theirs)]
        return Pairing(common, False, _left_over(ours, theirs))
    places = []
    for mine, other in steps:
        ranks = sorted(
            {rank for step, rank in ours if step == mine}
            & {rank for step, rank in theirs if step == other}
        )
        if not ranks:
            raise CompareError(
                explain(
                    f"step {mine} of actual and step {other} of reference can't be paired",
                    expected="steps that the two have, of a rank that both have",
                    got=f"{format_steps(only[0])} in actual and {format_steps(only[1])} in "
                    "reference",
                )
            )
        places += [(mine, other, rank) for rank in ranks]
    return Pairing(places, any(mine != other for mine, other in steps), notes)


def _left_over(ours: set[tuple[int, int]], theirs: set[tuple[int, int]]) -> list[str]:
    notes = []
    common = {rank for _, rank in ours & theirs}
    for side, places in (("actual", ours - theirs), ("reference", theirs - ours)):
        if places:
            ranks = sorted({rank for _, rank in places})
            span = format_steps(sorted({step for step, _ in places}))
            what = span if common >= set(ranks) else f"{span} of ranks {ranks}"
            notes.append(f"only {side} has {what}: not compared")
    return notes


def _parsed(wanted: Steps) -> list[tuple[int, int]]:
    """``"3:7,4:8"``, ``"3"``, or pairs of numbers."""
    if wanted is None:
        return []
    try:
        if not isinstance(wanted, str):
            return [(int(mine), int(other)) for mine, other in wanted]
        halves = [part.split(":") for part in wanted.split(",")]
        if any(len(half) > 2 for half in halves):
            raise ValueError(wanted)
        return [(int(half[0]), int(half[-1])) for half in halves]
    except (TypeError, ValueError):
        raise ConfigError(
            explain(
                "steps= is not a list of pairs of steps",
                expected='a step of actual and one of reference: "3:7", "3:7,4:8" or [(3, 7)]',
                got=repr(wanted),
            )
        ) from None
