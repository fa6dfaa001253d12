"""Calls of operators that met something non-finite, kept with what they read and made until it is
known whether one of them is to blame. For ``level="op"`` with ``sync="call"``.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any, Callable, Optional

import torch

from .._extension import extension
from .._snapshot import Generators
from .arguments import inputs_of, outputs_of, replaced
from .op_info import OpInfo, op_info

__all__ = ["CapturedOp", "OpCaptures"]

#: Of copies that wait for a verdict. The call that is judged at once is kept without a copy.
_KEPT_BYTES = 256 * 1024 * 1024


class CapturedOp:
    """One call. After taken(), ``args`` and ``kwargs`` hold what it read, as it was then, and
    ``made`` what it has written and returned.
    """

    def __init__(self, func: Any, info: OpInfo, args: Any, kwargs: Any, first_seq: int) -> None:
        self.func = func
        self.info = info
        self.args = args
        self.kwargs = kwargs
        self.first_seq = self.end_seq = first_seq
        self.made: list[torch.Tensor] = []
        self.generators: Optional[Generators] = None
        self._before: dict[int, torch.Tensor] = {}

    def keep_what_changes(self) -> None:
        """Before it runs: what it writes over, and the random numbers that it draws."""
        for place, _, tensor in inputs_of(self.info, self.args, self.kwargs):
            if place in self.info.written:
                self._before[id(tensor)] = tensor.detach().clone()
        if self.info.is_random:
            self.generators = Generators()

    def taken(self, result: Any, end_seq: int) -> None:
        """It has run."""
        self.end_seq = end_seq
        self.made = outputs_of(self.info, self.args, self.kwargs, result)
        self._replace(lambda tensor: self._before.get(id(tensor), tensor))
        if self.generators is None:
            self.generators = Generators()

    def freeze(self) -> int:
        """From now on what others write changes nothing here; the bytes that this takes."""
        known = {id(tensor): tensor for tensor in self._before.values()}

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            found = known.get(id(tensor))
            if found is None:
                found = known[id(tensor)] = tensor.detach().clone()
            return found

        self._replace(copy)
        self.made = [tensor.detach().clone() for tensor in self.made]
        self._before.clear()
        held = [t for _, _, t in inputs_of(self.info, self.args, self.kwargs)]
        return sum(t.numel() * t.element_size() for t in (*held, *self.made))

    def _replace(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.args = replaced(self.args, function)
        self.kwargs = replaced(self.kwargs, function)


class OpCaptures:
    """Told of every call by the mode of ``sync="call"``. Never raises: what is lost is counted."""

    def __init__(self) -> None:
        self.lost_count = 0
        self._observer = extension.op_observer()
        self._current: Optional[CapturedOp] = None
        self._kept: deque[tuple[CapturedOp, int]] = deque()
        self._bytes = 0

    def begin(self, func: Any, args: Any, kwargs: Any) -> Optional[CapturedOp]:
        """A call is about to run."""
        if not isinstance(func, torch._ops.OpOverload):
            return None
        try:
            call = CapturedOp(func, op_info(func), args, kwargs, self._observer.next_seq())
            if call.info.written or call.info.is_random:
                with self._unread():
                    call.keep_what_changes()
            return call
        except Exception:  # out of memory, say: the operator itself may yet run
            self.lost_count += 1
            return None

    def end(self, call: Optional[CapturedOp], result: Any) -> None:
        """It has met something non-finite; the verdict comes next."""
        self._current = None
        if call is None:
            return
        try:
            with self._unread():
                call.taken(result, self._observer.next_seq())
            self._current = call
        except Exception:
            self.lost_count += 1

    def keep(self) -> None:
        """The run goes on: what was held until the verdict is copied, within bounds."""
        call, self._current = self._current, None
        if call is None:
            return
        try:
            with self._unread():
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
        """The call in which the record of this number was read."""
        calls = [call for call, _ in self._kept]
        if self._current is not None:
            calls.append(self._current)
        for call in reversed(calls):
            if call.first_seq <= seq < call.end_seq:
                return call
        return None

    def clear(self) -> None:
        """The verdict was carried out."""
        self._current = None
        self._kept.clear()
        self._bytes = 0

    @contextlib.contextmanager
    def _unread(self) -> Iterator[None]:
        """The observer, which numbers the records, reads nothing within it."""
        self._observer.pause(1)
        try:
            yield
        finally:
            self._observer.pause(-1)
