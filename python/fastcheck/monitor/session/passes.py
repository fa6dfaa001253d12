"""The passes of a session. Calls of models from outside are held with their arguments until their
step is over: one of them may be run again, to find the operator that made the numbers of a stop.
Backward passes are tracked by the thread in which they run.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from threading import Thread, current_thread, local
from typing import Any, NamedTuple, Optional

import torch

from fastcheck.calls.module_calls import Call, ModuleNode
from fastcheck.utils.torch.frames import frames
from fastcheck.utils.torch.own_operators import unobserved
from fastcheck.utils.torch.readable import can_read, has_values
from fastcheck.utils.torch.versions import autocast_dtype

from .derivatives import Derivatives

# Beside the last call.
_MOST = 7
_MOST_BYTES = 64 << 20
# Arguments that were computed would be freed by backward.
_MOST_COMPUTED_BYTES = 16 << 20
# Limits of the buffers of a model together: comparing more would be felt in a small forward pass.
_MOST_BUFFERS = 64
_MOST_BUFFER_BYTES = 64 << 10

#: A module, the name of a buffer of its own, and a copy of this.
BufferCopy = tuple["weakref.ref[torch.nn.Module]", str, torch.Tensor]


class Pass(NamedTuple):
    """``generator``: the state of torch's generator of the host when the call began. ``autocast``:
    the kind of device, and the dtype (empty: it was off). ``buffers``: as they were then.
    """

    step: int
    call: Call
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    generator: Optional[torch.Tensor]
    autocast: tuple[str, str]
    nbytes: int
    buffers: Sequence[BufferCopy]


class _OwnBuffer:
    """A small buffer in host memory of a program's own module (one of torch.nn does not read in
    training what it writes), with the copy that was made last.
    """

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        self._module, self._name = weakref.ref(module), name
        self._copy: Optional[torch.Tensor] = None

    def _buffer(self) -> Optional[torch.Tensor]:
        module = self._module()
        buffer = None if module is None else module._buffers.get(self._name)
        return buffer if type(buffer) is torch.Tensor else None

    def size(self) -> int:
        buffer = self._buffer()
        return 0 if buffer is None else buffer.numel() * buffer.element_size()

    def copied(self, most: int) -> Optional[BufferCopy]:
        """A copy of it as it is; None: it can't be read, or has more than ``most`` bytes."""
        buffer = self._buffer()
        if buffer is None or not buffer.is_cpu or not can_read(buffer) or buffer.nbytes > most:
            return None
        if buffer.is_inference() or not has_values(buffer):
            return None
        # Compared by its values: no version tells of what is written through .data.
        copy = self._copy
        if copy is None or copy.dtype != buffer.dtype or not torch.equal(copy, buffer):
            copy = self._copy = buffer.detach().clone()
        return self._module, self._name, copy


class Passes:
    """The calls of a session's models from outside, held until their step is over. Every method
    expects its lock to be held.
    """

    def __init__(self) -> None:
        #: torch's generator of the host, as the last pass has begun with it.
        self.generator: Optional[torch.Tensor] = None
        #: The passes in memory, oldest first.
        self.held: list[Pass] = []
        self._buffers: dict[ModuleNode, list[_OwnBuffer]] = {}
        #: Passes that begin now are not read (``Session.pause()``).
        self.are_paused = False

    def hold(
        self,
        step: int,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[tuple[str, torch.Tensor]],
    ) -> None:
        """``call`` has begun, with ``tensors`` among its arguments, each with its label."""
        nbytes, are_computed = 0, False
        for _, tensor in tensors:
            nbytes += tensor.numel() * tensor.element_size()
            are_computed = are_computed or tensor.grad_fn is not None
        if are_computed:
            if nbytes > _MOST_COMPUTED_BYTES or not all(map(_is_simple, (*args, *kwargs.values()))):
                return
            args = tuple(map(_without_graph, args))
            kwargs = {name: _without_graph(value) for name, value in kwargs.items()}
        # torch makes a text for device.type each time.
        is_host = not tensors or tensors[0][1].is_cpu
        kind = "cpu" if is_host else tensors[0][1].device.type
        autocast = kind, autocast_dtype(kind)
        buffers = self._own_buffers(call.node)
        size = sum([entry.nbytes for entry in self.held]) if self.held else 0
        while self.held and (len(self.held) > _MOST or size > _MOST_BYTES):
            size -= self.held.pop(0).nbytes
        self.held.append(Pass(step, call, args, kwargs, self.generator, autocast, nbytes, buffers))

    def _own_buffers(self, node: ModuleNode) -> Sequence[BufferCopy]:
        """Copies of the smallest buffers that the module and its submodules hold now. Of all passes
        they are half a megabyte at most, which does not count as bytes of a pass.
        """
        known, module = self._buffers.get(node), node.module()
        if known is None:
            if module is None:
                return ()
            own = (m for m in module.modules() if not type(m).__module__.startswith("torch."))
            buffers = [_OwnBuffer(m, name) for m in own for name in m._buffers]
            known = self._buffers[node] = sorted(buffers, key=_OwnBuffer.size)[:_MOST_BUFFERS]
        if not known:
            return ()
        copies, left = [], _MOST_BUFFER_BYTES
        with unobserved():
            for buffer in known:
                copy = buffer.copied(left)
                if copy is not None:
                    copies.append(copy)
                    left -= copy[2].nbytes
        return copies

    def drop_before(self, step: int) -> None:
        """Releases the passes of earlier steps."""
        while self.held and self.held[0].step < step:
            del self.held[0]


def _is_simple(value: Any) -> bool:
    return value is None or isinstance(value, (torch.Tensor, bool, int, float, str))


def _without_graph(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.grad_fn is None:
        return value
    with unobserved():
        return value.detach().requires_grad_()


_PIPELINING = "torch.distributed.pipelining.stage"
# Functions of torch 2.5 to 2.12, and of later releases.
_FUNCTIONS = frozenset(
    ("_shape_inference", "_forward_metadata_inference", "_backward_metadata_inference")
)


def is_dry_run() -> bool:
    """True if this thread is within a pipeline stage's inference of shapes."""
    if _PIPELINING not in sys.modules:
        return False
    return any(
        frame.f_code.co_name in _FUNCTIONS and frame.f_globals.get("__name__") == _PIPELINING
        for frame in frames()
    )


class _Running(local):
    """The running thread: current_thread() is several lines of Python, and asked for often."""

    def __init__(self) -> None:
        self.thread = current_thread()


_running = _Running()


class Backwards:
    """Tracks the backward passes under way, by thread. Every method expects the session's lock to
    be held. A backward() that begins on another thread waits for it, so what is answered holds as
    long as the lock is held.
    """

    def __init__(self) -> None:
        # The threads of the last step in which there were any.
        self._callers: set[Thread] = set()
        self._called_in = -1
        self._trainers: set[Thread] = set()
        # The tensors that each pass was called on. Their graph is whole until it runs.
        self._under_way: dict[Thread, Sequence[torch.Tensor]] = {}
        # The threads whose pass was under way while another's was.
        self._together: set[Thread] = set()
        #: True if there was any, of whatever model.
        self.has_begun = False
        #: The values that are kept of the graphs of this step.
        self.derivatives = Derivatives()

    def called(self, step: int) -> None:
        """Notes that this thread calls a model, in the step of this index."""
        if step != self._called_in:
            self._called_in, self._callers = step, set()
        self._callers.add(_running.thread)

    @property
    def is_foreign(self) -> bool:
        """True if only other threads call the models: what this thread does is about others, unless
        a graph shows that it is not.
        """
        return bool(self._callers) and _running.thread not in self._callers

    @property
    def owns_gradients(self) -> bool:
        """True if this thread may look at the gradients of the models: no other thread trains
        them.
        """
        own = {_running.thread}
        if not self._trainers <= own and len(self._trainers) > 1:
            self._trainers = {thread for thread in self._trainers if thread.is_alive()}
        return self._trainers <= own

    @property
    def roots(self) -> Sequence[torch.Tensor]:
        """The tensors that this thread's backward is called on; empty where none is under way."""
        return self._under_way.get(_running.thread, ())

    def began(self, is_ours: bool, roots: Sequence[torch.Tensor]) -> bool:
        """Notes that this thread begins a backward on ``roots``. ``is_ours``: its graph leads to
        parameters of the models. Returns whether it may be about them.
        """
        thread = _running.thread
        self.has_begun = True
        self._under_way.pop(thread, None)
        self._together.discard(thread)
        if not is_ours and thread not in self._callers:
            return False
        self._trainers.add(thread)
        self._under_way[thread] = roots
        if len(self._under_way) > 1:
            self._together.update(self._under_way)
        return True

    def ended(self) -> Optional[bool]:
        """Takes off the backward of this thread, which is over, by an exception or not. Whether it
        was alone: the gradients that have come are from it. None: it was about other models.
        """
        thread = _running.thread
        if self._under_way.pop(thread, None) is None:
            return None
        is_alone = thread not in self._together
        self._together.discard(thread)
        return is_alone
