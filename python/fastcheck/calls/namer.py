"""Names the operators of a block, by a mode of torch's dispatcher.

The mode sees the operators of the thread that entered it, and of backward wherever that runs:
autograd hands its thread's modes on to the threads of devices. Other threads of the program are not
seen.

Names are those of ``install(level="op")``: an operator of backward has the name of its operator in
the forward pass, found by the sequence number of autograd's node.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, NamedTuple, Optional

import torch

from fastcheck.record.site import OUTSIDE

from .modes import ApiCalls
from .module_calls import ModuleNode
from .selection import CallName
from .tracker import ModuleTracker

_current_node: Any = getattr(torch._C, "_current_autograd_node", lambda: None)
_next_sequence: Any = getattr(torch.autograd, "_get_sequence_nr", lambda: 0)
# torch.utils.checkpoint sets saved-tensor hooks where it runs a function again.
_saved_tensor_hooks: Any = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore: None
)


def recomputes() -> bool:
    """True if a checkpointed function is run again, within backward."""
    return torch.is_grad_enabled() and _saved_tensor_hooks(True) is not None


class Forward:
    """A call of the forward pass, for the names of its backward."""

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


class _CurrentSequence(threading.local):
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
        self._local = _CurrentSequence()
        # Nodes that exist already belong to calls before the block.
        self._oldest = self._local.sequence = _next_sequence() - 1
        self._local.is_first = True

    def name(self, op: str) -> NamedCall:
        """The name of the call that is about to run."""
        node, is_repeated, is_in_optimizer = self._tracker.current
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
            name = forward.name._replace(direction="backward", ran=op)
        else:
            path = OUTSIDE if node is None else node.path
            name = CallName(op, path, number, direction, api, api_call)
        return NamedCall(name, node, forward, is_recompute)

    def register(self, call: NamedCall, was_within: bool) -> None:
        """Remembers the autograd node that a call of the forward pass created, if it did: a new
        node belongs to the first call that finds it.
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
            # Each thread counts its own nodes: a recompute on a device's thread replaces no entry.
            self._forwards.setdefault(newest, forward)
