"""Backwards: which threads train the models of a session, and their backward passes.

A process may train several models, each on a thread of its own; begin and end of a backward pass
belong to the thread that calls it. A gradient can't be looked at from another thread: autograd's
engine writes ``.grad`` without the interpreter's lock, and ``p.grad = None`` lets go of a gradient
before ``.grad`` is None, so a reference that is taken meanwhile is one to a tensor that is freed.
"""

from __future__ import annotations

from threading import Thread, current_thread
from typing import Optional


class Backward:
    """A call of backward() that is, or may be, about the session's models."""

    __slots__ = ("is_alone",)

    def __init__(self, is_alone: bool) -> None:
        #: No other one was under way at any time: the gradients that have come are from this one.
        self.is_alone = is_alone


class Backwards:
    """Every method expects the session's lock to be held. A backward() that begins on another
    thread waits for it, so what is answered holds as long as the lock is held.
    """

    def __init__(self) -> None:
        # In the last step in which any did.
        self._callers: set[Thread] = set()
        self._called_in = -1
        self._trainers: set[Thread] = set()
        self._under_way: dict[Thread, Backward] = {}

    def called(self, step: int) -> None:
        """This thread calls a model, in the step of this index."""
        if step != self._called_in:
            self._called_in = step
            self._callers.clear()
        self._callers.add(current_thread())

    @property
    def is_foreign(self) -> bool:
        """Whether only other threads call the models: what this one does is about others, unless
        a graph shows that it is not.
        """
        return bool(self._callers) and current_thread() not in self._callers

    @property
    def owns_gradients(self) -> bool:
        """Whether this thread may look at the gradients of the models: no other one trains them."""
        if len(self._trainers) > 1:
            self._trainers = {thread for thread in self._trainers if thread.is_alive()}
        return self._trainers <= {current_thread()}

    def began(self, is_ours: bool) -> bool:
        """This thread begins one. ``is_ours``: its graph leads to parameters of the models. Whether
        it may be about them.
        """
        thread = current_thread()
        self._under_way.pop(thread, None)
        if not is_ours and thread not in self._callers:
            return False
        self._trainers.add(thread)
        for other in self._under_way.values():
            other.is_alone = False
        self._under_way[thread] = Backward(is_alone=not self._under_way)
        return True

    def ended(self) -> Optional[Backward]:
        """This thread's is over, by an exception or not. None: it was about other models."""
        return self._under_way.pop(current_thread(), None)
