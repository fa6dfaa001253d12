"""A step without dropout or checkpointing, and the functions of torch that it calls."""

from __future__ import annotations

import contextlib
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

# The place of the argument dropout_p of attention, whose own calls are not seen.
_DROPOUT_AT = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}

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
        # The code that torch.compile traces of this counts nothing: another count would be another
        # graph.
        is_traced = torch.compiler.is_compiling()
        if not is_traced and (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled()):
            self.has_autocast = True
        if func in _DROPOUT_AT and not is_traced:
            self.attention += 1
        returned = self._run(func, args, kwargs or {})
        if self._called is not None and not is_traced:
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
