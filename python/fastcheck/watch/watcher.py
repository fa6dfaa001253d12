"""The Watcher: takes the records of some steps, and returns what is unusual in them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np

from fastcheck.log.step_table import StepRow
from fastcheck.record.format import DTYPES
from fastcheck.record.site import SiteTable
from fastcheck.utils.text.numbers import format_number

from .causes import CAUSES, Causes, Origin
from .columns import Columns
from .event import Mover, WatchEvent
from .movers import Movers
from .numbers import Number, Numbers, gradient_rms
from .options import Watch
from .parameters import parameter_table
from .rules import (
    NUMBER_RULES,
    TENSOR_RULES,
    NumberRule,
    Rule,
    TensorRule,
    loss_rises,
    norm_spikes,
    update_is_unusual,
)
from .signals import GRADIENT, RMS, SignalReader, Signals, StepOver
from .view import Past, View

__all__ = ["Watcher"]

# After an event of a kind there is none of the same kind for so many steps, but that a warning may
# come after what did not warn.
_PAUSE = 32
# Of what left its range, and of tensors with the same event, so many are in the text.
_NAMED = 3
_MOST_EVENTS = 4096
#: Numbers that don't enter their range where this holds.
_OUTSIDE = {"loss": loss_rises, "gradient_norm": norm_spikes, "update_size": update_is_unusual}


class _Fired(NamedTuple):
    """A rule whose condition has held long enough, and the places of the tensors of which."""

    rule: TensorRule
    at: np.ndarray


class _Shown(float):
    """A number in a template: without a format as format_number() has it."""

    def __format__(self, spec: str) -> str:
        return super().__format__(spec) if spec else format_number(float(self))


class Watcher:
    """Of one rank, whose sites are found in ``sites`` by number. ``is_whole``: all modules are
    observed. Not thread-safe.

    The work is a few operations on arrays over all tensors of the steps that are given together: no
    tensor is read, and no device is waited for.
    """

    def __init__(
        self, options: Watch, sites: SiteTable, rank: int = 0, is_whole: bool = True
    ) -> None:
        window, warm_up = options.window, options.warm_up
        self._options = options
        self._sites = sites
        self._rank = rank
        self._reader = SignalReader(sites, is_whole)
        self._past = Past(options.threshold, window, warm_up, options.horizon)
        self._numbers = Numbers(options.threshold, window, warm_up)
        self._movers = Movers(sites)
        #: What the events come from.
        self.causes = Causes(sites, self._movers)
        # Of each of TENSOR_RULES: in how many steps in a row it has held, and if it was reported.
        nothing = np.zeros((len(TENSOR_RULES), 1), np.int64)
        self._held = Columns(run=nothing, is_reported=nothing.astype(bool))
        # The same of NUMBER_RULES.
        self._runs = [0] * len(NUMBER_RULES)
        self._reported = [False] * len(NUMBER_RULES)
        # By kind, and whether it warned; of what warned also how far it was from what is usual.
        self._last_of: dict[tuple[str, bool], int] = {}
        self._farthest: dict[str, float] = {}
        # Numbers of the optimizer by name, and what was changed since the last step.
        self._settings: dict[str, float] = {}
        self._changes: list[Number] = []
        self._limit: Optional[float] = None
        self._signals: Optional[Signals] = None
        #: The youngest 4,096 events, oldest first.
        self.events: deque[WatchEvent] = deque(maxlen=_MOST_EVENTS)
        #: How many events there were.
        self.count = 0

    def add(self, *steps: StepOver) -> list[WatchEvent]:
        """Steps that are over, oldest first: of each its row in the table of steps, and its
        records. Their events.
        """
        now = self._reader.read(steps)
        if now is None:
            return []
        self._signals = now
        self._grow(int(now.sites.max()) + 1)
        view = self._past.take(now)
        fired = self._fired(view)
        found: list[WatchEvent] = []
        for k in range(len(now.steps)):
            if now.is_read[k].any():
                found += self._step(view, k, fired[k])
        self.events.extend(found)
        self.count += len(found)
        return found

    @property
    def norm_limit(self) -> Optional[float]:
        """What Watch(skip_above=) makes of the usual norm of all gradients: of the last one that
        was known, while the range is learned anew. None: no limit yet.
        """
        usual, factor = self._numbers.usual_norm, self._options.skip_above
        if usual is not None and factor is not None:
            self._limit = factor * usual
        return self._limit

    def parameters(self) -> np.ndarray:
        """Rows of PARAMETERS_DTYPE, as the last step has them."""
        return parameter_table(self._sites, self._signals, self._past.median_of(RMS))

    def setting(self, name: str, before: Optional[float], value: float) -> None:
        """A number of the optimizer or of clipping has this value from the open step on; None:
        from the first step on. ``name``: as in the log, such as
        ``optimizers[0].groups[0].betas[1]``.
        """
        self._settings[name] = value
        option = name.rpartition(".")[2].partition("[")[0]
        if before is not None and option != "lr":  # the rows have that of all groups
            self._changes.append(Number(option, value, before, full_name=name))
        elif name.endswith("betas[1]"):
            beta1 = self._settings.get(f"{name[:-2]}0]", math.nan)
            self._changes.append(Number("beta2", value, beta1**4))

    def replicas_differ(self, step: int) -> None:
        """The ranks hold other weights than each other; whoever found it has warned."""
        self.causes.note_fault(step)

    def _grow(self, count: int) -> None:
        self._movers.grow(count)
        self._held.grow(count)

    def _fired(self, view: View) -> list[list[_Fired]]:
        """By step, the rules of tensors that have held for long enough."""
        now, sites = view.now, view.now.sites
        found: list[list[_Fired]] = [[] for _ in now.steps]
        for number, rule in enumerate(TENSOR_RULES):
            holds = rule.condition(view)
            run, is_reported = self._held["run"][number], self._held["is_reported"][number]
            count, was_reported = run[sites], is_reported[sites]
            if not (holds.any() or count.any() or was_reported.any()):
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
                    found[k].append(_Fired(rule, at[np.argsort(now.phases[at], kind="stable")]))
            run[sites], is_reported[sites] = count, was_reported
        return found

    def _step(self, view: View, k: int, fired: Sequence[_Fired]) -> list[WatchEvent]:
        now, row = view.now, view.now.rows[k]
        step = int(now.steps[k])
        changes, self._changes = self._changes, []
        for change in changes:
            if change.full_name:
                self.causes.setting_changed(step, change.full_name, change.usual, change.value)
        rate = self.causes.note_step(now, k, row)
        if rate is not None:
            changes.append(Number("lr", rate.after, rate.before, full_name=rate.name))
        self._movers.add(now, k, view.scores, view.outside)
        numbers = (
            [] if row is None else self._numbers.of_step(row, now, k, self._has_scaled(now, k))
        )
        numbers += self._below_epsilon(now, k)
        if now.is_limited[k]:
            numbers.append(self._skipped(row))
        self._note_precision(view, k, fired)
        due = [pair for number in (*changes, *numbers) for pair in self._due(step, number)]
        events = [event for rule, number in due if (event := self._of_number(step, rule, number))]
        loss_warns = any(e.kind == "loss_spike" and e.is_warning for e in events)
        for rule, at in fired:
            event = self._of_tensors(view, k, rule, at, loss_warns)
            if event is not None:
                events.append(event)
        self._numbers.step_ended()
        self.causes.step_ended(step, events)
        return events

    def _due(self, step: int, number: Number) -> Iterator[tuple[NumberRule, Number]]:
        """The rules that have held for long enough of this number."""
        is_outside = _OUTSIDE[number.name](number) if number.name in _OUTSIDE else False
        if is_outside:
            self._numbers.is_outside(number.name)
        if number.name == "loss":
            since = self.causes.loss or Mover(step, None, "loss", number.score)
            self.causes.loss = since if is_outside else None
        for at, rule in enumerate(NUMBER_RULES):
            if number.name not in rule.names:
                continue
            holds = rule.condition(number)
            self._runs[at] = self._runs[at] + 1 if holds else 0
            if not holds if rule.is_over is None else rule.is_over(number):
                self._reported[at] = False
            if self._runs[at] >= rule.steps and not self._reported[at]:
                self._reported[at] = True
                yield rule, number

    def _of_number(self, step: int, rule: NumberRule, number: Number) -> Optional[WatchEvent]:
        warns = rule.warns if isinstance(rule.warns, bool) else rule.warns(number)
        rise = number.value - number.usual
        if warns and math.isfinite(rule.again):
            # Within a window of a warning the next one is of a spike that is so many times as far.
            last = self._last_of.get((rule.kind, True), -self._options.window)
            is_late = step - last >= self._options.window
            is_farther = rise >= rule.again * self._farthest.get(rule.kind, math.inf)
            warns = is_late or is_farther
            if warns:
                self._farthest[rule.kind] = rise
                self._last_of.pop((rule.kind, True), None)
        if rule.pause and self._is_recent(step, rule.kind, warns):
            return None
        text = rule.text.format(
            value=_Shown(number.value),
            usual=_Shown(number.usual),
            name=number.full_name or number.name,
            share=f"{number.share:.0%}",
        )
        origin = Origin((), rule.cause) if rule.cause else self.causes.origin(step, rule.kind)
        return self._event(
            rule, step, warns, text, origin, value=number.value, reference=number.usual,
            score=number.score,
        )  # fmt: skip

    def _of_tensors(
        self, view: View, k: int, rule: TensorRule, at: np.ndarray, loss_warns: bool
    ) -> Optional[WatchEvent]:
        now, first = view.now, int(at[0])
        step, phase = int(now.steps[k]), int(now.phases[first])
        warns = rule.warns
        if rule.pause:
            is_recent = self._is_recent(step, rule.kind, warns)
            if is_recent and rule.pause == "event":
                return None
            warns = warns and not is_recent
        elif phase == GRADIENT and loss_warns:
            warns = False  # the gradients of a loss that is a thousand times as high are so too
        with np.errstate(all="ignore"):
            value = float(rule.value(view)[k, first])
            usual = float(np.broadcast_to(rule.usual(view), now.is_read.shape)[k, first])
        near, far = float(view.steps_left[k, first]), float(view.most_steps_left[k, first])
        text = rule.text.format(
            value=_Shown(value),
            usual=_Shown(usual),
            dtype=DTYPES[int(now.codes[first])].name,
            count=format_number(value * float(now.numel[k, first])),
            interval=f"{near:.0f}" if far < near + 1 else f"{near:.0f} to {format_number(far)}",
        )
        sites = [self._sites[int(now.sites[place])] for place in at]
        if len(sites) > 1:
            text += ". So with " + ", ".join(map(str, sites[1 : 1 + _NAMED]))
            left = len(sites) - 1 - _NAMED
            text += f" and {left:,} more tensors" if left > 0 else ""
        origin = Origin((), rule.cause)
        if not rule.cause:
            origin = self.causes.origin(step, rule.kind)
            if not origin.cause:
                origin = Origin(origin.movers, *CAUSES[phase])
        return self._event(
            rule, step, warns, f"{sites[0]}: {text}", origin, site=sites[0], value=value,
            reference=usual, score=math.nan, interval=(near, far) if near < math.inf else None,
        )  # fmt: skip

    def _event(
        self, rule: Rule, step: int, warns: bool, text: str, origin: Origin, **fields: Any
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

    def _is_recent(self, step: int, kind: str, warns: bool) -> bool:
        """Whether this event comes too soon after one of its kind; if it warns: after one that did
        so too. Notes it if not: what nobody sees makes no pause.
        """
        past = [self._last_of.get((kind, warned)) for warned in (True, False)[: 2 - warns]]
        if any(last is not None and step - last < _PAUSE for last in past):
            return True
        self._last_of[kind, warns] = step
        return False

    def _note_precision(self, view: View, k: int, fired: Sequence[_Fired]) -> None:
        for rule, at in fired:
            if rule.kind == "precision" and rule.cause:
                step = int(view.now.steps[k])
                sites = view.now.sites[at].tolist()
                self.causes.note_lost(step, sites, step - rule.steps + 1)

    def _skipped(self, row: Optional[StepRow]) -> Number:
        norm, limit = None if row is None else row.gradient_norm, self._limit
        if norm is not None and limit is not None and norm > limit:
            why = f"the norm of its gradients is {norm:,.4g}, and the limit {limit:,.4g}"
        else:
            why = "a gradient is not finite, or the norm of those of one optimizer is too large"
        known = math.nan if norm is None else norm, math.nan if limit is None else limit
        return Number("skipped", *known, full_name=why)

    def _below_epsilon(self, now: Signals, k: int) -> list[Number]:
        eps = [v for name, v in self._settings.items() if name.endswith(".eps")]
        rms = gradient_rms(now, k) if eps else 0.0
        return [Number("gradient_rms", rms, min(eps))] if rms > 0 else []

    @staticmethod
    def _has_scaled(now: Signals, k: int) -> bool:
        """Whether the gradients of parameters were read with the loss scale on them: not those that
        GradScaler has unscaled before, though all between modules are scaled.
        """
        return bool((now.is_scaled[k] & now.is_of_parameter).any())
