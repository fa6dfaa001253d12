"""Passes the tensors at places where a non-finite value counts to the C++ observer: the model's
output, the loss, gradients that an optimizer uses, its parameters and its state.

Nothing is done while no non-finite value waits for its consequences. A tensor that the observer has
recorded is not read again, except parts of a non-finite one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.utils.torch.flatten import flatten
from fastcheck.utils.torch.readable import can_hold_nonfinite

Named = Iterable[tuple[str, torch.Tensor]]


class Reaching(Protocol):
    """The part of the session that this file uses."""

    def reach(self, kind: str, tensors: Named) -> None: ...


class Reach:
    """The places of one session's models."""

    def __init__(self, session: Reaching, nodes: Sequence[ModuleNode]) -> None:
        self._session = session
        self._nodes = nodes

    def output(self, outputs: Named) -> None:
        """A model returned these."""
        self._session.reach("output", (("the model returned it", tensor) for _, tensor in outputs))

    def loss(self, loss: Any) -> None:
        """backward() is about to be called on this, or it is given to the scaler."""
        tensors = (tensor for _, tensor in flatten(loss, "loss") if tensor.numel() == 1)
        self._session.reach("loss", (("it reached the loss", tensor) for tensor in tensors))

    def gradients(self) -> None:
        """A backward pass is over."""
        named = ((name, p.grad) for name, p in self._parameters() if p.grad is not None)
        self._session.reach(
            "gradient", ((f"it reached the gradient of {name}", grad) for name, grad in named)
        )

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer is about to use its gradients."""
        names = {id(p): name for name, p in self._parameters()}
        self._session.reach(
            "update",
            (
                (f"it reached the gradient of {names.get(id(p), 'a parameter')}", p.grad)
                for p in _parameters_of(optimizer)
                if p.grad is not None
            ),
        )

    def state(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has updated its parameters and its state."""
        self._session.reach("state", self._state_of(optimizer))

    def _state_of(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
        kind = type(optimizer).__name__
        names = {id(p): name for name, p in self._parameters()}
        for p in _parameters_of(optimizer):
            name = names.get(id(p), "a parameter")
            yield f"{kind} wrote it to {name}", p
            for label, tensor in flatten(optimizer.state.get(p), ""):
                yield f"{kind} keeps it in its state{label} of {name}", tensor

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for node in self._nodes:
            module = node.module()
            for name, p in () if module is None else module._parameters.items():
                if p is not None:
                    yield f"{node.path}.{name}" if node.path else name, p


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if isinstance(p, torch.Tensor):
                yield p


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors whose memory holds its values: those within functorch's wrappers, a DTensor or
    another subclass, or a sparse tensor.
    """
    functorch: Any = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    if not can_hold_nonfinite(tensor):
        return []
    if tensor.layout is torch.sparse_coo:
        return [tensor._values()]
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return [tensor]
    within = getattr(tensor, "__tensor_flatten__", None)
    if within is None:
        return [tensor]
    inner = [getattr(tensor, name) for name in within()[0]]
    return [one for part in inner if isinstance(part, torch.Tensor) for one in plain_tensors(part)]
