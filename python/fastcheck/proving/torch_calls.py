"""A step without dropout or checkpointing, and the functions of torch that it calls."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any, Callable, Optional
from unittest import mock

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as checkpointing

_DROPOUTS = {
    function
    for at in (F, torch)
    for name, function in vars(at).items()
    if re.fullmatch(r"(feature_)?(alpha_)?dropout([123]d)?", name)
}

_ATTENTIONS = (F.scaled_dot_product_attention, F.multi_head_attention_forward)

Called = Callable[[Any, tuple[Any, ...], Any], None]


class Calls(TorchFunctionMode):
    """Notes the calls of scaled_dot_product_attention, of backward(), and of what is within
    torch.autocast; ``dropout=False``: leaves dropout out.
    ``called`` is told of each function, its arguments and what it returns.
    """

    def __init__(self, dropout: bool, called: Optional[Called] = None) -> None:
        super().__init__()
        self._dropout = dropout
        self._called = called
        self.attention = 0
        self.has_autocast = False
        self.has_backward = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What torch.compile traces of this counts nothing: another count would be another graph.
        is_traced = torch.compiler.is_compiling()
        if not is_traced and (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled()):
            self.has_autocast = True
        if func in _ATTENTIONS and not is_traced:
            self.attention += 1
        returned = self._run(func, args, kwargs or {})
        if self._called is not None and not is_traced:
            self._called(func, args, returned)
        return returned

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is F.scaled_dot_product_attention:
            if not self._dropout:
                args, kwargs = args[:4], {**kwargs, "dropout_p": 0.0}
                if len(args) == 4 and "attn_mask" in kwargs:
                    args = args[:3]
        elif not self._dropout and func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        elif not self._dropout and func is F.multi_head_attention_forward:
            # The function's own calls are not seen here.
            bound = inspect.signature(func).bind(*args, **kwargs)
            bound.arguments["dropout_p"] = 0.0
            args, kwargs = bound.args, bound.kwargs
        return func(*args, **kwargs)


@contextlib.contextmanager
def within(calls: Calls) -> Iterator[None]:
    """Shows ``calls`` what the step calls, in backward too, where activations are computed again:
    torch takes a mode away while it runs a function that a mode has seen.
    """
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        calls.has_backward |= bool(kwargs.get("accumulate_grad"))  # not of autograd.grad()
        with calls:
            return run(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        dynamo: Any = sys.modules.get("torch._dynamo")
        if dynamo is not None:
            # torch.compile traces the mode together with the function that is called. After a break
            # in the graph it would make a graph of the mode alone, for all functions.
            for code in (Calls.__torch_function__.__code__, Calls._run.__code__):
                dynamo.decorators.skip_code(code)
            # Layers with the same code are graphs of their own where hooks end a graph.
            wanted = {"recompile_limit": 1000, "skip_nnmodule_hook_guards": False}
            known = {name: value for name, value in wanted.items() if hasattr(dynamo.config, name)}
            stack.enter_context(dynamo.config.patch(known))
        stack.enter_context(mock.patch.object(autograd, "_engine_run_backward", backward))
        with calls:
            yield


def not_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function at which a graph of torch.compile ends."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    return function if dynamo is None else dynamo.disable(function)


@contextlib.contextmanager
def without_dropout_of_recurrent(model: torch.nn.Module) -> Iterator[None]:
    """Dropout between the layers of an LSTM, GRU or RNN is an argument of their kernel."""
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.RNNBase)]
    were = [layer.dropout for layer in layers]
    try:
        for layer in layers:
            layer.dropout = 0.0
        yield
    finally:
        for layer, was in zip(layers, were):
            layer.dropout = was


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
        if leave_out:
            yield
        else:
            yield from generator(*args, **kwargs)

    with mock.patch.multiple(
        checkpointing, CheckpointFunction=Plain, _checkpoint_without_reentrant_generator=plain
    ):
        yield calls
