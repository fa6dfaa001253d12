"""compare(): opens both sides, runs the comparison, and returns the result."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Callable, Optional, Union

from fastcheck.comparison.over_time.losses import LOSS_DRIFT, drift_start
from fastcheck.comparison.over_time.schedules import parted
from fastcheck.comparison.over_time.step_pairs import Pairing, Steps, pair_steps
from fastcheck.comparison.page.gather import Gathered
from fastcheck.comparison.page.write import write_comparison
from fastcheck.comparison.sources.checkpoint import look_through_wrappers
from fastcheck.comparison.sources.log import LogSource
from fastcheck.comparison.sources.open import open_source
from fastcheck.errors import CompareError, ConfigError, did_you_mean, explain, near_matches
from fastcheck.statistics.thresholds import make_thresholds
from fastcheck.utils.reading import read_json
from fastcheck.utils.text.numbers import format_steps

from .block import Kind, Phase, Source
from .comparison import Comparison
from .csv_file import CsvRows
from .measure import State
from .names import Renaming
from .nested_diff import Setting, differing_settings
from .notes import expects_bits, notes_of
from .questions import ACCEPTABLE, Answer, Questions
from .run import Runner
from .tally import COMPUTED, Found, Tally

__all__ = ["compare"]

Rename = Union[str, os.PathLike[str], Mapping[str, str], None]
Accept = Union[str, Iterable[str]]
Progress = Callable[[int, int], None]


def compare(
    actual: Any,
    reference: Any,
    *,
    rename: Rename = None,
    accept: Accept = (),
    exact: bool = False,
    thresholds: Optional[Mapping[str, float]] = None,
    ask_all: bool = False,
    csv: Union[str, os.PathLike[str], None] = None,
    progress: Optional[Progress] = None,
    trust: bool = False,
    steps: Steps = None,
    loss_drift: float = LOSS_DRIFT,
    html: Union[str, os.PathLike[str], None] = None,
) -> Comparison:
    """Compares two runs, dumps, checkpoints, environments or inventories, and finds what differs
    first, in the order of cause and effect: environment, hyper-parameters, batches,
    initial weights, forward, loss, gradients, update.

    Args:
        actual, reference: each a path: of a record log (``install(log_dir=...)``), of a dump
            (``Dumper``), of a checkpoint (.pt, .pth, .safetensors, .npy, .npz, or a directory of
            them), of an msprobe dump, or of the JSON of ``environment()`` or ``inventory()``. Or
            in memory: a tensor, a state_dict, a module, or what those two return.
        rename: names of ``actual`` and what they are called in ``reference``: a mapping, the path
            of a JSON file with one, or ``"mindspore"`` (gamma, beta, moving_mean,
            moving_variance). A rule is about a path and all below it; ``*`` stands for one part.
        accept: what may differ: ``"environment"``, ``"hyper-parameters"``, ``"batches"``,
            ``"weights"``, ``"dtype"``, ``"order"`` (only a checksum differs), ``"missing"``.
        exact: everything has to be equal to the bit, as far as both sides have checksums or
            values; of the rest the statistics have to be equal within the thresholds.
        thresholds: the relative error allowed of some dtypes, instead of those in
            ``docs/compare.md``: ``{"bfloat16": 0.05}``.
        ask_all: continue after the first "no".
        csv: a file to write every pair to that is not equal to the bit; one that is there is
            replaced, unless it belongs to a side.
        progress: called with (done, total) blocks.
        trust: load files that torch.load only reads with ``weights_only=False``. That runs code
            in the file.
        steps: which step of ``actual`` is compared with which of ``reference``: ``"3:7"``,
            ``"3:7,4:8"`` or ``[(3, 7)]``. Left out: equal numbers, or the only step of each side.
            Of two different steps all questions are asked, and what did not change is listed.
        loss_drift: two losses of a step have drifted apart where they differ by more than this,
            relative to the reference's.
        html: a file to write the comparison to as a page that loads nothing (docs/report.md): where
            the two part, a heat map of their difference, the curves of both sides.

    Returns:
        A Comparison: ``print()`` it, or read ``.agrees``, ``["batches"].answer``, ``.first``,
        ``.to_dict()``.

    Raises:
        CompareError: a side can't be read, the two are of different kinds, or have nothing in
            common.
        ConfigError: an option that can't be used, or a renaming that fits nothing.

    Tensors are read on the host; device tensors given in memory are copied there. Of two logs, one
    step of one rank is in memory at a time.
    """
    accepted = _accepted(accept)
    limits = make_thresholds(thresholds)
    renaming = Renaming.of(_mapping(rename))
    sides = (
        open_source(actual, "actual", trust),
        open_source(reference, "reference", trust),
    )
    _check_kinds(*sides)
    look_through_wrappers(*sides)
    settings = _settings(*sides, renaming)
    pairing = pair_steps(*sides, steps)
    rows = None if csv is None else _open_csv(os.fspath(csv), actual, reference)
    if html is not None:
        _check_place("page", os.fspath(html), actual, reference)
    try:
        runner = Runner(*sides, renaming, limits, accepted, None if rows is None else rows.write)
        runner.tally.keeps_unchanged = pairing.is_shifted
        gathered = None if html is None else Gathered(pairing, sides)
        runner.observer = None if gathered is None else gathered.take
        _compare_blocks(runner, pairing, progress)
    finally:
        if rows is not None:
            rows.close()
    tally = runner.tally
    _check_common(runner, sides)
    renaming.check_used()
    kind = sides[1].kind if sides[0].kind is sides[1].kind else Kind.LOG
    is_bitwise = expects_bits(*sides, settings)
    is_partial = any(side.is_partial for side in sides)
    ask_all = ask_all or pairing.is_shifted
    questions = Questions(kind, tally, settings, accepted, exact, ask_all, is_bitwise, is_partial)
    answers = questions.answers()
    # Not before the run: a source notes what it could not read of a block.
    notes = [*sides[0].notes, *sides[1].notes, *pairing.notes, *notes_of(tally, *sides)]
    losses = tuple(tally.losses[step] for step in sorted(tally.losses))
    comparison = Comparison(
        actual=sides[0].title,
        reference=sides[1].title,
        kind=kind.value,
        verdict=_overall_verdict(answers, tally, settings, questions.first),
        answers=answers,
        first=questions.first,
        first_inexact=tally.first(tally.inexact, COMPUTED),
        expects_bits=is_bitwise,
        is_partial=is_partial,
        growth=tuple(tally.growth[step] for step in sorted(tally.growth)),
        counts={
            phase.name.lower(): {state.name.lower(): n for state, n in sorted(counts.items())}
            for phase, counts in tally.states.items()
            if counts
        },
        missing=tuple(tally.missing.values()),
        rows=tuple(tally.rows),
        more_rows=tally.more_rows,
        steps=tuple(sorted({step for _, step, _ in pairing.places})),
        unchanged=tuple(name for name, is_same in tally.unchanged.items() if is_same),
        losses=losses,
        drifts_from=drift_start(losses, loss_drift),
        notes=tuple(dict.fromkeys(notes)),
    )
    if html is not None and gathered is not None:
        write_comparison(html, comparison, gathered, runner.names)
    return comparison


def _accepted(accept: Accept) -> frozenset[str]:
    named = (accept,) if isinstance(accept, str) else tuple(accept)
    for name in named:
        if name not in ACCEPTABLE:
            raise ConfigError(
                explain(
                    "accept= has an unknown value",
                    expected=", ".join(ACCEPTABLE),
                    got=repr(name),
                    hint=did_you_mean(str(name), ACCEPTABLE),
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
        found = read_json(path)
        if not isinstance(found, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise ConfigError(
            explain(
                "the mapping file can't be read",
                expected='a JSON object: {"name in actual": "name in reference"}',
                got=f"{path}: {getattr(error, 'strerror', None) or error}",
            )
        ) from error
    return found


def _open_csv(path: str, actual: Any, reference: Any) -> CsvRows:
    """Opened before the run, which truncates a file that is there."""
    _check_place("CSV", path, actual, reference)
    return CsvRows(path)


def _check_place(what: str, path: str, actual: Any, reference: Any) -> None:
    """Never a file that is compared, which may be mapped at that. A page may lie in a log, under a
    name that no log has.
    """
    for side in (actual, reference):
        if isinstance(side, (str, os.PathLike)) and _belongs_to(path, os.fspath(side)):
            if what == "page" and path.endswith((".html", ".htm")):
                continue
            raise ConfigError(
                explain(
                    f"the {what} would replace a file that is compared",
                    expected="a path outside both sides, or a new name",
                    got=path,
                )
            )


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
                got=f"a {actual.kind.value} ({actual.title}) and a {reference.kind.value} "
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
            if phase is Phase.HYPERPARAMETERS:
                found[phase] = [*(found[phase] or []), *_parted_schedules(actual, reference)]
        elif actual.kind is Kind.CHECKPOINT and (mine is None) == (other is None):
            found[phase] = []
        else:
            found[phase] = None
    return found


def _parted_schedules(actual: Source, reference: Source) -> list[Setting]:
    sides = [side for side in (actual, reference) if isinstance(side, LogSource)]
    if len(sides) < 2:
        return []
    described = [side.settings[Phase.HYPERPARAMETERS]["optimizers"] for side in sides]
    last = min(max(step for step, _ in side.places()) for side in sides)
    return parted(sides[0].schedules, sides[1].schedules, (described[0], described[1]), last)


def _compare_blocks(runner: Runner, pairing: Pairing, progress: Optional[Progress]) -> None:
    for done, (mine, other, rank) in enumerate(pairing.places):
        if progress is not None:
            progress(done, len(pairing.places))
        runner.compare(mine, other, rank)
    if progress is not None and pairing.places:
        progress(len(pairing.places), len(pairing.places))


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
    names = (
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
            got=names,
            hint="give rename= (--rename FILE) names that differ"
            + (f", perhaps of {ours[0]} to {near[0]}" if near else ""),
        )
    )


def _span(source: Source) -> str:
    return format_steps(sorted({step for step, _ in source.places()}))


def _overall_verdict(
    answers: tuple[Answer, ...],
    tally: Tally,
    settings: Mapping[Phase, Optional[list[Setting]]],
    first: Optional[Found],
) -> str:
    given = {answer.answer for answer in answers}
    if given & {"no", "partly"} or first is not None:
        return "different"
    all_same = all(
        state is State.SAME for counts in tally.states.values() for state, n in counts.items() if n
    )
    settled = not any(settings.values())
    return "identical" if all_same and settled else "equal"
