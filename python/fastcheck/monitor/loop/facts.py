"""Facts of a training loop that no record holds, for the invariants of the watch.

Each is an order of calls or a flag of a module: whether gradients were cleared between two updates,
when they were clipped, what scaler.scale() was given, in which mode the model is. A fact is told
when it has held in so many updates in a row, once. Five read tensors: gradients to which many
calls of backward() have added without an update, once for all of these; the moments of an optimizer
that has stepped before, as a rule one of them; derivatives of derivatives, in a few updates; and on
the CPU the first elements of a gradient that DistributedDataParallel has averaged, and of a weight.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel

from fastcheck.calls.module_calls import Call, ModuleNode
from fastcheck.calls.stored import StoredTensor, parameter_ids, parameters_of
from fastcheck.monitor.session.parts import Parts
from fastcheck.monitor.session.run_meta import Schedule
from fastcheck.monitor.session.session import Session
from fastcheck.monitor.weight_updates import NoDerivative
from fastcheck.utils.text.layout import listed
from fastcheck.utils.torch.frames import program_frames, values_at_hand
from fastcheck.utils.torch.rank import group_size
from fastcheck.utils.torch.readable import is_materialised

from .averages import Averages, StaleStatistics
from .beginnings import factor_of, lost_moments, new_scale, small_factor, updates_of
from .chains import UPDATES, Chain
from .frozen import Frozen, of_frozen
from .hand_changes import elements_of, first_elements
from .identities import is_itself, is_untied, repeated
from .loss_forms import LossForms, classes_of, has_no_second, is_output
from .masks import Masks
from .micro_batches import BackwardCalls
from .stale_copies import StaleCopies
from .update_losses import UpdateLosses

# Modes of modules are looked at in one update of so many, and all of these looks agree.
_EVERY, _LOOKS = 10, 3
# The updates before which derivatives of derivatives are read, and passes of further models are
# looked at.
_LAST_LOOK = 50
# Passes without gradients in a row, between two that have some.
_PASSES = 3
# Calls of backward() for one update whose gradients were cleared.
_LOST = 2
# The number of times that an optimizer of the same parameters begins without a state.
_MADE = 3
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
)
_TOTAL = "is that of the update before, to which another loss was added"
# A momentum of batch norm from which on its statistics are nearly those of the last batch.
_LARGE_MOMENTUM = 0.9
_MOST_TRAINED = 0.02
_MOST_DROPPED = 0.75
# An average that keeps no more of itself has its decay and 1 - decay the wrong way round.
_SWAPPED = 0.1
_NAMED = 3
_LOOKED_AT = (_DropoutNd, _BatchNorm, DistributedDataParallel)


class _Run(NamedTuple):
    """A number of updates, or looks, in a row in which a fact has held. ``since``: the number of
    updates before the first. ``about``: perhaps the number of a parameter.
    """

    times: int
    since: int
    about: Union[str, int]


class _Looks(NamedTuple):
    """``without_derivative``: kept for what is said of gradients that are 0; ``factors``: the first
    of each LambdaLR; ``ranks``: the number of them over which DistributedDataParallel averages
    gradients.
    """

    apart: Parts
    forms: LossForms
    masks: Masks
    statistics: StaleStatistics
    averages: Averages
    frozen: Frozen
    micro_batches: BackwardCalls
    without_derivative: dict[int, NoDerivative]
    factors: weakref.WeakKeyDictionary[Any, float]
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
        self._stored = functools.partial(parameters_of, nodes, None)
        self._schedule = schedule
        # The modules that are looked at.
        self._nodes = [n for n in nodes if n.is_root or isinstance(n.module(), _LOOKED_AT)]
        self._chains: weakref.WeakKeyDictionary[torch.optim.Optimizer, Chain] = (
            weakref.WeakKeyDictionary()
        )
        # The same, without those of optimizers that were gone when the youngest was met.
        self._of_all: tuple[Chain, ...] = ()
        # By the fact and what it is of.
        self._runs: dict[tuple[str, int], _Run] = {}
        self._told: set[str] = set()
        self._updates = 0
        self._threshold = math.nan
        self._losses = UpdateLosses()
        modules = (node.module() for node in self._nodes)
        wrappers = (m for m in modules if isinstance(m, DistributedDataParallel))
        attends = any(isinstance(n.module(), torch.nn.MultiheadAttention) for n in nodes)
        #: The parts that look at a graph or at tensors now and then.
        self.looks = _Looks(
            Parts(session),
            LossForms(self._known, self._held),
            Masks(is_on and attends),
            StaleStatistics(),
            Averages(),
            Frozen(),
            BackwardCalls(),
            without_derivative,
            weakref.WeakKeyDictionary(),
            max((group_size(m.process_group) for m in wrappers), default=1),
        )
        # The number of optimizers that began without a state, by class and the parameters that they
        # hold.
        self._made: Counter[tuple[type, frozenset[int]]] = Counter()

    def pass_without_gradients(self, node: ModuleNode) -> None:
        """Takes in that a forward pass of this module without gradients has ended."""
        module = node.module()
        if module is None or {"dropout_on", "statistics_on"} <= self._told:
            return
        # One that is not trained, as a teacher, has no training pass in between.
        if not node.is_primary and (not self._chains or self._updates > _LAST_LOOK):
            return
        modal = [m for m in module.modules() if m.training and _has_modes(m)]
        drops = [m for m in modal if isinstance(m, _DropoutNd)]
        about = f"{type(drops[0]).__name__}, p={drops[0].p:g}" if drops else ""
        if not node.is_primary:
            is_apart = bool(drops) and self._held().isdisjoint(map(id, module.parameters()))
            about += f", in {node.path or type(module).__name__}, which no optimizer holds"
            self._count("dropout_on", is_apart, about, id(node), times=UPDATES)
            return
        self._count("dropout_on", bool(drops), about, times=_PASSES)
        norms = [m for m in modal if isinstance(m, _BatchNorm)]
        about = _counted(norms)
        self._count("statistics_on", bool(norms), about, times=_PASSES)

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
                self._tell_once("mask", 0, f"{call.node.path or 'the model'}: {fault}")

    def loading(self, module: torch.nn.Module, weights: Any) -> None:
        """load_state_dict() of this module is about to be given these."""
        if self._updates and is_itself(module, weights) and self._is_of_models(module):
            count = sum(1 for _ in module.parameters())
            self._tell_once("loaded_itself", count, _place_of_program().lstrip())

    def loaded(self, module: torch.nn.Module, keys: Any) -> None:
        """load_state_dict() of this module has left out these keys, and found no weight for
        others.
        """
        names = [name for name, _ in module.named_parameters()]
        if names and set(names) <= set(keys.missing_keys) and self._is_of_models(module):
            about = f"{keys.unexpected_keys[0]}, not {names[0]}{_place_of_program()}"
            self._tell_once("loaded_nothing", len(keys.unexpected_keys), about)

    def _is_of_models(self, module: torch.nn.Module) -> bool:
        roots = [root for node in self._nodes if node.is_root and (root := node.module())]
        is_part = any(module in root.modules() for root in roots)
        return is_part or any(root in module.modules() for root in roots)

    def backward_began(self, roots: Sequence[torch.Tensor]) -> None:
        """backward() is called on these."""
        if self._runs:
            self._runs.pop(("dropout_on", 0), None)
            self._runs.pop(("statistics_on", 0), None)
        is_again = self._losses.backward_began(roots)
        if self.looks.micro_batches.is_on:
            self.looks.micro_batches.backward_began(roots)
        if not self._updates:
            self._look_for_step(is_before=True)
        for chain in self._of_all:
            chain.backward_began(is_again)
        is_early = self._updates < _EVERY
        if is_early or self._updates % _EVERY == 0:
            self._losses.look_at_criteria(roots)
        if is_early:
            self._losses.look_at_sums(roots)
        # The losses of each of several optimizers that take turns are looked at.
        look, turn = divmod(self._updates, _EVERY)
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
        is_due = self._updates % _EVERY == 0 and self._updates < _LAST_LOOK
        if is_due and not any(isinstance(tensor, torch.nn.Parameter) for tensor in inputs):
            self._losses.has_no_second |= has_no_second(roots, results)

    def _look_at_graph(self, roots: Sequence[torch.Tensor], turn: int) -> None:
        """Looks at the first loss after an update."""
        forms = self.looks.forms.look(roots)
        if not self._losses.is_without_graph:
            forms.pop("constant_term", None)
        if self._losses.has_no_second:
            forms["no_second"] = ""
        self._know_derivatives()
        if not self._updates and (classes := classes_of(roots)):
            self.looks.micro_batches.classes = classes
        for form in _FORMS:
            self._count(form, form in forms, forms.get(form, ""), turn, times=_LOOKS)

    def _know_derivatives(self) -> None:
        """Keeps what leads to each weight, for what is said of gradients that are 0."""
        known, forms = self.looks.without_derivative, self.looks.forms
        for node, name, parameter in self._stored() if forms.without_derivative else ():
            if id(parameter) in forms.without_derivative:
                site = node.site("param", name, 0)
                known[site] = forms.without_derivative[id(parameter)]
        for node, name, parameter in self._stored() if known else ():
            if id(parameter) in forms.with_derivative:
                known.pop(node.site("param", name, 0), None)

    def _look_for_step(self, is_before: bool) -> None:
        """Names the optimizer of the program, if gradients were cleared again and again and none
        has stepped so far.
        """
        if self._losses.cleared == _CLEARED:
            return
        parameters = (p for _, _, p in self._stored() if p.requires_grad)
        first = next(parameters, None)
        self._losses.gradient_is(first, is_before)
        if self._losses.cleared == _CLEARED:
            numbers = {id(first), *map(id, parameters)}
            for _, optimizer in values_at_hand():
                if not issubclass(type(optimizer), torch.optim.Optimizer):
                    continue
                if not numbers.isdisjoint(parameter_ids(optimizer)):
                    self._tell_once("never_stepped", _CLEARED, type(optimizer).__name__)

    def _known(self) -> set[int]:
        """The parameters of the models and of the optimizers that have stepped."""
        return {id(parameter) for _, _, parameter in self._stored()} | self._held()

    def _held(self) -> set[int]:
        """The parameters of the optimizers that have stepped."""
        return set().union(*map(parameter_ids, self._chains))

    def backward_ended(self) -> None:
        """Backward has made gradients."""
        # The scaler of a loss, which autograd.grad() does not have.
        scaler, self._losses.scaler = self._losses.scaler, None
        if not self._updates:
            self._look_for_step(is_before=False)
        for chain in self._of_all:
            chain.backward_ended(scaler)
            if self.looks.ranks > 1 and chain.gradient is not None:
                chain.since.elements = first_elements(chain.gradient)
            if chain.added and "nan_kept" not in self._told and chain.keeps_nan():
                self._tell_once("nan_kept", chain.added, chain.parameter)

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
                self._count("clipped_late", is_late, "")
                if chain.since.has_backward:
                    chain.since.clippings += chain.since.clipped is None
                    chain.since.clipped = ""
            chain.since.is_clipped_early = False
            if chain.since.has_backward:
                self._count("clipped_none", not gradients, chain.parameter)

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
                self._tell("norm_threshold", threshold, "")
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
        chain = self._chains.get(optimizer)
        if chain is None:
            self._look_at_moments(optimizer, is_scaled)
            self._look_at_beginning(optimizer)
        elif chain.since.has_backward:
            parameter, since = chain.parameter, chain.since
            gradient = None if parameter is None else parameter.grad
            is_kept = since.is_whole and (is_scaled or chain.is_left(gradient))
            is_lost = since.had_gradient and gradient is None and parameter is not None
            window = chain.count_window(is_kept)
            if window:
                self._tell_once("cleared_seldom", window, parameter)
            is_any = is_kept or is_lost or since.is_across or since.is_doubled
            is_any |= since.is_clipped_early or since.clippings > 1 or since.lost >= _LOST
            is_any |= bool(since.clipped)
            # In most steps none holds, as in the step before.
            if is_any or chain.is_any:
                for fact, holds, about in (
                    ("not_cleared", is_kept, parameter),
                    ("across", since.is_across, parameter),
                    ("doubled", since.is_doubled, parameter),
                    ("clipped_between", since.clippings > 1, f"{since.clippings} times"),
                    ("cleared_early", is_lost, parameter),
                    ("clipped_early", since.is_clipped_early, ""),
                    ("wrong_limit", bool(since.clipped), since.clipped),
                    ("cleared_between", since.lost >= _LOST, f"{since.lost} of {since.lost + 1}"),
                ):
                    self._count(fact, holds, about, id(optimizer))
            chain.is_any = is_any
            if since.is_mixed or since.has_scale:
                self._look_at_scale(optimizer, chain, is_scaled)
            if chain.schedulers is not None:
                self._look_at_schedulers(chain.schedulers)
            if since.elements is not None and not is_scaled:
                self._look_at_reduction(optimizer, chain)
            self._look_at_averages(optimizer, chain.updates)
            if chain.updates % _EVERY == 0:
                idle = of_frozen(optimizer)
                self._count("of_frozen", bool(idle), idle, id(optimizer), times=_LOOKS)
            if chain.count_written(parameter):
                self._tell_once("written", chain.written, parameter)
            if chain.has_state and not optimizer.state:
                self._look_at_beginning(optimizer)
            if chain.had_backward and self._runs:
                self._runs.pop(("stepped_again", id(optimizer)), None)
        elif chain.had_backward and chain.is_left(chain.gradient):
            self._count("stepped_again", True, chain.parameter, id(optimizer))
        if is_scaled:
            self._count("not_multiplied", self._losses.given_is_root, "")
        # The loss of the step is that of all optimizers.
        criteria = self._losses.criteria
        if criteria and len(self._of_all) == 1 == len(criteria):
            (criterion,) = criteria
            if criterion:
                self._tell("negative", 0.0, criterion)
        if self._updates < _EVERY and self._losses.is_sum:
            self._count("earlier_loss", self._losses.is_total, _TOTAL, -1, times=_LOOKS)
        if self.looks.micro_batches.is_on:
            self._look_at_micro_batches()
        self._losses.update_comes()
        self._updates += 1
        if self._updates % _EVERY == 0:
            self._look_at_modes()
            moved = self.looks.frozen.look(optimizer)
            if moved is not None:
                self._tell_once("frozen_moves", 0.0, moved)
        if self._updates == _EVERY:
            self._look_at_shares()
            self._look_at_attributes()
            self._look_at_holders()
            self._look_at_ties()

    def _look_at_micro_batches(self) -> None:
        batches = self.looks.micro_batches
        if not self._updates and batches.classes and batches.calls == 1:
            self._tell("first_loss", math.log(batches.classes), str(batches.classes))
        counts, over = batches.unequal_targets(), batches.left_over()
        self._count("target_means", bool(counts), counts, times=_LOOKS)
        if over and len(self._of_all) == 1:
            self._tell_once("left_over", 0.0, over)

    def _look_at_averages(self, optimizer: torch.optim.Optimizer, updates: int) -> None:
        if not self.looks.averages.is_due(updates):
            return
        held = parameter_ids(optimizer)
        name, share = self.looks.averages.look(updates, held, self._held())
        if name:
            kind = "_stands" if share == 1 else "_short" if share > _SWAPPED else ""
            self._tell_once(f"average{kind}", share, name)

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
        held = parameter_ids(optimizer) if len(self._of_all) > 1 else ()
        for other in self._of_all:
            parameter = other.parameter
            other.since.is_passed |= other.since.had_gradient
            if other is chain:
                other.leave(None if parameter is None else parameter.grad)
            if other is chain or id(parameter) in held:
                other.weights = elements_of(parameter)
                # This update used the gradient.
                other.since.had_gradient, other.since.lost = False, 0
            # Another may hold the same parameters.
            other.added = 0

    def scheduler_stepped(self, scheduler: Any) -> None:
        """A learning rate scheduler has stepped, of whatever optimizer."""
        optimizer = getattr(scheduler, "optimizer", None)
        if not isinstance(optimizer, torch.optim.Optimizer):
            return
        about = f"{type(scheduler).__name__} of {type(optimizer).__name__}"
        chain = self._chains.get(optimizer)
        if chain is None:
            self._count("idle_schedule", self._is_replaced(optimizer), about, id(scheduler))
            return
        if chain.schedulers is None:
            chain.schedulers = weakref.WeakKeyDictionary()
        calls = chain.schedulers.setdefault(scheduler, [0, 0, -1])
        before, calls[2] = calls[2], chain.updates
        is_idle = chain.updates == before and self._is_replaced(optimizer)
        self._count("idle_schedule", is_idle, about, id(scheduler))
        calls[0] += 1
        calls[1] += 1
        if calls[1] == 1:
            self.looks.factors[scheduler] = factor_of(scheduler)
        elif calls[1] == _CLEARED and (
            small := small_factor(scheduler, self.looks.factors[scheduler])
        ):
            self._tell_once("small_factor", 0.0, small)
        if calls[1] == 1:
            # Where step(number) was called the number of steps is not that.
            updates, steps = updates_of(optimizer), getattr(scheduler, "_step_count", 1) - 1
            if getattr(scheduler, "last_epoch", 0) == 1 and updates > chain.updates:
                self._tell_once("schedule_anew", updates, type(scheduler).__name__)
            elif steps > chain.updates + 1 and 0 < updates <= chain.updates:
                self._tell_once("optimizer_anew", steps, about)

    def _is_replaced(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if another optimizer of the same parameters was met after this optimizer, which does
        not wrap it: it has other groups.
        """
        own, groups = parameter_ids(optimizer), set(map(id, optimizer.param_groups))
        met = list(self._chains)
        later = met[met.index(optimizer) + 1 :] if optimizer in self._chains else met
        return any(
            not own.isdisjoint(parameter_ids(other))
            and groups.isdisjoint(map(id, other.param_groups))
            for other in later
        )

    def _look_at_schedulers(self, schedulers: Mapping[Any, list[int]]) -> None:
        # Some wrappers step a scheduler once for each rank.
        if group_size(self._session.config.training.process_group) > 1:
            return
        for scheduler, calls in schedulers.items():
            about = f"{type(scheduler).__name__} {calls[0]} times"
            self._count("scheduled_twice", calls[0] > 1, about, id(scheduler))
            calls[0] = 0

    def _look_at_reduction(self, optimizer: torch.optim.Optimizer, chain: Chain) -> None:
        ranks, where = self.looks.ranks, self._name_of(chain.parameter)
        for factor, text in ((float(ranks), str(ranks)), (1 / ranks, f"1/{ranks}")):
            about = f"{text} (seen at {where})"
            is_so = chain.is_multiplied_by(factor)
            self._count("reduced_twice", is_so, about, hash((id(optimizer), text)))

    def _look_at_moments(self, optimizer: torch.optim.Optimizer, is_scaled: bool) -> None:
        """An optimizer is about to step for the first time here, and has before."""
        updates = updates_of(optimizer)
        # A first update without gradients is how some loaders make the state that they fill.
        if updates < 2:
            return
        if "moments_lost" not in self._told and (lost := lost_moments(optimizer)):
            self._tell_once("moments_lost", updates, lost)
        scale = new_scale(self._losses.last_scaler) if is_scaled and not self._updates else 0.0
        if scale > 1:
            self._tell_once("scale_anew", updates, f"{scale:g}")

    def _look_at_beginning(self, optimizer: torch.optim.Optimizer) -> None:
        """Counts how often an optimizer of one class and the same parameters begins without a
        state.
        """
        # Without momentum it keeps none.
        if optimizer.state or not any(g.get("momentum", True) for g in optimizer.param_groups):
            return
        held = type(optimizer), frozenset(parameter_ids(optimizer))
        self._made[held] += 1
        if self._made[held] == _MADE:
            about = f"{type(optimizer).__name__}, {self._updates} updates together"
            self._tell_once("made_anew", _MADE, about)

    def _look_at_holders(self) -> None:
        # A wrapper has the optimizer that it holds step.
        values = [value for optimizer in self._chains for value in vars(optimizer).values()]
        inner = {id(value) for value in values if isinstance(value, torch.optim.Optimizer)}
        outer = (optimizer for optimizer in self._chains if id(optimizer) not in inner)
        holders = Counter(key for optimizer in outer for key in parameter_ids(optimizer))
        shared = [s for s in self._stored() if holders[id(s[2])] > 1]
        if shared:
            self._tell("held_twice", len(shared), _names(shared))

    def _look_at_ties(self) -> None:
        if any(node.is_primary and is_untied(node.module()) for node in self._nodes):
            about = "the input embedding and the output layer (tie_word_embeddings)"
            self._tell("untied", 2, about)
        roots = (node.module() for node in self._nodes if node.is_root)
        if about := next(filter(None, map(repeated, roots)), ""):
            self._tell("repeated_layer", 1, about)

    def _look_at_modes(self) -> None:
        modules = [module for node in self._nodes if (module := node.module()) is not None]
        roots = [node.module() for node in self._nodes if node.is_root]
        modal = [module for module in modules if _has_modes(module)]
        is_off = bool(modal) and not any(m is not None and m.training for m in (*modal, *roots))
        frozen = [module for module in modal if module.training and _is_frozen_norm(module)]
        about = _counted(frozen)
        self._count("frozen_norms", bool(frozen), about, times=_LOOKS)
        norms = [m for m in modal if m.training and _averages_little(m)]
        about = f"{_counted(norms)}, momentum={norms[0].momentum:g}" if norms else ""
        self._count("norm_momentum", bool(norms), about, times=_LOOKS)
        drops = [
            m for m in modal if isinstance(m, _DropoutNd) and m.training and m.p > _MOST_DROPPED
        ]
        about = f"{_counted(drops)}, p={drops[0].p:g}" if drops else ""
        self._count("dropped_most", bool(drops), about, times=_LOOKS)
        self._count("evaluation_mode", is_off, _counted(modal), times=_LOOKS)
        if "stale_statistics" not in self._told:
            stale = self.looks.statistics.look(self._nodes, self._held())
            self._count("stale_statistics", bool(stale), stale, times=_LOOKS)

    def _look_at_shares(self) -> None:
        parameters = [s for s in self._stored() if is_materialised(s[2])]
        trained = [stored for stored in parameters if stored[2].requires_grad]
        whole = sum(p.numel() for _, _, p in parameters)
        part = sum(p.numel() for _, _, p in trained)
        if trained and part <= _MOST_TRAINED * whole:
            self._tell("frozen", part, f"{part:,} of {whole:,}: {_names(trained)}")

    def _look_at_attributes(self) -> None:
        """Modules that were to be frozen by an attribute, which torch does not read."""
        ids = self._held()
        roots = [(node, root) for node in self._nodes if node.is_root and (root := node.module())]
        for node, root in roots:
            for path, module in root.named_modules(prefix=node.path):
                parameters = list(module.parameters())
                is_set = vars(module).get("requires_grad") is False and bool(parameters)
                if is_set and all(p.requires_grad and id(p) in ids for p in parameters):
                    self._tell_once("attribute", len(parameters), path or type(root).__name__)

    def _count(
        self,
        fact: str,
        holds: bool,
        about: Union[str, torch.Tensor, None],
        key: int = 0,
        times: int = UPDATES,
    ) -> None:
        """``about``: what it is seen at, perhaps a parameter. ``times``: how many in a row it has
        to hold.
        """
        if not holds:
            self._runs.pop((fact, key), None)
            return
        run = self._runs.get((fact, key), _Run(0, self._updates, ""))
        of = about if isinstance(about, str) else id(about)
        self._runs[fact, key] = run = _Run(run.times + 1, run.since, of)
        if run.times >= times:
            self._tell_once(fact, run.times, about)

    def tell_early(self) -> None:
        """The run stops: tells of what the last graph of a loss has shown, and of what has held in
        each update since the first.
        """
        for (fact, _), run in self._runs.items():
            if fact in _FORMS or (run.times > 1 and run.since <= 3 * len(self._of_all)):
                self._tell_once(fact, run.times, run.about)

    def _tell_once(
        self, fact: str, value: float, about: Union[str, int, torch.Tensor, None] = None
    ) -> None:
        if fact not in self._told:
            self._told.add(fact)
            self._tell(fact, value, about if isinstance(about, str) else self._name_of(about))

    def _tell(self, fact: str, value: float, about: str) -> None:
        store = self._session.event_store
        with store.lock:
            for listener in store.listeners:
                listener.noticed(self._session.step.index, fact, value, about)

    def _name_of(self, parameter: Union[int, torch.Tensor, None]) -> str:
        """``parameter``: perhaps its number."""
        number = parameter if isinstance(parameter, int) else id(parameter)
        names = (n.name_of(name) for n, name, p in self._stored() if id(p) == number)
        return next(names, "a parameter")


def _place_of_program() -> str:
    frame = next(program_frames(), None)
    return "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"


def _counted(modules: Sequence[torch.nn.Module]) -> str:
    """The classes of modules, and how many modules these are."""
    kinds = dict.fromkeys(type(module).__name__ for module in modules)
    return f"{', '.join(kinds)}, {len(modules)} module{'s' if len(modules) > 1 else ''}"


def _names(parameters: Sequence[StoredTensor]) -> str:
    return listed([node.name_of(name) for node, name, _ in parameters], _NAMED)


def _has_modes(module: torch.nn.Module) -> bool:
    """True if it computes something else in evaluation."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    return isinstance(module, _BatchNorm) and module.track_running_stats


def _is_frozen_norm(module: torch.nn.Module) -> bool:
    weight = module.weight if isinstance(module, _BatchNorm) else None
    return weight is not None and not weight.requires_grad


def _averages_little(module: torch.nn.Module) -> bool:
    momentum = module.momentum if isinstance(module, _BatchNorm) else None
    return momentum is not None and not 0 < momentum < _LARGE_MOMENTUM
