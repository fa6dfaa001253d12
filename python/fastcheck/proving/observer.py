"""Computed: the tensors of one computation of a step. Observer keeps them, by hooks that exist for
its duration, and Calls sees the functions of torch that it calls; dropout and checkpointing can be
left out.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Callable, Optional
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as checkpointing

from fastcheck.utils.torch.flatten import flatten, flatten_arguments
from fastcheck.utils.torch.frames import program_frames

#: A kind of tensor (``"loss"``, ``"output"``, ``"gradient"``, ``"update"``, or of a module
#: ``"forward input"``, ``"backward output"``, ...), and its name.
Key = tuple[str, str]


def is_of_rows(key: Key) -> bool:
    """True if it is computed from some rows of the batch, and not a sum over all of them."""
    return key[0] == "output" or is_site(key)


def is_site(key: Key) -> bool:
    """True if it is a tensor inside the model."""
    return " " in key[0]


@dataclass
class Computed:
    """The results of one computation of the step.

    ``tensors`` in the order of the computation. ``rows``: which of them have the rows of the batch
    in their first dimension. ``fixed``: those inside the model that need no gradient.
    """

    tensors: dict[Key, torch.Tensor] = field(default_factory=dict)
    rows: set[Key] = field(default_factory=set)
    fixed: set[Key] = field(default_factory=set)

    def map_rows(self, change: Callable[[torch.Tensor], Optional[torch.Tensor]]) -> Computed:
        """The results with ``change`` made of each tensor that has rows, and without those for
        which it returns None, or whose rows are not known.
        """
        changed = {k: change(t) if k in self.rows else t for k, t in self.tensors.items()}
        kept = [k for k in changed if k in self.rows or not is_of_rows(k)]
        tensors = {k: t for k in kept if (t := changed[k]) is not None}
        return Computed(tensors, self.rows & tensors.keys())


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
        self._calls: Counter[str] = Counter()
        self._inside: list[str] = []
        self._handles: list[Any] = []
        self._made_by: dict[int, tuple[torch.Tensor, str]] = {}
        self._count = 0

    @contextlib.contextmanager
    def hooks(self, parameters: dict[str, Any], late: bool = False) -> Iterator[None]:
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
        # Before an update: those that a backward without hooks has left.
        handles.append(register_optimizer_step_pre_hook(lambda *_: self.read_gradients()))
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
        made = [t for _, t in flatten(returned, "output") if t.dtype.to_real().is_floating_point]
        if not made or called in ("get", "set", "size", "dim"):
            return
        name = f"{looked_into.path}#{self._count} {called}"
        self._count += 1
        frame = next(program_frames())
        looked_into.lines[name] = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        for _, tensor in flatten(args, ""):
            if id(tensor) in self._made_by:
                looked_into.readers.setdefault(self._made_by[id(tensor)][1], []).append(name)
        self._made_by[id(made[0])] = made[0], name
        self._follow("operator", name, made[0])

    def _keep(self, kind: str, name: str, tensor: Any) -> None:
        # None: the gradient of a part that split() made and nothing reads.
        is_value = tensor is not None and tensor.dim() > 0
        if is_value and (tensor.dtype.to_real().is_floating_point or kind == "forward input"):
            with torch._C.DisableTorchFunction():  # no function that the module calls
                self._kept.tensors.setdefault((kind, name), _whole(tensor).clone())

    def _follow(self, role: str, name: str, tensor: Any) -> None:
        """Keeps a tensor, and later its gradient."""
        self._keep(f"forward {role}", name, tensor)
        if tensor.requires_grad:
            hook = functools.partial(self._keep, f"backward {role}", name)
            self._handles.append(tensor.register_hook(hook))
        else:
            self._kept.fixed.add((f"forward {role}", name))

    def _watch(self, role: str, path: str, pairs: list[tuple[str, Any]]) -> None:
        for label, tensor in pairs:
            self._follow(role, f"{path}#{self._calls[path]} {label}", tensor)

    def _entered(self, path: str, module: Any, args: Any, kwargs: Any) -> None:
        self._inside.append(path)
        self._watch("input", path, flatten_arguments(args, kwargs))

    def _left(self, path: str, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        pairs = flatten(output, "output")
        if self._sites:
            self._watch("output", path, pairs)
            self._calls[path] += 1
            self._inside.pop()
        elif (known := self._learned) is not None:
            dtypes = [known.dtype, *(tensor.dtype for _, tensor in pairs)]
            known.dtype = next(dtype for dtype in _COARSE if dtype in dtypes)
            if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
                known.batch_norms.append(module)
        if module is self._model:
            if self._learned is not None:
                self._learned.call = args, dict(kwargs)
            for name, tensor in pairs:
                self._keep("output", name, tensor)

    def _accumulated(self, name: str, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return
        held, tensors = _whole(parameter.grad), self._kept.tensors
        tensors.pop(("gradient", name), None)  # it stands where it was whole
        tensors["gradient", name] = held.to_dense() if held.is_sparse else held.clone()

    def read_gradients(self) -> None:
        """Reads the gradients that are there and were not read yet."""
        for name, parameter in self._parameters.items():
            if ("gradient", name) not in self._kept.tensors:
                self._accumulated(name, parameter)


def in_double(tensor: torch.Tensor) -> torch.Tensor:
    """The values in float64; a complex number is two."""
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def _whole(tensor: Any) -> torch.Tensor:
    """The values of a tensor; those of a DTensor, from all ranks."""
    return getattr(tensor, "full_tensor", lambda: tensor)().detach()  # type: ignore[no-any-return]  # torch has it untyped


_DROPOUTS = {
    function
    for at in (F, torch)
    for name, function in vars(at).items()
    if re.fullmatch(r"(feature_)?(alpha_)?dropout([123]d)?", name)
}

# The place of the argument dropout_p of attention, whose own calls are not seen.
_DROPOUT_AT = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}


class Calls(TorchFunctionMode):
    """Notes the calls of scaled_dot_product_attention, of backward(), and of what is within
    torch.autocast; ``dropout=False``: leaves dropout out.
    ``called`` is told of each function, its arguments and what it returns.
    """

    def __init__(self, dropout: bool, called: Optional[Callable[..., None]] = None) -> None:
        super().__init__()
        self._dropout, self._called = dropout, called and not_traced(called)
        self.attention, self.has_autocast, self.has_backward = 0, False, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = self._run(func, args, kwargs or {})
        # The code that torch.compile traces of this counts nothing: another count would be another
        # graph.
        if not torch.compiler.is_compiling():
            self.has_autocast |= torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled()
            self.attention += func in _DROPOUT_AT
            if self._called is not None:
                self._called(func, args, returned)
        return returned

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not self._dropout and func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        place = None if self._dropout else _DROPOUT_AT.get(func)
        if place is not None and len(args) > place:
            args = (*args[:place], 0.0, *args[place + 1 :])
        elif place is not None:
            kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def seen(self) -> Iterator[None]:
        """Shows it what the step calls, in backward too, where activations are computed again:
        torch takes a mode away while it runs a function that a mode has seen.
        """
        autograd: Any = torch.autograd
        run = autograd._engine_run_backward

        def backward(*args: Any, **kwargs: Any) -> Any:
            self.has_backward |= bool(kwargs.get("accumulate_grad"))  # not of autograd.grad()
            with self:
                return run(*args, **kwargs)

        with contextlib.ExitStack() as stack:
            dynamo: Any = sys.modules.get("torch._dynamo")
            if dynamo is not None:
                # torch.compile traces the mode together with the function that is called. After a
                # break in the graph it would make a graph of the mode alone, for all functions.
                for code in (Calls.__torch_function__.__code__, Calls._run.__code__):
                    dynamo.decorators.skip_code(code)
                # Layers with the same code are graphs of their own where hooks end a graph.
                wanted = {"recompile_limit": 1000, "skip_nnmodule_hook_guards": False}
                known = {n: v for n, v in wanted.items() if hasattr(dynamo.config, n)}
                stack.enter_context(dynamo.config.patch(known))
            stack.enter_context(mock.patch.object(autograd, "_engine_run_backward", backward))
            with self:
                yield


def not_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function at which a graph of torch.compile ends."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    return function if dynamo is None else dynamo.disable(function)


@contextlib.contextmanager
def seen_checkpoints(leave_out: bool) -> Iterator[list[None]]:
    """An entry for each call of torch.utils.checkpoint, which ``leave_out`` makes a plain call."""
    calls: list[None] = []
    reentrant: Any = checkpointing.CheckpointFunction
    generator = checkpointing._checkpoint_without_reentrant_generator

    class Plain:
        @staticmethod
        def apply(function: Any, preserve: bool, *args: Any) -> Any:
            calls.append(None)
            return function(*args) if leave_out else reentrant.apply(function, preserve, *args)

    def plain(*args: Any, **kwargs: Any) -> Iterator[None]:
        calls.append(None)
        yield from [None] if leave_out else generator(*args, **kwargs)

    with mock.patch.multiple(
        checkpointing, CheckpointFunction=Plain, _checkpoint_without_reentrant_generator=plain
    ):
        yield calls
