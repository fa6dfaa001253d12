"""Finds where unusual loops end their steps: optimizers that take turns, and that hold none of the
model's parameters; loops that update the weights themselves; iterations without an update, as in a
loop that scales its loss itself, skips the optimizer when gradients have overflowed, and continues
with the next batch; and steps that nothing ends.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import starmap
from typing import Callable, Optional

import torch
from torch.optim import Optimizer

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.calls.stored import StoredTensor, parameter_at, parameter_ids
from fastcheck.monitor.loop.hand_changes import AnyProbe, Probes, probe, probes_at, spread
from fastcheck.monitor.session.session import Session
from fastcheck.utils.torch.own_operators import no_grad, unobserved
from fastcheck.utils.torch.readable import can_read, has_memory
from fastcheck.utils.torch.sharding import local
from fastcheck.verdict.entries import Moment


class Turns:
    """An iteration is over when each optimizer has stepped that is expected to.

    At first these are all there are, later those that had a turn in the iteration before. Where
    they don't take turns (five steps of the first for each of the second), each step ends an
    iteration. An optimizer that comes later, for parameters that others have, takes their place.
    """

    def __init__(self, given: Optional[Iterable[Optimizer]]) -> None:
        self._expected: weakref.WeakSet[Optimizer] = weakref.WeakSet(given or ())
        self._is_begun = given is not None
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # They had no turn where they were expected.
        self._left_out: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # Several have taken turns at least once.
        self._is_known = False
        self._has_repeated = False
        self._each_ends = False
        # No other is expected.
        self._only: Optional[weakref.ref[Optimizer]] = None

    def ends(
        self, optimizer: Optimizer, others: Callable[[Optimizer], Iterable[Optimizer]]
    ) -> bool:
        """``optimizer`` has stepped, or a GradScaler has skipped that. Whether the iteration is
        over. ``others``: asked once, for the other optimizers of the model.
        """
        if not self._is_begun:
            self._is_begun = True
            self._expected.update(others(optimizer))
            self._expected.add(optimizer)
        if self._each_ends or (self._only is not None and self._only() is optimizer):
            return True
        self._only = None
        if optimizer in self._stepped:
            return self._repeat()
        if optimizer not in self._expected:
            own = parameter_ids(optimizer)
            replaced = [known for known in self._expected if parameter_ids(known) & own]
            self._left_out.update(replaced)
            self._expected.difference_update(replaced)
            self._expected.add(optimizer)
            self._each_ends = optimizer in self._left_out
            self.reset()
            return True
        self._stepped.add(optimizer)
        if not self._expected <= self._stepped:
            return False
        self._is_known = len(self._expected) > 1
        if not self._is_known:
            self._only = weakref.ref(optimizer)
        self.reset()
        return True

    def reset(self) -> None:
        """A step of the run has ended, for whatever reason."""
        self._stepped.clear()
        self._has_repeated = False

    def _repeat(self) -> bool:
        """An optimizer's turn comes again before that of others."""
        if self._is_known and not self._has_repeated:
            self._has_repeated = True  # an iteration may be broken off
            return False
        self._each_ends = self._is_known
        self._left_out.update(self._expected - self._stepped)
        self._expected &= self._stepped
        self.reset()
        return True


def other_optimizers(
    optimizer: Optimizer, parameters: Iterable[torch.Tensor]
) -> Iterator[Optimizer]:
    """The optimizers of this process that update others of ``parameters``, and none that
    ``optimizer`` or another of them updates. Looks for them only where a trained parameter is left.
    """
    left = {id(p) for p in parameters if p.requires_grad} - parameter_ids(optimizer)
    taken = parameter_ids(optimizer)
    for candidate in _living() if left else ():
        ids = parameter_ids(candidate)
        if ids & left and not ids & taken:
            taken |= ids
            yield candidate


def _living() -> list[Optimizer]:
    """torch keeps no list of them. Only those whose step() calls the hooks of optimizers."""
    return [
        candidate
        for candidate in gc.get_objects()
        if issubclass(type(candidate), Optimizer)
        and getattr(type(candidate).step, "hooked", False)
        and "param_groups" in vars(candidate)
    ]


def _are_held(parameters: Iterable[StoredTensor]) -> bool:
    """True if an optimizer of this process holds one of these."""
    ours = {id(parameter) for _, _, parameter in parameters}
    return any(parameter_ids(candidate) & ours for candidate in _living())


# The number of times that an optimizer is looked for that holds parameters of the model.
_SEARCHES = 3


class OtherHolders:
    """Optimizers that hold none of the model's parameters, where none is known that does: of copies
    in more bits, which the training loop writes back; of what functional_call() is given; of what a
    frozen model is trained for. They end its steps.
    """

    def __init__(
        self, session: Session, parameters: Callable[[], list[StoredTensor]], *, is_on: bool
    ) -> None:
        self._session = session
        self._parameters = parameters
        #: True if there may be any. Not once an optimizer of the model has stepped.
        self.is_on = is_on
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._searches: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    @property
    def may_be_none(self) -> bool:
        """True if no optimizer has ended a step."""
        return self.is_on and not self._known

    def has(self, optimizer: Optimizer) -> bool:
        """True if the optimizer is in this set."""
        return self.is_on and optimizer in self._known

    def hold(self, gradients: Sequence[torch.Tensor]) -> bool:
        """True if any of these gradients belongs to a tensor that an optimizer of this set
        holds.
        """
        if not self.is_on or not self._known:
            return False
        ids = set(map(id, gradients))
        held = (p for owner in self._known for group in owner.param_groups for p in group["params"])
        return any(id(p.grad) in ids for p in held if p.grad is not None)

    def takes(self, optimizer: Optimizer, has_copies: bool = False) -> bool:
        """``optimizer``, which holds no parameter of the model, is about to step. Whether it ends
        steps: its own have gradients, or the shapes of the model's (``has_copies``), and a backward
        pass of the model is over in this iteration.
        """
        session = self._session
        if not self.is_on or optimizer in self._known:
            return self.is_on
        if session.is_explicit or not session.step.update.passes:
            return False
        held = [p for group in optimizer.param_groups for p in group["params"]]
        searches = self._searches.get(optimizer, 0)
        is_ours = has_copies or any(p.grad is not None for p in held)
        if not is_ours or searches >= _SEARCHES or not session.backwards.owns_gradients:
            return False
        self._searches[optimizer] = searches + 1
        if _are_held(self._parameters()):
            return False
        self._known.add(optimizer)
        session.faults.notes[
            f"a step ends where {type(optimizer).__name__} steps: it holds none of the model's "
            f"parameters, but {len(held):,} other tensors, and no optimizer was found that does"
        ] = None
        return True


# Above what gradients are accumulated over. What a step has read is kept, and searched, until it
# ends.
_MOST_PASSES = 1000
# Updates by the loop itself that never clear gradients. Weights may also be limited, or get noise,
# between passes whose gradients add up.
_UNCLEARED = 64


class _Weight:
    """A parameter and its gradient, as a backward pass has left them."""

    def __init__(self, node: ModuleNode, name: str, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        self._node, self._name, self._id = node, name, id(parameter)
        self._probe = probe(parameter)
        self._gradient_probe = None if gradient is None else probe(gradient)

    def is_changed(self) -> bool:
        """True if it was written since. Within functional_call() another is in its place."""
        parameter = parameter_at(self._node, self._name)
        if parameter is None or id(parameter) != self._id:
            return False
        return self._probe.is_changed(parameter)

    def is_cleared(self) -> bool:
        """True if its gradient is gone, or was written since."""
        parameter = parameter_at(self._node, self._name)
        gradient = None if parameter is None else parameter.grad
        if gradient is None or self._gradient_probe is None:
            return True
        return self._gradient_probe.is_changed(gradient)


class LoopUpdates:
    """Finds the steps of a session whose loop updates the weights itself, where no optimizer is
    found that holds any: a forward or backward pass begins after a backward pass, and since that a
    weight has changed and its gradient has been cleared. Gradients that are accumulated are not
    cleared, and weights that are clipped or averaged beside an optimizer are those of an optimizer.
    """

    def __init__(
        self, session: Session, parameters: Callable[[], list[StoredTensor]], others: OtherHolders
    ) -> None:
        self._session = session
        self._parameters = parameters
        self._others = others
        #: Parameters as the last backward pass has left them, in the step of this number.
        self.probes: list[_Weight] = []
        self._step = -1
        # The loop clears gradients right before backward(), after the forward pass.
        self._clears_late = False
        self._is_known = False
        self._searches = 0
        # Passes in a row that began with changed weights and the gradients of the pass before.
        self._uncleared = 0
        #: The step that was closed last has ended so: the weights are not read yet.
        self.has_updated = False

    def switch_off(self) -> None:
        """An optimizer calls a closure, which may write copies that it holds back to the model."""
        self.probes.clear()
        self._searches = _SEARCHES

    def after_backward(self) -> None:
        """Gradients were made in the open step."""
        self.probes.clear()
        is_off = self._session.is_explicit or self._searches >= _SEARCHES
        if is_off or not self._others.may_be_none:
            return
        self._step = self._session.step.index
        parameters = self._parameters()
        # torch.autograd.grad() leaves no gradient in any.
        self.probes = [_Weight(*stored) for stored in spread(parameters) or parameters[:3]]

    def is_over(self, is_backward: bool) -> bool:
        """Called where a forward or backward pass begins: whether the open step has ended. Then
        the weights have been updated.
        """
        session = self._session
        if session.is_closed or session.step.index != self._step:
            self.probes.clear()  # something else has ended it
            return False
        if session.is_explicit or not session.is_active or session.tape is not None:
            return False
        if not torch.is_grad_enabled() or not session.backwards.owns_gradients:
            return False
        if not any(weight.is_changed() for weight in self.probes):
            return False
        is_cleared = all(weight.is_cleared() for weight in self.probes)
        self._uncleared = 0 if is_cleared else self._uncleared + is_backward
        if self._uncleared == _UNCLEARED and is_backward and not _are_held(self._parameters()):
            session.event_store.warn_later(
                f"gradients are not cleared: in {_UNCLEARED} updates in a row, which the training "
                "loop makes itself, backward() added to the gradients of the update before. Set "
                "them to None, or call model.zero_grad(), after each update"
            )
        if not is_cleared and (is_backward or not self._clears_late):
            return False
        self._clears_late |= is_backward
        if is_backward and session.config.level == "op":
            return False  # the operators of the forward pass are those of the open step
        if not self._is_known and self._has_holder():
            return False
        self.probes.clear()
        self.has_updated = True
        return True

    def _has_holder(self) -> bool:
        """True if an optimizer holds parameters of the model."""
        self._searches += 1
        if _are_held(self._parameters()):
            return True
        self._is_known, self._searches = True, 0
        self._session.faults.notes[
            "a step ends where the next pass begins after the training loop has changed a weight "
            "and cleared its gradient: no optimizer was found that holds it"
        ] = None
        return False


class EndlessSteps:
    """Counts the backward passes of a session's open step."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._has_warned = False

    def after_backward(self) -> bool:
        """A backward pass is over; the session's lock is held. Whether the step is to be closed:
        nothing has done so for 1,000 of them.
        """
        session, update = self._session, self._session.step.update
        if not update.passes:
            update.first_pass_end = session.next_seq
        update.passes += 1
        return update.passes >= _MOST_PASSES and not session.is_closed

    def close_step(self, turns: Turns) -> None:
        """Closes it; the session's lock is held."""
        session, index = self._session, self._session.step.index
        if not self._has_warned:
            self._has_warned = True
            session.event_store.warn_later(
                f"{_MOST_PASSES:,} backward passes have run in step {index:,} without an update of "
                f"the weights that ends it: fastcheck ends a step after {_MOST_PASSES:,} of them. "
                "Call monitor.step() where an iteration of the loop ends"
            )
        session.close_step()
        turns.reset()


# After so many backward passes in a row that left no gradient (of a model that is not trained), the
# parameters are searched once in so many passes.
_MOST_FRUITLESS = 64


class UnfinishedSteps:
    """Finds the steps of a session whose update was left out. Every method expects the session's
    lock to be held.

    That gradients were cleared is no proof: a step may have several backward passes, and clear them
    in between. So it counts only where something shows why the update was left out: a gradient that
    is not finite, or a loss scale that install() was given.
    """

    def __init__(self, session: Session, parameters: Callable[[], list[StoredTensor]]) -> None:
        self._session = session
        self._parameters = parameters
        #: True if there was one since the last update.
        self.has_skipped = False
        self._step = -1
        #: Parameters that had a gradient when the last backward() ended: without any no step is
        #: over.
        self.probes: Probes = {}
        # Backward passes in a row after which no parameter had a gradient.
        self._fruitless = 0

    def after_backward(self) -> None:
        """Gradients were made in the open step."""
        self._step = self._session.step.index
        self.probes = probes_at([*self.probes])
        if not self.probes:
            if self._fruitless < _MOST_FRUITLESS or self._fruitless % _MOST_FRUITLESS == 0:
                held = spread(self._parameters())
                self.probes = probes_at([(node, name) for node, name, _ in held])
            self._fruitless = 0 if self.probes else self._fruitless + 1

    def is_over(self) -> bool:
        """Called where a forward or backward pass begins: whether the open step has ended, without
        an update. Then its gradients are settled.
        """
        session = self._session
        step = session.step
        if step.index != self._step or not self.probes or session.is_explicit:
            return False
        if session.is_closed or not session.is_active or session.tape is not None:
            return False
        if step.update.count or step.update.scaler is not None or not torch.is_grad_enabled():
            return False
        if not session.backwards.owns_gradients:
            return False
        is_shown = session.config.training.has_own_scaling or step.findings.has_unused_gradients
        if not is_shown or not all(starmap(_is_cleared, self.probes.items())):
            return False
        self._step = -1
        self.has_skipped = True
        session.due(Moment.UPDATE_LEFT_OUT)
        return True


def _is_cleared(place: tuple[ModuleNode, str], then: AnyProbe) -> bool:
    parameter = parameter_at(*place)
    gradient = None if parameter is None else parameter.grad
    if gradient is None:
        return True
    gradient = local(gradient)
    is_plain = gradient.is_cpu and can_read(gradient) and has_memory(gradient)
    if not is_plain or gradient._version == then.version:
        return False
    with unobserved(), no_grad():
        return not bool(gradient.any())


class StepEnds:
    """Finds where the steps of one session end. ``given``: the optimizers that are to be followed,
    if the user has said so.
    """

    def __init__(
        self,
        session: Session,
        parameters: Callable[[], list[StoredTensor]],
        given: Optional[Iterable[Optimizer]],
    ) -> None:
        self._session = session
        self.turns = Turns(given)
        self.others = OtherHolders(session, parameters, is_on=given is None)
        self.unfinished = UnfinishedSteps(session, parameters)
        self.by_loop = LoopUpdates(session, parameters, self.others)
        self.endless = EndlessSteps(session)
        #: The ranks are to meet, outside of the lock.
        self.meets = False
        #: The number of steps that were closed.
        self.closed_steps = 0

    def reach_boundary(self) -> None:
        """The ranks meet once in a step."""
        update = self._session.step.update
        self.meets = self.meets or not update.has_met
        update.has_met = True
