"""Facts of a training loop that no record holds, for the invariants of the watch.

Each is an order of calls or a flag of a module: whether gradients were cleared between two updates,
when they were clipped, what scaler.scale() was given, in which mode the model is (``models``), when
a scheduler steps (``schedulers``), what an optimizer begins with (``beginnings``). A fact is told
when it has held in so many updates in a row, once (``streaks``). Five read tensors: gradients to
which many calls of backward() have added without an update, once for all of these; the moments of
an optimizer that has stepped before, as a rule one of them; derivatives of derivatives, in a few
updates; and on the CPU the first elements of a gradient that DistributedDataParallel has averaged,
and of a weight.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch.nn.parallel import DistributedDataParallel

from fastcheck.calls.module_calls import Call, ModuleNode
from fastcheck.calls.stored import parameter_ids
from fastcheck.monitor.session.parts import Parts
from fastcheck.monitor.session.run_meta import Schedule
from fastcheck.monitor.session.session import Session
from fastcheck.monitor.weights.updates import NoDerivative
from fastcheck.utils.torch.frames import values_at_hand
from fastcheck.utils.torch.rank import group_size

from .averages import Averages
from .beginnings import Beginnings
from .chains import Chain, held
from .frozen import Frozen, of_frozen
from .hand_changes import elements_of, first_elements
from .loss_forms import LossForms, classes_of, has_no_second, is_output
from .masks import Masks
from .micro_batches import BackwardCalls
from .models import ModelFacts
from .schedulers import SchedulerFacts
from .stale_copies import StaleCopies
from .streaks import EVERY, LAST_LOOK, LOOKS, Streaks
from .update_losses import UpdateLosses

# The number of times that gradients were cleared before an optimizer has ever stepped.
_CLEARED = 64
# The forms that are looked for in the graphs of losses.
_FORMS = (
    "given_twice",
    "given_probabilities",
    "applied_twice",
    "one_element",
    "other_dimension",
    "no_logarithm",
    "earlier_loss",
    "old_cast",
    "constant_term",
    "of_itself",
    "across_samples",
    "moved",
    "last_sample",
    "padded",
    "over_samples",
    "narrow",
    "clamped",
    "dropped",
    "mask",
    "sees_next",
    "padding",
    "wrong_targets",
    "unshifted",
    "no_second",
    "alike",
    "broadcast",
    "focal_mean",
    "made_in_forward",
    "contrastive",
    "variational",
    "advantage",
    "trained_target",
    "trained_reference",
    "nothing_preferred",
    "one_class",
    "given_targets",
    "inert_term",
    "same_dropout",
    "unregistered",
    "no_parameter",
    "many_hot",
    "left_out",
    "turned",
    "entropy",
)
_TOTAL = "is that of the update before, to which another loss was added"
# An average that keeps no more of itself has its decay and 1 - decay the wrong way round.
_SWAPPED = 0.1


class _Looks(NamedTuple):
    """``without_derivative``: kept for what is said of gradients that are 0; ``ranks``: the number
    of them over which DistributedDataParallel averages gradients.
    """

    apart: Parts
    forms: LossForms
    masks: Masks
    averages: Averages
    frozen: Frozen
    micro_batches: BackwardCalls
    without_derivative: dict[int, NoDerivative]
    ranks: int


class Facts:
    """Notices facts of a session's training loop. Every method expects the session's lock to be
    held.
    """

    def __init__(
        self,
        session: Session,
        nodes: Sequence[ModuleNode],
        schedule: Schedule,
        without_derivative: dict[int, NoDerivative],
        *,
        is_on: bool,
    ) -> None:
        #: True if anyone is told of the facts, apart from those of copies.
        self.is_on = is_on
        self.copies = StaleCopies()
        self._session = session
        self._schedule = schedule
        self._chains: weakref.WeakKeyDictionary[torch.optim.Optimizer, Chain] = (
            weakref.WeakKeyDictionary()
        )
        # The same, without those of optimizers that were gone when the youngest was met.
        self._of_all: tuple[Chain, ...] = ()
        self._threshold = math.nan
        self._losses = UpdateLosses()
        self._streaks = streaks = Streaks(session, nodes)
        self.models = ModelFacts(streaks, nodes, self._chains)
        self.schedulers = SchedulerFacts(
            streaks, self._chains, session.config.training.process_group
        )
        self._beginnings = Beginnings(streaks, self._chains)
        modules = [node.module() for node in nodes]
        wrappers = (m for m in modules if isinstance(m, DistributedDataParallel))
        attends = any(isinstance(m, torch.nn.MultiheadAttention) for m in modules)
        #: The parts that look at a graph or at tensors now and then.
        self.looks = _Looks(
            Parts(session),
            LossForms(self._known, self._held, self.models.installed),
            Masks(is_on and attends),
            Averages(),
            Frozen(),
            BackwardCalls(),
            without_derivative,
            max((group_size(m.process_group) for m in wrappers), default=1),
        )

    def called(
        self,
        call: Call,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tensors: Sequence[tuple[str, torch.Tensor]],
    ) -> None:
        """A call begins, with these arguments and the ``tensors`` among them."""
        module = call.node.module()
        if call.parent is None:
            self.looks.masks.given(tensor for _, tensor in tensors)
        if isinstance(module, torch.nn.MultiheadAttention):
            fault = self.looks.masks.called(module, args, kwargs)
            if fault:
                self._streaks.tell_once("mask", 0, f"{call.node.path or 'the model'}: {fault}")

    def backward_began(self, roots: Sequence[torch.Tensor]) -> None:
        """backward() is called on these."""
        if self._streaks.runs:
            self._streaks.end("dropout_on", "statistics_on")
        is_again = self._losses.backward_began(roots)
        if self.looks.micro_batches.is_on:
            self.looks.micro_batches.backward_began(roots)
        if not self._streaks.updates:
            self._look_for_step(is_before=True)
        for chain in self._of_all:
            chain.backward_began(is_again)
        is_early = self._streaks.updates < EVERY
        if is_early or self._streaks.updates % EVERY == 0:
            self._losses.look_at_criteria(roots)
        if is_early:
            self._losses.look_at_sums(roots)
        # The losses of each of several optimizers that take turns are looked at.
        look, turn = divmod(self._streaks.updates, EVERY)
        if (not turn or turn < len(self._of_all)) and self.looks.forms.is_due(look, turn):
            self.looks.apart("the graph of the loss", self._look_at_graph, roots, turn)

    def gradient_asked(self, roots: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """autograd.grad() of ``roots`` is asked for that of ``inputs``, keeps the graph, and makes
        none.
        """
        if not any(isinstance(tensor, torch.nn.Parameter) for tensor in inputs):
            self._losses.is_without_graph |= all(map(is_output, roots))

    def derived(
        self,
        roots: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        results: Sequence[Any],
    ) -> None:
        """autograd.grad() of ``roots`` has returned these, that of ``inputs``. Reads them now and
        then, if they are derivatives of derivatives.
        """
        is_due = self._streaks.updates % EVERY == 0 and self._streaks.updates < LAST_LOOK
        if is_due and not any(isinstance(tensor, torch.nn.Parameter) for tensor in inputs):
            self.looks.forms.derives_by_data = True
            self._losses.has_no_second |= has_no_second(roots, results)

    def _look_at_graph(self, roots: Sequence[torch.Tensor], turn: int) -> None:
        """Looks at the first loss after an update."""
        forms = self.looks.forms.look(roots)
        if not self._losses.is_without_graph:
            forms.pop("constant_term", None)
        elif "constant_term" in forms:
            forms.pop("inert_term", None)
        if self._losses.has_no_second:
            forms["no_second"] = ""
        self._know_derivatives()
        if not self._streaks.updates and (classes := classes_of(roots)):
            self.looks.micro_batches.classes = classes
        for form in _FORMS:
            self._streaks.count(form, form in forms, forms.get(form, ""), turn, times=LOOKS)

    def _know_derivatives(self) -> None:
        """Keeps what leads to each weight, for what is said of gradients that are 0."""
        known, forms = self.looks.without_derivative, self.looks.forms
        for node, name, parameter in self._streaks.stored() if forms.without_derivative else ():
            if id(parameter) in forms.without_derivative:
                site = node.site("param", name, 0)
                known[site] = forms.without_derivative[id(parameter)]
        for node, name, parameter in self._streaks.stored() if known else ():
            if id(parameter) in forms.with_derivative:
                known.pop(node.site("param", name, 0), None)

    def _look_for_step(self, is_before: bool) -> None:
        """Names the optimizer of the program, if gradients were cleared again and again and none
        has stepped so far.
        """
        if self._losses.cleared == _CLEARED:
            return
        parameters = (p for _, _, p in self._streaks.stored() if p.requires_grad)
        first = next(parameters, None)
        self._losses.gradient_is(first, is_before)
        if self._losses.cleared == _CLEARED:
            numbers = {id(first), *map(id, parameters)}
            for _, optimizer in values_at_hand():
                if not issubclass(type(optimizer), torch.optim.Optimizer):
                    continue
                if not numbers.isdisjoint(parameter_ids(optimizer)):
                    self._streaks.tell_once("never_stepped", _CLEARED, type(optimizer).__name__)

    def _known(self) -> set[int]:
        """The parameters of the models and of the optimizers that have stepped."""
        return {id(parameter) for _, _, parameter in self._streaks.stored()} | self._held()

    def _held(self) -> set[int]:
        """The parameters of the optimizers that have stepped."""
        return held(self._chains)

    def backward_ended(self) -> None:
        """Backward has made gradients."""
        # The scaler of a loss, which autograd.grad() does not have.
        scaler, self._losses.scaler = self._losses.scaler, None
        if not self._streaks.updates:
            self._look_for_step(is_before=False)
        for chain in self._of_all:
            chain.backward_ended(scaler)
            if self.looks.ranks > 1 and chain.gradient is not None:
                chain.since.elements = first_elements(chain.gradient)
            if chain.added and "nan_kept" not in self._streaks.told and chain.keeps_nan():
                self._streaks.tell_once("nan_kept", chain.added, chain.parameter)

    def scaled(self, scaler: Any, outputs: Any, results: Any) -> None:
        """GradScaler.scale(outputs) has returned ``results``."""
        self._losses.scaled(scaler, outputs, results)

    def unscaled(self, optimizer: torch.optim.Optimizer) -> None:
        """A GradScaler has divided the gradients of this optimizer by the scale: of all that hold
        the same parameters, of which it may be a wrapper.
        """
        for chain in self._of_all:
            if chain.since.has_scale and id(chain.parameter) in parameter_ids(optimizer):
                chain.since.has_scale = False

    def clipping(self, gradients: Sequence[torch.Tensor]) -> None:
        """Gradients are about to be clipped."""
        for chain in self._of_all:
            gradient = chain.gradient
            if gradient is None:
                chain.since.is_clipped_early = not (chain.since.has_backward or gradients)
                continue
            chain.since.has_scale = chain.keeps_scale(gradient)
            if any(gradient is other for other in gradients):
                is_late = not chain.since.has_backward and chain.is_left(gradient)
                self._streaks.count("clipped_late", is_late, "")
                if chain.since.has_backward:
                    chain.since.clippings += chain.since.clipped is None
                    chain.since.clipped = ""
            chain.since.is_clipped_early = False
            if chain.since.has_backward:
                self._streaks.count("clipped_none", not gradients, chain.parameter)

    @property
    def has_clipped_scaled(self) -> bool:
        """True if a gradient was clipped that carried the loss scale, as far as is known."""
        return any(c.since.has_scale and c.since.clipped is not None for c in self._of_all)

    def clipped(self, norm: Optional[torch.Tensor], threshold: object) -> None:
        """Gradients were clipped, to ``threshold``; ``norm``: None where each element was."""
        for chain in self._of_all:
            chain.leave(chain.gradient)
            chain.since.elements = chain.since.scaled = None
        if norm is not None and isinstance(threshold, (int, float)):
            if threshold != self._threshold and 0 < threshold < math.inf:
                self._streaks.tell("norm_threshold", threshold, "")
            self._threshold = threshold

    def limit_given(
        self, gradients: Sequence[torch.Tensor], threshold: float, by_norm: bool
    ) -> None:
        """The threshold to which gradients are clipped: by their norm, or each element."""
        made = "makes this number of each element" if threshold else "makes them 0"
        made = "turns their sign" if by_norm and threshold else made
        what = "" if threshold > 0 else f"{threshold:g}, which {made}"
        for chain in self._of_all:
            is_clipped = chain.since.clipped is not None
            if is_clipped and any(chain.gradient is gradient for gradient in gradients):
                chain.since.clipped = what

    def before_update(self, optimizer: torch.optim.Optimizer, is_scaled: bool) -> None:
        """The optimizer is about to step. ``is_scaled``: a GradScaler has it step, and has divided
        its gradients.
        """
        chain, streaks = self._chains.get(optimizer), self._streaks
        if chain is None:
            self._beginnings.goes_on(optimizer, self._losses.last_scaler if is_scaled else None)
            self._beginnings.begins(optimizer)
            self.schedulers.look(optimizer)
        elif chain.since.has_backward:
            self._look_at_chain(optimizer, chain, is_scaled)
        elif chain.had_backward and chain.is_left(chain.gradient):
            streaks.count("stepped_again", True, chain.parameter, id(optimizer))
        if is_scaled:
            streaks.count("not_multiplied", self._losses.given_is_root, "")
        # The loss of the step is that of all optimizers.
        criteria = self._losses.criteria
        if criteria and len(self._of_all) == 1 == len(criteria):
            (criterion,) = criteria
            if criterion:
                streaks.tell("negative", 0.0, criterion)
        if streaks.updates < EVERY and self._losses.is_sum:
            streaks.count("earlier_loss", self._losses.is_total, _TOTAL, -1, times=LOOKS)
        if self.looks.micro_batches.is_on:
            self._look_at_micro_batches()
        self._losses.update_comes()
        streaks.updates += 1
        if streaks.updates % EVERY == 0:
            self.models.look()
            moved = self.looks.frozen.look(optimizer)
            if moved is not None:
                streaks.tell_once("frozen_moves", 0.0, moved)
        if streaks.updates == EVERY:
            self._beginnings.look_at_holders()

    def _look_at_chain(
        self, optimizer: torch.optim.Optimizer, chain: Chain, is_scaled: bool
    ) -> None:
        parameter, since, streaks = chain.parameter, chain.since, self._streaks
        is_kept = since.is_whole and (is_scaled or chain.is_left(chain.gradient))
        window = chain.count_window(is_kept)
        if window:
            streaks.tell_once("cleared_seldom", window, parameter)
        for fact, holds, about in chain.facts(parameter, is_kept):
            streaks.count(fact, holds, about, id(optimizer))
        if since.is_mixed or since.has_scale:
            self._look_at_scale(optimizer, chain, is_scaled)
        if chain.schedulers is not None:
            self.schedulers.before_update(chain.schedulers)
        if since.elements is not None and not is_scaled:
            self._look_at_reduction(optimizer, chain)
        if self.looks.averages.is_due(chain.updates):
            self._look_at_averages(optimizer, chain.updates)
        if chain.updates % EVERY == 0:
            idle = of_frozen(optimizer)
            streaks.count("of_frozen", bool(idle), idle, id(optimizer), times=LOOKS)
            self.schedulers.look(optimizer)
        if chain.count_written(parameter):
            streaks.tell_once("written", chain.written, parameter)
        if chain.has_state and not optimizer.state:
            self._beginnings.begins(optimizer)
        if chain.had_backward and streaks.runs:
            streaks.end("stepped_again", key=id(optimizer))

    def _look_at_micro_batches(self) -> None:
        batches = self.looks.micro_batches
        if not self._streaks.updates and batches.classes and batches.calls == 1:
            self._streaks.tell("first_loss", math.log(batches.classes), str(batches.classes))
        counts, over = batches.unequal_targets(), batches.left_over()
        self._streaks.count("target_means", bool(counts), counts, times=LOOKS)
        if over and len(self._of_all) == 1:
            self._streaks.tell_once("left_over", 0.0, over)

    def _look_at_averages(self, optimizer: torch.optim.Optimizer, updates: int) -> None:
        own = parameter_ids(optimizer)
        name, share = self.looks.averages.look(updates, own, self._held())
        if name:
            kind = "_stands" if share == 1 else "_short" if share > _SWAPPED else ""
            self._streaks.tell_once(f"average{kind}", share, name)

    def _look_at_scale(
        self, optimizer: torch.optim.Optimizer, chain: Chain, is_scaled: bool
    ) -> None:
        what = ""
        if chain.since.is_mixed:
            what = (
                "gradients to which backward() of a loss that was multiplied by the loss scale has "
                "added after scaler.unscale_(optimizer). Call that once for each update, after the "
                "last backward()"
            )
        elif not is_scaled and chain.keeps_scale(chain.gradient):
            what = (
                "gradients of a loss that was multiplied by the loss scale, and that nothing is "
                "known to have divided: call scaler.step(optimizer), not optimizer.step(), and "
                "scaler.update() after it"
            )
        if what:
            self._schedule.found_fault(self._session.step.index, optimizer, what)

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has stepped."""
        chain = self._chains.get(optimizer)
        if chain is None:
            chain = self._chains[optimizer] = Chain(optimizer)
            self._of_all = tuple(self._chains.values())
        chain.update_ended()
        chain.has_state = bool(optimizer.state)
        own = parameter_ids(optimizer) if len(self._of_all) > 1 else ()
        for other in self._of_all:
            parameter = other.parameter
            other.since.is_passed |= other.since.had_gradient
            if other is chain:
                other.leave(None if parameter is None else parameter.grad)
            if other is chain or id(parameter) in own:
                other.weights = elements_of(parameter)
                # This update used the gradient.
                other.since.had_gradient, other.since.lost = False, 0
            # Another may hold the same parameters.
            other.added = 0

    def _look_at_reduction(self, optimizer: torch.optim.Optimizer, chain: Chain) -> None:
        ranks, where = self.looks.ranks, self._streaks.name_of(chain.parameter)
        for factor, text in ((float(ranks), str(ranks)), (1 / ranks, f"1/{ranks}")):
            about = f"{text} (seen at {where})"
            is_so = chain.is_multiplied_by(factor)
            self._streaks.count("reduced_twice", is_so, about, hash((id(optimizer), text)))

    def tell_early(self) -> None:
        """The run stops: tells of what the last graph of a loss has shown, and of what has held in
        each update since the first.
        """
        self._streaks.tell_early(_FORMS, len(self._of_all))
