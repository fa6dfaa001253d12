"""Wraps torch's functions that run backward, and those and the method that clip gradients.

A training script may have imported them by name before install(). So what torch's own functions
look up in their module is wrapped too. Compiled code is left alone.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType, GeneratorType
from typing import Any, Callable, Optional

import torch
from torch.nn.utils import clip_grad

from fastcheck.utils.torch.patching import WrappedMethods
from fastcheck.utils.torch.versions import is_compiling

#: Called with the gradients that are about to be changed.
Before = Callable[[Sequence[torch.Tensor]], None]
#: Called with the gradients after the change, their total norm (or None), and the threshold.
After = Callable[[Sequence[torch.Tensor], Optional[torch.Tensor], object], None]

_FUNCTIONS = (
    "clip_grad_norm_",
    "clip_grad_value_",
    # Since torch 2.6: the second half of clip_grad_norm_, and its public name.
    "_clip_grads_with_norm_",
    "clip_grads_with_norm_",
)


#: Called with the tensors that backward begins at, with the gradients of these that the program has
#: given, and, for autograd.grad(), with its inputs.
Began = Callable[
    [
        Sequence[torch.Tensor],
        Sequence[Optional[torch.Tensor]],
        Optional[Sequence[torch.Tensor]],
    ],
    None,
]
Ended = Callable[[], None]


class _Running(threading.local):
    """Whether this thread is in a function that is wrapped."""

    is_inside = False


_running = _Running()


def wrap_clipping(methods: WrappedMethods, before: Before, after: After) -> None:
    """Wraps the functions that clip, until ``methods.restore()``."""
    for module in (torch.nn.utils, clip_grad):
        for name in _FUNCTIONS:
            methods.wrap(module, name, functools.partial(_clip, before, after))
    # Only where it was imported: otherwise no model is one.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded = getattr(fsdp, "FullyShardedDataParallel", None)
    if sharded is not None:
        methods.wrap(sharded, "clip_grad_norm_", functools.partial(_clip, before, after))
    # Called by each of them with the gradients, before anything is changed.
    methods.wrap(clip_grad, "_group_tensors_by_device_and_dtype", functools.partial(_group, before))


def wrap_backward(methods: WrappedMethods, began: Began, ended: Ended, left: Ended) -> None:
    """Wraps Tensor.backward(), autograd.backward() and autograd.grad(), until
    ``methods.restore()``. Not called for a backward within a backward. ``left``: called instead of
    ``ended`` where it has raised.
    """
    autograd: Any = torch.autograd
    if hasattr(autograd, "_engine_run_backward"):
        methods.wrap(autograd, "_engine_run_backward", functools.partial(_run, began, ended, left))
        return
    for name in ("backward", "grad"):  # before torch 2.3
        methods.wrap(autograd, name, functools.partial(_run_named, began, ended, left))


def _run(began: Began, ended: Ended, left: Ended, original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def run(roots: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or torch._C._current_graph_task_id() != -1:
            return original(roots, *args, **kwargs)
        # Behind the roots: their gradients, retain_graph, create_graph, inputs.
        inputs = None if kwargs.get("accumulate_grad", True) else args[3]
        began(roots, _given_gradients(sys._getframe(1)), inputs)
        try:
            result = original(roots, *args, **kwargs)
        except BaseException:
            left()
            raise
        ended()
        return result

    return run


def _run_named(began: Began, ended: Ended, left: Ended, original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:
            return original(*args, **kwargs)
        of_grad = original.__name__ == "grad"
        roots = args[0] if args else kwargs.get("outputs" if of_grad else "tensors")
        inputs = (args[1] if len(args) > 1 else kwargs.get("inputs")) if of_grad else None
        gradients = kwargs.get("grad_outputs" if of_grad else "grad_tensors")
        if gradients is None:
            gradients = (*args, None)[1 + of_grad : 2 + of_grad]
        began(_as_tuple(roots), _as_tuple(gradients), _as_tuple(inputs) if of_grad else None)
        try:
            result = original(*args, **kwargs)
        except BaseException:
            left()
            raise
        ended()
        return result

    return run


def _given_gradients(caller: FrameType) -> tuple[Any, ...]:
    """The gradients that torch's function was called with: it has put ones in the place of all
    others.
    """
    name = {"backward": "grad_tensors", "grad": "grad_outputs"}.get(caller.f_code.co_name, "")
    given = _as_tuple(caller.f_locals.get(name)) if name else ()
    return given if any(gradient is not None for gradient in given) else ()


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor):
        return (value,)
    return tuple(value) if isinstance(value, Iterable) else ()


def _clip(before: Before, after: After, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or _running.is_inside:
            return original(parameters, *args, **kwargs)
        parameters, gradients = _gradients_of(parameters)
        _running.is_inside = True
        try:
            before(gradients)
            result = original(parameters, *args, **kwargs)
        finally:
            _running.is_inside = False
        norm = result if result is not None else kwargs.get("total_norm", (*args, None, None)[1])
        given = {"max_norm": None, "clip_value": None, **kwargs}
        threshold = args[0] if args else given["max_norm"] or given["clip_value"]
        after(gradients, norm if isinstance(norm, torch.Tensor) else None, threshold)
        return result

    return clip


def _group(before: Before, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def group(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not (is_compiling() or _running.is_inside):
            before([tensor for part in tensors for tensor in part if tensor is not None])
        return original(tensors, *args, **kwargs)

    return group


def _gradients_of(parameters: Any) -> tuple[Any, list[torch.Tensor]]:
    """The argument, which can be read once more, and the gradients of what it holds."""
    if isinstance(parameters, torch.Tensor):
        return parameters, _present([parameters])
    if isinstance(parameters, torch.nn.Module):  # of which the function is a method
        return parameters, _present(parameters.parameters())
    if not isinstance(parameters, Iterable):
        return parameters, []  # torch raises
    held = list(parameters)
    # A generator again: torch warns of one that is empty.
    return _again(held) if isinstance(parameters, GeneratorType) else held, _present(held)


def _again(held: list[Any]) -> Iterator[Any]:
    yield from held


def _present(parameters: Iterable[Any]) -> list[torch.Tensor]:
    return [p.grad for p in parameters if isinstance(p, torch.Tensor) and p.grad is not None]
