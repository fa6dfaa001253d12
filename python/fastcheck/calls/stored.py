"""The parameters and gradients that modules store, each once, and those an optimizer updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Optional

import torch

from .module_calls import ModuleNode

#: A module, the tensor's name in it, and the tensor.
StoredTensor = tuple[ModuleNode, str, torch.Tensor]


def parameter_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    """The id() of every parameter that the optimizer updates."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def parameter_at(node: ModuleNode, name: str) -> Optional[torch.Tensor]:
    """The parameter that a module has now under this name. A parameter is remembered by the two:
    conversions replace or swap it, and a weak reference to it would have torch refuse the swap.
    """
    module = node.module()
    return None if module is None else module._parameters.get(name)


def parameters_of(nodes: Iterable[ModuleNode], owned: Optional[set[int]]) -> list[StoredTensor]:
    """Each parameter once, under its first name; ``owned``: only those with one of these ids."""
    found: list[StoredTensor] = []
    seen: set[int] = set()
    for node in nodes:
        module = node.module()
        for name, parameter in () if module is None else module._parameters.items():
            key = id(parameter)
            if parameter is None or key in seen or (owned is not None and key not in owned):
                continue
            seen.add(key)
            found.append((node, name, parameter))
    return found


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
