"""Process-wide hooks on optimizers, GradScaler, backward and clipping, for all installed monitors.

Connected while at least one monitor is installed. Optimizers have global hooks in torch; GradScaler
has none, nor have schedulers of learning rates, so their methods, and those of the classes made
from them that replace them, are wrapped at class level and put back when the last is gone.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from types import GeneratorType
from typing import Any, Callable, Optional, Protocol

import torch
from torch.nn.utils import clip_grad
from torch.optim.lr_scheduler import LRScheduler

from fastcheck.utils.torch.optimizer_steps import around_steps
from fastcheck.utils.torch.own_operators import unread
from fastcheck.utils.torch.patching import Listeners, wrap_method
from fastcheck.utils.torch.versions import GradScaler, is_compiling

from .compiled import break_graphs
from .step_watcher import StepWatcher

# Functions that are called before an evaluation of a closure, and after it.
_at_evaluations: list[Callable[[torch.optim.Optimizer], None]] = []


def _begin(at_end: contextlib.ExitStack) -> None:
    # The hooks of an optimizer whose step is compiled break the graph, before it and after it.
    around_steps(at_end, _before_update, _after_update, break_graphs)
    _at_evaluations[:] = break_graphs(_evaluation_began), break_graphs(_evaluation_ended)
    _wrap_scaler(at_end)
    for kind in _kinds(LRScheduler):
        wrap_method(at_end, kind, "step", _schedule)
    wrap_method(at_end, torch.nn.Module, "load_state_dict", _load)
    _wrap_backward(at_end)
    _wrap_clipping(at_end)


#: Told from connect() on, until disconnect() or until they are gone.
watchers: Listeners[StepWatcher] = Listeners(_begin)


class _StepEnd(Protocol):
    def step_ended(self) -> None: ...


#: Told after all watchers were, when an optimizer or a scaler is done, or monitor.step(): may
#: install a monitor, or remove it.
step_ends: Listeners[_StepEnd] = Listeners()


def tell_step_end() -> None:
    """Every watcher has acted on what may have ended a step."""
    for listener in step_ends:
        listener.step_ended()


def _tell(what: str, method: Callable[..., bool], *args: Any) -> None:
    for reference in watchers.references:
        watcher = reference()
        if watcher is not None:
            watcher.guarded(what, method, *args)


def _before_update(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """The arguments of an optimizer's step, where they are others from now on."""
    closure = _closure_of(args, kwargs) if args[1:] or kwargs else None
    _tell("optimizer steps", StepWatcher.before_update, optimizer, closure is not None)
    if closure is None:
        return None
    watched = _watched(closure, optimizer)
    if len(args) > 1:
        return (args[0], watched, *args[2:]), kwargs
    return args, {**kwargs, "closure": watched}


def _closure_of(args: Any, kwargs: Any) -> Optional[Callable[..., Any]]:
    """The closure among the arguments of an optimizer's step; ``args[0]`` is the optimizer."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure if callable(closure) else None


def _watched(closure: Callable[..., Any], optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The closure of a step, which tells of the beginning of each evaluation and, unless it raises,
    of its end.
    """
    began, ended = _at_evaluations

    @functools.wraps(closure)
    def evaluate(*given: Any, **named: Any) -> Any:
        began(optimizer)
        result = closure(*given, **named)
        ended(optimizer)
        return result

    return evaluate


def _evaluation_began(optimizer: torch.optim.Optimizer) -> None:
    _tell("optimizer steps", StepWatcher.evaluation_began, optimizer)


def _evaluation_ended(optimizer: torch.optim.Optimizer) -> None:
    _tell("optimizer steps", StepWatcher.evaluation_ended, optimizer)


def _after_update(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    has_closure = bool(args[1:] or kwargs) and _closure_of(args, kwargs) is not None
    _tell("optimizer steps", StepWatcher.after_update, optimizer, has_closure)
    if step_ends.references:
        tell_step_end()


def _wrap_scaler(at_end: contextlib.ExitStack) -> None:
    """Wraps the methods of torch's scaler and, of the classes made from it until now, those that
    replace a method, with or without asking torch's (FSDP's sharded scaler and torch_npu's do not).
    """
    for kind in _kinds(GradScaler):
        for name, wrap in _SCALER:
            wrap_method(at_end, kind, name, wrap)


def _kinds(kind: Any) -> Iterator[Any]:
    yield kind
    for other in kind.__subclasses__():
        yield from _kinds(other)


class _RunningWrappers(threading.local):
    """The wrapped functions that this thread runs."""

    def __init__(self) -> None:
        # The calls of scalers' methods that were passed on: scaler and name.
        self.calls: set[tuple[int, str]] = set()
        self.is_scheduling = False
        self.is_clipping = False


_running = _RunningWrappers()


@contextlib.contextmanager
def _told(scaler: Any, name: str) -> Iterator[bool]:
    """Yields True if this call is passed on: the scaler is in use, and the call is not that of a
    base class within the scaler's own method.
    """
    key = (id(scaler), name)
    if not scaler.is_enabled() or key in _running.calls:
        yield False
        return
    try:
        _running.calls.add(key)
        yield True
    finally:
        _running.calls.discard(key)


def _scale(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scale(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _told(self, "scale") as is_told:
            if not is_told:
                return original(self, *args, **kwargs)
            outputs = args[0] if args else kwargs.get("outputs")
            _tell("loss scaling", StepWatcher.scaling, self, outputs)
            # A loss that overflows when it is scaled is no event: the scaler sees to its gradients.
            with unread():
                result = original(self, *args, **kwargs)
                _tell("loss scaling", StepWatcher.scaled, self, outputs, result)
            return result

    return scale


def _step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        with _told(self, "step") as is_told:
            # torch raises where it is given anything else than an optimizer.
            if not is_told or not hasattr(optimizer, "param_groups"):
                return original(self, optimizer, *args, **kwargs)
            _tell("loss scaling", StepWatcher.scaler_step_began, self, optimizer)
            try:
                result = original(self, optimizer, *args, **kwargs)
                with unread():  # for every watcher: one keeps what another would see
                    _tell("loss scaling", StepWatcher.scaler_step_ended, self, optimizer)
            finally:
                for watcher in watchers:
                    watcher.scaler_step_left(optimizer)
            return result

    return step


def _unscale(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def unscale_(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        with _told(self, "unscale_") as is_told:
            result = original(self, optimizer, *args, **kwargs)
            if is_told:
                _tell("loss scaling", StepWatcher.unscaled, optimizer)
            return result

    return unscale_


def _schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        # An optimizer that is made of others steps these.
        is_outermost = not _running.is_scheduling
        _running.is_scheduling = True
        try:
            result = original(self, *args, **kwargs)
        finally:
            _running.is_scheduling = not is_outermost
        if is_outermost:
            _tell("learning rates", StepWatcher.scheduler_stepped, self)
        return result

    return step


def _load(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        weights = args[0] if args else kwargs.get("state_dict")
        _tell("loaded weights", StepWatcher.loading, self, weights)
        keys = original(self, *args, **kwargs)
        # Both are empty unless strict=False.
        if getattr(keys, "missing_keys", None) and getattr(keys, "unexpected_keys", None):
            _tell("loaded weights", StepWatcher.loaded, self, keys)
        return keys

    return load_state_dict


def _update(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _told(self, "update") as is_told:
            result = original(self, *args, **kwargs)
            if is_told:
                _tell("loss scaling", StepWatcher.scaler_updated, self)
                tell_step_end()
            return result

    return update


_SCALER = (("scale", _scale), ("unscale_", _unscale), ("step", _step), ("update", _update))


# ---- Backward and clipping -----------------------------------------------------------------------
#
# A training script may have imported these functions by name before install(). So what torch's own
# functions look up in their module is wrapped too. Compiled code is left alone.

_CLIPPING = (
    "clip_grad_norm_",
    "clip_grad_value_",
    # Since torch 2.6: the second half of clip_grad_norm_, and its public name.
    "_clip_grads_with_norm_",
    "clip_grads_with_norm_",
)


def _wrap_clipping(at_end: contextlib.ExitStack) -> None:
    """Wraps the functions that clip gradients."""
    for module in (torch.nn.utils, clip_grad):
        for name in _CLIPPING:
            wrap_method(at_end, module, name, _clip)
    # Only where it was imported: otherwise no model is such a module.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded = getattr(fsdp, "FullyShardedDataParallel", None)
    if sharded is not None:
        wrap_method(at_end, sharded, "clip_grad_norm_", _clip)
    # Called by each of them with the gradients, before anything is changed.
    wrap_method(at_end, clip_grad, "_group_tensors_by_device_and_dtype", _group)


def _wrap_backward(at_end: contextlib.ExitStack) -> None:
    """Wraps Tensor.backward(), autograd.backward() and autograd.grad(). A backward within a
    backward is not told of.
    """
    autograd: Any = torch.autograd
    if hasattr(autograd, "_engine_run_backward"):
        # After a trace torch.compiler puts in the place of both what it found in the second.
        for module in (autograd, autograd.graph):
            wrap_method(
                at_end, module, "_engine_run_backward", partial(_backward, _asked_of_engine)
            )
        return
    for name in ("backward", "grad"):  # before torch 2.3
        wrap_method(at_end, autograd, name, _backward_by_name)


# The arguments of a backward: its roots, the gradients of these that the program has given, what
# autograd.grad() is asked for, and whether it keeps the graph, and its result has none.
_Asked = tuple[
    Sequence[torch.Tensor], Sequence[Optional[torch.Tensor]], Optional[Sequence[Any]], bool
]


def _backward(
    asked: Callable[[Any, Any], _Asked], original: Callable[..., Any]
) -> Callable[..., Any]:
    """Wraps a function that runs a backward. ``asked`` finds what it is about, by its arguments."""

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        is_traced = is_compiling() or getattr(torch.compiler, _NON_STRICT, False)
        if is_traced or torch._C._current_graph_task_id() != -1:
            return original(*args, **kwargs)
        about = asked(args, kwargs)
        _tell("the loss", StepWatcher.backward_began, *about)
        try:
            result = original(*args, **kwargs)
        except BaseException:
            for watcher in watchers:
                watcher.backward_left()
            raise
        _tell("the loss", StepWatcher.backward_ended)
        if about[2] is not None:
            _tell("the loss", StepWatcher.derived, about[0], about[2], result)
        return result

    # While Dynamo traces nothing is told of.
    wrapped: Callable[..., Any] = break_graphs(run)
    return wrapped


_NON_STRICT = "_is_non_strict_tracing_flag"
# The argument of torch's functions that has the gradients of the roots.
_GRADIENTS = {"backward": "grad_tensors", "grad": "grad_outputs"}


def _asked_of_engine(args: Any, kwargs: Any) -> _Asked:
    """Looks for the given gradients where torch's function was called with them: it has put
    gradients of 1 in the place of all others.
    """
    caller = sys._getframe(2)
    name = _GRADIENTS.get(caller.f_code.co_name)
    value = None if name is None else caller.f_locals.get(name)
    given = () if value is None else _as_tuple(value)
    if given and all(gradient is None for gradient in given):
        given = ()
    roots = args[0] if args else kwargs.get("t_outputs", ())
    if kwargs.get("accumulate_grad", True):
        return roots, given, None, False
    # Behind the roots: their gradients, retain_graph, create_graph, inputs.
    inputs = args[4] if len(args) > 4 else kwargs.get("inputs", ())
    return roots, given, inputs, tuple(args[2:4]) == (True, False)


def _backward_by_name(original: Callable[..., Any]) -> Callable[..., Any]:
    told = _backward(partial(_asked_by_name, original.__name__ == "grad"), original)

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        # torch reads what an iterator yields, too (model.parameters()).
        return told(*map(_kept, args), **{name: _kept(kwargs[name]) for name in kwargs})

    return run


def _kept(value: Any) -> Any:
    return list(value) if isinstance(value, Iterator) else value


def _asked_by_name(of_grad: bool, args: Any, kwargs: Any) -> _Asked:
    roots = args[0] if args else kwargs.get("outputs" if of_grad else "tensors")
    inputs = (args[1] if len(args) > 1 else kwargs.get("inputs")) if of_grad else None
    place = 1 + of_grad
    name = "grad_outputs" if of_grad else "grad_tensors"
    gradients = args[place] if len(args) > place else kwargs.get(name)
    given = _as_tuple(inputs) if of_grad else None
    return _as_tuple(roots), _as_tuple(gradients), given, False


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor):
        return (value,)
    return tuple(value) if isinstance(value, Iterable) else ()


def _clip(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or _running.is_clipping:
            return original(parameters, *args, **kwargs)
        parameters, gradients = _gradients_of(parameters)
        _running.is_clipping = True
        try:
            _tell("gradient clipping", StepWatcher.before_clipping, gradients)
            result = original(parameters, *args, **kwargs)
        finally:
            _running.is_clipping = False
        norm = result if result is not None else kwargs.get("total_norm", (*args, None, None)[1])
        threshold = args[0] if args else kwargs.get("max_norm", kwargs.get("clip_value"))
        norm = norm if isinstance(norm, torch.Tensor) else None
        _tell("gradient clipping", StepWatcher.after_clipping, gradients, norm, threshold)
        return result

    return clip


def _group(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def group(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not (is_compiling() or _running.is_clipping):
            gradients = [gradient for part in tensors for gradient in part if gradient is not None]
            caller = sys._getframe(1)
            # One that was imported by name before install().
            is_value = caller.f_code.co_name == "clip_grad_value_"
            value = caller.f_locals.get("clip_value") if is_value else None
            _tell("gradient clipping", StepWatcher.before_clipping, gradients, value)
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
    # A generator again: torch warns of an empty generator.
    return _again(held) if isinstance(parameters, GeneratorType) else held, _present(held)


def _again(held: list[Any]) -> Iterator[Any]:
    yield from held


def _present(parameters: Iterable[Any]) -> list[torch.Tensor]:
    held = [p for p in parameters if isinstance(p, torch.Tensor)]
    with torch._C.DisableTorchFunction():
        gradients = [p.grad for p in held]
    return [gradient for gradient in gradients if gradient is not None]
