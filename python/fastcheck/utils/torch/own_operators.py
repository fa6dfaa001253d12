"""Marks the operators that fastcheck itself runs, so that no mode of fastcheck observes them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from fastcheck.extension import status

__all__ = ["is_unobserved", "unobserved"]


class _Unobserved(threading.local):
    depth = 0


_unobserved = _Unobserved()


def is_unobserved() -> bool:
    """Whether this thread is within unobserved()."""
    return _unobserved.depth > 0


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Operators within this context are observed by no dump, no other mode and no monitor."""
    observer = None if status.module is None else status.module.op_observer()
    is_watched = observer is not None and observer.run() != 0
    _unobserved.depth += 1
    try:
        with contextlib.ExitStack() as stack:
            if torch._C._len_torch_dispatch_stack():
                from torch.utils._python_dispatch import _disable_current_modes

                stack.enter_context(_disable_current_modes())
            if is_watched and observer is not None:
                observer.pause(1)
                stack.callback(observer.pause, -1)
            yield
    finally:
        _unobserved.depth -= 1
