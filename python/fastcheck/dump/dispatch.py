"""The operators of a block, by a mode of torch's dispatcher, and the names that their calls go by.

The mode sees the operators of the thread that entered it, and of backward wherever that runs:
autograd hands its thread's modes on to the threads of devices. Other threads of the program are not
seen.

Names are those of ``install(level="op")``: an operator of backward goes by the operator of the
forward pass that it is the backward of, told by the sequence number of autograd's node.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .._calls import ModuleNode
from .._naming import OUTSIDE
from .api_calls import ApiCalls
from .modules import ModuleTracker
from .records import is_quiet
from .selection import CallName

__all__ = ["CallNamer", "Forward", "NamedCall", "OpMode", "recomputes"]

_PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__
_DETACH = torch.ops.aten.detach.default
_current_node: Any = getattr(torch._C, "_current_autograd_node", lambda: None)
_next_sequence: Any = getattr(torch.autograd, "_get_sequence_nr", lambda: 0)
# Whoever runs a checkpointed function again has set hooks on what it saves.
_saved_tensor_hooks: Any = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore: None
)


def recomputes() -> bool:
    """Within backward: whether a checkpointed function is run again."""
    return torch.is_grad_enabled() and _saved_tensor_hooks(True) is not None


class OpMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has it untyped
    """``run(func, args, kwargs)`` is called for every operator in its place.
    ``pass_by(name)`` is told of a higher-order operator, of which nothing more is seen.
    """

    # What these run inside is not seen, but without this they would refuse to run.
    supports_higher_order_operators = True

    def __init__(
        self,
        run: Callable[[Any, Any, Any], Any],
        pass_by: Callable[[str], None] = lambda name: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has it untyped
        self._run = run
        self._pass_by = pass_by

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_quiet():
            return func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            self._pass_by(str(func))
            return func(*args, **kwargs)
        for kind in types:
            if kind.__torch_dispatch__ is not _PLAIN_DISPATCH:
                # It calls the operator again for the plain tensors below, which is what to see.
                return NotImplemented
        if func is _DETACH or func.namespace == "profiler":
            # What autograd does to each tensor that it keeps, and marks in somebody's timeline.
            return func(*args, **kwargs)
        return self._run(func, args, kwargs)


class Forward:
    """What backward has to know of a call of the forward pass."""

    __slots__ = ("_made", "_task", "name", "node", "was_within")

    def __init__(self, name: CallName, node: Optional[ModuleNode], was_within: bool) -> None:
        self.name = name
        self.node = node
        self.was_within = was_within
        self._task = self._made = -1

    def next_made(self) -> int:
        """Numbers what one run of its backward makes."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._made = task, -1
        self._made += 1
        return self._made


class NamedCall(NamedTuple):
    """``node``: the module that it runs in; ``forward``: of backward, the call that it is the
    backward of. Either may be unknown.
    """

    name: CallName
    node: Optional[ModuleNode]
    forward: Optional[Forward]
    is_recompute: bool


class _Local(threading.local):
    sequence = -1
    is_first = False


class CallNamer:
    """Names the calls of one block, in order; its methods expect a lock to be held.
    csrc/torch/dump/call_names.h has the same in C++.
    """

    def __init__(self, tracker: ModuleTracker, apis: Optional[ApiCalls]) -> None:
        self._tracker = tracker
        self._apis = apis
        self._counts: dict[str, Counter[str]] = {
            direction: Counter() for direction in ("forward", "backward", "optimizer")
        }
        self._forwards: dict[int, Forward] = {}
        self._local = _Local()
        # Nodes that are there already belong to nothing that was seen.
        self._oldest = self._local.sequence = _next_sequence() - 1
        self._local.is_first = True

    def name(self, op: str) -> NamedCall:
        """Of the call that is about to run."""
        node, is_repeated, is_in_optimizer = self._tracker.whereabouts
        direction, is_recompute = "forward", False
        forward: Optional[Forward] = None
        if torch._C._current_graph_task_id() != -1:
            is_recompute = is_repeated or recomputes()
            if not is_recompute:
                direction = "backward"
                graph_node = _current_node()
                if graph_node is not None:
                    forward = self._forwards.get(graph_node._sequence_nr())
                node = None if forward is None else forward.node
        elif is_in_optimizer:
            direction, node = "optimizer", None
        counts = self._counts[direction]
        number = counts[op]
        counts[op] += 1
        api, api_call = ("", -1) if self._apis is None else self._apis.current
        if forward is not None:
            before = forward.name
            name = CallName(
                before.op,
                before.module,
                before.call,
                "backward",
                before.api,
                before.api_call,
                ran=op,
            )
        else:
            path = OUTSIDE if node is None else node.path
            name = CallName(op, path, number, direction, api, api_call)
        return NamedCall(name, node, forward, is_recompute)

    def register(self, call: NamedCall, was_within: bool) -> None:
        """Remembers which of autograd's nodes a call of forward has made, if it has made one: the
        first call that finds a new one is the one that it belongs to.
        """
        newest = _next_sequence() - 1
        is_new = newest > self._local.sequence
        self._local.sequence = newest
        if not is_new or newest <= self._oldest:
            return
        forward = Forward(call.name, call.node, was_within)
        if self._local.is_first:
            self._forwards[newest] = forward
        else:
            # Each thread counts its own nodes: a recompute on a device's thread takes nobody's
            # place.
            self._forwards.setdefault(newest, forward)
