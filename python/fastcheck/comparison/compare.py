"""compare(): opens both sides, runs the comparison, and returns the result."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from numbers import Real
from typing import Any, Callable, Optional, TextIO, Union

from fastcheck.comparison.over_time import (
    LOSS_DRIFT,
    CommonGroups,
    Pairing,
    Steps,
    common_groups,
    described_at,
    pair_steps,
    parted,
    regrouped,
    regrouped_schedules,
    shifted,
)
from fastcheck.comparison.page.gather import Gathered
from fastcheck.comparison.page.write import write_comparison
from fastcheck.comparison.sources.checkpoint import look_through_wrappers, matching_prefixes
from fastcheck.comparison.sources.dump import DumpSource, parameters_among
from fastcheck.comparison.sources.log import LogSource
from fastcheck.comparison.sources.msprobe import MsprobeSource
from fastcheck.comparison.sources.open import open_source
from fastcheck.comparison.steps.course import Course
from fastcheck.dump.options import LEVELS
from fastcheck.errors import (
    CompareError,
    ConfigError,
    check_bool,
    choice,
    local_path,
    near_matches,
    printable,
    string_list,
)
from fastcheck.notebook import block_html, fields_html, guarded_html, lines_html, table_html
from fastcheck.statistics.thresholds import Threshold, make_thresholds
from fastcheck.utils.names.msprobe import plain_api
from fastcheck.utils.private import writing
from fastcheck.utils.reading import read_json
from fastcheck.utils.text.layout import csv_text, listed, plain_text
from fastcheck.utils.text.numbers import counted, format_shape, format_steps, worded

from .advice import advice_of
from .block import Kind, Phase, Source
from .layout import Layout, find_layout
from .measure import PairState
from .names import Name, Renamed, Renaming
from .nested_diff import (
    Setting,
    alike_ranks,
    differing_settings,
    of_each_rank,
    without_implementations,
)
from .questions import ACCEPTABLE, Answer, Questions
from .render import sections
from .result import Result
from .row import COLUMNS, Row
from .run import BlockComparison, differing_names
from .split import find_split
from .tally import COMPUTED, Tally


def expects_bits(
    actual: Source, reference: Source, settings: Mapping[Phase, Optional[list[Setting]]]
) -> bool:
    """True if both sides were computed by the same code: environments that are known and equal, and
    as many modules compiled. If not, rounding may differ anywhere.
    """
    if actual.kind.family != "run":
        return True
    return settings.get(Phase.ENVIRONMENT) == [] and (
        actual.compiled_modules == reference.compiled_modules
    )


_PARTS = 6
#: Notes by the field of a tally; the text behind a bar is added where there are several. Of words
#: in brackets the first are those for one.
_NOTES = {
    "reordered": "{count} call[|s] came in another order among the calls of [its|their] module",
    "moved": "{count} input[ was|s were] read by another module first, equal to the bit",
    "merged": "{count} tensor[|s] that one side has in parts [is|are] compared by [its|their] "
    "counts, sums and extremes, which do not tell the order of the elements; a "
    "Dumper(tensors=True) of both sides does",
    "tied": "{count} tensor[|s] of one side alone [is|are] equal to the bit to another of that "
    "side: {first}[|, and others]. Some formats hold tied weights once; --accept missing takes "
    "[it|them] as equal",
    "padded": "the padding behind the vocabulary is left out: {first}|, and of {rest} more",
    "grouped": "{first}|, as {rest} others",
    "unsteady": "{count} tensor[ is|s are] not deterministic, as repeat= shows, and [is|are] left "
    "out: {first} first",
    "rescheduled": "{count} tensor[|s] of operators differ[s|] or [is|are] on one side alone, and "
    "the gradients of all parameters agree: another schedule of the same step",
    "in_parts": "{count} gradient[|s] of what modules take and return come[s|] another number of "
    "times on the two sides, {first} first: of each, the sum over all times agrees, as do the "
    "gradients of all parameters",
    "untold": "from {count} of these, {first} first, no gradient of a parameter is computed: "
    "[its|their] elements may stand in another order. A Dumper(tensors=True) of both sides tells; "
    "--accept missing takes [it|them] as equal",
    "resized": "{count} tensor[|s] between modules [has|have] another number of elements, {first} "
    "first, and the loss and the gradients of all parameters agree: what one side has more is in "
    "none of them",
    "scaled": "{first} differs: the loss of the step, which is computed from it, and the "
    "gradients of all parameters agree|; and {rest} more",
    "recomputed": "{count} tensor[ is|s are] recomputed otherwise than computed first: {first}",
    "strays": "the ranks do not have the same weights: {first} is not that of the first rank|, "
    "and {rest} more",
    "absent": "{count} tensor[|s] between modules [is|are] read in one layout alone: not compared",
    "parts": "{count} gradient[|s] of inputs differ[s|] and [is|are] not compared: msprobe has "
    "what one module adds to a gradient, fastcheck the whole of it",
    "scales": "the loss scale {first}: gradients that carry it are divided by it, and their "
    "statistics are compared|; and {rest} more pairs of scales",
    "rates": "{first} is of groups of parameters that are divided in another way: the smallest and "
    "the largest rate agree",
    "clipped": "gradients of parameters are read before they are clipped in {first}, and after in "
    "the other: they are multiplied by what clipping makes of them, and their statistics are "
    "compared",
    "small": "{count} gradient[ is|s are] no larger beside the largest of [its|their] step than "
    "rounding, {first} first: [it is|they are] not counted as different, nor [is the update that "
    "follows|are the updates that follow] from [it|them]",
    "cancelled": "{count} gradient[ is a sum|s are sums] whose terms cancel, {first} first: "
    "[its|their] error is relative to what was summed",
}


def notes_of(tally: Tally, actual: Source, reference: Source) -> list[str]:
    """The notes of a report, which follow its answers."""
    notes = []
    recorded = [
        f"{key} is {actual.options[key]} in actual and {value} in reference"
        for key, value in reference.options.items()
        if key in actual.options and actual.options[key] != value
    ]
    if recorded:
        notes.append(
            f"the two were recorded with other options of install(): {'; '.join(recorded)}"
        )
    levels = (side.options.get("level") for side in (actual, reference))
    is_of_one_level = len({level for level in levels if level is not None}) < 2
    for kind, text in _NOTES.items():
        if kind == "rescheduled" and not is_of_one_level:
            continue
        names = tally.noted[kind]
        count, first = tally.counts[kind] + len(names), next(iter(names), "")
        text, _, more = worded(text, count).partition("|")
        if count:
            text += more if count > 1 else ""
            notes.append(text.format(count=f"{count:,}", first=first, rest=f"{count - 1:,}"))
    if tally.lookalikes and is_of_one_level:
        mine, other = next(iter(tally.lookalikes.items()))
        count = len(tally.lookalikes)
        text = (
            "{:,} name[|s] only in actual hold[s|] what [a name|names] only in reference hold[s|]"
        )
        notes.append(
            f"{worded(text, count).format(count)}: {mine} is {other}{', ...' * (count > 1)}. If "
            f"{'it is' if count == 1 else 'they are'} renamed, give rename= (--rename FILE)"
        )
    if parts := list(tally.noted["parts_of"]):
        shown, rest = "; ".join(parts[:_PARTS]), len(parts) - _PARTS
        notes.append(f"parts of fused tensors: {shown}" + (f"; {rest:,} more" if rest > 0 else ""))
    for (mine, other), count in tally.dtypes.items():
        text = f"{{:,}} tensor[ is|s are] {mine} in actual and {other} in reference"
        notes.append(worded(text, count).format(count))
    if tally.counts["without_bits"]:
        notes.append(
            "not all tensors have checksums or values on both sides: of the others, the "
            "statistics are compared"
        )
    if few := tally.counts["without_statistics"]:
        notes.append(
            f"of {counted(few, 'pair')} of tensors a side has the counts alone (of zeros, signs, "
            "NaN, Inf): "
            'other numbers may differ unseen. record="full" has all'
        )
    return notes + _seeds(actual, reference) + _compiled(actual, reference)


def _compiled(actual: Source, reference: Source) -> list[str]:
    counts = (actual.compiled_modules, reference.compiled_modules)
    if counts[0] == counts[1]:
        return []
    return [
        f"{counted(counts[0], 'module')} ran compiled in actual and {counts[1]:,} in reference: "
        "equality to the bit is not expected"
    ]


def _seeds(actual: Source, reference: Source) -> list[str]:
    """A note, not a setting: a run without random numbers is the same under any seed."""
    seeds = []
    for side in (actual, reference):
        environment = side.settings.get(Phase.ENVIRONMENT)
        where = environment.get("where") if isinstance(environment, dict) else None
        seeds.append(where.get("initial_seed") if isinstance(where, dict) else None)
    if None in seeds or seeds[0] == seeds[1]:
        return []
    return [f"torch's seeds are {seeds[0]} in actual and {seeds[1]} in reference"]


class CsvRows:
    """Writes rows to a file. CompareError when that can't be written."""

    def __init__(self, path: str) -> None:
        self._path = path
        with self._naming():
            self._file: TextIO = open(path, "w", newline="", encoding="utf-8")  # noqa: SIM115  (closed by close())
        self._writer = csv.writer(self._file)
        self._writer.writerow(COLUMNS)

    def write(self, row: Row) -> None:
        values = row.to_dict()
        with self._naming():
            self._writer.writerow([_cell(values[column]) for column in COLUMNS])

    def close(self) -> None:
        with self._naming():
            self._file.close()

    def _naming(self) -> AbstractContextManager[None]:
        return writing(self._path, "the CSV", CompareError)


def _cell(value: object) -> object:
    if value is None:
        return ""
    if isinstance(value, list):
        return format_shape(value)
    if isinstance(value, float):
        return repr(value)
    return csv_text(printable(value)) if isinstance(value, str) else value


class Comparison(Result):
    """A Result whose ``str()`` is the report."""

    def __str__(self) -> str:
        return plain_text(sections(self))

    def _repr_html_(self) -> str:
        """HTML for notebooks: the verdict, the answers, and the first rows that differ. Reads
        nothing; never raises.
        """
        return guarded_html(self, lambda: _comparison_html(self))


def _comparison_html(comparison: Comparison) -> str:
    first = comparison.first and comparison.first.row
    place = first and f"{first.name}, step {first.step:,}, error {first.error:.3g}"
    fields: list[tuple[str, object]] = [
        ("actual", comparison.actual),
        ("reference", comparison.reference),
        ("compared", comparison.kind),
        ("first difference", place),
        ("losses drift from step", comparison.drifts_from),
    ]
    answers = [[answer.question, answer.answer, answer.text] for answer in comparison.answers]
    bad = [answer.answer == "no" for answer in comparison.answers]
    rows: list[list[object]] = [
        [row.step, row.name, row.phase.name.lower(), row.state.name.lower(), row.error, row.reason]
        for row in comparison.rows
    ]
    header = ["step", "tensor", "question", "state", "error", "reason"]
    return block_html(
        comparison.verdict,
        fields_html(fields),
        table_html(["question", "equal", ""], answers, bad),
        table_html(header, rows, total=len(comparison.rows) + comparison.more_rows),
        lines_html(comparison.notes),
    )


Rename = Union[Renamed, os.PathLike[str]]
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
    repeat: Any = None,
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
            in memory: a tensor, a state_dict, a module, or what those two return; or a list of
            checkpoints, one of each rank.
        rename: names of ``actual`` and what they are called in ``reference``: a mapping, the path
            of a JSON file with a mapping, or ``"mindspore"`` (gamma, beta, moving_mean,
            moving_variance), ``"megatron"`` or ``"vllm"`` (against Hugging Face's names). A rule is
            about a path and all below it; ``*`` stands for one part, ``**`` at the beginning for
            any. A list has the parts of a fused module: ``{"**.qkv": ["**.q", "**.k", "**.v"]}``.
        accept: what may differ: ``"environment"``, ``"hyper-parameters"``, ``"batches"``,
            ``"weights"``, ``"dtype"``, ``"order"`` (only a checksum differs), ``"missing"``.
        exact: everything has to be equal to the bit, as far as both sides have checksums or
            values; of the rest the statistics have to be equal within the thresholds.
        thresholds: the relative error allowed of some dtypes, instead of those in
            ``docs/compare.md``: ``{"bfloat16": 0.05}``.
        ask_all: continue after the first "no".
        csv: a file to write every pair to that is not equal to the bit; a file that is there is
            replaced, unless it belongs to a side.
        progress: called with (done, total) blocks.
        trust: load files that torch.load only reads with ``weights_only=False``. That runs code
            in the file.
        steps: which step of ``actual`` is compared with which of ``reference``: ``"3:7"``,
            ``"3:7,4:8"`` or ``[(3, 7)]``. Of two different steps all questions are asked, and what
            did not change is listed. ``"6-:0-"``: where each side begins, for a run that continues
            another. Left out: equal numbers, or the only step of each side; a run that begins with
            the weights or the batch of a later step of the other is compared from there.
        repeat: a second run of the program of ``reference``. What differs between these two is not
            deterministic: it is left out where actual is no more than 4 times as far away.
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
    accepted = frozenset(
        choice("accept=", name, ACCEPTABLE) for name in string_list("accept=", accept)
    )
    for option, value in (("exact=", exact), ("ask_all=", ask_all), ("trust=", trust)):
        check_bool(option, value)
    if not isinstance(loss_drift, Real) or not loss_drift >= 0:
        raise ConfigError("loss_drift= must be 0 or more", expected="0.01", got=repr(loss_drift))
    if progress is not None and not callable(progress):
        expected = "a function of two ints: blocks that are done, and all"
        raise ConfigError("progress= can't be called", expected=expected, got=repr(progress))
    csv = None if csv is None else local_path("csv=", csv)
    html = None if html is None else local_path("html=", html)
    limits = make_thresholds(thresholds)
    renaming = Renaming.of(_mapping(rename))
    sides = (open_source(actual, "actual", trust), open_source(reference, "reference", trust))
    _check_kinds(*sides)
    _check_levels(*sides)
    look_through_wrappers(*sides)
    if rename is None:
        renaming = unwrapped(*sides)
    _rename_modules(sides, renaming)
    pairing = pair_steps(*sides, steps)
    layout = None
    if pairing.places and not pairing.is_shifted:
        layout = find_layout(*sides, pairing.starts, (renaming, renaming.of_reference()))
    settings, groups = _settings(*sides, renaming, pairing, layout)
    for what, path in (("CSV", csv), ("page", html)):
        if path is not None:
            _check_place(what, path, actual, reference)
    rows = None if csv is None else CsvRows(csv)
    try:
        course = Course(sides, limits, accepted, None if rows is None else rows.write)
        runner = BlockComparison(course, renaming)
        runner.tally.unchanged = {} if pairing.is_shifted else None
        runner.reads_rates = groups is None
        if not pairing.is_shifted and pairing.places:
            course.split = find_split(*sides, pairing.starts, renaming)
        if course.split is not None:
            pairing = without_other_ranks(pairing, _SPLIT.format(course.split.text))
        if repeat is not None:
            course.unsteady = _unsteady(repeat, sides[1], pairing, limits, trust)
        if layout is not None:
            runner.layout = layout
            pairing = without_other_ranks(pairing, _TOGETHER.format(layout.text))
        gathered = None if html is None else Gathered(pairing, sides)
        course.observer = None if gathered is None else gathered.take
        _compare_blocks(runner, pairing, progress)
        _find_beginning(runner, pairing, sides, (renaming, renaming.of_reference()))
    finally:
        if rows is not None:
            rows.close()
    _check_common(runner, sides)
    renaming.check_used()
    is_alike = not (course.split or layout or course.unsteady)
    questions = Questions(
        sides[1].kind if sides[0].kind is sides[1].kind else Kind.LOG,
        runner.tally,
        settings,
        accepted,
        exact,
        ask_all or pairing.is_shifted,
        expects_bits=is_alike and expects_bits(*sides, settings),
        is_partial=any(side.is_partial for side in sides),
        is_split=course.split is not None,
    )
    comparison = _result(questions, sides, pairing, loss_drift)
    if html is not None and gathered is not None:
        write_comparison(html, comparison, gathered, runner.names)
    return comparison


def _rename_modules(sides: tuple[Source, Source], renaming: Renaming) -> None:
    for side, own in zip(sides, (renaming, renaming.of_reference())):
        side.modules = {own(path): held for path, held in side.modules.items()}
        side.classes = {own(path): kind for path, kind in side.classes.items()}
        side.called = frozenset(map(own, side.called))


def _result(
    questions: Questions, sides: tuple[Source, Source], pairing: Pairing, loss_drift: float
) -> Comparison:
    """The answers to the questions, with what the run over the blocks has found besides."""
    tally, kind, answers = questions.tally, questions.kind, questions.answers()
    is_run = kind.family == "run"
    # Not before the run: a source notes what it could not read of a block.
    notes = [*sides[0].notes, *sides[1].notes, *pairing.notes, *pairing.other_ranks]
    notes += notes_of(tally, *sides)
    losses = tuple(tally.losses[step] for step in sorted(tally.losses))
    inexact = COMPUTED if is_run else (Phase.WEIGHTS, Phase.UPDATE)
    advice = advice_of(questions, answers, sides, pairing.starts) if is_run else ()
    return Comparison(
        actual=sides[0].title,
        reference=sides[1].title,
        kind=kind.value,
        verdict=_overall_verdict(questions, answers),
        answers=answers,
        first=questions.first,
        first_inexact=tally.first(tally.firsts.inexact, inexact),
        expects_bits=questions.expects_bits,
        is_partial=questions.is_partial,
        leaves_out=pairing.leaves_out_steps or bool(pairing.other_ranks),
        advice=tuple(advice),
        growth=tuple(tally.growth[step] for step in sorted(tally.growth)),
        counts={
            phase.name.lower(): {state.name.lower(): n for state, n in sorted(counts.items())}
            for phase, counts in tally.states.items()
            if counts
        },
        missing=tuple(tally.missing.values()),
        rows=tuple(tally.rows),
        more_rows=tally.counts["rows"],
        steps=tuple(sorted({step for _, step, _ in pairing.places})),
        unchanged=tuple(name for name, is_same in (tally.unchanged or {}).items() if is_same),
        losses=losses,
        drifts_from=next((loss.step for loss in losses if loss.error > loss_drift), None),
        notes=tuple(dict.fromkeys(notes)),
    )


def _mapping(rename: Rename) -> Renamed:
    """Reads the mapping file, if it is such a file: JSON, {"name in actual": "name in
    reference"}.
    """
    if rename is None or isinstance(rename, Mapping):
        return rename
    path = local_path("rename=", rename, "a mapping of names, or the path of a JSON file with one")
    if not os.path.exists(path) and not path.endswith(".json") and os.sep not in path:
        return path
    try:
        mapping = read_json(path)
        if not isinstance(mapping, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise ConfigError(
            "the mapping file can't be read",
            expected='a JSON object: {"name in actual": "name in reference"}',
            got=f"{path}: {getattr(error, 'strerror', None) or error}",
        ) from error
    return mapping


def unwrapped(actual: Source, reference: Source) -> Renaming:
    """Takes off a wrapper that one of two logs has around its model: that of
    DistributedDataParallel, of torch.compile.
    """
    if not (isinstance(actual, LogSource) and isinstance(reference, LogSource)):
        return Renaming({})
    prefixes = matching_prefixes(actual.parameters, reference.parameters)
    rules = [{prefix[:-1]: ""} if prefix else {} for prefix in prefixes]
    for side, source, prefix in zip(("actual", "reference"), (actual, reference), prefixes):
        if prefix:
            source.notes.append(f"{side}: names are those below {prefix[:-1]}")
    return Renaming(rules[0], None, rules[1])


def _check_place(what: str, path: str, actual: Any, reference: Any) -> None:
    """Raises ConfigError for a file that is compared, which may be mapped at that. A page may lie
    in a log, under a name that no log has.
    """
    for side in (actual, reference):
        if isinstance(side, (str, os.PathLike)) and _belongs_to(path, os.fspath(side)):
            if what == "page" and path.endswith((".html", ".htm")):
                continue
            raise ConfigError(f"the {what} would replace a file that is compared: {path}")


def _belongs_to(path: str, side: str) -> bool:
    """True if ``path`` is an existing file that is the side itself or lies below it."""
    real, place = os.path.realpath(path), os.path.realpath(side)
    if not os.path.isfile(real):
        return False
    return os.path.samefile(real, place) or real.startswith(os.path.join(place, ""))


def _check_kinds(actual: Source, reference: Source) -> None:
    if actual.kind.family != reference.kind.family:
        raise CompareError(
            "these two are of different kinds",
            expected="two logs or dumps, two checkpoints, two environments, or two inventories",
            got=f"{actual.kind.value} ({actual.title}) and {reference.kind.value} "
            f"({reference.title})",
        )


def _check_levels(*sides: Source) -> None:
    """Raises CompareError for API calls on one side, and operators or modules on the other; of
    dumps of API calls, one of them msprobe's, it leaves out functions that msprobe does not dump.
    """
    ours = [source for source in sides if isinstance(source, DumpSource)]
    theirs = [source for source in sides if isinstance(source, MsprobeSource)]
    levels = {source.title: source.levels for source in ours}
    levels.update((source.title, source.levels()) for source in theirs)
    if len(levels) == 2 and all(levels.values()):
        (title, mine), (other_title, other) = levels.items()
        if "api" in mine | other and not mine & other:
            raise CompareError(
                "these two are dumps of different levels",
                expected='the same level of both: Dumper(level="op"), Dumper(level="module") '
                "(msprobe's L0), or Dumper(level=\"api\") (msprobe's L1)",
                got=f"{LEVELS[min(mine)]} in {title}, {LEVELS[min(other)]} in {other_title}",
                hint="an API call runs several operators, and a module makes several API calls",
            )
    if not (ours and theirs and all("api" in found for found in levels.values())):
        return
    sites, functions = ours[0].api_sites(), theirs[0].functions_called()
    theirs[0].parameters = ours[0].parameters = parameters_among(sites)
    ours[0].functions = functions
    if any(site.role == "grad_input" for site in sites):
        ours[0].notes.append(
            "gradients of inputs of API calls are not compared: those that msprobe dumps are of "
            "the last operator of the call"
        )
    if others := sorted({s.op for s in sites if s.op and plain_api(s.op) not in functions}):
        ours[0].notes.append(
            f"calls of {len(others):,} functions that the msprobe dump has none of are not "
            f"compared: {listed(others, _PARTS, ', ...')}"
        )


def _settings(
    actual: Source,
    reference: Source,
    renaming: Renaming,
    pairing: Pairing,
    layout: Optional[Layout],
) -> tuple[dict[Phase, Optional[list[Setting]]], Optional[CommonGroups]]:
    """The settings that differ; and the groups of parameters, where the optimizers of the two sides
    have other groups.
    """
    settings: dict[Phase, Optional[list[Setting]]] = {}
    groups = None
    for phase in (Phase.ENVIRONMENT, Phase.HYPERPARAMETERS):
        mine, other = (
            _setting_at(side, phase, start)
            for side, start in zip((actual, reference), pairing.starts)
        )
        own = renaming
        if layout is not None and phase is Phase.HYPERPARAMETERS:
            mine, other = layout.settings(0, mine), layout.settings(1, other)
            own = Renaming({})
        mine, other = alike_ranks(mine, other)
        if mine is not None and other is not None:
            if phase is Phase.HYPERPARAMETERS and actual.kind.family == "run":
                held = mine["optimizers"], other["optimizers"]
                groups = common_groups(*held, (own, own.of_reference()))
                if groups is not None:
                    held = regrouped(held[0], groups, 0), regrouped(held[1], groups, 1)
                mine, other = ({"optimizers": optimizers} for optimizers in of_each_rank(*held))
            settings[phase] = differing_settings(phase, mine, other, own)
            if actual.kind.family == "run":
                settings[phase], ways = without_implementations(settings[phase] or [])
                reference.notes += ways
            if phase is Phase.HYPERPARAMETERS:
                parts = _parted_schedules(actual, reference, pairing, groups)
                settings[phase] = [*(settings[phase] or []), *parts]
        elif actual.kind is Kind.CHECKPOINT and (mine is None) == (other is None):
            settings[phase] = []
        else:
            settings[phase] = None
    return settings, groups


def _setting_at(side: Source, phase: Phase, step: int) -> Any:
    """Hyper-parameters change by plan: what they are at the step at which a comparison begins."""
    settings = side.settings.get(phase)
    if phase is Phase.HYPERPARAMETERS and settings and step and isinstance(side, LogSource):
        return {"optimizers": described_at(settings["optimizers"], side.schedules, step)}
    return settings


def _parted_schedules(
    actual: Source, reference: Source, pairing: Pairing, groups: Optional[CommonGroups]
) -> list[Setting]:
    sides = [side for side in (actual, reference) if isinstance(side, LogSource)]
    if len(sides) < 2 or not pairing.places:
        return []
    mine, other = pairing.starts
    bases = tuple(
        _setting_at(side, Phase.HYPERPARAMETERS, start)["optimizers"]
        for side, start in zip(sides, pairing.starts)
    )
    last = max(
        step - (not all(side.is_updated(at, rank) for side, at in zip(sides, (mine, step))))
        for mine, step, rank in pairing.places
    )
    schedules = [side.schedules for side in sides]
    if mine or other:
        schedules = [shifted(schedules[0], mine, other - mine), shifted(schedules[1], other, 0)]
    if groups is not None:
        bases = tuple(regrouped(base, groups, side) for side, base in enumerate(bases))
        schedules = [
            regrouped_schedules(schedule, groups, side) for side, schedule in enumerate(schedules)
        ]
    return parted(schedules[0], schedules[1], (bases[0], bases[1]), last)


_SPLIT = (
    "the batch is split in another way: {}. What follows its parts (outputs of modules, their "
    "gradients, buffers) is not compared; parameters, their gradients, updates and the loss of the "
    "whole step are"
)
_TOGETHER = "{} are put together"


def without_other_ranks(pairing: Pairing, note: str) -> Pairing:
    """The side with its lowest rank only, under which the other ranks are merged. ``note``: says
    how.
    """
    lowest = min(rank for _, _, rank in pairing.places)
    places = [place for place in pairing.places if place[2] == lowest]
    notes = [*pairing.notes, note]
    return Pairing(places, False, notes, leaves_out_steps=pairing.leaves_out_steps)


def _unsteady(
    repeat: Any, reference: Source, pairing: Pairing, limits: Sequence[Threshold], trust: bool
) -> dict[Name, float]:
    """The largest error between two runs of the reference's program, by name."""
    again = open_source(repeat, "repeat", trust)
    _check_kinds(again, reference)
    if isinstance(again, DumpSource) and isinstance(reference, DumpSource):
        again.functions, again.parameters = reference.functions, reference.parameters
    if isinstance(again, MsprobeSource) and isinstance(reference, MsprobeSource):
        again.parameters = reference.parameters
    there = set(again.places())
    places = [(step, step, rank) for _, step, rank in pairing.places if (step, rank) in there]
    if not places and again.places():
        raise CompareError(
            "the second run of the reference's program has none of these steps",
            expected=format_steps(sorted({step for _, step, _ in pairing.places})),
            got=format_steps(sorted({step for step, _ in there})),
        )
    course = Course((again, reference), limits, frozenset())
    runner = BlockComparison(course, Renaming({}))
    return differing_names(runner, places)


def _compare_blocks(
    runner: BlockComparison, pairing: Pairing, progress: Optional[Progress]
) -> None:
    for done, (mine, other, rank) in enumerate(pairing.places):
        if progress is not None:
            progress(done, len(pairing.places))
        runner.compare(mine, other, rank)
    if progress is not None and pairing.places:
        progress(len(pairing.places), len(pairing.places))


def _find_beginning(
    runner: BlockComparison,
    pairing: Pairing,
    sides: tuple[Source, Source],
    renamings: tuple[Renaming, Renaming],
) -> None:
    """Looks for the first batches of a side that continues the other in the first step of that."""
    late = int(pairing.starts[1] > pairing.starts[0])
    if pairing.starts[1 - late] or not pairing.starts[late] or runner.course.split or runner.layout:
        return
    for rank, batches in runner.tally.batches.items():
        step = min(step for step, its in sides[late].places() if its == rank)
        if step < pairing.starts[late]:
            block = sides[late].block(step, rank, runner.names, renamings[late], False)
            batches.begin(late, block)


def _check_common(runner: BlockComparison, sides: tuple[Source, Source]) -> None:
    if sides[0].kind.family in (Kind.ENVIRONMENT.value, Kind.INVENTORY.value):
        return
    pairs = sum(
        counts[state]
        for counts in runner.tally.states.values()
        for state in PairState
        if state not in (PairState.ONLY_ACTUAL, PairState.ONLY_REFERENCE)
    )
    if pairs:
        return
    ours, theirs = (
        [entry.name for entry in runner.tally.missing.values() if entry.state is state]
        for state in (PairState.ONLY_ACTUAL, PairState.ONLY_REFERENCE)
    )
    names = (
        f"{', '.join(ours[:3])}, ... in actual and {', '.join(theirs[:3])}, ... in reference"
        if ours or theirs
        else f"{_span(sides[0])} in actual and {_span(sides[1])} in reference"
    )
    if not (ours or theirs) and sides[0].places() == sides[1].places():
        raise CompareError(
            "the two sides hold no tensors",
            expected="records of tensors, of which some have the same name and step",
            got=f"{sides[0].title} and {sides[1].title}, with none",
            hint="a full disk ends a dump or a log; the run has warned of it",
        )
    near = near_matches(ours[0], theirs, 1) if ours and theirs else []
    alike = runner.tally.lookalikes.get(ours[0]) if ours else None
    near = near if alike is None else [alike]
    raise CompareError(
        "the two sides have nothing in common",
        expected="at least one tensor of the same name and step on both sides",
        got=names,
        hint="give rename= (--rename FILE) names that differ"
        + (f", perhaps of {ours[0]} to {near[0]}" if near else ""),
    )


def _span(source: Source) -> str:
    return format_steps(sorted({step for step, _ in source.places()}))


def _overall_verdict(questions: Questions, answers: tuple[Answer, ...]) -> str:
    given = {answer.answer for answer in answers}
    if given & {"no", "partly"} or questions.first is not None:
        return "different"
    all_same = all(
        state is PairState.SAME
        for counts in questions.tally.states.values()
        for state, n in counts.items()
        if n
    )
    settled = not any(questions.settings.values()) and not questions.tally.missing
    return "identical" if all_same and settled else "equal"
