"""Saves and restores the state of a training step, so that the step can run again.

The state is weights, gradients, buffers, plain attributes of modules, optimizers, GradScaler and
the random generators.
"""

from __future__ import annotations

import copy
import functools
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any, Callable, Optional

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .flatten import flatten
from .own_operators import no_grad
from .readable import has_values
from .versions import GradScaler

# Attributes of modules that a step may count up. What is mutable is left to state_dict().
_PLAIN = (bool, int, float, str, type(None))
#: The attributes that every module has.
_OF_TORCH = frozenset(vars(torch.nn.Module()))


def is_stateful(value: object) -> bool:
    """True if it has ``state_dict()`` and ``load_state_dict()``, or is a torch.Generator."""
    if isinstance(value, type):  # whose methods need an instance
        return False
    names = ("state_dict", "load_state_dict")
    return isinstance(value, torch.Generator) or all(hasattr(value, name) for name in names)


class Generators:
    """The state of Python's, NumPy's and torch's generators, on the CPU and on every device that
    was used. Waits for nothing on CUDA, whose generators are the host's.
    """

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state()
        self._devices = {
            name: module.get_rng_state_all() for name, module in _devices() if _was_used(module)
        }

    def put_back(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        for name, states in self._devices.items():
            getattr(torch, name).set_rng_state_all(states)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values and tensors, which ``torch.load(weights_only=True)`` reads."""
        kind, keys, *rest = self._numpy
        return {
            "python": self._python,
            "numpy": (kind, torch.from_numpy(np.asarray(keys, np.int64)), *rest),
            "torch": self._torch,
            "devices": self._devices,
        }


def _devices() -> list[tuple[str, Any]]:
    """torch's modules of devices with generators of their own, by name."""
    names = dict.fromkeys(("cuda", "xpu", torch._C._get_privateuse1_backend_name()))
    modules = [(name, getattr(torch, name, None)) for name in names]
    return [(name, module) for name, module in modules if hasattr(module, "get_rng_state_all")]


def _was_used(module: Any) -> bool:
    is_initialized: Any = getattr(module, "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())


class SavedTensors:
    """Copies of the values of some tensors, of those that have values."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        with no_grad():
            self._pairs = [(t, t.detach().clone()) for t in tensors if has_values(t)]

    def put_back(self) -> None:
        with no_grad():
            for tensor, kept in self._pairs:
                if tensor.shape == kept.shape and has_values(tensor):
                    tensor.detach().copy_(kept)


class _KeptParameters:
    """The values of some parameters, their gradients, and whether they need a gradient."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._kept = [(p, p.grad, p.requires_grad) for p in parameters]
        self._values = SavedTensors(
            t for p, grad, _ in self._kept for t in (p, grad) if t is not None
        )

    def put_back(self) -> None:
        self._values.put_back()
        for parameter, gradient, is_trained in self._kept:
            parameter.grad = gradient
            if parameter.requires_grad != is_trained:
                parameter.requires_grad_(is_trained)


class _OptimizerState:
    """``known``: the ids of parameters that are kept elsewhere."""

    def __init__(self, optimizer: torch.optim.Optimizer, known: Iterable[int]) -> None:
        self.optimizer = optimizer
        self._groups = [dict(group) for group in optimizer.param_groups]
        self._state = {key: _nested(value) for key, value in optimizer.state.items()}
        held = (*self._state.values(), *({**g, "params": None} for g in self._groups))
        self._values = SavedTensors(t for entry in held for _, t in flatten(entry, ""))
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._parameters = _KeptParameters(p for p in parameters if id(p) not in known)

    def put_back(self) -> None:
        self._values.put_back()
        self._parameters.put_back()
        state: Any = self.optimizer.state
        state.clear()
        state.update({key: _nested(value) for key, value in self._state.items()})
        del self.optimizer.param_groups[len(self._groups) :]
        for group, kept in zip(self.optimizer.param_groups, self._groups):
            group.clear()
            group.update(kept)


def _nested(value: Any) -> Any:
    """Dicts and lists anew, as LBFGS appends to those of its state; what they hold as it is."""
    if isinstance(value, dict):
        return {key: _nested(item) for key, item in value.items()}
    return [_nested(item) for item in value] if type(value) is list else value


def _undo_of(other: Any) -> Callable[[], object]:
    """A function that puts back the state of a GradScaler, a generator or what is_stateful()."""
    if isinstance(other, torch.Generator):
        return functools.partial(other.set_state, other.get_state())
    if isinstance(other, GradScaler):
        kept = {name: copy.deepcopy(value) for name, value in vars(other).items()}
        return lambda: vars(other).update(copy.deepcopy(kept))
    state = copy.deepcopy(other.state_dict())
    return lambda: other.load_state_dict(copy.deepcopy(state))


def _attributes_undo(module: torch.nn.Module) -> Callable[[], None]:
    """A function that puts back all attributes of a module that are not torch's own, the containers
    and generators among them with their content.
    """
    held = vars(module)
    kept = {name: value for name, value in held.items() if name not in _OF_TORCH}
    undos = [undo for value in kept.values() for undo in _undos(value)]

    def put_back() -> None:
        for name in held.keys() - kept.keys() - _OF_TORCH:
            del held[name]
        held.update(kept)
        for undo in undos:
            undo()

    return put_back


_NESTED = 4


def _undos(value: Any, depth: int = 0) -> Iterator[Callable[[], object]]:
    """Functions that put the content of nested containers, and the state of generators, back."""
    if isinstance(value, (torch.Generator, np.random.RandomState)):
        held: Any = value
        yield functools.partial(held.set_state, held.get_state())
    elif isinstance(value, np.random.Generator):
        bits = value.bit_generator
        yield functools.partial(setattr, bits, "state", bits.state)
    elif isinstance(value, random.Random):
        yield functools.partial(value.setstate, value.getstate())
    elif type(value) in (dict, OrderedDict, defaultdict, set, list, deque) and depth < _NESTED:
        is_mapping = isinstance(value, dict)
        kept = list(value.items() if is_mapping else value)
        fill = getattr(value, "update", None) or value.extend
        yield lambda: (value.clear(), fill(kept))
        for entry in kept:
            yield from _undos(entry[1] if is_mapping else entry, depth + 1)


class TrainingState:
    """Everything that a step of ``models`` changes, as it is now; in a ``with`` statement, put back
    at its end, and by put_back(). Optimizers are kept when they are about to step, whichever they
    are; those of ``optimizers`` at once. ``others``: what else has a state, modules among them, and
    ``tensors`` that the step may write to.
    """

    def __init__(
        self,
        models: Iterable[torch.nn.Module],
        scaler: Optional[GradScaler] = None,
        *,
        optimizers: Iterable[torch.optim.Optimizer] = (),
        others: Iterable[Any] = (),
        tensors: Iterable[torch.Tensor] = (),
    ) -> None:
        others = list(others)
        models = [*models, *(other for other in others if isinstance(other, torch.nn.Module))]
        modules = list({id(m): m for model in models for m in model.modules()}.values())
        parameters = {id(p): p for model in models for p in model.parameters()}
        buffers = {id(b): b for model in models for b in model.buffers()}
        self._known = set(parameters)
        self._parameters = _KeptParameters(parameters.values())
        self._values = SavedTensors((*buffers.values(), *tensors))
        # A module may put a new tensor in the place of a buffer or a parameter.
        self._registered: list[tuple[Any, dict[str, Any]]] = [
            (held, dict(held))
            for module in modules
            for held in (module._buffers, module._parameters)
        ]
        self._plain = [(module, _plain(module)) for module in modules]
        self._attributes = [_attributes_undo(module) for module in modules]
        self._generators = Generators()
        self._optimizers = {
            id(optimizer): _OptimizerState(optimizer, self._known) for optimizer in optimizers
        }
        self._others = [
            _undo_of(other)
            for other in ([scaler] if scaler is not None else []) + others
            if not isinstance(other, torch.nn.Module)
        ]
        self._handle: Any = None

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that were given, and those that have stepped."""
        return [state.optimizer for state in self._optimizers.values()]

    def __enter__(self) -> TrainingState:
        self._handle = register_optimizer_step_pre_hook(self._before_update)
        return self

    def _before_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = _OptimizerState(optimizer, self._known)

    def __exit__(self, *error: object) -> None:
        self._handle.remove()
        self.put_back()
        # Now alone: a cache that holds what it should not shows in the next computation.
        self.put_back_attributes()

    def put_back_attributes(self) -> None:
        """The attributes of modules are as they were when this was made, with their content."""
        for put_back in self._attributes:
            put_back()

    def put_back(self) -> None:
        """Everything is as it was when this was made, but for the content of attributes of modules,
        which is put back at the end of the ``with`` statement. May be called again.
        """
        # First: to load a state may write to the rest, as an average of the weights does.
        for undo in self._others:
            undo()
        for optimizer in self._optimizers.values():
            optimizer.put_back()
        for held, kept in self._registered:
            held.update(kept)
        self._values.put_back()
        self._parameters.put_back()
        for module, plain in self._plain:
            vars(module).update(plain)
        self._generators.put_back()


def _plain(module: torch.nn.Module) -> dict[str, Any]:
    """Numbers, flags and texts that the module itself holds, ``training`` among them."""
    return {name: value for name, value in vars(module).items() if type(value) in _PLAIN}
