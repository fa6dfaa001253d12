"""The Watcher: takes the records of some steps, and returns what is unusual in them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any, Callable, NamedTuple, Optional, Union

import numpy as np

from fastcheck.log.step_table import StepRow
from fastcheck.record.format import DTYPES
from fastcheck.record.site import SiteTable
from fastcheck.utils.text.numbers import format_number

from .columns import Columns
from .event import Mover, WatchEvent
from .invariants import NUMBER_RULES, TENSOR_RULES, Invariants
from .movers import GAP, NEVER, PAST, Movers
from .numbers import RANGES, Number, Numbers, gradient_rms
from .options import Watch
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
    ACTIVATION,
    BUFFER,
    GRADIENT,
    INPUT,
    IS_FLOAT,
    PART,
    WEIGHT,
    SignalReader,
    Signals,
    StepOver,
    inputs_by_step,
)
from .view import BITS, Past, StepsView

#: Kinds of events that a bad batch makes again where it comes again.
_OF_BATCH = ("loss_spike", "gradient_spike")
#: Kinds whose text says what was changed before, and which a fault of the machine explains.
_SPIKES = (*_OF_BATCH, "explosion")
# A changed number matters from this ratio on, from one step to the next.
_FACTOR = 2.0
# A forecast whose end is so many times as far as its beginning names the beginning alone.
_WIDE = 10.0
# A batch has one size if it had that in so many steps.
_STEADY = 16
# The number of doublings from the end of its dtype's range within which a tensor is near it.
_NEAR = 1.0

#: The cause, and the sentence for it, by phase of the first mover.
CAUSES = {
    INPUT: ("data", "the batch left its range first"),
    WEIGHT: ("optimizer", "a parameter left its range first: an update was too large"),
    ACTIVATION: ("layer", "an activation left its range first"),
    BUFFER: ("layer", "a buffer left its range first"),
    GRADIENT: ("gradient", "a gradient left its range first"),
}


class FirstMovers(NamedTuple):
    """The signals that left their range first, the cause that they point to, and the sentence that
    says so.
    """

    movers: tuple[Mover, ...] = ()
    cause: str = ""
    why: str = ""


class _Change(NamedTuple):
    step: int
    name: str
    before: float
    after: float

    @property
    def size(self) -> float:
        """The ratio of the larger number to the other."""
        least, most = sorted((self.before, self.after))
        return most / least if least > 0 else math.inf

    def __str__(self) -> str:
        return (
            f"{self.name} was changed from {self.before:g} to {self.after:g} at step {self.step:,}"
        )


#: The name of the batch of a step; None: it has none.
BatchOf = Callable[[int], Union[int, str, None]]


class Causes:
    """Finds the causes of the events of one rank, whose sites are found in ``sites`` by number."""

    def __init__(self, sites: SiteTable, movers: Movers, batch_of: BatchOf) -> None:
        self._sites = sites
        self.movers = movers
        self._batch_of = batch_of
        #: Since when the loss is outside of its range.
        self.loss: Optional[Mover] = None
        # The batches that came with a spike when they came last: in which step, and which kind.
        self._spiked: dict[Union[int, str], tuple[int, str]] = {}
        self._batch_before: Union[int, str, None] = None
        # Changes, with the number of the observed step.
        self._changes: deque[tuple[int, _Change]] = deque(maxlen=PAST)
        self._rate: Optional[float] = None
        #: The last step, and how many steps it came after the one before.
        self.last = 0, 1
        self._size, self._steady = 0.0, 0
        # The step in which the ranks had other weights than each other last.
        self._fault: Optional[int] = None
        # The time at which each tensor was near the end of its range last, when it came there, in
        # which step.
        self._of = Columns(
            near=np.full(1, NEVER),
            came=np.full(1, NEVER),
            step=np.zeros(1, np.int64),
            has_had_room=np.zeros(1, bool),
        )
        # Tensors of the steps that are taken together: what is near the end, and what is not. None:
        # nothing is near.
        self._room: Optional[tuple[np.ndarray, np.ndarray]] = None
        self._lost: deque[tuple[int, int, int]] = deque(maxlen=PAST)

    def begin(self, now: Signals) -> None:
        """Takes in the next steps."""
        self.movers.begin(now)
        self._of.grow(int(now.sites.max()) + 1)
        with np.errstate(invalid="ignore"):
            # A loss scale is raised until scaled gradients reach the end, where a scaler skips.
            is_near = (now.headroom < _NEAR) & IS_FLOAT[now.codes] & ~now.is_scaled
            has_room = (now.headroom >= _NEAR) | (now.abs_max == 0)
        self._room = (is_near, has_room) if is_near.any() else None
        if self._room is None:
            self._of["has_had_room"][now.sites] |= has_room.any(axis=0)

    def note_step(
        self,
        now: Signals,
        k: int,
        step: int,
        rate: Optional[float],
        rate_name: str,
        sizes: Sequence[float],
    ) -> Optional[_Change]:
        """Step ``k``, of this number, begins. The change of its learning rate, if there is any;
        ``rate_name`` is empty where that would be none. ``sizes``: the numbers of elements of what
        it was given.
        """
        self.movers.now += 1
        self.last = step, step - self.last[0]
        before, self._rate = self._rate, rate or self._rate
        change = None
        if rate_name and rate and before and rate != before:
            change = _Change(step, rate_name, before, rate)
            self.note_change(change)
        if sizes and sizes[0] == self._size:
            self._steady += 1
        elif sizes:
            if self._steady >= _STEADY:
                name = "the number of elements of the input"
                self.note_change(_Change(step, name, self._size, sizes[0]))
            self._size, self._steady = sizes[0], 1
        if self._room is not None:
            self._note_near(now, k, *(of_steps[k] for of_steps in self._room))
        return change

    def note_change(self, change: _Change) -> None:
        """Takes in a changed number. Small changes, as a schedule makes them, explain nothing and
        are left out.
        """
        if change.size >= _FACTOR:
            self._changes.append((self.movers.now, change))

    def note_fault(self, step: int) -> None:
        """Notes the step in which the ranks held different weights."""
        self._fault = step

    def note_lost(self, sites: Sequence[int], since: int) -> None:
        """Notes that these tensors have lost precision since a step."""
        self._lost.extend((self.movers.now, since, site) for site in sites)

    def origin(self, step: int, kind: str) -> FirstMovers:
        """The first movers and the cause of an event of this kind."""
        movers = self.movers.first(self.loss)
        cause, why = self._cause(movers)
        if kind not in _SPIKES:
            return FirstMovers(movers, cause, why)
        changes = self.changes_before(step)
        raised = [c for c in changes if c.after > c.before and c.name.startswith(_RAISES)]
        if raised and (not movers or raised[-1].step <= movers[0].step):
            cause, why = "optimizer", ""
        why = "; ".join([*([why] if why else []), *map(str, changes)])
        blamed = self._blamed_batch(step, kind)
        if blamed:
            cause, why = "data", blamed
        # It may have been found in a step whose records come later than the finding.
        if self._fault is not None and abs(step - self._fault) <= PAST:
            cause, why = "hardware", f"the ranks had different weights at step {self._fault:,}"
        return FirstMovers(movers, cause, why)

    def changes_before(self, step: int) -> list[_Change]:
        """The last changes up to this step, of each number the largest: a schedule makes many."""
        changes: dict[str, _Change] = {}
        for now, change in self._changes:
            if now >= self.movers.now - PAST and change.step <= step:
                known = changes.get(change.name)
                if known is None or change.size >= known.size:
                    changes[change.name] = change
        return sorted(changes.values(), key=lambda change: change.step)[-3:]

    def batch(self, step: int, origin: FirstMovers) -> Union[int, str, None]:
        """The name of the batch that the event is about."""
        is_of_mover = origin.movers and not origin.why.startswith("the batch also came")
        return self._batch_of(origin.movers[0].step if is_of_mover else step)

    def step_ended(self, step: int, events: Sequence[WatchEvent]) -> None:
        """Takes in all events of a step."""
        name = self._batch_before = self._batch_of(step)
        if name is None:
            return
        kinds = [event.kind for event in events if event.kind in _OF_BATCH]
        if kinds:
            self._spiked[name] = step, kinds[0]
        else:
            self._spiked.pop(name, None)

    def _cause(self, movers: Sequence[Mover]) -> tuple[str, str]:
        if not movers:
            return "", ""
        first = movers[0]
        lost = None if first.is_batch else self._lost_before(first)
        if lost is not None:  # no rounding changes what the model is given
            return "precision", lost
        if first.site is None:
            return (
                "loss",
                "no tensor that was read left its range before the loss: look at its targets, "
                "whether they belong to the inputs, and at weights and factors in its expression",
            )
        return CAUSES[self.movers.order_of(first)[0]]

    def _blamed_batch(self, step: int, kind: str) -> str:
        """The reason why the batch is blamed: it came with a spike when it came last. Or ""."""
        name = self._batch_of(step)
        earlier = None if name is None else self._spiked.get(name)
        if kind not in _OF_BATCH or earlier is None or name == self._batch_before:
            return ""
        return f"the batch also came with the {earlier[1]} of step {earlier[0]:,}"

    def _note_near(self, now: Signals, k: int, is_near: np.ndarray, has_room: np.ndarray) -> None:
        of, sites = self._of, now.sites
        if is_near.any():
            near = sites[is_near]
            # A tensor that was always near the end, such as a mask, shows nothing.
            is_new = of["has_had_room"][near] & (of["near"][near] < self.movers.now - PAST)
            of["came"][near[is_new]] = self.movers.now
            of["step"][near[is_new]] = now.steps[k]
            of["near"][near] = self.movers.now
        of["has_had_room"][sites] |= has_room

    def _lost_before(self, first: Mover) -> Optional[str]:
        """The sentence for a tensor that lost precision before the first mover, or is that."""
        notes = [
            (since, site, f"has lost precision since step {since:,}")
            for now, since, site in self._lost
            if now >= self.movers.now - PAST
        ]
        of = self._of
        near = (of["near"] >= self.movers.now - GAP) & (of["came"] >= self.movers.now - PAST)
        for site in np.flatnonzero(near).tolist():
            since = int(of["step"][site])
            notes.append((since, site, f"came near the end of its dtype's range at step {since:,}"))
        order = first.step, *self.movers.order_of(first)
        for since, site, text in sorted(notes):
            if (since, *self.movers.order_of_site(site)) <= order:
                return f"{self._sites[site]} {text}"
        return None


# Settings that make updates larger when they are raised.
_RAISES = ("the learning rate", "clipping.threshold", "clipping.value")


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


# Facts that are one if the loss of their step is so, beside what is said of it.
_OF_LOSS: dict[str, Callable[[float, float], bool]] = {
    "negative": lambda loss, _: loss < 0,
    "first_loss": lambda loss, guess: loss >= max(5 * guess, guess + 5),
}


class Program:
    """The facts of the program that are in no record: numbers of the optimizer, by name, and what
    was noticed.
    """

    def __init__(self) -> None:
        self._settings: dict[str, float] = {}
        self._optimizers: set[str] = set()
        self._has_new_optimizer = False
        # Changes since the last step, and facts with the step in which each was noticed.
        self._changes: list[Number] = []
        self._noticed: list[tuple[int, Number]] = []
        # The largest rms of all gradients.
        self._largest = 0.0

    def setting(self, name: str, before: Optional[float], value: float) -> None:
        """Takes in a setting, as Watcher.setting() does."""
        self._settings[name] = value
        option = name.rpartition(".")[2].partition("[")[0]
        if name == "clipping.scaled":
            self._changes.append(Number("clipped_scaled", value))
        elif option == "lr":  # the rows have the largest of all groups, and each change of it
            optimizer = name.partition(".")[0]  # of which another group may come later
            self._has_new_optimizer |= optimizer not in self._optimizers
            self._optimizers.add(optimizer)
            if before is not None and is_jump(before, value):
                full_name = f"the learning rate ({name})"
                self._changes.append(Number(option, value, before, full_name=full_name))
        elif before is not None:
            self._changes.append(Number(option, value, before, full_name=name))
        elif name.endswith("betas[1]"):
            beta1 = self._settings.get(f"{name[:-2]}0]", math.nan)
            self._changes.append(Number("beta2", value, beta1**4))

    def take_rate_name(self) -> str:
        """The name of the rate of the next step, beside that of the step before; empty: they may be
        those of two optimizers that take turns.
        """
        is_new, self._has_new_optimizer = self._has_new_optimizer, False
        if len(self._optimizers) < 2:
            return "the learning rate"
        return "the learning rate (another optimizer's)" if is_new else ""

    def noticed(self, step: int, number: Number) -> None:
        self._noticed.append((step, number))

    def take_changes(self) -> list[Number]:
        changes, self._changes = self._changes, []
        return changes

    def take_noticed(self, step: int, row: Optional[StepRow]) -> list[Number]:
        """The facts of this step, and of earlier steps. What a loss should be is one if this step's
        is another: below 0, or far above what is learned by guessing.
        """
        if not self._noticed:
            return []
        numbers = [(at, number) for at, number in self._noticed if at <= step]
        self._noticed = [notice for notice in self._noticed if notice[0] > step]
        loss = math.nan if row is None or row.loss is None else row.loss
        return [
            number._replace(value=loss, usual=number.value) if number.name in _OF_LOSS else number
            for at, number in numbers
            if number.name not in _OF_LOSS
            or (at == step and _OF_LOSS[number.name](loss, number.value))
        ]

    def beside_eps(self, sizes: list[float]) -> list[float]:
        """The rms of gradients by step, or 0 from the step on in which it is not below eps: such
        gradients shrink with the loss.
        """
        _, *largest = accumulate(sizes, max, initial=self._largest)
        eps, self._largest = self.eps, largest[-1]
        return [size if most < eps else 0.0 for size, most in zip(sizes, largest)]

    @property
    def eps(self) -> float:
        """The smallest eps of an optimizer; 0: none has one."""
        eps = [value for name, value in self._settings.items() if name.endswith(".eps")]
        return min(eps, default=0.0)


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
        due = self._due(step, 0, self._program.take_noticed(step, None))
        events = [event for rule, number in due if (event := self._of_number(step, rule, number))]
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

    def replicas_differ(self, step: int) -> None:
        """The ranks hold other weights than each other; whoever found it has warned."""
        self.causes.note_fault(step)

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
        self.causes.note_change(_Change(step, change.full_name, change.usual, change.value))

    def _events(
        self, view: StepsView, k: int, numbers: Sequence[Number], fired: Sequence[_Fired]
    ) -> list[WatchEvent]:
        step = int(view.now.steps[k])
        self._note_precision(view, k, fired)
        due = self._due(step, k, numbers)
        events = [event for rule, number in due if (event := self._of_number(step, rule, number))]
        loss_warns = any(e.kind == "loss_spike" and e.is_warning for e in events)
        for rule, at in fired:
            event = self._of_tensors(view, k, rule, at, loss_warns)
            if event is not None:
                events.append(event)
        return events

    def _due(self, step: int, k: int, numbers: Sequence[Number]) -> list[tuple[NumberRule, Number]]:
        """The rules that have held for long enough of these numbers."""
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
        return due

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
