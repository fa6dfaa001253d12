"""The part of a module's hooks that torch.compile traces into the graph.

Everything here but ``scope`` is followed by Dynamo, with tensors that have no values yet: plain
code, no state. The ops that it calls are defined in monitor/hooks/compiled.py, and run when the
compiled code does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple, Optional

import torch

from fastcheck.utils.torch.flatten import flatten, flatten_arguments

_NOWHERE, _CHECKPOINT, _EVERYWHERE = range(3)

# Bits of what only tracing knows of a tensor.
_NEEDS_GRADIENT = 1
_IS_LEAF = 2

# The ops are declared to write it, so that no compiler drops a call or exchanges two of them.
with torch.inference_mode(False):
    _ORDER = torch.zeros(1, dtype=torch.uint8, device="cpu")

_Found = tuple[int, str, torch.Tensor, int]  # position, label, tensor, bits


class Traced(NamedTuple):
    """The facts that tracing knew of the tensors of a call, in their order. Compiled code runs
    without autograd: none of its tensors requires a gradient there, and gradient mode is off.
    """

    positions: Sequence[int]
    bits: Sequence[int]
    is_grad_enabled: bool

    def needs_gradient(self, index: int) -> bool:
        return bool(self.bits[index] & _NEEDS_GRADIENT)

    def is_leaf(self, index: int) -> bool:
        return bool(self.bits[index] & _IS_LEAF)


def trace_enter(
    address: torch.Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_outermost: bool
) -> None:
    """The pre-hook's part of a graph. ``is_outermost``: integers are read too, for their
    checksum.
    """
    where = scope()
    if where == _NOWHERE:
        return
    entries = _readable(flatten_arguments(args, kwargs), is_outermost)
    call = _emit(torch.ops.fastcheck.module_enter, address, entries)
    # A hook on what comes from outside a checkpointed region would stand outside, and could not
    # know the call, which is inside.
    if where == _EVERYWHERE:
        _watch(entries, call, "grad_input")


def trace_leave(
    address: torch.Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
) -> None:
    """The forward hook's part of a graph."""
    where = scope()
    if where == _NOWHERE:
        return
    entries = _readable(flatten(output, "output"), False)
    call = _emit(torch.ops.fastcheck.module_leave, address, entries)
    if where == _CHECKPOINT:
        # Tensors that the hook keeps would be computed again in backward, and with them every call
        # before: the address alone has to do.
        call = address
        given = [tensor for _, tensor in flatten_arguments(args, kwargs)]
        entries = [item for item in entries if not any(item[2] is tensor for tensor in given)]
    _watch(entries, call, "grad_output")


def trace_named(name: str, tensor: torch.Tensor) -> None:
    """observe()'s part of a graph."""
    where = scope()
    entries = [] if where == _NOWHERE else _readable([(name, tensor)], True)
    for _, _, _, bits in entries:
        is_grad_enabled = torch.is_grad_enabled()
        number = torch.ops.fastcheck.named_tensor(_ORDER, tensor, name, bits, is_grad_enabled)
        # The hook would have a checkpointed region computed again (trace_leave).
        if bits & _NEEDS_GRADIENT and is_grad_enabled and where == _EVERYWHERE:
            watch: Any = tensor.register_hook  # torch leaves it untyped
            watch(_named_gradient_hook(number))


def _named_gradient_hook(number: torch.Tensor) -> Callable[[torch.Tensor], Optional[torch.Tensor]]:
    def hook(gradient: torch.Tensor) -> None:
        torch.ops.fastcheck.named_gradient(number, gradient)

    return hook


def _readable(pairs: list[tuple[str, torch.Tensor]], with_integers: bool) -> list[_Found]:
    kept = []
    for position, (label, tensor) in enumerate(pairs):
        # A tensor that is neither goes through __torch_dispatch__ of its own: not read in eager
        # mode either.
        is_plain = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
        if not is_plain or tensor.layout is not torch.strided:
            continue
        if with_integers or tensor.is_floating_point() or tensor.is_complex():
            bits = 0
            if tensor.requires_grad and type(tensor) is torch.Tensor:
                bits |= _NEEDS_GRADIENT
            if tensor.is_leaf:
                bits |= _IS_LEAF
            kept.append((position, label, tensor, bits))
    return kept


def _emit(op: Callable[..., torch.Tensor], address: torch.Tensor, entries: list[_Found]) -> Any:
    return op(
        _ORDER,
        address,
        [tensor for _, _, tensor, _ in entries],
        [label for _, label, _, _ in entries],
        [position for position, _, _, _ in entries],
        [bits for _, _, _, bits in entries],
        torch.is_grad_enabled(),
    )


def _watch(entries: list[_Found], call: torch.Tensor, role: str) -> None:
    if not torch.is_grad_enabled():
        return
    for _, label, tensor, bits in entries:
        if bits & _NEEDS_GRADIENT:
            watch: Any = tensor.register_hook  # torch leaves it untyped
            watch(_gradient_hook(call, role, label))


def _gradient_hook(
    call: torch.Tensor, role: str, label: str
) -> Callable[[torch.Tensor], Optional[torch.Tensor]]:
    def hook(gradient: torch.Tensor) -> None:
        torch.ops.fastcheck.gradient(call, gradient, role, label)

    return hook


def scope() -> int:
    """The place where Dynamo stands. It calls this as it is, while it traces, and takes what it
    returns for a constant (monitor/hooks/compiled.py sees to that).
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._higher_order_ops.wrap import TagActivationCheckpoint

    if torch.compiler.is_exporting() or torch._C._functorch.peek_interpreter_stack() is not None:
        return _NOWHERE
    inner = InstructionTranslator.current_tx().output.tracers[1:]
    # torch.cond and its like take no operation that writes.
    if not all(isinstance(tracer.source_target, TagActivationCheckpoint) for tracer in inner):
        return _NOWHERE
    return _CHECKPOINT if inner else _EVERYWHERE
