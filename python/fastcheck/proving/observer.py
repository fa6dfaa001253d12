"""Observer: keeps the tensors of a computation, by hooks that exist for its duration."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fastcheck.utils.torch.flatten import flatten, flatten_arguments
from fastcheck.utils.torch.frames import program_frames

from .computed import Computed
from .torch_calls import not_traced

#: The floating-point formats whose ulp is known, coarsest first.
_COARSE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass
class Learned:
    """A summary of what a step calls. ``call``: the last call of the model itself. ``batch_norms``:
    those that normalise by the batch. ``dtype``: the coarsest format that a module returned.
    ``written``: the modules whose buffers it changes.
    """

    dtype: torch.dtype = torch.float32
    attention_calls: int = 0
    checkpoints: int = 0
    has_autocast: bool = False
    call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    batch_norms: list[torch.nn.Module] = field(default_factory=list)
    written: set[torch.nn.Module] = field(default_factory=set)

    def add(self, module: torch.nn.Module, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Notes a module that the step has called, and its outputs."""
        dtypes = [self.dtype, *(tensor.dtype for _, tensor in tensors)]
        self.dtype = next(dtype for dtype in _COARSE if dtype in dtypes)
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            self.batch_norms.append(module)


@dataclass
class Inside:
    """A module whose operators are kept: the line of each, and which others read what it made."""

    path: str
    lines: dict[str, str] = field(default_factory=dict)
    readers: dict[str, list[str]] = field(default_factory=dict)


@dataclass(eq=False)
class Observer:
    """``sites``: keeps what every module takes in and returns, and the gradients of both, in the
    order of the computation; and what functions return in the module ``inside``.
    """

    _model: torch.nn.Module
    _kept: Computed
    _sites: bool
    _learned: Optional[Learned] = None
    _looked_into: Optional[Inside] = None

    def __post_init__(self) -> None:
        self._parameters: dict[str, torch.Tensor] = {}
        self._calls: Counter[str] = Counter()
        self._inside: list[str] = []
        self._handles: list[Any] = []
        self._made_by: dict[int, tuple[torch.Tensor, str]] = {}
        self._count = 0

    @contextlib.contextmanager
    def hooks(self, parameters: dict[str, torch.Tensor], late: bool = False) -> Iterator[None]:
        """Holds hooks in place in a ``with`` statement, which keep the gradients of ``parameters``
        too; ``late``: before an update alone, and where read_gradients() is called.
        """
        self._parameters, handles = parameters, self._handles
        for path, module in self._model.named_modules():
            if self._sites:
                entered = not_traced(functools.partial(self._entered, path))
                handles.append(module.register_forward_pre_hook(entered, with_kwargs=True))
            if self._sites or self._learned is not None or module is self._model:
                left = not_traced(functools.partial(self._left, path))
                handles.append(module.register_forward_hook(left, with_kwargs=True))
        handles.append(register_optimizer_step_pre_hook(self._updating))
        parameter: Any
        for name, parameter in parameters.items():
            if parameter.requires_grad and parameter.is_leaf and not late:
                hook = functools.partial(self._accumulated, name)
                handles.append(parameter.register_post_accumulate_grad_hook(hook))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def called(self, function: Any, args: tuple[Any, ...], returned: Any) -> None:
        """Keeps what a function returned within the module ``inside``."""
        looked_into = self._looked_into
        if looked_into is None or self._inside[-1:] != [looked_into.path]:
            return
        called = getattr(function, "__name__", "a function").strip("_")
        made = [t for _, t in flatten(returned, "output") if t.is_floating_point()]
        if not made or called in ("get", "set", "size", "dim"):
            return
        name = f"{looked_into.path}#{self._count} {called}"
        self._count += 1
        looked_into.lines[name] = _line()
        for _, tensor in flatten(args, ""):
            maker = self._made_by.get(id(tensor))
            if maker is not None:
                looked_into.readers.setdefault(maker[1], []).append(name)
        first: Any = made[0]
        self._made_by[id(first)] = first, name
        self._keep("forward operator", name, first)
        if first.requires_grad:
            hook = functools.partial(self._keep, "backward operator", name)
            self._handles.append(first.register_hook(hook))

    def _keep(self, kind: str, name: str, tensor: Optional[torch.Tensor]) -> None:
        if tensor is None:  # the gradient of a part that split() made and nothing reads
            return
        if tensor.dim() and (tensor.is_floating_point() or kind == "forward input"):
            with torch._C.DisableTorchFunction():  # no function that the module calls
                self._kept.tensors.setdefault((kind, name), _whole(tensor).clone())

    def _watch(self, phase: str, path: str, pairs: list[tuple[str, Any]]) -> None:
        for label, tensor in pairs:
            name = f"{path}#{self._calls[path]} {label}"
            self._keep(f"forward {phase}", name, tensor)
            if tensor.requires_grad:
                hook = functools.partial(self._keep, f"backward {phase}", name)
                self._handles.append(tensor.register_hook(hook))
            else:
                self._kept.fixed.add((f"forward {phase}", name))

    def _entered(self, path: str, module: Any, args: Any, kwargs: Any) -> None:
        self._inside.append(path)
        self._watch("input", path, flatten_arguments(args, kwargs))

    def _left(self, path: str, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        pairs = flatten(output, "output")
        if self._sites:
            self._watch("output", path, pairs)
            self._calls[path] += 1
            self._inside.pop()
        elif self._learned is not None:
            self._learned.add(module, pairs)
        if module is self._model:
            if self._learned is not None:
                self._learned.call = (args, dict(kwargs))
            for name, tensor in pairs:
                self._keep("output", name, tensor)

    def _accumulated(self, name: str, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return
        held, tensors = _whole(parameter.grad), self._kept.tensors
        tensors.pop(("gradient", name), None)  # it stands where it was whole
        tensors["gradient", name] = held.to_dense() if held.is_sparse else held.clone()

    def _updating(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.read_gradients()  # left by a backward without hooks

    def read_gradients(self) -> None:
        """Reads the gradients that are there and were not read yet."""
        for name, parameter in self._parameters.items():
            if ("gradient", name) not in self._kept.tensors:
                self._accumulated(name, parameter)


def _whole(tensor: Any) -> torch.Tensor:
    """The values of a tensor; those of a DTensor, from all ranks."""
    gather = getattr(tensor, "full_tensor", None)
    return (tensor if gather is None else gather()).detach()  # type: ignore[no-any-return]  # torch has it untyped


def _line() -> str:
    """The line where the program called: the innermost frame that is neither torch's nor
    fastcheck's.
    """
    frame = next(program_frames())
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
