"""Finds out whether a training loop changes gradients itself between backward() and the update."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Optional, Union

import torch

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.calls.stored import StoredTensor, parameter_at
from fastcheck.extension import status
from fastcheck.utils.torch.memory_ref import MemoryRef, memory_ref
from fastcheck.utils.torch.own_operators import no_grad, unobserved
from fastcheck.utils.torch.readable import can_read, has_memory
from fastcheck.utils.torch.sharding import local

if TYPE_CHECKING:
    from fastcheck._C import GradientProbe

#: A module, and the name of a parameter in it.
_Place = tuple[ModuleNode, str]

_PROBES = 3
# No more backward passes than these are looked at of a loop that never updates anything.
_MOST_PASSES = 64
# A change through .data leaves the version as it was: on the CPU so many elements are compared.
_ELEMENTS = 64


class Probe(NamedTuple):
    """A gradient when backward() ended."""

    memory: MemoryRef
    version: int
    elements: Optional[torch.Tensor]

    def is_changed(self, gradient: torch.Tensor) -> bool:
        if not self.memory.is_of(gradient) or local(gradient)._version != self.version:
            return True
        if self.elements is None:
            return False
        now = first_elements(gradient)
        with unobserved():
            return now is None or not torch.allclose(now, self.elements, 0, 0, equal_nan=True)


AnyProbe = Union["GradientProbe", Probe]


def probe(gradient: torch.Tensor) -> AnyProbe:
    """A probe of a gradient: in C++ where it is an ordinary gradient, float32 on the CPU."""
    made = None if status.module is None else status.module.gradient_probe(gradient, _ELEMENTS)
    return made or Probe(memory_ref(gradient), local(gradient)._version, first_elements(gradient))


#: Probes of the gradients of parameters, by place.
Probes = dict[_Place, AnyProbe]


def probes_at(places: list[_Place]) -> Probes:
    """Probes of the gradients that the parameters at these places have, by place."""
    if status.module is not None:
        probes: Optional[Probes] = status.module.gradient_probes(places, _ELEMENTS)
        if probes is not None:
            return probes
    held = ((place, parameter_at(*place)) for place in places)
    return {place: probe(p.grad) for place, p in held if p is not None and p.grad is not None}


class FirstElements:
    """A copy of a tensor's first elements, of the host alone."""

    def __init__(self, tensor: Optional[torch.Tensor]) -> None:
        self._elements = None if tensor is None else first_elements(tensor)

    def has_same_elements(self, tensor: Optional[torch.Tensor]) -> Optional[bool]:
        """True if the tensor has the same first elements; None: it can't be compared."""
        now, then = None if tensor is None else first_elements(tensor), self._elements
        if now is None or then is None or (now.shape, now.dtype) != (then.shape, then.dtype):
            return None
        with unobserved():
            return torch.allclose(now, then, 0, 0, equal_nan=True)


def elements_of(tensor: Optional[torch.Tensor]) -> Union[GradientProbe, FirstElements]:
    """FirstElements, in C++ where the tensor is an ordinary float32 tensor on the CPU."""
    module = status.module
    if module is None or tensor is None:
        return FirstElements(tensor)
    return module.gradient_probe(tensor, _ELEMENTS) or FirstElements(tensor)


class HandChanges:
    """Compares a few gradients of each optimizer: clipping changes all of them.

    Until the first update nothing is known, and from the first change on it is taken that there
    will be more: then gradients are to be read when backward() ends. Of several backward passes
    before an update (gradient accumulation) that is the last pass, by the number that there were
    before an earlier update.
    """

    def __init__(self) -> None:
        #: No update was seen yet.
        self.is_first = True
        self.was_seen = False
        # Some parameters of each optimizer.
        self._parameters: weakref.WeakKeyDictionary[object, list[_Place]]
        self._parameters = weakref.WeakKeyDictionary()
        # The same of all optimizers that were alive when the youngest was met.
        self._places: list[_Place] = []
        self._probes: Probes = {}
        self._passes = 0
        # The number of backward passes before the last update of each optimizer.
        self._passes_before: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()

    @property
    def wants_parameters(self) -> bool:
        """True if after_backward() is to be given the parameters of the model."""
        return self.is_first and self._passes < _MOST_PASSES

    def after_backward(self, parameters: Sequence[StoredTensor]) -> bool:
        """A backward pass is over. ``parameters``: those of the model, if wanted. Whether all
        gradients are to be read now.
        """
        self._passes += 1
        if self.was_seen:
            return self._passes >= min(self._passes_before.values(), default=1)
        if self.is_first:
            self._places = [(node, name) for node, name, _ in spread(parameters)]
        self._probes |= probes_at(self._places)
        return self.is_first and self._passes <= _MOST_PASSES

    def seen(self) -> None:
        """A gradient was changed between backward() and the update."""
        self.was_seen = True
        self._probes.clear()

    def updated_by_loop(self) -> None:
        """Takes in that the loop has updated weights itself, by gradients that are read when
        backward() ends, as before a first update.
        """
        self._probes.clear()
        self._passes = 0

    def skipped(self) -> None:
        """Takes in that an iteration ended without an update, so the loop examines gradients
        itself.
        """
        self.is_first = False
        self._passes_before[self], self._passes = self._passes, 0
        self.seen()

    def before_clipping(self, parameters: Sequence[StoredTensor]) -> bool:
        """torch's clipping is about to change the gradients of these parameters. Whether the loop
        has changed some before, in a step whose gradients nothing has read when backward ended.
        """
        is_changed = bool(self._probes) and self._is_changed({id(s[2]) for s in parameters})
        self._probes.clear()
        if is_changed:
            self.seen()
        return is_changed and not self.is_first

    def before_update(
        self,
        optimizer: Optional[torch.optim.Optimizer],
        owned: Optional[set[int]],
        parameters: Sequence[StoredTensor],
    ) -> bool:
        """``optimizer`` (None: none of torch's) is about to step, which holds the parameters with
        the ids ``owned`` (None: all); ``parameters``: those of them that are the model's. Whether
        gradients were changed that nothing has read before.
        """
        owner = self if optimizer is None else optimizer
        was_first, self.is_first = self.is_first, False
        before, passes = self._passes_before.get(owner), self._passes
        self._passes = 0
        if passes != before:
            self._passes_before[owner] = passes
        if self.was_seen:
            return False
        if self._is_changed(owned):
            self.seen()
            return not was_first
        if before is None:
            self._parameters[owner] = [(node, name) for node, name, _ in spread(parameters)]
            self._places = [place for places in self._parameters.values() for place in places]
        return False

    def _is_changed(self, owned: Optional[set[int]]) -> bool:
        """Takes out the probes of these parameters (None: of all) until one has changed. Whether
        one has.
        """
        is_changed = status.module and status.module.take_changed(self._probes, owned)
        if is_changed is not None:
            return bool(is_changed)
        for place in list(self._probes):
            parameter = parameter_at(*place)
            if parameter is None or (owned is not None and id(parameter) not in owned):
                continue
            probe = self._probes.pop(place)
            if parameter.grad is not None and probe.is_changed(parameter.grad):
                return True
        return False


def spread(parameters: Sequence[StoredTensor]) -> list[StoredTensor]:
    """A few of those with a gradient, evenly spread."""
    held = [stored for stored in parameters if stored[2].grad is not None]
    last = len(held) - 1
    places = {last * number // (_PROBES - 1) for number in range(_PROBES)} if held else set()
    return [held[place] for place in sorted(places)]


def first_elements(gradient: torch.Tensor) -> Optional[torch.Tensor]:
    """A copy of its first elements; None on a device, or where it has no plain memory."""
    gradient = local(gradient)
    is_plain = gradient.is_cpu and can_read(gradient) and has_memory(gradient)
    if not is_plain or not gradient.is_contiguous():
        return None
    with unobserved(), no_grad():
        return gradient.view(-1)[:_ELEMENTS].clone()
