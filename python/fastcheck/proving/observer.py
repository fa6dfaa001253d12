"""Observer: keeps the tensors of one computation, by hooks that are gone after it."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, Optional, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fastcheck.utils.torch.flatten import flatten, flatten_arguments

from .computed import Computed


class Observed(Protocol):
    """The part of a Case that is read here, and written to."""

    model: torch.nn.Module
    parameters: dict[str, torch.Tensor]
    is_learning: bool
    call: tuple[tuple[Any, ...], dict[str, Any]]
    ops_of: Optional[str]
    lines: dict[str, str]
    readers: dict[str, list[str]]

    def learn_of(self, module: torch.nn.Module, dtypes: list[torch.dtype]) -> None: ...


class Observer:
    """``sites``: keeps what every module takes in and returns, and the gradients of both, in the
    order of the computation; and what functions return in the module ``case.ops_of``.
    """

    def __init__(
        self, case: Observed, kept: Computed, gradients: dict[str, torch.Tensor], sites: bool
    ) -> None:
        self._case, self._kept, self._gradients, self._sites = case, kept, gradients, sites
        self._calls: Counter[str] = Counter()
        self._inside: list[str] = []
        self._handles: list[Any] = []
        self._made_by: dict[int, tuple[torch.Tensor, str]] = {}
        self._count = 0

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Has the hooks in place."""
        case, handles = self._case, self._handles
        for path, module in case.model.named_modules():
            if self._sites:
                entered = functools.partial(self._entered, path)
                handles.append(module.register_forward_pre_hook(entered, with_kwargs=True))
            if self._sites or case.is_learning or module is case.model:
                left = functools.partial(self._left, path)
                handles.append(module.register_forward_hook(left, with_kwargs=True))
        handles.append(register_optimizer_step_pre_hook(self._updating))
        parameter: Any
        for name, parameter in case.parameters.items():
            if parameter.requires_grad and parameter.is_leaf:
                hook = functools.partial(self._accumulated, name)
                handles.append(parameter.register_post_accumulate_grad_hook(hook))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def called(self, function: Any, args: tuple[Any, ...], returned: Any) -> None:
        """What a function returned within the module that is looked into."""
        path = self._case.ops_of
        if not self._inside or self._inside[-1] != path:
            return
        called = getattr(function, "__name__", "a function").strip("_")
        if called in ("get", "set", "size", "dim"):
            return
        made = [t for _, t in flatten(returned, "output") if t.is_floating_point()]
        if not made:
            return
        name = f"{path}#{self._count} {called}"
        self._count += 1
        self._case.lines[name] = _line()
        for _, tensor in flatten(args, ""):
            maker = self._made_by.get(id(tensor))
            if maker is not None:
                self._case.readers.setdefault(maker[1], []).append(name)
        first: Any = made[0]
        self._made_by[id(first)] = first, name
        self._keep("forward operator", name, first)
        if first.requires_grad:
            hook = functools.partial(self._keep, "backward operator", name)
            self._handles.append(first.register_hook(hook))

    def _keep(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        if tensor.is_floating_point() and tensor.dim():
            self._kept.tensors.setdefault((kind, name), tensor.detach().clone())

    def _watch(self, phase: str, path: str, pairs: list[tuple[str, Any]]) -> None:
        for label, tensor in pairs:
            name = f"{path}#{self._calls[path]} {label}"
            self._keep(f"forward {phase}", name, tensor)
            if tensor.requires_grad:
                hook = functools.partial(self._keep, f"backward {phase}", name)
                self._handles.append(tensor.register_hook(hook))

    def _entered(self, path: str, module: Any, args: Any, kwargs: Any) -> None:
        self._inside.append(path)
        self._watch("input", path, flatten_arguments(args, kwargs))

    def _left(self, path: str, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        pairs = flatten(output, "output")
        if self._sites:
            self._watch("output", path, pairs)
            self._calls[path] += 1
            self._inside.pop()
        elif self._case.is_learning:
            self._case.learn_of(module, [tensor.dtype for _, tensor in pairs])
        if module is self._case.model:
            if self._case.is_learning:
                self._case.call = (args, dict(kwargs))
            for name, tensor in pairs:
                self._keep("output", name, tensor)

    def _accumulated(self, name: str, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return
        held = parameter.grad.detach()
        self._gradients[name] = held.to_dense() if held.is_sparse else held.clone()
        if self._sites:
            path, _, label = name.rpartition(".")
            key = "backward parameter", f"{path}#0 {label}"
            self._kept.tensors.pop(key, None)
            self._kept.tensors[key] = self._gradients[name]

    def _updating(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for name, parameter in self._case.parameters.items():  # of a backward without hooks
            if name not in self._gradients:
                self._accumulated(name, parameter)


def _line() -> str:
    """Where the program called: the innermost frame that is neither torch's nor fastcheck's."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package not in ("torch", "fastcheck"):
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
