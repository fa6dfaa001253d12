"""The table of rules: conditions for what is unusual in a run, and the texts of their events.

A rule is data. Its condition is a function of arrays over steps and tensors, or of one number of a
step; it reads nothing else and keeps no state. docs/watch.md has the same table in words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Callable, Optional, Union

import numpy as np

from .numbers import RISE_SCORE, UPDATE_SCORE, Number
from .signals import ABS_MAX, ACTIVATION, GRADIENT, INPUT, NAMES, RMS, WEIGHT
from .view import BITS, FIRST, LEAST_ELEMENTS, StepsView

# The least rise of the loss above its median in a spike, as a share of the median.
_LOSS_RISE = 0.2
# The least rise of the loss relative to that of the largest loss of half a window.
_BEYOND = 1.5
# The share of the first losses below which there are no spikes: ratios of a loss near 0 are wild.
_LEAST_OF_FIRST = 0.2
# The ratio to the largest loss of the last steps that is a spike, whatever the noise.
_JUMP = 8.0
# The least rise that warns, as a share of what the loss has fallen by.
_LEAST_OF_PROGRESS = 0.1
_NORM_FACTOR = 2.0
_UPDATE_FACTOR = 8.0
_GROWTH = 4.0
# Weights that grow while the loss stands still: their growth since the first step, in the last
# steps, and the fall of the loss in these, as a share of its fall before.
_GROWTH_IN_ALL, _GROWTH_LATELY, _STANDSTILL = 8.0, 1.1, 0.1
_SCALE_PAST, _HALVINGS, _MOST_SKIPPED = 100, 4, 0.2
# The least number of earlier steps with the tensor before it can explode.
_PAST = FIRST
#: Gradients that are smaller than the largest by this factor (log2) may be the rounding of 0, such
#: as those of the bias of keys in attention, or of a bias before a BatchNorm.
_ROUNDING_OF_ZERO = -19.0
# The rise of a gradient of a parameter beside an explosion of another gradient, in doublings.
_REACHES = 2.0
_UNDERFLOW, _SUBNORMAL, _RISE = 0.9, 0.5, 0.3
_ALIVE = 64
# Shifts of the batch and of a weight that are unusual, in doublings.
_BATCH_SHIFT, _WEIGHT_SHIFT = 2.0, 1.0
_RATE_FACTOR, _AVERAGE_FACTOR, _FACTOR = 4.0, 2.0, 10.0
_BELOW_EPSILON = 0.5
_LEAST_SCALE = 64.0


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    ``kind``: the kind of its events. ``steps``: the number of steps in a row in which the condition
    has to hold. ``warns``: always, never, or a condition. ``text``: a template with ``value`` and
    ``usual``, and the fields that the rule's class names. ``advice``: what to do; it ends a
    warning. A comment in the row says where the rule comes from.
    ``cause``: the cause that the rule implies; "": that of the first mover. ``pause``: what is held
    back for 32 steps after an event of this kind, an "event" or a "warning"; "": nothing.
    """

    kind: str
    steps: int
    text: str
    advice: str = ""
    cause: str = ""
    pause: str = "event"


@dataclass(frozen=True)
class TensorRule(Rule):
    """``condition`` gives an array of (steps, tensors). ``value``, ``usual``: arrays of the same
    shape, the second perhaps of one step. ``is_over``: where the rule may be reported of the tensor
    again; None: where the condition does not hold. ``text`` may have ``dtype``, ``reaches``, and
    ``count``, the value as a share of the elements.
    """

    condition: Callable[[StepsView], np.ndarray] = lambda view: view.is_stuck
    value: Callable[[StepsView], np.ndarray] = lambda view: view.now.zero_share
    usual: Callable[[StepsView], np.ndarray] = lambda view: view.zero_at_first
    is_over: Optional[Callable[[StepsView], np.ndarray]] = None
    warns: bool = True


@dataclass(frozen=True)
class NumberRule(Rule):
    """``names``: the numbers that it is about. ``text`` may have ``name``, ``share`` and ``most``.
    ``again``: how many times as far from ``usual`` as at the last warning it warns before a window
    is over.
    """

    names: Sequence[str] = ()
    condition: Callable[[Number], bool] = lambda number: False
    is_over: Optional[Callable[[Number], bool]] = None
    warns: Union[bool, Callable[[Number], bool]] = True
    again: float = math.inf


# Conditions of numbers


def _loss_is_high(loss: Number, score: float) -> bool:
    if not loss.score >= score:
        return False
    rise = loss.value - loss.usual
    # Lopsided noise rises that far without a fault.
    is_far = rise >= _LOSS_RISE * abs(loss.usual) and rise >= _BEYOND * (loss.most - loss.usual)
    return is_far and not _is_small(loss)


def _is_small(loss: Number) -> bool:
    """True if it is a small part of the first losses; or if these were 0 and it usually is, as
    where rewards are rare: there is nothing to measure it by.
    """
    return loss.value < _LEAST_OF_FIRST * abs(loss.first) or loss.first == loss.usual == 0


def loss_spikes(loss: Number) -> bool:
    """True if the loss is far above its range, or many times what it was."""
    if math.isnan(loss.usual):  # a rule of its own judges a run that is too short
        return False
    is_jump = loss.is_jump or loss.value >= _JUMP * loss.recent > 0
    return (is_jump and not _is_small(loss)) or _loss_is_high(loss, loss.threshold)


def loss_rises(loss: Number) -> bool:
    """True if the loss is above its range, a little less far than in a spike."""
    return loss_spikes(loss) or _loss_is_high(loss, RISE_SCORE)


def clips_scaled(threshold: Number) -> bool:
    """True if gradients are clipped while they are multiplied by the loss scale: the threshold is
    small relative to the scale, which it is not if the program scales it too.
    """
    return threshold.usual >= _LEAST_SCALE and threshold.value**2 <= threshold.usual


def loss_is_worth_a_look(loss: Number) -> bool:
    """True if a spike deserves a warning: a single batch that a converged model gets wrong does
    not.
    """
    return loss.value - loss.usual >= _LEAST_OF_PROGRESS * (loss.first - loss.usual)


def norm_spikes(norm: Number) -> bool:
    """True if the norm is above the range of the norms."""
    return norm.score >= norm.threshold and norm.value >= _NORM_FACTOR * norm.usual


def update_is_unusual(size: Number) -> bool:
    """True if an update is much larger or smaller than updates are, for this learning rate."""
    if not abs(size.score) >= UPDATE_SCORE:
        return False
    return max(size.value / size.usual, size.usual / size.value) >= _UPDATE_FACTOR


def weights_grow(growth: Number) -> bool:
    """True if updates are large relative to the weights."""
    return growth.value >= _GROWTH


def never(number: Number) -> bool:
    """A rule that is reported once in a run: it is never over."""
    return False


def weights_grow_for_nothing(growth: Number) -> bool:
    """True if weights have grown a lot and still grow, while the loss no longer falls."""
    is_large = growth.value >= max(_GROWTH_IN_ALL, _GROWTH_LATELY * growth.usual)
    return is_large and growth.share < _STANDSTILL


def scale_falls(scale: Number) -> bool:
    """True if the loss scale goes down and down, or skips too often: after the search in a scaler's
    first steps.
    """
    is_stuck = scale.value <= 1 and scale.is_skipped
    is_falling = scale.run >= _HALVINGS or scale.share >= _MOST_SKIPPED
    return is_stuck or (is_falling and scale.steps > _SCALE_PAST)


def scale_is_well(scale: Number) -> bool:
    """True if the loss scale has stopped falling."""
    return scale.share <= _MOST_SKIPPED / 2 and scale.run < _HALVINGS


def _ratio(*numbers: float) -> float:
    least, most = sorted(numbers)
    return most / least if least > 0 else math.inf


def average_changed(beta: Number) -> bool:
    """True if a moving average reaches back at least twice as far as before, or at most half as
    far.
    """
    return _ratio(1 - beta.value, 1 - beta.usual) >= _AVERAGE_FACTOR


def factor_changed(number: Number) -> bool:
    """True if a number has changed by orders of magnitude."""
    return _ratio(number.value, number.usual) >= _FACTOR


def is_jump(before: float, rate: float, steps: int = 1) -> bool:
    """True if a learning rate rose from one step to the next: schedules do not do that, but for a
    restart from 0. Of an observed step so many ``steps`` later, a linear warm-up may have made a
    rate that is ``steps + 1`` times as large.
    """
    return rate >= _RATE_FACTOR / 2 * (steps + 1) * before > 0


def rate_rose(rate: Number) -> bool:
    """True if the learning rate rose from one step to the next."""
    return is_jump(rate.usual, rate.value)


def beta2_is_too_small(beta2: Number) -> bool:
    """True if beta2 is below the bound of Adam's convergence, beta1^4."""
    return beta2.value <= beta2.usual


def epsilon_is_large(rms: Number) -> bool:
    """True if eps is large beside the gradients: with an rms of half of eps, at most a quarter of
    the elements is above it (Markov).
    """
    return rms.value < _BELOW_EPSILON * rms.usual


# Conditions of tensors


def explodes(view: StepsView) -> np.ndarray:
    """True where a tensor is a thousand times its previous largest magnitude, for no harmless
    reason.
    """
    now, phases = view.now, view.now.phases
    level = now.levels[ABS_MAX]
    with np.errstate(invalid="ignore"):
        far: np.ndarray = (level - view.peak >= BITS) & (view.past >= _PAST)
        if not far.any():
            return far
        is_gradient = phases == GRADIENT
        # Probabilities and counts are bounded, however small they were.
        far &= ~((phases == ACTIVATION) & ((now.abs_max <= 1) | now.is_count))
        largest = np.fmax.reduce(np.where(is_gradient, view.peak, -np.inf), axis=1, keepdims=True)
        is_rounding = view.peak <= largest + _ROUNDING_OF_ZERO
        far &= ~(is_gradient & (is_rounding | now.is_skipped[:, None]))
        far &= ~now.is_tried
    return far & ((phases == ACTIVATION) | is_gradient | (phases == WEIGHT))


def reaches_weights(view: StepsView, k: int) -> bool:
    """True if a gradient of a parameter is larger than before in step ``k``, or none is known."""
    now = view.now
    at = now.is_of_parameter & now.is_read[k]
    with np.errstate(invalid="ignore"):
        rise = now.levels[ABS_MAX, k, at] - view.peak[k, at]
    return not at.any() or bool((rise >= _REACHES).any())


def comes_near_the_end(view: StepsView) -> np.ndarray:
    """True where a tensor is forecast to leave the range of its dtype within the horizon."""
    # A scaler skips scaled gradients that leave the range, and halves its scale.
    return (view.steps_left <= view.horizon) & ~view.now.is_scaled


def _is_low(view: StepsView) -> np.ndarray:
    """True where half of the nonzero elements are subnormal, and were not at first."""
    share = view.now.subnormal_share
    is_low: np.ndarray = share >= _SUBNORMAL
    if is_low.any():
        is_low &= view.is_weighed & (view.now.phases == GRADIENT)
        is_low &= share >= view.subnormal_at_first + _RISE
    return is_low


def underflows(view: StepsView) -> np.ndarray:
    """True where a gradient underflows: most elements are zero, and most of the rest are subnormal.
    Subnormal neighbours show that the zeros are not exact.
    """
    is_low = _is_low(view)
    if is_low.any():
        is_low &= view.now.zero_share >= np.maximum(_UNDERFLOW, view.zero_at_first + _RISE)
    return is_low


def becomes_subnormal(view: StepsView) -> np.ndarray:
    """True where a gradient is about to underflow: half of its nonzero elements are subnormal."""
    is_subnormal = _is_low(view)
    if is_subnormal.any():
        is_subnormal &= ~underflows(view)
    return is_subnormal


def is_saturated(view: StepsView) -> np.ndarray:
    """True where elements are at the largest number of the dtype, and none were at first."""
    phases, at_max = view.now.phases, view.now.saturated_share > 0
    if at_max.any():
        at_max &= view.is_weighed & ((phases == ACTIVATION) | (phases == GRADIENT))
        at_max &= view.saturated_at_first == 0
    return at_max


def is_at_ends(view: StepsView) -> np.ndarray:
    """True where a tanh or sigmoid is where it is flat, and was not at first."""
    if not view.is_at_end.any():
        return view.is_at_end
    is_activation = view.is_weighed & (view.now.phases == ACTIVATION)
    return is_activation & view.is_at_end & (view.ends_at_first < 0.5)


def _have_died(view: StepsView, is_stuck: np.ndarray) -> np.ndarray:
    """``is_stuck``, of activations that were not so in an earlier step."""
    if is_stuck.any():
        is_stuck = is_stuck & (view.now.phases == ACTIVATION) & (view.alive > 0)
        is_stuck &= view.now.numel >= LEAST_ELEMENTS
    return is_stuck


def is_dead(view: StepsView) -> np.ndarray:
    """True where nearly all elements are zero, and were not in an earlier step."""
    return _have_died(view, view.is_zero)


def is_constant(view: StepsView) -> np.ndarray:
    """True where all elements are the same nonzero number, and were not in an earlier step."""
    return _have_died(view, view.is_stuck & ~view.is_zero)


def dies_at_once(view: StepsView) -> np.ndarray:
    """True where it is zero or constant, after many steps in a row in which it was neither."""
    return _have_died(view, view.is_stuck) & (view.alive >= _ALIVE)


def batch_is_unusual(row: int) -> Callable[[StepsView], np.ndarray]:
    """True where one of the batch's levels is far out of its range, on either side."""

    def condition(view: StepsView) -> np.ndarray:
        far: np.ndarray = np.abs(view.scores[row]) >= view.threshold
        far &= view.now.phases == INPUT
        if far.any():
            far &= np.abs(view.now.levels[row] - view.median[row]) >= _BATCH_SHIFT
        return far

    return condition


def weight_jumps(view: StepsView) -> np.ndarray:
    """True where one update took the weight far above its range."""
    far: np.ndarray = (view.scores[RMS] >= view.threshold) & (view.now.phases == WEIGHT)
    if far.any():
        far &= view.now.levels[RMS] - view.highest[RMS] >= _WEIGHT_SHIFT
    return far


def _level(row: int) -> Callable[[StepsView], np.ndarray]:
    return lambda view: np.exp2(view.now.levels[row])


def _median(row: int) -> Callable[[StepsView], np.ndarray]:
    return lambda view: np.exp2(view.median[row])


_SMALLER_UPDATES = (
    "lower the learning rate: updates of a thousandth of the weights are common. Of an update of "
    "your own look at the sign, too: p -= lr * p.grad"
)

NUMBER_RULES: tuple[NumberRule, ...] = (
    NumberRule(
        kind="loss_spike", names=["loss"], condition=loss_spikes, steps=1,
        warns=loss_is_worth_a_look, again=2.0,
        text="the loss is {value} (usually {usual})",  # OLMo-core's StabilityMonitorCallback
    ),
    NumberRule(
        kind="loss_spike", names=["loss"], condition=loss_rises, steps=5,
        warns=loss_is_worth_a_look, again=2.0,
        text="the loss stays high: {value} (usually {usual})",  # LLM Foundry's KillLossSpike
    ),
    NumberRule(
        kind="loss_spike", names=["loss"],
        condition=lambda loss: loss.is_jump and math.isnan(loss.usual), steps=1, warns=True,
        text="the loss is {value}, and was at most {most} before; the run is too short to tell "
        "what left its range first",
        advice="the learning rate may be too large, its warm-up too short, or the batch a "
        "different kind of data",
    ),
    NumberRule(
        kind="gradient_spike", names=["gradient_norm"], condition=norm_spikes, steps=1, warns=False,
        # OLMo-core's StabilityMonitorCallback
        text="the norm of all gradients is {value} (usually {usual})",
    ),
    NumberRule(
        kind="gradient_spike", names=["skipped"], condition=lambda number: True,
        is_over=lambda number: True, steps=1, warns=False, pause="",
        text="the update was skipped: {name}",
    ),
    NumberRule(
        kind="update", names=["update_size"], condition=update_is_unusual, steps=3, warns=False,
        cause="optimizer",
        text="updates are {value} of the weights per unit of the learning rate (usually {usual})",
    ),
    NumberRule(
        kind="update", names=["weight_growth"], condition=weights_grow, steps=1, cause="optimizer",
        text="weights are {value} times as large as ten steps ago, in parameters that hold half of "
        "all elements: updates are large relative to the weights", advice=_SMALLER_UPDATES,
        # A. Karpathy's recipe
    ),
    NumberRule(
        kind="update", names=["standstill"], condition=weights_grow_for_nothing, is_over=never,
        steps=1, cause="optimizer",
        text="weights are {value} times as large as at first and still grow, in parameters that "
        "hold half of all elements, while in {steps} steps the loss has fallen by less than a "
        "tenth of what it fell before: updates are large relative to the weights",
        advice=_SMALLER_UPDATES,  # A. Karpathy's recipe
    ),
    NumberRule(
        kind="update", names=["divergence"], condition=lambda loss: True, is_over=never, steps=1,
        cause="optimizer", text="the loss is {value}, was {usual} at first, and goes on growing: "
        "weights are {name} times as large as at first, in parameters that hold half of all "
        "elements", advice="lower the learning rate; look at the sign of the loss, and at targets "
        "that the model itself makes",
    ),
    NumberRule(
        kind="update", names=["descent"], condition=lambda loss: True, is_over=never, steps=1,
        cause="loss", text="the loss is {value}, was {usual} at first, and goes on falling: a term "
        "of it has no lower bound", advice="look at signs, as of a KL divergence, an entropy or a "
        "critic, and at targets that the criterion is not for, as of 255 where it takes 0 to 1",
    ),
    NumberRule(
        kind="loss_scale", names=["loss_scale"], condition=scale_falls, is_over=scale_is_well,
        steps=1, cause="precision",
        text="the loss scale is {value}; {share} of the last steps were skipped",
        advice="find the first gradient that is NaN or Inf, or the largest: its layer may need "
        "float32 or bfloat16",  # Micikevicius et al. (2018)
    ),
    NumberRule(
        kind="settings", names=["betas", "momentum"], condition=average_changed,
        is_over=lambda number: True, steps=1, warns=False, cause="optimizer",
        text="{name} was changed from {usual} to {value}",  # Kingma and Ba (2015)
    ),
    NumberRule(
        kind="settings", names=["eps", "threshold"], condition=factor_changed,
        is_over=lambda number: True, steps=1, warns=False, cause="optimizer",
        text="{name} was changed from {usual} to {value}",  # Kingma and Ba (2015)
    ),
    NumberRule(
        kind="settings", names=["lr"], condition=rate_rose, is_over=lambda number: True, steps=1,
        warns=False, cause="optimizer",
        text="{name} was changed from {usual} to {value}",
    ),
    NumberRule(
        kind="settings", names=["scaled_threshold"], condition=clips_scaled, steps=1,
        cause="optimizer",  # Micikevicius et al. (2018)
        text="gradients were clipped to {value} while they were still multiplied by the loss scale "
        "of {usual}", advice="call scaler.unscale_(optimizer) before clipping",
    ),
    NumberRule(
        kind="settings", names=["beta2"], condition=beta2_is_too_small, steps=1, cause="optimizer",
        text="Adam's beta2 is {value}, not above beta1^4 = {usual}, the bound of its convergence",
        advice="usual values are 0.999, and 0.95 for language models",  # Kingma and Ba (2015)
    ),
    NumberRule(
        kind="settings", names=["gradient_rms"], condition=epsilon_is_large, steps=20,
        cause="optimizer",
        text="the rms of all gradients is {value}, below half of the optimizer's eps of {usual}: "
        "most elements are divided by eps, not by their own size",
        advice="use a smaller eps or a larger loss",  # Kingma and Ba (2015)
    ),
)  # fmt: skip

TENSOR_RULES: tuple[TensorRule, ...] = (
    TensorRule(
        kind="explosion", condition=explodes, steps=1, pause="warning", value=_level(ABS_MAX),
        usual=lambda view: np.exp2(view.peak),
        text="its abs max is {value}, and was at most {usual} before",  # msprobe's monitor
    ),
    *(
        TensorRule(
            kind="batch", condition=batch_is_unusual(row), steps=1, value=_level(row),
            usual=_median(row), warns=False, cause="data",
            text=f"its {name} is {{value}} (usually {{usual}})",
        )
        for row, name in enumerate(NAMES)
    ),
    TensorRule(
        kind="headroom", condition=comes_near_the_end, steps=3,
        is_over=lambda view: view.now.headroom > BITS, value=lambda view: view.now.abs_max,
        usual=lambda view: view.limit, cause="precision", pause="warning",
        text="its largest magnitude {value} grows towards the largest {dtype} ({usual}), which it "
        "{reaches}",  # Theil and Sen's slope
    ),
    TensorRule(
        kind="precision", condition=underflows, steps=10, value=lambda view: view.now.zero_share,
        cause="precision", pause="warning",
        text="{value:.1%} of its elements are zero now and most others are subnormal: they are too "
        "small for {dtype}", advice="scale the loss, or keep this gradient in float32",
        # Micikevicius et al. (2018)
    ),
    TensorRule(
        kind="precision", condition=becomes_subnormal, steps=10,
        value=lambda view: view.now.subnormal_share, usual=lambda view: view.subnormal_at_first,
        warns=False, cause="precision", pause="warning",
        text="{value:.1%} of its nonzero elements are subnormal now: they are near the smallest "
        "{dtype} and have fewer significant bits",  # Micikevicius et al. (2018)
    ),
    TensorRule(
        kind="precision", steps=10, condition=is_saturated,
        value=lambda view: view.now.saturated_share, usual=lambda view: view.saturated_at_first,
        cause="precision", pause="warning",
        text="{count} of its elements are at the largest {dtype}: larger values may have been cut "
        "to it", advice="scale the tensor before the cast",  # docs/npu.md
    ),
    TensorRule(
        kind="precision", steps=50, condition=is_at_ends,
        value=lambda view: np.exp2(2 * view.now.levels[RMS]), usual=lambda view: view.ends_at_first,
        warns=False, pause="warning",
        text="nearly all its elements are at the ends of the function, where its gradient is "
        "nearly 0",  # Glorot and Bengio (2010)
    ),
    TensorRule(
        kind="dead", condition=is_dead, steps=50, pause="warning",
        text="{value:.1%} of its elements have been zero for 50 steps",
        advice="lower the learning rate, or use an activation with a slope below 0 (LeakyReLU)",
        # Maas et al. (2013)
    ),
    TensorRule(
        kind="dead", condition=is_constant, steps=50, pause="warning",
        text="all its elements have been equal for 50 steps",
        advice="check the weights and the input of its module",
    ),
    TensorRule(
        kind="dead", condition=dies_at_once, steps=3, warns=False, pause="warning",
        text="nearly all its elements have become zero, or equal",
    ),
    TensorRule(
        kind="update", condition=weight_jumps, steps=1, warns=False, value=_level(RMS),
        usual=lambda view: np.exp2(view.highest[RMS]), cause="optimizer",
        text="its rms is {value}, and was at most {usual} before: one update changed it",
    ),
)  # fmt: skip
