"""Process-wide observers, and class-level patches of methods that torch has no hooks for."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Callable, Generic, Optional, TypeVar

T = TypeVar("T")


class Listeners(Generic[T]):
    """Objects that receive process-wide notifications, held weakly. ``begin`` is called when the
    first of them connects, with a stack that is closed when the last is gone.
    """

    def __init__(self, begin: Callable[[ExitStack], object] = lambda at_end: None) -> None:
        self._begin = begin
        self._at_end = ExitStack()
        #: References to the listeners; some may be gone.
        self.references: tuple[weakref.ref[T], ...] = ()
        self._has_begun = False
        # Reentrant: the garbage collector may call _release() in the middle of anything.
        self._lock = threading.RLock()

    def __iter__(self) -> Iterator[T]:
        alive = []
        for reference in self.references:
            listener = reference()
            if listener is not None:
                alive.append(listener)
        return iter(alive)

    def connect(self, listener: T) -> None:
        """Adds ``listener`` until disconnect() or until it is freed."""
        with self._lock:
            self.references = (*self._others(listener), weakref.ref(listener))
            if not self._has_begun:
                self._has_begun = True
                self._begin(self._at_end)
        # A monitor whose model was deleted goes without remove().
        weakref.finalize(listener, self._release)

    def disconnect(self, listener: T) -> None:
        """The opposite of connect(); does nothing the second time."""
        with self._lock:
            self.references = self._others(listener)
        self._release()

    def _others(self, listener: T) -> tuple[weakref.ref[T], ...]:
        """The references to all that are alive but this."""
        pairs = ((ref, ref()) for ref in self.references)
        return tuple(ref for ref, other in pairs if other is not None and other is not listener)

    def _release(self) -> None:
        with self._lock:
            if any(True for _ in self) or not self._has_begun:
                return
            self._has_begun = False  # first: the collector may call this again in its middle
            self._at_end.close()


def wrap_method(
    at_end: ExitStack,
    kind: Any,
    name: str,
    wrap: Callable[[Callable[..., Any]], Any],
    *,
    is_inherited: bool = False,
) -> None:
    """Replaces a method of a class of torch's, or a function of a module, by a wrapper, until
    ``at_end`` is closed; one that ``kind`` does not define itself only if it ``is_inherited``.
    """
    own = vars(kind).get(name)
    original = getattr(kind, name) if is_inherited else own
    if original is not None and not hasattr(original, "_fastcheck"):
        wrapper = wrap(original)
        # Marks this wrapper, to distinguish it from the original and from others.
        wrapper._fastcheck = True
        setattr(kind, name, wrapper)
        at_end.callback(_put_back, kind, name, own)


def _put_back(kind: Any, name: str, own: Optional[Callable[..., Any]]) -> None:
    """``own``: None where the class has inherited it."""
    # Another wrapper may have been put around this wrapper: then both stay in place.
    if getattr(vars(kind).get(name), "_fastcheck", False):
        if own is None:
            delattr(kind, name)
        else:
            setattr(kind, name, own)
