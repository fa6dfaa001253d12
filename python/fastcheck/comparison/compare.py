"""What fastcheck.compare() does: opens both sides, runs over them, and asks the questions."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Optional, Union

from .._compare import Accept, Progress, Rename
from .._errors import CompareError, ConfigError, did_you_mean, explain, near_matches
from .block import Kind, Phase, Source
from .measure import State
from .names import Renaming
from .result import Comparison
from .run import Runner
from .settings import Setting, differing_settings
from .sources import open_source
from .spelling import spell_steps
from .tables import CsvRows
from .tally import COMPUTED, Found, Tally
from .thresholds import make_thresholds
from .verdict import ACCEPTABLE, Answer, Questions

__all__ = ["compare_sides"]


def compare_sides(
    actual: Any,
    reference: Any,
    *,
    rename: Rename,
    accept: Accept,
    exact: bool,
    thresholds: Optional[Mapping[str, float]],
    ask_all: bool,
    csv: Union[str, os.PathLike[str], None],
    progress: Optional[Progress],
    trust: bool,
) -> Comparison:
    """:func:`fastcheck.compare` says what these are."""
    accepted = _accepted(accept)
    limits = make_thresholds(thresholds)
    renaming = Renaming.of(_mapping(rename))
    sides = (
        open_source(actual, "actual", trust),
        open_source(reference, "reference", trust),
    )
    _check_kinds(*sides)
    settings = _settings(*sides, renaming)
    rows = None if csv is None else _open_csv(os.fspath(csv), actual, reference)
    try:
        runner = Runner(*sides, renaming, limits, accepted, None if rows is None else rows.write)
        uncompared: list[str] = []
        steps = _run(runner, *sides, uncompared, progress)
    finally:
        if rows is not None:
            rows.close()
    tally = runner.tally
    _check_common(runner, sides)
    renaming.check_used()
    kind = sides[1].kind if sides[0].kind is sides[1].kind else Kind.LOG
    questions = Questions(kind, tally, settings, accepted, exact, ask_all)
    answers = questions.answers()
    # Not before the run: a source notes what it could not read of a block.
    notes = [*sides[0].notes, *sides[1].notes, *uncompared, *_notes(tally), *_seeds(*sides)]
    return Comparison(
        actual=sides[0].title,
        reference=sides[1].title,
        kind=kind.value,
        verdict=_verdict(answers, tally, settings, questions.first),
        answers=answers,
        first=questions.first,
        first_inexact=tally.first(tally.inexact, COMPUTED),
        growth=tuple(tally.growth[step] for step in sorted(tally.growth)),
        counts={
            phase.name.lower(): {state.name.lower(): n for state, n in sorted(counts.items())}
            for phase, counts in tally.states.items()
            if counts
        },
        missing=tuple(tally.missing.values()),
        rows=tuple(tally.rows),
        more_rows=tally.more_rows,
        steps=tuple(steps),
        notes=tuple(dict.fromkeys(notes)),
    )


def _accepted(accept: Accept) -> frozenset[str]:
    named = (accept,) if isinstance(accept, str) else tuple(accept)
    for name in named:
        if name not in ACCEPTABLE:
            raise ConfigError(
                explain(
                    "this can't be accepted",
                    expected=", ".join(ACCEPTABLE),
                    came=repr(name),
                    do=did_you_mean(str(name), ACCEPTABLE),
                )
            )
    return frozenset(named)


def _mapping(rename: Rename) -> Union[str, Mapping[str, str], None]:
    """Reads the mapping file, if it is one: JSON, {"name in actual": "name in reference"}."""
    if rename is None or isinstance(rename, Mapping):
        return rename
    path = os.fspath(rename)
    if not os.path.exists(path) and not path.endswith(".json") and os.sep not in path:
        return path
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError) as error:
        raise ConfigError(
            explain(
                "the mapping file can't be read",
                expected='a JSON object: {"name in actual": "name in reference"}',
                came=f"{path}: {getattr(error, 'strerror', None) or error}",
            )
        ) from error
    return found


def _open_csv(path: str, actual: Any, reference: Any) -> CsvRows:
    """Opened before the run, which truncates a file that is there: never one that is compared,
    which may be mapped at that.
    """
    for side in (actual, reference):
        if isinstance(side, (str, os.PathLike)) and _belongs_to(path, os.fspath(side)):
            raise ConfigError(
                explain(
                    "the CSV would replace a file that is compared",
                    expected="a path outside both sides, or a new name",
                    came=path,
                )
            )
    return CsvRows(path)


def _belongs_to(path: str, side: str) -> bool:
    """Whether ``path`` is a file that is there, and is the side or lies below it."""
    real, place = os.path.realpath(path), os.path.realpath(side)
    if not os.path.isfile(real):
        return False
    return os.path.samefile(real, place) or real.startswith(os.path.join(place, ""))


def _check_kinds(actual: Source, reference: Source) -> None:
    if actual.kind.family != reference.kind.family:
        raise CompareError(
            explain(
                "these two are of different kinds",
                expected="two logs or dumps, two checkpoints, two environments, or two inventories",
                came=f"a {actual.kind.value} ({actual.title}) and a {reference.kind.value} "
                f"({reference.title})",
            )
        )


def _settings(
    actual: Source, reference: Source, renaming: Renaming
) -> dict[Phase, Optional[list[Setting]]]:
    found: dict[Phase, Optional[list[Setting]]] = {}
    for phase in (Phase.ENVIRONMENT, Phase.HYPERPARAMETERS):
        mine, other = actual.settings.get(phase), reference.settings.get(phase)
        if mine is not None and other is not None:
            found[phase] = differing_settings(phase, mine, other, renaming)
        elif actual.kind is Kind.CHECKPOINT and (mine is None) == (other is None):
            found[phase] = []
        else:
            found[phase] = None
    return found


def _run(
    runner: Runner,
    actual: Source,
    reference: Source,
    notes: list[str],
    progress: Optional[Progress],
) -> list[int]:
    """Compares what both sides have, and notes what only one has; the steps that were compared."""
    ours, theirs = set(actual.places()), set(reference.places())
    common = sorted(ours & theirs)
    for side, places in (("actual", ours - theirs), ("reference", theirs - ours)):
        if places:
            steps = sorted({step for step, _ in places})
            ranks = sorted({rank for _, rank in places})
            span = spell_steps(steps)
            what = span if {r for _, r in common} >= set(ranks) else f"{span} of ranks {ranks}"
            notes.append(f"only {side} has {what}: not compared")
    for done, (step, rank) in enumerate(common):
        if progress is not None:
            progress(done, len(common))
        runner.compare(step, rank)
    if progress is not None and common:
        progress(len(common), len(common))
    return sorted({step for step, _ in common})


def _check_common(runner: Runner, sides: tuple[Source, Source]) -> None:
    if sides[0].kind.family in (Kind.ENVIRONMENT.value, Kind.INVENTORY.value):
        return
    pairs = sum(
        counts[state]
        for counts in runner.tally.states.values()
        for state in State
        if state not in (State.ONLY_ACTUAL, State.ONLY_REFERENCE)
    )
    if pairs:
        return
    ours = [one.name for one in runner.tally.missing.values() if one.state is State.ONLY_ACTUAL]
    theirs = [
        one.name for one in runner.tally.missing.values() if one.state is State.ONLY_REFERENCE
    ]
    came = (
        f"{', '.join(ours[:3])}, ... in actual and {', '.join(theirs[:3])}, ... in reference"
        if ours or theirs
        else f"{_span(sides[0])} in actual and {_span(sides[1])} in reference"
    )
    near = near_matches(ours[0], theirs, 1) if ours and theirs else []
    alike = runner.tally.lookalikes.get(ours[0]) if ours else None
    near = near if alike is None else [alike]
    raise CompareError(
        explain(
            "the two sides have nothing in common",
            expected="at least one tensor of the same name and step on both sides",
            came=came,
            do="give rename= (--rename FILE) names that differ"
            + (f", perhaps of {ours[0]} to {near[0]}" if near else ""),
        )
    )


def _span(source: Source) -> str:
    return spell_steps(sorted({step for step, _ in source.places()}))


def _seeds(actual: Source, reference: Source) -> list[str]:
    """Not compared as a setting: a run that draws nothing is the same under any seed."""
    said = []
    for side in (actual, reference):
        environment = side.settings.get(Phase.ENVIRONMENT)
        where = environment.get("where") if isinstance(environment, dict) else None
        said.append(where.get("initial_seed") if isinstance(where, dict) else None)
    if None in said or said[0] == said[1]:
        return []
    return [f"torch's seeds are {said[0]} in actual and {said[1]} in reference"]


def _notes(tally: Tally) -> list[str]:
    found = []
    if tally.reordered:
        found.append(
            f"{tally.reordered:,} calls came in another order among the calls of their module"
        )
    if tally.moved:
        found.append(f"{tally.moved:,} inputs were read by another module first, equal to the bit")
    if tally.lookalikes:
        mine, other = next(iter(tally.lookalikes.items()))
        found.append(
            f"{len(tally.lookalikes):,} names only in actual hold what names only in reference "
            f"hold: {mine} is {other}, ... If they are renamed, give rename= (--rename FILE)"
        )
    for (mine, other), count in tally.dtypes.items():
        found.append(f"{count:,} tensors are {mine} in actual and {other} in reference")
    if not tally.has_bits:
        found.append(
            "not all tensors have checksums or values on both sides: of the others, the "
            "statistics are compared"
        )
    return found


def _verdict(
    answers: tuple[Answer, ...],
    tally: Tally,
    settings: Mapping[Phase, Optional[list[Setting]]],
    first: Optional[Found],
) -> str:
    said = {answer.answer for answer in answers}
    if said & {"no", "partly"} or first is not None:
        return "different"
    all_same = all(
        state is State.SAME for counts in tally.states.values() for state, n in counts.items() if n
    )
    settled = not any(settings.values())
    return "identical" if all_same and settled else "equal"
