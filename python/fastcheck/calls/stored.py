"""The tensors that modules store: each parameter and gradient once, those that an optimizer
updates, and the tensors of one module with their sites.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Callable, Optional

import torch

from fastcheck.extension import status
from fastcheck.utils.torch.memory_ref import held_by
from fastcheck.utils.torch.readable import can_read, has_memory, is_materialised, is_plain
from fastcheck.utils.torch.sharding import local
from fastcheck.utils.torch.transforms import unwrapped

from .module_calls import ModuleNode

# The extension's functions for ordinary tensors (csrc/torch/hooks/stored.h).
_module: Any = status.module

#: A module, the tensor's name in it, and the tensor.
StoredTensor = tuple[ModuleNode, str, torch.Tensor]


def parameter_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    """The id() of every parameter that the optimizer updates."""
    if _module is not None:
        return _module.parameter_ids(optimizer.param_groups)
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def parameter_at(node: ModuleNode, name: str) -> Optional[torch.Tensor]:
    """The parameter that a module has now under this name. A parameter is remembered by the two:
    conversions replace or swap it, and a weak reference to it would have torch refuse the swap.
    """
    module = node.module()
    return None if module is None else module._parameters.get(name)


def parameters_of(nodes: Sequence[ModuleNode], owned: Optional[set[int]]) -> list[StoredTensor]:
    """Each parameter once, under its first name; ``owned``: only those with one of these ids."""
    if _module is not None:
        return _module.stored_in(nodes, "_parameters", owned)
    parameters: list[StoredTensor] = []
    seen: set[int] = set()
    for node in nodes:
        module = node.module()
        for name, parameter in () if module is None else module._parameters.items():
            key = id(parameter)
            if parameter is None or key in seen or (owned is not None and key not in owned):
                continue
            seen.add(key)
            parameters.append((node, name, parameter))
    return parameters


class ParameterFinder:
    """Finds the parameters of modules that an optimizer holds. The extension's keeps what it has
    found (csrc/torch/hooks/stored.h).
    """

    def __init__(self, nodes: list[ModuleNode]) -> None:
        self._nodes = nodes

    def look(
        self, groups: Optional[list[dict[str, Any]]]
    ) -> tuple[Optional[set[int]], Sequence[StoredTensor], Sequence[StoredTensor]]:
        """The ids of what the groups of an optimizer hold, and the parameters of the modules among
        it (None: all parameters); and the buffers of all modules.
        """
        owned = None if groups is None else {id(p) for group in groups for p in group["params"]}
        return owned, parameters_of(self._nodes, owned), buffers_of(self._nodes)


new_finder: Callable[[list[ModuleNode]], ParameterFinder]
new_finder = ParameterFinder if _module is None else _module.ParameterFinder


def buffers_of(nodes: Sequence[ModuleNode]) -> list[StoredTensor]:
    """Yields the buffers of all modules; a shared buffer once for each module."""
    if _module is not None:
        return _module.stored_in(nodes, "_buffers", None)
    buffers: list[StoredTensor] = []
    for node in nodes:
        module = node.module()
        for name, buffer in () if module is None else module._buffers.items():
            if buffer is not None:
                buffers.append((node, name, buffer))
    return buffers


def gradients_of(parameters: Iterable[StoredTensor]) -> Iterator[StoredTensor]:
    """The gradients that an optimizer reads: ``.grad``, and ``.main_grad``, in which Megatron's
    fused kernels accumulate the gradient of a weight.
    """
    for node, name, parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            yield node, name, gradient
        main = getattr(parameter, "main_grad", None)
        if isinstance(main, torch.Tensor) and main is not gradient:
            yield node, f"{name}.main_grad", main


def holders_of(
    gradients: Sequence[torch.Tensor], parameters: Sequence[StoredTensor]
) -> list[StoredTensor]:
    """Chooses the parameters whose gradient is one of these."""
    if _module is not None:
        return _module.holders_of(gradients, parameters)
    ids = set(map(id, gradients))
    return [stored for stored in parameters if id(stored[2].grad) in ids]


def parameter_states(
    parameters: Sequence[StoredTensor],
) -> tuple[list[bool], list[bool], list[bool]]:
    """Three lists: whether each parameter is trained and has elements, whether it has a gradient,
    and whether it is a part, of which other ranks hold the rest.
    """
    if _module is not None:
        return _module.parameter_states(parameters, _state_of)
    states = [_state_of(entry) for entry in parameters]
    trained, with_gradient, parts = ([state[part] for state in states] for part in range(3))
    return trained, with_gradient, parts


def _state_of(entry: StoredTensor) -> tuple[bool, bool, bool]:
    parameter = entry[2]
    # Under FSDP1 a parameter that is all on other ranks has no elements here.
    is_plain = type(parameter) is torch.nn.Parameter and not hasattr(parameter, "ds_tensor")
    has_elements = (is_plain or is_materialised(parameter)) and parameter.numel() > 0
    has_gradient = parameter.grad is not None or getattr(parameter, "main_grad", None) is not None
    is_part = not is_plain and local(parameter) is not parameter
    return parameter.requires_grad and has_elements, has_gradient, is_part


class TensorBatch:
    """Tensors to be read in one call, with their sites and roles."""

    def __init__(self, *, is_used_now: bool = False) -> None:
        #: True if the host uses the added tensors right after they were read, so that they have
        #: arrived.
        self.is_used_now = is_used_now
        #: The first so many are what modules store.
        self.stored_count = 0
        #: The tensors that are read. The extension's list makes no object for a gradient.
        self.tensors: Any = [] if _module is None else _module.TensorList()
        # The tensors that were added in another form than is read of them, by place.
        self._given: dict[int, torch.Tensor] = {}
        self.sites: list[int] = []
        self.roles: list[str] = []

    def add(self, tensor: torch.Tensor, site: int, role: str) -> bool:
        """False: it can't be read."""
        given, tensor = tensor, held_by(unwrapped(local(tensor)))
        is_readable = is_plain(tensor) if self.is_used_now else can_read(tensor)
        if is_readable and has_memory(tensor):
            if given is not tensor:
                self._given[len(self.tensors)] = given
            self.tensors.append(tensor)
            self.sites.append(site)
            self.roles.append(role)
            return True
        return False

    @property
    def is_as_given(self) -> bool:
        """True if each tensor is read as it was added."""
        return not self._given

    def given(self, place: int) -> torch.Tensor:
        """The tensor at this place, as it was added."""
        tensor = self._given.get(place)
        return self.tensors[place] if tensor is None else tensor

    def add_stored(self, stored: Sequence[StoredTensor], role: str) -> None:
        """Adds the tensors that can be read, ahead of all others."""

        def add(entry: StoredTensor) -> None:
            node, name, tensor = entry
            self.add(tensor, node.site(role, name, 0), role)

        if _module is not None:
            _module.add_stored(self, stored, role, add)
        else:
            for entry in stored:
                add(entry)
        self.stored_count = len(self.sites)

    def add_gradients(
        self,
        parameters: Sequence[StoredTensor],
        site_of: Callable[[ModuleNode, str, torch.Tensor], int],
    ) -> None:
        """Adds those gradients of these tensors that can be read. ``site_of``: of a gradient that
        is the first of its parameter, or is no plain tensor.
        """

        def add(entry: StoredTensor) -> None:
            for node, name, gradient in gradients_of([entry]):
                self.add(gradient, site_of(node, name, gradient), "param_grad")

        if _module is not None:
            _module.add_gradients(self, parameters, "param_grad", add)
            return
        for parameter in parameters:
            add(parameter)


class StoredTensors:
    """The parameters and buffers of modules and their submodules, in the middle of a verdict."""

    def __init__(self, nodes: Sequence[ModuleNode]) -> None:
        self._node_of = {id(node.module()): node for node in nodes}

    def node_of(self, module: Optional[torch.nn.Module]) -> Optional[ModuleNode]:
        node = self._node_of.get(id(module))
        return node if module is not None and node is not None and node.module() is module else None

    def within(self, node: Optional[ModuleNode]) -> TensorBatch:
        """The parameters and buffers of this module and of the observed modules in it; None: of all
        observed modules.
        """
        batch = TensorBatch()
        module = None if node is None else node.module()
        observed = [one.module() for one in self._node_of.values()] if node is None else ()
        for child in observed if module is None else module.modules():
            child_node = self.node_of(child)
            if child is None or child_node is None:
                continue
            for name, parameter in child._parameters.items():
                if parameter is not None:
                    batch.add(parameter, child_node.site("param", name, 0), "param")
            # A module may have written its buffers in this very call when it is in training.
            if not child.training:
                for name, buffer in child._buffers.items():
                    if buffer is not None:
                        batch.add(buffer, child_node.site("buffer", name, 0), "buffer")
        return batch
