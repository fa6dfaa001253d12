"""The Watcher: takes the records of one step after another, and returns what is unusual in them."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Optional

import numpy as np

from fastcheck.log.step_table import StepRow
from fastcheck.record.format import DTYPES
from fastcheck.record.site import Site, SiteTable
from fastcheck.utils.text.numbers import format_number

from .autopsy import NO_ORIGIN, Autopsy, Origin
from .bands import Bands
from .event import WatchEvent
from .expert_rules import ExpertRules
from .explosions import Exploded, Explosions
from .forecast import Forecasts
from .gradient_rules import GradientRules
from .movers import Movers, cause_of_phase
from .numbers import Found, LossBand, NormBand, Reading, ScaleRule, SettingRule, UpdateBand, text_of
from .options import Watch
from .parameters import parameter_table
from .precision import Precision
from .signals import GRADIENT, INPUT, NAMES, WEIGHT, SignalReader, StepSignals
from .skips import Skips
from .stuck import Stuck, StuckTensors, grouped, others
from .update_range import UpdateRange
from .update_rules import UpdateRules

__all__ = ["Watcher"]

# A signal in log2 is out of its range only if it is off by this much too: a factor of 1.4.
_LEAST_SHIFT = 0.5
_LEAST_SPREAD = 0.02
# For the order in which signals left their ranges.
_LEFT_AT = 4.0
# A tensor that stays outside for so many steps after its first has shifted.
_SHIFT_STEPS = 3
# The batch: by this factor.
_BATCH_SHIFT = 2.0
# The rounding of a sum, as a share of the sum of magnitudes.
_ROUNDING = 1e-6
_MOST_EVENTS = 4096
_NONE = math.nan
_RMS, _ROWS = 1, np.arange(len(NAMES))[:, None]


class Watcher:
    """Of one rank, whose sites are found in ``sites`` by number. ``is_whole``: all modules are
    observed. Not thread-safe.

    The work is a few operations on arrays over all sites of a step: no tensor is read, and no
    device is waited for.
    """

    def __init__(
        self, options: Watch, sites: SiteTable, rank: int = 0, is_whole: bool = True
    ) -> None:
        self._options = options
        self._sites = sites
        self._reader = SignalReader(sites, is_whole)
        # The signal of a row of NAMES of site n has the number n * len(NAMES) + row.
        self._bands = Bands(options.window, options.warm_up, _LEAST_SPREAD)
        self._explosions = Explosions(sites)
        self._movers = Movers(sites)
        self._forecasts = Forecasts(options.horizon)
        self._stuck = StuckTensors(sites)
        self._precision = Precision(sites)
        self._experts = ExpertRules(sites)
        self._updates = UpdateRules(sites)
        self._gradients = GradientRules(sites, options.threshold)
        window, warm_up = options.window, options.warm_up
        self._loss = LossBand(options.threshold, window, warm_up)
        self._norm = NormBand(options.threshold, window, warm_up)
        self._update = UpdateBand(window, warm_up)
        self._update_range = UpdateRange(options.threshold, window, warm_up)
        self._scale = ScaleRule()
        #: What the events are made by.
        self.autopsy = Autopsy(sites, rank, self._movers, self._loss, self._precision)
        # Of the last step.
        self._signals: Optional[StepSignals] = None
        self._skips = Skips(sites, options.skip_above)
        # Of the step before, whose update the parameters of this one show.
        self._was_skipped = False
        self._rate_before: Optional[float] = None
        self._betas: set[tuple[float, float]] = set()
        # Settings that were changed since the last step, as sentences.
        self._changes: list[tuple[str, Reading]] = []
        #: The youngest 4,096 events, oldest first.
        self.events: deque[WatchEvent] = deque(maxlen=_MOST_EVENTS)
        #: How many events there were.
        self.count = 0

    def add(self, row: Optional[StepRow], chunks: Sequence[np.ndarray]) -> list[WatchEvent]:
        """One step that is over: its row in the table of steps, and its records. Its events."""
        scale = None if row is None else row.scale
        signals = self._reader.read(chunks, scale)
        if signals is None:
            return []
        if row is not None:
            step = row.step
        else:
            step = int(next(chunk for chunk in chunks if len(chunk))["step"][-1])
        self._signals = signals
        self._grow(int(signals.sites.max()) + 1)
        found = self._setting_events(step)
        self.autopsy.note_rate(step, row)
        is_limited = self._skips.add(chunks)
        is_skipped = is_limited or (row is not None and row.overflow)
        if is_limited:
            reading, text = self._skips.event(None if row is None else row.gradient_norm)
            found.append(self.autopsy.event(step, "skipped", text, reading, Origin((), "", "")))
        exploded = self._explosions.add(step, signals, is_skipped)
        scores = self._move(step, signals)
        readings = [] if row is None else self._readings(step, row, signals, is_skipped)
        stuck = self._stuck.add(signals)
        self._precision.add(step, signals, stuck)
        for reading in readings:
            found += self._number_event(step, reading)
        loss_warns = any(one.kind == "loss_spike" and one.is_warning for one in found)
        found += self._explosion_event(step, signals, exploded, loss_warns)
        found += self._batch_event(step, signals, scores)
        found += self._forecast_events(step, signals)
        found += self._stuck_events(step, signals, stuck)
        ruled = self._gradients.add(signals, scores, self._medians(_RMS))
        rate = None if row is None else row.learning_rate
        ruled += self._updates.add(chunks, is_skipped, rate)
        found += self._found_events(step, ruled)
        found += self._shift_event(step, signals)
        self.autopsy.step_ended(step, found)
        self.events.extend(found)
        self.count += len(found)
        return found

    @property
    def norm_limit(self) -> Optional[float]:
        """What Watch(skip_above=) makes of the usual norm of all gradients; None: no limit yet."""
        return self._skips.limit(self._norm.usual)

    def parameters(self) -> np.ndarray:
        """Rows of PARAMETERS_DTYPE, as the last step has them."""
        rules = self._gradients, self._updates
        return parameter_table(self._sites, self._signals, self._medians(_RMS), *rules)

    def scalars(self) -> dict[str, float]:
        """Numbers over all parameters, for experiment trackers."""
        return self._updates.scalars()

    def set_epsilon(self, epsilon: Mapping[int, float]) -> None:
        """The eps of optimizers, by number of the gradients that they divide."""
        self._gradients.set_epsilon(epsilon)

    def set_betas(self, beta1: float, beta2: float) -> None:
        """The betas of an optimizer that divides by the root of a mean of squares."""
        found = SettingRule.at_first(beta1, beta2)
        if found is not None and (beta1, beta2) not in self._betas:
            self._betas.add((beta1, beta2))
            text = f"Adam's beta2 is {beta2:g}, with a beta1 of {beta1:g}: it should be above "
            text += f"beta1^4 = {found.reference:.3g}. Is it as it was meant to be?"
            self._changes.append((text, found))

    def setting_changed(self, name: str, before: float, after: float) -> None:
        """A number of the optimizer is another one from the open step on."""
        found = SettingRule.changed(name, before, after)
        if found is not None:
            text = f"{name} was changed from {before:g} to {after:g}"
            self._changes.append((text, found))

    def replicas_differ(self, step: int, text: str) -> WatchEvent:
        """The ranks hold other weights than each other. The event; whoever found it has warned."""
        self.autopsy.note_fault(step, "the ranks had different weights")
        return self._from_outside(step, "replicas", text, "hardware", False)

    def rerun_done(self, step: int, text: str, cause: str) -> WatchEvent:
        """A step was run again after a spike. The event."""
        if cause == "hardware":
            self.autopsy.note_fault(step, "the machine computed other numbers when it ran again")
        return self._from_outside(step, "rerun", text, cause, cause != "program")

    def _from_outside(
        self, step: int, kind: str, text: str, cause: str, is_warning: bool
    ) -> WatchEvent:
        reading = Reading(kind, _NONE, _NONE, _NONE, is_warning)
        event = self.autopsy.event(step, kind, text, reading, Origin((), cause, ""))
        self.events.append(event)
        self.count += 1
        return event

    def _setting_events(self, step: int) -> list[WatchEvent]:
        changes, self._changes = self._changes, []
        if not changes:
            return []
        # What warns is first.
        text, reading = max(changes, key=lambda change: change[1].is_warning)
        if self.autopsy.is_recent(step, "settings", reading.is_warning):
            return []
        if len(changes) > 1:
            text += f", and {len(changes) - 1} more"
        return [self.autopsy.event(step, "settings", text, reading, Origin((), "optimizer", ""))]

    def _grow(self, count: int) -> None:
        self._bands.grow(count * len(NAMES))
        self._movers.grow(count)
        self._forecasts.grow(count)
        self._precision.grow(count)
        self._explosions.grow(count)

    def _move(self, step: int, signals: StepSignals) -> np.ndarray:
        """Holds each signal to its range, and adds it to it. The scores."""
        sites = signals.sites
        values = signals.values
        numbers = sites * len(NAMES) + _ROWS
        scores = self._bands.scores(numbers, values)
        with np.errstate(invalid="ignore"):
            distance = values - self._bands.median[numbers]
            # Gradients fall as training converges, and weights decay.
            may_fall = (signals.phases < GRADIENT) & (signals.phases > WEIGHT)
            is_far = np.where(may_fall, np.abs(distance), distance) >= _LEAST_SHIFT
            size = np.abs(scores)
            outside = is_far & (size >= _LEFT_AT)
            is_refused = is_far & (size >= self._options.threshold)
        self._bands.add(numbers, values, is_refused)
        self._update_range.put_into(signals, scores, outside)
        self._movers.add(step, signals, scores, outside)
        return scores

    def _readings(
        self, step: int, row: StepRow, signals: StepSignals, is_skipped: bool
    ) -> list[Reading]:
        found: list[Optional[Reading]] = []
        if row.loss is not None and math.isfinite(row.loss):
            found.append(self._loss.add(step, row.loss))
        if row.gradient_norm is not None and math.isfinite(row.gradient_norm):
            scale = row.scale if row.scale and self._are_gradients_scaled(signals) else 1.0
            found.append(self._norm.add(row.gradient_norm / scale))
        if not self._was_skipped:
            is_weight = signals.phases == WEIGHT
            found.append(
                self._update.add(
                    signals.sites[is_weight],
                    signals.sums[is_weight],
                    _ROUNDING * signals.abs_sums[is_weight],
                    signals.numel[is_weight],
                    self._rate_before,
                )
            )
        self._was_skipped = is_skipped
        self._rate_before = row.learning_rate
        if row.scale is not None:
            found.append(self._scale.add(row.scale, row.overflow))
        return [one for one in found if one is not None]

    def _are_gradients_scaled(self, signals: StepSignals) -> bool:
        """Whether those of parameters were read with the loss scale on them: not those that
        GradScaler has unscaled before, though all between modules are scaled.
        """
        scaled = signals.sites[signals.is_scaled & (signals.phases == GRADIENT)]
        return any(self._sites[number].role == "param_grad" for number in scaled.tolist())

    def _number_event(self, step: int, reading: Reading) -> list[WatchEvent]:
        if self.autopsy.is_recent(step, reading.kind, reading.is_warning):
            return []
        origin = self.autopsy.origin()
        if reading.kind == "loss_scale":
            origin = NO_ORIGIN
        elif reading.kind == "update" and not origin.movers:
            why = "no tensor of the model left its range before"
            origin = Origin((), "optimizer", why)
        return [self.autopsy.event(step, reading.kind, text_of(reading), reading, origin)]

    def _explosion_event(
        self, step: int, signals: StepSignals, exploded: Optional[Exploded], loss_warns: bool
    ) -> list[WatchEvent]:
        if exploded is None:
            return []
        at, row, highest = exploded
        phase = int(signals.phases[at])
        # The gradients of a loss that is a thousand times as high are so too.
        warns = not (phase == GRADIENT and loss_warns)
        value, before = _power(signals.values[row, at]), _power(highest)
        reading = Reading("explosion", value, before, _NONE, warns)
        origin = self.autopsy.origin()
        text = f"its {NAMES[row]} is {format_number(reading.value)}, "
        text += f"and was {format_number(reading.reference)} at most before"
        cause = origin.cause or cause_of_phase(phase)
        origin = Origin(origin.movers, cause, origin.why)
        return [
            self.autopsy.event(step, "explosion", text, reading, origin, self._site(signals, at))
        ]

    def _batch_event(self, step: int, signals: StepSignals, scores: np.ndarray) -> list[WatchEvent]:
        unusual = self._unusual_batch(signals, scores)
        if unusual is None or self.autopsy.is_recent(step, "batch"):
            return []
        at, row = unusual
        usual = _power(self._medians(row)[signals.sites[at]])
        value, score = _power(signals.values[row, at]), float(scores[row, at])
        text = f"its {NAMES[row]} is {format_number(value)}, usual is {format_number(usual)}"
        reading = Reading("batch", value, usual, score, False)
        origin = Origin((), "data", "")
        return [self.autopsy.event(step, "batch", text, reading, origin, self._site(signals, at))]

    def _forecast_events(self, step: int, signals: StepSignals) -> list[WatchEvent]:
        found = self._forecasts.add(signals.sites, signals.abs_max, signals.headroom)
        if not found:
            return []
        at, near, far = found[0]
        dtype = DTYPES[int(signals.dtypes[at])].name
        reached = float(signals.abs_max[at])
        limit = reached * _power(signals.headroom[at])
        steps = f"{near:.0f}" if far < near + 1 else f"{near:.0f} to {format_number(far)}"
        text = (
            f"its largest magnitude {format_number(reached)} grows towards the largest {dtype} "
            f"({format_number(limit)}), which it reaches in about {steps} steps"
        )
        text += others([int(signals.sites[one[0]]) for one in found[1:]], self._sites)
        warns = not self.autopsy.is_recent(step, "headroom", True)
        reading = Reading("headroom", reached, limit, _NONE, warns)
        origin, site = Origin((), "precision", ""), self._site(signals, at)
        return [self.autopsy.event(step, "headroom", text, reading, origin, site, (near, far))]

    def _stuck_events(
        self, step: int, signals: StepSignals, stuck: Sequence[Stuck]
    ) -> list[WatchEvent]:
        found = []
        for number, reading, text, cause in grouped(stuck, self._sites):
            warns = reading.is_warning and not self.autopsy.is_recent(step, reading.kind, True)
            reading = dataclasses.replace(reading, is_warning=warns)
            origin, site = Origin((), cause, ""), self._sites[number]
            found.append(self.autopsy.event(step, reading.kind, text, reading, origin, site))
        for number, reading, text in self._experts.add(step, signals):
            origin, site = Origin((), "layer", ""), self._sites[number]
            found.append(self.autopsy.event(step, reading.kind, text, reading, origin, site))
        return found

    def _found_events(self, step: int, ruled: Sequence[Found]) -> list[WatchEvent]:
        found = []
        for number, reading, text in ruled:
            origin, site = Origin((), "optimizer", ""), self._sites[number]
            has_pause = reading.kind in ("gradient", "reduction", "update_ratio")
            if has_pause and self.autopsy.is_recent(step, reading.kind, reading.is_warning):
                continue
            if reading.kind == "reduction":
                origin = NO_ORIGIN
            elif reading.kind == "gradient":
                origin = self.autopsy.origin()
            found.append(self.autopsy.event(step, reading.kind, text, reading, origin, site))
        return found

    def _shift_event(self, step: int, signals: StepSignals) -> list[WatchEvent]:
        shifted = self._movers.still_outside(_SHIFT_STEPS)
        if shifted is None or self.autopsy.is_recent(step, "shift"):
            return []
        row, number, left_at = shifted
        (at,) = np.flatnonzero(signals.sites == number)
        usual = _power(self._medians(row)[number])
        value = _power(signals.values[row, at])
        text = f"its {NAMES[row]} has been {format_number(value)} for {step - left_at} steps, "
        text += f"usual was {format_number(usual)}"
        reading = Reading("shift", value, usual, _NONE, False)
        origin, site = self.autopsy.origin(), self._site(signals, int(at))
        return [self.autopsy.event(step, "shift", text, reading, origin, site)]

    def _medians(self, row: int) -> np.ndarray:
        """Of a signal, by number of the site."""
        found: np.ndarray = self._bands.median[row :: len(NAMES)]
        return found

    def _site(self, signals: StepSignals, at: int) -> Site:
        return self._sites[int(signals.sites[at])]

    def _unusual_batch(self, signals: StepSignals, scores: np.ndarray) -> Optional[tuple[int, int]]:
        """The place of a model's input that is far out of its range, and which signal is."""
        inputs = np.flatnonzero(signals.phases == INPUT)
        if not len(inputs):
            return None
        medians = self._bands.median[signals.sites[inputs] * len(NAMES) + _ROWS]
        with np.errstate(invalid="ignore"):
            far = np.abs(signals.values[:, inputs] - medians) >= _BATCH_SHIFT
            far &= np.abs(scores[:, inputs]) >= self._options.threshold
        rows, places = np.nonzero(far)
        return (int(inputs[places[0]]), int(rows[0])) if len(rows) else None


def _power(logarithm: float) -> float:
    found: float = 2.0 ** float(logarithm)
    return found
