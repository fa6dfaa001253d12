"""Follows the training loop of one session: finds step boundaries, from optimizer steps and
GradScaler updates, and reads the loss (``losses.py``) and the gradients that an update is about to
use.

An optimizer step that is not run by a GradScaler closes the step, and so does GradScaler.update():
a step that the scaler skips never reaches the optimizer. Of several optimizers that take turns it
is the last optimizer (``step_ends.py``). Once monitor.step() was called, only it does.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Callable, Optional

import torch

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.calls.stored import parameter_ids
from fastcheck.errors import warn
from fastcheck.monitor.loop.chains import has_unscaled
from fastcheck.monitor.loop.facts import Facts
from fastcheck.monitor.session.parts import Parts
from fastcheck.monitor.session.run_meta import RunMeta
from fastcheck.monitor.session.session import Removal, Session
from fastcheck.record.site import Site
from fastcheck.utils.torch.flatten import flatten
from fastcheck.utils.torch.own_operators import unobserved
from fastcheck.utils.torch.readable import can_hold_nonfinite, can_read
from fastcheck.utils.torch.sharding import is_part
from fastcheck.utils.torch.streams import streams_of
from fastcheck.utils.torch.versions import GradScaler
from fastcheck.verdict.entries import Moment, ScaleDecided

from .evaluations import Evaluations
from .found_inf import UpdateGuard
from .hook_support import ModuleTree
from .losses import LossReader
from .protection import WeightProtection
from .scaling import Scaling, found_by
from .state_reader import StateReader
from .step_ends import StepEnds, other_optimizers

# The part that the facts are.
_LOOP = "what the training loop does"


class StepWatcher:
    """Follows the steps of the observed model. The methods are called (by ``optimizers.py``) for
    every optimizer and scaler of the process; it acts on those of this model.

    A method returns whether the call was about this model: only then may a stop that is due be
    raised there, because another model may train on another thread.
    """

    def __init__(
        self,
        session: Session,
        state: StateReader,
        meta: RunMeta,
        stops: Callable[[], None],
        boundary: Callable[[], None],
        tree: ModuleTree,
        facts: Facts,
        norm_limit: Optional[Callable[[], Optional[float]]] = None,
        are_all_here: Optional[Callable[[], bool]] = None,
    ) -> None:
        self.session = session
        self._facts = facts
        self._stops = stops
        self._boundary = boundary
        self._tree = tree
        # Told of every optimizer of this model that is about to step, and of clipping.
        self._meta = meta
        self._state = state
        training = session.config.training
        self._given = None if training.optimizers is None else weakref.WeakSet(training.optimizers)
        #: The ends of steps.
        self.ends = StepEnds(session, state.parameters, self._given)
        self._losses = LossReader(session, state)
        self.protection = WeightProtection(session, state.numbers, norm_limit, are_all_here)
        # The optimizer whose closure makes the gradients, within its step.
        self._evaluating: Optional[torch.optim.Optimizer] = None
        self._scaling = Scaling(training.scaler)
        self._evaluations = Evaluations(session, self.protection, state.read_gradients)
        self._apart = Parts(session)

    # Optimizers

    def before_update(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> bool:
        """An optimizer is about to step: the parameters and gradients are as it will use them."""
        holds_ours = self._state.owned_by(optimizer)
        has_copies = False
        if holds_ours:
            self.ends.others.is_on = False
        else:
            has_copies = self._look_at_copies(optimizer, has_closure)
            if has_closure:
                self.ends.by_loop.switch_off()
        is_known = holds_ours and self._given is None
        if not (is_known or self._concerns_or_takes(optimizer, has_copies)):
            return False
        self._scaling.update_reached = True
        session, step = self.session, self.session.step
        is_again = step.update.count and self._evaluations.updated_in.get(optimizer) == step.index
        if is_again and (has_closure or not step.calls):
            # The optimizer's closure will run the forward of the next step, which begins here; or
            # the model is called by another name than its own, which no hook sees.
            session.begin_step_if_closed()
        if session.is_closed:
            session.level.step_goes_on()
        self._evaluating = optimizer if has_closure else None
        is_first = self._meta.at_step_boundary(optimizer, session.step.index)
        session.step.update.is_elsewhere |= not holds_ours
        session.step.update.by = weakref.ref(optimizer)
        # A model that no optimizer holds may be frozen.
        if not has_closure and (holds_ours or has_copies):
            is_scaled = self._scaling.optimizer is optimizer
            self._notice(self._facts.before_update, optimizer, is_scaled)
        if session.is_active:
            if is_first:
                self._state.read_optimizer_state(optimizer, is_after=False)
            if session.tape is None:
                self._apart("learning rates", self._state.numbers.learning_rates, optimizer)
            self._state.read_for_update(
                optimizer if holds_ours else None,
                # A closure makes the gradients only now, within the step.
                gradients=not has_closure,
                # The flag that another monitor's guard has set is no loss scaling.
                scaled=UpdateGuard.scaler_found_inf(optimizer) is not None,
            )
            session.settle_update()
        if has_closure:
            self._evaluations.step_began(optimizer)
        else:
            if session.config.sync != "never":
                # Every rank has judged its records: if one stops, none applies its update.
                self.ends.reach_boundary()
            self.protection.before_update(optimizer)
        if session.config.level == "op":
            session.level.update_began()
        return True

    def _look_at_copies(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> bool:
        """``optimizer``, which holds no parameter of the model, is about to step. Whether its own
        have the shapes of these.
        """
        copies, text = self._facts.copies, None
        if self.session.backwards.owns_gradients:
            is_alone = self.ends.others.is_on and not has_closure
            text = copies.look_at(optimizer, self._state.parameters(), is_alone)
        if text is not None:
            self.session.faults.notes[text] = None
            self.session.event_store.warn_later(text)
        return copies.has(optimizer)

    def evaluation_began(self, optimizer: torch.optim.Optimizer) -> bool:
        """The optimizer calls the closure of its step."""
        if not self._concerns(optimizer):
            return False
        if self._evaluations.count(optimizer):
            self._losses.evaluated_again()
        return self._evaluations.began(optimizer)

    def evaluation_ended(self, optimizer: torch.optim.Optimizer) -> bool:
        """The closure has made the gradients, and the optimizer uses them next."""
        is_ours = self._concerns(optimizer)
        if is_ours:
            number = self._evaluations.ended(optimizer)
            if number == 1 and self._state.owned_by(optimizer):
                is_scaled = self._scaling.optimizer is optimizer
                self._notice(self._facts.before_update, optimizer, is_scaled)
            if self.session.config.sync != "never":
                self.ends.reach_boundary()
            self.protection.before_update(optimizer, number)
        return is_ours

    def after_update(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> bool:
        """An optimizer has stepped."""
        self.protection.after_update(optimizer)
        by = self.session.step.update.by
        if has_closure or by is None or by() is not optimizer:
            # The closure of the first step of an optimizer that holds copies has run only now.
            is_ours = self._concerns_or_takes if has_closure else self._concerns
            if not is_ours(optimizer):
                return False
        self._evaluating = None
        self._notice(self._facts.after_update, optimizer)
        session = self.session
        if session.config.level == "op":
            session.level.update_ended(optimizer)
        if has_closure and session.is_active and not self._evaluations.count(optimizer):
            self._state.read_gradients(optimizer, scaled=False)
        if session.is_active:
            self._state.read_optimizer_state(optimizer)
        session.step.update.count += 1
        self._losses.first_part = None  # its gradient was used
        self._evaluations.updated_in[optimizer] = session.step.index
        if self._scaling.optimizer is optimizer:
            return True
        may_be_scaled = session.config.training.has_own_scaling or self.ends.unfinished.has_skipped
        self.ends.unfinished.has_skipped = False
        if may_be_scaled and session.is_active:
            session.due(Moment.OWN_SCALE_UPDATED)
        self._end_update([optimizer])
        return True

    def _end_update(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Optimizers have stepped, or a GradScaler has skipped that: the step is over if no other's
        turn comes.
        """
        session = self.session
        if session.is_explicit:
            return
        is_over = False
        for optimizer in optimizers:
            is_over |= self.ends.turns.ends(optimizer, self._others)
        if is_over:
            self.close_step()
        else:
            session.end_part()

    def _others(self, optimizer: torch.optim.Optimizer) -> Iterable[torch.optim.Optimizer]:
        return other_optimizers(optimizer, [p for _, _, p in self._state.parameters()])

    # backward() and clipping

    def backward_began(
        self,
        roots: Sequence[torch.Tensor],
        gradients: Sequence[Optional[torch.Tensor]],
        inputs: Optional[Sequence[torch.Tensor]],
        is_kept: bool = False,
    ) -> bool:
        """backward() is called on ``roots``, and given these ``gradients``, if any; ``inputs``:
        what autograd.grad() is asked for; ``is_kept``: it keeps the graph, and its result has none.
        """
        session = self.session
        is_known = (session.is_active or session.is_closed) and self._apart(
            "the loss", self._losses.lead_to_model, roots, inputs
        )
        if is_known and session.is_closed:
            # The model may be called by another name than its own, which no hook sees.
            session.begin_step_if_closed()
        may_be_ours = session.backwards.began(is_known, roots)
        if inputs is not None and is_kept:
            self._notice(self._facts.gradient_asked, roots, inputs)
        if inputs is None:
            if may_be_ours:
                self._notice(self._facts.backward_began, roots)
            if session.config.level == "op":
                self._apart("consequences", session.level.loss_given, roots)
        may_be_over = self.ends.by_loop.probes or self.ends.unfinished.probes
        is_next = may_be_over and (is_known or (may_be_ours and inputs is None))
        if is_next and self.ended_before(is_backward=True):
            # The loss is that of the next step, whose forward is read already.
            session.close_step()
            session.begin_step_if_closed()
            self._losses.forward_step = session.step
            self.read_updated()
        is_ours = self._apart("the loss", self._losses.began, roots, gradients, inputs, is_known)
        if is_ours and session.config.finds_operators and session.tape is None:
            note = session.backwards.derivatives.note
            self._apart("derivatives", note, session.step.index, roots, session.rings.is_deferred)
        return is_ours or self._sees_all

    def pass_without_gradients(self, node: ModuleNode) -> None:
        """Takes in that the outermost call of a forward pass has returned."""
        self._notice(self._facts.models.pass_without_gradients, node)

    @property
    def looks_at_masks(self) -> bool:
        """True until attention was given a mask of each kind."""
        return self._facts.looks.masks.is_on

    def called(self, *given: Any) -> None:
        """A call begins, with these arguments and the tensors among them."""
        self._notice(self._facts.called, *given)

    def scheduler_stepped(self, scheduler: Any) -> bool:
        """A learning rate scheduler has."""
        self._notice(self._facts.schedulers.stepped, scheduler)
        return False

    def loading(self, module: torch.nn.Module, weights: Any) -> bool:
        """``module`` is about to be given these weights."""
        self._notice(self._facts.models.loading, module, weights)
        return False

    def loaded(self, module: torch.nn.Module, keys: Any) -> bool:
        """``module`` was given weights, of which some did not fit, as these ``keys`` say."""
        self._notice(self._facts.models.loaded, module, keys)
        return False

    def ended_before(self, *, is_backward: bool = False) -> bool:
        """A forward or backward pass begins: whether the open step ended without an optimizer's
        update.
        """
        by_loop = self.ends.by_loop
        if by_loop.probes and self._apart("updates by the loop", by_loop.is_over, is_backward):
            self._apart("updates by the loop", self._state.updated_by_loop)
            self.ends.closed_steps += 1
            return True
        is_looked_for = self.ends.unfinished.probes and not self.session.is_closed
        if self.session.config.level == "op" or not is_looked_for:
            return False
        is_within = self._evaluating is not None
        is_over = not is_within and self._apart("unfinished steps", self.ends.unfinished.is_over)
        if is_over:
            self._state.hand_changes.skipped()
            self.ends.turns.reset()
        return is_over

    def read_updated(self) -> None:
        """A step begins: reads the weights that the loop has updated."""
        if self.ends.by_loop.has_updated:
            self.ends.by_loop.has_updated = False
            self._apart("updates by the loop", self._state.read_stored)

    def backward_ended(self) -> bool:
        session, ends = self.session, self.ends
        was_alone, is_captured = session.backwards.ended(), session.tape is not None
        if was_alone is not None:
            self._notice(self._facts.backward_ended)
        is_ours = self._apart("the loss", self._losses.ended, bool(was_alone))
        if is_ours and session.backwards.owns_gradients:
            self._apart("gradients after backward", self._read_after_backward)
            if ends.others.is_on:
                self._apart("updates by the loop", ends.by_loop.after_backward)
            is_judged = not session.rings.is_deferred and not session.step.findings.all
            if is_judged and not session.config.training.has_own_scaling:
                # The signs that an update is left out are known by now.
                ends.unfinished.probes = {}
            else:
                self._apart("unfinished steps", ends.unfinished.after_backward)
        if was_alone is not None:
            # On the host no tensor waits.
            if session.rings.is_deferred or is_captured or session.config.level == "op":
                self._apart("consequences", session.level.backward_ended)
            is_within = is_captured or self._evaluating is not None
            is_counted = not is_within and (is_ours or not session.is_active)
            if is_counted and ends.endless.after_backward():
                self._apart("endless steps", ends.endless.close_step, ends.turns)
        return is_ours or self._sees_all

    def derived(
        self,
        roots: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        results: Sequence[Optional[torch.Tensor]],
    ) -> bool:
        """autograd.grad() has returned these."""
        self._apart("the loss", self._losses.derived, roots, results)
        self._notice(self._facts.derived, roots, inputs, results)
        return False

    def backward_left(self) -> None:
        """backward() has raised."""
        with self.session.lock:
            self.session.backwards.ended()

    @property
    def _sees_all(self) -> bool:
        """Op level observes every operator, of whatever model, while its observer runs."""
        return self.session.level.observes_all_models

    def _notice(self, method: Callable[..., None], *args: Any) -> None:
        """Tells the facts, in the thread that trains the models: gradients of another's are not
        touched. What is only captured is none.
        """
        is_on = self._facts.is_on and self.session.tape is None
        if is_on and self.session.backwards.owns_gradients:
            try:
                with unobserved():
                    method(*args)
            except Exception as error:
                self._facts.is_on = False
                self.session.report_internal_error(_LOOP, error)

    def before_clipping(self, gradients: Sequence[torch.Tensor], value: object = None) -> bool:
        """Gradients are about to be clipped. ``value``: to which each element is, if nothing else
        will tell of it.
        """
        self._notice(self._facts.clipping, gradients)
        is_ours = self._apart("gradient clipping", self._read_before_clipping, gradients)
        if is_ours and value is not None:
            self._clipped_to(gradients, value, by_norm=False)
        return is_ours

    def after_clipping(
        self, gradients: Sequence[torch.Tensor], norm: Optional[torch.Tensor], threshold: object
    ) -> bool:
        """Gradients were clipped, to ``threshold``; ``norm``: their total norm before."""
        is_ours = self._apart("gradient clipping", self._read_norm, gradients, norm)
        if is_ours:
            if self._of_model(gradients) is gradients:
                self._notice(self._facts.clipped, norm, threshold)
            if norm is not None:
                self._apart("gradient clipping", self.session.level.gradients_clipped, norm)
            self._clipped_to(gradients, threshold, by_norm=norm is not None)
            known = self.session.step.update.scaler
            scaler = None if known is None else known()
            is_scaled = scaler is not None and not has_unscaled(scaler)
            if is_scaled and self._facts.has_clipped_scaled:
                self._scaling.clipped_to = threshold
        return is_ours

    def _clipped_to(
        self, gradients: Sequence[torch.Tensor], threshold: object, *, by_norm: bool
    ) -> None:
        """The threshold to which gradients are clipped: by their norm, or each element."""
        if isinstance(threshold, (int, float)):
            self.session.step.update.is_clipped_away |= threshold == 0
            self._notice(self._facts.limit_given, gradients, threshold, by_norm)
        self._meta.schedule.clipped(self.session.step.index, threshold, by_norm)

    def _read_before_clipping(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Reads those of gradients that are about to be changed. Whether any is the model's."""
        session = self.session
        if not session.is_open:
            return False
        given = self._of_model(gradients)
        is_ours = self._state.read_before_clipping(
            given, self._owned_by_given(), scaled=session.is_scaled
        )
        self._settle(is_ours)
        if is_ours and given is gradients:
            self.protection.before_clipping(gradients)
        return is_ours

    def _read_norm(self, gradients: Sequence[torch.Tensor], norm: Optional[torch.Tensor]) -> bool:
        """Reads the norm by which gradients were clipped. Whether any is the model's."""
        session = self.session
        if not session.is_open or not self._state.were_clipped(self._of_model(gradients)):
            return False
        if norm is None or is_part(norm):  # of the shards of this rank
            return True
        if can_hold_nonfinite(norm) and can_read(norm):
            site = Site("", "", "backward", "grad_norm", 0, "total norm of the gradients")
            session.level.read_norm(norm, session.sites.intern(site))
            self._settle(True)
        return True

    def _of_model(self, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Chooses these gradients, or those of the model that they are copies of."""
        if not self.ends.others.hold(gradients):
            return gradients
        of_all = (parameter.grad for _, _, parameter in self._state.parameters())
        return [gradient for gradient in of_all if gradient is not None]

    def _read_after_backward(self) -> None:
        """Reads gradients where a closure has called backward(), because they are used at once, and
        where the training loop changes them by itself, because that comes next: not what a
        GradScaler unscales, and skips; nor in a graph that is being captured, whose replays run
        none of this.
        """
        session = self.session
        if not session.is_open:
            return
        if self._evaluating is not None:
            self._state.read_gradients(self._evaluating, scaled=False, is_early=True)
            self._settle(True)
        elif session.step.update.scaler is None and session.tape is None:
            owned = None if self._given is None else self._owned_by_given()
            if self._state.after_backward(owned):
                self._settle(True)
            if self._state.hand_changes.was_seen:
                self.protection.changed_by_loop()

    def _settle(self, is_ours: bool) -> None:
        if is_ours and self.session.rings.settles_calls:
            self.session.settle_call()

    def _owned_by_given(self) -> Optional[set[int]]:
        """The ids of the only parameters whose gradients are read; None: all are."""
        if self._given is None:
            return None
        return {key for optimizer in self._given for key in parameter_ids(optimizer)}

    def close_step(self) -> None:
        """Closes the open step. The ranks meet outside of the lock."""
        self.session.close_step()
        self.ends.reach_boundary()
        self.ends.closed_steps += 1

    # GradScaler

    def scaling(self, scaler: GradScaler, outputs: Any) -> bool:
        """GradScaler.scale(outputs): the gradients of this step carry the scale."""
        if self._scales_ours(scaler, outputs):
            self.session.begin_step_if_closed()
            self.session.scaled_by(scaler)
        return False

    def scaled(self, scaler: GradScaler, outputs: Any, results: Any) -> bool:
        """GradScaler.scale(outputs) has returned ``results``."""
        if not self._scales_ours(scaler, outputs):
            return False
        self._notice(self._facts.scaled, scaler, outputs, results)
        if self.session.is_active:
            self._apart("consequences", self.session.level.loss_given, outputs)
        scale = getattr(scaler, "_scale", None)
        self._apart("the loss", self._losses.scaled, outputs, results)
        is_run = self.session.tape is None and self.session.is_active  # not only captured
        if is_run and isinstance(scale, torch.Tensor):
            self._apart("the loss scale", self._state.numbers.loss_scale, scale)
        return False

    def unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """GradScaler.unscale_(optimizer) has returned."""
        self._notice(self._facts.unscaled, optimizer)
        return False

    def scaler_step_began(self, scaler: GradScaler, optimizer: torch.optim.Optimizer) -> bool:
        """GradScaler.step(optimizer): it decides whether the optimizer runs."""
        scaling = self._scaling
        if not scaling.follows(scaler) or not self._concerns_or_takes(optimizer):
            return False
        scaling.optimizer = optimizer
        scaling.update_reached = False
        clipped_to, scaling.clipped_to = scaling.clipped_to, None
        if clipped_to is not None:
            self._meta.schedule.clipped_scaled(clipped_to)
        return True

    def scaler_step_ended(self, scaler: GradScaler, optimizer: torch.optim.Optimizer) -> bool:
        """GradScaler.step(optimizer) has returned."""
        scaling = self._scaling
        if not scaling.follows(scaler) or not self._concerns(optimizer):
            return False
        skipped = not scaling.update_reached
        scaling.stepped_by = weakref.ref(scaler)
        scaling.stepped.add(optimizer)
        for word in found_by(scaler, optimizer):
            is_known = word.is_cpu or self.session.config.may_wait
            if is_known:
                with unobserved():
                    skipped = skipped or bool(word)
            is_wanted = self.session.is_active and (
                not is_known or self.session.level.reads_numbers
            )
            if is_wanted and (word.is_cpu or streams_of(word.device) is not None):
                seq = self._state.numbers.found_inf(word)
                if not is_known:  # reading it here would make the host wait
                    scaling.words.append(seq)
        scaling.skipped = bool(scaling.skipped) or skipped
        if not scaling.update_reached and self.session.is_active:
            if self.session.tape is None:
                self._apart("learning rates", self._state.numbers.learning_rates, optimizer)
            self._state.read_gradients(optimizer, scaled=True)
        return True

    def scaler_step_left(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes in that GradScaler.step(optimizer) has returned or raised."""
        if self._scaling.optimizer is optimizer:
            self._scaling.optimizer = None

    def scaler_updated(self, scaler: GradScaler) -> bool:
        """Takes in GradScaler.update(), which ends the iteration, skipped or not."""
        session, scaling = self.session, self._scaling
        if not scaling.has_stepped(scaler):
            return False
        skipped, scaling.skipped = scaling.skipped, None
        stepped = list(scaling.stepped)
        scaling.stepped.clear()
        if session.is_active:
            words, scaling.words = scaling.words, []
            session.due(ScaleDecided(bool(skipped), words))
        self._end_update(stepped)
        return True

    # monitor.step()

    def explicit_step(self, loss: Any) -> bool:
        """monitor.step(loss=...): closes the step; from now on nothing else does."""
        session = self.session
        session.is_explicit = True
        if session.is_active:
            self._apart("consequences", self.session.level.loss_given, loss)
            self._losses.given(loss)
            if session.step.gradients and not session.step.update.state_read:
                # No optimizer of torch.optim: the training loop updates the weights by itself.
                self._state.read_for_update(None, scaled=session.is_scaled)
            if session.config.training.has_own_scaling:
                session.due(Moment.OWN_SCALE_UPDATED)
        self.close_step()
        return True

    def emit_warnings(self) -> None:
        """Emits the warnings that are due, outside of all locks."""
        store = self.session.event_store
        news = self._tree.take_news() if self._tree.may_differ else ""
        if news:
            self.session.faults.notes[news] = None
            store.warn_later(news)
        if store.warnings:
            with store.lock:
                # Another thread may append to them meanwhile.
                due = [store.warnings.popleft() for _ in range(len(store.warnings))]
            for text, kind in due:
                warn(text, kind)
        for listener in store.listeners:
            listener.at_boundary()

    def release(self) -> None:
        """Takes back what a step that raised has left on its optimizer."""
        self.protection.release()

    def close(self) -> None:
        """The monitor is removed."""
        self.release()
        self._tree.close()

    # Shared

    def _concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._given is not None:
            return optimizer in self._given
        return self._state.owned_by(optimizer) or self.ends.others.has(optimizer)

    def _concerns_or_takes(
        self, optimizer: torch.optim.Optimizer, has_copies: bool = False
    ) -> bool:
        """The same of an optimizer that is about to step, and may be the first that ends a step."""
        return self._concerns(optimizer) or self.ends.others.takes(optimizer, has_copies)

    def parameters(self) -> list[torch.Tensor]:
        """Every parameter of the observed modules."""
        return [parameter for _, _, parameter in self._state.parameters()]

    def _scales_ours(self, scaler: GradScaler, outputs: Any) -> bool:
        """True if ``outputs`` may be this model's: the scaler is, this thread calls the model, or
        their graph leads to it.
        """
        if self._scaling.has_given or not self.session.backwards.is_foreign:
            return self._scaling.follows(scaler)
        tensors = [tensor for _, tensor in flatten(outputs, "")]
        return self._apart("the loss", self._losses.lead_to_model, tensors)

    def guarded(self, what: str, method: Callable[..., bool], *args: Any) -> None:
        """Calls one of the methods above. An error of fastcheck's own is reported once and switches
        this watcher off.
        """
        session = self.session
        if self._apart.are_off or session.removed:
            is_step = session.removed is Removal.FORKED and what == "optimizer steps"
            if is_step and self._concerns(*args[:1]):
                session.removed = Removal.DONE
                warn(
                    "this process was forked from the process that called fastcheck.install(), and "
                    "trains: nothing is observed here. Call install() in it"
                )
            elif not session.removed:
                self._join_ranks(method, *args)
            return
        is_ours = False
        try:
            with session.lock, torch._C.DisableTorchFunction():
                if not session.removed:
                    is_ours = method(self, *args)
        except Exception as error:
            self._apart.are_off = True
            self.release()
            self._join_ranks(method, *args)
            session.report_internal_error(what, error)
        meets, self.ends.meets = self.ends.meets, False
        store = session.event_store
        if store.warnings or store.news or self._tree.may_differ:
            self.emit_warnings()
        if meets and session.tape is None:
            self._boundary()
        elif is_ours and store.due:
            self._stops()

    def _join_ranks(self, method: Callable[..., bool], *args: Any) -> None:
        """Joins what the other ranks reduce before an update, where this watcher is off."""
        is_evaluated = method is StepWatcher.evaluation_ended
        if not is_evaluated and method is not StepWatcher.before_update:
            return
        with contextlib.suppress(Exception):
            optimizer, *has_closure = args
            if has_closure == [True]:
                self._evaluations.step_began(optimizer)
            elif self._concerns(optimizer):
                number = self._evaluations.count_up(optimizer) if is_evaluated else 0
                self.protection.join(optimizer, number)
