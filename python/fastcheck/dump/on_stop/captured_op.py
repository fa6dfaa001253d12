"""Operator calls with non-finite tensors, kept until the culprit is known."""

from __future__ import annotations

from collections import deque
from typing import Any, Callable, Optional

import torch
from torch.utils._pytree import tree_map_only

from fastcheck.extension import extension
from fastcheck.utils.torch.operators import OpInfo, inputs_of, op_info, outputs_of
from fastcheck.utils.torch.own_operators import unread
from fastcheck.utils.torch.training_state import Generators

#: Most bytes of copies that wait for a verdict. A call that is judged at once is not copied.
_KEPT_BYTES = 256 * 1024 * 1024


class CapturedOp:
    """A call. After finish(), ``args`` and ``kwargs`` hold its inputs as they were before it ran,
    and ``made`` the tensors that it wrote and returned.
    """

    def __init__(self, func: Any, info: OpInfo, args: Any, kwargs: Any, first_seq: int) -> None:
        self.func, self.info, self.args, self.kwargs = func, info, args, kwargs
        self.first_seq = self.end_seq = first_seq
        self.made: list[torch.Tensor] = []
        self.generators: Optional[Generators] = None
        self._before: dict[int, torch.Tensor] = {}

    def keep_what_changes(self) -> None:
        """Copies, before the call runs, the inputs that it overwrites and the random generators."""
        for place, _, tensor in inputs_of(self.info, self.args, self.kwargs):
            if place in self.info.written:
                self._before[id(tensor)] = tensor.detach().clone()
        if self.info.is_random:
            self.generators = Generators()

    def finish(self, result: Any, end_seq: int) -> None:
        """Keeps the result, after the call has run."""
        self.end_seq = end_seq
        self.made = outputs_of(self.info, self.args, self.kwargs, result)
        self._replace(lambda tensor: self._before.get(id(tensor), tensor))
        if self.generators is None:
            self.generators = Generators()

    def freeze(self) -> int:
        """Copies all tensors, so that later writes change nothing here; returns the bytes it
        takes.
        """
        known = {id(tensor): tensor for tensor in self._before.values()}

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            clone = known.get(id(tensor))
            if clone is None:
                clone = known[id(tensor)] = tensor.detach().clone()
            return clone

        self._replace(copy)
        self.made = [tensor.detach().clone() for tensor in self.made]
        self._before.clear()
        held = [t for _, _, t in inputs_of(self.info, self.args, self.kwargs)]
        return sum(t.numel() * t.element_size() for t in (*held, *self.made))

    def _replace(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.args, self.kwargs = tree_map_only(torch.Tensor, function, (self.args, self.kwargs))


class OpCaptures:
    """The mode of ``sync="call"`` passes every call here. Never raises; lost calls are counted."""

    def __init__(self) -> None:
        self.lost_count = 0
        self._observer = extension.op_observer()
        self._current: Optional[CapturedOp] = None
        self._kept: deque[tuple[CapturedOp, int]] = deque()
        self._bytes = 0

    def begin(self, func: Any, args: Any, kwargs: Any) -> Optional[CapturedOp]:
        """Captures the arguments of a call before it runs; None where it can't be captured."""
        if not isinstance(func, torch._ops.OpOverload):
            return None
        try:
            call = CapturedOp(func, op_info(func), args, kwargs, self._observer.next_seq())
            if call.info.written or call.info.is_random:
                with unread():
                    call.keep_what_changes()
            return call
        except Exception:  # out of memory, say: the operator itself may yet run
            self.lost_count += 1
            return None

    def end(self, call: Optional[CapturedOp], result: Any) -> None:
        """Keeps a call that has something non-finite, after it has run; the verdict follows."""
        self._current = None
        if call is None:
            return
        try:
            with unread():
                call.finish(result, self._observer.next_seq())
            self._current = call
        except Exception:
            self.lost_count += 1

    def keep(self) -> None:
        """Copies the call that awaits a verdict, within the limit of bytes, because the run
        continues.
        """
        call, self._current = self._current, None
        if call is None:
            return
        try:
            with unread():
                size = call.freeze()
        except Exception:
            self.lost_count += 1
            return
        self._kept.append((call, size))
        self._bytes += size
        while self._bytes > _KEPT_BYTES:
            self._bytes -= self._kept.popleft()[1]
            self.lost_count += 1

    def find(self, seq: int) -> Optional[CapturedOp]:
        """The call whose tensors have the record of this number."""
        calls = (*(call for call, _ in self._kept), self._current)
        for call in reversed(calls):
            if call is not None and call.first_seq <= seq < call.end_seq:
                return call
        return None

    def clear(self) -> None:
        """Drops all calls."""
        self._current = None
        self._kept.clear()
        self._bytes = 0
