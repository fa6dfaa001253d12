"""States of a thread within which fastcheck runs operators of its own.

The compiled states are entered and left in one piece. A state in Python can be interrupted (Ctrl-C)
between its change and the ``with`` statement, which then undoes nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Callable

import torch

from fastcheck.extension import status

_State = Callable[[], contextlib.AbstractContextManager[Any]]


class _Unobserved(threading.local):
    depth = 0


_unobserved = _Unobserved()


@contextlib.contextmanager
def _portable() -> Iterator[None]:
    from torch.utils._python_dispatch import _disable_current_modes

    try:
        _unobserved.depth += 1
        if torch._C._len_torch_dispatch_stack():
            with _disable_current_modes():
                yield
        else:
            yield
    finally:
        _unobserved.depth -= 1


#: Operators within it are observed by no dump, no other mode and no monitor.
unobserved: _State
#: Operators within it are left out at op level alone.
unread: _State
#: torch.no_grad
no_grad: _State
#: True if this thread is within unobserved().
is_unobserved: Callable[[], bool]

if status.module is not None:
    unobserved, unread = status.module.Unobserved, status.module.Unread
    no_grad, is_unobserved = status.module.NoGrad, status.module.is_unobserved
else:
    unobserved, unread, no_grad = _portable, contextlib.nullcontext, torch.no_grad

    def is_unobserved() -> bool:
        return _unobserved.depth > 0
