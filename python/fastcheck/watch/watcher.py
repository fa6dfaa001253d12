"""The Watcher: takes the records of some steps, and returns what is unusual in them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple, Optional

import numpy as np

from fastcheck.log.step_table import StepRow
from fastcheck.record.format import DTYPES
from fastcheck.record.site import SiteTable
from fastcheck.utils.text.numbers import format_number

from .causes import CAUSES, BatchOf, Causes, Change, FirstMovers
from .columns import Columns
from .event import Mover, WatchEvent
from .invariant_numbers import Invariants
from .invariants import NUMBER_RULES, TENSOR_RULES
from .movers import Movers
from .numbers import RANGES, Number, Numbers, gradient_rms
from .options import Watch
from .program import Program
from .rules import (
    NumberRule,
    Rule,
    TensorRule,
    is_jump,
    loss_rises,
    never,
    norm_spikes,
    reaches_weights,
    update_is_unusual,
)
from .signals import (
    ABS_MAX,
    GRADIENT,
    INPUT,
    PART,
    SignalReader,
    Signals,
    StepOver,
    inputs_by_step,
)
from .view import BITS, Past, StepsView

# A forecast whose end is so many times as far as its beginning names the beginning alone.
_WIDE = 10.0

# After an event of a kind there is none of the same kind for so many steps, but that a warning may
# come after what did not warn.
_PAUSE = 32
# So many movers, and tensors with the same event, are in the text.
_NAMED = 3
_MOST_EVENTS = 4096
#: Numbers that don't enter their range where this holds: those that have one.
_OUTSIDE = {"loss": loss_rises, "gradient_norm": norm_spikes, "update_size": update_is_unusual}

#: The rules of each number, with their places in NUMBER_RULES.
_RULES_OF: dict[str, list[tuple[int, NumberRule]]] = {}
for _at, _rule in enumerate(NUMBER_RULES):
    for _name in _rule.names:
        _RULES_OF.setdefault(_name, []).append((_at, _rule))
# The states of the rules of RANGES, of those of NUMBER_RULES; and where none of them holds.
_of_ranges = itemgetter(*(at for name in RANGES for at, _ in _RULES_OF[name]))
_IDLE = (0, False)
_ALL_IDLE = _of_ranges([_IDLE] * len(NUMBER_RULES))


class _Fired(NamedTuple):
    """A rule whose condition has held long enough, and the places of the tensors of which."""

    rule: TensorRule
    at: np.ndarray


class _Block(NamedTuple):
    """Some steps that are judged together, and what is made of all of them at once: by step,
    ``fired``, the rules of tensors that have held for long enough, ``inputs`` (inputs_by_step()),
    ``have_left``, whether a tensor is out of its range, and ``numbers`` without a range, of weights
    and of the loop.
    """

    view: StepsView
    fired: Sequence[Sequence[_Fired]]
    inputs: Sequence[tuple[Sequence[float], Sequence[int]]]
    have_left: Sequence[bool]
    numbers: Sequence[tuple[Sequence[Number], Sequence[Number]]]


class _Shown(float):
    """A number in a template: without a format as format_number() has it."""

    def __format__(self, spec: str) -> str:
        return super().__format__(spec) if spec else format_number(float(self))


class Pauses:
    """The steps in which events of each kind came last, by whether they warned; of what warned also
    how far it was from what is usual.
    """

    def __init__(self) -> None:
        self._last_of: dict[tuple[str, bool], int] = {}
        self._farthest: dict[str, float] = {}

    def warns_again(self, step: int, rule: NumberRule, rise: float, window: int) -> bool:
        """True if a rule may warn again: a window after its last warning, or sooner for a spike
        that is so many times as far.
        """
        is_late = step - self._last_of.get((rule.kind, True), -window) >= window
        is_farther = rise >= rule.again * self._farthest.get(rule.kind, math.inf)
        if is_late or is_farther:
            self._farthest[rule.kind] = rise
            self._last_of.pop((rule.kind, True), None)
        return is_late or is_farther

    def is_recent(self, step: int, kind: str, warns: bool) -> bool:
        """True if this event comes too soon after an event of its kind; if it warns: after an event
        that did so too. Notes it if not: what nobody sees makes no pause.
        """
        past = [self._last_of.get((kind, warned)) for warned in (True, False)[: 2 - warns]]
        if any(last is not None and step - last < _PAUSE for last in past):
            return True
        self._last_of[kind, warns] = step
        return False


def _reaches(near: float, far: float) -> str:
    """The forecast in words: in so many steps at the earliest and at the latest."""
    if far > _WIDE * max(near, 1.0):
        late = f"in about {near:.0f} steps, or much later"
        return f"may reach {late if near >= 1.5 else 'at any step from now on'}"
    if far < near + 1:
        return f"reaches in about {f'{near:.0f} steps' if near >= 1.5 else 'a step'}"
    return f"reaches in about {near:.0f} to {far:.0f} steps"


class Watcher:
    """Judges the steps of one rank by the rules, and makes the events. The rank's sites are found
    in ``sites`` by number. ``is_whole``: all modules are observed. Not thread-safe.

    The work is a few operations on arrays over all tensors of the steps that are given together: no
    tensor is read, and no device is waited for.
    """

    def __init__(
        self,
        options: Watch,
        sites: SiteTable,
        rank: int = 0,
        is_whole: bool = True,
        batch_of: BatchOf = lambda step: None,
    ) -> None:
        window, warm_up = options.window, options.warm_up
        self._options = options
        self._rank = rank
        self._reader = SignalReader(sites, is_whole)
        self._past = Past(options.threshold, window, warm_up, options.horizon)
        self._numbers = Numbers(options.threshold, window, warm_up)
        #: The causes of the events.
        self.causes = Causes(sites, Movers(sites), batch_of)
        # The number of steps in a row in which each of TENSOR_RULES has held, and if it was
        # reported.
        nothing = np.zeros((len(TENSOR_RULES), 1), np.int64)
        self._held = Columns(run=nothing, is_reported=nothing.astype(bool))
        # The same of NUMBER_RULES.
        self._numbers_held = [_IDLE] * len(NUMBER_RULES)
        self._pauses = Pauses()
        self._program = Program()
        self._invariants = Invariants(sites)
        self._limit: Optional[float] = None
        #: The youngest 4,096 events, oldest first.
        self.events: deque[WatchEvent] = deque(maxlen=_MOST_EVENTS)
        #: The number of events, and of those that warn.
        self.count = self.warning_count = 0

    def add(self, *steps: StepOver) -> list[WatchEvent]:
        """Steps that are over, oldest first: of each its row in the table of steps, and its
        records. Their events.
        """
        now = self._reader.read(steps)
        if now is None:
            return []
        for number, (_, chunks) in zip(now.steps.tolist(), steps):
            for other in self._invariants.recomputed.of_step(chunks):
                self._program.noticed(number, other)
        self._held.grow(int(now.sites.max()) + 1)
        view = self._past.take(now)
        are_observed: list[bool] = np.logical_or.reduce(now.is_read, 1).tolist()
        self.causes.begin(now)
        block = _Block(
            view,
            self._fired(view),
            inputs=inputs_by_step(now),
            have_left=np.logical_or.reduce(view.outside, (0, 2)).tolist(),
            numbers=self._numbers_of(now, are_observed),
        )
        events = []
        for begin in range(0, len(now.steps), PART):
            of_part = are_observed[begin : begin + PART]
            part = [k for k, is_observed in enumerate(of_part, begin) if is_observed]
            if part:
                self._numbers.part_began(part)
                for k in part:
                    events += self._step(block, k)
                self._numbers.part_ended()
        self._note(events)
        return events

    def add_facts(self, step: int) -> list[WatchEvent]:
        """The events of what was noticed in a step in which the run stops, and before it."""
        events = self._of_numbers(step, 0, self._program.take_noticed(step, None))
        self._note(events)
        return events

    def _note(self, events: Sequence[WatchEvent]) -> None:
        self.events.extend(events)
        self.count += len(events)
        self.warning_count += sum(event.is_warning for event in events)

    @property
    def norm_limit(self) -> Optional[float]:
        """The largest gradient norm that Watch(skip_above=) allows, from the usual norm of all
        gradients, or the last known norm while a new range is learned. None: no limit yet.
        """
        usual, factor = self._numbers.usual_norm, self._options.skip_above
        if usual is not None and factor is not None:
            self._limit = factor * usual
        return self._limit

    def setting(self, name: str, before: Optional[float], value: float) -> None:
        """A number of the optimizer or of clipping has this value from the open step on.
        ``before``: None for its first. ``name``: as in the log, such as
        ``optimizers[0].groups[0].betas[1]``.
        """
        self._program.setting(name, before, value)

    def noticed(self, step: int, name: str, value: float, about: str) -> None:
        """A number of the program that is in no record, as one of NUMBER_INVARIANTS takes it."""
        if name == "norm_threshold":
            self._invariants.clipping.noticed(step, value)
        else:
            self._program.noticed(step, Number(name, value, full_name=about))

    def last_batches(self, before: int, count: int) -> tuple[int, list[int]]:
        """The step of the last batch before a step, and the checksums of so many up to it."""
        return self._invariants.batches.last(before, count)

    def _fired(self, view: StepsView) -> list[list[_Fired]]:
        """The rules of tensors that have held for long enough, by step."""
        now, sites = view.now, view.now.sites
        fired: list[list[_Fired]] = [[] for _ in now.steps]
        for number, rule in enumerate(TENSOR_RULES):
            holds = rule.condition(view)
            run, is_reported = self._held["run"][number], self._held["is_reported"][number]
            count, was_reported = run[sites], is_reported[sites]
            if not any(map(np.count_nonzero, (holds, count, was_reported))):
                continue
            is_over = ~holds if rule.is_over is None else rule.is_over(view)
            for k in range(len(holds)):
                is_read = now.is_read[k]
                count = np.where(is_read, (count + 1) * holds[k], count)
                was_reported &= ~(is_over[k] & is_read)
                is_due = (count >= rule.steps) & is_read & ~was_reported
                if is_due.any():
                    was_reported |= is_due
                    # The first of them in the order of a step.
                    at = np.flatnonzero(is_due)
                    fired[k].append(_Fired(rule, at[np.argsort(now.phases[at], kind="stable")]))
            run[sites], is_reported[sites] = count, was_reported
        return fired

    def _numbers_of(
        self, now: Signals, are_observed: Sequence[bool]
    ) -> list[tuple[list[Number], list[Number]]]:
        """The numbers without a range of all steps, those of a kind of which no rule holds left
        out.
        """
        rows = [(k, row) for k, row in enumerate(now.rows) if are_observed[k] and row is not None]
        steps = [k for k, _ in rows]
        have_scaled = (now.is_scaled & now.is_of_parameter).any(axis=1).tolist()
        others = self._numbers.begin(now, steps, have_scaled)
        norms, eps, count = self._numbers.norms, self._program.eps, len(now.steps)
        clipped: list[tuple[Optional[float], float]] = [(None, 0.0)] * count
        rates = list(clipped)
        for k, row in rows:
            clipped[k] = self._invariants.clipping.of_step(norms[k], row)
            rates[k] = self._invariants.rate(row)
        growth = self._column("weight_growth", [(grown, math.nan) for grown in self._numbers.grown])
        ratios = self._column("clip_ratio", clipped)
        shares = self._column("rate_share", rates)
        sizes = self._program.beside_eps(gradient_rms(now)) if eps else [0.0] * count
        rms = self._column("gradient_rms", [(size or None, eps) for size in sizes])
        scales = [[] if scale is None else [scale] for _, scale in others]
        if not self._may_hold("loss_scale", [scale for each in scales for scale in each]):
            scales = [[]] * count
        numbers = []
        for k, (standing, _) in enumerate(others):
            skipped = [self._skipped(now.rows[k])] if now.is_limited[k] else []
            first = [*growth[k], *standing, *scales[k], *ratios[k]]
            numbers.append((first, [*shares[k], *rms[k], *skipped]))
        return numbers

    def _column(
        self, name: str, values: Sequence[tuple[Optional[float], float]]
    ) -> list[list[Number]]:
        """The number of this name with what is usual, by step; none where no rule holds of the
        least and the most, and so of none between them.
        """
        of_steps, usuals = zip(*values)
        usual = max(usuals)
        known = [value for value in of_steps if value is not None and value > 0]
        extremes = (
            [Number(name, value, usual) for value in (min(known), max(known))] if known else []
        )
        if not self._may_hold(name, extremes):
            return [[]] * len(values)
        return [[] if value is None else [Number(name, value, usual)] for value, usual in values]

    def _may_hold(self, name: str, numbers: Sequence[Number]) -> bool:
        """True if a rule holds of one of these numbers of one name, or did in the step before."""
        for at, rule in _RULES_OF[name]:
            run, is_reported = self._numbers_held[at]
            is_done = is_reported and rule.is_over is never
            if not is_done and (run or is_reported or any(map(rule.condition, numbers))):
                return True
        return False

    def _step(self, block: _Block, k: int) -> list[WatchEvent]:
        view, fired, now = block.view, block.fired[k], block.view.now
        row, step = now.rows[k], int(now.steps[k])
        changes = self._program.take_changes()
        for change in changes:
            if change.full_name and change.name != "lr":
                self._note_change(step, change)
            elif change.name == "clipped_scaled" and row is not None and row.scale:
                changes.append(Number("scaled_threshold", change.value, row.scale))
        changes += self._program.take_noticed(step, row)
        sizes, checksums = block.inputs[k]
        largest = None if row is None else row.learning_rate
        rate = self.causes.note_step(now, k, step, largest, self._program.take_rate_name(), sizes)
        _, gap = self.causes.last
        changes = [c for c in changes if c.name != "lr" or is_jump(c.usual, c.value, gap)]
        of_groups = [change for change in changes if change.name == "lr"]
        if rate is None:  # the largest of all groups is as before, or another optimizer's
            for change in of_groups:
                self._note_change(step, change)
        elif not of_groups and is_jump(rate.before, rate.after, gap):
            changes.append(Number("lr", rate.after, rate.before, full_name=rate.name))
        if block.have_left[k]:
            self.causes.movers.add(now, k, view.scores, view.outside)
        of_batch = self._invariants.of_step(now, k, step, checksums)
        first, last = block.numbers[k]
        events: list[WatchEvent] = []
        is_unusual = changes or of_batch or first or last or fired or self.causes.loss
        is_open = is_unusual or _of_ranges(self._numbers_held) != _ALL_IDLE
        if is_open or not self._numbers.are_usual(k):
            numbers = [*changes, *self._numbers.of_step(k), *first, *of_batch, *last]
            events = self._events(view, k, numbers, fired)
        self._numbers.step_ended(k)
        self.causes.step_ended(step, events)
        return events

    def _note_change(self, step: int, change: Number) -> None:
        self.causes.note_change(Change(step, change.full_name, change.usual, change.value))

    def _events(
        self, view: StepsView, k: int, numbers: Sequence[Number], fired: Sequence[_Fired]
    ) -> list[WatchEvent]:
        step = int(view.now.steps[k])
        self._note_precision(view, k, fired)
        events = self._of_numbers(step, k, numbers)
        loss_warns = any(e.kind == "loss_spike" and e.is_warning for e in events)
        for rule, at in fired:
            event = self._of_tensors(view, k, rule, at, loss_warns)
            if event is not None:
                events.append(event)
        return events

    def _of_numbers(self, step: int, k: int, numbers: Sequence[Number]) -> list[WatchEvent]:
        """The events of the rules that have held for long enough of these numbers."""
        due: list[tuple[NumberRule, Number]] = []
        for number in numbers:
            is_outside = _OUTSIDE[number.name](number) if number.name in _OUTSIDE else False
            if is_outside:
                self._numbers.is_outside(number.name, k)
            # While the loss has no range of its own, no tensor has a range that it could be
            # compared with.
            if number.name == "loss" and not math.isnan(number.usual):
                since = self.causes.loss
                if is_outside and since is None:
                    since = Mover(step, None, "loss", number.score)
                self.causes.loss = since if is_outside else None
            for at, rule in _RULES_OF.get(number.name, ()):
                holds, (run, is_reported) = rule.condition(number), self._numbers_held[at]
                run = run + 1 if holds else 0
                is_over = not holds if rule.is_over is None else rule.is_over(number)
                is_due = run >= rule.steps and (is_over or not is_reported)
                self._numbers_held[at] = run, is_due or (is_reported and not is_over)
                if is_due:
                    due.append((rule, number))
        return [event for rule, number in due if (event := self._of_number(step, rule, number))]

    def _of_number(self, step: int, rule: NumberRule, number: Number) -> Optional[WatchEvent]:
        warns = rule.warns if isinstance(rule.warns, bool) else rule.warns(number)
        rise = number.value - number.usual
        if warns and math.isfinite(rule.again):
            warns = self._pauses.warns_again(step, rule, rise, self._options.window)
        if rule.pause and self._pauses.is_recent(step, rule.kind, warns):
            return None
        text = rule.text.format(
            value=_Shown(number.value),
            usual=_Shown(number.usual),
            most=_Shown(number.most),
            name=number.full_name or number.name,
            share=f"{number.share:.0%}",
            steps=number.steps,
            # A run that stops early may have had only one.
            checks=f", in {number.value:g} checks in a row, ten updates apart"
            if number.value > 1
            else "",
        )
        origin = FirstMovers((), rule.cause)
        if number.is_jump and math.isnan(number.usual):
            origin = FirstMovers(why="; ".join(map(str, self.causes.changes_before(step))))
        elif not rule.cause:
            origin = self.causes.origin(step, rule.kind)
        return self._event(
            rule, step, warns, text, origin, value=number.value, reference=number.usual,
            score=number.score,
        )  # fmt: skip

    def _of_tensors(
        self, view: StepsView, k: int, rule: TensorRule, at: np.ndarray, loss_warns: bool
    ) -> Optional[WatchEvent]:
        now, first = view.now, int(at[0])
        step, phase = int(now.steps[k]), int(now.phases[first])
        # The gradients of a loss that is a thousand times as high are so too. That of a division by
        # an eps may meet a 0 before it comes to a weight.
        is_gradient = rule.kind == "explosion" and phase == GRADIENT
        follows = is_gradient and (loss_warns or not reaches_weights(view, k))
        warns = rule.warns and not follows
        if rule.pause:
            is_recent = self._pauses.is_recent(step, rule.kind, warns)
            if is_recent and rule.pause == "event":
                return None
            warns = warns and not is_recent
        with np.errstate(all="ignore"):
            value = float(rule.value(view)[k, first])
            usual = float(np.broadcast_to(rule.usual(view), now.is_read.shape)[k, first])
        near, far = float(view.steps_left[k, first]), float(view.most_steps_left[k, first])
        text = rule.text.format(
            value=_Shown(value),
            usual=_Shown(usual),
            dtype=DTYPES[now.code_of(k, first)].name,
            count=format_number(value * float(now.numel[k, first])),
            reaches=_reaches(near, far),
        )
        sites = [self._reader.sites[int(now.sites[place])] for place in at]
        if len(sites) > 1:
            text += ". The same holds for " + ", ".join(map(str, sites[1 : 1 + _NAMED]))
            left = len(sites) - 1 - _NAMED
            text += f" and {left:,} more tensors" if left > 0 else ""
        origin = FirstMovers((), rule.cause)
        if not rule.cause:
            origin = self.causes.origin(step, rule.kind)
            # The tensors have no ranges yet, or none has left its own.
            if not (origin.cause or origin.movers):
                origin = origin._replace(cause=CAUSES[phase][0])
                if rule.kind == "explosion":
                    is_far = now.levels[ABS_MAX, k] - view.peak[k] >= BITS
                    given = now.sites[is_far & (now.phases == INPUT)].tolist()
                    why = "the batch is at least a thousand times as large as before, too: "
                    for site in given[:1]:
                        origin = FirstMovers(cause="data", why=f"{why}{self._reader.sites[site]}")
        return self._event(
            rule, step, warns, f"{sites[0]}: {text}", origin, site=sites[0], value=value,
            reference=usual, score=math.nan, interval=(near, far) if near < math.inf else None,
        )  # fmt: skip

    def _event(
        self, rule: Rule, step: int, warns: bool, text: str, origin: FirstMovers, **fields: Any
    ) -> WatchEvent:
        text = f"step {step:,}: {text}"
        if warns and rule.advice:
            text += f". {rule.advice[0].upper()}{rule.advice[1:]}"
        if origin.movers:
            text += f". First out of its range: {origin.movers[0]}"
            if len(origin.movers) > 1:
                text += f", then {', '.join(map(str, origin.movers[1:_NAMED]))}"
        if origin.why:
            text += f"; {origin.why}"
        batch = self.causes.batch(step, origin)
        if batch is not None:
            text += f"; batch {batch}"
        fields.setdefault("site", None)
        return WatchEvent(
            step=step,
            kind=rule.kind,
            text=text,
            is_warning=warns,
            rank=self._rank,
            movers=origin.movers,
            cause=origin.cause,
            batch=batch,
            **fields,
        )

    def _note_precision(self, view: StepsView, k: int, fired: Sequence[_Fired]) -> None:
        for rule, at in fired:
            if rule.kind == "precision" and rule.cause:
                since = int(view.now.steps[k]) - rule.steps + 1
                self.causes.note_lost(view.now.sites[at].tolist(), since)

    def _skipped(self, row: Optional[StepRow]) -> Number:
        norm, limit = None if row is None else row.gradient_norm, self._limit
        if norm is not None and limit is not None and norm > limit:
            why = f"the norm of its gradients is {norm:,.4g}, above the limit of {limit:,.4g}"
        else:
            why = "a gradient is not finite, or the gradients of one optimizer are too large"
        known = math.nan if norm is None else norm, math.nan if limit is None else limit
        return Number("skipped", *known, full_name=why)
