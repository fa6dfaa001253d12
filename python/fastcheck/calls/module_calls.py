"""The module calls of a step, and which call read or made each tensor.

The *seq* of a tensor is the sequence number of the record in which it was first read, and names the
tensor for the rest of the step. Calls hold such numbers, never tensors or modules, so that nothing
is kept alive.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any, Callable, Optional, Protocol

import torch
from torch.nn.modules.batchnorm import _NormBase

from fastcheck.extension import status
from fastcheck.record.site import Site, SiteTable

# Enough for a step of a thousand modules and 64 micro-batches; older calls only cost a less exact
# reason.
MAX_CALLS = 65536

_DIRECTIONS = {
    "input": "forward",
    "output": "forward",
    "grad_input": "backward",
    "grad_output": "backward",
    "param": "optimizer",
    "param_grad": "optimizer",
    "buffer": "optimizer",
    "optimizer_state": "optimizer",
    "skipped_update": "optimizer",
}


class CallCounter:
    """Numbers the calls of one module within a step."""

    def __init__(self) -> None:
        self.total = 0
        #: The module is not observed any longer.
        self.is_off = False
        self._step = -1
        self._calls = 0
        self._not_recomputed: list[int] = []

    def next_call(self, step: int) -> int:
        """The index of this call of the module in this step."""
        if self._step != step:
            self._step = step
            self._calls = 0
            self._not_recomputed.clear()
        index = self._calls
        self._calls = index + 1
        self.total += 1
        self._not_recomputed.append(index)
        return index

    def recomputed_call(self, step: int) -> Optional[int]:
        """The index of the call that a recompute repeats: backward goes through them last call
        first.

        None when the module was not called before in this step: then it is no recompute.
        """
        if self._step != step or not self._calls:
            return None
        return self._not_recomputed.pop() if self._not_recomputed else self._calls - 1


class ModuleNode:
    """An observed module: its path and type, its sites, and how often it was called."""

    def __init__(
        self, path: str, module: torch.nn.Module, sites: SiteTable, *, is_primary: bool
    ) -> None:
        self.path = path
        self.type_name = type(module).__name__
        self.name = path or self.type_name
        self.module = weakref.ref(module)
        # The first model given to install(): what enters it without a history is the batch.
        self.is_primary = is_primary
        # One of those given to install().
        self.is_root = is_primary
        # A clause on what an outermost call has returned.
        self.returned_it = f"{'the model' if is_primary else self.name} returned it"
        # Nearly all softmax modules of models in the wild carry the word in their class name.
        self.is_softmax_like = "softmax" in self.type_name.lower()
        # The module's forward writes running statistics.
        self.has_statistics = isinstance(module, _NormBase)
        # The module's forward takes in what other ranks compute.
        self.is_collective = isinstance(module, torch.nn.SyncBatchNorm)
        # It was called by compiled code.
        self.ran_compiled = False
        self.has_excluded_parts = False
        # Something in it was put in later, and has no hooks.
        self.has_new_parts = False
        # Excluded modules have nodes too at op level, so that the operators in them are recognised.
        self.is_selected = True
        self.enabled = True
        # A ModuleList is never called; summary() does not list it as unused.
        forward = getattr(module.forward, "__func__", None)
        self.is_callable = forward is not torch.nn.Module.forward
        self._sites = sites
        # The numbers of its sites: of each role by label.
        self.numbers: dict[str, dict[str, int]] = {role: {} for role in _DIRECTIONS}
        self.input_sites, self.output_sites = self.numbers["input"], self.numbers["output"]
        self.counter = new_counter()
        self.next_call = self.counter.next_call
        self.recomputed_call = self.counter.recomputed_call

    def name_of(self, tensor: str) -> str:
        """The key in a state_dict of a tensor that the module holds under this name."""
        return f"{self.path}.{tensor}" if self.path else tensor

    def switch_off(self) -> None:
        """Ends the observation of the module."""
        self.enabled = False
        # Tells the C++ path of its hooks. The node has no reference to that: a Call has a reference
        # to the node, and is not seen by the garbage collector, so what refers to calls would stay.
        self.counter.is_off = True

    @property
    def total_calls(self) -> int:
        return self.counter.total

    def site(self, role: str, label: str, index: int) -> int:
        """The number of one of this module's sites."""
        numbers = self.numbers[role]
        number = numbers.get(label)
        if number is None:
            site = Site(self.path, self.type_name, _DIRECTIONS[role], role, index, label)
            number = numbers[label] = self._sites.intern(site)
        return number

    def part_site(self, role: str, label: str) -> int:
        """The number of the site of this rank's part of a tensor. It and that of site() may be read
        in one step: the gradient that backward() has left, and what a sharding optimizer makes of
        it.
        """
        numbers = self.numbers.setdefault(f"part of {role}", {})
        number = numbers.get(label)
        if number is None:
            site = Site(self.path, self.type_name, _DIRECTIONS[role], role, 1, label)
            number = numbers[label] = self._sites.intern(site)
        return number


class Call:
    """A call of one module: the seqs of its inputs and outputs, and its parent call."""

    __slots__ = (
        "depth",
        "first_seq",
        "index",
        "input_sites",
        "inputs",
        "is_complete",
        "is_recompute",
        "node",
        "outputs",
        "outputs_seq",
        "parent",
        "thread",
        "watched",
    )

    def __init__(
        self,
        node: ModuleNode,
        index: int,
        parent: Optional[Call],
        thread: int,
        first_seq: int,
        is_recompute: bool,
    ) -> None:
        self.node = node
        self.index = index
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.thread = thread
        # The next sequence number when the call began: what has it or a later number was made
        # inside.
        self.first_seq = first_seq
        # The next number when its outputs began to be read, and whether all of them were, where the
        # recorder did it.
        self.outputs_seq = first_seq
        self.is_complete = False
        self.is_recompute = is_recompute
        self.inputs: list[int] = []
        self.input_sites: list[int] = []
        self.outputs: list[int] = []
        # Set where the call runs compiled: the sites and seqs of the tensors whose gradients will
        # come, by role and label.
        self.watched: Optional[dict[tuple[str, str], tuple[int, int]]] = None

    def add_input(self, seq: int, site: int) -> None:
        self.inputs.append(seq)
        self.input_sites.append(site)

    def add_output(self, seq: int) -> None:
        self.outputs.append(seq)


# The extension's twins of the two (csrc/torch/hooks/call.h), which its recorder fills in too.
_module: Any = status.module
#: Call(node, index, parent, thread, first_seq, is_recompute), of whichever class.
new_call: Callable[..., Call] = Call if _module is None else _module.Call
new_counter: Callable[[], CallCounter] = CallCounter if _module is None else _module.CallCounter


def outermost_of(call: Call) -> Call:
    """The call from outside in which this call lies, or this call itself."""
    while call.parent is not None:
        call = call.parent
    return call


class CallLog(deque[Call]):
    """The calls of one step, in the order in which they began, whose outputs are filled in when
    they end; searched only once something is wrong, perhaps by the drain's thread while the next
    call begins.
    """

    def forget_from(self, length: int) -> None:
        """Drops the calls after the first ``length``, which no backward pass will reach."""
        while len(self) > length:
            self.pop()

    def consumers(self, seq: int) -> list[Call]:
        """The calls that read the tensor and did not return it, outermost first."""
        calls = [
            call
            for call in list(self)
            if seq in call.inputs and seq not in call.outputs and not call.is_recompute
        ]
        return sorted(calls, key=lambda call: call.depth)

    def producer(self, seq: int) -> Optional[Call]:
        """The innermost call that returned the tensor and did not read it."""
        calls = [
            call
            for call in list(self)
            if seq in call.outputs and seq not in call.inputs and not call.is_recompute
        ]
        return max(calls, key=lambda call: call.depth, default=None)


class ModuleRecorder(Protocol):
    """The C++ fast path of one module. False: nothing was recorded, and the ModuleObserver records
    the call; always once ``node.counter.is_off``. Raises a stop that is due.
    """

    def enter(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], /) -> bool: ...

    def leave(self, output: Any, /) -> bool: ...
