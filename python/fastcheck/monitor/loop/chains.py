"""The gradient of one parameter of an optimizer, from update to update: the calls of backward(), of
a GradScaler and of clipping that have changed it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional, Union

import torch

from fastcheck.calls.stored import parameter_ids
from fastcheck.utils.torch.memory_ref import MemoryRef, memory_ref
from fastcheck.utils.torch.own_operators import no_grad, unobserved
from fastcheck.utils.torch.readable import can_hold_nonfinite, can_read_now

from .hand_changes import FirstElements, Probe, first_elements, probe

if TYPE_CHECKING:
    from fastcheck._C import GradientProbe

#: Updates in a row in which a fact has to hold.
UPDATES = 10
# The number of times that something else than an optimizer writes a weight, and the updates between
# two of them at least.
_WRITTEN, _SELDOM = 3, 10
# Calls of backward() for one update whose gradients were cleared.
_LOST = 2
# The number of windows that are kept, each the updates between two at which gradients were cleared.
_WINDOWS = 8


@dataclass(eq=False)
class SinceUpdate:
    """Events at a gradient since the last update.

    ``is_whole``: every backward() has begun with what was left there. ``lost``: how often it was
    None when backward() began, though an earlier backward() had made it. ``is_clipped_early``:
    clipping came before the first backward(). ``is_passed``: another optimizer has stepped while it
    was there; ``is_across``: and backward() has added to it then. ``clipped``: the effect of a
    threshold that is not above 0, "" of any other; None: it was not clipped since backward() began;
    ``clippings``: how often, with a backward() that added to what was clipped between two.
    ``is_again``: the last backward() is on the loss of the call before, and ``is_doubled``: has
    added to what that left. ``has_scale``: a GradScaler has multiplied the loss of a backward()
    that changed it; ``is_mixed``: after unscale_() had divided it. ``scaled``: a probe of what that
    left, on the CPU. ``elements``: its first elements when the last backward() ended, if they are
    looked at.
    """

    is_whole: bool = True
    has_backward: bool = False
    had_gradient: bool = False
    lost: int = 0
    is_clipped_early: bool = False
    is_passed: bool = False
    is_across: bool = False
    clipped: Optional[str] = None
    clippings: int = 0
    is_again: bool = False
    is_doubled: bool = False
    has_scale: bool = False
    is_mixed: bool = False
    scaled: Optional[Union[GradientProbe, Probe]] = None
    elements: Optional[torch.Tensor] = None


@dataclass(eq=False)
class SchedulerCalls:
    """The calls of step() of one scheduler: ``since`` the last update and in ``all``; ``updates``:
    of its optimizer at the last of them; ``factor``: by which the first multiplied the rate.
    """

    since: int = 0
    all: int = 0
    updates: int = -1
    factor: float = 0.0


class Chain:
    """The gradient of one parameter of an optimizer, from update to update."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        # Its group and its place in it: torch refuses to swap a parameter that has weak references.
        self._place: Optional[tuple[int, int]] = None
        # The gradient as the last update, backward() or clipping has left it.
        self._left: Optional[tuple[MemoryRef, int]] = None
        self.since = SinceUpdate()
        self.since.is_whole = False
        # The last update came after a backward().
        self.had_backward = False
        self.updates = 0
        # Calls of backward() that have added to the gradient since the last update; the most before
        # an update.
        self.added = self.most_added = 0
        # The number of updates in which it was not cleared since it was last, and the same before
        # that.
        self.kept = 0
        self.windows: deque[int] = deque(maxlen=_WINDOWS)
        self.has_state = False
        # The first elements of the parameter as the last update has left them, and between how many
        # updates something else has changed them.
        self.weights: Optional[Union[GradientProbe, FirstElements]] = None
        self.written = 0
        # The schedulers of the optimizer; None: it has none.
        self.schedulers: Optional[weakref.WeakKeyDictionary[Any, SchedulerCalls]] = None
        # One of its facts has held at the last update, or may have.
        self._is_any = True

    @property
    def parameter(self) -> Optional[torch.Tensor]:
        optimizer, place = self._optimizer(), self._place
        if optimizer is None or place is None:
            return None
        try:
            found: torch.Tensor = optimizer.param_groups[place[0]]["params"][place[1]]
        except IndexError:  # the optimizer has fewer by now
            return None
        return found

    @property
    def gradient(self) -> Optional[torch.Tensor]:
        parameter = self.parameter
        return None if parameter is None else parameter.grad

    def is_left(self, gradient: Optional[torch.Tensor]) -> bool:
        """True if its gradient is as it was left."""
        if gradient is None or self._left is None:
            return False
        return self._left[0].is_of(gradient) and self._left[1] == gradient._version

    def leave(self, gradient: Optional[torch.Tensor]) -> None:
        self._left = None if gradient is None else (memory_ref(gradient), gradient._version)

    def backward_began(self, is_again: bool) -> None:
        """``is_again``: on the same loss as the call before."""
        parameter, since = self.parameter, self.since
        gradient = None if parameter is None else parameter.grad
        is_as_left = gradient is not None and self.is_left(gradient)
        since.is_across = (since.is_across or since.is_passed) and is_as_left
        since.is_again = is_again and is_as_left
        since.clippings = since.clippings if is_as_left else 0
        since.is_passed, since.clipped = False, None
        since.lost += since.had_gradient and gradient is None
        since.has_backward = True
        since.is_whole = since.is_whole and is_as_left
        since.has_scale = since.has_scale and is_as_left
        self.added = self.added if is_as_left else 0
        self.leave(gradient)

    def keeps_scale(self, gradient: Optional[torch.Tensor]) -> bool:
        """True if its gradient is multiplied by a scale, and nothing has changed it since."""
        if gradient is None or not (self.since.has_scale and self.is_left(gradient)):
            return False
        return self.since.scaled is None or not self.since.scaled.is_changed(gradient)

    def keeps_nan(self) -> bool:
        """True if the gradient holds NaN, after four times as many calls of backward() without an
        update as the program makes for an update. Reads the gradients then, and waits for a device;
        if only another gradient holds NaN, the chain follows that gradient from now on.
        """
        optimizer = self._optimizer()
        if optimizer is None or self.added != 4 * max(self.most_added + 1, UPDATES):
            return False
        if _holds_nan(self.gradient):
            return True
        places = (place for place, gradient in _gradients_of(optimizer) if _holds_nan(gradient))
        place = next(places, None)
        if place is not None:
            self._place, self.added, self.since.is_whole = place, 0, False
            self.weights = None
            self.leave(self.gradient)
        return False

    def backward_ended(self, scaler: Any) -> None:
        """``scaler``: the GradScaler that has made the loss of it."""
        optimizer, parameter, left = self._optimizer(), self.parameter, self._left
        gradient = None if parameter is None else parameter.grad
        if gradient is None and optimizer is not None:
            self._place = next((place for place, _ in _gradients_of(optimizer)), None)
            self.since.is_whole, self.weights = False, None
            gradient = self.gradient
        if gradient is not None and left is not None and left[0].is_of(gradient):
            is_added = left[1] != gradient._version
            self.added += is_added
            self.since.is_doubled |= is_added and self.since.is_again
        if scaler is not None and gradient is not None and not self.is_left(gradient):
            # A hook of the parameter may have divided it.
            is_scaled = _scale(scaler) != 1 and not _has_hooks(self.parameter)
            is_late = optimizer is not None and has_unscaled(scaler, optimizer)
            self.since.is_mixed |= is_scaled and is_late
            self.since.has_scale |= is_scaled
            self.since.scaled = probe(gradient) if gradient.is_cpu else None
        elif scaler is None:
            self.since.scaled = None
        self.leave(gradient)
        self.since.had_gradient = self._left is not None

    def is_multiplied_by(self, factor: float) -> bool:
        """True if the gradient is ``factor`` times what the last backward() left."""
        gradient, then = self.gradient, self.since.elements
        now = None if gradient is None or then is None else first_elements(gradient)
        if now is None or then is None or now.shape != then.shape:
            return False
        with unobserved(), no_grad():
            return bool(then.any()) and torch.allclose(now, then * factor, rtol=1e-5, atol=0.0)

    def facts(
        self, parameter: Optional[torch.Tensor], is_kept: bool
    ) -> Sequence[tuple[str, bool, Union[str, torch.Tensor, None]]]:
        """The facts of an update that comes, whether each holds, and what it is seen at; empty:
        none does, nor did at the update before. ``is_kept``: the gradients were not cleared.
        """
        since = self.since
        is_lost = since.had_gradient and parameter is not None and parameter.grad is None
        is_any = is_kept or is_lost or since.is_across or since.is_doubled
        is_any |= since.is_clipped_early or since.clippings > 1 or since.lost >= _LOST
        is_any |= bool(since.clipped)
        was_any, self._is_any = self._is_any, is_any
        if not (is_any or was_any):
            return ()
        return (
            ("not_cleared", is_kept, parameter),
            ("across", since.is_across, parameter),
            ("doubled", since.is_doubled, parameter),
            ("clipped_between", since.clippings > 1, f"{since.clippings} times"),
            ("cleared_early", is_lost, parameter),
            ("clipped_early", since.is_clipped_early, ""),
            ("wrong_limit", bool(since.clipped), since.clipped),
            ("cleared_between", since.lost >= _LOST, f"{since.lost} of {since.lost + 1}"),
        )

    def update_ended(self) -> None:
        self.updates += 1
        if self.added > self.most_added:
            self.most_added = self.added
        self.added = 0
        self.had_backward = self.since.has_backward
        self.since = SinceUpdate()

    def count_written(self, parameter: Optional[torch.Tensor]) -> bool:
        """Takes in that an update comes. Whether something has changed its ``parameter`` since the
        last, as a few times before: what does so at each update is a part of the program.
        """
        are_same = None if self.weights is None else self.weights.has_same_elements(parameter)
        if are_same is not False:
            return False
        self.written += 1
        return self.written >= _WRITTEN and self.updates >= _SELDOM * self.written

    def count_window(self, is_kept: bool) -> int:
        """Takes in that an update comes. After how many updates gradients are cleared, if it was
        the same number each time; 0: it was not, or it is after each.
        """
        if is_kept:
            self.kept += 1
            return 0
        self.windows.append(self.kept + 1)
        self.kept = 0
        first = self.windows[0]
        is_steady = first > 1 and len(self.windows) == _WINDOWS and len(set(self.windows)) == 1
        return first if is_steady else 0


def held(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """The numbers of the parameters of these."""
    return set().union(*map(parameter_ids, optimizers))


def has_unscaled(scaler: Any, optimizer: Optional[torch.optim.Optimizer] = None) -> bool:
    """True if unscale_() was called for the optimizer (None: for any), and nothing after it."""
    states = getattr(scaler, "_per_optimizer_states", {})
    chosen = states.values() if optimizer is None else [states.get(id(optimizer), {})]
    return any(getattr(state.get("stage"), "name", "") == "UNSCALED" for state in chosen)


def _scale(scaler: Any) -> float:
    """The scale, or that at first, where it is on a device."""
    scale = getattr(scaler, "_scale", None)
    if isinstance(scale, torch.Tensor) and scale.is_cpu:
        return float(scale)
    return float(getattr(scaler, "_init_scale", 0.0))


def _has_hooks(parameter: Any) -> bool:
    """True if hooks run with the gradient of this parameter, or after it."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _gradients_of(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
    """The gradients, each with the group of its parameter and the place in it."""
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if parameter.grad is not None:
                yield (number, place), parameter.grad


def _holds_nan(gradient: Optional[torch.Tensor]) -> bool:
    if gradient is None or not (can_hold_nonfinite(gradient) and can_read_now(gradient)):
        return False
    with unobserved(), no_grad():
        return bool(gradient.isnan().any())
