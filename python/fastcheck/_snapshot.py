"""What a training step changes, kept and put back: weights, gradients, buffers, what optimizers and
a GradScaler keep, and the random generators.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from typing import Any, Optional

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ._compat import GradScaler

__all__ = ["Generators", "Snapshot", "Values"]


class Generators:
    """The state of Python's, NumPy's and torch's generators, on the CPU and on every device that
    was used. Synchronises nothing.
    """

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state()
        was_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # in torch
        self._cuda = torch.cuda.get_rng_state_all() if was_used else []

    def put_back(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)


class Values:
    """Copies of what some tensors hold."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        with torch.no_grad():
            self._pairs = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def put_back(self) -> None:
        with torch.no_grad():
            for tensor, kept in self._pairs:
                if tensor.shape == kept.shape:
                    tensor.detach().copy_(kept)


class _OptimizerState:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [dict(group) for group in optimizer.param_groups]
        self._state = {key: dict(value) for key, value in optimizer.state.items()}
        self._values = Values(
            value
            for held in (*self._state.values(), *self._groups)
            for value in held.values()
            if isinstance(value, torch.Tensor)
        )
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._parameters = Values(parameters)

    def put_back(self) -> None:
        self._values.put_back()
        self._parameters.put_back()
        state: Any = self._optimizer.state
        state.clear()
        state.update({key: dict(value) for key, value in self._state.items()})
        for group, kept in zip(self._optimizer.param_groups, self._groups):
            group.clear()
            group.update(kept)


class _ScalerState:
    def __init__(self, scaler: GradScaler) -> None:
        self._scaler: Any = scaler
        self._kept = {name: copy.deepcopy(value) for name, value in vars(scaler).items()}

    def put_back(self) -> None:
        vars(self._scaler).update(self._kept)


class Snapshot:
    """Everything that a step of ``models`` changes, as it is now; in a ``with`` statement, put back
    at its end. Optimizers are kept when they are about to step, whichever they are.
    """

    def __init__(
        self, models: Iterable[torch.nn.Module], scaler: Optional[GradScaler] = None
    ) -> None:
        models = list(models)
        parameters = {id(p): p for model in models for p in model.parameters()}
        buffers = {id(b): b for model in models for b in model.buffers()}
        self._gradients = [(parameter, parameter.grad) for parameter in parameters.values()]
        held = [gradient for _, gradient in self._gradients if gradient is not None]
        self._values = Values((*parameters.values(), *buffers.values(), *held))
        # A module may put a new tensor in a buffer's place.
        self._buffers = [(m, dict(m._buffers)) for model in models for m in model.modules()]
        self._modes = [(m, m.training) for model in models for m in model.modules()]
        self._generators = Generators()
        self._scaler = None if scaler is None else _ScalerState(scaler)
        self._optimizers: dict[int, _OptimizerState] = {}
        self._handle: Any = None

    def __enter__(self) -> Snapshot:
        self._handle = register_optimizer_step_pre_hook(self._before_update)
        return self

    def _before_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = _OptimizerState(optimizer)

    def __exit__(self, *error: object) -> None:
        self._handle.remove()
        for optimizer in self._optimizers.values():
            optimizer.put_back()
        for module, buffers in self._buffers:
            module._buffers.update(buffers)
        self._values.put_back()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for module, is_training in self._modes:
            module.training = is_training
        if self._scaler is not None:
            self._scaler.put_back()
        self._generators.put_back()
