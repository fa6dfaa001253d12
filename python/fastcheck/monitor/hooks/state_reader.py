"""Reads what a model stores: parameters, their gradients and buffers, in one list call."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Optional

import numpy as np
import torch
from torch.nn import Parameter

from fastcheck.backends.table import backend_for
from fastcheck.calls.module_calls import ModuleNode
from fastcheck.calls.stored import (
    ParameterFinder,
    StoredTensor,
    TensorBatch,
    buffers_of,
    gradients_of,
    holders_of,
    new_finder,
    parameter_ids,
    parameters_of,
)
from fastcheck.extension import status
from fastcheck.monitor.loop.hand_changes import HandChanges
from fastcheck.monitor.session.session import Session
from fastcheck.monitor.weights.stalled import StalledWeights
from fastcheck.monitor.weights.updates import NoDerivative, UpdateInfo, UpdateWatcher
from fastcheck.record.format import DTYPES, VALUE_BYTES, Depth, Flag
from fastcheck.record.statistics import FLOAT_FORMATS
from fastcheck.utils.torch.memory_ref import MemoryRef, memory_ref
from fastcheck.utils.torch.own_operators import no_grad, unobserved
from fastcheck.utils.torch.readable import are_on_host, can_read, common_device, has_memory
from fastcheck.utils.torch.sharding import is_part, local
from fastcheck.utils.torch.transforms import unwrapped
from fastcheck.verdict.entries import (
    Entry,
    GradientsUsed,
    Moment,
    Note,
    OptimizerState,
    UnusedGradients,
    UsedGradients,
)

from .step_numbers import StepNumbers

#: Stands in the place of a record's number.
FINITE = -1


class EarlyGradients:
    """Knows a gradient again while nothing but clipping has changed it since it was read."""

    def __init__(self) -> None:
        self._step = -1
        #: Readings of ordinary gradients, which the extension knows.
        self.ordinary: Any = None if status.module is None else status.module.ReadGradients()
        # The memory, the version and the record's number of each of the others, by its id().
        self._read: dict[int, tuple[MemoryRef, int, int]] = {}
        #: The numbers of the records of those that wait for what becomes of the gradient, by site;
        #: FINITE: it has none, because it was finite.
        self.waiting: dict[int, int] = {}

    @property
    def are_ordinary(self) -> bool:
        """True if all that were read are, and none waits."""
        return bool(self.ordinary) and not self._read and not self.waiting

    def begin(self, step: int) -> bool:
        """Forgets readings of other steps. Whether any of this step are left."""
        if step != self._step:
            self._step, self._read, self.waiting = step, {}, {}
            if self.ordinary:
                self.ordinary.clear()
        return bool(self._read or self.ordinary)

    def add(self, batch: TensorBatch, order: Sequence[int], first: int) -> None:
        """The tensors at these places were read, one after the other from the record ``first``
        on.
        """
        if self.ordinary is not None and batch.is_as_given and order == range(len(batch.tensors)):
            self.ordinary.add(batch.tensors, first)
            return
        for seq, at in enumerate(order, first):
            gradient = batch.given(at)
            self._read[id(gradient)] = memory_ref(gradient), local(gradient)._version, seq

    def find(self, gradient: torch.Tensor) -> Optional[int]:
        """The number of its record; None where it was not read, or has changed since."""
        seq: Optional[int] = self.ordinary.find(gradient) if self.ordinary else None
        known = self._read.get(id(gradient))
        if known is None or not known[0].is_of(gradient) or known[1] != local(gradient)._version:
            return seq
        return known[2] if seq is None else max(seq, known[2])

    def take_waiting(self, sites: Iterable[int]) -> dict[int, int]:
        """The numbers of those of these sites that waited, by site: the gradients are used."""
        taken = {}
        for site in sites if self.waiting else ():
            seq = self.waiting.pop(site, None)
            if seq is not None:
                taken[site] = seq
        return taken

    def changed(self, gradients: Sequence[torch.Tensor]) -> None:
        """Takes in gradients that clipping has changed: their records are of the values before
        it.
        """
        if self.ordinary:
            self.ordinary.changed(gradients)
        for gradient in gradients if self._read else ():
            known = self._read.get(id(gradient))
            if known is not None and known[0].is_of(gradient):
                version = local(gradient)._version
                self._read[id(gradient)] = known[0], version, known[2]


# The square root of a dtype's largest number, by its code. Integers have no gradients.
_LIMITS = np.array(
    [FLOAT_FORMATS[row.name].max ** 0.5 if row.kind == "f8" else np.inf for row in DTYPES]
)
_STATS = int(Depth.STATS)
_SMALLEST_LIMIT = float(_LIMITS.min())


class LargeSquares:
    """The sites of finite gradients that were too large, until take(). So the optimizer's state is
    read only after an update that may have broken it.
    """

    def __init__(self) -> None:
        self._sites: set[int] = set()

    def weigh(self, records: np.ndarray) -> None:
        """The records of an update's gradients are on the host."""
        module = status.module
        if module is not None and module.largest_magnitude(records) <= _SMALLEST_LIMIT:
            return
        if not records.size or records["depth"][0] < _STATS:
            return
        limits = _LIMITS[records["dtype"]]
        is_large = (records["max"] > limits) | (records["min"] < -limits)
        if is_large.any():
            self._sites.update(records["site"][is_large].tolist())

    def take(self) -> set[int]:
        """The sites that were found since the last call."""
        if not self._sites:
            return self._sites
        sites, self._sites = self._sites, set()
        return sites


class StateReader:
    """Reads the stored tensors of the observed modules. Every method expects the session's lock to
    be held.
    """

    def __init__(self, session: Session, nodes: Sequence[ModuleNode]) -> None:
        self._session = session
        self._nodes = list(nodes)
        self._finder = new_finder(self._nodes)
        self._finders: weakref.WeakKeyDictionary[torch.optim.Optimizer, ParameterFinder] = (
            weakref.WeakKeyDictionary()
        )
        #: Operators that alone lead to a parameter in the graph of the loss, and have a derivative
        #: of 0, by its site.
        self.without_derivative: dict[int, NoDerivative] = {}
        #: None where records have no checksum.
        self.stalled_weights: Optional[StalledWeights] = None
        if session.config.depth is Depth.FULL:
            store = session.event_store
            self.stalled_weights = StalledWeights(
                session.sites,
                store.archive.history,
                session.report_internal_error,
                store.warn_later,
            )
        self._large_squares = LargeSquares()
        self.updates = UpdateWatcher(nodes, session.config.training.optimizers)
        self._early = EarlyGradients()
        self.hand_changes = HandChanges()
        self.numbers = StepNumbers(session)

    def read_stored(self) -> None:
        """All parameters and buffers: before the first forward, so that a bad checkpoint is named
        as such.
        """
        batch = TensorBatch()
        # Within functional_call() others are in their place.
        own = [s for s in parameters_of(self._nodes, None) if isinstance(s[2], Parameter)]
        batch.add_stored(own, "param")
        batch.add_stored(buffers_of(self._nodes), "buffer")
        self._session.level.observe_list(batch)

    def read_for_update(
        self,
        optimizer: Optional[torch.optim.Optimizer],
        *,
        gradients: bool = True,
        scaled: bool = False,
    ) -> None:
        """Reads what ``optimizer`` is about to use (None: all of the model), and the buffers.

        ``scaled``: the gradients still carry the loss scale, or their update is skipped.
        """
        session, updates, stalled_weights = self._session, self.updates, self.stalled_weights
        gradients = gradients and (optimizer is not None or session.backwards.owns_gradients)
        owned, parameters, buffers = self._held_by(optimizer)
        if gradients and self.hand_changes.before_update(optimizer, owned, parameters):
            session.step.update.has_changed_gradients = True
        is_watched = gradients and stalled_weights is not None and stalled_weights.is_on
        look = updates.begin(optimizer, session.step) if is_watched else None
        first = session.level.next_seq
        batch = TensorBatch()
        batch.is_used_now = optimizer is not None
        batch.add_stored(parameters, "param")
        buffers_at = batch.stored_count
        batch.is_used_now = False
        if buffers:
            batch.add_stored(buffers, "buffer")
        first_gradient = first + batch.stored_count
        gradients_read: list[int] = []
        early: list[int] = []
        if gradients:
            batch.is_used_now = optimizer is not None
            gradients_read, early = self._read_gradients(parameters, scaled, batch)
        else:
            session.level.observe_list(batch)
        if gradients and session.step.update.is_elsewhere and not gradients_read:
            self.hand_changes.seen()
            self._were_taken()
        stop = session.level.next_seq
        if look is not None:
            look.first, look.first_gradient, look.early_gradients = first, first_gradient, early
            look.first_stray = look.stop = stop
            look.has_backward = session.backwards.has_begun
            look.without_derivative = self.without_derivative
            is_turn = look.has_turn_for_strays and session.backwards.owns_gradients
            # Where the optimizer holds every parameter of the model there are none.
            if is_turn and len(self._finder.look(None)[1]) > len(parameters):
                look.replaced = self._read_strays()
                look.stop = session.level.next_seq
            stored = batch.sites[:buffers_at]
            updates.look_at_parameters(look, optimizer, parameters, stored, gradients_read)
            if buffers or updates.places:
                updates.look_at_buffers(look, batch.sites[buffers_at : batch.stored_count])
        weighed = stop if scaled or not gradients_read else first_gradient
        due: list[Entry] = [Note(self._judge_update, weighed, stop, look)]
        if not scaled and (session.rings.is_deferred or session.step.findings.all):
            # Now, while the update can still be prevented.
            due.append(Moment.UPDATE_DUE)
        session.due(*due)
        session.step.update.state_read = True

    def _judge_update(self, first: int, stop: int, look: Optional[UpdateInfo]) -> None:
        """The records of these gradients and of the look, which begins before them, are here."""
        history = self._session.event_store.archive.history
        if look is None or self.stalled_weights is None:
            self._large_squares.weigh(history.between(first, stop))
            return
        records = history.between(look.first, look.stop)
        is_whole = records.size == look.stop - look.first
        part = slice(first - look.first, stop - look.first)
        self._large_squares.weigh(records[part] if is_whole else history.between(first, stop))
        self.stalled_weights.settle(look, records)

    def updated_by_loop(self) -> None:
        """The loop has updated the weights itself, and cleared the gradients."""
        self.hand_changes.updated_by_loop()
        self._were_taken()
        self._session.step.update.count += 1

    def _were_taken(self) -> None:
        """The loop has used the gradients and cleared them, or cleared them ahead of an update of
        copies, which uses them.
        """
        used = self._early.take_waiting(list(self._early.waiting))
        bad = [seq for seq in used.values() if seq != FINITE]
        if bad:
            self._session.due(GradientsUsed(bad))

    def _read_strays(self) -> set[int]:
        """Reads the parameters that no optimizer holds. Those that may have replaced others."""
        batch, parameters = TensorBatch(), self.parameters()
        strays = self.updates.unowned_parameters(parameters)
        batch.add_stored(strays, "param")
        self._session.level.observe_list(batch)
        return self.updates.replaced(strays, parameters)

    def _held_by(
        self, optimizer: Optional[torch.optim.Optimizer]
    ) -> tuple[Optional[set[int]], Sequence[StoredTensor], Sequence[StoredTensor]]:
        """The ids of what the optimizer holds, and the parameters of the observed modules among it
        (None: all parameters); and the buffers of these modules.
        """
        if optimizer is None:
            return self._finder.look(None)
        finder = self._finders.get(optimizer)
        if finder is None:
            finder = self._finders[optimizer] = new_finder(self._nodes)
        return finder.look(optimizer.param_groups)

    def parameters(self) -> list[StoredTensor]:
        """Every parameter of the observed modules."""
        return parameters_of(self._nodes, None)

    def broken_weights(self) -> tuple[str, ...]:
        """The names of the parameters that hold NaN or Inf now; waits for their device."""
        names: dict[str, None] = {}
        with unobserved(), no_grad():
            for name, values in self._own_values():
                # float8 has no isfinite().
                wide = values.float() if values.element_size() == 1 else values
                if not wide.isfinite().all():
                    names[name] = None
        return tuple(names)

    def memory(self) -> set[int]:
        """The addresses of the memory of the parameters."""
        with unobserved():
            return {values.untyped_storage().data_ptr() for _, values in self._own_values()}

    def _own_values(self) -> Iterator[tuple[str, torch.Tensor]]:
        for node, name, parameter in self.parameters():
            values = unwrapped(local(parameter))
            # Not what functional_call() has put there.
            if isinstance(parameter, Parameter) and can_read(values) and has_memory(values):
                yield node.name_of(name), values

    def read_gradients(
        self, optimizer: torch.optim.Optimizer, *, scaled: bool, is_early: bool = False
    ) -> None:
        """The gradients alone, where ``optimizer`` was skipped or makes them within its step;
        all of the model, where it holds copies. ``is_early``: they will be asked for again.
        """
        _, parameters, _ = self._held_by(optimizer if self.owned_by(optimizer) else None)
        self._read_gradients(parameters, scaled, is_early=is_early)
        self._session.step.update.state_read = True

    def read_before_clipping(
        self, gradients: Sequence[torch.Tensor], owned: Optional[set[int]], *, scaled: bool
    ) -> bool:
        """Reads those of ``gradients`` that belong to parameters of the model (``owned``: only to
        these). False: none does. ``scaled``: loss scaling decides what becomes of them.
        """
        if not self._session.backwards.owns_gradients:
            self.hand_changes.before_clipping(())
            return False
        parameters = holders_of(gradients, parameters_of(self._nodes, owned))
        is_changed = self.hand_changes.before_clipping(parameters)
        self._session.step.update.has_changed_gradients |= is_changed
        self._early.begin(self._session.step.index)
        self._read_gradients(parameters, scaled, is_early=True)
        return bool(parameters)

    def after_backward(self, owned: Optional[set[int]]) -> bool:
        """A backward pass is over. Where the training loop changes gradients before it uses them,
        all of the model are looked at now (``owned``: only of these parameters). Whether they were.
        """
        changes, early, session = self.hand_changes, self._early, self._session
        parameters = parameters_of(self._nodes, owned) if changes.wants_parameters else []
        if not changes.after_backward(parameters):
            return False
        early.begin(session.step.index)
        batch = TensorBatch()
        parameters = parameters or parameters_of(self._nodes, owned)
        self._name_given(parameters)
        for node, name, gradient in gradients_of(parameters):
            batch.add(gradient, _gradient_site(node, name, gradient), "param_grad")
        if all(t.is_cpu for t in batch.tensors) and not self._has_nonfinite(batch.tensors):
            early.waiting.update(dict.fromkeys(batch.sites, FINITE))
            return True
        first = session.level.next_seq
        fields = session.config.training.has_own_scale, self.hand_changes.was_seen
        self._session.level.observe_list(batch, 0, UnusedGradients, *fields)
        order = _as_read(batch.tensors)
        early.add(batch, order, first)
        early.waiting.update((batch.sites[at], seq) for seq, at in enumerate(order, first))
        return True

    def _has_nonfinite(self, tensors: Sequence[torch.Tensor]) -> bool:
        with unobserved(), no_grad():
            return bool(tensors) and bool(backend_for(tensors[0].device).found_nonfinite(tensors))

    def were_clipped(self, gradients: Sequence[torch.Tensor]) -> bool:
        """read_before_clipping() was called with these, and they have been clipped since. False:
        none belongs to the model.
        """
        has_read = self._early.begin(self._session.step.index)
        self._early.changed(gradients)
        return has_read

    def _read_gradients(
        self,
        parameters: Sequence[StoredTensor],
        scaled: bool,
        batch: Optional[TensorBatch] = None,
        *,
        is_early: bool = False,
    ) -> tuple[list[int], list[int]]:
        """Reads those that were not read early, after ``batch``: in one call where all are as they
        are in most steps. The sites of those that were read early first, and of the others; and the
        numbers of the records of those that were.
        """
        session, early = self._session, self._early
        has_early = early.begin(session.step.index)
        if session.step.given:
            self._name_given(parameters)
        if batch is None:
            batch = TensorBatch()
        elif scaled or has_early or early.waiting or common_device(batch.tensors) is None:
            session.level.observe_list(batch)
            batch = TensorBatch(is_used_now=batch.is_used_now)
        sites: list[int] = []
        known: list[int] = []

        def add(entry: StoredTensor) -> None:
            for node, name, gradient in gradients_of([entry]):
                site = _gradient_site(node, name, gradient)
                seq = early.find(gradient)
                # Only torch's clipping is known to come right after backward().
                if seq is not None and (is_early or site not in early.waiting):
                    sites.append(site)
                    known.append(seq)
                else:
                    batch.add(gradient, site, "param_grad")

        if not has_early:
            batch.add_gradients(parameters, _gradient_site)
        elif status.module is not None and early.are_ordinary:
            status.module.add_unread_gradients(
                batch, parameters, "param_grad", add, early.ordinary, sites, known
            )
        else:
            for parameter in parameters:
                add(parameter)
        before: dict[int, int] = {}
        if early.waiting:
            before, used = early.take_waiting(batch.sites), early.take_waiting(sites)
            if used:
                session.due(GradientsUsed(list(used.values())))
        if known and not scaled and not is_early:
            # The optimizer is about to use them: what was held back as scaled is real.
            session.due(Moment.SCALED_USED)
        first = session.level.next_seq
        flags = int(Flag.SCALED) if scaled and not is_early else 0
        session.level.observe_list(batch, flags, UsedGradients, scaled, before)
        order = _as_read(batch.tensors) if is_early or before else ()
        if is_early:
            early.add(batch, order, first)
        if before and not self.hand_changes.was_seen:
            after = {batch.sites[at]: first + number for number, at in enumerate(order)}
            session.note(self._compare, [(before[site], after[site]) for site in before])
        return sites + batch.sites[batch.stored_count :], known

    def _name_given(self, parameters: Sequence[StoredTensor]) -> None:
        """Tells the judge of the parameters that a module was given as an argument."""
        given = self._session.step.given
        for node, name, parameter in parameters if given else ():
            if id(parameter) in given:
                site = _gradient_site(node, name, parameter)
                self._session.step.given_by_gradient[site] = given[id(parameter)]

    def _compare(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Compares the record of each gradient from the end of backward() with that from before the
        update: the loop changes gradients where two differ.
        """
        for before, after in pairs:
            if before != FINITE:
                record, other = map(self._session.event_store.archive.history.find, (before, after))
                if record is None or other is None:
                    continue
                if record.tobytes()[:VALUE_BYTES] != other.tobytes()[:VALUE_BYTES]:
                    self.hand_changes.seen()
                    return

    def read_flat_gradients(
        self, gradients: Sequence[tuple[torch.nn.Parameter, torch.Tensor, bool]], *, scaled: bool
    ) -> None:
        """Gradients that an optimizer keeps apart from its parameters: the parameter, its gradient
        or a part of it, and whether it is a part.
        """
        known = {id(s[2]): (s[0], s[1]) for s in parameters_of(self._nodes, None)}
        batch = TensorBatch()
        for parameter, gradient, is_shard in gradients:
            if id(parameter) in known:
                node, name = known[id(parameter)]
                batch.add(gradient, _of_gradient(node, name, is_shard), "param_grad")
        self._session.level.observe_list(
            batch, int(Flag.SCALED) if scaled else 0, UsedGradients, scaled, {}
        )

    def read_statistics(self, node: ModuleNode) -> None:
        """A norm has just run: its running statistics are read with the other buffers."""

    def read_optimizer_state(
        self, optimizer: torch.optim.Optimizer, *, is_after: bool = True
    ) -> None:
        """Reads, after an update, what the optimizer keeps of parameters whose gradients it can't
        square, and nothing else; before its first all that it has kept until then, which on the
        host is told only if any of it is not finite.
        """
        sites = self._large_squares.take() if is_after else set()
        if not sites and (is_after or not optimizer.state):
            return
        batch = TensorBatch()
        for node, name, parameter in parameters_of(self._nodes, parameter_ids(optimizer)):
            if is_after and _gradient_site(node, name, parameter) not in sites:
                continue
            kept = optimizer.state.get(parameter)
            for key, value in kept.items() if isinstance(kept, dict) else ():
                # A number that stands alone may be Inf until there is a first one.
                is_meant = not is_after and torch.is_tensor(value) and value.numel() < 2
                if isinstance(value, torch.Tensor) and value.is_floating_point() and not is_meant:
                    site = node.site("optimizer_state", f"{name}.{key}", 0)
                    batch.add(value, site, "optimizer_state")
        if is_after or not are_on_host(batch.tensors) or self._has_nonfinite(batch.tensors):
            self._session.level.observe_list(batch, 0, OptimizerState, is_after)

    def owned_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if the optimizer updates any parameter of the observed modules."""
        held = optimizer.param_groups[0]["params"] if optimizer.param_groups else ()
        owned: Optional[set[int]] = None
        for node in self._nodes:
            module = node.module()
            for parameter in () if module is None else module._parameters.values():
                if parameter is None:
                    continue
                if owned is None:
                    # Nearly always the first of the model is the first of the optimizer.
                    if held and held[0] is parameter:
                        return True
                    owned = parameter_ids(optimizer)
                if id(parameter) in owned:
                    return True
        return False


def _gradient_site(node: ModuleNode, name: str, tensor: torch.Tensor) -> int:
    """The site of the gradient of a parameter. ``tensor``: either of the two, which are sharded
    alike.
    """
    return _of_gradient(node, name, is_part(tensor))


def _of_gradient(node: ModuleNode, name: str, is_shard: bool) -> int:
    if is_shard:
        return node.part_site("param_grad", name)
    return node.site("param_grad", name, 0)


def _as_read(tensors: Sequence[torch.Tensor]) -> Sequence[int]:
    """The places of tensors in the order of observe_list(): one device after the other."""
    if are_on_host(tensors) or common_device(tensors) is not None:
        return range(len(tensors))
    devices = dict.fromkeys(tensor.device for tensor in tensors)
    return [
        at for device in devices for at, tensor in enumerate(tensors) if tensor.device == device
    ]
