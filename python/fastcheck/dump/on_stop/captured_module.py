"""A module call with its inputs and outputs, kept while a stopped step runs again."""

from __future__ import annotations

import io
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Callable, Optional

import torch

from fastcheck.statistics.functions import found_nonfinite
from fastcheck.utils.torch.flatten import flatten, flatten_arguments
from fastcheck.utils.torch.own_operators import no_grad
from fastcheck.utils.torch.readable import can_hold_nonfinite, can_read, is_materialised
from fastcheck.utils.torch.sharding import local
from fastcheck.utils.torch.training_state import Generators
from fastcheck.utils.torch.versions import autocast_dtype

# Most calls whose backward is still to come.
_WAITING = 16
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Labelled = list[tuple[str, torch.Tensor]]


class CapturedModule:
    """``inputs``, ``stored`` and ``outputs`` are copies; ``copies`` has them by the id of what was
    copied, which is held.
    """

    def __init__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self.module = module
        self.args = args
        self.kwargs = kwargs
        self.generators = Generators()
        self.given = flatten_arguments(args, kwargs)
        self.copies: dict[int, torch.Tensor] = {}
        self.inputs = self._copied(self.given)
        stored = (*module.named_parameters(), *module.named_buffers())
        self._held = [(name, local(tensor)) for name, tensor in stored if is_materialised(tensor)]
        self.stored = self._copied(self._held)
        self.outputs: Labelled = []
        self.grad_outputs: dict[int, torch.Tensor] = {}
        #: Gradients of the inputs, by position, and of the parameters, by name.
        self.grad_inputs: dict[int, torch.Tensor] = {}
        self.grad_params: dict[str, torch.Tensor] = {}
        kind = next((t.device.type for _, t in (*self.inputs, *self.stored)), "cpu")
        #: The dtype of autocast; empty where it is off.
        self.autocast = autocast_dtype(kind)
        self.device = kind

    def _copied(self, tensors: Labelled) -> Labelled:
        copies = []
        for label, tensor in tensors:
            copy = self.copies.get(id(tensor))
            if copy is None:
                copy = self.copies[id(tensor)] = tensor.detach().clone()
            copies.append((label, copy))
        return copies


class ModuleWatch:
    """Watches the calls of a module within a ``with`` statement: ``found`` is the first of them
    that is non-finite, in what it read or made in forward, or in a gradient in backward.
    """

    def __init__(self, module: torch.nn.Module, direction: str) -> None:
        self.found: Optional[CapturedModule] = None
        #: What kept it from being captured.
        self.problem = ""
        self._module = module
        self._is_backward = direction == "backward"
        self._running: list[CapturedModule] = []
        self._waiting = 0
        # The call whose backward runs.
        self._in_backward: Optional[CapturedModule] = None
        self._handles: list[Any] = []

    def __enter__(self) -> ModuleWatch:
        module = self._module
        self._handles = [
            module.register_forward_pre_hook(self._guarded(self._before), with_kwargs=True),
            module.register_forward_hook(self._guarded(self._after), with_kwargs=True),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _guarded(self, hook: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            if self.problem or torch._C._current_graph_task_id() != -1:
                return  # a recompute of checkpointing: its call was seen in forward
            try:
                with no_grad():
                    hook(*args)
            except Exception as error:
                self.problem = f"{type(error).__name__}: {error}"

        return call

    def _before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if self.found is not None or self._waiting == _WAITING:
            return
        call = CapturedModule(module, args, kwargs)
        self._running.append(call)
        # Now: the module may write to them.
        for position, (_, tensor) in enumerate(call.given if self._is_backward else ()):
            self._hook(tensor, partial(self._note, call, call.grad_inputs, position))

    def _after(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._running:
            return
        call = self._running.pop()
        made = flatten(output, "output")
        if self._is_backward:
            self._waiting += 1
            call.outputs = [(label, t.detach().clone()) for label, t in made]
            self._watch(call, made)
        elif self.found is None and _any_nonfinite(*(t for _, t in (*call.inputs, *made))):
            call.outputs = [(label, t.detach().clone()) for label, t in made]
            self.found = call

    def _watch(self, call: CapturedModule, made: Labelled) -> None:
        for position, (_, tensor) in enumerate(made):
            self._hook_output(call, tensor, position)
        for name, parameter in self._module.named_parameters():
            # A hook for all calls, one after the other.
            if self._waiting == 1:
                self._hook(parameter, partial(self._note_parameter, name))

    def _hook_output(self, call: CapturedModule, tensor: torch.Tensor, position: int) -> None:
        node, number = tensor.grad_fn, tensor.output_nr
        if node is None:
            return

        def hook(gradients: Sequence[Optional[torch.Tensor]]) -> None:
            self._in_backward = call
            gradient = gradients[number]
            if gradient is not None:
                self._note(call, call.grad_outputs, position, gradient)

        # After the hooks of the tensor, which may have replaced the gradient.
        self._handles.append(node.register_prehook(hook))

    def _hook(self, tensor: torch.Tensor, function: Callable[[torch.Tensor], None]) -> None:
        if tensor.requires_grad:
            register: Any = tensor.register_hook
            self._handles.append(register(function))

    def _note_parameter(self, name: str, gradient: torch.Tensor) -> None:
        if self._in_backward is not None:
            self._note(self._in_backward, self._in_backward.grad_params, name, gradient)

    def _note(
        self,
        call: CapturedModule,
        gradients: dict[Any, torch.Tensor],
        key: Any,
        gradient: torch.Tensor,
    ) -> None:
        try:
            with no_grad():
                before = gradients.get(key)
                kept = local(gradient).detach().clone()
                gradients[key] = kept if before is None else before + kept
                if self.found is None and _any_nonfinite(kept):
                    self.found = call
        except Exception as error:
            self.problem = self.problem or f"{type(error).__name__}: {error}"


def _any_nonfinite(*tensors: torch.Tensor) -> bool:
    readable = [t for t in tensors if can_hold_nonfinite(t) and can_read(t)]
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in readable:
        by_device.setdefault(tensor.device, []).append(tensor)
    return any(bool(found_nonfinite(part)) for part in by_device.values())


def pickled(call: CapturedModule, spec_of: Callable[[torch.Tensor], tuple[Any, ...]]) -> bytes:
    """The module with its arguments; tensors are in the dump instead, at ``spec_of``.

    Raises what pickle raises.
    """
    buffer = io.BytesIO()
    inputs = {id(tensor) for _, tensor in call.given}
    numbers = {id(tensor): number for number, (_, tensor) in enumerate(call.given)}

    class Writer(pickle.Pickler):
        def persistent_id(self, value: Any) -> Optional[tuple[Any, ...]]:
            if not isinstance(value, torch.Tensor):
                return None
            number = numbers.setdefault(id(value), len(call.given) + len(numbers))
            is_parameter = isinstance(value, torch.nn.Parameter)
            spec = spec_of(call.copies.get(id(value), value))
            return number, id(value) in inputs, value.requires_grad, is_parameter, *spec

    with _without_hooks(call.module), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a module may warn of being pickled
        Writer(buffer, protocol=4).dump((call.module, call.args, call.kwargs))
    return buffer.getvalue()


@contextmanager
def _without_hooks(module: torch.nn.Module) -> Iterator[None]:
    """Removes fastcheck's hooks for a while: the script must not need fastcheck."""
    kept = []
    for part in module.modules():
        for name in _HOOKS:
            hooks = part.__dict__.get(name)
            if hooks:
                ours = {k for k, h in hooks.items() if type(h).__module__.startswith("fastcheck.")}
                kept.append((part, name, hooks))
                part.__dict__[name] = OrderedDict((k, h) for k, h in hooks.items() if k not in ours)
    try:
        yield
    finally:
        for part, name, hooks in kept:
            part.__dict__[name] = hooks
